"""What is fused, and how much is said about it: `PassConfig`, from Python, a dict, or the environment."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_passes import custom_ops, fusions
from fusion_passes.fusions.rule import Level, Rule
from fusion_passes.ops.kv_cache import CHECK_VARIABLE, checks_wanted

if TYPE_CHECKING:
    from typing import Self

ENV_PREFIX = "FUSION_PASSES_"
DEBUG_VARIABLE = ENV_PREFIX + "DEBUG"
OTHER_VARIABLES = frozenset({CHECK_VARIABLE})
"""Of the prefix, but no settings of the passes: the KV cache's checks (docs/attention.md)."""


class Switch(enum.StrEnum):
    """State of one fusion."""

    ON = "on"
    OFF = "off"
    REQUIRED = "required"
    """On, and `RequiredFusionError` if it applied nowhere."""


class Profitability(enum.StrEnum):
    """Whether a fusion must be faster to be applied."""

    MEASURED = "measured"
    """Only where a committed measurement says that it beats stock `torch.compile`."""
    IGNORE = "ignore"
    """Wherever it is legal: to look at the graph, to test, to measure."""


def _debug_dir_from_env() -> Path | None:
    path = os.environ.get(DEBUG_VARIABLE)
    return Path(path) if path else None


def _with_switches(cls: type[PassConfig]) -> type[PassConfig]:
    """A field for each fusion."""
    for name in fusions.NAMES:
        cls.__annotations__[name] = "Switch | None"
        setattr(cls, name, None)
    return cls


