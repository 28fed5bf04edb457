"""Whether a layer calls its opaque op or is plain torch, where the passes' settings decide: `PassConfig(custom_ops=…)`.

Layers ask `is_on` when they are traced.  They know nothing of settings and compilers, which are built on them; so who
does (`manager`) says how to find out.
"""

from collections.abc import Callable

NAMES = ("quant_fp8",)
"""What can be asked for: `nn.QuantFP8`."""


def _nobody(name: str, lacks: str) -> bool:
    return False


_find_out: Callable[[str, str], bool] = _nobody


def set_resolver(find_out: Callable[[str, str], bool]) -> None:
    """From now on ask `find_out`, with the arguments of `is_on`."""
    global _find_out
    _find_out = find_out


def is_on(name: str, lacks: str = "") -> bool:
    """Whether to call the opaque op of this name: by the settings of the compilation that traces the caller, or,
    uncompiled, by those that are set globally (`enable`, `enabled`).  False where nothing is set.

    lacks: why the caller has no such op: then it is never on, and a warning where it is asked for."""
    return _find_out(name, lacks)
