"""Lanes: what a node holds in each of its inner dimensions, as a sum of terms, and what ops do to that.

A term is a coefficient times one dimension of each of its factors, which are tensors of the graph.  The inner
dimensions are the last ones, flattened; those before, of tokens and heads, are not looked at here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from fusion_passes.graph.read import argument, aten, calls, value
from fusion_passes.graph.symbolic import fixed


class Other(Exception):
    """This is something else than a rotary embedding."""


@dataclass(frozen=True)
class Term:
    """A summand in every dimension: a coefficient, 0 where it is absent, times one dimension of each factor."""

    coefficients: list[float]
    factors: tuple[tuple[Node, list[int]], ...]

    def at(self, indices: list[int]) -> Term:
        """In other dimensions, in other order."""
        factors = tuple((leaf, [lanes[i] for i in indices]) for leaf, lanes in self.factors)
        return Term([self.coefficients[i] for i in indices], factors)


@dataclass(frozen=True)
class Sum:
    """What a node holds in its inner dimensions, flattened: a sum of terms."""

    inner: tuple[int, ...]
    terms: tuple[Term, ...]

    def at(self, indices: list[int], inner: tuple[int, ...]) -> Sum:
        """In other dimensions, in other order, of another shape."""
        return Sum(inner, tuple(term.at(indices) for term in self.terms))

    def holds(self, leaf: Node) -> bool:
        """True where a term has this tensor for a factor."""
        return any(factor is leaf for term in self.terms for factor, _ in term.factors)

    def shaped(self, inner: tuple[int, ...]) -> Sum:
        """Of as many dimensions in another shape."""
        return Sum(inner, self.terms)

    def times(self, factor: float) -> Sum:
        """Multiplied by a number."""
        return Sum(
            self.inner, tuple(Term([c * factor for c in term.coefficients], term.factors) for term in self.terms)
        )


def leaf_sum(leaf: Node, inner: tuple[int, ...]) -> Sum:
    """What is read no further: one term, itself."""
    lanes = list(range(math.prod(inner)))
    return Sum(inner, (Term([1.0] * len(lanes), ((leaf, lanes),)),))


def broadcast(x: Sum, inner: tuple[int, ...]) -> Sum:
    """As torch does: to the shape of another operand."""
    if x.inner == inner:
        return x
    padded = (1,) * (len(inner) - len(x.inner)) + x.inner
    if len(padded) != len(inner) or any(a not in (1, b) for a, b in zip(padded, inner, strict=True)):
        raise Other
    indices = [0]
    for size, wanted in zip(padded, inner, strict=True):
        indices = [at * size + (i if size > 1 else 0) for at in indices for i in range(wanted)]
    return x.at(indices, inner)


def cat(parts: list[Sum], dim: int) -> Sum:
    """Terms side by side: one that a part does not have is 0 there."""
    inner = list(parts[0].inner)
    if any(len(part.inner) != len(inner) or part.inner[:dim] != parts[0].inner[:dim] for part in parts):
        raise Other
    inner[dim] = sum(part.inner[dim] for part in parts)
    blocks = [math.prod(part.inner[dim:]) for part in parts]
    if math.prod(inner[:dim]) * sum(blocks) != math.prod(inner):
        raise Other
    rows: list[tuple[list[Node], dict[int, Term]]] = []  # terms of the same leaves, by the part that has them
    for at, part in enumerate(parts):
        for term in part.terms:
            leaves = [leaf for leaf, _ in term.factors]
            row = next((row for same, row in rows if same == leaves and at not in row), None)
            if row is None:
                rows.append((leaves, {at: term}))
            else:
                row[at] = term
    terms = []
    for leaves, row in rows:
        coefficients: list[float] = []
        lanes: list[list[int]] = [[] for _ in leaves]
        for outer in range(math.prod(inner[:dim])):
            for at, block in enumerate(blocks):
                span = slice(outer * block, (outer + 1) * block)
                coefficients += row[at].coefficients[span] if at in row else [0.0] * block
                for k, lane in enumerate(lanes):
                    lane += row[at].factors[k][1][span] if at in row else [0] * block
        terms.append(Term(coefficients, tuple(zip(leaves, lanes, strict=True))))
    return Sum(tuple(inner), tuple(terms))


def product(left: Sum, right: Sum, inner: tuple[int, ...]) -> Sum:
    """Each term by each.  Raises Other for more than two factors."""
    left, right = broadcast(left, inner), broadcast(right, inner)
    terms = []
    for a in left.terms:
        for b in right.terms:
            if len(a.factors) + len(b.factors) > 2:
                raise Other
            # In one order, so that equal products are told as equal.
            factors = sorted((*a.factors, *b.factors), key=lambda factor: factor[0])
            coefficients = [x * y for x, y in zip(a.coefficients, b.coefficients, strict=True)]
            if any(coefficients):
                terms.append(Term(coefficients, tuple(factors)))
    return Sum(inner, tuple(terms))


def complex_product(pairs: Sum, by: Node, inner: tuple[int, ...]) -> Sum:
    """Pairs [half, 2] times complex numbers [half], whose parts count as the columns 2 i and 2 i + 1."""
    if pairs.inner != inner or len(inner) != 2 or fixed(value(by).shape[-1]) != inner[0]:
        raise Other
    if not value(by).is_complex():
        raise Other  # both parts multiplied by the same number
    lanes = range(2 * inner[0])
    others = pairs.at([i ^ 1 for i in lanes], inner)
    terms = []
    for held, part, sign in ((pairs, 0, 1.0), (others, 1, -1.0)):
        for term in held.terms:
            if len(term.factors) > 1:
                raise Other
            factors = (*term.factors, (by, [i - i % 2 + part for i in lanes]))
            coefficients = [c * (sign if i % 2 == 0 else 1.0) for i, c in zip(lanes, term.coefficients, strict=True)]
            terms.append(Term(coefficients, factors))
    return Sum(inner, tuple(terms))


def picked_range(node: Node, size: int) -> range | None:
    """What a slice or a select takes of a dimension of this size; None where it is not known."""
    if calls(node, aten.select.int):
        at = argument(node, 2, "index")
        return range(at % size, at % size + 1) if isinstance(at, int) else None
    bounds: list[int | None] = []
    for x in (argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)):
        if x is not None and not isinstance(x, int):
            return None
        bounds.append(x)
    return range(size)[slice(*bounds)]


def split_range(split: Node, which: int, size: int) -> range | None:
    """The same for a part of a split."""
    if calls(split, aten.unbind.int):
        return range(which % size, which % size + 1)
    sizes = argument(split, 1, "split_sizes")
    if isinstance(sizes, int):
        which %= -(-size // sizes)  # parts
        return range(size)[which * sizes : (which + 1) * sizes]
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(x, int) for x in sizes):
        return None
    which %= len(sizes)
    start = sum(sizes[:which])
    return range(start, start + sizes[which])
