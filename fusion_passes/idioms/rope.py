"""Rope: rotary embedding, `x * cos + (x turned by 90 degrees) * sin`, over the first dimensions of each head.

Spellings differ in how they take the halves or the pairs of x and put them together again.  So they are not read by
their steps but by what these do to each dimension: a walk up from the result follows slices, `cat`, sums and products
and finds for every dimension the terms that it is the sum of, each a dimension of x times one of cos or sin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes import reference
from fusion_passes.graph.arguments import number, operands
from fusion_passes.graph.read import (
    RESHAPES,
    SPLITS,
    argument,
    aten,
    calls,
    is_high_precision,
    is_tensor,
    same_shape,
    value,
)
from fusion_passes.graph.steps import MULTIPLICATIONS, is_cast, is_exact_cast
from fusion_passes.graph.symbolic import fixed, known
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.lanes import (
    Other,
    Sum,
    broadcast,
    cat,
    complex_product,
    leaf_sum,
    picked_range,
    product,
    split_range,
)
from fusion_passes.idioms.reading import Unread, read_all

MAX_TERMS = 4
"""Of one dimension, while reading: two are left in the end."""
MAX_DEPTH = 24
"""Steps from the result to x."""
MAX_PAIRS = 256
"""Of nodes to compare, to see whether two tables are computed alike."""

_RESHAPES = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default)


@dataclass(frozen=True, eq=False)
class Table:
    """Cosines or sines: some columns of a tensor that has one row for all heads of a token.

    source: [..., columns], which broadcasts to tokens and heads of x as torch does: it may have fewer dimensions.  A
        complex one counts as having the real and the imaginary part of each number in two columns, side by side.
    start, width, step: the columns: `rotary_dim`, one for each dimension, or half of that, one for each pair; the
        distance between two of them is step.
    inner: of the source's dimensions, how many hold the columns, flattened (a table of pairs has two).
    """

    source: Node
    start: int
    width: int
    step: int = 1
    inner: int = 1

    def of(self, source: Tensor) -> Tensor:
        """The columns, from the value of the source."""
        x = torch.view_as_real(source).flatten(-2) if source.is_complex() else source.flatten(-self.inner)
        return x[..., self.start : self.start + self.width * self.step : self.step]

    def same(self, other: Table) -> bool:
        """True where both hold the same numbers: the same columns of one tensor, or of two computed alike."""
        columns = (self.start, self.width, self.step, self.inner)
        return columns == (other.start, other.width, other.step, other.inner) and _computed_alike(
            self.source, other.source
        )


@dataclass(frozen=True, eq=False)
class Rope(Idiom):
    """`output = x * cos + turned(x) * sin` in the first `rotary_dim` dimensions; the rest of x passes.

    x: [..., head_dim], tokens and heads in any order.  cos, sin: the tables, which broadcast over heads.
    interleaved: a pair is 2 i and 2 i + 1, where it is i and i + rotary_dim / 2 otherwise.
    Casts between the steps are not kept: the graph may round where a fused kernel of Inductor does not either.
    """

    x: Node
    cos: Table
    sin: Table
    rotary_dim: int
    interleaved: bool

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors that it reads."""
        return (self.x, self.cos.source, self.sin.source)

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What it computes, in fp32, from the values of x and of the tables' sources."""
        return reference.rope(
            x, self.cos.of(cos), self.sin.of(sin), rotary_dim=self.rotary_dim, interleaved=self.interleaved
        )


def _computed_alike(a: object, b: object) -> bool:
    """True where two arguments are equal, or computed from equal ones by the same ops: a table is often prepared once
    for the query and once for the key.  Each pair is looked at once, by however many ways the graph leads to it."""
    pending: list[tuple[object, object]] = [(a, b)]
    seen: set[tuple[Node, Node]] = set()
    while pending:
        a, b = pending.pop()
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            if len(a) != len(b):
                return False
            pending += zip(a, b, strict=True)
        elif not isinstance(a, Node) or not isinstance(b, Node) or a is b:
            if a is not b and not (type(a) is type(b) and a == b):
                return False
        elif (a, b) not in seen:
            seen.add((a, b))
            if len(seen) > MAX_PAIRS or not _same_op(a, b):
                return False
            pending.append((a.args, b.args))
            pending += ((a.kwargs[name], b.kwargs[name]) for name in a.kwargs)
    return True