@dataclass(frozen=True)
@_with_switches
class PassConfig:
    """Settings of the passes.  Immutable; every field but `debug_dir` is part of Inductor's cache key.

    Beside the fields below there is a switch for each fusion, by its name (`python -m fusion_passes list`): "on", "off"
    or "required".  One left at None follows `level`; one that is set wins over it.  Unknown names and values raise
    ValueError and list the known ones.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            level: Level | str | int = Level.O2,
            in_place_writes: bool | str = True,
            profitability: Profitability | str = Profitability.MEASURED,
            custom_ops: Mapping[str, bool | str] | Iterable[tuple[str, bool | str]] | str = (),
            extra_fusions: Iterable[Rule[Any]] = (),
            debug_dir: str | os.PathLike[str] | None = None,
            **switches: Switch | str | bool | None,
        ) -> None: ...

    level: Level = Level.O2
    """`Level.O0` (nothing), `O1` (bit-exact rewrites only), `O2` (all that is profitable); also as a string or
    number."""

    in_place_writes: bool = True
    """Reads of a KV cache, or of anything that an op writes to, come before the writes that follow them in the program,
    where torch has moved them: else Inductor copies the cache.  Not at level O0."""

    profitability: Profitability = Profitability.MEASURED
    """`measured`: fuse only where it was measured to be faster; `ignore`: wherever it is legal."""

    custom_ops: tuple[tuple[str, bool], ...] = ()
    """Layers that have two forms: whether to call an opaque op, or be plain torch, which Inductor can fuse.  A mapping
    such as `{"quant_fp8": True}` (`nn.QuantFP8`); in the environment `quant_fp8=on`, separated by commas.  What is not
    named is plain torch."""

    extra_fusions: tuple[Rule[Any], ...] = ()
    """Rules of your own, tried before the built-in ones, at every level (docs/writing-a-fusion.md)."""

    debug_dir: Path | None = field(default_factory=_debug_dir_from_env)
    """Where to write the graph before and after every stage, one folder per compiled graph; default: the environment
    variable FUSION_PASSES_DEBUG.  Implies that Inductor's caches are bypassed, since a cached graph is not
    rewritten."""

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Before dataclass's own TypeError: a typo should say what there is."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in settings:
            if name not in known:
                raise ValueError(unknown("setting of PassConfig", name, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        parsed = {
            "level": _parse("level", Level, self.level),
            "profitability": _parse("profitability", Profitability, self.profitability),
            "in_place_writes": _parse_bool("in_place_writes", self.in_place_writes),
            "custom_ops": _parse_custom_ops(self.custom_ops),
            "extra_fusions": _parse_rules(self.extra_fusions),
            "debug_dir": _parse_path("debug_dir", self.debug_dir),
        }
        for name in SWITCHES:
            state = getattr(self, name)
            parsed[name] = None if state is None else _parse(name, Switch, state)
        for name, value in parsed.items():
            object.__setattr__(self, name, value)
        names = [rule.name for rule in self.extra_fusions] + list(SWITCHES)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two fusions are called {name!r}: give the rule in extra_fusions another name")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """From a plain dict, e.g. of a YAML or JSON file.  Raises ValueError on an unknown name, TypeError on what is
        no dict."""
        if not isinstance(settings, Mapping):
            raise TypeError(
                f'PassConfig.from_dict({settings!r}): must be a dict of settings, such as {{"level": "O2"}}'
            )
        return cls(**{str(name): value for name, value in settings.items()})

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """From FUSION_PASSES_LEVEL, FUSION_PASSES_ATTENTION_QUANT and so on, and FUSION_PASSES_DEBUG: the table is in
        docs/fusions.md.  Raises ValueError on an unknown FUSION_PASSES_ variable."""
        environ = os.environ if environ is None else environ
        check_environment(environ)
        settings: dict[str, Any] = {"debug_dir": None}
        settings |= {name: environ[variable] for variable, name in VARIABLES.items() if environ.get(variable)}
        try:
            return cls(**settings)
        except ValueError as error:
            raise ValueError(f"in the environment, as {ENV_PREFIX}<NAME>: {error}") from None

    def switch(self, rule: Rule[Any]) -> Switch:
        """Whether this rule is on, off or required under these settings."""
        state: Switch | None = getattr(self, rule.name, None) if rule.name in SWITCHES else Switch.ON
        if state is not None:
            return state
        return Switch.ON if rule.level <= self.level else Switch.OFF

    @property
    def asked_for(self) -> tuple[str, ...]:
        """Names of the fusions that the user named, by a switch that is on or in `extra_fusions`: they tell where they
        applied nowhere."""
        named = [name for name in SWITCHES if getattr(self, name) in (Switch.ON, Switch.REQUIRED)]
        return (*(rule.name for rule in self.extra_fusions), *named)

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the fusions that must apply somewhere."""
        return tuple(name for name in SWITCHES if getattr(self, name) is Switch.REQUIRED)

    def key(self) -> str:
        """Text of all settings that change the compiled code; the rules in `extra_fusions` speak for themselves."""
        return repr(dataclasses.replace(self, debug_dir=None, extra_fusions=()))

    def __str__(self) -> str:
        lines = ["PassConfig:"]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Level):
                text = value.name
            elif f.name in SWITCHES and value is None:
                text = f"follows level ({self.level.name})"
            elif f.name == "custom_ops":
                text = ", ".join(f"{name}={'on' if state else 'off'}" for name, state in value) or "none"
            elif f.name == "extra_fusions":
                text = ", ".join(rule.name for rule in value) or "none"
            else:
                text = str(value) if value is not None else "none"
            lines.append(f"  {f.name:20} {text}")
        return "\n".join(lines)


SWITCHES = fusions.NAMES
"""Names of the built-in fusions' switches."""

VARIABLES = {
    DEBUG_VARIABLE if f.name == "debug_dir" else ENV_PREFIX + f.name.upper(): f.name
    for f in dataclasses.fields(PassConfig)
    if f.name != "extra_fusions"
}
"""Environment variables, with the setting that each is for."""

Config = PassConfig | Mapping[str, Any] | None
"""Settings: a `PassConfig`, a plain dict of them, or None for the environment (`PassConfig.from_env`)."""


def as_config(config: Config) -> PassConfig:
    """The settings that were given, or those of the environment.

    Raises TypeError for what is none of these, ValueError for a setting, or a variable of the environment, that is
    unknown or has no such value.  A misspelt variable is an error beside given settings too.
    """
    if config is None:
        return PassConfig.from_env()
    check_environment(os.environ)
    if isinstance(config, PassConfig):
        return config
    if isinstance(config, Mapping):
        return PassConfig.from_dict(config)
    raise TypeError(f"config={config!r}: must be a PassConfig, a dict of its settings, or None: {_instead(config)}")


