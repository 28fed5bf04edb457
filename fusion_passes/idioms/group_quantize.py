"""GroupQuantize: FP8 quantisation by scales chosen from the tensor itself, one for each group of neighbours.

Read upwards from the cast to FP8, as `Quantize` is: clamps and views, one division by a tensor of scales, and the
tensor; from the scales, too: views and expansions, a lower bound, the division by the largest code, the maximum over
the group, `abs`.  Views only where they keep the order of the elements, so that a group is one in the tensor as well.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes import quant
from fusion_passes.graph import RESHAPES, argument, aten, calls, is_noop, is_tensor, same_shape, value
from fusion_passes.idioms import Idiom, NearMiss
from fusion_passes.idioms.reading import (
    CASTS,
    DIVISIONS,
    MULTIPLICATIONS,
    Unread,
    constant,
    is_cast,
    is_exact_cast,
    is_high_precision,
    op_call,
    op_name,
    read_all,
)
from fusion_passes.quant import FP8_DTYPES
from fusion_passes.symbolic import known

OPAQUE = "fusion_passes::quantize_fp8_dynamic"

KEEP_ORDER = RESHAPES | {
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
}
"""The views that leave element n at place n, counted row by row."""


@dataclass(frozen=True, eq=False)
class GroupQuantize(Idiom):
    """`output = views(cast(clamp(input / scale)))` with `scale = max(amax(|input|) / largest code, min_scale)`.

    input: the high-precision tensor before any cast and view of the quantisation.
    scales: the node that holds the scales, one for each `group_size` neighbours of input, in their order; None where
        nothing but the quantisation uses them.
    clamp: the bounds applied before the cast; None without a clamp.
    max_scale: the upper bound of the scales.
    opaque: the op's name where one op does it all, else None.
    views: those from the input to the output, in graph order; the codes go through them too.
    """

    input: Node
    scales: Node | None
    group_size: int
    dtype: torch.dtype
    clamp: tuple[float, float] | None
    min_scale: float
    max_scale: float = math.inf
    opaque: str | None = None
    views: tuple[Node, ...] = ()

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What it computes, in plain torch, from the value of `input`: codes, without the views, and scales."""
        groups = x.float().reshape(-1, self.group_size)
        limit = quant.max_value(self.dtype)
        scales = (groups.abs().amax(-1, keepdim=True) / limit).clamp(self.min_scale, self.max_scale)
        codes = groups / scales
        if self.clamp is not None:
            codes = codes.clamp(*self.clamp)
        return codes.to(self.dtype).reshape(x.shape), scales.flatten()


def recognize(graph: Graph) -> Iterator[GroupQuantize | NearMiss]:
    """Every dynamic quantisation per group of the graph, and what only looks like one.  Never raises."""
    return read_all(graph, "group_quantize", _read)


def _read(node: Node) -> GroupQuantize | None:
    if op_call(node, among=(OPAQUE,)) is not None:
        return _read_opaque(node)
    if not (calls(node, *CASTS) and is_tensor(node) and value(node).dtype in FP8_DTYPES and is_cast(node)):
        return None
    return _Reading(node).read()


