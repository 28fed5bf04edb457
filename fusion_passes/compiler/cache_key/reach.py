"""A digest of a value and of all that it reaches: functions by their bytecode, with the globals, closures, defaults and
imports that they read; classes by their attributes; objects by their state; tensors by their bytes; ops by the Python
functions that are registered for them.

What belongs to an installed package counts by the package's version (`origin`).  The digest is the same in every
process: it has no addresses, no file names, and no order that depends on hashes.  What cannot be read raises
`UnkeyableError`; nothing is left out in silence.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusion_passes.compiler.cache_key import op
from fusion_passes.compiler.cache_key.code import Chain, reads
from fusion_passes.compiler.cache_key.names import NO_STATE, cell_content, follow, imported, is_global
from fusion_passes.compiler.cache_key.origin import version
from fusion_passes.compiler.cache_key.state import content, file_state, hides_state, reduced
from fusion_passes.fusions.rule import Rule

MOST_BYTES = 16 << 20
"""Of all tensors and arrays together: digesting them takes some 10 ms, each time that Inductor asks for the key."""
MOST_OBJECTS = 50_000
"""Reading as many takes some 0.3 s."""


class UnkeyableError(Exception):
    """A value cannot be told from another one by reading it.  `remedy` says what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def digest(root: object, own: Iterable[str] = ()) -> str:
    """Hexadecimal digest of `root` and of all that it reaches.

    own: top-level packages that are read although they are installed: their globals may be changed at run time.
    Raises UnkeyableError, with the way to what cannot be read.
    """
    return _Reader(frozenset(own)).run(root)


_PRIMITIVE = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_VALUES = (int, float, complex, str, bytes, bytearray)
_BY_NAME = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_INERT = (logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()), torch.library.Library)
"""Objects that change nothing of what is computed."""
_NOTES_OF_DYNAMO = ("_torchdynamo", "__dynamo")
_PLAIN = "Replace it by what the rule needs of it: numbers, text, a dataclass of such."
_COMPUTED_CODE = "Write out what it runs, as functions."


@dataclass(frozen=True)
class _Met:
    """An object, kept alive so that its id stays its own; the one that it was reached from, and how.

    runs_later: reached only by the kernel of an op.  Compiled code calls that by the op's name, so its source counts
    and the state of its objects, such as a workspace or a counter of calls, does not.
    """

    item: object
    reached_from: int
    name: str
    runs_later: bool


