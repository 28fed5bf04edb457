"""KVCacheWrite: `kv_cache_write` in a functional graph, where it returns the caches as they are afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from fusion_passes.graph.functional import arguments_of, schema_name, schema_of, written_tensors
from fusion_passes.graph.read import is_tensor
from fusion_passes.idioms.idiom import Idiom, NearMiss
from fusion_passes.idioms.reading import Unread, read_all

OP = "fusion_passes::kv_cache_write"


@dataclass(frozen=True, eq=False)
class KVCacheWrite(Idiom):
    """`key` and `value` go to the slots of their tokens in two caches.

    output: the call, a tuple; written: what it says of the caches afterwards, as far as the graph uses it: the key's
        (1), the value's (2), both (1, 2 may be one where they share memory).
    key, value: [tokens, kv_heads, head_dim].  k_scale, v_scale: None where there is none.
    caches: the tensors in which the caches lie.
    """

    key: Node
    value: Node
    slot_mapping: Node
    k_scale: Node | None
    v_scale: Node | None
    caches: tuple[Node, ...]
    written: Mapping[int, Node]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The tensors that it reads."""
        scales = (x for x in (self.k_scale, self.v_scale) if x is not None)
        return (self.key, self.value, self.slot_mapping, *scales, *self.caches)


def recognize(graph: Graph) -> Iterator[KVCacheWrite | NearMiss]:
    """Every write of keys and values to a cache.  Never raises."""
    return read_all(graph, "KV cache write", _read)


def _read(node: Node) -> KVCacheWrite | None:
    if schema_name(node) == OP:
        raise Unread(node, "the graph writes to the cache in place already, so its order is not to be read from it")
    schema = schema_of(node)
    if schema is None or schema.name != OP:
        return None
    arguments = arguments_of(node)
    tensors = {name: arguments[name] for name in ("key", "value", "slot_mapping", "k_scale", "v_scale")}
    for name, x in tensors.items():
        if not is_tensor(x) and (x is not None or not name.endswith("scale")):
            raise Unread(node, f"{name} is no tensor of this graph")
    written = {user.args[1]: user for user in node.users}
    if len(written) != len(node.users) or not all(isinstance(i, int) and i > 0 for i in written):
        raise Unread(node, "what it returns is used in an unusual way")
    return KVCacheWrite(
        output=node,
        nodes=frozenset({node, *node.users}),
        caches=written_tensors(node),
        written=written,  # type: ignore[arg-type]
        **tensors,  # type: ignore[arg-type]
    )
