"""What can be read of custom ops and of Triton kernels: the Python functions behind them.

Compiled code calls an op by its name, so a kernel for a device takes part in it with its current source, in the cache
or not.  What is baked into compiled code is the layout of the op's results, from its fake implementation, and whatever
of it is traced.  The source of kernels is read all the same: who has changed one expects new code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

TORCH_S_OWN = ("aten", "prim", "prims", "quantized")


def is_namespace(item: object) -> bool:
    """`torch.ops` and what it has for each library."""
    return item is torch.ops or isinstance(item, torch._ops._OpNamespace)


def is_op(item: object) -> bool:
    """An op, one of its overloads, or what `torch.library.custom_op` returns."""
    return isinstance(item, (OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef)) or is_namespace(item)


def is_cpp(item: object) -> bool:
    """An op of a library that is no part of torch and was not written in Python."""
    return any(
        op.namespace not in TORCH_S_OWN and op._schema.name not in OPDEFS and not _python_keys(op) for op in _each(item)
    )


@dataclass(frozen=True)
class Overload:
    """texts: the schema and the tags.  traced: Python functions that run while a graph is compiled.  kernels: those
    that compiled code calls.  unreadable: the dispatch key of one that would belong to `traced` and cannot be had."""

    name: str
    texts: tuple[str, ...] = ()
    traced: tuple[Callable[..., Any], ...] = ()
    kernels: tuple[Callable[..., Any], ...] = ()
    unreadable: str = ""


def overloads(item: object) -> Iterator[Overload]:
    """The overloads of an op; of one of torch's own the names."""
    if isinstance(item, HigherOrderOperator) or is_namespace(item):
        yield Overload(str(item))
    for op in _each(item):
        if op.namespace in TORCH_S_OWN:
            yield Overload(str(op))
            continue
        texts = (str(op._schema), *sorted(str(tag) for tag in op.tags))
        traced = [fn for _, fn in sorted(op.py_kernels.items(), key=lambda pair: str(pair[0]))]
        definition = OPDEFS.get(op._schema.name)
        if definition is not None:
            kernels = tuple(_kernels(definition))
            if definition._torch_dispatch_fns:  # a triton_op is traced through
                traced += kernels
            if definition._abstract_fn is not None:
                traced.append(definition._abstract_fn)
            yield Overload(str(op), texts, tuple(traced), kernels)
            continue
        fake = simple_registry.singleton.find(op._schema.name).fake_impl.kernel
        if fake is not None:
            traced.append(_inside(fake.func))
        yield Overload(str(op), texts, tuple(traced), unreadable=_baked(op, has_fake=fake is not None))


def _each(item: object) -> Iterator[OpOverload]:
    if isinstance(item, OpOverload):
        yield item
    elif isinstance(item, OpOverloadPacket):
        yield from (getattr(item, name) for name in sorted(item.overloads()))
    elif isinstance(item, CustomOpDef):
        yield item._opoverload


def _kernels(definition: CustomOpDef) -> Iterator[Callable[..., Any]]:
    """The functions that a user registered: the first, and those for single devices."""
    yield definition._init_fn
    for _, wrapped in sorted(definition._backend_fns.items(), key=lambda pair: str(pair[0])):
        yield _inside(wrapped)


def _inside(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the user's that torch has wrapped, in a closure with notes of its own."""
    fn = inspect.unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is not None and str(fn.__globals__.get("__name__")).startswith("torch."):
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            if name in ("fn", "func"):
                return _inside(cell.cell_contents)
    return fn


def _python_keys(op: OpOverload) -> list[str]:
    """Dispatch keys with a kernel that was registered from Python, by whichever way."""
    library, name = op._schema.name.split("::")
    names = {f"{library}/{name}"} | ({f"{library}/{name}.{op._overloadname}"} if op._overloadname else set())
    return sorted(key for entry in torch.library._impls for rest, _, key in (entry.rpartition("/"),) if rest in names)


def _baked(op: OpOverload, *, has_fake: bool) -> str:
    """A dispatch key whose Python kernel runs while a graph is traced.  "" where there is none: kernels of a device
    run later, and a fake implementation comes before those that compute a layout by running."""
    by_running = ("Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    for key in _python_keys(op):
        if key in by_running and has_fake:
            continue
        if key in by_running or "Composite" in key or "Autograd" in key or key in ("", "Functionalize", "Python"):
            return key
    return ""


def is_triton_kernel(item: object) -> bool:
    """A function that Triton compiles, or one with configurations to try."""
    return type(item).__module__.partition(".")[0] == "triton" and callable(getattr(item, "fn", None))


def of_triton_kernel(kernel: Any) -> Iterator[object]:
    """What decides what Triton makes of it, and not what it keeps of former launches."""
    yield type(kernel).__name__
    yield kernel.fn  # the Python function, or the kernel inside of an autotuner
    for name in ("src", "configs", "values", "keys", "do_not_specialize", "do_not_specialize_on_alignment", "noinline"):
        yield getattr(kernel, name, None)


def without_indices(kwargs: Mapping[str, Any]) -> dict[str, object]:
    """Keyword arguments of a node, with the kernel of the user's and its constants for their places in a table, which
    has another order in every process."""
    found = dict(kwargs)
    if "kernel_idx" in found:
        found["kernel_idx"] = kernel_side_table.get_kernel(found["kernel_idx"])
    if "constant_args_idx" in found:
        found["constant_args_idx"] = kernel_side_table.get_constant_args(found["constant_args_idx"])
    return found
