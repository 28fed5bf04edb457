"""Layouts: which dimensions count tokens, heads and the numbers of a head, and how tables go with them.

Graphs have tokens and heads in any order, [batch, heads, length, head_dim] or [tokens, heads, head_dim], and tables
that broadcast to that, or are looked up by position.  Kernels take one normal form: tensors are token-major, that is
[tokens, heads, head_dim], tables are [rows, columns], and positions say which row is whose.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node

from fusion_passes.graph.match import Call
from fusion_passes.graph.read import (
    CASTS,
    COPIES,
    SPLITS,
    argument,
    aten,
    calls,
    is_tensor,
    is_view,
    prims,
    same_layout,
    same_shape,
    value,
)
from fusion_passes.graph.region import computed_alike
from fusion_passes.graph.steps import is_cast
from fusion_passes.graph.symbolic import fixed, known
from fusion_passes.graph.views import applied

Size = int | SymInt


@dataclass(frozen=True, eq=False)
class Layout:
    """Of x [..., head_dim]: dimension `head` counts heads, the others before the last one count tokens.  None where it
    is not known which."""

    x: Node
    head: int | None

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return value(self.x).ndim

    @property
    def heads(self) -> int | None:
        """How many; None where that is not known."""
        return None if self.head is None else fixed(value(self.x).shape[self.head])

    @property
    def head_dim(self) -> int | None:
        """The numbers of a head; None where that is not known."""
        return fixed(value(self.x).shape[-1])

    @property
    def tokens(self) -> list[Size]:
        """The sizes of the dimensions that count tokens."""
        return self.of_tokens(value(self.x).shape[:-1])

    @property
    def count(self) -> Size:
        """How many tokens."""
        return math.prod(self.tokens)

    def of_tokens(self, each: Iterable[Any]) -> list[Any]:
        """What is given for each dimension, of those that count tokens."""
        return [what for d, what in enumerate(each) if d != self.head]

    def order(self, rank: int) -> list[int]:
        """The dimensions of x, or of as many, with the tokens first, then heads and the numbers of a head."""
        last = rank - 1
        return [*self.of_tokens(range(last)), last if self.head is None else self.head, last]

    def token_major(self, call: Call) -> Node:
        """x as [tokens, heads, head_dim]."""
        node, order = self.x, self.order(self.rank)
        if order != sorted(order):
            node = call(aten.permute.default, node, order)
        return node if self.rank == 3 else call(aten.reshape.default, node, [-1, self.heads, self.head_dim])

    def restored(self, node: Node, call: Call) -> Node:
        """[tokens, heads, head_dim] with the dimensions as x has them."""
        if self.rank != 3:
            tokens = self.of_tokens(range(self.rank - 1))
            unknown = [d for d in tokens if fixed(value(self.x).shape[d]) is None]
            sizes = [-1 if unknown == [d] else self.size(d, call) for d in tokens]
            node = call(aten.reshape.default, node, [*sizes, self.heads, self.head_dim])
        order = self.order(self.rank)
        back = [order.index(d) for d in range(self.rank)]
        return node if back == sorted(back) else call(aten.permute.default, node, back)

    def size(self, dim: int, call: Call) -> int | Node:
        """A size as an argument: a number, or a node that has it."""
        size = fixed(value(self.x).shape[dim])
        return call(aten.sym_size.int, self.x, dim) if size is None else size

    def like(self, x: Tensor) -> Tensor:
        """A new tensor of the same sizes as x, token-major in memory."""
        order = self.order(x.ndim)
        made = torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device)
        return made.permute([order.index(d) for d in range(x.ndim)])

    def leads_to(self, path: Sequence[Node], end: Tensor) -> bool:
        """True where the views of `path` lead from a tensor like x to `end` [tokens, heads, head_dim], each number at
        its place.  Tried with one that is token-major in memory: then no view copies, and the end is contiguous."""
        views = [node for node in path if is_view(node) and not calls(node, *COPIES)]
        if not views and self.rank == 3 and self.head == 1:
            return True
        mode = detect_fake_mode(value(self.x))
        if mode is None:
            return False
        with mode:
            moved = _viewed(self.like(value(self.x)), views)
            fits = moved is not None and same_shape(moved.shape, end.shape) and moved.ndim == 3
            return fits and moved is not None and same_layout(moved, torch.empty_like(moved).contiguous())


def head_dimension(x: Node, tables: Iterable[Table], path: Sequence[Node], end: Tensor) -> int | None:
    """The dimension of x that counts heads: where the tables have one element; None where there is none.

    Where all sequences share the rows, there are several such; then it is the one for which `path` leads to `end`
    [tokens, heads, head_dim].
    """
    shape, rows = value(x).shape, [table.rows(x) for table in tables]
    found = [
        d for d in range(len(shape) - 1) if fixed(shape[d]) is not None and all(known(sizes[d] == 1) for sizes in rows)
    ]
    found = [d for d in found if end.ndim == 3 and known(shape[d] == end.shape[1])] or found
    several = [d for d in found if not known(shape[d] == 1)]
    found = [*several, *(d for d in reversed(found) if d not in several)]
    return next((d for d in found if Layout(x, d).leads_to(path, end)), next(iter(found), None))


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
        parts = torch.view_as_real(source) if source.is_complex() else source
        x = parts.flatten(-self.inner - source.is_complex())
        return x[..., self.start : self.start + self.width * self.step : self.step]

    def same(self, other: Table) -> bool:
        """True where both hold the same numbers: the same columns of one tensor, or of two computed alike."""
        columns = (self.start, self.width, self.step, self.inner)
        return columns == (other.start, other.width, other.step, other.inner) and computed_alike(
            self.source, other.source
        )

    def rows(self, x: Node) -> list[Size]:
        """The sizes in the dimensions of x that are tokens and heads, 1 where the source has none."""
        sizes = value(self.source).shape[: value(self.source).ndim - self.inner]
        return [*[1] * (value(x).ndim - 1 - len(sizes)), *sizes]

    def lookup(self, layout: Layout) -> Lookup | None:
        """Where the rows come from, if they are those of another table at the position of each token; else None."""
        node = self.source
        path: list[Node] = []
        while is_view(node) or calls(node, aten.slice.Tensor) or is_wide_cast(node) or _is_split(node):
            if not calls(node, *CASTS, *COPIES):
                path.insert(0, node)
            node = node.all_input_nodes[0]
        found = _indexed(node)
        if found is None or value(found[0]).ndim < 2 or layout.head is None:
            return None
        table, positions = found
        start = self._first_column(node, path, layout, math.prod(value(table).shape[1:]))
        return None if start is None else Lookup(table, positions, start + self.start)

    def _first_column(self, looked_up: Node, path: list[Node], layout: Layout, columns: Size) -> int | None:
        """Where the columns begin in rows that were looked up, if row t of the source is that of token t; else None.
        Tried as in `Layout.leads_to`."""
        mode = detect_fake_mode(value(looked_up))
        if mode is None:
            return None
        with mode:
            base = torch.empty_like(value(looked_up)).contiguous()
            moved = _viewed(base, path)
            if moved is None:
                return None
            outer = moved.ndim - self.inner
            moved = moved.flatten(-self.inner)
            for _ in range(layout.rank - 1 - outer):
                moved = moved.unsqueeze(0)
            rows = moved.permute(layout.order(moved.ndim)).flatten(0, -2)
            is_view_of_it = rows._base is base or rows is base
            (count, width), (step, next_column) = rows.shape, rows.stride()
            whole = known(count * columns == base.numel())  # a row for each position
            in_order = known(count == 1) or known(step == columns)
            if not (is_view_of_it and whole and in_order and (known(width == 1) or known(next_column == 1))):
                return None
            start = fixed(rows.storage_offset())
        return 2 * start if start is not None and base.is_complex() else start

    def two_dimensional(self, call: Call, lookup: Lookup | None, head: int | None) -> Node:
        """The columns as [rows, columns]: of the table that rows are looked up in, or of the source."""
        if lookup is not None:
            node, start, inner = lookup.table, lookup.start, value(lookup.table).ndim - 1
        else:
            node, start, inner = self.source, self.start, self.inner
            outer = value(node).ndim - inner
            if head is not None and 0 <= head < outer:
                order = [d for d in range(outer) if d != head]
                if [*order, head] != list(range(outer)):
                    node = call(aten.permute.default, node, [*order, head, *range(outer, value(node).ndim)])
        if value(node).is_complex():
            node, inner = call(aten.view_as_real.default, node), inner + 1
        if (value(node).ndim, inner) != (2, 1):
            sizes = value(node).shape[value(node).ndim - inner :]
            node = call(aten.reshape.default, node, [-1, math.prod(fixed(size) or 0 for size in sizes)])
        if start == 0 and self.step == 1 and known(value(node).shape[1] == self.width):
            return node
        return call(aten.slice.Tensor, node, 1, start, start + self.width * self.step, self.step)


@dataclass(frozen=True)
class Lookup:
    """Rows of a table [rows, columns] at positions, from column `start` on; columns may be several dimensions."""

    table: Node
    positions: Node
    start: int


def lookups(layout: Layout, *tables: Table) -> tuple[Lookup, ...]:
    """Where all the tables are looked up by the same positions, one for each row; none where they are not."""
    found = [table.lookup(layout) for table in tables]
    same = [at for at in found if at is not None and found[0] is not None and at.positions is found[0].positions]
    return tuple(same) if len(same) == len(found) else ()


def table_arguments(layout: Layout, tables: Sequence[Table], call: Call) -> tuple[list[Node], Node | None]:
    """The tables as [rows, columns], and the positions that say which row is whose; None where row t is that of token
    t."""
    found = lookups(layout, *tables)
    rows = []
    for i, table in enumerate(tables):
        missing = layout.rank - 1 - (value(table.source).ndim - table.inner)
        head = None if layout.head is None else layout.head - missing
        rows.append(table.two_dimensional(call, found[i] if found else None, head))
    return rows, _positions(layout, tables[0], found[0].positions if found else None, call)


def _positions(layout: Layout, table: Table, positions: Node | None, call: Call) -> Node | None:
    """The row of each token: positions for the rows that the table has here, or none for one after the other.  Where
    several tokens share a row (all sequences of a batch the same), it is said for each."""
    rows = layout.of_tokens(table.rows(layout.x))
    if not same_shape(layout.tokens, rows):
        dims = layout.of_tokens(range(layout.rank - 1))
        if positions is None:
            along = next((d for d, size in zip(dims, rows, strict=True) if not known(size == 1)), None)
            count = 1 if along is None else layout.size(along, call)
            options = {"dtype": torch.int64, "device": value(layout.x).device, "requires_grad": False}
            positions = call(prims.iota.default, count, start=0, step=1, **options)  # what `arange` is at this stage
        positions = call(aten.reshape.default, positions, [1 if known(size == 1) else -1 for size in rows])
        positions = call(aten.expand.default, positions, [layout.size(d, call) for d in dims])
    if positions is not None and value(positions).ndim != 1:
        positions = call(aten.reshape.default, positions, [-1])
    return positions


def found_or_added(call: Call, last: Node) -> Call:
    """`call`, but for what is in the graph already, before `last`: all layers of a model prepare the same tables."""

    def found_or_added(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        for node in last.graph.find_nodes(op="call_function", target=target):
            if node < last and node.args == args and node.kwargs == kwargs:
                return node
        return call(target, *args, **kwargs)

    return found_or_added


def larger_than_one(sizes: Iterable[Size]) -> list[Size]:
    """The sizes that may be more than 1."""
    return [size for size in sizes if not known(size == 1)]


def copied_into(wanted: Tensor, node: Node, call: Call) -> Node:
    """A copy with the strides of `wanted`, as far as an order of the dimensions gives them; `node` if it has them."""
    x = value(node)
    if same_layout(x, wanted):
        return node
    for order in itertools.permutations(range(x.ndim)):
        sizes = [x.shape[d] for d in order]
        strides = [math.prod(sizes[i + 1 :]) for i in range(x.ndim)]
        if all(known(x.shape[d] == 1) or known(strides[i] == wanted.stride(d)) for i, d in enumerate(order)):
            moved = call(aten.permute.default, node, list(order))
            copied = call(aten.clone.default, moved, memory_format=torch.contiguous_format)
            return call(aten.permute.default, copied, [order.index(d) for d in range(x.ndim)])
    return node


def is_wide_cast(node: Node) -> bool:
    """True for a cast between floating-point dtypes, on one device, that is not to FP8, which would round."""
    return is_cast(node) and value(node).dtype.itemsize > 1


def _viewed(x: Tensor, views: Sequence[Node]) -> Tensor | None:
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


def _indexed(node: Node) -> tuple[Node, Node] | None:
    """(table, positions) of a lookup of rows."""
    if calls(node, aten.index.Tensor):
        table, indices = argument(node, 0, "self"), argument(node, 1, "indices")
        positions = indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None
    elif calls(node, aten.embedding.default):
        table, positions = argument(node, 0, "weight"), argument(node, 1, "indices")  # the others are of the gradient
    elif calls(node, aten.index_select.default) and argument(node, 1, "dim") == 0:
        table, positions = argument(node, 0, "self"), argument(node, 2, "index")
    else:
        return None
    if not (isinstance(table, Node) and is_tensor(table) and isinstance(positions, Node) and is_tensor(positions)):
        return None
    # Others are a mask, which takes the rows where it is True.
    return (table, positions) if value(positions).dtype in (torch.int32, torch.int64) else None
