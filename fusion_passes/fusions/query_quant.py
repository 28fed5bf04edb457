"""The quantization of the query, out of an op that hides it: Inductor then fuses it into what comes before.

    RoPE → paged_attention(query in bf16, q_scale)                    RoPE, saturate(x / scale).to(fp8) in one kernel
    RoPE → an op that quantizes → paged_attention       becomes       → paged_attention(query in FP8)

What comes before is RoPE, a norm of the query, the end of a projection.  Saves a kernel, and the query's way to memory
and back in high precision.

Rounding: the new nodes compute what the op computed, bit for bit.  But in one kernel with what comes before, Inductor
quantizes the fp32 value that it has there, where the op read it rounded to bf16; and it divides in fp32 with an error
of up to 2 units in the last place.  So codes differ from the unfused ones by at most one step, and are closer to an
fp32 reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.fusions.rule import Rule
from fusion_passes.graph.functional import call_by_name, made_by, op_call, op_name
from fusion_passes.graph.match import Call, Match
from fusion_passes.graph.read import (
    aten,
    calls,
    is_contiguous,
    is_high_precision,
    is_tensor,
    prims,
    same_shape,
    target_name,
    through_views,
    value,
)
from fusion_passes.graph.symbolic import known
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.idioms.opaque import OPAQUE, OpaqueOp
from fusion_passes.idioms.paged_attention import PagedAttention
from fusion_passes.measured.query_quant import verdict as measured_verdict
from fusion_passes.quant import FP8_DTYPES, dtype_name, max_value

KNOWN = ("aten.", "prims.", "fusion_passes.")
"""What the name of an op starts with whose results are no secret."""

WITHOUT_TAG = frozenset({aten.cat.default, aten.index.Tensor, aten.constant_pad_nd.default, aten.embedding.default})
"""Ops that Inductor fuses with what reads them, beside the pointwise ones and the reductions, which have a tag."""


@dataclass(frozen=True, eq=False)
class QueryQuantMatch(Match):
    """`query` is quantized by `scale` inside of `by`: an op of its own, or the attention (None)."""

    attention: PagedAttention
    query: Node
    scale: Node
    by: OpaqueOp | None = None
    whole: bool = True
    """False where the op writes its codes to a part of a tensor."""
    unread: str = ""
    """An argument of the op that the table does not speak of, as `name=value`."""

    @property
    def site(self) -> Node:
        """The attention."""
        return self.attention.output


@dataclass(frozen=True)
class QueryQuant(Rule[QueryQuantMatch]):
    """The query of a `PagedAttention` is quantized by the attention itself, or by an op in the table `OPAQUE`."""

    name = "query_quant"
    summary = "query quantization out of the attention op, or of an opaque op: Inductor fuses it with RoPE"

    def pattern(self, idioms: Idioms) -> Iterator[QueryQuantMatch]:
        """Every attention over an FP8 cache with a query that is not FP8, but has a scale; and every opaque
        quantization that its query comes from."""
        found: set[Node] = set()
        for attention in idioms.of(PagedAttention):
            query, scale = attention.query, attention.arguments["q_scale"]
            if value(query).dtype not in FP8_DTYPES:
                if scale is not None:
                    yield QueryQuantMatch(attention.output, attention.nodes, attention.inputs, attention, query, scale)
                continue
            source, _ = through_views(query)
            made = op_call(source, among=OPAQUE)
            if made is None or made.written != OPAQUE[made.name].result or source in found:
                continue
            found.add(source)
            op = OPAQUE[made.name]
            x, by = made.arguments[op.input], made.arguments[op.scale]
            if isinstance(x, Node) and is_tensor(x) and isinstance(by, Node) and is_tensor(by):
                unread = op.unread(made.arguments, made.defaults)
                yield QueryQuantMatch(source, made.nodes, (x, by), attention, x, by, op, made.whole, unread)

    def legality(self, m: QueryQuantMatch) -> None:
        """What the formula of the table speaks of; the attention op has checked its own arguments."""
        query, scale, codes = value(m.query), value(m.scale), value(m.output)
        m.require(scale.dtype is torch.float32, f"the scale is {dtype_name(scale.dtype)}; make it float32")
        m.require(
            known(scale.numel() == 1),
            f"the scale has shape {list(scale.shape)}: not a static per-tensor quantization",
        )
        m.require(
            scale.device == query.device,
            f"the scale is on {scale.device} and the query on {query.device}: make the scale a buffer, "
            "so that .to(device) moves it",
        )
        if m.by is None:
            return
        m.require(not m.unread, f"the op is called with {m.unread}, which is not read")
        m.require(is_high_precision(m.query), f"the query is {dtype_name(query.dtype)}, not bf16, fp16 or fp32")
        m.require(
            m.by.device in (None, query.device.type),
            f"on {query.device.type} the op computes something else than on {m.by.device}",
        )
        m.require(
            m.whole and same_shape(codes.shape, query.shape),
            "the op writes to a part of a tensor, or to one of another shape",
        )

    def profitability(self, m: QueryQuantMatch) -> None:
        """Where there is something to fuse with, and it was measured to be faster."""
        query, source = value(m.query), through_views(m.query)[0]
        m.require(query.is_cuda, f"nobody measured it on the {query.device.type.upper()}")
        origin = target_name(source) if source.op == "call_function" else "an input of the graph"
        m.require(
            _is_generated(source), f"the query comes from {origin}, which Inductor does not fuse a quantization into"
        )
        verdict = measured_verdict(value(m.attention.query), inside=m.by is None)
        m.require(verdict.is_faster, verdict.why)

    def replacement(self, m: QueryQuantMatch, call: Call) -> Node:
        """The quantization in plain torch; where it was in the attention, the attention with FP8 queries."""
        if m.by is not None:
            packed = is_contiguous(value(m.output))
            return _quantized(m.query, m.scale, value(m.output).dtype, m.by, call, packed=packed)
        cache = value(m.attention.arguments["key_cache"])
        codes = _quantized(m.query, m.scale, cache.dtype, OPAQUE["fusion_passes::quantize_fp8"], call, packed=True)
        changed = {"query": codes, "dtype": value(m.output).dtype}
        return call_by_name(call, torch.ops.fusion_passes.paged_attention.default, m.attention.arguments | changed)

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Queries that an op makes of which nobody knows what it computes."""
        for attention in idioms.of(PagedAttention):
            source, _ = through_views(attention.query)
            name = op_name(made_by(source)) if source.op == "call_function" else KNOWN[0]
            if name.replace(".", "::", 1) in OPAQUE:
                continue
            if value(attention.query).dtype in FP8_DTYPES and not name.startswith(KNOWN):
                yield NearMiss(
                    attention.output, self.name, f"the query comes from {name}, of which the formula is not known"
                )

    def describe(self, m: QueryQuantMatch) -> str:
        """`query bfloat16 [256, 32, 128], quantized inside of fusion_passes.quantize_fp8`."""
        query = value(m.query)
        return f"query {dtype_name(query.dtype)} {list(query.shape)}, quantized inside of {op_name(made_by(m.output))}"


