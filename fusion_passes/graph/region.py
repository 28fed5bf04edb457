"""Regions: a piece of a graph is run, not read, to see what it computes.

What only rearranges has no end of spellings: halves by slices, chunks or views, pairs by strides, `stack` or complex
numbers.  But each is a small program, which can be run on numbers of our choice.  `Region` collects the steps from a
result up to its leaves; `run` tells, for each number of the result, the numbers of the leaves that it is made of.

**Why the answer is a proof.**  One leaf is x, the others are tables.  The steps only rearrange, add and multiply, and
no product has x or a table twice.  So each number of the result is a sum of terms `c * x[j] * t[k]` or `c * x[j]`, with
whole numbers c, where all |c| together are at most `MAX_WEIGHT`.  Unit vectors for x tell the j apart.  What comes with
an x[j] is a sum of at most four `c * t[k]`.  It is computed for five tables, which hold 1, k, k², k³ and k⁴ in their
column k; k = 1 is no column, it stands for a term without a table.  Five such vectors are linearly independent
(Vandermonde), whichever the columns, so a sum of four of them is never a multiple of a fifth: what equals `c * t[k]` in
all five is `c * t[k]`.  All numbers are whole and below 2^53, so float64 adds and multiplies them without rounding.

A region without leaves is a constant, such as a mask that is made from `arange`: `evaluate` gives its value.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from fusion_passes.graph.read import (
    CASTS,
    COPIES,
    RESHAPES,
    SPLITS,
    argument,
    aten,
    calls,
    is_tensor,
    is_view,
    mutated_nodes,
    same_shape,
    value,
)
from fusion_passes.graph.steps import MULTIPLICATIONS, is_cast
from fusion_passes.graph.symbolic import fixed, same

MAX_STEPS = 64
"""Of a region."""
MAX_WEIGHT = 4
"""All |c| of a number of the result together."""
MAX_PAIRS = 256
"""Of nodes to compare, to see whether two tables are computed alike."""
MAX_CONSTANTS = 200
"""Nodes on the way to a constant."""
MAX_CONSTANT_BYTES = 2**31
"""Of all tensors on the way to a constant, views not counted.  Some bool masks of 16384 x 16384 are that much, and take
a second or two; at 4096 x 4096 it is a tenth of a second."""

_SHAPES = frozenset(
    {*RESHAPES, *COPIES, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
    | {aten.alias.default, aten.detach.default}
)
"""Views that leave element n at place n."""
_PICKS = frozenset({aten.slice.Tensor, aten.select.int, *SPLITS})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_UNARY = frozenset({aten.neg.default, aten.view_as_real.default, aten.view_as_complex.default})


class NotLinear(Exception):
    """The result is no sum of products of a number of x and at most one of a table, or it is too much to be run."""


@dataclass(frozen=True)
class Ref:
    """As an argument of a step: the value of an earlier one."""

    step: int


class Leaf(NamedTuple):
    """A tensor that is read no further.  inner: its sizes in the dimensions that are run."""

    inner: tuple[int, ...]
    is_complex: bool
    is_x: bool


class Instruction(NamedTuple):
    """A call, with a `Ref` for each tensor.  part: which of several results.  inner: the sizes of the result in the
    dimensions that are run."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    part: int | None
    inner: tuple[int, ...]


class Program(NamedTuple):
    """A region without its nodes; layers of a model have equal ones.  The last step makes the result.

    before, after: how many dimensions, before and after those that are run, no step moves.
    """

    before: int
    after: int
    steps: tuple[Leaf | Instruction, ...]


class Term(NamedTuple):
    """`coefficient * x[lane] * tables[table][column]`; without a table, `coefficient * x[lane]`.

    lane, column: places in the dimensions that are run, flattened.  A complex table has two columns for each number,
    the real and the imaginary part.  table: which of the leaves that are not x, in the order of the program.
    """

    lane: int
    coefficient: int
    table: int | None = None
    column: int = 0


Lanes = tuple[tuple[Term, ...], ...]
"""Of each number of a result the terms that it is the sum of, no two with the same lane of x."""


