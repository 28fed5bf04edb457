"""The arguments of one call: all that it says, or no reading of it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fusion_passes.graph.read import argument, calls, is_tensor

_WITHOUT_VALUE = frozenset({"memory_format", "non_blocking", "pin_memory", "implicit"})
"""Arguments that say where a result lies or how it is copied, never what it is."""


def arguments(node: object, *names: str) -> tuple[Any, ...] | None:
    """The arguments of these names of a call of an op, its defaults filled in: all that a reader looks at.

    None where the call says more: an argument that is not named has another value than its default, so that the op
    computes something else than the reader thinks (`alpha` of a sum, `dtype` of a reduction); and where the node is no
    call of an op, or its op lacks one of the names."""
    schema = getattr(node.target, "_schema", None) if isinstance(node, Node) and node.op == "call_function" else None
    if not isinstance(node, Node) or schema is None:
        return None
    given = {a.name: argument(node, i, a.name, a.default_value) for i, a in enumerate(schema.arguments)}
    for a in schema.arguments:
        said, unsaid = given[a.name], a.default_value
        if a.name not in names and a.name not in _WITHOUT_VALUE and (isinstance(said, Node) or said != unsaid):
            return None
    return tuple(given[name] for name in names) if all(name in given for name in names) else None


def operands(node: object, *targets: object) -> tuple[Any, Any] | None:
    """Both operands of a call of one of these binary ops; None for anything else, and where the call says more."""
    return arguments(node, "self", "other") if calls(node, *targets) else None


def number(arg: object) -> float | None:
    """A Python number in the graph (no symbolic one, no bool), or None."""
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


def tensor_node(arg: object) -> Node | None:
    """`arg` where it is a node that produces one tensor, else None."""
    return arg if isinstance(arg, Node) and is_tensor(arg) else None
