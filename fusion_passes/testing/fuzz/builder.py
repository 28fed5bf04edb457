"""Draws a program, line by line.  Each line is run as it is added, so that what comes next can look at its values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor

from fusion_passes.testing.fuzz.program import NAMES, Program

T = TypeVar("T")


class Builder:
    """One program while it is drawn.

    Choices shrink towards the first option, chances towards "no", and numbers of things towards none: what is left of
    a finding is what it needs.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], *, n: int, writes: bool, dynamic: bool) -> None:
        self.draw = draw
        self.n = n
        self.writing = writes
        self.is_dynamic = dynamic
        self.backend = "cpu"
        self.inputs: list[tuple[str, str]] = []
        self.steps: list[str] = []
        self.results: list[str] = []
        self.features: list[str] = []
        self.env: dict[str, Any] = {**NAMES, "n": n}
        self.before_step: Callable[[], None] = lambda: None
        self._quiet = False

    # Choices

    def choose(self, *options: T) -> T:
        """One of the options."""
        return options[self.draw(st.integers(0, len(options) - 1))] if len(options) > 1 else options[0]

    def feature(self, kind: str, **options: T) -> tuple[str, T]:
        """One of the options, which is counted: (its name, its value)."""
        name = self.choose(*options)
        self.note(kind, name)
        return name, options[name]

    def pick(self, kind: str, options: Mapping[str, T], rare: Collection[str] = ()) -> tuple[str, T]:
        """One of the options, which is counted: (its name, its value).  One of the rare ones comes once in ten times,
        and in a program that writes once in forty: there are fewer of those."""
        seldom = [name for name in options if name in rare]
        often = [name for name in options if name not in rare]
        name = self.choose(*(seldom if seldom and self.one_in(40 if self.writing else 10) else often))
        self.note(kind, name)
        return name, options[name]

    def note(self, kind: str, name: str) -> None:
        """Count a feature."""
        self.features.append(f"{kind}: {name.replace('_', ' ')}")

    def one_in(self, count: int) -> bool:
        """True once in `count` times."""
        return bool(self.draw(st.integers(0, count - 1)) == count - 1)

    # Lines

    def input(self, text: str, prefix: str = "x") -> str:
        """A new input; its name."""
        name = f"{prefix}{len(self.inputs)}"
        self.env[name] = self._run(text)
        self.inputs.append((name, text))
        return name

    def let(self, text: str, prefix: str = "v") -> str:
        """A new variable; its name."""
        self._hook()
        name = f"{prefix}{len(self.steps)}"
        self.env[name] = self._run(text)
        self.steps.append(f"{name} = {text}")
        return name

    def do(self, statement: str) -> None:
        """A statement for its effect."""
        try:
            exec(statement, self.env)
        except (RuntimeError, ValueError, TypeError, IndexError):
            reject()
        self.steps.append(statement)

    def returns(self, text: str) -> None:
        """Return one more value."""
        self._run(text)
        if text not in self.results:
            self.results.append(text)

    def _hook(self) -> None:
        """What may happen before a line; not in the midst of itself."""
        if not self._quiet:
            self._quiet = True
            try:
                self.before_step()
            finally:
                self._quiet = False

    def _run(self, text: str) -> Any:
        try:
            return eval(text, self.env)
        except (RuntimeError, ValueError, TypeError, IndexError):
            reject()  # not a program: the grammar looks at shapes, but not at all of them

    # What is there

    def tensor(self, name: str) -> Tensor:
        """The value of a variable."""
        found = self.env[name]
        assert isinstance(found, Tensor)
        return found

    def size(self, name: str, dim: int) -> str:
        """A size of a variable as text that stays right where the size is dynamic."""
        return f"{name}.shape[{dim}]" if self.is_dynamic else str(self.tensor(name).shape[dim])

    def variables(self, keep: Callable[[Tensor], bool] = lambda x: True) -> list[str]:
        """Variables and inputs that are tensors, of which `keep` holds."""
        names = [name for name, _ in self.inputs]
        names += [step.split(" = ")[0] for step in self.steps if " = " in step and step.split(" = ")[0].isidentifier()]
        return [name for name in names if isinstance(self.env.get(name), Tensor) and keep(self.env[name])]

    def finish(self) -> Program:
        """The program."""
        dynamic = []
        if self.is_dynamic:
            other = {**self.env, "n": self.n + 1}
            with torch.random.fork_rng(devices=[]):
                for name, text in self.inputs:
                    other[name] = eval(text, other)
            for name, _ in self.inputs:
                small, large = self.env[name], other[name]
                if isinstance(small, Tensor):
                    dynamic += [(name, dim) for dim in range(small.ndim) if small.shape[dim] != large.shape[dim]]
        return Program(
            inputs=tuple(self.inputs),
            steps=tuple(self.steps),
            results=tuple(self.results),
            backend=self.backend,
            n=self.n,
            dynamic=tuple(dynamic),
            writes=self.writing,
            features=tuple(sorted(set(self.features))),
        )
