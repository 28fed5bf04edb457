"""Rope: rotary embedding, `x * cos + (x turned by 90 degrees) * sin`, over the first dimensions of each head.

Spellings differ in how they take the halves or the pairs of x and put them together again.  So they are not read but
run: the region from x and the tables to the result is a matrix for each token, and in its entries stand the columns of
the tables (`graph.region`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes import reference
from fusion_passes.graph.arguments import operands
from fusion_passes.graph.layout import Table
from fusion_passes.graph.read import RESHAPES, VIEWS, aten, calls, is_high_precision, is_view, same_shape, value
from fusion_passes.graph.region import MAX_STEPS, NotLinear, Program, Region, Term, computed_alike, run
from fusion_passes.graph.steps import is_cast, is_exact_cast
from fusion_passes.graph.symbolic import fixed
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.reading import Unread, read_all
from fusion_passes.idioms.spellings.rope import SPELLINGS as SPELLINGS


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

    def turns_as(self, other: Rope) -> bool:
        """True where both turn by the same angles, whatever they turn."""
        kinds = (self.rotary_dim, self.interleaved) == (other.rotary_dim, other.interleaved)
        return kinds and self.cos.same(other.cos) and self.sin.same(other.sin)

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What it computes, in fp32, from the values of x and of the tables' sources."""
        return reference.rope(
            x, self.cos.of(cos), self.sin.of(sin), rotary_dim=self.rotary_dim, interleaved=self.interleaved
        )


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
    if not _may_be(node) or fixed(value(node).shape[-1]) is None:
        return None
    region = Region(node, value(node).ndim - 1)
    _find_ends(region)
    wanted = {end for end in region.ends.values() if _is_like(end, region)}
    for x in sorted(wanted, key=lambda x: (_is_looked_up(x), x)):  # with one head a table may have the shape of x
        try:
            linear = region.program(x)
        except NotLinear:
            continue
        if (rotation := _rotation(linear.program)) is None:
            continue
        if rotation.reason:
            raise Unread(node, rotation.reason)
        cos, sin = (
            Table(linear.tables[at.table][0], at.start, at.width, at.step, linear.tables[at.table][1])
            for at in (rotation.cos, rotation.sin)
        )
        return Rope(node, linear.nodes, x, cos, sin, rotation.rotary_dim, rotation.interleaved)
    return None


def _find_ends(region: Region) -> None:
    """What is cut into halves or pairs is x, or a table: the region ends there.  x has as many numbers as the result;
    it may be cut from something larger itself, which is not of the region."""
    seen: set[Node] = set()
    work = [region.root]
    while work and len(seen) <= MAX_STEPS:
        node = work.pop()
        if node in seen:
            continue
        seen.add(node)
        is_cut = region.picked_from(node) is not None or calls(node, aten.view_as_complex.default)
        operands = region.operands(node)
        if not is_cut or not operands:
            work += operands
            continue
        above = [operands[0]]
        while (up := _above(above[-1], region)) is not None:
            above.append(up)
        end = next((x for x in reversed(above) if _is_like(x, region)), above[-1])
        # One tensor may be computed twice: for each half, behind a write to what it is a view of.
        region.ends[end] = next((other for other in region.ends.values() if computed_alike(end, other)), end)


def _above(node: Node, region: Region) -> Node | None:
    """The tensor of which a node has some or all numbers."""
    source = region.picked_from(node) or region.reshaped_from(node)
    return node.all_input_nodes[0] if source is None and is_exact_cast(node) else source


def _is_like(node: Node, region: Region) -> bool:
    """True for a tensor with all tokens and heads, and as many numbers in each as the result."""
    return region.is_whole(node) and region.inner(node) == region.inner(region.root)


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
        calls(_below_casts(x, *VIEWS), aten.sub.Tensor, aten.add.Tensor, aten.cat.default) for x in parts
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