def _same_op(a: Node, b: Node) -> bool:
    """True where two calls with equal arguments have equal results."""
    if a.op != "call_function" or a.target is not b.target or a.kwargs.keys() != b.kwargs.keys() or a.is_impure():
        return False
    tags = a.target.tags if getattr(a.target, "_schema", None) is not None else ()  # type: ignore[union-attr]
    return torch.Tag.nondeterministic_seeded not in tags


def recognize(graph: Graph) -> Iterator[Rope | NearMiss]:
    """Every rotary embedding of the graph that is not part of another one, and what only looks like one.  Never
    raises."""
    inside: set[Node] = set()

    def read(node: Node) -> Rope | None:
        rope = None if node in inside else _read(node)
        inside.update(() if rope is None else rope.nodes)
        return rope

    return read_all(graph, "rope", read, last_first=True)  # the outermost first


def _read(node: Node) -> Rope | None:
    if not _may_be(node):
        return None
    if fixed(value(node).shape[-1]) is None:
        return None
    try:
        return _Reading(node, value(node).ndim - 1).rope()
    except Other:
        return None


def _may_be(node: Node) -> bool:
    """A quick look: a sum of two products, a `cat` of sums or differences of products, or a reshape of that or of
    complex numbers."""
    if not is_high_precision(node) or value(node).ndim < 3:
        return False
    if calls(node, aten.add.Tensor):
        return all(calls(_below_casts(x), aten.mul.Tensor) for x in operands(node, aten.add.Tensor) or (None,))
    if not calls(node, aten.cat.default, *RESHAPES):
        return False
    parts = node.all_input_nodes
    if calls(node, *RESHAPES):
        real = calls(parts[0], aten.view_as_real.default)
        return _joins_pairs(node) and (real or (calls(parts[0], aten.cat.default) and _may_be(parts[0])))
    return len(parts) <= 4 and any(
        calls(_below_casts(x, *_RESHAPES, *_COPIES), aten.sub.Tensor, aten.add.Tensor, aten.cat.default) for x in parts
    )


def _joins_pairs(node: Node) -> bool:
    """True for a reshape that makes the last dimension of others, as of pairs that lie side by side."""
    if not calls(node, *RESHAPES):
        return False
    return not same_shape(value(node).shape[-1:], value(node.all_input_nodes[0]).shape[-1:])


