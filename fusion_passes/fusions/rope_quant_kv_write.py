"""RoPE of query and key, quantization, and the write to the KV cache: one kernel.

    rope(query) → saturate(x / scale).to(fp8)        rope(key), value → kv_cache_write
    becomes   fusion_passes::rope_quant_kv_write, which writes the caches in place as kv_cache_write does

The query's quantization may be missing: then the rotated query leaves as it does in the graph.  Key and value may be
quantized by the write, or before it.

Saves what Inductor's kernel for the query and the key's way to memory and back cost beside it: one kernel reads the
projection once and writes the codes where they belong.

Rounding: the fused op computes in fp32 and rounds once, to what leaves it.  A graph that is run op by op rounds to bf16
after each step, and reads a key in bf16 for the write; so codes differ from the unfused ones by at most one step where
those have not lost more, and are closer to an fp32 reference.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.fusions.rule import Rule
from fusion_passes.fusions.static_quant import check_static
from fusion_passes.graph.functional import with_same_writes
from fusion_passes.graph.layout import (
    Layout,
    copied_into,
    found_or_added,
    head_dimension,
    is_wide_cast,
    larger_than_one,
    lookups,
    table_arguments,
)
from fusion_passes.graph.match import Call, Match
from fusion_passes.graph.read import (
    following_views,
    is_tensor,
    is_view,
    same_shape,
    target_name,
    through_views,
    value,
)
from fusion_passes.graph.symbolic import known
from fusion_passes.graph.views import cost, replay
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.idioms.kv_cache import KVCacheWrite
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.rope import Rope
from fusion_passes.measured.rope_quant_kv_write import verdict as measured_verdict
from fusion_passes.ops.kv_cache import HIGH_PRECISION_DTYPES
from fusion_passes.ops.kv_cache_write import why_no_kernel
from fusion_passes.quant import dtype_name

OUTPUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Of the query's codes."""
TABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.complex64)
QUANTIZED_WITHIN = 8
"""Steps behind the rotated query in which a quantization that could not be read is looked for."""


@dataclass(frozen=True)
class _Written:
    """A key or value on its way to the write: from `source`, by views and casts (`path`), with a quantization among
    them, or none."""

    source: Node
    path: tuple[Node, ...]
    quantize: Quantize | None

    @property
    def nodes(self) -> frozenset[Node]:
        return frozenset(self.path) | (frozenset() if self.quantize is None else self.quantize.nodes)

    def scale(self, of_write: Node | None) -> Node | None:
        return of_write if self.quantize is None else self.quantize.scale


@dataclass(frozen=True, eq=False)
class RopeWriteMatch(Match):
    """quantize: of the query, and views that lead from the rotated query to the match's output, through and behind
    it.  key, value: what goes into the write, before their own quantizations if they have some."""

    query: Rope
    quantize: Quantize | None
    views: tuple[Node, ...]
    key: _Written
    rope: Rope
    """Of the key."""
    value: _Written
    write: KVCacheWrite
    query_layout: Layout
    key_layout: Layout
    unread: str = ""
    """Why a quantization of the query could not be read."""

    @property
    def site(self) -> Node:
        """The write: it tells the layers of a model apart."""
        return self.write.output

    @property
    def is_copied(self) -> bool:
        """True where the graph has the query in another layout than that in which it leaves the op."""
        return cost(lambda x, _: self.query_layout.like(x), "", self.views, self.query.output)[0]


