"""A plain torch function as Inductor would see it: decomposed, functional, with `reshape` for `view`.

Part of Inductor's private surface, for `matcher`: its trace says `view` and leaves in-place ops where post-grad graphs
say `reshape` and are functional.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import pattern_matcher as inductor_matcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize
from torch.fx import GraphModule

from fusion_passes.graph.match import DeclinedError
from fusion_passes.graph.read import aten, storage_root


def trace(role: str, fn: Callable[..., Any], arguments: Mapping[str, Any], mode: FakeTensorMode) -> GraphModule:
    """The post-grad form of `fn`; a placeholder for each tensor, in the order of `arguments`; numbers are constants.

    role: "search" or "replace", for a sentence.  arguments: tensors, of which only shape, strides, dtype and device are
    looked at, and numbers.

    Raises DeclinedError, with what to write instead, where `fn` does not return one new tensor, writes to a parameter,
    makes a tensor of data, or has to know more about a symbolic size than is known for every value.  What `fn` raises
    comes through.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}

    def of_tensors(*given: Tensor) -> Tensor:
        result = fn(*{**arguments, **dict(zip(tensors, given, strict=True))}.values())
        _require_one_tensor(role, result)
        for name, x in zip(tensors, given, strict=True):
            if isinstance(x, FunctionalTensor) and torch._functionalize_has_data_mutation(x.elem):  # type: ignore[attr-defined]
                raise DeclinedError(
                    f"{role} writes to its parameter {name}, which is not found in a graph and would be lost: "
                    "write to a tensor that it makes"
                )
        return result

    with mode, _no_new_guards(role, mode):
        # New tensors: one that is given twice must not become one parameter.
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors.values()]
        traced = inductor_matcher.fwd_only(dispatch_functionalize(of_tensors, mode=FunctionalTensorMode()), inputs)
    for node in traced.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        if node.op == "get_attr":
            raise DeclinedError(_about_attribute(role, getattr(traced, str(node.target), None)))
    traced.recompile()
    (result,) = traced.graph.output_node().all_input_nodes
    root = storage_root(result)
    if root.op == "placeholder" and (result is root or role == "replace"):
        name = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))[root]
        what = "a view of its parameter" if result is not root else "its parameter"
        todo = "write clone()" if role == "replace" else "it must compute something"
        raise DeclinedError(f"{role} returns {what} {name}: {todo}")
    return traced


def _require_one_tensor(role: str, result: object) -> None:
    if isinstance(result, Tensor):
        return
    todo = "return the one tensor that the rule is about"
    if isinstance(result, (tuple, list)):
        kinds = ", ".join(type(item).__name__ for item in result if not isinstance(item, Tensor))
        found = f"a {type(result).__name__} with {kinds}" if kinds else f"{len(result)} tensors"
        if len(result) > 1:
            todo += "; for several results, write a Rule with side_outputs"
    else:
        found = "nothing" if result is None else f"{result!r}, a {type(result).__name__}"
    raise DeclinedError(f"{role} returns {found}: {todo}")


def _about_attribute(role: str, attribute: object) -> str:
    if isinstance(attribute, torch.nn.Module):
        return (
            f"{role} calls an op that takes a function, as torch.cond does: a TracedRule cannot hold one, write a Rule"
        )
    return (
        f"{role} uses a tensor that is no parameter: make one that it closes over a parameter, "
        "and write torch.full for one of numbers"
    )


@contextmanager
def _no_new_guards(role: str, mode: FakeTensorMode) -> Iterator[None]:
    """Raise DeclinedError where something would add a guard on a symbolic size to the user's graph."""
    env: Any = mode.shape_env
    if env is None:
        yield
        return

    def refuse(*args: Any) -> None:
        raise _GuardError

    # Remove with support for torch 2.12, which has no such context.
    own = getattr(env, "error_on_new_guards", None)
    refusing = mock.patch.object(env, "_check_frozen", refuse) if own is None else own()
    torch_log = logging.getLogger("torch.fx.experimental.symbolic_shapes")  # which tells of it at length
    try:
        with refusing, mock.patch.object(torch_log, "disabled", True):
            yield
    except DeclinedError:
        raise
    except Exception as error:
        if isinstance(error, _GuardError) or type(error).__name__ == "_ShapeEnvGuardError":
            raise DeclinedError(
                f"{role} decides by a symbolic size what does not hold for every value of it"
            ) from error
        raise


class _GuardError(RuntimeError):
    """A guard was asked for."""