def _below_casts(node: object, *also: object) -> object:
    while isinstance(node, Node) and (is_cast(node) or calls(node, *also)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


class _Reading:
    """One walk from a result up to x and the tables.

    The first `outer` dimensions of the result are tokens and heads: nothing on the way may move them.
    """

    def __init__(self, root: Node, outer: int) -> None:
        self.root = root
        self.outer = outer
        self.shape = value(root).shape[:outer]
        self.nodes: set[Node] = set()
        self.known: dict[Node, Sum] = {}
        self.ends: dict[Node, Node] = {}
        self.leaves: dict[Node, int] = {}
        """What is read no further, and how many of its dimensions are inner ones."""

    def rope(self) -> Rope | None:
        self._find_ends(self.root, 0)
        if not self.ends:
            return None
        result = self._sum(self.root)
        lanes = [
            [
                (t.coefficients[i], [(leaf, lane[i]) for leaf, lane in t.factors])
                for t in result.terms
                if t.coefficients[i]
            ]
            for i in range(math.prod(result.inner))
        ]
        return self._rotation(lanes)

    def _find_ends(self, node: Node, depth: int) -> None:
        """What is cut into halves or pairs is x, or a table; the walk goes no further."""
        if depth > MAX_DEPTH or node in self.ends:
            return
        turned = _turned_pairs(node)
        if turned is not None:
            node = turned[1].all_input_nodes[0]
        if turned is not None or self._picked(node) is not None:
            while (step := self._picked(node) or self._inner_view(node)) is not None or is_exact_cast(node):
                node = step if step is not None else node.all_input_nodes[0]
            # One tensor may be computed twice: for each half, behind a write to what it is a view of.
            self.ends[node] = next((end for end in self.ends.values() if _computed_alike(node, end)), node)
            return
        for source in self._operands(node):
            self._find_ends(source, depth + 1)

    def _operands(self, node: Node) -> tuple[Node, ...]:
        """The tensors that a step of the walk goes on to; none where the walk ends."""
        if calls(node, aten.neg.default):
            return (node.all_input_nodes[0],)
        if not self._is_of_tokens_and_heads(node):
            return ()
        if (both := operands(node, aten.add.Tensor, aten.sub.Tensor, *MULTIPLICATIONS)) is not None:
            return tuple(x for x in both if isinstance(x, Node) and is_tensor(x))
        if calls(node, aten.cat.default) and self._inner_dim(node, 1) is not None:
            return tuple(node.all_input_nodes)
        if (source := self._inner_view(node)) is not None:
            return (source,)
        return (node.all_input_nodes[0],) if is_cast(node) else ()

    def _is_of_tokens_and_heads(self, node: Node) -> bool:
        return self._is_outer(node) and same_shape(value(node).shape[: self.outer], self.shape)

    def _is_outer(self, node: object) -> bool:
        """True for a floating-point tensor with the outer dimensions of the result, or 1 instead of some of them."""
        if not (isinstance(node, Node) and is_high_precision(node) and value(node).ndim > self.outer):
            return False
        shape = value(node).shape
        return all(fixed(size) is not None for size in shape[self.outer :]) and all(
            known(a == b) or known(a == 1) for a, b in zip(shape[: self.outer], self.shape, strict=True)
        )

    def _inner(self, node: Node) -> tuple[int, ...]:
        return tuple(fixed(size) or 0 for size in value(node).shape[self.outer :])

    def _inner_dim(self, node: Node, position: int) -> int | None:
        """The dimension that a call works on, counted from the first inner one; None for an outer one."""
        dim = argument(node, position, "dim", 0)
        rank = value(node).ndim if is_tensor(node) else value(node.all_input_nodes[0]).ndim
        if not isinstance(dim, int):
            return None
        if calls(node, aten.select.int):
            rank += 1
        dim = dim % rank - self.outer
        return dim if dim >= 0 else None

    def _inner_view(self, node: Node) -> Node | None:
        """The tensor that a node is a copy of, or another shape of its inner dimensions."""
        if not calls(node, *_RESHAPES, *_COPIES) or not node.all_input_nodes:
            return None
        source = node.all_input_nodes[0]
        if not (self._is_outer(source) and self._is_outer(node)):
            return None
        outer = same_shape(value(source).shape[: self.outer], value(node).shape[: self.outer])
        return source if outer and math.prod(self._inner(source)) == math.prod(self._inner(node)) else None

    def _picked(self, node: Node) -> Node | None:
        """The tensor of which a node is some of the inner dimensions."""
        source: object = None
        if calls(node, aten.slice.Tensor, aten.select.int) and self._inner_dim(node, 1) is not None:
            source = node.args[0]
        elif getattr(node.target, "__name__", "") == "getitem" and calls(node.args[0], *SPLITS):
            split = node.args[0]
            assert isinstance(split, Node)
            if is_tensor(split.all_input_nodes[0]) and self._split_dim(split) is not None:
                source = split.args[0]
        return source if isinstance(source, Node) and self._is_outer(source) else None

    def _split_dim(self, split: Node) -> int | None:
        return self._inner_dim(split, 1 if calls(split, aten.unbind.int) else 2)

    def _sum(self, node: Node, depth: int = 0) -> Sum:
        """What a node holds in its inner dimensions."""
        if node not in self.known:
            if not self._is_outer(node) or depth > MAX_DEPTH:
                raise Other
            found = None if node in self.ends else self._step(node, depth)
            if found is None:
                found = self._leaf(self.ends.get(node, node), self._inner(node))
            else:
                self.nodes.add(node)
            if len(found.terms) > MAX_TERMS:
                raise Other
            self.known[node] = found
        return self.known[node]

    def _leaf(self, leaf: Node, inner: tuple[int, ...]) -> Sum:
        if self.leaves.setdefault(leaf, len(inner)) != len(inner):
            raise Other
        return leaf_sum(leaf, inner)

    def _of_lower_rank(self, x: Node, node: Node) -> Sum:
        """An operand with fewer dimensions than the result `node`: a table, of which torch aligns the last ones."""
        shape = value(x).shape
        count = min(len(shape), value(node).ndim - self.outer)
        outer, inner = shape[: len(shape) - count], [fixed(size) for size in shape[len(shape) - count :]]
        aligned = zip(outer, self.shape[self.outer - len(outer) :], strict=True)
        if not is_high_precision(x) or not all(known(a == b) or known(a == 1) for a, b in aligned):
            raise Other
        if count == 0 or None in inner:
            raise Other
        return self._leaf(x, tuple(size for size in inner if size is not None))

    def _step(self, node: Node, depth: int) -> Sum | None:
        """From the operands of a node; None where the walk ends."""

        def read(x: Node) -> Sum:
            return self._sum(x, depth + 1)

        def operand(x: Node) -> Sum:
            return self._of_lower_rank(x, node) if value(x).ndim < value(node).ndim else read(x)

        if (turned := _turned_pairs(node)) is not None:
            _, pairs, by = turned
            self.leaves[by] = 1
            return complex_product(read(pairs.all_input_nodes[0]), by, self._inner(node))
        if is_cast(node):
            return read(node.all_input_nodes[0])
        if (source := self._inner_view(node)) is not None:
            return read(source).shaped(self._inner(node))
        if calls(node, aten.expand.default) and self._is_outer(node.all_input_nodes[0]):
            (source,) = node.all_input_nodes[:1]
            return broadcast(read(source), self._inner(node)) if value(source).ndim == value(node).ndim else None
        if (source := self._picked(node)) is not None:
            indices = self._picked_indices(node, self._inner(source))
            return None if indices is None else read(source).at(indices, self._inner(node))
        if calls(node, aten.cat.default) and (dim := self._inner_dim(node, 1)) is not None:
            return cat([read(part) for part in node.args[0]], dim)  # type: ignore[arg-type, union-attr]
        if calls(node, aten.neg.default):
            return read(node.all_input_nodes[0]).times(-1.0)
        if not self._is_of_tokens_and_heads(node):
            return None  # a table, however it was computed
        if (both := operands(node, *MULTIPLICATIONS)) is not None:
            left, right = both
            if number(left) is not None:
                left, right = right, left
            if isinstance(left, Node) and (factor := number(right)) is not None:
                return read(left).times(factor)
            if isinstance(left, Node) and isinstance(right, Node):
                return product(operand(left), operand(right), self._inner(node))
        if (both := operands(node, aten.add.Tensor, aten.sub.Tensor)) is not None:
            left, right = both
            if isinstance(left, Node) and isinstance(right, Node):
                inner = self._inner(node)
                second = operand(right) if calls(node, aten.add.Tensor) else operand(right).times(-1.0)
                return Sum(inner, broadcast(operand(left), inner).terms + broadcast(second, inner).terms)
        return None

    def _picked_indices(self, node: Node, inner: tuple[int, ...]) -> list[int] | None:
        """Which of the flattened inner dimensions of its source a node holds, in order."""
        if calls(node, aten.slice.Tensor, aten.select.int):
            dim = self._inner_dim(node, 1)
            picked = None if dim is None else picked_range(node, inner[dim])
        else:
            split, which = node.args
            assert isinstance(split, Node)
            assert isinstance(which, int)
            dim = self._split_dim(split)
            picked = None if dim is None else split_range(split, which, inner[dim])
        if dim is None or picked is None:
            return None
        block = math.prod(inner[dim + 1 :])
        return [
            (before * inner[dim] + i) * block + after
            for before in range(math.prod(inner[:dim]))
            for i in picked
            for after in range(block)
        ]

    def _rotation(self, lanes: list[list[tuple[float, list[tuple[Node, int]]]]]) -> Rope | None:
        """The rotation that turns x into these sums, one for each dimension."""
        turned = [i for i, terms in enumerate(lanes) if len(terms) == 2]
        if not turned or any(len(factors) != 2 for i in turned for _, factors in lanes[i]):
            return None
        x = self._turned_tensor([factors for i in turned for _, factors in lanes[i]])
        if x is None or self._inner(x) != self._inner(self.root) or len(self._inner(x)) != 1:
            return None
        own: list[tuple[Node, int]] = []
        other: list[tuple[Node, int]] = []
        partners: list[int] = []
        signs: list[float] = []
        for i in turned:
            split = [_apart(factors, x) for _, factors in lanes[i]]
            mine = next((k for k, (lane, _) in enumerate(split) if lane == i), None)
            if mine is None and _are_pairs([[_apart(factors, x)[0] for _, factors in lanes[k]] for k in turned]):
                raise Unread(self.root, "the dimensions come out in another order than they go in")
            if mine is None or split[1 - mine][0] == i:
                return None  # a sum of products, and no dimension gets anything of another
            if lanes[i][mine][0] != 1.0 or abs(lanes[i][1 - mine][0]) != 1.0:
                return None
            own.append(split[mine][1])
            other.append(split[1 - mine][1])
            partners.append(split[1 - mine][0])
            signs.append(lanes[i][1 - mine][0])
        # From here on it is a rotation of pairs; what the op cannot say is told.
        rotary_dim, half = len(turned), len(turned) // 2
        if turned != list(range(rotary_dim)):
            raise Unread(self.root, "the dimensions that are turned are not the first ones of each head")
        rest = lanes[rotary_dim:]
        if any(terms != [(1.0, [(x, i)])] for i, terms in enumerate(rest, rotary_dim)):
            raise Unread(self.root, f"the dimensions after the first {rotary_dim} do not pass as they are")
        pairs = {
            False: ([(i + half) % rotary_dim for i in turned], [-1.0 if i < half else 1.0 for i in turned]),
            True: ([i ^ 1 for i in turned], [-1.0 if i % 2 == 0 else 1.0 for i in turned]),
        }
        for interleaved, (expected, direction) in pairs.items():
            if partners == expected and rotary_dim % 2 == 0:
                if signs != direction:
                    raise Unread(self.root, "it turns the other way round: sin has the other sign")
                return Rope(
                    output=self.root,
                    nodes=self._nodes_of(x),
                    x=x,
                    cos=self._table("cos", own, interleaved),
                    sin=self._table("sin", other, interleaved),
                    rotary_dim=rotary_dim,
                    interleaved=interleaved,
                )
        raise Unread(self.root, "a pair is neither two neighbours nor a dimension of each half")

    def _nodes_of(self, x: Node) -> frozenset[Node]:
        """The nodes that compute with x; those that only prepare a table may serve others."""
        ours = {node for node, held in self.known.items() if node in self.nodes and held.holds(x)}
        splits = {node.args[0] for node in ours if calls(node.args[0], *SPLITS)}
        complex_steps = {step for node in ours for step in (_turned_pairs(node) or ())[:2]}
        return frozenset(ours | complex_steps | {split for split in splits if isinstance(split, Node)})

    def _turned_tensor(self, products: list[list[tuple[Node, int]]]) -> Node | None:
        """The factor that all products have in common and that has a number for each head."""
        common = set.intersection(*({leaf for leaf, _ in factors} for factors in products))
        common = {leaf for leaf in common if value(leaf).ndim - self.leaves[leaf] == self.outer}
        common = {leaf for leaf in common if self._is_of_tokens_and_heads(leaf)}
        # With one head a table is not told from x by its shape.
        return min(common, key=lambda leaf: (_is_looked_up(leaf), leaf), default=None)

    def _table(self, name: str, picked: list[tuple[Node, int]], interleaved: bool) -> Table:
        sources = {leaf for leaf, _ in picked}
        leaf = min(sources)
        if len(sources) != 1:
            raise Unread(self.root, f"{name} is put together from {len(sources)} tensors")
        columns = [lane for _, lane in picked]
        start, width = columns[0], len(columns)
        if columns == list(range(start, start + width)):
            return Table(leaf, start, width, inner=self.leaves[leaf])
        half = width // 2
        for step in (1, 2):
            if columns == [start + step * (i // 2 if interleaved else i % half) for i in range(width)]:
                return Table(leaf, start, half, step, self.leaves[leaf])
        raise Unread(self.root, f"the columns of {name} are not in the order of the dimensions of x")


def _apart(factors: list[tuple[Node, int]], x: Node) -> tuple[int, tuple[Node, int]]:
    """(the dimension of x, the column of the table) of a product."""
    first, second = factors
    return (first[1], second) if first[0] is x else (second[1], first)


def _are_pairs(partners: list[list[int]]) -> bool:
    """True where two dimensions each, and no other ones, are made of the same two."""
    pairs = [tuple(sorted(pair)) for pair in partners]
    return all(a != b and pairs.count((a, b)) == 2 for a, b in pairs) and len(
        {i for pair in pairs for i in pair}
    ) == len(pairs)


def _turned_pairs(node: Node) -> tuple[Node, Node, Node] | None:
    """(product, pairs, factors) where `node` is `view_as_real(view_as_complex(pairs) * factors)`."""
    product = node.args[0] if calls(node, aten.view_as_real.default) else None
    if (both := operands(product, aten.mul.Tensor)) is not None and isinstance(product, Node):
        for pairs, by in (both, both[::-1]):
            if calls(pairs, aten.view_as_complex.default) and isinstance(pairs, Node) and isinstance(by, Node):
                return (product, pairs, by) if is_tensor(by) and value(by).ndim <= value(product).ndim else None
    return None


def _is_looked_up(node: Node) -> bool:
    """True for what comes, through views, slices and casts, from a table by index."""
    while calls(node, *_RESHAPES, *_COPIES, aten.slice.Tensor, aten.expand.default) or is_cast(node):
        node = node.all_input_nodes[0]
    return calls(node, aten.index.Tensor, aten.embedding.default, aten.index_select.default, aten.cos.default)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-x2, x1), -1) * sin


def _rotate_half_of_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, -1)
    turned = torch.cat((x2.neg(), x1), -1)
    return (turned * sin.repeat(1, 2)[:, None] + cos.repeat(1, 2)[:, None] * x.float()).to(x.dtype)


