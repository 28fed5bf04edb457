"""Attention spelled out in matrix products and a softmax, read upwards from the second product.

softmax (safe or not) <- masks, then the scale <- first product <- scales, casts and repeated heads of q and k
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fusion_passes.graph.arguments import arguments, operands, tensor_node
from fusion_passes.graph.functional import op_name, schema_name
from fusion_passes.graph.read import (
    argument,
    aten,
    calls,
    is_high_precision,
    is_noop,
    is_tensor,
    is_view,
    keeps_order,
    same_shape,
    value,
    view_source,
)
from fusion_passes.graph.steps import DIVISIONS, MULTIPLICATIONS, Cast, ExactCast, Scaled, constant, is_cast, step
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.attention_mask import Mask, inverted, where_parts
from fusion_passes.idioms.idiom import NearMiss
from fusion_passes.idioms.kv_heads import broadcast_heads, repeated_from, unexpand
from fusion_passes.idioms.reading import Unread, ancestors, is_4d, read_all, reduced_along_last, shape_of


def recognize(graph: Graph) -> Iterator[Attention | NearMiss]:
    """The attention that the graph spells out, and what only looks like it.  Never raises."""
    return read_all(graph, "attention", _read_node)


def _read_node(node: Node) -> Attention | None:
    if _is_product(node):
        return _read(node)
    left = _left_of_summed(node)
    if left is not None and _Math(node).softmax(left) is not None:
        raise Unread(
            node,
            "looks like attention of one query, but Inductor computes its product as a multiplication and a sum: "
            "torch._inductor.config.coordinate_descent_tuning = False keeps the product",
        )
    return None


def _is_product(node: object) -> bool:
    """True for a product of two batches of matrices, also of a batch of one, which Inductor makes a product of two
    matrices on a GPU."""
    if calls(node, aten.bmm.default):
        return True
    return (
        isinstance(node, Node)
        and calls(node, aten.mm.default)
        and all(
            calls(source, aten.squeeze.dim) and value(source.all_input_nodes[0]).ndim == 3
            for source in node.all_input_nodes
        )
        and all(calls(user, aten.unsqueeze.default) for user in node.users)
    )


def _left_of_summed(node: Node) -> Node | None:
    """The left side [batch, 1, n] of `(left.unsqueeze(-1) * right.unsqueeze(1)).sum(2)`, which Inductor makes of a
    product with one row where it tunes by coordinate descent; None for anything else."""
    said = arguments(node, "self", "dim", "keepdim") if calls(node, aten.sum.dim_IntList) else None
    if said is None or tensor_node(said[0]) is None or value(said[0]).ndim != 4 or said[1:] != ([2], False):
        return None
    for left in operands(said[0], aten.mul.Tensor) or ():
        while is_cast(left):
            left = left.all_input_nodes[0]
        if calls(left, aten.unsqueeze.default) and same_shape(value(left).shape[3:], [1]):
            return tensor_node(left.args[0])
    return None


def _read(product: Node) -> Attention | None:
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
        self.mask = Mask(product, "math")
        self.score_product = product
        self.masked_at: list[Node] = []

    def up(self, node: Node, casts: type[Cast] = Cast) -> Node:
        """Up through views that leave the matrices as they are, and casts of this kind (not to FP8)."""
        while _keeps_matrices(node) or (isinstance(step(node), casts) and is_high_precision(node)):
            self.nodes.add(node)
            node = node.all_input_nodes[0]
        return node

    def softmax(self, node: Node) -> Node | None:
        """The scores of which `node` is the softmax; None where it is none."""
        node = self.up(node)
        judged: Node | None = None  # the scores that decide which rows are empty
        if (safe := self._safe(node)) is not None:
            self.nodes.add(node)
            inner, judged = safe
            node = self.up(inner)
        scores = self._softmax_op(node) or self._quotient(node)
        if scores is not None and judged is not None and not self._is_scores(judged, scores):
            raise Unread(node, "looks like attention, but rows are emptied by something other than the scores")
        if scores is None and _has_softmax_above(node):
            what = "a view that is not read" if is_view(node) else op_name(node)
            what = "dropout" if _drops_out(node) else what
            raise Unread(
                node, f"looks like attention, but the softmax passes through {what} ({node.name}){_if_padded(node)}"
            )
        return scores

    def _softmax_op(self, node: Node) -> Node | None:
        """The scores of a softmax in one op; None for anything else."""
        said = arguments(node, "self", "dim", "half_to_float") if calls(node, aten._softmax.default) else None
        if calls(node, aten._safe_softmax.default):
            said = arguments(node, "self", "dim", "dtype")
        scores = None if said is None else tensor_node(said[0])
        if said is None or scores is None or not is_high_precision(node):
            return None
        self._last_dim(node, scores, said[1])
        self.nodes.add(node)
        return scores

    def _is_scores(self, judged: Node, scores: Node) -> bool:
        """True where `judged` is the scores.  Not always the same node: where a scale stands right before the softmax,
        Inductor computes it once more, or behind the maximum, where it is in `factor` already; see `_shifted`."""
        (t, in_judged), (s, in_scores) = self._unscaled(judged), self._unscaled(scores)
        return t is s and math.isclose(in_judged, in_scores * self.factor, rel_tol=1e-3)

    def _unscaled(self, node: Node) -> tuple[Node, float]:
        """(source, factor): up through views that leave the matrices as they are, casts that lose nothing, and
        multiplications by constants."""
        factor = 1.0
        while (scaled := _scaled(node := self.up(node, ExactCast))) is not None:
            self.nodes.add(node)
            node, factor = scaled[0], factor * scaled[1]
        return node, factor

    def _safe(self, node: Node) -> tuple[Node, Node] | None:
        """(softmax, scores) of `where(no score in the row is above -inf, 0, softmax)`."""
        parts = where_parts(node)
        if parts is None or constant(parts[1]) != 0.0 or not (softmax := tensor_node(parts[2])):
            return None
        shape, passed = value(softmax).shape, set[Node]()
        scores = _judged_rows(parts[0], passed)
        if scores is None or not same_shape(value(node).shape, shape):
            return None
        # The n-th row judged is the n-th one emptied.
        if not same_shape(value(parts[0]).shape, [*shape[:-1], 1]) or not same_shape(shape, value(scores).shape):
            raise Unread(node, f"looks like attention, but {node.name} empties other rows than those that it judges")
        self.nodes |= passed
        return softmax, scores

    def _quotient(self, node: Node) -> Node | None:
        """The scores s of `exp(s - amax(s)) / sum(exp(s - amax(s)))`."""
        exponential, total = map(tensor_node, operands(node, aten.div.Tensor) or (None, None))
        if exponential is None or total is None or not calls(exponential, aten.exp.default):
            return None
        exponent = tensor_node(exponential.args[0])
        shifted = self._shifted(exponent)
        if shifted is None:
            return None
        if (said := arguments(total, "self", "dim", "keepdim", "dtype")) and said[0] is exponential:
            if not calls(total, aten.sum.dim_IntList) or not is_high_precision(total):
                return None
            self._last_dim(total, exponential, said[1])
        else:
            pair = _one_pass_softmax(total, 1)
            # Its sum is of the exponentials of what it takes the maximum of: a scale behind that is not in it.
            if pair is None or exponent is not shifted or pair is not _one_pass_softmax(shifted.args[1], 0):
                return None
            self.nodes.add(pair)
        self.nodes |= {node, exponential, total}
        return tensor_node(shifted.args[0])

    def _shifted(self, node: Node | None) -> Node | None:
        """The node `s - amax(s)` in the exponent.

        Inductor subtracts the maximum before it applies a scale that stands right before the softmax: up to torch 2.12
        `(t - amax(t)) * c`, later with a choice by row, `where(all finite, (t - amax(t)) * c, t * c - amax(t * c))`.
        """
        if node is None:
            return None
        if (parts := where_parts(node)) is not None:
            condition, yes, no = parts
            scaled, plain = tensor_node(yes), tensor_node(no)
            if scaled is None or plain is None or (after := _scaled(scaled)) is None:
                return None
            inner, outer = self._minus_max(after[0]), self._minus_max(plain)
            if inner is None or outer is None:
                return None
            (t, in_t), (s, in_s) = (_without_scale(tensor_node(x.args[0])) for x in (inner, outer))
            if t is not s or not math.isclose(in_t * after[1], in_s, rel_tol=1e-3):
                return None
            if not same_shape(value(node).shape, value(outer).shape):
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
        scores, largest = map(tensor_node, operands(node, aten.sub.Tensor) or (None, None))
        if scores is None or largest is None:
            return None
        if (pair := _one_pass_softmax(largest, 0)) is not None and pair.args[0] is scores:
            self._last_dim(pair, scores, argument(pair, 1, "dim"))
        elif calls(largest, aten.amax.default) and largest.all_input_nodes[0] is scores:
            self._last_dim(largest, scores, argument(largest, 1, "dim"))
        else:
            return None
        self.nodes |= {node, largest}
        return node

    def _last_dim(self, node: Node, scores: Node, dim: object) -> None:
        dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
        rank = value(scores).ndim
        if dims not in ([-1], [rank - 1]):
            raise Unread(node, f"looks like attention, but the softmax is over dimension {dim}, not over the keys")
        if is_tensor(node) and value(node).ndim != rank:
            raise Unread(node, f"looks like attention, but {op_name(node)} drops the dimension of the keys")

    def scores(self, node: Node) -> None:
        """From the softmax's input up to the first matrix product: masks, then the scale."""
        while True:
            node = self.up(node)
            self.nodes.add(node)
            if _is_product(node):
                self.score_product = node
                return
            if (added := operands(node, aten.add.Tensor)) is not None:
                node = self._added(node, *added)
            elif (parts := where_parts(node)) is not None:
                node = self._filled(node, *parts)
            elif (scaled := _scaled(node)) is not None:
                node, times = scaled
                self.factor *= times
                self.scaled = True
            else:
                raise Unread(
                    node,
                    f"looks like attention, but the scores pass through {op_name(node)} ({node.name})"
                    f"{_if_padded(node)}",
                )

    def _added(self, node: Node, left: object, right: object) -> Node:
        """`scores + mask`: the scores."""
        on_left, on_right = _leads_to_product(left), _leads_to_product(right)
        scores, mask = (left, right) if on_left else (right, left)
        if on_left == on_right or not isinstance(scores, Node):
            raise Unread(node, f"looks like attention, but {node.name} adds no mask to the scores")
        if self.scaled:
            raise Unread(node, f"looks like attention, but {node.name} adds a mask before the scale is applied")
        self._same_shape(node, scores)
        self._masked(scores, mask)
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
        if self.factor < 0:
            raise Unread(node, f"masks scores that are scaled by {self.factor:g} afterwards")
        self._same_shape(node, scores)
        self._masked(scores, condition)
        self.mask.keep(condition, negated)
        return scores

    def _masked(self, scores: Node, mask: object) -> None:
        """Remember the batch and head dimensions of the scores where a mask is applied that has such dimensions: they
        must turn out to be the output's, since a reshape may lie between."""
        mask = tensor_node(mask)
        if mask is not None and not same_shape(value(mask).shape[:-2], [1] * max(0, value(mask).ndim - 2)):
            self.masked_at.append(scores)

    def _same_shape(self, node: Node, scores: Node) -> None:
        if not same_shape(value(node).shape, value(scores).shape):
            raise Unread(node, f"the mask broadcasts the scores from {shape_of(scores)} to {shape_of(node)}")
        self.mask.lengths = value(scores).shape[-2:]

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
        while not is_4d(node):
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
        q, factor_q, path_q = self._operand(self.score_product.args[0], "query", output)[0]
        keys = self._operand(self.score_product.args[1], "key", output, transposed=True)
        values = self._operand(right, "value", output)
        alike = len(keys) == len(values)  # both with as many heads as the query, or both with one that is broadcast
        (k, factor_k, path_k), (v, factor_v, path_v) = (of[-1 if alike else 0] for of in (keys, values))
        if factor_v != 1.0:
            raise Unread(self.product, f"looks like attention, but the value is scaled by {factor_v:g}")
        k, v = unexpand(k, v)
        self._check_shapes(q, k, v, output)
        for scores in self.masked_at:
            if not same_shape(value(scores).shape[:-2], value(output).shape[:2]):
                raise Unread(scores, f"a mask is applied to scores of {shape_of(scores)}, not [batch, heads, …]")
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
    ) -> list[tuple[Node, float, set[Node]]]:
        """(tensor, factor, nodes passed): from an operand of a product up to the topmost 4-D tensor of the output's
        dtype from which only scales, a transposition, a repetition of heads and exact casts lead here; for a key or a
        value whose one head is broadcast the tensor with all heads, if there is one, then that with one."""
        assert isinstance(arg, Node)  # of a matrix product
        node = arg
        (batch, heads), dtype = value(output).shape[:2], value(output).dtype
        best: dict[bool, tuple[Node, float, set[Node]]] = {}  # by whether it is behind the broadcast of one head
        broadcast = False
        path: list[Node] = []
        factor = 1.0
        while True:
            fits = is_4d(node) and not transposed and same_shape(value(node).shape[:2], [batch, heads])
            if fits and value(node).dtype == dtype:
                best[broadcast] = node, factor, set(path)
            few = repeated_from(node) if fits else None
            if few is not None and (narrow := _widened(few)) is not None and value(narrow).dtype == dtype:
                # The heads of a wider copy are repeated; the repetition of the tensor itself is what the idiom reads.
                best[broadcast] = narrow, factor, set(path)
                break
            if calls(node, aten.permute.default, aten.transpose.int) and _swaps_last(node):
                transposed = not transposed
                following = node.all_input_nodes[0]
            elif _keeps_matrices(node) or isinstance(step(node), ExactCast):
                following = node.all_input_nodes[0]
            elif name != "query" and (one := broadcast_heads(node)) is not None:
                following, heads, broadcast = one, 1, True
            elif (scaled := _scaled(node)) is not None:
                following, times = scaled
                factor *= times
            else:
                break
            path.append(node)
            node = following
        expanded = next((n for n in (*path, node) if calls(n, aten.expand.default) and not is_noop(n)), None)
        if expanded is not None and (not best or (name == "query" and _is_wider_copy(expanded.all_input_nodes[0]))):
            source = shape_of(expanded.all_input_nodes[0])
            raise Unread(
                node,
                f"the {name} is broadcast from {source} to {shape_of(expanded)}: expand it before the attention, to "
                "the batch and heads of the others",
            )
        if not best:
            raise Unread(node, f"the {name} is not [batch, heads, length, head_dim] in {value(output).dtype}")
        return list(best.values())

    def _check_shapes(self, q: Node, k: Node, v: Node, output: Node) -> None:
        batch, heads, q_len, head_dim = value(q).shape
        _, kv_heads, kv_len, _ = value(k).shape
        fits = (
            same_shape(value(k).shape, [batch, kv_heads, kv_len, head_dim])
            and same_shape(value(v).shape[:3], [batch, kv_heads, kv_len])
            and same_shape(value(output).shape, [batch, heads, q_len, value(v).shape[3]])
        )
        if not fits:
            raise Unread(
                self.product,
                f"looks like attention of {shape_of(q)}, {shape_of(k)} and {shape_of(v)}, which do not fit each other: "
                "give key and value as many heads",
            )


