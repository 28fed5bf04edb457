"""GroupQuantize: FP8 quantization by scales chosen from the tensor itself, one for each group of neighbours.

Read upwards from the cast to FP8, as `Quantize` is: casts, clamps and views, one division by a tensor of scales, and
the tensor; from the scales, too: `(cast | clamp | times or over a number | a number over it | view)*` with an expansion
among them, the maximum over the group, `abs`.  Views only where they keep the order of the elements, so that a group is
one in the tensor as well.  Scales may also be made beside the way to the division, from what is on it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes import quant
from fusion_passes.graph.arguments import arguments, number, operands, tensor_node
from fusion_passes.graph.functional import made_by, op_call, op_name
from fusion_passes.graph.read import CASTS, aten, calls, is_high_precision, is_tensor, same_shape, value
from fusion_passes.graph.steps import (
    DIVISIONS,
    MULTIPLICATIONS,
    Abs,
    Cast,
    Clamp,
    ExactCast,
    Expand,
    Inverse,
    OrderedView,
    RoundingCast,
    Scaled,
    Step,
    clamped_before,
    is_cast,
    step,
    top,
    up,
    views_among,
)
from fusion_passes.graph.symbolic import known
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.reading import Unread, depends_on, read_all, show
from fusion_passes.quant import FP8_DTYPES, dtype_name

OPAQUE = "fusion_passes::quantize_fp8_dynamic"


@dataclass(frozen=True, eq=False)
class GroupQuantize(Idiom):
    """`output = views(cast(clamp(input / scale)))` with `scale = max(amax(|input|) / largest code, min_scale)`.

    input: the high-precision tensor before any cast and view of the quantization.
    scales: the node that holds the scales, one for each `group_size` neighbours of input, in their order; None where
        nothing does.
    clamp: the bounds applied before the cast; None without a clamp.
    min_scale, max_scale: the bounds of the scales; 0 without a lower one, and codes are NaN where the scale is 0.
    inverse: the graph multiplies by the reciprocal of the scales, which is infinite where they are too small for one.
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
    inverse: bool = False
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
    """Every dynamic quantization per group of the graph, and what only looks like one.  Never raises."""
    return read_all(graph, "group_quantize", _read)


def _read(node: Node) -> GroupQuantize | None:
    if op_call(node, among=(OPAQUE,)) is not None:
        return _read_opaque(node)
    if not (calls(node, *CASTS) and is_tensor(node) and value(node).dtype in FP8_DTYPES and is_cast(node)):
        return None
    try:
        return _read_chain(node, node.all_input_nodes[0])
    except Unread as failure:  # the place is always the cast, where a static quantization would be found too
        raise Unread(node, failure.reason) from None


def _read_chain(output: Node, source: Node) -> GroupQuantize | None:
    """From the cast to FP8 up: `(cast | clamp | view)* division (exact cast | view)*`, all views in order."""
    behind = up(source, Cast, Clamp, OrderedView)
    division = top(behind, source)
    if (clamp := _bounds(behind)) is None or (divided := _divided(division, value(output).dtype)) is None:
        return None  # no dynamic quantization
    x, scales = divided
    widened = up(x, ExactCast, OrderedView)
    root = top(widened, x)
    above = up(scales.source, Abs, ExactCast, OrderedView)
    magnitudes = [*takewhile(lambda taken: taken.node is not root, above)]
    if top(magnitudes, scales.source) is not root:
        return None  # the scales come from another tensor
    for taken in reversed(behind):
        if isinstance(taken, RoundingCast):
            raise Unread(output, f"the quotient is rounded to {_dtype(taken.node)} before it is quantized")
    if not any(isinstance(taken, Abs) for taken in magnitudes):
        raise Unread(output, "the scales come from the largest element, not from the largest magnitude")
    if not is_high_precision(root):
        raise Unread(output, f"quantizes {root.name}, which is not a high-precision floating-point tensor")
    nodes = {output, division, *scales.nodes, *(taken.node for taken in (*behind, *widened, *magnitudes))}
    scale = replace(scales.chain[-1][1], flipped=False)
    holder, beside = _holder(scales.chain, nodes, scale)
    return GroupQuantize(
        output=output,
        scales=holder,
        nodes=frozenset({*nodes, *beside}),
        input=root,
        group_size=scales.group_size,
        dtype=value(output).dtype,
        clamp=None if clamp == (-math.inf, math.inf) else clamp,
        min_scale=scale.low,
        max_scale=scale.high,
        inverse=any(derived.flipped for _, derived in scales.chain),
        views=views_among([*behind, *widened]),
    )


