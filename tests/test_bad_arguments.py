"""What cannot be an argument is one sentence that says what to write, and comes at once."""

import pytest
import torch

import fusion_passes
from fusion_passes import MatchStatus, PassConfig, PostGradPassManager, Report
from fusion_passes.compiler.inductor import HOOK
from fusion_passes.ops import kv_cache
from tests.traced_rules import relu_squared_rule, unfused

RULE = relu_squared_rule()
WAYS = {
    "compile": lambda **given: fusion_passes.compile(unfused, **given),
    "decorator": lambda **given: fusion_passes.compile(**given),
    "options": lambda **given: fusion_passes.inductor_options(**given),
    "enabled": lambda **given: fusion_passes.enabled(**given),
    "enable": lambda **given: fusion_passes.enable(**given),
    "explain": lambda **given: fusion_passes.explain(unfused, torch.ones(2), **given),
}


def told(error):
    """The text, which must be one line."""
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("config", "write"),
    [
        ("O2", 'write {"level": "O2"}'),
        ("O1", 'write {"level": "O1"}'),
        (1, 'write {"level": "O1"}'),
        (7.5, 'write {"level": "O2"}'),
        (["O2"], 'write {"level": "O2"}'),
        ([], 'write {"level": "O2"}'),
        (RULE, 'write {"extra_fusions": (rule,)}'),
        ((RULE,), 'write {"extra_fusions": (rule,)}'),
        (Report(), "write report=report"),
        (PassConfig, "write PassConfig()"),
    ],
)
def test_what_is_no_config(way, config, write):
    with pytest.raises(TypeError) as error:
        WAYS[way](config=config)
    assert told(error).startswith("config=")
    assert told(error).endswith(f"must be a PassConfig, a dict of its settings, or None: {write}")


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("explain", "decorator")])
@pytest.mark.parametrize("report", [5, "report", Report])
def test_what_is_no_report(way, report):
    with pytest.raises(TypeError) as error:
        WAYS[way](report=report)
    assert "must be a Report; make one first, keep it, and write report=fusion_passes.Report()" in told(error)


@pytest.mark.parametrize("model", ["O2", 5, [unfused], {"level": "O1"}])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match="must be a module or a function; settings go behind it, or into config="):
        fusion_passes.compile(model)
    with pytest.raises(TypeError, match="must be a module or a function, and then what it is called with"):
        fusion_passes.explain(model)


def test_a_setting_among_the_arguments():
    with pytest.raises(TypeError, match=r"level is a setting of the passes: write compile\(model, {'level': 'O1'}\)"):
        fusion_passes.compile(unfused, level="O1")


@pytest.mark.parametrize("options", [5, "x", ["max_autotune"], {5: True}])
@pytest.mark.parametrize("way", ["compile", "options", "explain"])
def test_what_are_no_options(way, options):
    with pytest.raises(TypeError, match="must be a dict of Inductor's options, such as"):
        WAYS[way](options=options)


@pytest.mark.parametrize("graph_pass", [5, "mine", [unfused, 5]])
def test_what_is_no_pass(graph_pass):
    with pytest.raises(TypeError, match=f"{HOOK} is .*: must be a pass, which takes the graph, or a list of them"):
        fusion_passes.inductor_options(options={HOOK: graph_pass})


