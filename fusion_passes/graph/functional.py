"""Calls of ops by name, and functionalised writes: what a functional graph has instead of an op that writes.

    auto_functionalized(op, x=x, cache=cache)                                   version 1
    auto_functionalized_v2(op, x=x, _cache_base_index=0, _all_bases=[cache])    version 2
    triton_kernel_wrapper_functional(kwargs={"cache": cache}, tensors_to_clone=["cache"])

give the op's results followed by the new values of what it writes to (the last: a dict of new values alone); `getitem`
takes one.  In version 2 several arguments may be views of one base.  Inductor unwraps these calls, and writes in place
where nothing needs the old values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_passes.graph.match import Call
from fusion_passes.graph.read import argument

BASES, BASE_INDEX = "_all_bases", "_base_index"
PART = ("_size", "_slice_dim")
"""Ends of the arguments of version 2 that say which part of a base an op writes to."""


def is_functionalized(node: Node) -> bool:
    """True for the wrapper around an op that writes to its arguments."""
    return _name(node.target).startswith("auto_functionalized") and node.op == "call_function"


def schema_of(node: Node) -> Any:
    """The schema of the op that `node` calls, wrapped or not; None where it calls no op."""
    if node.op != "call_function":
        return None
    return getattr(node.args[0] if is_functionalized(node) else node.target, "_schema", None)


def schema_name(node: Node) -> str:
    """`namespace::op` of a call that is not wrapped, without the overload; "" for what is no torch op."""
    return _schema_name(node.target) if node.op == "call_function" else ""


@functools.lru_cache(1024)
def _name(target: Any) -> str:
    return getattr(target, "__name__", "")


@functools.lru_cache(1024)
def _schema_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)  # a new object each time
    return "" if schema is None else str(schema.name)


def op_name(node: Node) -> str:
    """The op of a node as a user knows it, wrapped or not: `aten.tanh`; the node's own name where it is no call."""
    if node.op != "call_function":
        return node.name
    if (schema := schema_of(node)) is not None:
        return str(schema.name).replace("::", ".")
    return getattr(node.args[0] if is_functionalized(node) else node.target, "__name__", node.name)