@dataclass(frozen=True)
class RopeQuantKVWrite(Rule[RopeWriteMatch]):
    """The key of a `KVCacheWrite` is a `Rope`; another one with the same cos and sin is the query's."""

    name = "rope_quant_kv_write"
    anchor = "rope"
    summary = "RoPE + FP8 quantization of query, key and value + the KV cache's write: one kernel"
    ops = ("rope_quant_kv_write",)

    def pattern(self, idioms: Idioms) -> Iterator[RopeWriteMatch]:
        """Every write of rotated keys for which there is a rotated query; the nearest in the graph is taken."""
        order = {node: i for i, node in enumerate(idioms.graph.nodes)}
        quantized: dict[Node, list[tuple[Quantize, tuple[Node, ...]]]] = {}
        for quantize in idioms.of(Quantize):
            rope, path = _behind_rope(quantize.input, idioms)
            if rope is not None:
                quantized.setdefault(rope.output, []).append((quantize, path))
        writes = [(write, _written(write.key, idioms)) for write in idioms.of(KVCacheWrite)]
        written_themselves = {key.source for _, key in writes}
        written_themselves |= {_written(write.value, idioms).source for write, _ in writes}
        queries = [rope for rope in idioms.of(Rope) if rope.output not in written_themselves]
        for write, written in writes:
            key = idioms.at(written.source, Rope)
            if key is None:
                continue
            at = order[write.output]
            near = sorted(
                (query for query in queries if query.output not in key.inputs),  # a key may be rotated twice
                key=lambda query: abs(order[query.output] - at),
            )
            query = next((query for query in near if query.turns_as(key)), None)
            if query is None:
                continue
            queries.remove(query)
            yield _match(query, quantized.get(query.output, []), write, written, key, idioms)

    def legality(self, m: RopeWriteMatch) -> None:
        """The op must be able to say it, and its kernel to take it: see the sentences."""
        m.require(not m.unread, f"the query's quantization is not read: {m.unread}")
        query, key, val = value(m.query.x), value(m.rope.x), value(m.value.source)
        cache = value(m.write.caches[0])
        for name, table in (("cos", m.rope.cos), ("sin", m.rope.sin)):
            dtype = value(table.source).dtype
            m.require(dtype in TABLE_DTYPES, f"{name} is {dtype_name(dtype)}, the op reads it in fp32 at most")
        of_cos, of_sin = (value(table.source).dtype for table in (m.rope.cos, m.rope.sin))
        m.require(of_cos == of_sin, f"cos is {dtype_name(of_cos)} and sin is {dtype_name(of_sin)}: make them one dtype")
        if m.quantize is not None:
            check_static(m, m.quantize, query, OUTPUT_DTYPES)
        for name, quantize in (("key", m.key.quantize), ("value", m.value.quantize)):
            if quantize is not None:
                check_static(m, quantize, key, (cache.dtype,))
                m.require(
                    quantize.scale_factor == 1.0 and not quantize.inverse,
                    f"the {name} is multiplied by a scale, or divided by a multiple of one: the op divides by it",
                )
        m.require(
            query.dtype == key.dtype == val.dtype,
            f"query, key and value are {dtype_name(query.dtype)}, {dtype_name(key.dtype)} and {dtype_name(val.dtype)} "
            "before they are rotated",
        )
        m.require(
            query.dtype in HIGH_PRECISION_DTYPES,
            f"query and key are {dtype_name(query.dtype)} before they are rotated; the op takes "
            f"{', '.join(map(dtype_name, HIGH_PRECISION_DTYPES))}",
        )
        m.require(
            cache.dtype.itemsize == 1 or key.dtype == cache.dtype,
            f"keys of {dtype_name(key.dtype)} do not go into a cache of {dtype_name(cache.dtype)}",
        )
        m.require(m.key_layout.head is not None, "it is not known which dimension of query and key counts heads")
        for name, rope, layout in (("query", m.query, m.query_layout), ("key", m.rope, m.key_layout)):
            known_sizes = layout.heads is not None and layout.head_dim is not None
            m.require(known_sizes, f"the number of heads of the {name} is not known")
            rows_of_cos, rows_of_sin = rope.cos.rows(rope.x), rope.sin.rows(rope.x)
            m.require(same_shape(rows_of_cos, rows_of_sin), f"cos and sin of the {name} have different shapes")
            rows = layout.of_tokens(rows_of_cos)
            m.require(
                same_shape(rows, layout.tokens) or len(larger_than_one(rows)) <= 1,
                f"cos and sin have rows for some of the dimensions of the {name}'s tokens, and one for the others",
            )
        m.require(
            m.key_layout.leads_to(m.key.path, value(m.write.key)),
            "the key's tokens and heads are put into another order between its rotation and the write",
        )
        tokens = value(m.write.key).shape[0]
        for name, layout in (("query", m.query_layout), ("key", m.key_layout)):
            m.require(known(layout.count == tokens), f"the {name} has {layout.count} tokens, the write {tokens}")
        m.require(
            same_shape(larger_than_one(m.query_layout.tokens), larger_than_one(m.key_layout.tokens)),
            "query and key have their tokens in other dimensions",
        )
        at_write = value(m.write.key).shape[-1]
        m.require(
            known(at_write == key.shape[-1]),
            f"a head of the key has {key.shape[-1]} numbers where it is rotated, and {at_write} where it is written",
        )
        why = why_no_kernel(key.device, key.dtype, cache.dtype, value(m.output).dtype)
        m.require(not key.is_cuda or why is None, str(why))

    def profitability(self, m: RopeWriteMatch) -> None:
        """Where it was measured to be faster than what Inductor makes of the graph."""
        query = value(m.query.x)
        m.require(query.is_cuda, f"the fused op has no faster kernel on the {query.device.type.upper()}")
        verdict = measured_verdict(
            query.device,
            tokens=value(m.write.key).shape[0],
            heads=m.query_layout.heads,
            kv_heads=m.key_layout.heads,
            head_dim=m.query_layout.head_dim,
            dtype=query.dtype,
            cache_dtype=value(m.write.caches[0]).dtype,
            quantized=m.quantize is not None,
        )
        m.require(verdict.is_faster, verdict.why)
        m.require(
            not m.is_copied,
            "the graph has the query's heads before its tokens in memory: the fused op's result would be copied, which "
            "was not measured",
        )

    def replacement(self, m: RopeWriteMatch, call: Call) -> tuple[Node, ...]:
        """The op, functional as the write was; the query in the graph's layout; the caches."""
        q = m.quantize
        tables = (m.rope.cos, m.rope.sin)
        (cos, sin), positions = table_arguments(m.key_layout, tables, found_or_added(call, max(m.outputs)))
        fused = with_same_writes(
            m.write.output,
            call,
            torch.ops.fusion_passes.rope_quant_kv_write.default,
            query=m.query_layout.token_major(call),
            key=m.key_layout.token_major(call),
            value=replay(filter(is_view, m.value.path), m.value.source, call),
            cos=cos,
            sin=sin,
            positions=positions,
            slot_mapping=m.write.slot_mapping,
            q_scale=None if q is None else q.scale,
            k_scale=m.key.scale(m.write.k_scale),
            v_scale=m.value.scale(m.write.v_scale),
            rotary_dim=m.rope.rotary_dim,
            interleaved=m.rope.interleaved,
            q_scale_factor=1.0 if q is None else q.scale_factor,
            q_scale_inverse=q is not None and q.inverse,
            dtype=value(m.output).dtype,
        )
        out = m.query_layout.restored(call(operator.getitem, fused, 0), call)
        out = copied_into(value(m.output), replay(m.views, out, call), call)
        return (out, *(call(operator.getitem, fused, i) for i in sorted(m.write.written)))

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Where the key of a write comes from instead, or what its query lacks."""
        ropes = list(idioms.of(Rope))
        unread = {miss.node: miss.reason for miss in idioms.near_misses if miss.what == "rope"}
        for write in idioms.of(KVCacheWrite):
            source = _written(write.key, idioms).source
            key = idioms.at(source, Rope)
            while key is None and (is_view(source) or is_wide_cast(source)):
                source = source.all_input_nodes[0]
            unread_rotation = source if source in unread else None
            if unread_rotation is not None:
                reason = f"the key's rotation is not read: {unread[unread_rotation]}"
            elif key is None:
                reason = f"the key comes from {target_name(source)}, not from a rotary embedding that is read"
            elif not any(query.turns_as(key) for query in ropes if query is not key):
                reason = "no query is rotated by the same cos and sin as the key"
            else:
                continue
            yield NearMiss(write.output, self.name, reason, unread_rotation)

    def describe(self, m: RopeWriteMatch) -> str:
        """`rope of bfloat16 [256, 32, 128] and [256, 8, 128] -> float8_e4m3fn, cache float8_e4m3fn`."""
        query, key = value(m.query.x), value(m.rope.x)
        kind = ("neighbours" if m.rope.interleaved else "halves") + f" of {m.rope.rotary_dim} dimensions"
        shapes = f"{list(query.shape)} and {list(key.shape)}".replace("'", "")
        codes, cache = value(m.output).dtype, value(m.write.caches[0]).dtype
        return f"rope of {dtype_name(query.dtype)} {shapes}, {kind} -> {dtype_name(codes)}, cache {dtype_name(cache)}"


def _match(
    query: Rope,
    quantizations: list[tuple[Quantize, tuple[Node, ...]]],
    write: KVCacheWrite,
    key: _Written,
    rope: Rope,
    idioms: Idioms,
) -> RopeWriteMatch:
    quantize, path = quantizations[0] if len(quantizations) == 1 else (None, ())
    if quantize is not None and not query.output.users.keys() <= {*path, *quantize.nodes}:  # others need it too
        quantize, path = None, ()
    if quantize is not None:
        behind = following_views(quantize.output)
        output = behind[-1] if behind else quantize.output
        nodes = query.nodes | quantize.nodes | {*path, *behind}
        views = (*path, *quantize.views, *behind)
        unread = ""
    else:
        views = following_views(query.output, is_wide_cast)
        output = views[-1] if views else query.output
        nodes = query.nodes | {*views}
        unread = _unread_quantization(output, idioms)
    caches = tuple(node for _, node in sorted(write.written.items()))
    val = _written(write.value, idioms)
    head = head_dimension(rope.x, (rope.cos, rope.sin), key.path, value(write.key))
    if value(query.x).ndim != value(rope.x).ndim:
        head = None
    layout = Layout(rope.x, head)
    tables = (x for at in lookups(layout, rope.cos, rope.sin) for x in (at.table, at.positions))
    scales = (q.scale for q in (quantize, key.quantize, val.quantize) if q is not None and q.scale is not None)
    kept = (x for x in write.inputs if x not in (write.key, write.value))
    return RopeWriteMatch(
        output=output,
        nodes=nodes | rope.nodes | write.nodes | key.nodes | val.nodes,
        inputs=(*query.inputs, *rope.inputs, val.source, *tables, *kept, *scales),
        side_outputs=caches,
        query=query,
        quantize=quantize,
        views=tuple(filter(is_view, views)),
        key=key,
        rope=rope,
        value=val,
        write=write,
        query_layout=Layout(query.x, head),
        key_layout=layout,
        unread=unread,
    )


def _behind_rope(node: Node, idioms: Idioms) -> tuple[Rope | None, tuple[Node, ...]]:
    """The rotary embedding whose result `node` is through views and casts, and those; the first of them last passed."""
    path: list[Node] = []
    while (rope := idioms.at(node, Rope)) is None and (is_view(node) or is_wide_cast(node)):
        path.insert(0, node)
        node = node.all_input_nodes[0]
    return rope, tuple(path) if rope is not None else (node,)


def _written(node: Node, idioms: Idioms) -> _Written:
    """Where a key or a value comes from: up through views, a quantization, and for a rotated key what lies between."""
    source, views = through_views(node)
    quantize = None
    for i, step in enumerate((source, *views)):
        if (quantize := idioms.at(step, Quantize)) is not None:
            node, path = quantize.input, (*quantize.views, *views[i:])
            break
    else:
        path = ()
    rope, before = _behind_rope(node, idioms)
    return _Written(node, path, quantize) if rope is None else _Written(rope.output, (*before, *path), quantize)


def _unread_quantization(node: Node, idioms: Idioms) -> str:
    """Why the quantization of `node`, which is near behind it, is not known; "" where there is none."""
    reasons = {miss.node: miss.reason for miss in idioms.near_misses if miss.what == "quantize"}
    seen, work = {node}, [(node, 0)]
    while work:
        node, steps = work.pop()
        if node in reasons:
            return reasons[node]
        for user in node.users if steps < QUANTIZED_WITHIN else ():
            if user not in seen and is_tensor(user):
                seen.add(user)
                work.append((user, steps + 1))
    return ""
