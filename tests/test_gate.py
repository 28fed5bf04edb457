"""`required` is a gate: it holds for code from a cache too, tells "nothing was compiled" from "no place", and does not
call missing what is only unknown."""

import dataclasses
import shutil
import threading

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import fusion_passes
from fusion_passes import (
    GraphReport,
    MatchStatus,
    Move,
    PassConfig,
    PostGradPassManager,
    Report,
    RequiredFusionError,
    Site,
)
from fusion_passes.quant import quantize
from tests.traced_rules import relu_squared_rule, unfused

ARGUMENTS = (torch.randn(1, 2, 8, 16), torch.tensor(0.02))
APPLIED = {"attention_quant": "required", "profitability": "ignore"}
NOT_APPLIED = {"attention_quant": "required"}  # on a CPU nothing is faster
X = torch.randn(4, 8)


def model(q, scale):
    return quantize(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2), scale)


def through_options(config, report=None):
    return torch.compile(model, options=fusion_passes.inductor_options(config, report=report))


@torch.no_grad()
def call(compiled, *arguments):
    """As in a new process, but for the cache on disk."""
    torch.compiler.reset()
    return compiled(*(arguments or ARGUMENTS))


@pytest.fixture
def cache(monkeypatch):
    """An empty cache on disk, in use, against what conftest.py says in the environment."""
    for config, name in ((inductor_config, "fx_graph_cache"), (torch._functorch.config, "enable_autograd_cache")):
        monkeypatch.setattr(config._config[name], "env_value_force", True)
    with fresh_cache():
        assert fusion_passes.compiler.inductor.reports_dir() is not None
        yield


def hits():
    return torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


def test_code_that_was_cached_unjudged_is_judged(cache):
    with pytest.raises(RequiredFusionError, match="attention_quant is required and was applied nowhere"):
        call(fusion_passes.compile(model, NOT_APPLIED))
    for _ in range(2):
        with pytest.raises(Exception, match="attention_quant is required and no place in this graph took it"):
            call(through_options(NOT_APPLIED))
    fusion_passes.enable(NOT_APPLIED)
    try:
        with pytest.raises(Exception, match="attention_quant is required and no place in this graph took it"):
            call(torch.compile(model))
    finally:
        fusion_passes.disable()
    before = hits()
    with pytest.raises(RequiredFusionError, match="attention_quant is required and was applied nowhere"):
        call(fusion_passes.compile(model, NOT_APPLIED))
    assert hits() == before + 1, "the first compilation was to be found in the cache"


def test_a_cached_graph_warns_of_what_was_asked_for(cache, caplog):
    """At once, not when somebody reads the report."""
    told = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO", "fusion_passes"):
            call(through_options({"attention_quant": "on"}))
        told.append(caplog.text)
    assert all("attention_quant was asked for and applied nowhere in this graph" in text for text in told)
    assert ["(from cache)" in text for text in told] == [False, True]


def test_what_was_applied_is_known_without_the_reports_folder(cache):
    call(fusion_passes.compile(model, APPLIED))
    folder = fusion_passes.compiler.inductor.reports_dir()
    assert list(folder.iterdir())
    shutil.rmtree(folder)
    report = Report()
    call(fusion_passes.compile(model, APPLIED, report=report))
    (graph,) = report.graphs
    assert (graph.from_cache, graph.known, report.count(rule="attention_quant")) == (True, False, 1)
    assert "graph 0 (from cache; places and reasons are not on disk any more): 1 fused, 1 sites\n" in str(report)
    report.require("attention_quant")
    with pytest.raises(
        RequiredFusionError, match=r"no compiled graph has a place for it \(what nearly was one is not on"
    ):
        report.require("rope_quant_kv_write")


def test_what_was_declined_is_known_without_the_reports_folder(cache):
    call(fusion_passes.compile(model))
    shutil.rmtree(fusion_passes.compiler.inductor.reports_dir())
    report = Report()
    call(fusion_passes.compile(model, report=report))
    assert report.count(MatchStatus.UNPROFITABLE, "attention_quant") == 1
    assert "unprofitable: the reason is not on disk any more: clear Inductor's" in report.why_not("attention_quant")


def test_what_was_applied_is_known_where_artifacts_are_loaded(cache):
    call(fusion_passes.compile(model, APPLIED))
    saved, _ = torch.compiler.save_cache_artifacts()
    report, before = Report(), hits()
    with fresh_cache():
        torch.compiler.reset()
        torch.compiler.load_cache_artifacts(saved)
        call(fusion_passes.compile(model, APPLIED, report=report))
        call(through_options(NOT_APPLIED | {"attention_quant": "on"}))
    assert hits() > before
    assert report.graphs[0].from_cache
    assert report.count(rule="attention_quant") == 1


def test_a_reports_folder_that_cannot_be_written_is_a_warning(cache, caplog):
    fusion_passes.compiler.inductor.reports_dir().write_text("a file where the folder should be")
    with caplog.at_level("WARNING", "fusion_passes"):
        call(fusion_passes.compile(model, APPLIED))
        call(fusion_passes.compile(model, APPLIED))  # from the cache
    assert "are not kept beside the compiled code" in caplog.text