@pytest.mark.parametrize("config", [{"level": "O1"}, None, "O2"])
def test_the_manager_takes_a_config(config):
    with pytest.raises(TypeError, match=r"PostGradPassManager takes a PassConfig, not .*: write PassConfig\(...\)"):
        PostGradPassManager(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_fusions": RULE}, r"takes a tuple, not the rule 'relu_squared' itself: write extra_fusions=\(rule,\)"),
        ({"extra_fusions": type(RULE)}, r"must be a tuple of rules: write extra_fusions=\(rule,\)"),
        ({"extra_fusions": "relu_squared"}, r"must be a tuple of rules: write extra_fusions=\(rule,\)"),
        ({"extra_fusions": 5}, r"must be a tuple of rules: write extra_fusions=\(rule,\)"),
        ({"extra_fusions": None}, r"must be a tuple of rules: write extra_fusions=\(rule,\)"),
        ({"extra_fusions": {"relu_squared": RULE}}, "takes instances of fusion_passes.Rule, not 'relu_squared'"),
        ({"debug_dir": 5}, "debug_dir=5: must be the path of a folder, such as 'graphs', or None"),
        ({"debug_dir": True}, "debug_dir=True: must be the path of a folder"),
        ({"debug_dir": False}, "debug_dir=False: must be the path of a folder"),
        ({"debug_dir": b"graphs"}, "must be the path of a folder"),
        ({"level": [1]}, "must be one of O0, O1, O2"),
        ({"attention_quant": 1}, "must be one of on, off, required"),
        ({5: True}, "unknown setting of PassConfig '5'; known: "),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        PassConfig.from_dict(settings)
    told(error)


@pytest.mark.parametrize("settings", [5, "O2", None, ["level"], PassConfig()])
def test_what_is_no_dict_of_settings(settings):
    with pytest.raises(TypeError, match="must be a dict of settings, such as"):
        PassConfig.from_dict(settings)


@pytest.mark.parametrize("config", [None, PassConfig(), {"level": "O1"}])
@pytest.mark.parametrize("way", WAYS)
def test_a_misspelt_variable_is_an_error_beside_given_settings_too(way, config, monkeypatch):
    monkeypatch.setenv("FUSION_PASSES_LEVL", "O1")
    with pytest.raises(ValueError, match=r"variable 'FUSION_PASSES_LEVL' \(did you mean 'FUSION_PASSES_LEVEL'\?\)"):
        WAYS[way](config=config)


@pytest.mark.parametrize("text", ["yes", "true", "on", "2"])
def test_the_checks_are_one_or_zero(text, monkeypatch):
    monkeypatch.setenv("FUSION_PASSES_CHECK", text)
    message = f"FUSION_PASSES_CHECK='{text}': must be 1 .*or 0"
    for config in (None, PassConfig()):
        with pytest.raises(ValueError, match=message):
            fusion_passes.compile(unfused, config)
    with pytest.raises(ValueError, match=message):
        kv_cache.values_are_checked(torch.device("cpu"))
    for accepted in ("0", "1", ""):
        monkeypatch.setenv("FUSION_PASSES_CHECK", accepted)
        assert kv_cache.values_are_checked(torch.device("cpu"))


@pytest.mark.parametrize(
    "ask",
    [
        lambda report, name: report.count(rule=name),
        lambda report, name: report.declined(name),
        lambda report, name: report.why_not(name),
        lambda report, name: report.require(name),
    ],
)
def test_a_misspelt_rule(ask):
    report = Report()
    with pytest.raises(ValueError, match=r"unknown fusion 'atention_quant' \(did you mean 'attention_quant'\?\)"):
        ask(report, "atention_quant")
    with pytest.raises(ValueError, match="unknown fusion 5; known: attention_quant"):
        ask(report, 5)


def test_a_status_may_be_a_string_and_must_be_one():
    report = Report()
    assert report.count("fused") == report.count(MatchStatus.FUSED, "in_place_writes") == 0
    with pytest.raises(ValueError, match=r"unknown status 'fussed' \(did you mean 'fused'\?\)"):
        report.count("fussed")
    with pytest.raises(ValueError, match=r"for a rule write count\(rule='attention_quant'\)"):
        report.count("attention_quant")


@pytest.mark.parametrize("samples", [0, "many", 2.5])
def test_samples(samples):
    with pytest.raises(ValueError, match="must be a number of samples, such as 15"):
        fusion_passes.explain(unfused, torch.ones(2), samples=samples)


def test_keyword_arguments_of_the_model():
    with pytest.raises(TypeError, match="must be a dict of the model's keyword arguments"):
        fusion_passes.explain(unfused, kwargs=[torch.ones(2)])
