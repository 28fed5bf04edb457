"""RoPE of query and key, quantisation, and the write to the KV cache: one kernel.

    rope(query) → saturate(x / scale).to(fp8)        rope(key), value → kv_cache_write
    becomes   fusion_passes::rope_quant_kv_write, which writes the caches in place as kv_cache_write does

The query's quantisation may be missing: then the rotated query leaves as it does in the graph.  Key and value may be
quantised by the write, or before it.

Saves what Inductor's kernel for the query and the key's way to memory and back cost beside it: one kernel reads the
projection once and writes the codes where they belong.

Rounding: the fused op computes in fp32 and rounds once, to what leaves it.  A graph that is run op by op rounds to bf16
after each step, and reads a key in bf16 for the write; so codes differ from the unfused ones by at most one step where
those have not lost more, and are closer to an fp32 reference.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node

from fusion_passes.fusions.rule import Rule
from fusion_passes.fusions.static_quant import check_static
from fusion_passes.graph.arguments import arguments, tensor_node
from fusion_passes.graph.functional import with_same_writes
from fusion_passes.graph.match import Call, Match
from fusion_passes.graph.read import (
    COPIES,
    SPLITS,
    aten,
    calls,
    following_views,
    is_tensor,
    is_view,
    prims,
    same_layout,
    same_shape,
    target_name,
    through_views,
    value,
)
from fusion_passes.graph.steps import is_cast
from fusion_passes.graph.symbolic import fixed, known
from fusion_passes.graph.views import applied, cost, replay
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.idioms.kv_cache import KVCacheWrite
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.rope import Rope, Table
from fusion_passes.measured.rope_quant_kv_write import verdict as measured_verdict
from fusion_passes.ops.kv_cache import HIGH_PRECISION_DTYPES
from fusion_passes.ops.kv_cache_write import why_no_kernel
from fusion_passes.quant import dtype_name

OUTPUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Of the query's codes."""
TABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.complex64)
QUANTISED_WITHIN = 8
"""Steps behind the rotated query in which a quantisation that could not be read is looked for."""


@dataclass(frozen=True)
class _Written:
    """A key or value on its way to the write: from `source`, by views and casts (`path`), with a quantisation among
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
    it.  key, value: what goes into the write, before their own quantisations if they have some."""

    query: Rope
    quantize: Quantize | None
    views: tuple[Node, ...]
    key: _Written
    rope: Rope
    """Of the key."""
    value: _Written
    write: KVCacheWrite
    head: int | None
    """The dimension of both x that counts heads; None where it is not known."""
    unread: str = ""
    """Why a quantisation of the query could not be read."""

    @property
    def site(self) -> Node:
        """The write: it tells the layers of a model apart."""
        return self.write.output

    @property
    def is_copied(self) -> bool:
        """True where the graph has the query in another layout than that in which it leaves the op."""

        def token_major(x: Tensor, layout: str) -> Tensor:
            order = _order(x.ndim, self.head)
            made = torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device)
            return made.permute([order.index(d) for d in range(x.ndim)])

        return cost(token_major, "", self.views, self.query.output)[0]


@dataclass(frozen=True)
class _Lookup:
    """Rows of a table [rows, columns] at positions, from column `start` on; columns may be several dimensions."""

    table: Node
    positions: Node
    start: int