class _Reading:
    """One walk from a cast to FP8 up to the tensor that is quantised."""

    def __init__(self, output: Node) -> None:
        self.output = output
        self.nodes = {output}
        self.low, self.high = -math.inf, math.inf
        self.scales: Node | None = None
        self.group_size = 0
        self.bounds = (0.0, math.inf)

    def read(self) -> GroupQuantize | None:
        step = self.output.all_input_nodes[0]
        views: list[Node] = []
        while True:
            step, passed = self._through(step)
            views[:0] = passed
            operand = self._clamped(step)
            if operand is None:
                break
            self.nodes.add(step)
            step = operand
        found = self._divided(step)
        if found is None:
            return None  # no dynamic quantisation
        x, amax = found
        root, before = self._through(x)
        magnitude, _ = self._through(amax.all_input_nodes[0])
        self.nodes |= {step, amax, magnitude}
        inner, _ = (
            self._through(magnitude.all_input_nodes[0]) if calls(magnitude, aten.abs.default) else (magnitude, ())
        )
        if inner is not root:
            return None  # the scales come from another tensor
        if magnitude is inner:
            self.fail("the scales come from the largest element, not from the largest magnitude")
        if not is_high_precision(root):
            self.fail(f"quantises {root.name}, which is not a high-precision floating-point tensor")
        return GroupQuantize(
            output=self.output,
            nodes=frozenset(self.nodes),
            input=root,
            scales=self.scales,
            group_size=self.group_size,
            dtype=value(self.output).dtype,
            clamp=None if (self.low, self.high) == (-math.inf, math.inf) else (self.low, self.high),
            min_scale=self.bounds[0],
            max_scale=self.bounds[1],
            views=(*before, *views),
        )

    def fail(self, reason: str) -> NoReturn:
        """The reading ends here.  The place is always the cast, where a static quantisation would be found too."""
        raise Unread(self.output, reason)

    def _through(self, node: Node) -> tuple[Node, tuple[Node, ...]]:
        """Up past views that keep the order and casts that lose nothing, which belong to the quantisation."""
        views: list[Node] = []
        while calls(node, *KEEP_ORDER) or is_noop(node) or is_exact_cast(node):
            self.nodes.add(node)
            if calls(node, *KEEP_ORDER):
                views.insert(0, node)
            node = node.all_input_nodes[0]
        return node, tuple(views)

    def _clamped(self, node: Node) -> Node | None:
        """The operand of a clamp to constants, which is recorded."""
        bounds = _clamp(node)
        if bounds is None:
            return None
        self.low, self.high = max(self.low, bounds[0]), min(self.high, bounds[1])
        return node.all_input_nodes[0]

    def _divided(self, node: Node) -> tuple[Node, Node] | None:
        """(tensor, maximum that its scales come from) of a division by scales; None where it is none."""
        if not calls(node, *DIVISIONS, *MULTIPLICATIONS):
            return None
        left, right = node.args[:2]
        pairs = [(left, right)] if calls(node, *DIVISIONS) else [(left, right), (right, left)]
        for x, scale in pairs:
            if isinstance(x, Node) and is_tensor(x) and isinstance(scale, Node) and is_tensor(scale):
                kept = set(self.nodes)
                amax = self._maximum(scale, value(x).shape, flipped=calls(node, *MULTIPLICATIONS))
                if amax is not None:
                    return x, amax
                self.nodes = kept
        return None

    def _maximum(self, node: Node, shape: torch.Size, *, flipped: bool) -> Node | None:
        """The maximum over groups that the scales at `node`, for a tensor of this shape, come from; what is in between
        is recorded.  flipped: the tensor is multiplied by them, so a reciprocal must be on the way."""
        steps: list[tuple[str, float, Node]] = []
        widths: list[int | torch.SymInt] = []  # over how many elements a scale is spread
        spread = value(node).shape
        if not same_shape(spread, shape):
            if not (same_shape(spread[:-1], shape[:-1]) and known(spread[-1] == 1)):
                return None
            widths.append(shape[-1])
        while not calls(node, aten.amax.default):
            if calls(node, aten.expand.default) and not is_noop(node):
                before, after = value(node.all_input_nodes[0]).shape, value(node).shape
                if not (len(before) == len(after) and same_shape(before[:-1], after[:-1]) and known(before[-1] == 1)):
                    return None
                widths.append(after[-1])
            elif calls(node, aten.reciprocal.default):
                steps.insert(0, ("reciprocal", 0.0, node))
            elif (bounds := _clamp(node)) is not None:
                steps[:0] = [("min", bounds[0], node), ("max", bounds[1], node)]
            elif (factor := _scaled(node)) is not None:
                if factor != 1.0:
                    steps.insert(0, ("times", factor, node))
            elif not (calls(node, *KEEP_ORDER) or is_exact_cast(node) or is_noop(node)):
                if _reaches_maximum(node):
                    self.fail(
                        f"the scales pass through {op_name(node)} ({node.name}): not the largest magnitude / code"
                    )
                return None
            self.nodes.add(node)
            node = node.all_input_nodes[0]
        rank = value(node.all_input_nodes[0]).ndim
        dims = argument(node, 1, "dim", [])
        if not (isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1]):
            return None  # not of neighbours
        group_size = value(node.all_input_nodes[0]).shape[-1]
        if len(widths) != 1 or not isinstance(group_size, int) or not known(widths[0] == group_size):
            return None
        self.group_size = group_size
        self._settle(steps, node, flipped)
        return node

    def _settle(self, steps: list[tuple[str, float, Node]], amax: Node, flipped: bool) -> None:
        """Read the steps from the maximum to the scales, in graph order."""
        limit = quant.max_value(value(self.output).dtype)
        low, high, factor = 0.0, math.inf, 1.0
        scales, reciprocal = amax, False
        for what, number, node in steps:
            if reciprocal:
                self.fail(f"the reciprocal of the scales passes through {op_name(node)} ({node.name})")
            if what == "reciprocal":
                reciprocal = True
                continue
            scales = node
            if what == "times":
                low, high, factor = low * number, high * number, factor * number
            elif what == "min":
                low, high = max(low, number), max(high, number)
            else:
                low, high = min(low, number), min(high, number)
        if reciprocal != flipped:
            self.fail("the tensor is multiplied by its scales, not divided by them")
        if not math.isclose(factor * limit, 1.0, rel_tol=1e-6):
            self.fail(f"the scales are the largest magnitude times {factor:g}, not divided by {limit:g}")
        self.scales, self.bounds = scales, (low, high)