def _if_padded(node: Node) -> str:
    """What to do where `node` fills up a matrix for a product, or cuts the result, as Inductor may."""
    cut = calls(node, aten.slice.Tensor) and tensor_node(node.args[0])
    product = cut if isinstance(cut, Node) and _is_product(cut) else None
    if calls(node, aten.constant_pad_nd.default) or (
        product is not None and any(calls(x, aten.constant_pad_nd.default) for x in product.all_input_nodes)
    ):
        return ": where Inductor padded the product, torch._inductor.config.shape_padding = False keeps it as it is"
    return ""


def _judged_rows(node: Node, passed: set[Node]) -> Node | None:
    """The scores of which `node` says in order, for each row, whether all are -inf; None for anything else.
    passed: what leads to them is added."""

    def up(node: Node) -> Node:
        while keeps_order(node):
            passed.add(node)
            node = node.all_input_nodes[0]
        passed.add(node)
        return node

    node = up(node)
    compared = reduced_along_last(node, aten.all.dim)
    if compared is None and (some := inverted(node)) is not None:
        finite = reduced_along_last(up(some), aten.any.dim, aten.any.dims)
        compared = None if finite is None else inverted(up(finite))
    both = operands(compared, aten.eq.Scalar, aten.eq.Tensor)
    scores = None if both is None or constant(both[1]) != -math.inf else tensor_node(both[0])
    if compared is None or scores is None or not same_shape(value(scores).shape, value(compared).shape):
        return None
    passed.add(compared)
    return scores