class _Columns(NamedTuple):
    """Where the numbers of a `Table` stand: in which of a program's tables, and the columns."""

    table: int = 0
    start: int = 0
    width: int = 0
    step: int = 1
    reason: str = ""
    """Why a `Table` cannot say it; "" where it can."""


class _Rotation(NamedTuple):
    """A program that turns pairs of dimensions of x: as a `Rope` says it, but for `reason`, or why it cannot."""

    rotary_dim: int = 0
    interleaved: bool = False
    cos: _Columns = _Columns()
    sin: _Columns = _Columns()
    reason: str = ""


@functools.lru_cache(maxsize=256)
def _rotation(program: Program) -> _Rotation | None:
    """The rotation of pairs that a program is; None where it is something else."""
    lanes = run(program) or ()
    turned = {i: terms for i, terms in enumerate(lanes) if len(terms) == 2}
    if not turned or any(term.table is None for terms in turned.values() for term in terms):
        return None
    if any(i not in (a.lane, b.lane) for i, (a, b) in turned.items()):
        reason = "the dimensions come out in another order than they go in"
        return _Rotation(reason=reason) if _are_pairs([(a.lane, b.lane) for a, b in turned.values()]) else None
    own = [a if a.lane == i else b for i, (a, b) in turned.items()]
    other = [b if a.lane == i else a for i, (a, b) in turned.items()]
    if any(term.coefficient != 1 for term in own) or any(abs(term.coefficient) != 1 for term in other):
        return None
    # From here on it is a rotation of pairs; what the op cannot say is told.
    count, partners = len(turned), [term.lane for term in other]
    halves = partners == [(i + count // 2) % count for i in range(count)]
    interleaved = not halves and partners == [i ^ 1 for i in range(count)]
    cos, sin = _columns("cos", own, interleaved), _columns("sin", other, interleaved)
    reason = cos.reason or sin.reason
    if list(turned) != list(range(count)):
        reason = "the dimensions that are turned are not the first ones of each head"
    elif any(lanes[i] != (Term(i, 1),) for i in range(count, len(lanes))):
        reason = f"the dimensions after the first {count} do not pass as they are"
    elif count % 2 or not (halves or interleaved):
        reason = "a pair is neither two neighbours nor a dimension of each half"
    elif any((term.coefficient > 0) != (term.lane < i) for i, term in enumerate(other)):
        reason = "it turns the other way round: sin has the other sign"
    return _Rotation(count, interleaved, cos, sin, reason)


def _columns(name: str, terms: list[Term], interleaved: bool) -> _Columns:
    """What the dimensions of x are multiplied by, in their order."""
    table, start, width = terms[0].table or 0, terms[0].column, len(terms)
    if (count := len({term.table for term in terms})) > 1:
        reason = f"{name} is put together from {count} tensors"
        return _Columns(reason=reason)
    columns = [term.column - start for term in terms]
    if columns == list(range(width)):
        return _Columns(table, start, width)
    for step in (1, 2):
        if columns == [step * (i // 2 if interleaved else i % (width // 2)) for i in range(width)]:
            return _Columns(table, start, width // 2, step)
    reason = f"the columns of {name} are not in the order of the dimensions of x"
    return _Columns(reason=reason)


def _are_pairs(partners: list[tuple[int, int]]) -> bool:
    """True where two dimensions each, and no other ones, are made of the same two."""
    pairs = [tuple(sorted(pair)) for pair in partners]
    return all(a != b and pairs.count((a, b)) == 2 for a, b in pairs) and len(
        {i for pair in pairs for i in pair}
    ) == len(pairs)


def _is_looked_up(node: Node) -> bool:
    """True for what comes, through views, slices and casts, from a table by index."""
    while is_view(node) or calls(node, aten.slice.Tensor, aten.expand.default) or is_cast(node):
        node = node.all_input_nodes[0]
    return calls(node, aten.index.Tensor, aten.embedding.default, aten.index_select.default, aten.cos.default)