def made_by(node: Node) -> Node:
    """The call whose result `node` is: of several, or of what functionalisation wrapped."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def arguments_of(call: Node) -> dict[str, object]:
    """The arguments of a call of an op, wrapped or not, by their names in its schema, defaults filled in.  Of a tensor
    that the op writes to: as it was before, as a whole, also where a part of it is written."""
    schema = schema_of(call)
    if not is_functionalized(call):
        return {a.name: argument(call, i, a.name, a.default_value) for i, a in enumerate(schema.arguments)}
    given = {a.name: call.kwargs.get(a.name, a.default_value) for a in schema.arguments}
    bases = _bases(call)
    return given if bases is None else given | {name: bases[i] for name, i in _places(call).items()}


@dataclass(frozen=True, eq=False)
class OpCall:
    """One result of a call of an op, wrapped or not.

    name: `namespace::op`.  arguments: all, see `arguments_of`.  output: the node that holds the result.
    nodes: what computes it.
    written: the argument whose new value the result is; "" for what the op returns.
    whole: False where the op writes to a part of that tensor only, so that the result is more than what it wrote.
    """

    name: str
    arguments: Mapping[str, object]
    output: Node
    nodes: frozenset[Node]
    written: str = ""
    whole: bool = True

    @property
    def defaults(self) -> Mapping[str, object]:
        """Of the arguments that have one."""
        schema = schema_of(made_by(self.output))
        return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def op_call(node: Node, among: Collection[str]) -> OpCall | None:
    """The call, of one of the ops named, whose result `node` holds; None for anything else."""
    if (name := schema_name(node)) in among:
        return OpCall(name, arguments_of(node), node, frozenset({node}))
    if node.target is not operator.getitem:
        return None
    call, index = node.args
    if not isinstance(call, Node) or not isinstance(index, int) or not is_functionalized(call):
        return None
    schema = schema_of(call)
    if schema is None or schema.name not in among:
        return None
    written = [name for name, place in _places(call).items() if place == index - _first(schema)]
    if len(written) > 1:
        return None
    name = written[0] if written else ""
    whole = not any(f"_{name}{part}" in call.kwargs for part in PART)
    return OpCall(str(schema.name), arguments_of(call), node, frozenset({node, call}), name, whole)


def call_by_name(call: Call, op: Any, arguments: Mapping[str, Any]) -> Node:
    """Add a call of an op with these arguments, as far as it has them; those with a default may be missing."""
    schema = op._schema.arguments
    given = {a.name: arguments.get(a.name, a.default_value) for a in schema}
    positional = [given[a.name] for a in schema if not a.kwarg_only]
    while positional and positional[-1] is None:
        positional.pop()
    named = {a.name: given[a.name] for a in schema if a.kwarg_only and given[a.name] != a.default_value}
    return call(op, *positional, **named)


def written_tensors(call: Node) -> tuple[Node, ...]:
    """The tensors that a functionalised call writes to, each once; none for another call."""
    return tuple(dict.fromkeys(x for new in _new_values(call).values() for x in _nodes(new)))


def written_tensor(node: Node) -> Node | None:
    """The tensor whose new value `node` takes from a functionalised call; None for anything else."""
    if node.target is not operator.getitem:
        return None
    call, index = node.args
    if isinstance(call, Node) and call.target is operator.getitem:  # one of a list of tensors
        wrapper, at = call.args
        tensors = _new_values(wrapper).get(at) if isinstance(wrapper, Node) else None
        written = tensors[index] if isinstance(tensors, (list, tuple)) and isinstance(index, int) else None
    else:
        written = _new_values(call).get(index) if isinstance(call, Node) else None
    return written if isinstance(written, Node) else None


def with_same_writes(write: Node, call: Call, op: Any, **arguments: object) -> Node:
    """Add a call of `op`, functionalised as `write` is, that writes to what `write` writes to through arguments of the
    same names.  arguments: the others."""
    names = _written_names(schema_of(write))
    where = {name: x for name, x in write.kwargs.items() if name in names or name.startswith("_")}
    return call(write.target, op, **arguments, **where)


def fake_result(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives on fake tensors, functionalised or not.

    Where version 2 writes to whole tensors, what it gives is known without running the wrapper, which takes most of the
    time: the op's result, and a copy of each tensor.  The copies are new memory: Inductor writes in place only where
    nothing that shares memory with the old tensor is read later."""
    bases = kwargs.get(BASES)
    given = {name: x for name, x in kwargs.items() if not name.startswith("_")}
    index = {name: x for name, x in kwargs.items() if name.startswith("_") and name != BASES}
    if bases is None or not all(name.endswith(BASE_INDEX) and isinstance(x, int) for name, x in index.items()):
        return target(*args, **kwargs)
    written = {name.removeprefix("_").removesuffix(BASE_INDEX): bases[x] for name, x in index.items()}
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(bases)):
        result = args[0](**given, **written)
    copies = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in bases)
    return (*result, *copies) if isinstance(result, tuple) else (result, *copies)


def _new_values(call: Node) -> Mapping[Any, Any]:
    """By what `getitem` takes of a functionalised call: the tensor, or the list of tensors, whose new value that is."""
    if call.op == "call_function" and _name(call.target) == "triton_kernel_wrapper_functional":
        given: Any = call.kwargs["kwargs"]
        cloned: Any = call.kwargs["tensors_to_clone"]
        return {name: given[name] for name in cloned}
    if not is_functionalized(call):
        return {}
    schema, bases = schema_of(call), _bases(call)
    if bases is None:
        return dict(enumerate((call.kwargs.get(name) for name in _written_names(schema)), _first(schema)))
    if schema is None:  # a region of the user's code that writes (`torch.compiler.nested_compile_region`)
        results = call.meta.get("val")
        return dict(enumerate(bases, len(results) - len(bases))) if isinstance(results, (list, tuple)) else {}
    # An op may return the one tensor that it writes to (`Tensor(a!)`).
    returned = {i: bases[0] for i, result in enumerate(schema.returns) if result.alias_info is not None and bases}
    return returned | dict(enumerate(bases, _first(schema)))


def _nodes(value: Any) -> list[Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, Node)]


def _bases(call: Node) -> list[Any] | None:
    """The tensors that version 2 of the wrapper writes to; None for version 1."""
    bases: Any = call.kwargs.get(BASES)
    return None if bases is None else list(bases)


def _written_names(schema: Any) -> list[str]:
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _first(schema: Any) -> int:
    """The index of the first new value: an op without results gives None."""
    return max(len(schema.returns), 1)


def _places(call: Node) -> Mapping[str, int]:
    """Of each tensor that the op writes to, at which place its new value is among all of them: by position in version
    1; as version 2 says."""
    names = _written_names(schema_of(call))
    if _bases(call) is None:
        return {name: i for i, name in enumerate(names)}
    said = {name: call.kwargs.get(f"_{name}{BASE_INDEX}") for name in names}
    return {name: place for name, place in said.items() if isinstance(place, int)}
