"""PassConfig: parsing, errors that list what is known, environment, cache key."""

import dataclasses

import pytest

from fusion_passes import Level, PassConfig, Profitability, Rule, Switch
from fusion_passes.compiler.config import SWITCHES
from fusion_passes.fusions.builtin import FUSIONS


class Nothing(Rule):
    name = "nothing"
    summary = "matches nothing"

    def pattern(self, idioms):
        return iter(())

    def replacement(self, m, call):
        raise AssertionError


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PassConfig().level = Level.O0


def test_one_switch_per_fusion():
    assert sorted(SWITCHES) == sorted(rule.name for rule in FUSIONS)


@pytest.mark.parametrize(
    ("given", "field", "parsed"),
    [
        ({"level": "O1"}, "level", Level.O1),
        ({"level": "o2"}, "level", Level.O2),
        ({"level": 0}, "level", Level.O0),
        ({"attention_quant": "required"}, "attention_quant", Switch.REQUIRED),
        ({"attention_quant": True}, "attention_quant", Switch.ON),
        ({"attention_quant": False}, "attention_quant", Switch.OFF),
        ({"profitability": "ignore"}, "profitability", Profitability.IGNORE),
        ({"in_place_writes": "off"}, "in_place_writes", False),
        ({"in_place_writes": True}, "in_place_writes", True),
    ],
)
def test_values_are_parsed(given, field, parsed):
    assert getattr(PassConfig.from_dict(given), field) is parsed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attention_quants": "on"},
            r"did you mean 'attention_quant'\?.*known: attention_quant, custom_ops, debug_dir",
        ),
        ({"level": "O3"}, "must be one of O0, O1, O2"),
        ({"attention_quant": "maybe"}, "must be one of on, off, required"),
        ({"profitability": 1}, "must be one of measured, ignore"),
        ({"in_place_writes": "required"}, "must be one of on, off$"),
        ({"in_place_writes": "maybe"}, "must be one of on, off$"),
        ({"in_place_writes": 2}, "must be one of on, off$"),
        ({"custom_ops": {"quant_fp": True}}, r"unknown name in custom_ops 'quant_fp' \(did you mean 'quant_fp8'\?\)"),
        ({"custom_ops": {"quant_fp8": "maybe"}}, "must be one of on, off$"),
        ({"custom_ops": {"quant_fp8": "required"}}, "must be one of on, off"),
        ({"custom_ops": 3}, "must be a mapping such as"),
        ({"custom_ops": "quant_fp8"}, "must be name=on or name=off, separated by commas: quant_fp8=on"),
        ({"extra_fusions": (Nothing,)}, "did you forget to instantiate the class"),
        ({"extra_fusions": (Nothing(), Nothing())}, "two fusions are called 'nothing'"),
    ],
)
def test_typos_are_errors_that_list_what_is_known(given, message):
    with pytest.raises(ValueError, match=message):
        PassConfig.from_dict(given)


@pytest.mark.parametrize("given", [{"quant_fp8": True}, [("quant_fp8", "on")], "quant_fp8=on", " quant_fp8=on, "])
def test_custom_ops_in_every_form_are_one_setting_and_part_of_the_key(given):
    config = PassConfig(custom_ops=given)
    assert config.custom_ops == (("quant_fp8", True),)
    assert hash(config) == hash(PassConfig(custom_ops={"quant_fp8": True}))
    assert config.key() != PassConfig().key() != PassConfig(custom_ops={"quant_fp8": False}).key()
    assert "quant_fp8=on" in str(config)


def test_custom_ops_from_the_environment():
    assert PassConfig.from_env({"FUSION_PASSES_CUSTOM_OPS": "quant_fp8=off"}).custom_ops == (("quant_fp8", False),)
    with pytest.raises(ValueError, match=r"in the environment.*unknown name in custom_ops 'nothing'"):
        PassConfig.from_env({"FUSION_PASSES_CUSTOM_OPS": "nothing=on"})


