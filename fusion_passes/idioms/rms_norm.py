"""RMSNorm: `x * (mean(x ** 2) + eps) ** -0.5 * (weight + offset)` over the last dimension.

Read at the product, or quotient, that normalises: upwards from its scale, through roots, to the mean of the squares of
the same x; then downwards to the weight and a final rounding, as long as nothing else reads what is in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_passes.graph import steps
from fusion_passes.graph.arguments import operands, tensor_node
from fusion_passes.graph.read import aten, calls, is_tensor, same_shape, value
from fusion_passes.graph.steps import Cast, ExactCast, Power, source, step, top, up
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.reading import Unread, read_all, reduced_along_last
from fusion_passes.quant import dtype_name

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class RMSNorm(Idiom):
    """`output = round(round(input * round((mean(input ** 2) + eps) ** -0.5)) * (weight + weight_offset))`, in fp32.

    input: the tensor before it is cast to fp32.
    scale_dtype, normalized_dtype: what the reciprocal root, and the product with it, are rounded to.
    weight: a number for each element of the last dimension, before it is cast and `weight_offset` is added, or None.
    """

    input: Node
    eps: float
    scale_dtype: torch.dtype
    normalized_dtype: torch.dtype
    weight: Node | None = None
    weight_offset: float = 0.0

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors it reads: input, then weight where there is one."""
        return (self.input,) if self.weight is None else (self.input, self.weight)

    def reference(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """What it computes, in plain torch, from the values of `inputs`."""
        x = x.float()
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt().to(self.scale_dtype)
        y = (x * scale.float()).to(self.normalized_dtype).float()
        y = y if weight is None else y * (weight.float() + self.weight_offset)
        return y.to(value(self.output).dtype)


def recognize(graph: Graph) -> Iterator[RMSNorm | NearMiss]:
    """Every RMSNorm of the graph, with its weight, and what only looks like one.  Never raises."""
    return read_all(graph, "rms_norm", _read)


def _read(node: Node) -> RMSNorm | None:
    """The norm in which this node is the product, or quotient, of x and its scale."""
    both = operands(node, *steps.MULTIPLICATIONS, *steps.DIVISIONS)
    if both is None or not all(map(is_tensor, both)) or value(node).dtype not in DTYPES:
        return None
    divides = calls(node, *steps.DIVISIONS)
    x, scale = both if divides or same_shape(value(both[0]).shape, value(node).shape) else both[::-1]
    if not same_shape(value(scale).shape, [*value(x).shape[:-1], 1]):
        return None
    casts, power, eps = [] if divides else up(scale, Cast), -1.0 if divides else 1.0, 0.0
    path = up(top(casts, scale), steps.OrderedView, Power, steps.Inverse, steps.Scaled, steps.Shifted)
    for taken in path:
        if isinstance(taken, Power):
            power *= taken.exponent
        elif isinstance(taken, steps.Inverse) and taken.by == 1.0:
            power = -power
        elif isinstance(taken, steps.Shifted) and power == -0.5:
            eps += taken.by
        elif not isinstance(taken, steps.OrderedView) and not (isinstance(taken, steps.Scaled) and taken.by == 1.0):
            return None
    mean, x = top([*casts, *path], scale), source(x, ExactCast)
    square = reduced_along_last(mean, aten.mean.dim) if power == -0.5 else None
    squared = None if square is None else step(square)
    if not (isinstance(squared, Power) and squared.exponent == 2.0 and source(squared.operand, ExactCast) is x):
        return None
    nodes = [mean, squared.node, *(taken.node for taken in path)]
    if (narrow := next((n for n in nodes if value(n).dtype is not torch.float32), None)) is not None:
        dtype = dtype_name(value(narrow).dtype)
        raise Unread(node, f"the mean of the squares is {dtype}: cast x to float32 before it is squared")
    rounded = [value(taken.node).dtype for taken in casts if isinstance(taken, steps.RoundingCast)] or [torch.float32]
    nodes += [node, *(taken.node for taken in casts)]
    if len(rounded) > 1:
        return None
    return _weighted(RMSNorm(node, frozenset(nodes), x, eps, rounded[0], value(node).dtype))


def _weighted(norm: RMSNorm) -> RMSNorm:
    """The norm with the weight and the rounding that come behind it, as long as each is all that reads the last."""
    node, nodes = norm.output, norm.nodes
    while len(node.users) == 1:
        (user,) = node.users
        taken, nodes = step(user), nodes | {user}
        rounds = isinstance(taken, Cast) and value(node).dtype is torch.float32 and value(user).dtype in DTYPES
        if rounds and norm.weight is not None:
            return replace(norm, output=user, nodes=nodes)
        if rounds and norm.normalized_dtype is torch.float32:
            norm = replace(norm, output=user, nodes=nodes, normalized_dtype=value(user).dtype)
        elif norm.weight is None and (weight := _weight(user, node)) is not None:
            norm = replace(norm, output=user, nodes=nodes, weight=weight[0], weight_offset=weight[1])
        elif norm.weight is not None or not isinstance(taken, ExactCast):
            break
        node = user
    return norm


def _weight(product: Node, x: Node) -> tuple[Node, float] | None:
    """(weight, offset) where the product is one of x and a weight."""
    left, right = operands(product, *steps.MULTIPLICATIONS) or (None, None)
    weight = tensor_node(left if right is x else right)
    if weight is None or weight is x or value(product).dtype not in DTYPES:
        return None
    row = [*[1] * (value(weight).ndim - 1), value(x).shape[-1]]
    if not same_shape(value(weight).shape, row) or not same_shape(value(product).shape, value(x).shape):
        return None
    weight = source(weight, ExactCast)
    added = step(weight)
    if isinstance(added, steps.Shifted) and value(weight).dtype is torch.float32 and not added.broadcasts:
        return source(added.operand, ExactCast), added.by
    return weight, 0.0
