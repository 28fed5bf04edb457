"""How the state of an object is read."""

from __future__ import annotations

import copyreg
import ctypes
import os
import types
from typing import Any

import torch
from torch import Tensor


def hides_state(kind: type) -> bool:
    """True of a class that keeps something where Python does not see it, neither in attributes nor in slots."""
    slots = sum(isinstance(v, types.MemberDescriptorType) for base in kind.__mro__ for v in vars(base).values())
    seen = object.__basicsize__ + 8 * ((kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0) + slots)
    return bool(kind.__itemsize__) or kind.__basicsize__ > seen


def file_state(file: str) -> tuple[str, int, int]:
    """A library of machine code, by its name, size and time of change: reading it would take too long."""
    status = os.stat(file)
    return os.path.basename(file), status.st_size, status.st_mtime_ns


def reduced(item: Any) -> Any:
    """What pickle would take: the name of a global, or a function, its arguments and the state.  Raises what `item`
    raises."""
    reduce = copyreg.dispatch_table.get(type(item))
    return reduce(item) if reduce is not None else item.__reduce_ex__(4)


def content(t: Tensor) -> bytes:
    """The elements of a dense tensor, in order.  Without NumPy, which torch does not need."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        dense = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
        count = dense.numel() * dense.element_size()
        return (ctypes.c_char * count).from_address(dense.data_ptr()).raw if count else b""