@dataclass(frozen=True)
class Linear:
    """What `Region.program` finds.  tables: the leaves that are not x, and how many of the dimensions of each are run.
    nodes: those that compute with x, the calls of split among them."""

    program: Program
    tables: list[tuple[Node, int]]
    nodes: frozenset[Node]


class Region:
    """The steps from a result up to its leaves.

    root: the result.  before, after: how many of its first and last dimensions stay where they are in every step; the
        sizes of those between, which are run, must be known.
    ends: what is read no further, and the tensor that it counts as.  To be filled in before `program`.
    """

    def __init__(self, root: Node, before: int, after: int = 0) -> None:
        self.root, self.before, self.after = root, before, after
        self.ends: dict[Node, Node] = {}
        # Asked again and again for the same node.
        self.inner = functools.cache(self._inner)
        self.operands = functools.cache(self._operands)
        self._is_in = functools.cache(self._has_outer_dims)

    def outer(self, node: Node) -> list[int | torch.SymInt]:
        """The sizes of the dimensions that no step moves."""
        shape = value(node).shape
        return [*shape[: self.before], *shape[len(shape) - self.after :]]

    def _inner(self, node: Node) -> tuple[int, ...]:
        """The sizes of the dimensions that are run."""
        shape = value(node).shape
        return tuple(fixed(size) or 0 for size in shape[self.before : len(shape) - self.after])

    def is_whole(self, node: Node) -> bool:
        """True for a tensor with the outer dimensions of the result, none of them 1 instead."""
        return self._is_in(node) and same_shape(self.outer(node), self.outer(self.root))

    def picked_from(self, node: Node) -> Node | None:
        """The tensor of whose elements a slice, a select or a part of a split has some."""
        call = _split_of(node) or node
        source = call.args[0] if calls(call, *_PICKS) and call.args and len(call.all_input_nodes) == 1 else None
        if not (isinstance(source, Node) and self._is_in(source) and self._is_in(node)):
            return None
        return source if self._moves_inner(call, source) else None

    def reshaped_from(self, node: Node) -> Node | None:
        """The tensor of which a node is a copy, or another shape of the dimensions that are run."""
        source = node.args[0] if calls(node, *_SHAPES) and node.args else None
        if not (isinstance(source, Node) and self._is_in(source) and self._is_in(node)):
            return None
        kept = same_shape(self.outer(source), self.outer(node))
        return source if kept and math.prod(self.inner(source)) == math.prod(self.inner(node)) else None

    def repeated_from(self, node: Node) -> Node | None:
        """The tensor of which a node has every element, some of them several times."""
        expands = calls(node, aten.expand.default)
        repeats = calls(node, aten.repeat.default) and len(node.all_input_nodes) == 1
        source = node.args[0] if (expands or repeats) and node.args else None
        if not (isinstance(source, Node) and self._is_in(source) and self._is_in(node)):
            return None
        fits = expands or same_shape(self.outer(source), self.outer(node))
        return source if fits and value(source).ndim == value(node).ndim else None

    def rearranged_from(self, node: Node) -> Node | None:
        """The tensor of which a node has elements, in other places, and nothing else."""
        return self.picked_from(node) or self.reshaped_from(node) or self.repeated_from(node)

    def _operands(self, node: Node) -> tuple[Node, ...]:
        """The tensors that a step is made of; none where a node is no step."""
        if (source := self.rearranged_from(node)) is not None:
            return (source,)
        inputs = tuple(node.all_input_nodes)
        if not self._is_in(node) or node.op != "call_function" or not inputs or not node.args:
            return ()
        if calls(node, aten.cat.default):
            return inputs if all(map(self._is_in, inputs)) and self._moves_inner(node, node) else ()
        if not all(map(_is_precise, (node, *inputs))):
            return ()
        if calls(node, *_UNARY) or is_cast(node):
            return inputs if all(map(self._is_in, inputs)) else ()
        return inputs if calls(node, *MULTIPLICATIONS, *_SUMS) and self.is_whole(node) and _is_plain(node) else ()

    def program(self, x: Node) -> Linear:
        """How the result is computed from x, which becomes an end.  Raises NotLinear where it is not, or the region is
        too large."""
        if value(x).is_complex():
            raise NotLinear
        self.ends.setdefault(x, x)
        made_of_x = self._made_of(x)
        steps: list[Leaf | Instruction] = []
        places: dict[Node, int] = {}
        tables: list[tuple[Node, int]] = []

        def leaf(node: Node, rank: int) -> int:
            """rank: of the dimensions that are run.  A table may have fewer dimensions than what it is multiplied with:
            then torch aligns the last ones."""
            shape = value(node).shape
            count = min(len(shape), rank)
            inner = [fixed(size) or 0 for size in shape[len(shape) - self.after - count : len(shape) - self.after]]
            made = Leaf((*[1] * (rank - count), *inner), value(node).is_complex(), node is x)
            if node not in places:
                places[node] = len(steps)
                steps.append(made)
                if node is not x:
                    tables.append((node, count))
            if steps[places[node]] != made or not math.prod(inner) or not inner:
                raise NotLinear
            return places[node]

        def visit(node: Node, rank: int) -> int:
            node = self.ends.get(node, node)
            is_arithmetic = calls(node, *MULTIPLICATIONS, *_SUMS)
            is_table = self._rank(node) < rank or (is_arithmetic and node not in made_of_x)
            operands = () if node in self.ends or is_table else self.operands(node)
            if not operands:
                return leaf(node, rank)
            if node not in places:
                refs = {a: Ref(visit(a, self._rank(node if is_arithmetic else a))) for a in operands}
                places[node] = len(steps)
                steps.append(self._instruction(node, refs))
            return places[node]

        visit(self.root, self._rank(self.root))
        if x not in places:
            raise NotLinear
        nodes = (made_of_x & places.keys()) - {x, *(table for table, _ in tables)}
        splits = {split for node in nodes if (split := _split_of(node)) is not None}
        return Linear(Program(self.before, self.after, tuple(steps)), tables, frozenset(nodes | splits))

    def _made_of(self, x: Node) -> set[Node]:
        """The nodes of the region that depend on x."""
        found: set[Node] = set()
        work = [self.root]
        while work:
            node = work.pop()
            if node in found or node in self.ends:
                continue
            if len(found) == MAX_STEPS:
                raise NotLinear
            found.add(node)
            work += self.operands(node)
        made = {x}
        for node in sorted(found):
            if any(self.ends.get(operand, operand) in made for operand in self.operands(node)):
                made.add(node)
        return made

    def _instruction(self, node: Node, refs: dict[Node, Ref]) -> Instruction:
        split = _split_of(node)
        part: Any = node.args[1] if split is not None else None
        call = split or node
        if calls(call, aten.expand.default, *_SHAPES, *CASTS):
            return Instruction(call.target, tuple(refs.values()), (), None, self.inner(node))  # `inner` says the rest
        args, kwargs = map_arg((call.args, call.kwargs), refs.__getitem__)  # type: ignore[arg-type]
        return Instruction(call.target, args, tuple(sorted(kwargs.items())), part, self.inner(node))

    def _rank(self, node: Node) -> int:
        return value(node).ndim - self.before - self.after

    def _has_outer_dims(self, node: Node) -> bool:
        """True for a tensor with the outer dimensions of the result, or 1 instead of some, and known sizes between."""
        if not is_tensor(node) or self._rank(node) < 1:
            return False
        sizes = zip(self.outer(node), self.outer(self.root), strict=True)
        return 0 not in self.inner(node) and all(same(a, b) or same(a, 1) for a, b in sizes)

    def _moves_inner(self, call: Node, like: Node) -> bool:
        """True where the dimension that a call works on, of a tensor of this rank, is one of those that are run."""
        position = 2 if calls(call, *SPLITS) and not calls(call, aten.unbind.int) else 1
        dim, rank = argument(call, position, "dim", 0), value(like).ndim
        return isinstance(dim, int) and self.before <= dim % rank < rank - self.after


