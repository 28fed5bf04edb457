"""The vocabulary of a fusion: what to find, whether it may, whether it should, what to put.

    class MyFusion(Rule[MyMatch]):
        pattern        yields a `Match` for every place where the structure is there; looks, never edits
        legality       `m.require(condition, "reason")` for everything that makes the rewrite right
        profitability  the same for everything that makes it faster than stock `torch.compile`
        replacement    builds the new nodes with `call(op, ...)` and returns the one that takes `m.output`'s place
        explain        for the reader of a report: places that nearly matched, and why they did not

A rule is a frozen dataclass; its fields are its options and part of the cache key.  Any exception in one of these
methods means "no match here", with its text in the report: a rule never aborts a user's compilation.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch.fx import Node

from fusion_passes.graph.match import Call, Match

if TYPE_CHECKING:
    from fusion_passes.idioms.idiom import Idioms, NearMiss


class MatchStatus(enum.StrEnum):
    """What became of a place where a rule's pattern was found."""

    FUSED = "fused"
    ILLEGAL = "illegal"
    UNPROFITABLE = "unprofitable"


class Level(enum.IntEnum):
    """Optimisation levels.  A rule belongs to the lowest level at which it is on by default."""

    O0 = 0
    """Nothing is rewritten."""
    O1 = 1
    """Rewrites whose result is bit for bit that of the unfused graph."""
    O2 = 2
    """All that is profitable, also where a fused kernel rounds less often than the unfused graph does."""


M = TypeVar("M", bound=Match)


@dataclass(frozen=True)
class Rule(ABC, Generic[M]):
    """A fusion: `pattern` → `replacement`, where `legality` and `profitability` allow it."""

    name: ClassVar[str]
    """Name of the switch in `PassConfig`, of the file, of the test and of the benchmark."""
    summary: ClassVar[str]
    """One line for `python -m fusion_passes list`."""
    level: ClassVar[Level] = Level.O2
    ops: ClassVar[tuple[str, ...]] = ()
    """Names of the library's ops that it puts into a graph, for `list`, `doctor` and the docs; () where it leaves the
    work to Inductor."""
    anchor: ClassVar[str] = ""
    """The idiom whose near misses are told even where the rule found other places: "attention"."""

    @abstractmethod
    def pattern(self, idioms: Idioms) -> Iterator[M]:
        """Every place where the structure is there."""

    @abstractmethod
    def replacement(self, m: M, call: Call) -> Node | tuple[Node, ...]:
        """Build the new nodes and return what replaces `m.output`, or a tuple for `m.outputs`: same shape, strides,
        dtype and device each."""

    def legality(self, m: M) -> None:
        """Decline, with `m.require`, where the replacement would not compute the same."""

    def profitability(self, m: M) -> None:
        """Decline, with `m.require`, where stock `torch.compile` is at least as fast, or nobody measured it."""

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Places that nearly matched, for the report."""
        return iter(())

    def describe(self, m: M) -> str:
        """The match in a few words for the report: shapes, dtypes, what is special."""
        return ""

    def _cache_state(self) -> dict[str, object]:
        """What the cache key covers of this rule, with all that it reaches, beside its class: all of its state but what
        is computed from it."""
        computed = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in computed}

    def _cache_products(self) -> list[object]:
        """What the cache key covers beside the state: what the rule makes of examples, where it has some.  Asked for
        once for each state."""
        return []

    def __init_subclass__(cls, *, whole: bool = True, **kwargs: object) -> None:
        """whole: False for a base class of rules."""
        super().__init_subclass__(**kwargs)
        if not whole or any(getattr(cls, method) is getattr(Rule, method) for method in ("pattern", "replacement")):
            return  # not a whole rule yet
        for attribute in ("name", "summary"):
            bases = (base for base in cls.__mro__ if base not in (Rule, object))
            as_field = any(attribute in inspect.get_annotations(base) for base in bases)
            if not as_field and not isinstance(getattr(cls, attribute, None), str):
                raise TypeError(f"{cls.__name__} needs a class attribute {attribute!r}: a string, for the report")


@dataclass(frozen=True)
class Alternatives(Rule[Match], whole=False):
    """Several rules behind one switch.  Each has a kind of match of its own, and decides about those."""

    rules: ClassVar[Mapping[type[Match], Rule[Any]]]

    def pattern(self, idioms: Idioms) -> Iterator[Match]:
        """What each of the rules finds."""
        for rule in self.rules.values():
            yield from rule.pattern(idioms)

    def legality(self, m: Match) -> None:
        """As the match's rule says."""
        self.rules[type(m)].legality(m)

    def profitability(self, m: Match) -> None:
        """As the match's rule says."""
        self.rules[type(m)].profitability(m)

    def replacement(self, m: Match, call: Call) -> Node | tuple[Node, ...]:
        """As the match's rule says."""
        return self.rules[type(m)].replacement(m, call)

    def describe(self, m: Match) -> str:
        """As the match's rule says."""
        return self.rules[type(m)].describe(m)
