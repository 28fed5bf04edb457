"""An op is declared once: a dataclass has its arguments, and the schema, the public function and its help follow.

    @dataclass(frozen=True, eq=False)
    class SiluArguments(Arguments):
        '''What the op computes, shapes and errors: the help of the function `silu`.'''

        x: Tensor
        scale: Tensor | None = None
        _: KW_ONLY
        dtype: torch.dtype = torch.float8_e4m3fn

    silu = declare("silu", SiluArguments, fake=_fake, cpu=_cpu, cuda=_cuda, kernels=(KERNEL,))

Each implementation takes one `SiluArguments`.  `torch.library.infer_schema` is not used: to it every `int` is a SymInt,
it knows no `int | SymInt`, and it calls what is written to by other names than the schemas that compiled code knows.
"""

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import SymInt, Tensor

from fusion_passes.ops.kernel import Kernel
from fusion_passes.ops.support import on_its_device, unpacked

NAMESPACE = "fusion_passes"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""The limits of a kernel are asked of the strides in the graph, so the call must have these; and what an op writes to
is written where it lies: a copy with other strides would be another cache."""
TYPES: Mapping[object, str] = {
    Tensor: "Tensor",
    bool: "bool",
    int: "int",
    SymInt: "SymInt",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
}
"""Types of arguments, with their names in a schema."""

P = ParamSpec("P")
Call = TypeVar("Call", bound="Arguments")
Result = TypeVar("Result")


class Arguments:
    """A call of an op: a frozen dataclass of its arguments in the order of the schema."""

    def by_name(self, without: Collection[str] = (), **instead: Any) -> dict[str, Any]:
        """The arguments for a function that has the same ones, but for those in `without`; `instead` goes before, or
        beside them."""
        return {name: x for name, x in vars(self).items() if name not in without} | instead


OPS: dict[str, tuple[Kernel, ...]] = {}
"""Every op of the library by name, and the kernels that its CUDA implementation runs, best first."""

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def declare(
    name: str,
    arguments: Callable[P, Call],
    *,
    fake: Callable[[Call], Result],
    cpu: Callable[[Call], object],
    cuda: Callable[[Call], object],
    returns: object = Tensor,
    writes: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
    kernels: tuple[Kernel, ...] = (),
) -> Callable[P, Result]:
    """Register the op `fusion_passes::<name>`.  Returns the function that calls it.

    arguments: the dataclass.  returns: `Tensor`, a tuple of them, or None.  writes: names of tensors that it changes.
    given: arguments whose default the schema does not have, beside dtypes, which cannot have one: the function fills
    them in.  cuda runs with the device of its first argument as the current one.  Raises TypeError for a type that a
    schema does not have, and for a name in writes or given that no argument has.
    """
    signature = inspect.signature(arguments).replace(return_annotation=returns)
    _library.define(name + schema(signature, writes, given), tags=TAGS)
    _library.impl(name, unpacked(arguments, cpu), "CPU")
    _library.impl(name, on_its_device(unpacked(arguments, cuda)), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", unpacked(arguments, fake), lib=_library)
    op = getattr(torch.ops.fusion_passes, name)
    missing = tuple(
        (position, parameter.name, parameter.default)
        for position, parameter in enumerate(signature.parameters.values())
        if parameter.default is not parameter.empty and _default(parameter, given) == ""
    )

    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        for position, argument, default in missing:
            if position >= len(args) and argument not in kwargs:
                kwargs[argument] = default
        return op(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = arguments.__module__, arguments.__doc__
    function.__signature__ = signature  # type: ignore[attr-defined]  # of `inspect.signature`
    OPS[name] = kernels
    return function


def schema(signature: inspect.Signature, writes: tuple[str, ...] = (), given: tuple[str, ...] = ()) -> str:
    """What `torch.library` calls a schema, without the name.  writes, given, errors: as in `declare`."""
    if unknown := {*writes, *given} - signature.parameters.keys():
        raise TypeError(
            f"no argument is called {' or '.join(sorted(unknown))}, there are {', '.join(signature.parameters)}"
        )
    alias = {name: f"({letter}!)" for name, letter in zip(writes, "abcdefgh", strict=False)}
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        kind = _type(parameter.annotation).replace("Tensor", f"Tensor{alias.get(parameter.name, '')}")
        parts.append(f"{kind} {parameter.name}{_default(parameter, given)}")
    return f"({', '.join(parts)}) -> {_results(signature.return_annotation)}"


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return _type(type(typing.get_args(annotation)[0]))
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    kinds = set(typing.get_args(annotation)) if is_union else {annotation}
    optional = "?" if types.NoneType in kinds else ""
    kinds -= {types.NoneType}
    if kinds == {int, SymInt}:
        kinds = {SymInt}
    if len(kinds) != 1 or not kinds <= TYPES.keys():
        raise TypeError(f"{annotation} is no type of a schema; there are {', '.join(TYPES.values())}, and each | None")
    return TYPES[kinds.pop()] + optional


def _results(annotation: Any) -> str:
    if typing.get_origin(annotation) is tuple:
        return f"({', '.join(map(_type, typing.get_args(annotation)))})"
    return "()" if annotation is None else _type(annotation)


def _default(parameter: inspect.Parameter, given: tuple[str, ...]) -> str:
    """A default as the schema has it: "" for none."""
    default = parameter.default
    if default is parameter.empty or isinstance(default, torch.dtype) or parameter.name in given:
        return ""
    return f'="{default}"' if isinstance(default, str) else f"={default}"
