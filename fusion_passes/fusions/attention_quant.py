"""Attention → FP8 quantisation: the attention kernel writes the FP8 codes itself.

    scaled_dot_product_attention → transpose, reshape, contiguous … → saturate(x / scale).to(fp8)
    becomes   fusion_passes::attention_quant → the same views

and the same for the attention with a KV cache (fusions/paged_attention_quant.py).

Saves the attention output's way to memory and back in high precision, and the quantisation kernel.

Rounding: the unfused graph rounds the attention output to bf16 or fp16 before it is quantised; the fused op divides the
fp32 accumulator by the scale and rounds once, to FP8.  Its codes differ from the unfused ones by at most one step, and
are closer to an fp32 reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.fusions.output_quant import OutputQuantMatch, check_static
from fusion_passes.fusions.paged_attention_quant import paged, paged_groups
from fusion_passes.fusions.rule import Rule
from fusion_passes.graph.functional import op_call, op_name
from fusion_passes.graph.match import Call
from fusion_passes.graph.read import (
    CASTS,
    aten,
    calls,
    following_views,
    is_high_precision,
    is_tensor,
    is_view,
    outside_users,
    reading,
    target_name,
    through_views,
    value,
)
from fusion_passes.graph.steps import CLAMPS, DIVISIONS, MULTIPLICATIONS, is_cast, is_exact_cast
from fusion_passes.graph.symbolic import known
from fusion_passes.graph.views import best_layout, replay
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.group_quantize import OPAQUE as DYNAMIC
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.paged_attention import PagedAttention
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.measured.attention_quant import verdict as measured_verdict
from fusion_passes.ops.attention_quant import (
    LAYOUTS,
    MASK_DTYPES,
    OUTPUT_DTYPES,
    AttentionQuantArguments,
    empty_output,
    why_unsupported,
)
from fusion_passes.quant import FP8_DTYPES, dtype_name


@dataclass(frozen=True, eq=False)
class DenseMatch(OutputQuantMatch):
    """`views` lead from the attention's output to the match's output, through and behind the quantisation."""

    attention: Attention
    quantize: Quantize
    views: tuple[Node, ...]

    @property
    def site(self) -> Node:
        """The attention: it tells the layers of a model apart."""
        return self.attention.output

    def check(self) -> None:
        """The kernel must compute what the graph computes: see the sentences."""
        a, q = self.attention, self.quantize
        self.require(
            not a.used_outputs,
            f"the attention's {', '.join(a.used_outputs)} is used too, and the fused op has none",
        )
        query = value(a.query)
        check_static(self, q, query, OUTPUT_DTYPES)
        self.require(
            not (a.is_causal and a.attn_mask is not None), "it is causal and has a mask; the fused op takes one of both"
        )
        key, val = value(a.key), value(a.value)
        # The graph's own attention fails where batch, heads or lengths differ, so what is not known of them is so.
        differ = any(known(x != y) for x, y in zip(key.shape[:3], val.shape[:3], strict=True))
        self.require(
            not differ and known(key.shape[3] == val.shape[3]),
            f"key {list(key.shape)} and value {list(val.shape)} have different shapes",
        )
        mask = None if a.attn_mask is None else value(a.attn_mask)
        if mask is not None:
            self.require(
                mask.dtype in MASK_DTYPES and mask.device == query.device,
                f"the mask is {dtype_name(mask.dtype)} on {mask.device}; the fused op takes "
                f"{', '.join(map(dtype_name, MASK_DTYPES))} on {query.device}",
            )
            scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            fits = (
                known(x == 1) or known(x == y) for x, y in zip(reversed(mask.shape), reversed(scores), strict=False)
            )
            self.require(
                mask.ndim <= 4 and all(fits),
                f"a mask of {list(mask.shape)} is not known to broadcast to {list(scores)}",
            )
        why = why_unsupported(self._arguments())
        self.require(why is None, str(why))

    def check_profit(self) -> None:
        """Where the kernel that would run was measured to beat stock's best attention and quantisation kernels."""
        query = value(self.attention.query)
        self.require(query.is_cuda, f"the fused op has no faster kernel on the {query.device.type.upper()}")
        verdict = measured_verdict(self._arguments())
        self.require(verdict.ratio is not None and verdict.ratio >= 1.0, verdict.why)

    def _arguments(self) -> AttentionQuantArguments:
        """What decides which kernel takes the call."""
        a = self.attention
        mask = None if a.attn_mask is None else value(a.attn_mask)
        tensors = (value(a.query), value(a.key), value(a.value), mask)
        return AttentionQuantArguments(*tensors, is_causal=a.is_causal, scale=a.scale, dtype=self.quantize.dtype)

    def replace(self, call: Call) -> Node:
        """The fused op in the layout that needs the fewest copies, then the views."""
        a, q = self.attention, self.quantize
        codes = call(
            torch.ops.fusion_passes.attention_quant.default,
            a.query,
            a.key,
            a.value,
            a.attn_mask,
            q.scale,
            is_causal=a.is_causal,
            scale=a.scale,
            output_scale_factor=q.scale_factor,
            output_scale_inverse=q.inverse,
            dtype=q.dtype,
            layout=best_layout(LAYOUTS, lambda x, layout: empty_output(x, x.dtype, layout), self.views, a.output),
        )
        return replay(self.views, codes, call)

    def __str__(self) -> str:
        query, key = value(self.attention.query), value(self.attention.key)
        kind = self.attention.mask_kind
        mask = "causal" if self.attention.is_causal else f"{kind} mask" if kind else "full"
        shape = f"{list(query.shape)} x {list(key.shape)}".replace("'", "")
        return f"attention {dtype_name(query.dtype)} {shape}, {mask} -> {dtype_name(self.quantize.dtype)}"


