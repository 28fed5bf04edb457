"""The rules of the library's own fusions, in the order in which they are tried."""

import importlib
from typing import Any

from fusion_passes.fusions import NAMES
from fusion_passes.fusions.rule import Rule


def _rule(name: str) -> Rule[Any]:
    """The rule of this name, from the file of this name."""
    module = importlib.import_module(f"fusion_passes.fusions.{name}")
    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Rule)]
    (rule,) = (cls for cls in classes if getattr(cls, "name", None) == name and cls.__module__ == module.__name__)
    return rule()


FUSIONS: tuple[Rule[Any], ...] = tuple(_rule(name) for name in NAMES)
