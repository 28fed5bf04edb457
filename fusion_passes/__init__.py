"""torch.compile (Inductor) passes that fuse across the borders where Inductor stops: attention and FP8 quantization.

    import fusion_passes
    model = fusion_passes.compile(model)

`compile`, `inductor_options`, `enabled` and `enable` register the passes; `PassConfig` says what is fused; a `Report`
says what was, and what was not and why; `explain` shows it for a model, beside the stock compiler.

Importing this registers the ops `torch.ops.fusion_passes.*` and needs neither Triton nor a GPU.  What needs Inductor
(a second of imports) is loaded at the first use.
"""

import importlib
import time
from typing import TYPE_CHECKING, Any

from fusion_passes import ops as ops
from fusion_passes.compiler.config import PassConfig, Profitability, Switch
from fusion_passes.compiler.report import GraphReport, Miss, Move, Report, RequiredFusionError, Site
from fusion_passes.fusions.rule import Level, MatchStatus, Rule
from fusion_passes.graph.match import DeclinedError, Match

if TYPE_CHECKING:
    from fusion_passes.compiler.manager import PostGradPassManager
    from fusion_passes.compiler.registration import compile, disable, enable, enabled, inductor_options  # noqa: A004
    from fusion_passes.fusions.traced.matcher import TracedRule
    from fusion_passes.tools.explain import Explanation, explain

_LAZY = {
    "Explanation": "tools.explain",
    "PostGradPassManager": "compiler.manager",
    "TracedRule": "fusions.traced.matcher",
    "compile": "compiler.registration",
    "disable": "compiler.registration",
    "enable": "compiler.registration",
    "enabled": "compiler.registration",
    "explain": "tools.explain",
    "inductor_options": "compiler.registration",
}

__all__ = [
    "DeclinedError",
    "Explanation",
    "GraphReport",
    "Level",
    "Match",
    "MatchStatus",
    "Miss",
    "Move",
    "PassConfig",
    "PostGradPassManager",
    "Profitability",
    "Report",
    "RequiredFusionError",
    "Rule",
    "Site",
    "Switch",
    "TracedRule",
    "compile",
    "disable",
    "enable",
    "enabled",
    "explain",
    "inductor_options",
]

__version__ = "0.1.0"

IMPORTED_AT = time.time()
"""What is newer than this on disk is not what runs in this process (`cache_key`)."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"fusion_passes.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'fusion_passes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