def _widened(node: Node) -> Node | None:
    """What `node` is an exact cast of, to a wider dtype; or None."""
    taken = step(node)
    return taken.operand if isinstance(taken, ExactCast) else None


def _is_wider_copy(node: Node) -> bool:
    """True for an exact cast to a wider dtype, scaled or not: math attention computes 16-bit tensors in fp32."""
    while (scaled := _scaled(node)) is not None:
        node = scaled[0]
    return _widened(node) is not None


def _scaled(node: Node) -> tuple[Node, float] | None:
    """(operand, factor) of a multiplication or division by a constant."""
    taken = step(node)
    return (taken.operand, taken.factor) if isinstance(taken, Scaled) and not taken.broadcasts else None


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
    if not keeps_order(node):
        return False
    source = view_source(node)
    # Of a split, whose one part the next node is, this says nothing: that node does.
    return source is None or not is_tensor(node) or same_shape(value(source).shape[-2:], value(node).shape[-2:])


def _one_pass_softmax(node: object, output: int) -> Node | None:
    """Inductor's op for the maximum (output 0) and the sum (output 1) of a softmax in one pass, on CUDA."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != output:
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
        tensors = [x for x in current.all_input_nodes if is_tensor(x)]
        if not tensors or len(found) > 20:
            return set()
        found.add(current)
        stack.extend(tensors)
    return found


def _leads_to_product(arg: object) -> bool:
    """True where `arg` is a matrix product behind scales, casts, views, masks and other steps on its elements."""
    stack, seen = [arg], set[Node]()
    while stack and len(seen) < 40:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if _is_product(node):
            return True
        tensors = [x for x in node.all_input_nodes if is_tensor(x)]
        combines = calls(node, aten.add.Tensor, *MULTIPLICATIONS, *DIVISIONS) or where_parts(node) is not None
        if combines or len(tensors) == 1:
            stack.extend(tensors)
    return False


_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)


def _has_softmax_above(node: Node) -> bool:
    """True for a softmax a few steps above `node`: tells an attention with something extra from any other product."""
    above = set(ancestors(node, 4)) - {node}
    return any(calls(x, *_SOFTMAX) or (calls(x, aten.div.Tensor) and calls(x.args[0], aten.exp.default)) for x in above)


def _drops_out(node: Node) -> bool:
    """True for random numbers a few steps above `node`, beside its softmax."""
    for x in ancestors(node, 5, but_not=(*_SOFTMAX, aten.exp.default)):
        tags = getattr(x.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags or schema_name(x) == "prims::inductor_random":
            return True
    return False