def _bounds(steps: list[Step]) -> tuple[float, float] | None:
    """The bounds of all clamps of a chain together, the last step first; None where one is no constant."""
    bounds = (-math.inf, math.inf)
    for taken in steps:
        if isinstance(taken, Clamp):
            if taken.broadcasts or taken.bounds is None or any(map(math.isnan, taken.bounds)):
                return None  # said of a static quantization
            bounds = clamped_before(bounds, *taken.bounds)
    return bounds


@dataclass(frozen=True)
class _Derived:
    """What is made of a group's largest magnitude: `clamp(magnitude * factor, low, high)`, or 1 over that."""

    factor: float = 1.0
    low: float = 0.0
    high: float = math.inf
    flipped: bool = False

    def times(self, number: float, dtype: torch.dtype) -> _Derived:
        """Multiplied by a positive number, in dtype."""
        number = 1.0 / number if self.flipped else number
        low, high = _rounded(self.low * number, dtype), _rounded(self.high * number, dtype)
        return replace(self, factor=self.factor * number, low=low, high=high)

    def over(self, number: float, dtype: torch.dtype) -> _Derived:
        """Divided by a positive number, in dtype."""
        if self.flipped:
            return self.times(1.0 / number, dtype)
        low, high = _rounded(self.low / number, dtype), _rounded(self.high / number, dtype)
        return replace(self, factor=self.factor / number, low=low, high=high)

    def clamped(self, low: float, high: float, dtype: torch.dtype) -> _Derived:
        """Between bounds, as `torch.clamp` has it."""
        low, high = (_rounded(min(max(x, low), high), dtype) for x in (self.low, self.high))
        return replace(self, low=low, high=high)

    def is_like(self, other: _Derived) -> bool:
        """Whether it is the other, but for the rounding of constants."""
        same = ((self.factor, other.factor), (self.low, other.low), (self.high, other.high))
        return self.flipped == other.flipped and all(math.isclose(a, b, rel_tol=1e-6) for a, b in same)


def _rounded(number: float, dtype: torch.dtype) -> float:
    """As dtype holds it; 16 bits count as fp32, which is what Inductor computes them in."""
    return float(torch.tensor(number, dtype=dtype if dtype.itemsize > 4 else torch.float32, device="cpu"))


@dataclass(frozen=True)
class _Scales:
    """What leads from a maximum over groups to the division.

    source: what the maximum is of.  nodes: what computes the scales from it.
    chain: the tensors from the maximum to the scales, in graph order, with what each is."""

    source: Node
    nodes: frozenset[Node]
    chain: list[tuple[Node, _Derived]]
    group_size: int


def _divided(node: Node, fp8: torch.dtype) -> tuple[Node, _Scales] | None:
    """(tensor, its scales) of a division by scales, or of a multiplication by 1 over them; None for anything else."""
    both = operands(node, *DIVISIONS, *MULTIPLICATIONS)
    if both is None:
        return None
    divides = calls(node, *DIVISIONS)
    for x, by in (both,) if divides else (both, both[::-1]):
        if tensor_node(x) and tensor_node(by) and (scales := _scales(by, x, fp8, flipped=not divides)) is not None:
            return x, scales
    return None


def _scales(node: Node, x: Node, fp8: torch.dtype, *, flipped: bool) -> _Scales | None:
    """What the scales at `node`, for the tensor x, are made of: the maximum over groups, each of them spread over one.
    flipped: the tensor is multiplied by them, so a reciprocal must be on the way."""
    shape, spread = value(x).shape, value(node).shape
    widths: list[int | torch.SymInt] = []  # over how many elements a scale is spread
    if not same_shape(spread, shape):
        if not _spreads_last(spread, shape):
            return None
        widths.append(shape[-1])
    steps: list[Step] = []
    while (largest := _largest(node)) is None:
        taken = step(node)
        if isinstance(taken, Expand):
            if not _spreads_last(value(taken.operand).shape, value(node).shape):
                return None
            widths.append(value(node).shape[-1])
        elif taken is None or not _prepares_scales(taken):
            if _reaches_maximum(node, top(up(x, ExactCast, OrderedView), x)):
                raise Unread(node, f"the scales pass through {op_name(node)} ({node.name}): {_instead(node)}")
            return None
        steps.insert(0, taken)
        node = taken.operand
    source, dims = largest
    group_size, rank = value(source).shape[-1], value(source).ndim
    if [d % rank for d in dims] != [rank - 1]:
        return None  # not of neighbours
    if len(widths) != 1 or not isinstance(group_size, int) or not known(widths[0] == group_size):
        return None
    nodes = frozenset({node, made_by(node), *(taken.node for taken in steps)})
    return _Scales(source, nodes, _chain(node, steps, quant.max_value(fp8), flipped), group_size)