def _heads_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.transpose(0, 1)[None], torch.cat((cos, cos), -1)[None, None], torch.cat((sin, sin), -1)[None, None]
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos + torch.cat((-x2, x1), -1) * sin).squeeze(0).transpose(0, 1)


def _heads_first_with_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.transpose(0, 1), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos + torch.cat((-x2, x1), -1) * sin).transpose(0, 1)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def _halves_in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x1, x2 = x.float().split(x.shape[-1] // 2, -1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).to(x.dtype)


def _halves_of_sequences(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[None, :, None], sin[None, :, None]
    x1, x2 = x[None].chunk(2, -1)
    return torch.cat((x1 * cos + x2 * -sin, x2 * cos + x1 * sin), -1).flatten(0, 1)


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)


def _neighbours_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).reshape(x.shape).to(x.dtype)


def _neighbours_by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns = torch.stack((cos, sin), -1)[:, None]
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    first = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    second = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
    return torch.stack((first, second), -1).flatten(-2).to(x.dtype)


def _complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns = torch.complex(cos.float(), sin.float())[:, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _rotate_every_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.repeat_interleave(2, -1)[:, None], sin.repeat_interleave(2, -1)[:, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def _first_dimensions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    x1, x2 = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-x2, x1), -1) * sin, passed), -1)


def _first_dimensions_in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x1, x2, passed = x.split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, passed), -1)


def _one_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, sin), -1)[:, None].to(x.dtype).chunk(2, -1)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rotate_half": _rotate_half,
    "rotate_half of chunks, in fp32": _rotate_half_of_chunks,
    "rotate_half, heads first": _heads_first,
    "rotate_half, heads first, tables without heads": _heads_first_with_rows,
    "halves": _halves,
    "halves in fp32": _halves_in_fp32,
    "halves in a dimension of sequences": _halves_of_sequences,
    "neighbours": _neighbours,
    "neighbours as pairs": _neighbours_of_pairs,
    "neighbours, turned by a table of pairs": _neighbours_by_pairs,
    "neighbours as complex numbers": _complex_numbers,
    "rotate_every_two": _rotate_every_two,
    "the first dimensions": _first_dimensions,
    "the first dimensions, in halves": _first_dimensions_in_halves,
    "one table of cos and sin": _one_table,
}
"""What is read as a `Rope`: (x [tokens, heads, head_dim], cos and sin [tokens, half of the turned dimensions])."""