def _instead(given: object) -> str:
    """What to write for settings that are none."""
    for level in Level:
        if isinstance(given, (str, int)) and given in (level, level.name):
            return f'write {{"level": "{level.name}"}}'
    if isinstance(given, Rule) or (isinstance(given, (tuple, list)) and given and isinstance(given[0], Rule)):
        return 'write {"extra_fusions": (rule,)}'
    if type(given).__name__ == "Report":  # `report` is built on this module
        return "write report=report"
    return "write PassConfig()" if given is PassConfig else 'write {"level": "O2"}'


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a FUSION_PASSES_ variable that is unknown, or of those that are no settings, cannot be."""
    for variable in environ:
        if variable.startswith(ENV_PREFIX) and variable not in VARIABLES.keys() | OTHER_VARIABLES:
            raise ValueError(unknown("environment variable", variable, VARIABLES.keys() | OTHER_VARIABLES))
    checks_wanted(environ)


def _parse(name: str, kind: type[Any], value: object) -> Any:
    """`value` as a member of the enum `kind`; accepts members, their values, their names, and True / False."""
    if isinstance(value, bool):
        value = "on" if value else "off"
    for member in kind:
        names = (str(member.name).lower(), str(member.value))
        if value == member or (isinstance(value, str) and value.lower() in names):
            return member
    choices = ", ".join(m.name if issubclass(kind, enum.IntEnum) else m.value for m in kind)
    raise ValueError(f"{name}={value!r}: must be one of {choices}")


def _parse_bool(name: str, value: object) -> bool:
    """As `_parse` does for a switch that cannot be required."""
    state = value.lower() if isinstance(value, str) else value
    if not isinstance(state, (bool, str)) or state not in (True, False, "on", "off"):
        raise ValueError(f"{name}={value!r}: must be one of on, off")
    return state in (True, "on")


def _parse_path(name: str, value: object) -> Path | None:
    if value is None or value == "":
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{name}={value!r}: must be the path of a folder, such as 'graphs', or None")
    return Path(value)


def _parse_rules(given: object) -> tuple[Rule[Any], ...]:
    if isinstance(given, Rule):
        raise ValueError(
            f"extra_fusions takes a tuple, not the rule {given.name!r} itself: write extra_fusions=(rule,)"
        )
    if isinstance(given, (str, type)) or not isinstance(given, Iterable):
        raise ValueError(f"extra_fusions={given!r}: must be a tuple of rules: write extra_fusions=(rule,)")
    rules = tuple(given)
    for rule in rules:
        if not isinstance(rule, Rule):
            forgot = ": did you forget to instantiate the class?" if isinstance(rule, type) else ""
            raise ValueError(f"extra_fusions takes instances of fusion_passes.Rule, not {rule!r}{forgot}")
    return rules


def _parse_custom_ops(given: object) -> tuple[tuple[str, bool], ...]:
    """Sorted pairs, from a mapping, pairs, or `name=on,name=off`."""
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",") if part.strip()]
        for part in parts:
            if "=" not in part:
                raise ValueError(f"custom_ops={given!r}: must be name=on or name=off, separated by commas: {part}=on")
        given = [part.partition("=")[::2] for part in parts]
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        states = {str(name): state for name, state in pairs}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"custom_ops={given!r}: must be a mapping such as {{'quant_fp8': True}}") from None
    for name, state in states.items():
        if name not in custom_ops.NAMES:
            raise ValueError(unknown("name in custom_ops", name, set(custom_ops.NAMES)))
        states[name] = _parse_bool(f"custom_ops[{name!r}]", state)
    return tuple(sorted(states.items()))


def unknown(what: str, name: object, known: Collection[str]) -> str:
    """The sentence for a name that is not among the known ones, with the nearest of them."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}{hint}; known: {', '.join(sorted(known))}"
