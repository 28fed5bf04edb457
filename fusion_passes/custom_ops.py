"""Whether a layer calls its opaque op or is plain torch, where the passes' settings decide: `PassConfig(custom_ops=…)`.

Layers ask `is_on` when they are traced.  They know nothing of settings and compilers, which are built on them; so who
does (`manager`) says how to find out.
"""

from collections.abc import Callable

NAMES = ("quant_fp8",)
"""What can be asked for: `nn.QuantFP8`."""


def _nobody(name: str) -> bool | None:
    return None


_find_out: Callable[[str], bool | None] = _nobody


def answer_with(find_out: Callable[[str], bool | None]) -> None:
    """From now on ask `find_out`: True, False, or None where nothing is set."""
    global _find_out
    _find_out = find_out


def is_on(name: str) -> bool:
    """Whether the opaque op of this name is asked for by the settings of the compilation that traces the caller, or,
    uncompiled, by those that are set globally (`enable`, `enabled`).  False where nothing is set."""
    return bool(_find_out(name))