def computed_alike(a: object, b: object) -> bool:
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


def _split_of(node: Node) -> Node | None:
    """The call of which a node is one part."""
    split = node.args[0] if node.target is operator.getitem else None
    return split if isinstance(split, Node) and calls(split, *SPLITS) else None


def _is_precise(node: Node) -> bool:
    """True for floating-point or complex numbers of 16 bits or more."""
    dtype = value(node).dtype if is_tensor(node) else torch.bool
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize >= 2)


def _is_plain(node: Node) -> bool:
    """True for a sum or product of two tensors, without `alpha`, and for a product with a whole number."""
    if node.kwargs or len(node.args) != 2 or not isinstance(node.args[0], Node):
        return False
    other = node.args[1]
    if isinstance(other, Node):
        return True
    return calls(node, *MULTIPLICATIONS) and isinstance(other, (int, float)) and other == round(other)


@functools.lru_cache(maxsize=256)
def run(program: Program) -> Lanes | None:
    """What each number of the result is made of, in the order of the dimensions that are run, flattened; None where
    that is no sum of `Term`s.  Equal programs are run once."""
    leaves = [step for step in program.steps if isinstance(step, Leaf)]
    (size,) = (math.prod(leaf.inner) for leaf in leaves if leaf.is_x)
    widths = [math.prod(leaf.inner) * (2 if leaf.is_complex else 1) for leaf in leaves if not leaf.is_x]
    count = 1 + sum(widths)
    if not _is_bilinear(program) or MAX_WEIGHT * count**MAX_WEIGHT >= 2**53:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        columns = numbers(count)
        units = torch.cat((torch.eye(size, device="cpu"), torch.zeros(1, size, device="cpu"))).double()
        rows = (iter(row.split([1, *widths])[1:]) for row in columns)
        return _terms(torch.stack([_execute(program, units, row) for row in rows]), columns, widths)