@dataclass(frozen=True)
class RopeQuantKVWrite(Rule[RopeWriteMatch]):
    """The key of a `KVCacheWrite` is a `Rope`; another one with the same cos and sin is the query's."""

    name = "rope_quant_kv_write"
    anchor = "rope"
    summary = "RoPE + FP8 quantisation of query, key and value + the KV cache's write: one kernel"
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
            query = next((query for query in near if _same_tables(query, key)), None)
            if query is None:
                continue
            queries.remove(query)
            yield _match(query, quantized.get(query.output, []), write, written, key, idioms)

    def legality(self, m: RopeWriteMatch) -> None:
        """The op must be able to say it, and its kernel to take it: see the sentences."""
        m.require(not m.unread, f"the query's quantisation is not read: {m.unread}")
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
        m.require(m.head is not None, "it is not known which dimension of query and key counts heads")
        for name, rope in (("query", m.query), ("key", m.rope)):
            m.require(None not in _heads_and_size(rope, m.head), f"the number of heads of the {name} is not known")
            rows_of_cos, rows_of_sin = _outer(rope.cos, rope), _outer(rope.sin, rope)
            m.require(same_shape(rows_of_cos, rows_of_sin), f"cos and sin of the {name} have different shapes")
            m.require(
                same_shape(rows := _without(rows_of_cos, m.head), _token_sizes(rope, m.head))
                or len(_larger_than_one(rows)) <= 1,
                f"cos and sin have rows for some of the dimensions of the {name}'s tokens, and one for the others",
            )
        m.require(
            _is_token_major(m.rope, m.head, m.key.path, value(m.write.key)),
            "the key's tokens and heads are put into another order between its rotation and the write",
        )
        tokens = value(m.write.key).shape[0]
        for name, rope in (("query", m.query), ("key", m.rope)):
            count = _product(_token_sizes(rope, m.head))
            m.require(known(count == tokens), f"the {name} has {count} tokens, the write {tokens}")
        m.require(
            same_shape(*(_larger_than_one(_token_sizes(rope, m.head)) for rope in (m.query, m.rope))),
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
        heads, head_dim = _heads_and_size(m.query, m.head)
        kv_heads, _ = _heads_and_size(m.rope, m.head)
        verdict = measured_verdict(
            query.device,
            tokens=value(m.write.key).shape[0],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
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
        cos, sin, positions = _tables(m.rope, m.head, _found_or_added(m, call))
        fused = with_same_writes(
            m.write.output,
            call,
            torch.ops.fusion_passes.rope_quant_kv_write.default,
            query=_token_major(m.query, m.head, call),
            key=_token_major(m.rope, m.head, call),
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
        out = _as_in_graph(m.query, m.head, call(operator.getitem, fused, 0), call)
        out = _in_layout(value(m.output), replay(m.views, out, call), call)
        return (out, *(call(operator.getitem, fused, i) for i in sorted(m.write.written)))

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Where the key of a write comes from instead, or what its query lacks."""
        ropes = list(idioms.of(Rope))
        unread = {miss.node: miss.reason for miss in idioms.near_misses if miss.what == "rope"}
        for write in idioms.of(KVCacheWrite):
            source = _written(write.key, idioms).source
            key = idioms.at(source, Rope)
            while key is None and (is_view(source) or _is_wide_cast(source)):
                source = source.all_input_nodes[0]
            told = source if source in unread else None
            if told is not None:
                reason = f"the key's rotation is not read: {unread[told]}"
            elif key is None:
                reason = f"the key comes from {target_name(source)}, not from a rotary embedding that is read"
            elif not any(_same_tables(query, key) for query in ropes if query is not key):
                reason = "no query is rotated by the same cos and sin as the key"
            else:
                continue
            yield NearMiss(write.output, self.name, reason, told)

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
    if quantize is not None and not _only_way(query.output, (*path, *quantize.nodes)):
        quantize, path = None, ()
    if quantize is not None:
        behind = following_views(quantize.output)
        output = behind[-1] if behind else quantize.output
        nodes = query.nodes | quantize.nodes | {*path, *behind}
        views = (*path, *quantize.views, *behind)
        unread = ""
    else:
        views = _following_views_and_casts(query.output)
        output = views[-1] if views else query.output
        nodes = query.nodes | {*views}
        unread = _unread_quantisation(output, idioms)
    caches = tuple(node for _, node in sorted(write.written.items()))
    val = _written(write.value, idioms)
    head = _head(query, rope, key.path, value(write.key))
    lookups = _lookups(rope, head) or ()
    tables = (x for at in lookups for x in (at.table, at.positions))
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
        head=head,
        unread=unread,
    )


def _behind_rope(node: Node, idioms: Idioms) -> tuple[Rope | None, tuple[Node, ...]]:
    """The rotary embedding whose result `node` is through views and casts, and those; the first of them last passed."""
    path: list[Node] = []
    while (rope := idioms.at(node, Rope)) is None and (is_view(node) or _is_wide_cast(node)):
        path.insert(0, node)
        node = node.all_input_nodes[0]
    return rope, tuple(path) if rope is not None else (node,)


def _written(node: Node, idioms: Idioms) -> _Written:
    """Where a key or a value comes from: up through views, a quantisation, and for a rotated key what lies between."""
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


def _same_tables(a: Rope, b: Rope) -> bool:
    kinds = (a.rotary_dim, a.interleaved) == (b.rotary_dim, b.interleaved)
    return kinds and a.cos.same(b.cos) and a.sin.same(b.sin)


def _only_way(node: Node, way: tuple[Node, ...]) -> bool:
    """True where a node and all but the last on the way are read by nothing else."""
    inside = set(way)
    return all(user in inside for user in node.users)


def _is_wide_cast(node: Node) -> bool:
    """True for a cast that is not to FP8, which would round."""
    return is_cast(node) and value(node).dtype.itemsize > 1


def _following_views_and_casts(node: Node) -> tuple[Node, ...]:
    """Those that come after `node`, as long as each is the only user of the one before."""
    path: list[Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if not (is_view(user) or _is_wide_cast(user)):
            break
        path.append(user)
        node = user
    while path and not is_tensor(path[-1]):
        path.pop()  # a split, of which nothing takes the one part
    return tuple(path)


def _unread_quantisation(node: Node, idioms: Idioms) -> str:
    """Why the quantisation of `node`, which is near behind it, is not known; "" where there is none."""
    reasons = {miss.node: miss.reason for miss in idioms.near_misses if miss.what == "quantize"}
    seen, work = {node}, [(node, 0)]
    while work:
        node, steps = work.pop()
        if node in reasons:
            return reasons[node]
        for user in node.users if steps < QUANTISED_WITHIN else ():
            if user not in seen and is_tensor(user):
                seen.add(user)
                work.append((user, steps + 1))
    return ""


def _outer(table: Table, rope: Rope) -> list[int | torch.SymInt]:
    """The sizes of a table in the dimensions of x that are tokens and heads, 1 where it has none."""
    source = value(table.source)
    sizes = source.shape[: source.ndim - table.inner]
    return [*[1] * (value(rope.x).ndim - 1 - len(sizes)), *sizes]


def _head(query: Rope, key: Rope, path: tuple[Node, ...], end: Tensor) -> int | None:
    """The dimension that counts heads: where cos and sin have one element.

    Where all sequences share the rows, there are several such; then it is the one for which the key's path leads to
    [tokens, heads, head_dim].
    """
    x = value(key.x)
    found = [
        d
        for d in range(x.ndim - 1)
        if fixed(x.shape[d]) is not None and known(_outer(key.cos, key)[d] == 1) and known(_outer(key.sin, key)[d] == 1)
    ]
    found = [d for d in found if end.ndim == 3 and known(x.shape[d] == end.shape[1])] or found
    several = [d for d in found if not known(x.shape[d] == 1)]
    found = [*several, *(d for d in reversed(found) if d not in several)]
    if value(query.x).ndim != x.ndim or not found:
        return None
    return next((d for d in found if _is_token_major(key, d, path, end)), found[0])


def _heads_and_size(rope: Rope, head: int | None) -> tuple[int | None, int | None]:
    x = value(rope.x)
    return None if head is None else fixed(x.shape[head]), fixed(x.shape[-1])


def _without(sizes: Iterable[Any], head: int | None) -> list[Any]:
    return [size for d, size in enumerate(sizes) if d != head]


def _token_sizes(rope: Rope, head: int | None) -> list[int | torch.SymInt]:
    return _without(value(rope.x).shape[:-1], head)


def _larger_than_one(sizes: list[int | torch.SymInt]) -> list[int | torch.SymInt]:
    return [size for size in sizes if not known(size == 1)]


def _product(sizes: Iterable[int | torch.SymInt]) -> int | torch.SymInt:
    count: int | torch.SymInt = 1
    for size in sizes:
        count = count * size
    return count


def _order(rank: int, head: int | None) -> list[int]:
    """The dimensions with the tokens first, then heads and head size."""
    return [*(d for d in range(rank - 1) if d != head), rank - 1 if head is None else head, rank - 1]


def _token_major(rope: Rope, head: int | None, call: Call) -> Node:
    """x as [tokens, heads, head_dim]."""
    node, rank = rope.x, value(rope.x).ndim
    if (order := _order(rank, head)) != list(range(rank)):
        node = call(aten.permute.default, node, order)
    if rank != 3:
        node = call(aten.reshape.default, node, [-1, *_heads_and_size(rope, head)])
    return node


def _size(node: Node, dim: int, call: Call) -> int | Node:
    """A size as an argument: a number, or a node that has it."""
    size = fixed(value(node).shape[dim])
    return call(aten.sym_size.int, node, dim) if size is None else size


def _found_or_added(m: RopeWriteMatch, call: Call) -> Call:
    """`call`, but for what is in the graph already: all layers of a model prepare the same tables."""
    last = max(m.outputs)

    def found_or_added(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        for node in last.graph.find_nodes(op="call_function", target=target):
            if node < last and node.args == args and node.kwargs == kwargs:
                return node
        return call(target, *args, **kwargs)

    return found_or_added


def _as_in_graph(rope: Rope, head: int | None, node: Node, call: Call) -> Node:
    """A result [tokens, heads, head_dim] with its dimensions as x has them."""
    x = value(rope.x)
    if x.ndim != 3:
        tokens = [d for d in range(x.ndim - 1) if d != head]
        unknown = [d for d in tokens if fixed(x.shape[d]) is None]
        sizes = [-1 if unknown == [d] else _size(rope.x, d, call) for d in tokens]
        node = call(aten.reshape.default, node, [*sizes, *_heads_and_size(rope, head)])
    order = _order(x.ndim, head)
    back = [order.index(d) for d in range(x.ndim)]
    return node if back == list(range(x.ndim)) else call(aten.permute.default, node, back)


def _in_layout(wanted: Tensor, node: Node, call: Call) -> Node:
    """A copy with the strides of `wanted`, as far as an order of the dimensions gives them; `node` if it has them."""
    x = value(node)
    if same_layout(x, wanted):
        return node
    for order in itertools.permutations(range(x.ndim)):
        sizes = [x.shape[d] for d in order]
        strides = [_product(sizes[i + 1 :]) for i in range(x.ndim)]
        if all(known(x.shape[d] == 1) or known(strides[i] == wanted.stride(d)) for i, d in enumerate(order)):
            moved = call(aten.permute.default, node, list(order))
            copied = call(aten.clone.default, moved, memory_format=torch.contiguous_format)
            return call(aten.permute.default, copied, [order.index(d) for d in range(x.ndim)])
    return node


def _is_token_major(rope: Rope, head: int | None, path: tuple[Node, ...], end: Tensor) -> bool:
    """True where the path from a rotated key leads to [tokens, heads, head_dim], each at its place.

    Tried with the key's elements in that order in memory: then every view of the path is one, without a copy, and what
    comes out is contiguous.
    """
    x = value(rope.x)
    views = [node for node in path if is_view(node) and not calls(node, *COPIES)]
    if not views and x.ndim == 3 and head == 1:
        return True
    order = _order(x.ndim, head)
    mode = detect_fake_mode(x)
    if mode is None:
        return False
    with mode:
        base = torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device)
        moved = _applied(base.permute([order.index(d) for d in range(x.ndim)]), views)
        fits = moved is not None and same_shape(moved.shape, end.shape) and moved.ndim == 3
        return fits and moved is not None and same_layout(moved, torch.empty_like(moved).contiguous())


def _applied(x: Tensor, views: list[Node]) -> Tensor | None:
    """A fake tensor after some views; None where one of them had to copy."""
    base = x if x._base is None else x._base
    for view in views:
        x = applied(view, x)
        if isinstance(x, Tensor) and x._base is not base and x is not base:
            return None
    return x


def _is_split(node: Node) -> bool:
    """True for a split, and for a part that is taken from its tuple."""
    return calls(node, *SPLITS) or (node.target is operator.getitem and calls(node.args[0], *SPLITS))


def _tables(rope: Rope, head: int | None, call: Call) -> tuple[Node, Node, Node | None]:
    """cos and sin as [rows, columns], and the positions that say which row; None where row t is that of token t."""
    rows, positions = [], None
    if (lookups := _lookups(rope, head)) is not None:
        positions = lookups[0].positions
        for at, table in zip(lookups, (rope.cos, rope.sin), strict=True):
            rows.append(_columns(_two_dimensional(at.table, value(at.table).ndim - 1, call), at.start, table, call))
    else:
        for table in (rope.cos, rope.sin):
            node, outer = table.source, value(table.source).ndim - table.inner
            place = None if head is None else head - (value(rope.x).ndim - 1 - outer)
            if place is not None and 0 <= place < outer:
                others = [d for d in range(value(node).ndim) if d != place]
                if (order := [*others[: outer - 1], place, *others[outer - 1 :]]) != sorted(order):
                    node = call(aten.permute.default, node, order)
            rows.append(_columns(_two_dimensional(node, table.inner, call), table.start, table, call))
    return rows[0], rows[1], _positions(rope, head, positions, call)


def _positions(rope: Rope, head: int | None, positions: Node | None, call: Call) -> Node | None:
    """The row of each token: positions for the rows that the table has here, or none for one after the other.  Where
    several tokens share a row (all sequences of a batch the same), it is said for each."""
    sizes, rows = _token_sizes(rope, head), _without(_outer(rope.cos, rope), head)
    if not same_shape(sizes, rows):
        dims = _without(range(len(sizes) + 1), head)
        if positions is None:
            along = next((d for d, size in zip(dims, rows, strict=True) if not known(size == 1)), None)
            count = 1 if along is None else _size(rope.x, along, call)
            options = {"dtype": torch.int64, "device": value(rope.x).device, "requires_grad": False}
            positions = call(prims.iota.default, count, start=0, step=1, **options)  # what `arange` is at this stage
        positions = call(aten.reshape.default, positions, [1 if known(size == 1) else -1 for size in rows])
        positions = call(aten.expand.default, positions, [_size(rope.x, d, call) for d in dims])
    if positions is not None and value(positions).ndim != 1:
        positions = call(aten.reshape.default, positions, [-1])
    return positions


def _two_dimensional(node: Node, inner: int, call: Call) -> Node:
    """[rows, columns] of a table, of which the last `inner` dimensions are columns; of complex numbers as of pairs."""
    if value(node).is_complex():
        node, inner = call(aten.view_as_real.default, node), inner + 1
    if (value(node).ndim, inner) == (2, 1):
        return node
    return call(aten.reshape.default, node, [-1, _product(fixed(size) or 0 for size in value(node).shape[-inner:])])


def _columns(node: Node, start: int, table: Table, call: Call) -> Node:
    """The columns of [rows, columns] from `start` on."""
    if start == 0 and table.step == 1 and known(value(node).shape[1] == table.width):
        return node
    return call(aten.slice.Tensor, node, 1, start, start + table.width * table.step, table.step)


def _lookups(rope: Rope, head: int | None) -> tuple[_Lookup, _Lookup] | None:
    """Where cos and sin are looked up by the same positions, one for each row: the tables."""
    cos, sin = _lookup(rope, rope.cos, head), _lookup(rope, rope.sin, head)
    return None if cos is None or sin is None or cos.positions is not sin.positions else (cos, sin)


def _lookup(rope: Rope, table: Table, head: int | None) -> _Lookup | None:
    path: list[Node] = []
    node = table.source
    if head is None:
        return None
    while is_view(node) or calls(node, aten.slice.Tensor) or _is_wide_cast(node) or _is_split(node):
        if not is_cast(node) and not calls(node, *COPIES):
            path.insert(0, node)
        node = node.all_input_nodes[0]
    rows, positions = _indexed(node)
    if rows is None or positions is None or value(rows).ndim < 2:
        return None
    # Row t of the result must be token t's: tried as in `_is_token_major`.
    looked_up, mode = value(node), detect_fake_mode(value(node))
    columns = _product(value(rows).shape[1:])
    if mode is None:
        return None
    with mode:
        base = torch.empty_like(looked_up).contiguous()
        moved = _applied(base, path)
        if moved is None:
            return None
        outer = moved.ndim - table.inner
        moved = moved.flatten(-table.inner)
        for _ in range(value(rope.x).ndim - 1 - outer):
            moved = moved.unsqueeze(0)
        flat = moved.permute(_order(moved.ndim, head)).flatten(0, -2)
        if flat._base is not base and flat is not base:
            return None
        count, width = flat.shape
        whole = known(count * columns == looked_up.numel())  # a row for each position
        if not whole or (not known(count == 1) and not known(flat.stride(0) == columns)):
            return None
        if not known(width == 1) and not known(flat.stride(1) == 1):
            return None
        start = fixed(flat.storage_offset())
        if start is not None and looked_up.is_complex():
            start = 2 * start
    return None if start is None else _Lookup(rows, positions, start + table.start)


def _indexed(node: Node) -> tuple[Node | None, Node | None]:
    """(table, positions) of a lookup of rows."""
    table, positions = None, None
    if calls(node, aten.index.Tensor):
        table, indices = arguments(node, "self", "indices") or (None, ())
        positions = indices[0] if len(indices) == 1 else None
    elif calls(node, aten.embedding.default):
        # The other arguments are about the gradient.
        table, positions, *_ = arguments(node, "weight", "indices", *_OF_THE_GRADIENT) or (None, None)
    elif calls(node, aten.index_select.default):
        table, dim, positions = arguments(node, "self", "dim", "index") or (None, None, None)
        table = table if dim == 0 else None
    positions = tensor_node(positions)
    if positions is not None and value(positions).dtype not in (torch.int32, torch.int64):
        positions = None  # a mask, which takes the rows where it is True
    return tensor_node(table), positions


_OF_THE_GRADIENT = ("padding_idx", "scale_grad_by_freq", "sparse")
