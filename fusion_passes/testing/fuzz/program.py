"""A program of the fuzzer: lines of plain torch, with the inputs that it runs on.

It is text, so that one value can be run in eager torch, traced, compiled, and printed as a test.
"""

from __future__ import annotations

import functools
import linecache
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_passes import ops, quant
from fusion_passes.testing.fuzz import layers

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_library = torch.library.Library("fusion_passes_fuzz", "FRAGMENT")
_library.define("bump_(Tensor(a!) x) -> ()")
_library.define("exchange_(Tensor(a!) x, Tensor(b!) y) -> ()")
_library.define("blend(Tensor x, Tensor y) -> Tensor")


def _bump(x: Tensor) -> None:
    x.add_(1)


def _exchange(x: Tensor, y: Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def _blend(x: Tensor, y: Tensor) -> Tensor:
    return x * 0.5 + y


_library.impl("bump_", _bump, "CompositeExplicitAutograd")
_library.impl("exchange_", _exchange, "CompositeExplicitAutograd")
_library.impl("blend", _blend, "CompositeExplicitAutograd")
torch.library.register_fake("fusion_passes_fuzz::bump_", lambda x: None, lib=_library)
torch.library.register_fake("fusion_passes_fuzz::exchange_", lambda x, y: None, lib=_library)
torch.library.register_fake("fusion_passes_fuzz::blend", lambda x, y: torch.empty_like(x), lib=_library)
# The ops are known to nobody: two write to what they are given, one is functional and opaque.

NAMES: dict[str, Any] = {
    "E4M3": E4M3,
    "E5M2": E5M2,
    "F": F,
    "custom": torch.ops.fusion_passes_fuzz,
    "inf": math.inf,
    "layers": layers,
    "math": math,
    "ops": ops,
    "quant": quant,
    "torch": torch,
}
"""What the lines of a program may name, beside its own variables."""


@dataclass(frozen=True)
class Program:
    """Lines of plain torch.

    inputs: (name, expression) each; an expression may name those before it, and `n`.  steps: statements.  results: the
    expressions that it returns.
    backend: "cpu", or what makes the attention op of a CUDA graph: a key of `testing.EXPANSIONS`.
    n: the size that `n` stands for.  dynamic: (name of an input, dimension) of sizes that are symbolic; without any
    all are static.
    writes: it writes to an input, or to a tensor of its own.  in_place_writes: how that switch is set.
    features: what the grammar chose, such as "mask: causal", for the count of what was covered.
    """

    inputs: tuple[tuple[str, str], ...]
    steps: tuple[str, ...]
    results: tuple[str, ...]
    backend: str = "cpu"
    n: int = 8
    dynamic: tuple[tuple[str, int], ...] = ()
    writes: bool = False
    in_place_writes: bool = True
    features: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs."""
        return tuple(name for name, _ in self.inputs)

    @property
    def source(self) -> str:
        """The program as a function."""
        body = "\n".join((*self.steps, f"return ({', '.join(self.results)},)"))
        return f"def program({', '.join(self.names)}):\n{textwrap.indent(body, '    ')}\n"

    @property
    def input_source(self) -> str:
        """What makes its inputs, as a function of `n` and a seed of random numbers."""
        lines = ("torch.manual_seed(seed)", *(f"{name} = {text}" for name, text in self.inputs))
        body = "\n".join((*lines, f"return ({', '.join(self.names)},)" if self.names else "return ()"))
        return f"def inputs(n={self.n}, seed=0):\n{textwrap.indent(body, '    ')}\n"

    @property
    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The program, to be called with its inputs."""
        function: Callable[..., tuple[Any, ...]] = _executed(self.source, "program")
        return function

    def make_inputs(self, n: int | None = None, seed: int = 0) -> tuple[Any, ...]:
        """Fresh inputs, always the same for one `n` and seed.  The random numbers of the process are left as they
        are."""
        with torch.random.fork_rng(devices=[]):
            made: tuple[Any, ...] = _executed(self.input_source, "inputs")(self.n if n is None else n, seed)
        return made

    def test(self, name: str = "test_found_by_the_fuzzer") -> str:
        """A test that fails while the fault is there."""
        options = [f"backend={self.backend!r}"] * (self.backend != "cpu")
        options += [f"n={self.n}"] * (self.n != Program.n)
        options += [f"dynamic={self.dynamic!r}"] * bool(self.dynamic)
        options += ["in_place_writes=False"] * (not self.in_place_writes)
        check = "check_code" if self.writes else "check_graph"
        arguments = ", ".join(["program", "inputs", *options])
        imports = "\n".join(_IMPORTS[used] for used in _IMPORTS if used in self.source + self.input_source)
        head = f"import torch\n{imports}\n\nfrom fusion_passes.testing import fuzz\n"
        return f"{head}\n\n{self.source}\n\n{self.input_source}\n\ndef {name}():\n    fuzz.{check}({arguments})\n"

    def __str__(self) -> str:
        return f"{self.source}\n{self.input_source}"


_IMPORTS = {
    "F.": "import torch.nn.functional as F",
    "math.": "import math",
    "inf": "from math import inf",
    "ops.": "from fusion_passes import ops",
    "quant.": "from fusion_passes import quant",
    "layers.": "from fusion_passes.testing.fuzz import layers",
    "custom.": "from fusion_passes.testing.fuzz.program import custom",
    "E4M3": "from fusion_passes.testing.fuzz.program import E4M3",
    "E5M2": "from fusion_passes.testing.fuzz.program import E5M2",
}
custom = torch.ops.fusion_passes_fuzz


@functools.lru_cache(256)
def _executed(source: str, name: str) -> Any:
    """What `source` defines.  Its lines can be read later, for a stack trace."""
    file = f"<fuzz {hash(source) & 0xFFFFFFFFFFFF:x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = dict(NAMES)
    exec(compile(source, file, "exec"), scope)
    return scope[name]