def numbers(count: int) -> Tensor:
    """The tables with which regions are run, [MAX_WEIGHT + 2, count], the first column without a table: the powers that
    tell columns apart, and random numbers, with which the same must come out."""
    points = torch.arange(1, count + 1, device="cpu")
    random = torch.randint(2**30, 2**48, (count,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    random[0] = 1
    return torch.stack([*(points**power for power in range(MAX_WEIGHT + 1)), random]).double()


def _is_bilinear(program: Program) -> bool:
    """True where no product has x or a table twice, and no sum too many terms."""
    seen: list[tuple[int, int, int]] = []  # (all |c|, of a complex number in both parts; factors x; tables)
    for step in program.steps:
        if isinstance(step, Leaf):
            seen.append((1 + step.is_complex, int(step.is_x), int(not step.is_x)))
            continue
        weights, xs, tables = zip(*(seen[ref.step] for ref in _refs(step)), strict=True)
        made = (max(weights), max(xs), max(tables))
        if step.target in _SUMS:
            made = (sum(weights), *made[1:])
        elif step.target in MULTIPLICATIONS and len(weights) == 2:
            made = (math.prod(weights), sum(xs), sum(tables))
        elif step.target in MULTIPLICATIONS or step.target is aten.view_as_complex.default:
            made = (made[0] * (2 if len(step.args) == 1 else abs(round(step.args[1]))), *made[1:])
        if made[0] > MAX_WEIGHT or max(made[1:]) > 1:
            return False
        seen.append(made)
    return True


def _refs(step: Instruction) -> list[Ref]:
    """The tensors that a step takes, as often as it takes them."""
    args = itertools.chain.from_iterable(arg if isinstance(arg, (list, tuple)) else [arg] for arg in step.args)
    return [arg for arg in args if isinstance(arg, Ref)]


def _execute(program: Program, units: Tensor, tables: Iterator[Tensor]) -> Tensor:
    """The result for each of some values of x [values, numbers of x], with the same tables; [values, numbers]."""
    made: list[Any] = []
    for step in program.steps:
        shape = (len(units), *[1] * (program.before - 1), *step.inner, *[1] * program.after)
        if isinstance(step, Leaf):
            x = units if step.is_x else next(tables).expand(len(units), -1)
            made.append(_complex(x.reshape(*shape, 2)) if step.is_complex else x.reshape(shape))
            continue
        args = map_aggregate(step.args, lambda arg: made[arg.step] if isinstance(arg, Ref) else arg)
        if step.target in CASTS:
            made.append(args[0])
        elif step.target in _SHAPES:
            made.append(args[0].reshape(shape))
        elif step.target is aten.expand.default:
            made.append(args[0].expand(shape))
        elif step.target is aten.view_as_complex.default:
            made.append(_complex(args[0]))
        else:
            x = step.target(*args, **dict(step.kwargs))
            made.append(x if step.part is None else x[step.part])
    return made[-1].reshape(len(units), -1)


def _complex(pairs: Tensor) -> Tensor:
    """`view_as_complex`, whatever the strides: those of the graph are not those here."""
    return torch.complex(*pairs.unbind(-1))


def _terms(result: Tensor, columns: Tensor, widths: list[int]) -> Lanes | None:
    """The terms of a result [rows of the tables, numbers of x + 1, numbers], where the last value of x is 0."""
    if result[:, -1].any():
        return None  # something without x
    outs, lanes = (result[:, :-1] != 0).any(0).T.nonzero(as_tuple=True)
    found = result[:, lanes, outs]
    coefficients, points = found[0], found[1] / found[0]
    places = (points.nan_to_num(0, 0, 0) - 1).long().clamp(0, columns.shape[1] - 1)
    *powers, check = (coefficients * columns[:, places] == found).all(1).tolist()
    if not all(powers):
        return None
    if not check:
        raise AssertionError("two sets of numbers in the tables tell different things about a region")
    ends = list(itertools.accumulate(widths, initial=1))
    made: list[list[Term]] = [[] for _ in range(result.shape[2])]
    for out, lane, c, place in zip(*(x.tolist() for x in (outs, lanes, coefficients, places)), strict=True):
        table = bisect.bisect_right(ends, place) - 1
        term = Term(lane, int(c)) if place == 0 else Term(lane, int(c), table, place - ends[table])
        made[out].append(term)
    return tuple(map(tuple, made))


def evaluate(node: Node) -> Tensor | None:
    """The value of `node` on the CPU, where it is made from constants alone; else None.  Nothing depends on an input
    then, so the value while compiling is the value of every call."""
    order = _constant_ancestors(node)
    if order is None:
        return None
    last_use = {source: current for current in order for source in current.all_input_nodes}
    values: dict[Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for current in order:
            args, kwargs = map_arg((current.args, current.kwargs), values.__getitem__)
            if "device" in kwargs:
                kwargs = kwargs | {"device": torch.device("cpu")}
            values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
            for source in current.all_input_nodes:
                if last_use[source] is current:
                    del values[source]
    result = values[node]
    return result if isinstance(result, Tensor) else None


def _constant_ancestors(node: Node) -> list[Node] | None:
    """`node` and all that it is computed from, in order; None if an input, a symbolic size, a random number or a side
    effect is among it, or it is too much."""
    size = 0
    found: set[Node] = set()
    work = [node]
    while work:
        current = work.pop()
        if current in found:
            continue
        found.add(current)
        schema = getattr(current.target, "_schema", None)
        val = current.meta.get("val")
        if (
            current.op != "call_function"
            or schema is None
            or any(mutated_nodes(current))
            or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ())
            or not isinstance(val, Tensor)
            or not all(isinstance(size, int) for size in val.shape)
        ):
            return None
        if not is_view(current) and not calls(current, aten.expand.default):
            size += val.numel() * val.element_size()
        if len(found) > MAX_CONSTANTS or size > MAX_CONSTANT_BYTES:
            return None
        work.extend(current.all_input_nodes)
    return sorted(found)
