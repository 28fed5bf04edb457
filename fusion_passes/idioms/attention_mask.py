"""The mask of an attention, read from what the graph adds to the scores or fills them with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import SymInt
from torch.fx import Node

from fusion_passes.graph.arguments import arguments, number, operands, tensor_node
from fusion_passes.graph.read import (
    argument,
    aten,
    calls,
    is_high_precision,
    is_tensor,
    keeps_order,
    prims,
    same_shape,
    value,
)
from fusion_passes.graph.region import evaluate
from fusion_passes.graph.steps import constant, is_cast
from fusion_passes.idioms.reading import Unread, is_start, show, without_copies

CUDNN_MASKED = frozenset({-65504.0, -65536.0})
"""What a False in a bool mask becomes for cuDNN up to torch 2.11, in place of -inf; the latter where it is bf16."""

OLD_CUDNN_MASKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 11)

_kinds: WeakKeyDictionary[Node, str | None] = WeakKeyDictionary()
"""The layers of a model share a mask, so it is run once."""

_NEGATIONS = frozenset({aten.logical_not.default, aten.bitwise_not.default})
_CONJUNCTIONS = frozenset({aten.logical_and.default, aten.bitwise_and.Tensor})


class Mask:
    """The mask of one attention, put together from what the graph adds to the scores or fills them with."""

    def __init__(self, anchor: Node, backend: str) -> None:
        self.anchor = anchor
        self.backend = backend
        self.lengths: Sequence[int | SymInt] = ()  # [q_len, kv_len]; a mask that broadcasts over them is not causal
        self.node: Node | None = None
        self.kind: str | None = None
        self.is_causal = False

    def add(self, mask: object) -> None:
        """An additive mask; one that is 0 and -inf by a bool mask counts as that bool mask."""
        if not isinstance(mask, Node) or not is_tensor(mask):
            raise Unread(self.anchor, f"the mask is {show(mask)}, not a tensor")
        mask = _unpadded_mask(mask)
        if constant(mask) == 0.0:
            return  # what Inductor makes of an all-True mask
        if (keep := self._filled(mask)) is not None:
            self.keep(*keep)
        elif value(mask).dtype.is_floating_point:
            self._set(mask, "float")
        else:
            raise Unread(self.anchor, f"a mask of {value(mask).dtype} is added to the scores")

    def keep(self, mask: Node, negated: bool = False) -> None:
        """A bool mask: True = attend, or with `negated` True = do not."""
        mask, negated = _positive(_unpadded_mask(mask), negated)
        if self._is_causal(mask, negated):
            self.is_causal = True
            return
        if not negated and _constant_kind(mask) == "full":
            return  # made from constants, and attends everywhere
        if negated:
            raise Unread(
                self.anchor, f"{mask.name} masks where it is True; the idiom needs a mask that is True = attend"
            )
        self._set(mask, "bool")

    def _is_causal(self, mask: Node, negated: bool) -> bool:
        if not same_shape(value(mask).shape[-2:], self.lengths):
            return False
        return _is_causal(mask, negated, self.lengths) or (not negated and _constant_kind(mask) == "causal")

    def _set(self, node: Node, kind: str) -> None:
        if self.node is not None and (self.node is not node or kind == "float"):  # bool: twice is once
            raise Unread(self.anchor, f"two masks, {self.node.name} and {node.name}")
        self.node, self.kind = node, kind

    def _filled(self, mask: Node) -> tuple[Node, bool] | None:
        """(bool mask, negated) of which `mask` is the additive form, 0 and -inf; None for any other float mask."""
        while is_cast(mask) and is_high_precision(mask):
            mask = _unpadded_mask(mask.all_input_nodes[0])
        parts = where_parts(mask)
        if parts is None:
            return None
        condition, yes, no = parts
        yes, no = constant(yes), constant(no)
        if yes == 0.0 and self._masks_out(no):
            negated = False
        elif no == 0.0 and self._masks_out(yes):
            negated = True
        else:
            return None
        positive, negated = _positive(condition, negated)
        if negated and not self._is_causal(positive, negated):
            return None  # no node holds the mask with True = attend: keep the additive form
        return positive, negated

    def _masks_out(self, fill: float | None) -> bool:
        return fill == -math.inf or (fill in CUDNN_MASKED and self.backend == "cudnn" and OLD_CUDNN_MASKS)


def _constant_kind(mask: Node) -> str | None:
    """What a bool mask [..., q_len, kv_len] is that is made from constants: "causal", the lower triangle aligned at the
    top left, in every batch and head; "full", True everywhere; "other".  None where it depends on an input or a
    symbolic size, is too large to run, or its ops cannot be run: then it is read as it is."""
    if mask not in _kinds:
        try:
            _kinds[mask] = _kind(mask)
        except Exception:
            _kinds[mask] = None
    return _kinds[mask]


def _kind(mask: Node) -> str | None:
    if not is_tensor(mask) or value(mask).dtype is not torch.bool or value(mask).ndim < 2:
        return None
    result = evaluate(mask)
    if result is None:
        return None
    for dim in range(result.ndim - 2):
        if result.stride(dim) == 0:  # an expanded batch need not be compared again and again
            result = result.narrow(dim, 0, min(1, result.shape[dim]))
    q_len, kv_len = result.shape[-2:]
    if torch.equal(result, torch.ones(q_len, kv_len, dtype=torch.bool).tril().expand_as(result)):
        return "causal"
    return "full" if bool(result.all()) else "other"


def where_parts(node: Node) -> tuple[Node, object, object] | None:
    """(condition, value if True, value if False) of a `where` or `masked_fill`."""
    if calls(node, aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf):
        condition, yes, no = arguments(node, "condition", "self", "other") or (None, None, None)
    elif calls(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        no, condition, yes = arguments(node, "self", "mask", "value") or (None, None, None)
    else:
        return None
    if isinstance(condition, Node) and is_tensor(condition) and value(condition).dtype == torch.bool:
        return condition, yes, no
    return None


def _positive(mask: Node, negated: bool) -> tuple[Node, bool]:
    """A bool mask without its negations."""
    while True:
        mask = _unpadded_mask(mask)
        if (inner := inverted(mask)) is None:
            return mask, negated
        mask, negated = inner, not negated


def inverted(node: Node) -> Node | None:
    """The bool tensor of which `node` is the negation, or None."""
    said = arguments(node, "self") if calls(node, *_NEGATIONS) else None
    source = None if said is None else tensor_node(said[0])
    return source if source is not None and value(source).dtype is torch.bool else None


def _unpadded_mask(mask: Node) -> Node:
    """Up through copies, `expand` (a mask broadcasts anyway) and padding that is sliced off again."""
    while True:
        mask = without_copies(mask)
        if calls(mask, aten.expand.default) and is_tensor(mask.all_input_nodes[0]):
            mask = mask.all_input_nodes[0]
        elif calls(mask, aten.slice.Tensor) and (source := _sliced_padding(mask)) is not None:
            mask = source
        else:
            return mask


def _sliced_padding(sliced: Node) -> Node | None:
    """The tensor that `sliced` is again after padding at the end; None where the slice takes something else."""
    padded = without_copies(sliced.all_input_nodes[0])
    if not calls(padded, aten.constant_pad_nd.default):
        return None
    source, pad, _ = arguments(padded, "self", "pad", "value") or (None, None, None)
    if not (isinstance(pad, (list, tuple)) and is_tensor(source) and is_tensor(sliced)):
        return None
    at_the_end = all(p == 0 for p in pad[::2])
    fits = at_the_end and is_start(sliced) and same_shape(value(sliced).shape, value(source).shape)
    return source if fits else None


def _is_causal(mask: Node, negated: bool, lengths: Sequence[int | SymInt]) -> bool:
    """True for the mask "key position <= query position" ([q_len, kv_len], both counted from 0), or with `negated` for
    its negation, in any spelling by comparisons of two iotas."""
    while calls(mask, *_CONJUNCTIONS):
        left, right = operands(mask, *_CONJUNCTIONS) or (None, None)
        if constant(left) == 1.0:
            left, right = right, left
        if constant(right) != 1.0 or not isinstance(left, Node):
            return False
        mask = _unpadded_mask(left)
        if not same_shape(value(mask).shape[-2:], lengths):
            return False  # one row or column, which the other operand spreads over all
    for comparison, sign, strict in _COMPARISONS:
        if (both := operands(mask, comparison.Scalar)) is not None:
            bound = number(both[1])
            difference = _difference(both[0])
        elif (both := operands(mask, comparison.Tensor)) is not None:
            bound = 0.0
            difference = (_position(both[0]), _position(both[1]))
        else:
            continue
        if bound is None or None in difference:
            return False
        # The comparison says: sign * (left - right) <= -strict, moved by the bound; positions are whole numbers.
        limit = sign * bound - strict
        left, right = difference
        if (left, right) == ("query", "key"):
            sign, left = -sign, "key"
        elif (left, right) != ("key", "query"):
            return False
        # Now: sign * (key - query) <= limit.
        if sign > 0:
            return not negated and limit == 0
        return negated and limit == -1
    return False


_COMPARISONS = (
    (aten.le, 1, 0),
    (aten.lt, 1, 1),
    (aten.ge, -1, 0),
    (aten.gt, -1, 1),
)
"""(comparison, sign, strict): `a OP b` for whole numbers is `sign * (a - b) <= -strict`."""


def _difference(node: object) -> tuple[str | None, str | None]:
    """Which positions are subtracted: ("key", "query") for key position minus query position."""
    both = operands(node, aten.sub.Tensor)
    return (None, None) if both is None else (_position(both[0]), _position(both[1]))


def _position(node: object) -> str | None:
    """ "query" for the positions 0, 1, … along the last dimension but one, "key" for those along the last."""
    if not (isinstance(node, Node) and is_tensor(node)):
        return None
    shape = value(node).shape
    source = node
    while keeps_order(source) or calls(source, aten.expand.default) or _adds_zero(source):
        source = source.all_input_nodes[0]
    if not calls(source, prims.iota.default, aten.arange.default, aten.arange.start, aten.arange.start_step):
        return None
    options = source.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: argument(source, i, a.name, a.default_value) for i, a in enumerate(options)}
    from_zero = given.get("start", 0) == 0 and given.get("step", 1) == 1
    if not from_zero or not is_tensor(source) or value(source).ndim != 1:
        return None
    if any(value(n).dtype not in (torch.int32, torch.int64) for n in (node, source)):
        return None  # narrower ones wrap around, floating-point ones round
    length = value(source).shape[0]
    if same_shape(shape[-1:], [length]) and same_shape(shape[:-1], [1] * len(shape[:-1])):
        return "key"
    if len(shape) >= 2 and same_shape(shape[-2:], [length, 1]) and same_shape(shape[:-2], [1] * len(shape[:-2])):
        return "query"
    return None


def _adds_zero(node: Node) -> bool:
    both = operands(node, aten.add.Tensor)
    return both is not None and number(both[1]) == 0.0