def test_an_extra_fusion_cannot_shadow_a_built_in_one():
    class Shadow(Nothing):
        name = "attention_quant"

    with pytest.raises(ValueError, match="give the rule in extra_fusions another name"):
        PassConfig(extra_fusions=(Shadow(),))


def test_a_rule_without_a_name_fails_when_it_is_written():
    with pytest.raises(TypeError, match="needs a class attribute 'summary'"):

        class Nameless(Rule):
            name = "nameless"

            def pattern(self, idioms):
                return iter(())

            def replacement(self, m, call):
                raise AssertionError


def test_environment(tmp_path):
    environ = {
        "FUSION_PASSES_LEVEL": "O0",
        "FUSION_PASSES_ATTENTION_QUANT": "on",
        "FUSION_PASSES_PROFITABILITY": "ignore",
        "FUSION_PASSES_DEBUG": str(tmp_path),
        "PATH": "/bin",
    }
    config = PassConfig.from_env(environ)
    assert (config.level, config.attention_quant, config.profitability, config.debug_dir) == (
        Level.O0,
        Switch.ON,
        Profitability.IGNORE,
        tmp_path,
    )
    assert PassConfig.from_env({"FUSION_PASSES_CHECK": "1"}) == PassConfig(debug_dir=None)
    with pytest.raises(ValueError, match="did you mean 'FUSION_PASSES_LEVEL'"):
        PassConfig.from_env({"FUSION_PASSES_LEVELS": "O0"})
    with pytest.raises(ValueError, match=r"did you mean 'FUSION_PASSES_CHECK'\?.*known: .*FUSION_PASSES_CHECK, "):
        PassConfig.from_env({"FUSION_PASSES_CHECKS": "1"})


def test_the_debug_variable_works_with_an_explicit_config(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSION_PASSES_DEBUG", str(tmp_path))
    assert PassConfig(level="O1").debug_dir == tmp_path
    assert PassConfig(debug_dir=None).debug_dir is None


@pytest.mark.parametrize(
    ("config", "state"),
    [
        (PassConfig(level="O0"), Switch.OFF),
        (PassConfig(level="O1"), Switch.OFF),
        (PassConfig(level="O2"), Switch.ON),
        (PassConfig(level="O0", attention_quant="on"), Switch.ON),
        (PassConfig(level="O2", attention_quant="off"), Switch.OFF),
        (PassConfig(level="O0", attention_quant="required"), Switch.REQUIRED),
    ],
)
def test_a_switch_wins_over_the_level(config, state):
    (rule,) = [r for r in FUSIONS if r.name == "attention_quant"]
    assert config.switch(rule) is state


def test_every_setting_but_the_debug_dir_is_in_the_key(tmp_path):
    changed = {"level": "O0", "profitability": "ignore", "in_place_writes": False, "custom_ops": {"quant_fp8": True}}
    changed |= dict.fromkeys(SWITCHES, "on")
    assert {f.name for f in dataclasses.fields(PassConfig)} == {*changed, "extra_fusions", "debug_dir"}
    keys = {PassConfig().key(), *(PassConfig(**{name: value}).key() for name, value in changed.items())}
    assert len(keys) == 1 + len(changed)
    assert PassConfig(debug_dir=tmp_path).key() == PassConfig().key()


def test_prints_itself():
    text = str(PassConfig(level="O1", extra_fusions=(Nothing(),)))
    assert "level                O1" in text
    assert "attention_quant      follows level (O1)" in text
    assert "extra_fusions        nothing" in text


def test_a_typo_in_the_constructor_lists_what_is_known():
    with pytest.raises(ValueError, match="did you mean 'attention_quant'"):
        PassConfig(attention_qant="on")
    assert PassConfig.from_env({}).debug_dir is None


def test_a_subclass_of_a_rule_with_a_name_needs_none_of_its_own():
    class Special(Nothing):
        pass

    class Abstract(Rule):
        def shared(self):
            return 1

    assert (Special().name, Abstract.__name__) == ("nothing", "Abstract")
