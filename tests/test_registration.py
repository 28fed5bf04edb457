"""The three ways to switch the passes on, each merged with what was there before."""

import copy

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion_passes
from fusion_passes import PassConfig, PostGradPassManager, Report, RequiredFusionError, TracedRule
from fusion_passes.compiler.inductor import HOOK, PassChain, hook_value, passes_in
from tests.traced_rules import CALLS, relu_squared_rule, unfused

CONFIG = PassConfig(extra_fusions=(relu_squared_rule(),))
X = torch.randn(4, 8)


class Counting(CustomGraphPass):
    """A pass of the user's own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "counting"


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


@torch.no_grad()
def check_fused(compiled, report):
    torch.testing.assert_close(compiled(X), unfused(X))
    assert CALLS, "the fused op did not run"
    assert report.count(rule="relu_squared") == 1


def test_options():
    report = Report()
    options = fusion_passes.inductor_options(CONFIG, report=report)
    check_fused(torch.compile(unfused, options=options), report)


def test_options_merge_with_the_users_own_and_a_mode():
    options = fusion_passes.inductor_options(
        CONFIG, options={"epilogue-fusion": False}, mode="max-autotune-no-cudagraphs", report=Report()
    )
    assert options["epilogue_fusion"] is False
    assert options["max_autotune"] is True
    torch.compile(unfused, options=options)


def test_the_users_options_win_over_the_mode():
    options = fusion_passes.inductor_options(CONFIG, options={"max_autotune": False}, mode="max-autotune")
    assert options["max_autotune"] is False


def test_an_unknown_mode_is_an_error():
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        fusion_passes.inductor_options(CONFIG, mode="fast")


def test_a_pass_in_the_users_options_is_kept_and_runs_first():
    mine, report = Counting(), Report()
    options = fusion_passes.inductor_options(CONFIG, options={HOOK: mine}, report=report)
    assert passes_in(options[HOOK])[0] is mine
    check_fused(torch.compile(unfused, options=options), report)
    assert mine.calls == 1


def test_a_global_pass_is_kept():
    mine, report = Counting(), Report()
    with inductor_config.patch({HOOK: mine}):
        check_fused(fusion_passes.compile(unfused, CONFIG, report=report), report)
        assert getattr(inductor_config, HOOK) is mine
    assert mine.calls == 1


def test_compile_takes_what_torch_compile_takes():
    report = Report()
    compiled = fusion_passes.compile(
        unfused, CONFIG, report=report, mode="default", fullgraph=True, dynamic=True, options={"epilogue_fusion": True}
    )
    check_fused(compiled, report)


def test_compile_as_a_decorator():
    report = Report()

    @fusion_passes.compile(config=CONFIG, report=report)
    def decorated(x):
        return unfused(x)

    check_fused(decorated, report)


def test_compile_of_a_module_keeps_its_state_dict():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    compiled = fusion_passes.compile(module, PassConfig())
    assert list(compiled.state_dict()) == ["_orig_mod.0.weight", "_orig_mod.0.bias"]


def test_context_manager_reaches_code_that_it_does_not_see():
    before = getattr(inductor_config, HOOK)
    hidden = torch.compile(unfused)
    with fusion_passes.enabled(CONFIG) as report:
        check_fused(hidden, report)
    assert getattr(inductor_config, HOOK) is before


def test_context_manager_restores_after_an_error():
    before = getattr(inductor_config, HOOK)
    with pytest.raises(ZeroDivisionError), fusion_passes.enabled(CONFIG):
        raise ZeroDivisionError
    assert getattr(inductor_config, HOOK) is before


def test_global_switch():
    mine = Counting()
    with inductor_config.patch({HOOK: mine}):
        report = fusion_passes.enable(CONFIG)
        try:
            check_fused(torch.compile(unfused), report)
            fusion_passes.enable(CONFIG)
            assert len(passes_in(getattr(inductor_config, HOOK))) == 2, "enabled twice must not run twice"
        finally:
            fusion_passes.disable()
        assert getattr(inductor_config, HOOK) is mine
    assert mine.calls == 1


def test_an_explicit_config_wins_over_the_global_switch():
    fusion_passes.enable(CONFIG)
    try:
        options = fusion_passes.inductor_options(PassConfig(level="O0"))
        assert len(passes_in(options[HOOK])) == 1
    finally:
        fusion_passes.disable()


def test_level_zero_changes_nothing():
    report = Report()
    compiled = fusion_passes.compile(unfused, PassConfig(level="O0"), report=report)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), unfused(X), rtol=0, atol=0)
    assert not CALLS
    assert report.sites == ()


@pytest.mark.parametrize("uuids", [("a", "b"), ("a", None)])
def test_chain_of_passes_for_a_hook_that_takes_one(uuids):
    """The form for torch up to 2.12: a bare pass without uuid switches the cache off, as it does alone."""
    passes = [Counting() for _ in uuids]
    for graph_pass, uuid in zip(passes, uuids, strict=True):
        graph_pass.uuid = lambda uuid=uuid: uuid
    chain = PassChain(passes)
    assert chain.uuid() == (uuids if None not in uuids else None)
    with inductor_config.patch({HOOK: chain}), torch.no_grad():
        torch.compile(unfused)(X)
    assert [p.calls for p in passes] == [1, 1]
    assert passes_in(hook_value(passes_in(chain))) == passes


def attention(q):
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("kind", ["function", "module"])
def test_required_and_applied_nowhere_raises(kind):
    class Model(torch.nn.Module):
        def forward(self, x):
            return unfused(x)

    model = unfused if kind == "function" else Model()
    compiled = fusion_passes.compile(model, PassConfig(attention_quant="required"))
    with torch.no_grad(), pytest.raises(RequiredFusionError, match="no compiled graph has a place for it"):
        compiled(X)


def test_required_in_the_context_manager():
    with (
        pytest.raises(RequiredFusionError, match="the attention's output goes to output"),
        fusion_passes.enabled(PassConfig(attention_quant="required")),
        torch.no_grad(),
    ):
        torch.compile(attention)(torch.randn(1, 1, 4, 8))


def test_report_before_the_first_call_says_so():
    report = Report()
    fusion_passes.compile(unfused, CONFIG, report=report)
    assert "no graph was compiled with the passes" in str(report)


def test_a_misspelt_fusion_is_no_missing_one():
    report = Report()
    with pytest.raises(ValueError, match=r"unknown fusion 'attention_quants' \(did you mean 'attention_quant'\?\)"):
        report.require("attention_quants")
    known = "unknown fusion 'mine'; known: attention_quant, query_quant, rms_norm_quant, rope"
    with pytest.raises(ValueError, match=known):
        report.require("mine")
    mine = TracedRule(
        name="mine", search=lambda x: x.exp(), replace=lambda x: x.sin(), example_inputs=(torch.empty(2),)
    )
    PostGradPassManager(PassConfig(extra_fusions=(mine,)), report)
    with pytest.raises(RequiredFusionError, match="mine is required, and no graph was compiled with the passes so far"):
        report.require("mine")


def test_a_torch_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(RuntimeError, match=r"needs torch 2.11 or newer, this is 2.10.1: pip install 'torch>=2.11'"):
        fusion_passes.compile(unfused)


def test_required_is_judged_over_all_graphs_and_until_it_is_met():
    def two_graphs(x):
        y = attention(x) + 1  # attention without a quantization: this graph has no place
        torch._dynamo.graph_break()
        return unfused(y)

    with torch.no_grad():
        x = torch.randn(1, 1, 4, 8)
        fusion_passes.compile(two_graphs, PassConfig(extra_fusions=(relu_squared_rule(),)))(x)
        compiled = fusion_passes.compile(two_graphs, PassConfig(attention_quant="required"))
        for _ in range(2):
            with pytest.raises(RequiredFusionError, match="the attention's output goes to aten"):
                compiled(x)


def test_required_through_options_is_judged_graph_by_graph():
    """Nobody looks at the whole there; torch wraps what the compiler raises."""

    def quantized(x):
        return (attention(x) / 0.37).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    options = fusion_passes.inductor_options(PassConfig(attention_quant="required"))
    with torch.no_grad(), pytest.raises(Exception, match="attention_quant is required and no place in this graph took"):
        torch.compile(quantized, options=options)(torch.randn(1, 1, 4, 8))


def test_asked_for_and_without_a_place_is_a_warning(caplog):
    with torch.no_grad(), caplog.at_level("WARNING", "fusion_passes"):
        fusion_passes.compile(unfused, {"attention_quant": "on"})(X)
    assert "attention_quant was asked for and applied nowhere:\n  no compiled graph has a place for it" in caplog.text


def test_another_backend_is_an_error():
    with pytest.raises(ValueError, match="the passes run in Inductor, not in backend='eager'"):
        fusion_passes.compile(unfused, backend="eager")


def test_a_debug_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    compiled = fusion_passes.compile(unfused, PassConfig(debug_dir=tmp_path / "file"))
    with torch.no_grad(), pytest.raises(Exception, match=r"debug_dir \(FUSION_PASSES_DEBUG\) cannot be made"):
        compiled(X)


def test_a_copy_of_the_options_reports_to_the_same_report():
    """AOTInductor copies them."""
    report = Report()
    options = copy.deepcopy(fusion_passes.inductor_options(CONFIG, report=report))
    check_fused(torch.compile(unfused, options=options), report)
