"""What the passes do to one model, beside the stock compiler: `explain`, after `torch._dynamo.explain`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusion_passes.compiler import inductor, switch
from fusion_passes.compiler.config import Config, PassConfig, Profitability, Switch, as_config
from fusion_passes.compiler.manager import PostGradPassManager
from fusion_passes.compiler.registration import inductor_options
from fusion_passes.compiler.report import Miss, Report
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.fusions.rule import MatchStatus
from fusion_passes.tools.compare import Difference, compare
from fusion_passes.tools.places import alike
from fusion_passes.tools.table import paragraph, plural, table
from fusion_passes.tools.trial import Compilation, Timing, Trial

MISSES_SHOWN = 8
OUTPUTS_SHOWN = 8


@dataclass(frozen=True)
class Outcome:
    """What became of one fusion, over all graphs of the model."""

    fusion: str
    switch: Switch
    statuses: dict[MatchStatus, int] = field(default_factory=dict)
    """Number of places by what became of them."""
    misses: tuple[Miss, ...] = ()
    """Where the fusion applied nowhere: what nearly was a place for it, and why it was none."""

    @property
    def fused(self) -> int:
        """Number of places where it was applied."""
        return self.statuses.get(MatchStatus.FUSED, 0)

    @property
    def places(self) -> int:
        """Number of places where its pattern was found."""
        return sum(self.statuses.values())

    @property
    def unmet(self) -> bool:
        """Whether it is required and was applied nowhere."""
        return self.switch is Switch.REQUIRED and not self.fused

    def __str__(self) -> str:
        if self.switch is Switch.OFF:
            return "switched off"
        if not self.places:
            return "no place for it in this model" + ", and it is required" * self.unmet
        declined = [f"{n} {status}" for status, n in self.statuses.items() if status is not MatchStatus.FUSED]
        text = f"fused at {self.fused} of {plural(self.places, 'place')}"
        return text + (f" ({', '.join(declined)})" if declined else "") + ", and it is required" * self.unmet


@dataclass(frozen=True)
class Accuracy:
    """The outputs of the fused model against those of the stock one, and both against fp32."""

    fused_and_stock: tuple[Difference, ...]
    stock_and_itself: tuple[Difference, ...]
    """Two runs of the stock model: not equal where the model is random, or not deterministic."""
    fused_and_fp32: tuple[Difference, ...] = ()
    stock_and_fp32: tuple[Difference, ...] = ()
    why_no_fp32: str = ""
    """Why the model could not be run in fp32, or ""."""

    @property
    def deterministic(self) -> bool:
        """Whether two runs of the stock model gave the same."""
        return all(d.equal for d in self.stock_and_itself)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found out.  Printed, it is a page of text."""

    model: str
    device: str
    config: PassConfig
    outcomes: tuple[Outcome, ...]
    report: Report
    accuracy: Accuracy
    timing: Timing
    stock: Compilation
    fused: Compilation

    @property
    def unmet(self) -> tuple[str, ...]:
        """Names of the fusions that are required and were applied nowhere."""
        return tuple(outcome.fusion for outcome in self.outcomes if outcome.unmet)

    @property
    def pass_seconds(self) -> dict[str, float]:
        """Time of each stage of the passes, over all graphs: recognise, fuse, clean."""
        total: dict[str, float] = {}
        for graph in self.report.graphs:
            for stage, seconds in graph.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values, for JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "torch": torch.__version__,
            "config": {f.name: _plain(getattr(self.config, f.name)) for f in dataclasses.fields(self.config)},
            "fusions": {o.fusion: dataclasses.asdict(o) for o in self.outcomes},
            "unmet": self.unmet,
            "graphs": [dataclasses.asdict(graph) for graph in self.report.graphs],
            "accuracy": dataclasses.asdict(self.accuracy) | {"deterministic": self.accuracy.deterministic},
            "timing": dataclasses.asdict(self.timing) | {"speedup": self.timing.speedup},
            "pass_seconds": self.pass_seconds,
            "stock": dataclasses.asdict(self.stock),
            "fused": dataclasses.asdict(self.fused),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON.  Infinities and NaN become null."""
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False)

    def __str__(self) -> str:
        sections = {
            "FUSIONS": self._fusions(),
            "PLACES": self._places(),
            "NEAR MISSES": self._misses(),
            "OUTPUTS": self._outputs(),
            "TIME": self._time(),
        }
        title = f"{self.model} on {self.device}, torch {torch.__version__}"
        return "\n\n".join([title, *(f"{name}\n{text}" for name, text in sections.items() if text)])

    def _fusions(self) -> str:
        lines = [table(["fusion", "outcome"], [[o.fusion, str(o)] for o in self.outcomes])]
        if not self.report.graphs:
            lines.append(
                paragraph("torch.compile compiled no graph of this model: is it disabled (TORCH_COMPILE_DISABLE)?")
            )
        declined = [o.fusion for o in self.outcomes if set(o.statuses) == {MatchStatus.UNPROFITABLE}]
        if declined:
            lines.append(
                paragraph(
                    f"Every place of {' and '.join(declined)} may be fused, but none was, since no measurement says "
                    "that it is faster on this machine (the reasons stand below). To see the rewritten graph anyway: "
                    'profitability="ignore" (--profitability ignore).'
                )
            )
        elif self.config.profitability is Profitability.IGNORE and any(o.fused for o in self.outcomes):
            lines.append(
                paragraph(
                    "profitability is ignored here: a place is fused wherever that is legal, also where it is slower. "
                    "The default fuses only what was measured to be faster."
                )
            )
        return "\n".join(lines)

    def _places(self) -> str:
        rows = []
        for (rule, status, what, reason), wheres in alike(
            ((site.rule, site.status, site.what, site.reason), site.where) for site in self.report.sites
        ):
            text = f"{what}\n" * bool(what) + wheres.text + f"\nbecause {reason}" * bool(reason)
            rows.append([f"{wheres.count}x", status, rule, text])
        return table(["", "status", "fusion", "place"], rows) if rows else ""

    def _misses(self) -> str:
        rows = []
        for outcome in self.outcomes:
            groups = alike(((miss.what, miss.reason), miss.where) for miss in outcome.misses)
            for (what, reason), wheres in groups[:MISSES_SHOWN]:
                rows.append([f"{wheres.count}x", outcome.fusion, f"{what}: {reason}\n{wheres.text}"])
            if len(groups) > MISSES_SHOWN:
                rows.append(["", outcome.fusion, f"and {len(groups) - MISSES_SHOWN} more, in outcomes[…].misses"])
        return table(["", "fusion", "what nearly was a place"], rows) if rows else ""

    def _outputs(self) -> str:
        accuracy = self.accuracy
        if not accuracy.fused_and_stock:
            return paragraph("The model returns no tensor, so there is nothing to compare.")
        pairs = {
            "fused, stock": accuracy.fused_and_stock,
            "fused, fp32": accuracy.fused_and_fp32,
            "stock, fp32": accuracy.stock_and_fp32,
        }
        if not accuracy.deterministic:
            pairs["stock, stock again"] = accuracy.stock_and_itself
        rows = []
        for number, output in enumerate(accuracy.fused_and_stock[:OUTPUTS_SHOWN]):
            about = f"{output.dtype} {list(output.shape)}"
            rows += [[output.output, about, pair, str(ds[number])] for pair, ds in pairs.items() if number < len(ds)]
        for pair, differences in pairs.items():
            if more := differences[OUTPUTS_SHOWN:]:
                rows.append([f"{len(more)} more", "", pair, _worst(more)])
        lines = [table(["output", "", "compared", "difference"], rows)]
        if accuracy.why_no_fp32:
            lines.append(paragraph(f"Not compared with fp32: {accuracy.why_no_fp32}"))
        elif accuracy.fused_and_fp32:
            lines.append(
                paragraph("fp32 is the same model run eagerly with its 16-bit tensors in fp32; FP8 stays FP8.")
            )
        if not accuracy.deterministic:
            lines.append(
                paragraph(
                    "Two runs of the stock model differ from each other: it is random (dropout without model.eval()?), "
                    "or not deterministic. Differences of that size say nothing about the fusions."
                )
            )
        return "\n".join(lines)

    def _time(self) -> str:
        t, passes = self.timing, self.pass_seconds
        stages = ", ".join(f"{stage} {seconds * 1e3:.1f}" for stage, seconds in passes.items())
        total = sum(passes.values())
        share = total / self.fused.seconds if self.fused.seconds else 0.0
        rows = [
            [
                "per call",
                f"stock {t.stock * 1e3:.3f} ms, fused {t.fused * 1e3:.3f} ms"
                + (f": {t.speedup:.2f} times as fast" if any(o.fused for o in self.outcomes) else "")
                + f" ({t.clock}, median of {t.samples})"
                + ("" if any(o.fused for o in self.outcomes) else "; nothing was fused, so both ran the same code"),
            ],
            [
                "passes",
                f"{total * 1e3:.1f} ms ({stages}), {share:.1%} of the first call with compilation, "
                f"{self.fused.seconds:.1f} s",
            ]
            if passes
            else ["passes", "did not run"],
        ]
        if max(self.stock.graphs, self.fused.graphs) != 1 or self.fused.graph_breaks:
            rows.append(["graphs", f"{self.fused.graphs}, {plural(self.fused.graph_breaks, 'graph break')}"])
        if self.device.startswith("cuda"):
            made = [
                f"{name} {c.generated_kernels} generated and {c.external_calls} others"
                for name, c in (("stock", self.stock), ("fused", self.fused))
            ]
            rows.append(["kernels", ", ".join(made)])
        return "\n".join(f"  {name:10}{text}" for name, text in rows)


def explain(
    model: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    config: Config = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    samples: int = 15,
    progress: bool = True,
    **torch_compile_kwargs: Any,
) -> Explanation:
    """Compile `model(*args, **kwargs)` stock and with the passes, run both without gradients, and compare.

    The page that it returns says what was fused, what was not and why, how far the outputs of the two are apart and how
    far each is from fp32, and how long they take.  It says `model.eval()` for nobody.

    Args:
        model: a module or a function; a compiled one is taken for what it was before.
        kwargs: keyword arguments of the model.
        config: what to fuse: a `PassConfig`, a dict of its settings, or None to read the environment.  A required
            fusion that applies nowhere is told in `unmet`, and raises nothing.
        options, mode, dynamic, torch_compile_kwargs: as for `fusion_passes.compile`, given to both compilations.
        samples: of the timing, at most.
        progress: say on stderr what is being done.

    Raises what the model raises, with a note that says whether it ran eagerly, compiled stock or with the passes.
    Inputs are copied for every run, and what the model writes to its buffers is put back, as is the state of the random
    number generators.  Caches are off.  `torch.compiler.reset()` is called before and after, so code that you compiled
    before is compiled anew at its next call.
    """
    config = as_config(config)
    if not callable(model):
        raise TypeError(f"explain({model!r}): must be a module or a function, and then what it is called with")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(f"kwargs={kwargs!r}: must be a dict of the model's keyword arguments")
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r}: must be a number of samples, such as 15")
    model = getattr(model, "_orig_mod", model)
    report = Report()
    # A required fusion is judged here, not while compiling.
    lenient: dict[str, Any] = dict.fromkeys(config.required, Switch.ON)
    fused_options = inductor_options(
        dataclasses.replace(config, **lenient), options=options, mode=mode, dynamic=dynamic, report=report
    )
    stock_options = inductor.without(fused_options, PostGradPassManager)
    tell = _Progress(progress)
    subject = Trial(model, args, dict(kwargs or {}))

    def compiled(its_options: dict[str, Any]) -> Callable[..., Any]:
        return torch.compile(model, options=its_options, dynamic=dynamic, **torch_compile_kwargs)

    torch.compiler.reset()
    try:
        with torch.no_grad(), _random_state(subject.devices), inductor.uncached(), switch.switched_off():
            with tell("running eagerly"), _blamed("no compiler, as plain Python"):  # its errors are the clearest
                subject.run(model)
            stock = compiled(stock_options)
            with tell("compiling with stock torch.compile"), _blamed("stock torch.compile, without any pass"):
                stock_output, stock_made = subject.first_run(stock)
            fused = compiled(fused_options)
            with tell("compiling with the passes"), _blamed("torch.compile with the passes"):
                fused_output, fused_made = subject.first_run(fused)
            with tell("comparing outputs"):
                accuracy = _accuracy(subject, stock_output, fused_output, subject.run(stock))
                del stock_output, fused_output
            with tell("timing"):
                timing = subject.time(stock, fused, samples)
    finally:
        torch.compiler.reset()
    return Explanation(
        model=type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", repr(model)),
        device=subject.device_name,
        config=config,
        outcomes=_outcomes(config, report),
        report=report,
        accuracy=accuracy,
        timing=timing,
        stock=stock_made,
        fused=fused_made,
    )


def _accuracy(subject: Trial, stock: Any, fused: Any, stock_again: Any) -> Accuracy:
    pairs = (compare(fused, stock), compare(stock_again, stock))
    try:
        reference = subject.in_fp32()
    except Exception as error:  # a model that names its dtypes; no memory for a second model
        told = str(error).strip().split("\n")[0]
        return Accuracy(*pairs, why_no_fp32=f"the model does not run in fp32 ({type(error).__name__}: {told})")
    return Accuracy(*pairs, compare(fused, reference), compare(stock, reference))


def _outcomes(config: PassConfig, report: Report) -> tuple[Outcome, ...]:
    """One entry per fusion, the user's own ones first.  What nearly was a place is told where none was fused."""
    outcomes = []
    for rule in (*config.extra_fusions, *FUSIONS):
        statuses = Counter(site.status for site in report.sites if site.rule == rule.name)
        switch = config.switch(rule)
        misses = [
            miss
            for graph in report.graphs
            for miss in graph.misses
            if switch is not Switch.OFF and not statuses[MatchStatus.FUSED]
        ]
        misses.sort(key=lambda miss: miss.what != rule.name)  # the rule's own before the idioms'
        outcomes.append(Outcome(rule.name, switch, dict(statuses), tuple(misses)))
    return tuple(outcomes)


def _worst(differences: tuple[Difference, ...]) -> str:
    unequal = [d for d in differences if not d.equal]
    if not unequal:
        return "equal in every element"
    worst = max(unequal, key=lambda d: (bool(d.problem), d.relative_l2 or 0.0, d.share))
    return f"{len(unequal)} differ, {worst.output} most: {worst}"


def _plain(setting: object) -> object:
    if isinstance(setting, tuple):
        return [getattr(item, "name", item) for item in setting]
    return None if setting is None else getattr(setting, "name", str(setting)).lower()


def _finite(item: Any) -> Any:
    if isinstance(item, dict):
        return {str(key): _finite(entry) for key, entry in item.items()}
    if isinstance(item, (list, tuple)):
        return [_finite(entry) for entry in item]
    if isinstance(item, float) and not abs(item) < float("inf"):
        return None
    return item


@contextmanager
def _random_state(devices: list[torch.device]) -> Iterator[None]:
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
        yield


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Say in an exception which of the runs it comes from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while running with {what}")
        raise


class _Progress:
    """A line on stderr for each step, with the time since the beginning."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        if self._shown:
            print(f"[{time.perf_counter() - self._start:6.1f} s] {step} …", file=sys.stderr, flush=True)
        yield
