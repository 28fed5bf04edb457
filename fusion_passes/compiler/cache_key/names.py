"""What the names in a function stand for: modules are followed to the attribute that is read."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

from fusion_passes.compiler.cache_key import op
from fusion_passes.compiler.cache_key.code import Chain, Import
from fusion_passes.compiler.cache_key.origin import version

NO_STATE = frozenset(
    {
        *("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__weakref__", "__slotnames__", "_abc_impl"),
        *("__builtins__", "__cached__", "__file__", "__loader__", "__package__", "__path__", "__spec__"),
        *("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__parameters__"),
        *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__abstractmethods__"),
        *("__firstlineno__", "__static_attributes__"),
    }
)
"""Names in a module or a class that say where it is from, or what is told by its other names."""


def cell_content(cell: types.CellType) -> object:
    """What a function keeps of a name of the function around it."""
    try:
        return cell.cell_contents
    except ValueError:
        return "an empty cell"


def is_global(fn: types.FunctionType, module: str) -> bool:
    """True of a function that its module has under its own name; False of one that was made inside of another."""
    found: object = sys.modules.get(module)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is fn


def follow(value: object, attributes: Chain) -> tuple[object, Chain]:
    """The first thing on the way that is no module: it is read as a whole.  With the attributes that are left."""
    rest = attributes
    while rest and (isinstance(value, types.ModuleType) or op.is_namespace(value)):
        try:
            value = getattr(value, rest[0])
        except Exception:  # of a lazy module, anything
            break
        rest = rest[1:]
    return value, rest


def imported(what: Import, attributes: Chain, namespace: Mapping[str, Any]) -> tuple[object, Chain]:
    """What an import statement in a function binds, and its attributes.  The module of a user's is imported."""
    package = namespace.get("__package__") or ""
    name = importlib.util.resolve_name("." * what.level + what.module, package) if what.level else what.module
    path = (*((what.name,) if what.name else ()), *attributes)
    if name not in sys.modules and (installed := version(name)) is not None:
        return installed, ()
    try:
        module = importlib.import_module(name)
        if what.name and not hasattr(module, what.name):
            importlib.import_module(f"{name}.{what.name}")
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}", ()
    return follow(sys.modules[name.partition(".")[0]] if what.top else module, path)