def test_numbers_survive_the_way_through_the_counters():
    sites = [
        Site("a, b: c", MatchStatus.FUSED, "", "here", "this"),
        Site("a, b: c", MatchStatus.FUSED, "", "there", "that"),
        Site("a, b: c", MatchStatus.ILLEGAL, "no", "there", "that"),
    ]
    graph = GraphReport("id", tuple(sites), rules=("a, b: c", "other"), moves=(Move("there", "it"),) * 2)
    again = GraphReport.from_numbers("id", graph.numbers())
    assert [(site.rule, site.status) for site in again.sites] == [(site.rule, site.status) for site in sites]
    assert len(again.moves) == 2
    report = Report()
    report.add(dataclasses.replace(again, sites=()))
    assert report.why_not("in_place_writes") == "it was applied at every place that it has"
    assert report.count() == 0
    assert (again.rules, again.known, again.from_cache) == (graph.rules, False, True)


def test_nothing_compiled_is_not_no_place(caplog):
    report = Report()
    compiled = fusion_passes.compile(model, APPLIED, report=report)
    with pytest.raises(
        RequiredFusionError, match=r"and no graph was compiled with the passes so far.*call the model first"
    ):
        report.require("attention_quant")
    assert report.why_not("attention_quant").startswith("no graph was compiled with the passes so far")
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RequiredFusionError, match=r"set_stance.*have not switched it off"),
    ):
        call(compiled)
    with pytest.raises(RequiredFusionError, match="inside the block"), fusion_passes.enabled(APPLIED):
        pass
    with torch.compiler.set_stance("force_eager"), caplog.at_level("WARNING", "fusion_passes"):
        call(fusion_passes.compile(model, {"attention_quant": "on"}))
    assert (
        "attention_quant was asked for and applied nowhere:\n  no graph was compiled with the passes so far"
        in caplog.text
    )


@pytest.mark.parametrize("off", [{"use_post_grad_passes": False}, {"disabled_passes": "post_grad_custom_post_pass"}])
def test_a_hook_that_is_switched_off_compiles_nothing_with_the_passes(cache, off):
    with pytest.raises(RequiredFusionError, match="no graph was compiled with the passes"):
        call(fusion_passes.compile(model, APPLIED, options=off))


def test_a_rule_that_is_off_is_no_missing_place():
    report = Report()
    with torch.no_grad():
        fusion_passes.compile(unfused, PassConfig(level="O0"), report=report)(X)
    assert report.why_not("attention_quant").startswith("it was switched off in every graph that was compiled")


def test_applied_everywhere_is_no_missing_place():
    report = Report()
    with torch.no_grad():
        fusion_passes.compile(unfused, {"extra_fusions": (relu_squared_rule(),)}, report=report)(X)
    assert report.why_not("relu_squared") == "it was applied at every place that it has"


def test_what_nobody_told_is_unknown_and_no_error(caplog):
    """Outside of Dynamo the code may be loaded and the counters cleared before anybody looks."""
    report = Report()
    PostGradPassManager(PassConfig(**APPLIED), report, judge=False).uuid()
    with caplog.at_level("WARNING", "fusion_passes"):
        report.require("attention_quant")
    assert "attention_quant is required, and it is not known whether it was applied" in caplog.text
    assert "did not say what the passes did" in str(report)


def test_a_compilation_that_failed_leaves_nothing_unknown(cache):
    def fails(graph):
        raise ZeroDivisionError

    class Failing(fusion_passes.compiler.inductor.CustomGraphPass):
        __call__ = staticmethod(fails)

        def uuid(self):
            return "failing"

    report = Report()
    options = {"post_grad_custom_post_pass": Failing()}
    with pytest.raises(Exception, match="ZeroDivisionError"):
        call(fusion_passes.compile(model, APPLIED, options=options, report=report))
    with pytest.raises(RequiredFusionError, match="no graph was compiled"):
        report.require("attention_quant")


def test_each_model_of_a_shared_report_is_judged_alone():
    report = Report()
    call(fusion_passes.compile(model, APPLIED, report=report))
    with pytest.raises(RequiredFusionError, match="no compiled graph has a place for it"):
        call(fusion_passes.compile(unfused, APPLIED, report=report), X)
    with pytest.raises(RequiredFusionError), fusion_passes.enabled(APPLIED, report=report):
        call(torch.compile(unfused), X)
    assert report.count(rule="attention_quant") == 1
    assert len(report.graphs) == 3


def test_another_thread_that_asks_between_ask_and_load_takes_no_graph(cache, monkeypatch):
    call(fusion_passes.compile(model, APPLIED))
    other = PostGradPassManager(PassConfig(**APPLIED), report=(others := Report()))
    ask = PostGradPassManager.uuid

    def meanwhile(self):
        key = ask(self)
        if self is not other:
            thread = threading.Thread(target=lambda: (other.uuid(), others.graphs))
            thread.start()
            thread.join()
        return key

    monkeypatch.setattr(PostGradPassManager, "uuid", meanwhile)
    before = hits()
    call(fusion_passes.compile(model, APPLIED, report=(own := Report())))
    assert hits() > before
    assert (len(own.graphs), len(others.graphs)) == (1, 0)
