"""Attention: scaled dot product attention, as one of torch's fused ops or spelled out.

A fused op is read here, by its schema, argument by argument; `attention_math` reads the spelled-out form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import SymInt, Tensor
from torch.fx import Graph, Node

from fusion_passes.graph.arguments import arguments, number
from fusion_passes.graph.functional import op_name, schema_name
from fusion_passes.graph.read import argument, aten, calls, is_tensor, same_shape, value
from fusion_passes.graph.steps import constant
from fusion_passes.graph.symbolic import known
from fusion_passes.idioms.attention_mask import Mask
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.kv_heads import unexpand
from fusion_passes.idioms.reading import Unread, is_4d, is_start, read_all, show
from fusion_passes.reference import attention as attention_reference

BACKENDS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash_for_cpu",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""The ops that `scaled_dot_product_attention` becomes, and what `Attention.backend` calls them."""

_IGNORED = frozenset({"compute_log_sumexp", "return_debug_mask"})


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
    """The fused attention ops of the graph, and what only looks like one.  Never raises."""
    return read_all(graph, "attention", lambda node: _read_fused(node) if schema_name(node) in BACKENDS else None)


def _read_fused(node: Node) -> Attention | None:
    """A call of one of the ops of `BACKENDS`."""
    backend = BACKENDS[schema_name(node)]
    arguments = _bind(node)
    q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
    if not all(is_4d(x) for x in (q, k, v)):
        raise Unread(node, "query, key and value are not all [batch, heads, length, head_dim]")
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    assert isinstance(v, Node)
    dropout = arguments.pop("dropout_p", 0.0)
    if number(dropout) != 0.0:
        raise Unread(node, f"attention with dropout_p={show(dropout)}")
    is_causal = arguments.pop("is_causal", False)
    if not isinstance(is_causal, bool):
        raise Unread(node, f"is_causal is {show(is_causal)}, not known while compiling")
    scale = arguments.pop("scale", None)
    if scale is not None and number(scale) is None:
        raise Unread(node, f"the scale of the scores is {show(scale)}, not a number")
    if scale is not None and not (number(scale) or 0.0) > 0:
        raise Unread(node, f"the scores are scaled by {show(scale)}")
    mask = Mask(node, backend)
    mask.lengths = q_len, kv_len = value(q).shape[2], value(k).shape[2]
    for name in ("attn_mask", "attn_bias"):
        if (given := arguments.pop(name, None)) is not None:
            mask.add(given)
    for name, given in arguments.items():
        if name not in _IGNORED:
            raise Unread(node, f"argument {name}={show(given)} has no place in the attention idiom")
    outputs = _outputs(node)
    output = outputs.pop("output", None)
    if output is None:
        return None  # only the logsumexp is used
    nodes = {node, output}
    if scale is not None and (unpadded := _unpad(q, k, v, output)) is not None:
        q, k, v, output = unpadded
        nodes.add(output)
    if is_causal and backend == "flash" and not known(q_len == kv_len):
        raise Unread(
            node, f"is_causal with q_len {q_len} and kv_len {kv_len}: the flash op aligns that at the bottom right"
        )
    k, v = unexpand(k, v)
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
        raise Unread(node, f"the overload {schema.overload_name} of {op_name(node)} is not read")
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
    if not (is_start(sliced) and is_tensor(sliced) and same_shape(value(sliced).shape, value(source_q).shape)):
        return None
    # All filled up from the same head_dim: otherwise the op multiplies numbers of one with zeros of another.
    alike = all(same_shape(value(x).shape[3:], value(source_q).shape[3:]) for x in (source_k, source_v))
    return (source_q, source_k, source_v, sliced) if alike else None


def _padded(node: Node) -> Node | None:
    """What `node` is with zeros added at the end of its last dimension; None where it is no such thing."""
    said = arguments(node, "self", "pad", "value") if calls(node, aten.constant_pad_nd.default) else None
    if said is None or constant(said[2]) != 0.0:
        return None
    source, pad, _ = said
    if not (isinstance(pad, (list, tuple)) and len(pad) >= 2 and isinstance(source, Node) and is_4d(source)):
        return None
    return source if all(p == 0 for i, p in enumerate(pad) if i != 1) else None


# Spellings, with (q, k, v, mask): q [batch, heads, q_len, head_dim], k and v with as many heads or fewer
