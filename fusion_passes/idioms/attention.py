"""Attention: scaled dot product attention, as one of torch's fused ops or spelled out.

A fused op is read by its schema, argument by argument.  A spelled-out attention is read upwards from the second matrix
product: softmax (safe or not), mask and scale in the order they were applied, first matrix product, scales on q and k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from fusion_passes.graph import argument, aten, calls, is_noop, is_tensor, is_view, prims, same_shape, value
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
    number,
    op_name,
    schema_name,
    shape_of,
)
from fusion_passes.reference import attention as attention_reference
from fusion_passes.symbolic import known

BACKENDS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash_for_cpu",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""The ops that `scaled_dot_product_attention` becomes, and what `Attention.backend` calls them."""

CUDNN_MASKED = -65504.0
"""What a False in a bool mask becomes for cuDNN up to torch 2.11, in place of -inf."""

_IGNORED = frozenset({"compute_log_sumexp", "return_debug_mask"})
_COMMUTING = frozenset({aten.logical_and.default, aten.bitwise_and.Tensor})
_NOT = frozenset({aten.logical_not.default, aten.bitwise_not.default})


@dataclass(frozen=True, eq=False)
class Attention(Idiom):
    """`output = softmax(query @ key.T * scale + mask) @ value`.

    query: [batch, heads, q_len, head_dim].
    key, value: [batch, kv_heads, kv_len, head_dim], before the KV heads are repeated, where the graph repeats them.
    attn_mask: broadcasts to [batch, heads, q_len, kv_len].  mask_kind "bool": True = attend (also where the graph fills
        -inf from it); "float": added to the scores; None without a mask.
    is_causal: query i sees keys 0 to i, aligned at the top left; also where the graph builds that mask from iotas.  It
        can come together with attn_mask.
    scale: of the scores; None is `head_dim ** -0.5`.
    backend: what the graph calls: a value of `BACKENDS`, or "math" where it is spelled out.
    used_outputs: names of the outputs of the fused op, beyond the first, that the graph uses.

    In a spelled-out attention, where the graph rounds (scores or probabilities to bf16) is not recorded, and a row that
    may attend to nothing is not told apart (NaN in a plain softmax, 0 in the fused ops).
    """

    query: Node
    key: Node
    value: Node
    attn_mask: Node | None
    mask_kind: str | None
    is_causal: bool
    scale: float | None
    backend: str
    used_outputs: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors it reads: query, key, value, then attn_mask where there is one."""
        mask = () if self.attn_mask is None else (self.attn_mask,)
        return (self.query, self.key, self.value, *mask)

    @property
    def kv_heads(self) -> int | SymInt:
        """The number of heads of key and value; the query's is a multiple."""
        return value(self.key).shape[1]

    def reference(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """What it computes, in fp32 and rounded to the query's dtype, from the values of `inputs`."""
        out = attention_reference(query, key, value, attn_mask, is_causal=self.is_causal, scale=self.scale)
        return out.to(query.dtype)


def recognize(graph: Graph) -> Iterator[Attention | NearMiss]:
    """Every attention of the graph, and what only looks like one.  Never raises."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            if schema_name(node) in BACKENDS:
                found = _read_fused(node)
            elif calls(node, aten.bmm.default):
                found = _read_math(node)
            else:
                continue
        except Unread as failure:
            yield NearMiss(node, "attention", failure.reason)
        except Exception as error:
            yield NearMiss(node, "attention", f"could not be read: {error}")
        else:
            if found is not None:
                yield found


# Fused ops


def _read_fused(node: Node) -> Attention | None:
    """A call of one of the ops of `BACKENDS`."""
    backend = BACKENDS[schema_name(node)]
    arguments = _bind(node)
    q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
    if not all(_is_4d(x) for x in (q, k, v)):
        raise Unread(node, "query, key and value are not all [batch, heads, length, head_dim]")
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    assert isinstance(v, Node)
    dropout = arguments.pop("dropout_p", 0.0)
    if number(dropout) != 0.0:
        raise Unread(node, f"attention with dropout_p={_show(dropout)}")
    is_causal = arguments.pop("is_causal", False)
    if not isinstance(is_causal, bool):
        raise Unread(node, f"is_causal is {_show(is_causal)}, not known while compiling")
    scale = arguments.pop("scale", None)
    if scale is not None and number(scale) is None:
        raise Unread(node, f"the scale of the scores is {_show(scale)}, not a number")
    mask = _Mask(node, backend)
    for name in ("attn_mask", "attn_bias"):
        if (given := arguments.pop(name, None)) is not None:
            mask.add(given)
    for name, given in arguments.items():
        if name not in _IGNORED:
            raise Unread(node, f"argument {name}={_show(given)} has no place in the attention idiom")
    outputs = _outputs(node)
    output = outputs.pop("output", None)
    if output is None:
        return None  # only the logsumexp is used
    nodes = {node, output}
    if scale is not None and (unpadded := _unpad(q, k, v, output)) is not None:
        q, k, v, output = unpadded
        nodes.add(output)
    q_len, kv_len = value(q).shape[2], value(k).shape[2]
    if is_causal and backend == "flash" and not known(q_len == kv_len):
        raise Unread(
            node, f"is_causal with q_len {q_len} and kv_len {kv_len}: the flash op aligns that at the bottom right"
        )
    k, v = _unexpand(k, v)
    return Attention(
        output=output,
        nodes=frozenset(nodes),
        query=q,
        key=k,
        value=v,
        attn_mask=mask.node,
        mask_kind=mask.kind,
        is_causal=is_causal or mask.is_causal,
        scale=number(scale),
        backend=backend,
        used_outputs=tuple(outputs),
    )


def _bind(node: Node) -> dict[str, object]:
    """The arguments of a call by name, those left out with their defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    if schema.overload_name:
        raise Unread(node, f"the overload {schema.overload_name} of {op_name(node)}")
    names = [arg.name for arg in schema.arguments]
    if unknown := set(node.kwargs) - set(names):
        raise Unread(node, f"unknown argument {', '.join(sorted(unknown))} of {op_name(node)}")
    return {
        arg.name: argument(node, i if not arg.kwarg_only else len(node.args), arg.name, arg.default_value)
        for i, arg in enumerate(schema.arguments)
    }


def _outputs(node: Node) -> dict[str, Node]:
    """The outputs of a fused op that the graph uses, by name; the first is "output"."""
    names = [r.name or f"output {i}" for i, r in enumerate(node.target._schema.returns)]  # type: ignore[union-attr]
    names[0] = "output"
    used: dict[str, Node] = {}
    for user in node.users:
        if getattr(user.target, "__name__", "") != "getitem" or not isinstance(user.args[1], int):
            raise Unread(node, f"the outputs of {op_name(node)} are used as a whole by {user.name}")
        if user.users:
            used.setdefault(names[user.args[1]], user)
    order = {name: i for i, name in enumerate(names)}
    return dict(sorted(used.items(), key=lambda item: order[item[0]]))


def _unpad(q: Node, k: Node, v: Node, output: Node) -> tuple[Node, Node, Node, Node] | None:
    """(query, key, value, output) without the zeros that fill up head_dim for the flash op; None without them."""
    sources = [_padded(x) for x in (q, k, v)]
    users = list(output.users)
    if None in sources or len(users) != 1 or not calls(users[0], aten.slice.Tensor):
        return None
    source_q, source_k, source_v = sources
    assert source_q is not None
    assert source_k is not None
    assert source_v is not None
    sliced = users[0]
    starts_at_zero = argument(sliced, 2, "start") in (0, None) and argument(sliced, 4, "step", 1) == 1
    rank_and_dim = argument(sliced, 1, "dim", 0) in (3, -1)
    if starts_at_zero and rank_and_dim and is_tensor(sliced) and same_shape(value(sliced).shape, value(source_q).shape):
        return source_q, source_k, source_v, sliced
    return None


def _padded(node: Node) -> Node | None:
    """What `node` is with zeros added at the end of its last dimension; None where it is no such thing."""
    if not calls(node, aten.constant_pad_nd.default) or constant(argument(node, 2, "value", 0)) != 0.0:
        return None
    pad, source = argument(node, 1, "pad"), node.args[0]
    if not (isinstance(pad, (list, tuple)) and len(pad) >= 2 and isinstance(source, Node) and _is_4d(source)):
        return None
    return source if all(p == 0 for i, p in enumerate(pad) if i != 1) else None


def _unexpand(k: Node, v: Node) -> tuple[Node, Node]:
    """key and value before their heads are repeated, where both are repeated in the same way; else as they are."""
    few_k, few_v = _repeated_from(k), _repeated_from(v)
    if few_k is None or few_v is None or not same_shape(value(few_k).shape[:2], value(few_v).shape[:2]):
        return k, v
    return few_k, few_v


def _repeated_from(node: Node) -> Node | None:
    """[batch, kv_heads, len, head_dim] that `node` repeats along the heads, each head next to its copies; or None."""
    repeated = _without_copies(node)
    if calls(repeated, aten.expand.default):
        source = repeated.all_input_nodes[0]
        if not (_is_4d(source) and _is_4d(repeated)):
            return None
        (batch, heads, *rest), (batch_out, _, *rest_out) = value(source).shape, value(repeated).shape
        only_heads = known(heads == 1) and same_shape([batch, *rest], [batch_out, *rest_out])
        return source if only_heads and not is_noop(repeated) else None
    if not calls(repeated, aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    expanded = _without_copies(repeated.all_input_nodes[0])
    if not (calls(expanded, aten.expand.default) and is_tensor(expanded) and value(expanded).ndim == 5):
        return None
    single = _without_copies(expanded.all_input_nodes[0])
    if not calls(single, aten.unsqueeze.default, aten.reshape.default, aten.view.default):
        return None
    source = single.all_input_nodes[0]
    if not (_is_4d(source) and _is_4d(repeated)):
        return None
    batch, heads, length, head_dim = value(source).shape
    times = value(expanded).shape[2]
    if (
        same_shape(value(single).shape, [batch, heads, 1, length, head_dim])
        and same_shape(value(expanded).shape, [batch, heads, times, length, head_dim])
        and same_shape(value(repeated).shape, [batch, heads * times, length, head_dim])
    ):
        return source
    return None


def _without_copies(node: Node) -> Node:
    """Up through what changes neither elements nor shape."""
    while (
        calls(node, aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default)
        or is_noop(node)
    ) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


# Masks


class _Mask:
    """The mask of one attention, put together from what the graph adds to the scores or fills them with."""

    def __init__(self, anchor: Node, backend: str) -> None:
        self.anchor = anchor
        self.backend = backend
        self.node: Node | None = None
        self.kind: str | None = None
        self.is_causal = False

    def add(self, mask: object) -> None:
        """An additive mask; one that is 0 and -inf by a bool mask counts as that bool mask."""
        if not isinstance(mask, Node) or not is_tensor(mask):
            raise Unread(self.anchor, f"the mask is {_show(mask)}, not a tensor")
        mask = _unpadded_mask(mask)
        if (keep := self._filled(mask)) is not None:
            self.keep(*keep)
        elif value(mask).dtype.is_floating_point:
            self._set(mask, "float")
        else:
            raise Unread(self.anchor, f"a mask of {value(mask).dtype} is added to the scores")

    def keep(self, mask: Node, negated: bool = False) -> None:
        """A bool mask: True = attend, or with `negated` True = do not."""
        mask, negated = _positive(_unpadded_mask(mask), negated)
        if _is_causal(mask, negated):
            self.is_causal = True
            return
        if negated:
            raise Unread(
                self.anchor, f"{mask.name} masks where it is True; the idiom needs a mask that is True = attend"
            )
        self._set(mask, "bool")

    def _set(self, node: Node, kind: str) -> None:
        if self.node is not None and self.node is not node:
            raise Unread(self.anchor, f"two masks, {self.node.name} and {node.name}")
        self.node, self.kind = node, kind

    def _filled(self, mask: Node) -> tuple[Node, bool] | None:
        """(bool mask, negated) of which `mask` is the additive form, 0 and -inf; None for any other float mask."""
        while is_exact_cast(mask) or calls(mask, *CASTS):
            mask = _unpadded_mask(mask.all_input_nodes[0])
        parts = _where(mask)
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
        if negated and not _is_causal(positive, negated):
            return None  # no node holds the mask with True = attend: keep the additive form
        return positive, negated

    def _masks_out(self, fill: float | None) -> bool:
        return fill == -math.inf or (fill == CUDNN_MASKED and self.backend == "cudnn")


def _where(node: Node) -> tuple[Node, object, object] | None:
    """(condition, value if True, value if False) of a `where` or `masked_fill`."""
    if calls(node, aten.where.self, aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf):
        condition, yes, no = node.args[:3]
    elif calls(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        no, condition, yes = node.args[:3]
    else:
        return None
    if isinstance(condition, Node) and is_tensor(condition) and value(condition).dtype == torch.bool:
        return condition, yes, no
    return None


def _positive(mask: Node, negated: bool) -> tuple[Node, bool]:
    """A bool mask without its negations."""
    while True:
        mask = _unpadded_mask(mask)
        if calls(mask, *_NOT) and is_tensor(mask) and value(mask).dtype == torch.bool:
            inner = mask.args[0]
            if not (isinstance(inner, Node) and is_tensor(inner) and value(inner).dtype == torch.bool):
                return mask, negated
            mask, negated = inner, not negated
        else:
            return mask, negated


def _unpadded_mask(mask: Node) -> Node:
    """Up through copies, `expand` (a mask broadcasts anyway) and padding that is sliced off again."""
    while True:
        mask = _without_copies(mask)
        if calls(mask, aten.expand.default) and is_tensor(mask.all_input_nodes[0]):
            mask = mask.all_input_nodes[0]
        elif calls(mask, aten.slice.Tensor) and (source := _sliced_padding(mask)) is not None:
            mask = source
        else:
            return mask


def _sliced_padding(sliced: Node) -> Node | None:
    """The tensor that `sliced` is again after padding at the end; None where the slice takes something else."""
    padded = _without_copies(sliced.all_input_nodes[0])
    if not calls(padded, aten.constant_pad_nd.default):
        return None
    pad, source = argument(padded, 1, "pad"), padded.all_input_nodes[0]
    if not (isinstance(pad, (list, tuple)) and is_tensor(source) and is_tensor(sliced)):
        return None
    at_the_end = all(p == 0 for p in pad[::2])
    from_start = argument(sliced, 2, "start") in (0, None) and argument(sliced, 4, "step", 1) == 1
    return source if at_the_end and from_start and same_shape(value(sliced).shape, value(source).shape) else None


def _is_causal(mask: Node, negated: bool) -> bool:
    """True for the mask "key position <= query position" ([q_len, kv_len], both counted from 0), or with `negated` for
    its negation, in any spelling by comparisons of two iotas."""
    while calls(mask, *_COMMUTING):
        left, right = mask.args[:2]
        if constant(left) == 1.0:
            left, right = right, left
        if constant(right) != 1.0 or not isinstance(left, Node):
            return False
        mask = _unpadded_mask(left)
    for operator, sign, strict in _COMPARISONS:
        if calls(mask, getattr(operator, "Scalar", None)):
            bound = number(mask.args[1])
            difference = _difference(mask.args[0])
        elif calls(mask, getattr(operator, "Tensor", None)):
            bound = 0.0
            difference = (_position(mask.args[0]), _position(mask.args[1]))
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
    if isinstance(node, Node) and calls(node, aten.sub.Tensor) and argument(node, 2, "alpha", 1) == 1:
        return _position(node.args[0]), _position(node.args[1])
    return None, None


def _position(node: object) -> str | None:
    """ "query" for the positions 0, 1, … along the last dimension but one, "key" for those along the last."""
    if not (isinstance(node, Node) and is_tensor(node)):
        return None
    shape = value(node).shape
    source = node
    while is_view(source) or calls(source, aten.expand.default) or _adds_zero(source):
        if calls(source, aten.permute.default, aten.transpose.int, aten.t.default):
            return None
        source = source.all_input_nodes[0]
    if calls(source, prims.iota.default):
        from_zero = source.kwargs.get("start") == 0 and source.kwargs.get("step") == 1
    elif calls(source, aten.arange.default):
        from_zero = True
    elif calls(source, aten.arange.start, aten.arange.start_step):
        from_zero = argument(source, 0, "start") == 0 and argument(source, 2, "step", 1) == 1
    else:
        return None
    if not from_zero or not is_tensor(source) or value(source).ndim != 1:
        return None
    length = value(source).shape[0]
    if same_shape(shape[-1:], [length]) and same_shape(shape[:-1], [1] * len(shape[:-1])):
        return "key"
    if len(shape) >= 2 and same_shape(shape[-2:], [length, 1]) and same_shape(shape[:-2], [1] * len(shape[:-2])):
        return "query"
    return None


def _adds_zero(node: Node) -> bool:
    return calls(node, aten.add.Tensor) and number(node.args[1]) == 0.0


# Spelled out


def _read_math(product: Node) -> Attention | None:
    """An attention whose second matrix product is `product`; None where its left side is no softmax."""
    if not all(isinstance(arg, Node) and is_tensor(arg) for arg in product.args[:2]):
        return None
    left, right = product.args[:2]
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    reader = _Math(product)
    scores = reader.softmax(left)
    if scores is None:
        return None
    reader.scores(scores)
    return reader.finish(right)


class _Math:
    """One walk up from `probabilities @ value`; `nodes` collects what it passes, `factor` and `mask` what it reads."""

    def __init__(self, product: Node) -> None:
        self.product = product
        self.nodes: set[Node] = {product}
        self.factor = 1.0
        self.scaled = False
        self.mask = _Mask(product, "math")
        self.score_product = product

    def up(self, node: Node) -> Node:
        """Up through views that leave the matrices as they are, and casts that only round (not to FP8)."""
        while _keeps_matrices(node) or (is_cast(node) and is_high_precision(node)):
            self.nodes.add(node)
            node = node.all_input_nodes[0]
        return node

    def softmax(self, node: Node) -> Node | None:
        """The scores of which `node` is the softmax; None where it is none."""
        node = self.up(node)
        judged: Node | None = None  # the scores that decide which rows are empty
        if (parts := _where(node)) is not None and (safe := self._safe(*parts)) is not None:
            self.nodes.add(node)
            inner, judged = safe
            node = self.up(inner)
        if calls(node, aten._softmax.default, aten._safe_softmax.default):
            scores = _node(node.args[0])
            self._last_dim(node, argument(node, 1, "dim"))
            self.nodes.add(node)
        else:
            scores = self._quotient(node)
        if scores is not None and judged is not None and self.up(judged) is not self.up(scores):
            raise Unread(node, "looks like attention, but rows are emptied by something other than the scores")
        if scores is None and _has_softmax_above(node):
            what = "a view that is not read" if is_view(node) else op_name(node)
            raise Unread(node, f"looks like attention, but the softmax passes through {what} ({node.name})")
        return scores

    def _safe(self, condition: Node, yes: object, no: object) -> tuple[Node, Node] | None:
        """(softmax, scores) of `where(no score in the row is above -inf, 0, softmax)`."""
        if constant(yes) != 0.0 or not isinstance(no, Node):
            return None
        passed: set[Node] = set()
        chain = condition
        steps = ({aten.all.dim},) if calls(chain, aten.all.dim) else (_NOT, {aten.any.dim, aten.any.dims}, _NOT)
        for targets in (*steps, {aten.eq.Scalar, aten.eq.Tensor}):
            source = _node(chain.args[0]) if calls(chain, *targets) else None
            if source is None:
                return None
            if calls(chain, aten.eq.Scalar, aten.eq.Tensor) and constant(chain.args[1]) != -math.inf:
                return None
            passed.add(chain)
            chain = source
        self.nodes |= passed
        return no, chain

    def _quotient(self, node: Node) -> Node | None:
        """The scores s of `exp(s - amax(s)) / sum(exp(s - amax(s)))`."""
        if not calls(node, aten.div.Tensor):
            return None
        exponential, total = (_node(arg) for arg in node.args[:2])
        if exponential is None or total is None or not calls(exponential, aten.exp.default):
            return None
        shifted = self._shifted(_node(exponential.args[0]))
        if shifted is None:
            return None
        if not (calls(total, aten.sum.dim_IntList) and total.args[0] is exponential):
            pair = _one_pass_softmax(total, 1)
            if pair is None or pair is not _one_pass_softmax(_node(shifted.args[1]), 0):
                return None
            self.nodes.add(pair)
        else:
            self._last_dim(total, argument(total, 1, "dim"))
        self.nodes |= {node, exponential, total}
        return _node(shifted.args[0])

    def _shifted(self, node: Node | None) -> Node | None:
        """The node `s - amax(s)` in the exponent.

        Inductor subtracts the maximum before it applies a scale that stands right before the softmax: up to torch 2.12
        `(t - amax(t)) * c`, later with a choice by row, `where(all finite, (t - amax(t)) * c, t * c - amax(t * c))`.
        """
        if node is None:
            return None
        if (parts := _where(node)) is not None:
            condition, yes, no = parts
            scaled, plain = _node(yes), _node(no)
            if scaled is None or plain is None or (after := _scaled(scaled)) is None:
                return None
            inner, outer = self._minus_max(after[0]), self._minus_max(plain)
            if inner is None or outer is None:
                return None
            (t, in_t), (s, in_s) = (_without_scale(_node(x.args[0])) for x in (inner, outer))
            if t is not s or not math.isclose(in_t * after[1], in_s, rel_tol=1e-3):
                return None
            self.nodes |= {node, scaled, inner, *_between(condition, s), *_between(inner, s), *_between(outer, s)}
            return outer
        if (after := _scaled(node)) is not None and (inner := self._minus_max(after[0])) is not None:
            self.nodes.add(node)
            self.factor *= after[1]
            self.scaled = True
            return inner
        return self._minus_max(node)

    def _minus_max(self, node: Node) -> Node | None:
        """`node` where it is `s - amax(s)` over the last dimension."""
        if not calls(node, aten.sub.Tensor):
            return None
        scores, largest = (_node(arg) for arg in node.args[:2])
        if scores is None or largest is None:
            return None
        if (pair := _one_pass_softmax(largest, 0)) is not None and pair.args[0] is scores:
            self._last_dim(pair, argument(pair, 1, "dim"))
        elif calls(largest, aten.amax.default) and largest.args[0] is scores:
            self._last_dim(largest, argument(largest, 1, "dim"))
        else:
            return None
        self.nodes |= {node, largest}
        return node

    def _last_dim(self, node: Node, dim: object) -> None:
        dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
        rank = value(node.all_input_nodes[0]).ndim
        if dims not in ([-1], [rank - 1]):
            raise Unread(node, f"looks like attention, but the softmax is over dimension {dim}, not over the keys")

    def scores(self, node: Node) -> None:
        """From the softmax's input up to the first matrix product: masks, then the scale."""
        while True:
            node = self.up(node)
            self.nodes.add(node)
            if calls(node, aten.bmm.default):
                self.score_product = node
                return
            if calls(node, aten.add.Tensor) and argument(node, 2, "alpha", 1) == 1:
                node = self._added(node)
            elif (parts := _where(node)) is not None:
                node = self._filled(node, *parts)
            elif (scaled := _scaled(node)) is not None:
                node, times = scaled
                self.factor *= times
                self.scaled = True
            else:
                raise Unread(node, f"looks like attention, but the scores pass through {op_name(node)} ({node.name})")

    def _added(self, node: Node) -> Node:
        """`scores + mask`: the scores."""
        left, right = node.args[:2]
        on_left, on_right = _leads_to_product(left), _leads_to_product(right)
        scores, mask = (left, right) if on_left else (right, left)
        if on_left == on_right or not isinstance(scores, Node):
            raise Unread(node, f"looks like attention, but {node.name} adds no mask to the scores")
        if self.scaled:
            raise Unread(node, f"looks like attention, but {node.name} adds a mask before the scale is applied")
        self._same_shape(node, scores)
        self.mask.add(mask)
        return scores

    def _filled(self, node: Node, condition: Node, yes: object, no: object) -> Node:
        """`where(mask, scores, -inf)` or `scores.masked_fill(~mask, -inf)`: the scores."""
        fill, scores, negated = (no, yes, False) if constant(yes) is None else (yes, no, True)
        filled = constant(fill)
        if not isinstance(scores, Node) or filled is None:
            raise Unread(node, f"looks like attention, but {node.name} mixes the scores with another tensor")
        if filled != -math.inf:
            raise Unread(node, f"masks the scores with {filled:g}, not with -inf")
        self._same_shape(node, scores)
        self.mask.keep(condition, negated)
        return scores

    def _same_shape(self, node: Node, scores: Node) -> None:
        if not same_shape(value(node).shape, value(scores).shape):
            raise Unread(node, f"the mask broadcasts the scores from {shape_of(scores)} to {shape_of(node)}")

    def finish(self, right: Node) -> Attention:
        """The operands of both products, the output, and the idiom."""
        if not self.factor > 0:
            raise Unread(self.product, f"the scores are scaled by {self.factor:g}")
        failure: Unread | None = None
        for output, behind in self._outputs():
            try:
                return self._finish(right, output, behind)
            except Unread as error:
                failure = failure or error
        raise failure or Unread(self.product, "the product is not reshaped to [batch, heads, length, head_dim]")

    def _outputs(self) -> Iterator[tuple[Node, set[Node]]]:
        """What may hold the result, with what leads there: cast back to 16 bits, then as the product gives it."""
        node, behind = self.product, set[Node]()
        while not _is_4d(node):
            following = [user for user in node.users if _keeps_matrices(user)]
            if not following:
                return
            node = following[0]
            behind.add(node)
        if len(node.users) == 1:
            (user,) = node.users
            if is_cast(user) and value(user).dtype in (torch.bfloat16, torch.float16) and not is_noop(user):
                yield user, behind | {user}
        yield node, behind

    def _finish(self, right: Node, output: Node, behind: set[Node]) -> Attention:
        q, factor_q, path_q = self._operand(self.score_product.args[0], "query", output)
        k, factor_k, path_k = self._operand(self.score_product.args[1], "key", output, transposed=True)
        v, factor_v, path_v = self._operand(right, "value", output)
        if factor_v != 1.0:
            raise Unread(self.product, f"looks like attention, but the value is scaled by {factor_v:g}")
        k, v = _unexpand(k, v)
        self._check_shapes(q, k, v, output)
        factor = self.factor * factor_q * factor_k
        head_dim = value(q).shape[3]
        default = isinstance(head_dim, int) and math.isclose(factor, head_dim**-0.5, rel_tol=1e-6)
        return Attention(
            output=output,
            nodes=frozenset(self.nodes | behind | path_q | path_k | path_v),
            query=q,
            key=k,
            value=v,
            attn_mask=self.mask.node,
            mask_kind=self.mask.kind,
            is_causal=self.mask.is_causal,
            scale=None if default else factor,
            backend="math",
        )

    def _operand(
        self, arg: object, name: str, output: Node, *, transposed: bool = False
    ) -> tuple[Node, float, set[Node]]:
        """(tensor, factor, nodes passed): from an operand of a product up to the topmost 4-D tensor of the output's
        dtype from which only scales, a transposition, a repetition of heads and exact casts lead here."""
        node = _node(arg)
        if node is None:
            raise Unread(self.product, f"the {name} is {_show(arg)}")
        (batch, heads), dtype = value(output).shape[:2], value(output).dtype
        best: tuple[Node, float, set[Node]] | None = None
        path: list[Node] = []
        factor = 1.0
        while True:
            fits = _is_4d(node) and not transposed and same_shape(value(node).shape[:2], [batch, heads])
            if fits and value(node).dtype == dtype:
                best = node, factor, set(path)
            few = _repeated_from(node) if fits else None
            if few is not None and (narrow := _widened(few)) is not None and value(narrow).dtype == dtype:
                # The heads of a wider copy are repeated; the repetition of the tensor itself is what the idiom reads.
                best = narrow, factor, set(path)
                break
            if calls(node, aten.permute.default, aten.transpose.int) and _swaps_last(node):
                transposed = not transposed
                following = node.all_input_nodes[0]
            elif _keeps_matrices(node) or is_exact_cast(node):
                following = node.all_input_nodes[0]
            elif (scaled := _scaled(node)) is not None:
                following, times = scaled
                factor *= times
            else:
                break
            path.append(node)
            node = following
        if best is None:
            raise Unread(node, f"the {name} is not [batch, heads, length, head_dim] in {value(output).dtype}")
        return best

    def _check_shapes(self, q: Node, k: Node, v: Node, output: Node) -> None:
        batch, heads, q_len, head_dim = value(q).shape
        _, kv_heads, kv_len, _ = value(k).shape
        fits = (
            same_shape(value(k).shape, [batch, kv_heads, kv_len, head_dim])
            and same_shape(value(v).shape[:3], [batch, kv_heads, kv_len])
            and same_shape(value(output).shape, [batch, heads, q_len, value(v).shape[3]])
        )
        if not fits:
            raise Unread(self.product, f"looks like attention of {shape_of(q)}, {shape_of(k)} and {shape_of(v)}")


def _node(arg: object) -> Node | None:
    return arg if isinstance(arg, Node) and is_tensor(arg) else None


def _is_4d(arg: object) -> bool:
    return isinstance(arg, Node) and is_tensor(arg) and value(arg).ndim == 4


def _widened(node: Node) -> Node | None:
    """What `node` is an exact cast of, or None."""
    return node.all_input_nodes[0] if is_exact_cast(node) and not is_noop(node) else None


def _scaled(node: Node) -> tuple[Node, float] | None:
    """(operand, factor) of a multiplication or division by a constant."""
    if not calls(node, *MULTIPLICATIONS, *DIVISIONS):
        return None
    left, right = node.args[:2]
    factor = constant(right)
    if factor is None and calls(node, *MULTIPLICATIONS):
        left, factor = right, constant(left)
    operand = _node(left)
    if operand is None or factor is None or not math.isfinite(factor) or factor == 0.0:
        return None
    if not same_shape(value(operand).shape, value(node).shape):
        return None
    return operand, 1.0 / factor if calls(node, *DIVISIONS) else factor


def _swaps_last(node: Node) -> bool:
    """True for a transposition of the last two dimensions."""
    rank = value(node).ndim
    if calls(node, aten.transpose.int):
        return {d % rank for d in node.args[1:3] if isinstance(d, int)} == {rank - 1, rank - 2}
    dims = node.args[1]
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) for d in dims):
        return False
    return [d % rank for d in dims if isinstance(d, int)] == [*range(rank - 2), rank - 1, rank - 2]


def _keeps_matrices(node: Node) -> bool:
    """True for a view that leaves the last two dimensions as they are, and the order of the rest."""
    if calls(node, aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default) or is_noop(
        node
    ):
        return True
    views = (
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
    )
    if not (calls(node, *views) and is_tensor(node)):
        return False
    before = value(node.all_input_nodes[0]).shape
    return same_shape(before[-2:], value(node).shape[-2:])


def _one_pass_softmax(node: Node | None, output: int) -> Node | None:
    """Inductor's op for the maximum (output 0) and the sum (output 1) of a softmax in one pass, on CUDA."""
    if node is None or getattr(node.target, "__name__", "") != "getitem" or node.args[1] != output:
        return None
    pair = node.args[0]
    return pair if isinstance(pair, Node) and schema_name(pair).endswith("::prepare_softmax_online") else None


def _without_scale(node: Node | None) -> tuple[Node | None, float]:
    """(source, factor): up through casts and multiplications by constants."""
    factor = 1.0
    while node is not None:
        if is_cast(node) and is_high_precision(node):
            node = node.all_input_nodes[0]
        elif (scaled := _scaled(node)) is not None:
            node, factor = scaled[0], factor * scaled[1]
        else:
            break
    return node, factor


def _between(node: Node, source: Node | None) -> set[Node]:
    """The nodes from which `node` is computed, up to `source`; none where it needs anything else."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current is source or current in found:
            continue
        if not current.all_input_nodes or len(found) > 20:
            return set()
        found.add(current)
        stack.extend(current.all_input_nodes)
    return found


def _leads_to_product(arg: object) -> bool:
    """True where `arg` is a matrix product behind scales, casts, views, masks and other steps on its elements."""
    stack, seen = [arg], set[Node]()
    while stack and len(seen) < 40:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if calls(node, aten.bmm.default):
            return True
        if calls(node, aten.add.Tensor) or _where(node) is not None or len(node.all_input_nodes) == 1:
            stack.extend(node.all_input_nodes)
    return False


def _has_softmax_above(node: Node) -> bool:
    """True for a softmax a few steps above `node`: tells an attention with something extra from any other product."""
    level = [node]
    for _ in range(4):
        level = [x for n in level for x in n.all_input_nodes]
        for x in level:
            if calls(x, aten._softmax.default, aten._safe_softmax.default):
                return True
            if calls(x, aten.div.Tensor) and calls(x.args[0], aten.exp.default):
                return True
    return False


def _show(arg: object) -> str:
    return arg.name if isinstance(arg, Node) else repr(arg)


# Spellings, with (q, k, v, mask): q [batch, heads, q_len, head_dim], k and v with as many heads or fewer


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _sdpa_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _sdpa_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)


def _sdpa_bool_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask > 0, enable_gqa=True)


def _sdpa_float_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _sdpa_tril_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)


def _repeat_interleave(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def _repeat(x: Tensor, heads: int) -> Tensor:
    batch, few, length, head_dim = x.shape
    return x[:, :, None].expand(batch, few, heads // few, length, head_dim).reshape(batch, heads, length, head_dim)


def _repeat_kv(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, _repeat(k, q.shape[1]), _repeat(v, q.shape[1]), is_causal=True)


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ _repeat(k, q.shape[1]).transpose(-1, -2) * 0.3
    return torch.softmax(scores + mask, -1) @ _repeat(v, q.shape[1])


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, _repeat(k, q.shape[1]).transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, _repeat(v, q.shape[1]))


def _masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ _repeat(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(future, -math.inf).float(), -1).to(q.dtype)
    return weights @ _repeat(v, q.shape[1])


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": _sdpa,
    "sdpa, is_causal": _sdpa_causal,
    "sdpa, scale": _sdpa_scale,
    "sdpa, bool mask": _sdpa_bool_mask,
    "sdpa, float mask": _sdpa_float_mask,
    "sdpa, lower triangle as mask": _sdpa_tril_mask,
    "sdpa after repeat_interleave": _repeat_interleave,
    "sdpa after repeat_kv": _repeat_kv,
    "softmax by hand": _softmax,
    "eager attention of transformers": _eager,
    "causal masked_fill by hand": _masked_fill,
}
"""What is read as an `Attention`: (q [batch, heads, q_len, head_dim], k, v, additive mask [q_len, kv_len]) -> out."""