@dataclass(frozen=True)
class AttentionQuant(Rule[OutputQuantMatch]):
    """The output of an attention reaches, through views only, an FP8 quantisation, and nothing else.

    Each kind of attention is a kind of match, which knows what holds for it.
    """

    name = "attention_quant"
    anchor = "attention"
    summary = "attention + FP8 output quantisation: the attention kernel writes FP8"
    ops = ("attention_quant", "paged_attention", "paged_attention_group_quant")

    def pattern(self, idioms: Idioms) -> Iterator[OutputQuantMatch]:
        """Every quantisation whose input is the output of an attention."""
        yield from _dense(idioms)
        yield from paged(idioms)
        yield from paged_groups(idioms)

    def legality(self, m: OutputQuantMatch) -> None:
        """No one else reads the attention's output; then see the kinds of match."""
        for node, user in outside_users(m.nodes, m.outputs):
            m.require(
                not _is_output(node, m.site),
                f"the attention's output {reading(node, user)}: fusing would compute it twice",
            )
        m.check()

    def profitability(self, m: OutputQuantMatch) -> None:
        """See the kinds of match."""
        m.check_profit()

    def replacement(self, m: OutputQuantMatch, call: Call) -> Node | tuple[Node, ...]:
        """See the kinds of match."""
        return m.replace(call)

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Where the output of each attention goes instead."""
        attentions: list[Attention | PagedAttention] = [*idioms.of(Attention), *idioms.of(PagedAttention)]
        for attention in attentions:
            if value(attention.output).dtype in FP8_DTYPES:
                continue
            if (miss := _other_quantisation(attention, idioms)) is None:
                goes = f"the attention's output goes to {_readers(attention.output)}"
                miss = NearMiss(attention.output, self.name, goes)
            yield miss

    def describe(self, m: OutputQuantMatch) -> str:
        """`attention bf16 [1, 32, 8192, 128] x 8 kv heads, causal -> float8_e4m3fn`."""
        return str(m)


def _is_output(node: Node, site: Node) -> bool:
    """True where `node` is the attention's output, behind views and casts."""
    while node is not site and (is_view(node) or is_cast(node)):
        node = node.all_input_nodes[0]
    return node is site


STEPS = frozenset({*CASTS, *DIVISIONS, *MULTIPLICATIONS, *CLAMPS, aten.round.default})
"""What a quantisation consists of, beside views."""


def _other_quantisation(attention: Attention | PagedAttention, idioms: Idioms) -> NearMiss | None:
    """What the fused op does not take of the quantisation that an attention's output reaches, or of the way there: the
    first of it.  None where it reaches none."""
    output = attention.output
    near = {miss.node: miss for miss in idioms.near_misses if miss.what in ("quantize", "group_quantize")}
    before, work = {output: output}, [output]
    while work:
        node = work.pop()
        for user in node.users:
            if user in before or user.op != "call_function":
                continue
            before[user] = node
            if (reason := _obstacle(attention, _way(user, before), idioms, near.get(user))) is not None:
                return NearMiss(output, AttentionQuant.name, f"the attention's output is {reason}", told=user)
            if is_tensor(user) and (is_view(user) or calls(user, *STEPS)):
                work.append(user)
    return None


