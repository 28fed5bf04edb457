"""Inductor's C++ kernels, many in one run of the compiler: it takes half a second to start, and little for each kernel.

The source is Inductor's, and so are the settings of the compiler.  Only the binding is another one: the functions get
other names, and are called with the addresses of their tensors.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
_INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
_NUMBERS = {"int64_t": ctypes.c_int64, "long": ctypes.c_int64, "double": ctypes.c_double, "float": ctypes.c_float}


class Kernels:
    """Sources that are compiled when the first of them is called.  A source is compiled once in a process."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., None]] = {}
        self.waiting: list[str] = []

    def binding(self, _: Any, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        """In place of Inductor's `cpp_pybinding`."""
        if source not in self.functions and source not in self.waiting:
            self.waiting.append(source)
        kinds = [None if "*" in argtype else _NUMBERS[argtype.split()[-1]] for argtype in argtypes]

        def kernel(*args: Any) -> None:
            if self.waiting:
                self.compile()
            self.functions[source](*map(_passed, args, kinds))

        return kernel

    def compile(self) -> None:
        """Compile what waits."""
        from torch._inductor.codecache import CppCodeCache

        includes: dict[str, None] = {}
        bodies = []
        for number, source in enumerate(self.waiting):
            body, entries = _ENTRY.subn(f'extern "C" void kernel_{number}(', source)
            if entries != 1:
                raise RuntimeError(f"a kernel of another form than this torch version is known for:\n{source}")
            includes.update(dict.fromkeys(_INCLUDE.findall(body)))
            bodies.append(_INCLUDE.sub("", body))
        library = CppCodeCache.load("\n".join((*includes, *bodies)))
        for number, source in enumerate(self.waiting):
            function = getattr(library, f"kernel_{number}")
            function.restype = None
            self.functions[source] = function
        self.waiting = []


_kernels = Kernels()


@contextmanager
def compiled_together() -> Iterator[None]:
    """Within it, kernels that are generated wait for each other."""
    from torch._inductor.async_compile import AsyncCompile

    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *args: _kernels.binding(*args)):
        yield


def _passed(arg: Any, kind: Any) -> Any:
    if kind is None:
        assert isinstance(arg, Tensor)
        return ctypes.c_void_p(arg.data_ptr())
    return kind(arg)
