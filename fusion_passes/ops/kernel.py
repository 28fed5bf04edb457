"""A kernel and what it takes, as data.

Ops ask it in each call, fusions while compiling; `list`, `doctor` and the tables of the docs show it.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

from fusion_passes.ops import support
from fusion_passes.ops.support import Capability
from fusion_passes.quant import dtype_name

FIRST_FP8: Capability = (8, 9)
"""The first GPUs with FP8 conversions."""
NEWEST: Capability = (99, 9)


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """A kernel and the machines that it runs on.

    module: of its launch functions.  capability: first and last supported.
    triton: first supported version, first unsupported one; None: any.  takes: what it takes, by what that is about, in
    words: {"head size": "64, 128"}.
    """

    name: str
    module: str
    capability: tuple[Capability, Capability] = (FIRST_FP8, NEWEST)
    triton: tuple[tuple[int, int], tuple[int, int] | None] | None = None
    takes: Mapping[str, str] = field(default_factory=dict)

    @property
    def limits(self) -> dict[str, str]:
        """All of its limits in words, by what they are about: the GPU first."""
        return {"GPU": f"compute capability {self._capabilities}, {self._tritons}"} | dict(self.takes)

    def why_not_on(self, device: torch.device, capability: Capability | None = None) -> str | None:
        """Why it does not run on a device, as a sentence, or None if it does.

        capability: of the GPU that will run it; asked of the device if None.
        """
        capability = capability or support.device_capability(device)
        if capability is None or not self.capability[0] <= capability <= self.capability[1]:
            found = f"{device.type} without one" if capability is None else _version(capability)
            return f"{self.name} needs an NVIDIA GPU of compute capability {self._capabilities}, found {found}"
        installed, (least, below) = support.triton_version(), self.triton or ((0, 0), None)
        if installed is None or installed < least or (below is not None and installed >= below):
            return f"{self.name} needs {self._tritons}, found {_version(installed) if installed else 'none'}"
        return None

    def run(self, launch: Callable[[ModuleType], object], *variant: Hashable) -> str | None:
        """`launch(module)`: None where it ran, or why the module cannot be imported, or the kernel not be compiled for
        `variant`."""
        module = support.kernel_module(self.module)
        if isinstance(module, str):
            return module
        return support.launched(lambda: (self.name, *variant), lambda: launch(module))

    @property
    def _capabilities(self) -> str:
        first, last = self.capability
        return _version(first) if first == last else f"{_version(first)} or later"

    @property
    def _tritons(self) -> str:
        if self.triton is None:
            return "Triton"
        least, below = self.triton
        until = "or later" if below is None else f"to below {_version(below)}"
        return f"Triton {_version(least)} {until}"


def names(dtypes: tuple[torch.dtype, ...], between: str = "/") -> str:
    """The names of dtypes in one text."""
    return between.join(map(dtype_name, dtypes))


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