def _spreads_last(before: Sequence[int | torch.SymInt], after: Sequence[int | torch.SymInt]) -> bool:
    """True where a last dimension of one element is spread, and nothing else is changed."""
    return len(before) == len(after) and same_shape(before[:-1], after[:-1]) and known(before[-1] == 1)


def _prepares_scales(taken: Step) -> bool:
    """True for a step that may stand between the maximum and the scales, beside their expansion."""
    if isinstance(taken, (Clamp, Scaled, Inverse)) and taken.broadcasts:
        return False
    if isinstance(taken, Clamp):
        return taken.bounds is not None
    return taken.by > 0.0 if isinstance(taken, (Scaled, Inverse)) else isinstance(taken, (Cast, OrderedView))


def _chain(maximum: Node, steps: list[Step], limit: float, flipped: bool) -> list[tuple[Node, _Derived]]:
    """What each step from the maximum to the scales makes, in graph order."""
    derived = _Derived()
    chain = [(maximum, derived)]
    for taken in steps:
        if not is_tensor(taken.node):
            continue
        after = _after(taken, derived, value(maximum).dtype)
        if after is None:
            raise Unread(
                taken.node,
                f"the scales pass through {op_name(taken.node)} ({taken.node.name}), which rounds them to "
                f"{_dtype(taken.node)}: choose them in float32",
            )
        derived = after
        chain.append((taken.node, derived))
    if derived.flipped != flipped:
        raise Unread(maximum, "the tensor is multiplied by its scales, not divided by them")
    if not math.isclose(derived.factor * limit, 1.0, rel_tol=1e-6):
        raise Unread(
            maximum, f"the scales are the largest magnitude times {derived.factor:g}, not divided by {limit:g}"
        )
    if not all(1.0 - 1e-6 <= made.factor * limit <= limit * (1.0 + 1e-6) for _, made in chain):
        raise Unread(
            maximum,
            "on the way from the largest magnitudes to the scales are numbers larger or smaller than both, which "
            "can be infinite or 0: divide by the largest code in one step",
        )
    return chain


def _after(taken: Step, before: _Derived, magnitudes: torch.dtype) -> _Derived | None:
    """What a step makes of its operand; None where it rounds.  magnitudes: the dtype of the maximum."""
    node, dtype = taken.node, value(taken.node).dtype
    if isinstance(taken, (Inverse, Scaled)) and dtype.itemsize < 4:
        return None
    if isinstance(taken, Inverse):
        turned = replace(before, flipped=not before.flipped)
        return turned if taken.by == 1.0 else turned.times(taken.by, dtype)
    if isinstance(taken, Scaled):
        return before.over(taken.by, dtype) if taken.divides else before.times(taken.by, dtype)
    if isinstance(taken, Clamp) and taken.bounds is not None:
        if before.flipped:
            raise Unread(node, f"the reciprocal of the scales passes through {op_name(node)} ({node.name})")
        if any(map(math.isnan, taken.bounds)):
            raise Unread(node, "the scales, or the magnitudes that they are made of, are clamped to nan")
        _check_bound(taken.bounds[0], node)
        return before.clamped(*taken.bounds, dtype)
    if isinstance(taken, RoundingCast):
        if dtype is torch.float32:
            return before.clamped(-math.inf, math.inf, dtype)
        # A maximum of numbers in this dtype is one; of a bound below, Inductor keeps all digits.
        if dtype is not magnitudes or before.flipped or before.factor != 1.0:
            return None
        _check_bound(before.low, node)
    return before


def _check_bound(bound: float, node: Node) -> None:
    """That a lower bound of the magnitudes is a number like others in the dtype of `node`."""
    dtype = value(node).dtype
    if dtype.itemsize < 4 and 0.0 < bound < (tiny := torch.finfo(dtype).tiny):
        raise Unread(
            node,
            f"the lower bound of the magnitudes, {bound:g}, is less than the smallest normal number of "
            f"{dtype_name(dtype)}, {tiny:g}, which they are in: clamp them in float32",
        )