def _reaches_maximum(node: Node) -> bool:
    """True where ops of one tensor each lead up to a maximum, soon."""
    for _ in range(8):
        if calls(node, aten.amax.default):
            return True
        if len(node.all_input_nodes) != 1 or node.op != "call_function":
            return False
        node = node.all_input_nodes[0]
    return False


def _clamp(node: Node) -> tuple[float, float] | None:
    """The bounds of a clamp to constants."""
    low: object
    high: object
    if calls(node, aten.clamp.default):
        low, high = argument(node, 1, "min"), argument(node, 2, "max")
    elif calls(node, aten.clamp_min.default):
        low, high = argument(node, 1, "min"), None
    elif calls(node, aten.clamp_max.default):
        low, high = None, argument(node, 1, "max")
    else:
        return None
    bounds = (-math.inf if low is None else constant(low), math.inf if high is None else constant(high))
    return None if bounds[0] is None or bounds[1] is None else (bounds[0], bounds[1])


def _scaled(node: Node) -> float | None:
    """f where the node is its one operand times f."""
    if not calls(node, *DIVISIONS, *MULTIPLICATIONS) or len(node.all_input_nodes) != 1:
        return None
    left, right = node.args[:2]
    if calls(node, *MULTIPLICATIONS):
        return constant(left) if isinstance(right, Node) else constant(right)
    number = constant(right)
    return None if number is None or number == 0.0 else 1.0 / number


def _read_opaque(node: Node) -> GroupQuantize | None:
    """`quantize_fp8_dynamic(x, *, dtype, granularity, group_size, scale_upper_bound) -> (codes, scales)`."""
    call = op_call(node, among=(OPAQUE,))
    assert call is not None
    given = call.arguments
    if given["granularity"] != "group":
        return None
    x, bound, dtype = given["x"], given["scale_upper_bound"], given["dtype"]
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if 0 not in results or not isinstance(x, Node) or not isinstance(dtype, torch.dtype):
        return None
    if not isinstance(given["group_size"], int):
        return None
    limit = quant.max_value(dtype)
    return GroupQuantize(
        output=results[0],
        nodes=frozenset({node, *results.values()}),
        input=x,
        scales=results.get(1),
        group_size=given["group_size"],
        dtype=dtype,
        clamp=(-limit, limit),
        min_scale=torch.finfo(torch.float32).tiny,
        max_scale=math.inf if not isinstance(bound, float) else bound,
        opaque=op_name(node),
    )


def _flat(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    spec = quant.QuantSpec(dtype, "group", 32, static=False)
    scales = quant.choose_scale(x, spec)
    return quant.quantize(x, scales, dtype), scales


def _grouped(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / limit).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups / scales).clamp(-limit, limit).to(dtype)
    return codes.flatten(-2), scales.squeeze(-1)


def _reciprocal(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.reshape(-1, x.shape[-1] // 32, 32)
    scales = groups.abs().amax(-1).float() * (1.0 / limit)
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups * (1.0 / scales)[..., None]).clamp(-limit, limit).to(dtype)
    return codes.view(x.shape), scales


def _lower_bound_of_the_magnitude(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = quant.max_value(dtype)
    groups = x.view(x.shape[0], -1, 32)
    scales = groups.abs().float().amax(2).clamp(1e-4) / limit
    return (groups.float() / scales.unsqueeze(2)).to(dtype).view(x.shape), scales


SPELLINGS: dict[str, Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]] = {
    "scales repeated over their groups": _flat,
    "in the shape of groups": _grouped,
    "multiply by the reciprocal": _reciprocal,
    "lower bound of the magnitude, no clamp": _lower_bound_of_the_magnitude,
}
"""What is read as a `GroupQuantize`: (x [tokens, hidden], FP8 dtype) -> codes, scales of groups of 32."""