def _way(node: Node, before: Mapping[Node, Node]) -> list[Node]:
    """The nodes that lead to `node` from where the walk began, which is left out."""
    way: list[Node] = []
    while before[node] is not node:
        way.insert(0, node)
        node = before[node]
    return way


def _obstacle(
    attention: Attention | PagedAttention, way: list[Node], idioms: Idioms, near: NearMiss | None
) -> str | None:
    """Why the quantisation at the end of a way is not fused, in words; None where there is no quantisation."""
    end = way[-1]
    grouped = idioms.at(end, GroupQuantize)
    read = grouped or idioms.at(end, Quantize)
    scales = _dynamic_scales(end, grouped)
    dense = isinstance(attention, Attention)
    integers = is_tensor(end) and value(end).dtype in (torch.int8, torch.uint8)
    if near is None and read is None and scales is None and not integers:
        return None
    steps = [node for node in way if not is_view(node) and not is_exact_cast(node)]
    between = steps[0] if steps else end
    if between is not end and (read is None or between not in read.nodes):
        if is_cast(between) and is_high_precision(between):
            dtype = dtype_name(value(between).dtype)
            return (
                f"rounded to {dtype} before it is quantised; the fused op rounds once: let the attention give {dtype}"
            )
        if read is not None:
            return f"changed by {target_name(between)} ({between.name}) before it is quantised"
    if near is not None and dense and near.what == "group_quantize":
        scales = "scales that are computed from it"
    if scales is not None:
        takes = "one static scale" + ("" if dense else ", or dynamic ones for groups within a head")
        return f"quantised with {scales}; the fused op takes {takes}"
    if near is not None:
        return f"quantised, but not as the fused op does: {near.reason}"
    return f"made {dtype_name(value(end).dtype)}; the fused op writes FP8 only" if integers else None


def _dynamic_scales(node: Node, grouped: GroupQuantize | None) -> str | None:
    """The scales of the dynamic quantisation that `node` ends, in words; None where it ends none."""
    if grouped is not None:
        return f"dynamic per-token or per-group scales, one for each {grouped.group_size} elements"
    if (call := op_call(node, among=(DYNAMIC,))) is not None and call.arguments["granularity"] != "group":
        return f"a dynamic scale per {call.arguments['granularity']}"
    return None


def _readers(node: Node) -> str:
    """Where the output of an attention goes that reaches no quantisation, behind views and casts."""
    while len(node.users) == 1:
        (user,) = node.users
        if not (is_view(user) or calls(user, *CASTS)):
            break
        node = user
    readers = ", ".join(sorted({target_name(user) for user in node.users})) or "nothing"
    names = [op_name(user) for user in node.users if user.op == "call_function"]
    if unknown := sorted({name for name in names if not name.startswith(("aten.", "prims.", "fusion_passes."))}):
        return f"{readers}: the formula of {', '.join(unknown)} is not known"
    return f"{readers}, not to a quantisation"


def _dense(idioms: Idioms) -> Iterator[DenseMatch]:
    """Every static quantisation whose input is the output of an `Attention`."""
    for quantize in idioms.of(Quantize):
        attention, before = _behind_attention(quantize.input, idioms)
        if attention is None:
            continue
        behind = following_views(quantize.output)
        yield DenseMatch(
            output=behind[-1] if behind else quantize.output,
            nodes=attention.nodes | quantize.nodes | {*before, *behind},
            inputs=tuple(n for n in (*attention.inputs, quantize.scale) if n is not None),
            attention=attention,
            quantize=quantize,
            views=(*before, *quantize.views, *behind),
        )


def _behind_attention(node: Node, idioms: Idioms) -> tuple[Attention | None, tuple[Node, ...]]:
    """The attention whose output `node` is through views only, and those views.  Its output may be a view itself: of
    the last matrix product, where it is spelled out."""
    source, views = through_views(node)
    for i, candidate in enumerate((source, *views)):
        if (attention := idioms.at(candidate, Attention)) is not None:
            return attention, views[i:]
    return None, ()