def _holder(
    chain: list[tuple[Node, _Derived]], nodes: set[Node], scale: _Derived
) -> tuple[Node | None, tuple[Node, ...]]:
    """The node that holds the scales, and what computes it beside `nodes`: one on the way to the division that is read
    elsewhere, or one that is made of such, or, where nothing reads them, any on the way; None where there is none."""
    count = value(chain[0][0]).numel()
    chain = [(node, derived) for node, derived in chain if known(value(node).numel() == count)]  # not spread
    on_the_way = [node for node, derived in chain if derived.is_like(scale)]
    read = [node for node in on_the_way if not nodes.issuperset(node.users)]
    if not read and any(not nodes.issuperset(node.users) for node, _ in chain):
        for node, derived in chain:
            if (path := _aside(node, derived, nodes, scale)) is not None:
                return path[-1], path
    return next(iter(read or on_the_way), None), ()


def _aside(node: Node, derived: _Derived, nodes: set[Node], scale: _Derived) -> tuple[Node, ...] | None:
    """The steps from a node on the way to the division to one beside the way that is the scale."""
    for user in node.users:
        taken = step(user)
        if user in nodes or not is_tensor(user) or not isinstance(taken, (Scaled, Inverse, Cast, OrderedView)):
            continue
        if taken.operand is not node or not _prepares_scales(taken):
            continue
        after = _after(taken, derived, value(node).dtype)
        if after is None:
            continue
        if after.is_like(scale):
            return (user,)
        if (rest := _aside(user, after, nodes, scale)) is not None:
            return (user, *rest)
    return None


def _dtype(node: Node) -> str:
    return dtype_name(value(node).dtype)


def _largest(node: Node) -> tuple[Node, list[int]] | None:
    """(tensor, dimensions) where the node is a maximum over dimensions."""
    # Whether the dimension is kept shows in the shape, which the way on is judged by.
    if (said := arguments(node, "self", "dim", "keepdim")) is not None and calls(node, aten.amax.default):
        return said[0], [int(d) for d in said[1]]
    call = made_by(node)
    if node is not call and calls(call, aten.max.dim) and node.args[1] == 0:
        said = arguments(call, "self", "dim", "keepdim")
        return None if said is None else (said[0], [said[1]])
    return None


POWERS_OF_TWO = frozenset(
    {aten.exp2.default, aten.pow.Scalar, aten.ldexp.default, aten.ldexp.Tensor, aten.ceil.default, aten.log2.default}
)


def _instead(node: Node) -> str:
    """What the scales are where they pass through an op that is no step from a maximum to scales."""
    if calls(node, *POWERS_OF_TWO):
        return "rounded to powers of two, they are not the largest magnitude / code"
    return "not the largest magnitude / code"


def _reaches_maximum(node: Node, x: Node) -> bool:
    """True where ops of one tensor each lead up to a maximum of x, soon."""
    for _ in range(8):
        if (largest := _largest(node)) is not None:
            return depends_on(largest[0], x)
        if len(node.all_input_nodes) != 1 or node.op != "call_function":
            return False
        node = node.all_input_nodes[0]
    return False


def _read_opaque(node: Node) -> GroupQuantize | None:
    """`quantize_fp8_dynamic(x, *, dtype, granularity, group_size, scale_upper_bound, scale_lower_bound)`, which returns
    codes and scales."""
    call = op_call(node, among=(OPAQUE,))
    assert call is not None
    given = call.arguments
    if given["granularity"] != "group":
        return None
    x, dtype = given["x"], given["dtype"]
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if 0 not in results or not isinstance(x, Node) or not isinstance(dtype, torch.dtype):
        return None
    if not isinstance(given["group_size"], int):
        return None
    for name in ("scale_upper_bound", "scale_lower_bound"):
        if given[name] is not None and number(given[name]) is None:
            raise Unread(results[0], f"{name} is {show(given[name])}, not a number")
    limit, least, most = quant.max_value(dtype), number(given["scale_lower_bound"]), number(given["scale_upper_bound"])
    return GroupQuantize(
        output=results[0],
        nodes=frozenset({node, *results.values()}),
        input=x,
        scales=results.get(1),
        group_size=given["group_size"],
        dtype=dtype,
        clamp=(-limit, limit),
        min_scale=quant.SMALLEST_SCALE if least is None else _rounded(least, torch.float32),
        max_scale=math.inf if most is None else most,
        opaque=op_name(node),
    )