class _Reader:
    """Reads values one after the other, in the order in which they are met; never recursively, except for sets."""

    def __init__(self, own: frozenset[str]) -> None:
        self.own = own
        self.digest = hashlib.sha256()
        self.met: list[_Met] = []
        self.index: dict[tuple[int, bool], int] = {}
        self.bytes = self.count = 0
        self.within: frozenset[int] = frozenset()
        self.current = -1
        self.runs_later = False

    def run(self, root: object) -> str:
        try:
            self.visit(root, "")
            while self.current + 1 < len(self.met):
                self.current += 1
                self.count += 1
                if self.count > MOST_OBJECTS:
                    self.current = 0
                    raise UnkeyableError(f"it reaches more than {MOST_OBJECTS} objects", _PLAIN)
                met = self.met[self.current]
                self.runs_later = met.runs_later
                self.read(met.item)
        except UnkeyableError as error:
            raise UnkeyableError(f"{self.way()}{error}", error.remedy) from error
        return self.digest.hexdigest()

    def way(self) -> str:
        """How the current object is reached: "replace.helper.TABLE: "."""
        names: list[str] = []
        at = self.current
        while at >= 0:
            names.append(self.met[at].name)
            at = self.met[at].reached_from
        told = ".".join(name for name in reversed(names) if name)
        return f"{told}: " if told else ""

    def put(self, *parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            self.digest.update(b"%d:" % len(data) + data)

    def visit(self, item: object, name: str) -> None:
        """Put a primitive, or a reference to an object that is read later."""
        if type(item) in _PRIMITIVE:
            self.put(type(item).__name__, hex(item) if type(item) is int else repr(item))
            return
        if type(item) is tuple:  # at once: equal ones may be one object or several
            self.put("tuple")
            self.visit_all(item, name)
            return
        at = self.index.setdefault((id(item), self.runs_later), len(self.met))
        if at == len(self.met):
            self.met.append(_Met(item, self.current, name, self.runs_later))
        self.put("at", at)

    def visit_all(self, items: Iterable[object], name: str = "") -> None:
        items = list(items)
        self.put(len(items))
        for item in items:
            self.visit(item, name)

    def visit_named(self, items: Mapping[str, object]) -> None:
        self.put(len(items))
        for name in sorted(items):
            self.put(name)
            self.visit(items[name], name)

    def visit_dict(self, items: Mapping[Any, object]) -> None:
        """In its own order, which may decide what is made of it."""
        self.put(len(items))
        for key, item in items.items():
            self.visit(key, "a key")
            self.visit(item, f"[{key!r}]" if type(key) in _PRIMITIVE else "")

    def read(self, item: Any) -> None:
        """One object.  Exact types first, then what is known by a base class, then any object by its state."""
        self.put(type(item).__name__)
        if isinstance(item, types.FunctionType):
            self.function(item)
        elif isinstance(item, type):
            self.cls(item)
        elif isinstance(item, types.ModuleType):
            self.module(item)
        elif isinstance(item, types.CodeType):
            self.put(reads(item).digest)
        elif isinstance(item, types.MethodType):
            self.visit(item.__func__, "")
            self.visit(item.__self__, "__self__")
        elif isinstance(item, types.CellType):
            self.visit(cell_content(item), "")
        elif isinstance(item, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self.builtin(item)
        elif isinstance(item, _BY_NAME):
            self.put(item.__objclass__.__module__, item.__qualname__)
        elif isinstance(item, property):
            self.visit_all((item.fget, item.fset, item.fdel))
        elif isinstance(item, (staticmethod, classmethod)):
            self.visit(item.__func__, "")
        elif isinstance(item, functools.cached_property):
            self.visit(item.func, "")
        elif isinstance(item, functools._lru_cache_wrapper):
            self.visit(item.__wrapped__, "")
        elif isinstance(item, _INERT):
            pass
        elif isinstance(item, (torch.finfo, torch.iinfo)):
            self.put(item)
        elif isinstance(item, weakref.ref):
            self.visit(item(), "")
        elif isinstance(item, ContextVar):
            self.put(item.name)
            self.visit(item.get(None), "its value")
        elif isinstance(item, Tensor):
            self.tensor(item)
        elif op.is_op(item):
            self.op(item)
        elif isinstance(item, GraphModule):
            self.graph(item)
        elif op.is_triton_kernel(item):
            self.visit_all(op.of_triton_kernel(item))
        elif isinstance(item, Rule):
            self.visit(type(item), "")
            self.visit_named(item._cache_state())
        else:
            self.any_object(item)

    # Code

    def version(self, module: str | None) -> str | None:
        if module is None or module.partition(".")[0] in self.own:
            return None
        return version(module)

    def function(self, fn: types.FunctionType) -> None:
        module = fn.__globals__.get("__name__")
        installed = self.version(module)
        if installed is not None:
            self.put(installed, str(module), fn.__code__.co_qualname)
            if fn.__closure__ and not is_global(fn, str(module)):  # a decorator around a function of the user's
                self.visit_all(fn.__closure__)
            return
        found = reads(fn.__code__)
        self.put(found.digest)
        self.visit(fn.__defaults__, "a default")
        self.visit(fn.__kwdefaults__, "a default")
        self.visit_named({k: v for k, v in vars(fn).items() if not k.startswith(_NOTES_OF_DYNAMO)})
        texts = list(found.strings)
        used = []
        self.put(len(fn.__closure__ or ()))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            value = cell_content(cell)
            if isinstance(value, types.ModuleType):
                used += [(chain, *follow(value, chain[1:])) for chain in found.closure if chain[0] == name]
            else:
                self.visit(value, name)
        for chain in found.globals:
            if chain[0] in fn.__globals__:
                value = fn.__globals__[chain[0]]
                if type(value) is str and chain[0] not in NO_STATE:
                    texts.append(value)
                self.put(".".join(chain))
                if chain[0] not in NO_STATE:
                    used.append((chain, *follow(value, chain[1:])))
            else:
                self.put(".".join(chain), "built in" if hasattr(builtins, chain[0]) else "undefined")
                if chain[0] in ("eval", "exec", "globals", "__import__") and not self.runs_later:
                    raise UnkeyableError(f"{fn.__qualname__} calls {chain[0]}", _COMPUTED_CODE)
        for what, chain in found.imported:
            self.put(what.module, what.name, what.level, ".".join(chain))
            used.append(((what.module, what.name, *chain), *imported(what, chain, fn.__globals__)))
        for chain, value, rest in used:
            self.use(chain, value, rest, texts)

    def use(self, chain: Chain, value: object, rest: Chain, texts: list[str]) -> None:
        """What a function reads: `chain`, which is `value` up to the attributes `rest`.  texts: what it may ask by."""
        if value is os.environ or value is os.getenv:
            for name in sorted(set(texts)):
                self.put(name, os.environ.get(name, "unset"))
        elif value is importlib.import_module:
            modules = sorted({name for name in texts if name in sys.modules and not name.startswith("_")})
            if not modules and not self.runs_later:
                raise UnkeyableError("it imports a module whose name is computed", _COMPUTED_CODE)
            for name in modules:
                self.visit(sys.modules[name], name)
        elif isinstance(value, types.ModuleType) and rest:
            self.put("undefined", *rest)
        else:
            self.visit(value, ".".join(name for name in chain[: len(chain) - len(rest)] if name))

    def cls(self, cls: type) -> None:
        installed = self.version(cls.__module__)
        self.put(cls.__qualname__)
        if installed is not None:
            self.put(cls.__module__, installed)
            return
        self.visit(type(cls), "its metaclass")
        self.visit_all(cls.__bases__, "a base")
        self.visit_named({name: value for name, value in vars(cls).items() if name not in NO_STATE})

    def module(self, module: types.ModuleType) -> None:
        """One that is handed on as a value, so that anything in it may be used."""
        installed = self.version(module.__name__)
        if installed is not None:
            self.put(module.__name__, installed)
            return
        file = getattr(module, "__file__", None)
        if file is not None and not file.endswith((".py", ".pyc")):
            self.put(*file_state(file))
        else:
            self.visit_named({name: value for name, value in vars(module).items() if name not in NO_STATE})

    def builtin(self, item: types.BuiltinFunctionType | types.MethodWrapperType) -> None:
        self.put(item.__qualname__)
        owner = item.__self__
        if isinstance(owner, types.ModuleType) or owner is None or type(owner).__name__ == "PyCapsule":  # pybind11's
            module = item.__module__ or ""
            self.put(module, self.version(module) or "")
            file = getattr(sys.modules.get(module), "__file__", None)
            if self.version(module) is None and file is not None:
                self.put(*file_state(file))
        else:
            self.visit(owner, "__self__")

    def op(self, item: object) -> None:
        for overload in op.overloads(item):
            self.put(overload.name, *overload.texts)
            if overload.unreadable and not self.runs_later:
                raise UnkeyableError(
                    f"the op {overload.name} has a Python kernel for {overload.unreadable}, registered with "
                    "torch.library.impl, which cannot be read, and which decides what compiled code looks like",
                    "Register it with torch.library.custom_op, or its shapes with torch.library.register_fake.",
                )
            self.visit_all(overload.traced, overload.name)
            before, self.runs_later = self.runs_later, True
            self.visit_all(overload.kernels, overload.name)
            self.runs_later = before
        if op.is_cpp(item):
            for library in sorted(torch.ops.loaded_libraries):
                self.put(*file_state(library))

    def graph(self, traced: GraphModule) -> None:
        """A traced function: its nodes, numbered, with the constants and the kernels that they call."""
        number: dict[Node, tuple[str, int]] = {}
        for node in traced.graph.nodes:
            number[node] = ("node", len(number))
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
            self.put(node.op)
            if node.op == "get_attr":
                self.visit(functools.reduce(getattr, str(node.target).split("."), traced), str(node.target))
            else:
                self.visit(node.target, "")
            self.visit_all(args)
            self.visit_named(op.without_indices(kwargs))

    # Values

    def take(self, count: int, what: str) -> None:
        self.bytes += count
        if self.bytes > MOST_BYTES:
            raise UnkeyableError(
                f"{what} has {count >> 10} KiB, and no more than {MOST_BYTES >> 10} KiB of tensors are read",
                "Pass it as a parameter of the rule's functions, or keep only what the rule needs of it.",
            )

    def tensor(self, t: Tensor) -> None:
        """By its bytes; on the meta device, or fake, by its layout, since it has none."""
        kind = type(t)
        if self.runs_later:
            self.put(kind.__name__)
            return
        what = f"a tensor of {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        self.put(kind.__name__, t.dtype, t.layout, list(t.shape), t.device, t.requires_grad)
        if t.layout is not torch.strided or t.is_quantized:
            raise UnkeyableError(f"{what} is not dense", "Keep its dense parts, as tensors.")
        if hasattr(t, "__tensor_flatten__"):
            names, context = t.__tensor_flatten__()
            self.visit(context, "")
            self.visit_named({name: getattr(t, name) for name in names})
            return
        self.put(t.stride(), t.storage_offset())
        if t.device.type == "meta" or isinstance(t, torch._subclasses.FakeTensor):
            return
        self.take(t.numel() * t.element_size(), what)
        self.put(content(t))

    def any_object(self, item: Any) -> None:
        """Any object: its class, and its state as pickle would take it; of a user's own class all of it."""
        kind = type(item)
        self.visit(kind, "")
        if self.runs_later:
            return
        if isinstance(item, (dict, types.MappingProxyType)):
            self.visit_dict(dict(item))
        elif isinstance(item, (list, tuple)):
            self.visit_all(item)
        elif isinstance(item, (set, frozenset)):
            self.elements(item)
        elif isinstance(item, _VALUES):
            base = next(base for base in _VALUES if isinstance(item, base))
            self.put(base.__repr__(item))
        elif hides_state(kind) or self.version(kind.__module__) is not None:
            self.take(getattr(item, "nbytes", 0), f"an array {kind.__qualname__}")
            self.by_pickle(item)
            return
        if type(item) not in (dict, list, tuple, set, frozenset, bytearray):
            self.state(object.__getstate__(item), kind)

    def elements(self, items: Iterable[object]) -> None:
        """Of a set: each read by itself, since they have no order of their own."""
        if id(items) in self.within:
            self.put("a set around this one")
            return
        digests = []
        for item in items:
            inner = _Reader(self.own)
            inner.within, inner.bytes, inner.count = self.within | {id(items)}, self.bytes, self.count
            digests.append(inner.run(item))
            self.bytes, self.count = inner.bytes, inner.count
        self.put(*sorted(digests))

    def state(self, state: Any, kind: type) -> None:
        """What pickle calls the state: the attributes, or a pair of them and of what is in slots."""
        for part in state if isinstance(state, tuple) else (state,):
            cached = {n for n in part or () if isinstance(getattr(kind, n, None), functools.cached_property)}
            self.visit_named({name: value for name, value in (part or {}).items() if name not in cached})

    def by_pickle(self, item: Any) -> None:
        try:
            parts = reduced(item)
        except Exception as error:
            raise UnkeyableError(
                f"a {type(item).__qualname__} has no state that can be read ({error})", _PLAIN
            ) from error
        if isinstance(parts, str):  # the name of a global
            self.put(parts)
            return
        function, arguments, *rest = parts
        self.visit(function, "")
        self.visit_all(arguments)
        self.visit_all([list(part) if isinstance(part, Iterator) else part for part in rest])