def _quantized(x: Node, scale: Node, dtype: torch.dtype, op: OpaqueOp, call: Call, *, packed: bool) -> Node:
    """What `op` makes of x, as ops that Inductor fuses.

    packed: the codes are to be contiguous.  Of strided x, whose strides may be symbolic, torch would otherwise ask
    which is larger, and add a guard."""
    limit = max_value(dtype)
    if packed and not is_contiguous(value(x)):
        x = call(aten.clone.default, x, memory_format=torch.contiguous_format)
    if value(x).dtype is not torch.float32:
        x = call(prims.convert_element_type.default, x, torch.float32)
    if value(scale).ndim:
        scale = call(aten.reshape.default, scale, [])
    if op.multiplies:
        x = call(aten.mul.Tensor, x, call(aten.reciprocal.default, scale))
    else:
        x = call(aten.div.Tensor, x, scale)
    if op.keeps_nan:
        x = call(aten.clamp_max.default, x, limit)
    else:
        x = call(aten.where.ScalarOther, call(aten.le.Scalar, x, limit), x, limit)  # NaN is not <=
    return call(prims.convert_element_type.default, call(aten.clamp_min.default, x, -limit), dtype)


def _is_generated(node: Node) -> bool:
    """True where Inductor generates the code of `node`, so that a pointwise op behind it becomes part of it."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or calls(node, *WITHOUT_TAG)
