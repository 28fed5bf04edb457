"""Passes of the user's own beside ours: of every kind, wherever and whenever they are set, in both directions."""

import functools
import threading

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.compiler import inductor
from fusion_passes.compiler.inductor import HOOK, PassChain, passes_in
from tests.traced_rules import relu_squared_rule, unfused

CONFIG = PassConfig(extra_fusions=(relu_squared_rule(),))
X = torch.randn(4, 8)
HOOKS = [HOOK, "post_grad_custom_pre_pass", "joint_custom_pre_pass", "joint_custom_post_pass"]
InferenceAware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")


class Mine(CustomGraphPass):
    def __init__(self, uuid="mine"):
        self.seen, self.key = [], uuid

    def __call__(self, graph):
        self.seen.append(graph)

    def uuid(self):
        return self.key


class Callable_:
    """With a uuid, but not of torch's class: Inductor does not ask for it."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(graph)

    def uuid(self):
        return "callable"


def graph_pass(kind):
    """A pass, and the list of what it saw."""
    if kind in ("class", "no uuid", "callable"):
        made = Callable_() if kind == "callable" else Mine(None if kind == "no uuid" else "mine")
        return made, made.seen
    seen = []
    if kind == "function":
        return lambda graph: seen.append(graph), seen
    if kind == "partial":
        return functools.partial(lambda found, graph: found.append(graph), seen), seen

    class Aware(InferenceAware):
        def __call__(self, graph, is_inference):
            assert is_inference is True
            seen.append(graph)

        def uuid(self):
            return "aware"

    return Aware(), seen


KINDS = ["class", "no uuid", "callable", "function", "partial"] + ["inference aware"] * (InferenceAware is not None)


@pytest.fixture(params=["as this torch", "as torch 2.12"])
def one_pass(request, monkeypatch):
    """The hook's form of torch 2.12 is tried wherever the tests run."""
    if request.param == "as torch 2.12":
        monkeypatch.setattr(inductor, "hook_value", lambda ps: ps[0] if len(ps) == 1 else PassChain(ps))


@torch.no_grad()
def call(compiled):
    return compiled(X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["options", "set before", "set after", "in enabled"])
def test_a_pass_of_every_kind_runs_beside_ours(kind, way, one_pass):
    mine, seen = graph_pass(kind)
    report = Report()
    if way == "options":
        call(fusion_passes.compile(unfused, CONFIG, options={HOOK: mine}, report=report))
    elif way == "set before":
        with inductor_config.patch({HOOK: mine}):
            call(fusion_passes.compile(unfused, CONFIG, report=report))
    elif way == "set after":
        compiled = fusion_passes.compile(unfused, CONFIG, report=report)
        with inductor_config.patch({HOOK: mine}):
            call(compiled)
    else:
        compiled = torch.compile(unfused)
        with fusion_passes.enabled(CONFIG, report=report), inductor_config.patch({HOOK: mine}):
            call(compiled)
    assert (len(seen), report.count(rule="relu_squared")) == (1, 1)


@pytest.mark.parametrize("several", [list, tuple])
@pytest.mark.parametrize("way", ["options", "global"])
def test_several_passes_run_in_their_order(several, way, one_pass):
    order = []
    passes = several([lambda graph: order.append(1), lambda graph: order.append(2)])
    if way == "options":
        call(fusion_passes.compile(unfused, CONFIG, options={HOOK: passes}))
    else:
        with inductor_config.patch({HOOK: passes}):
            call(fusion_passes.compile(unfused, CONFIG))
            assert getattr(inductor_config, HOOK) is passes
    assert order == [1, 2]


@pytest.mark.parametrize("hook", HOOKS[1:])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "inference aware"])
def test_other_hooks_are_left_alone(hook, kind):
    (given, seen), (later, seen_later), report = graph_pass(kind), graph_pass(kind), Report()
    call(fusion_passes.compile(unfused, CONFIG, options={hook: given}, report=report))
    torch.compiler.reset()
    compiled = fusion_passes.compile(unfused, CONFIG, report=report)
    with inductor_config.patch({hook: later}):
        call(compiled)
    assert (len(seen), len(seen_later), report.count()) == (1, 1, 2)


@pytest.mark.parametrize(("kind", "cached"), [("class", True), ("no uuid", False), ("callable", False)])
def test_a_pass_without_a_uuid_is_never_cached(kind, cached):
    """As Inductor does with it alone; with one, the key is that of all passes."""
    mine, _ = graph_pass(kind)
    keys = [PassChain([mine, Mine("second")]).uuid()]
    with inductor_config.patch({HOOK: mine}):
        keys.append(fusion_passes.inductor_options(PassConfig())[HOOK].uuid())
    assert [key is not None for key in keys] == [cached, cached]
    if cached:
        assert keys[0] == ("mine", "second")
        assert keys[1][0] == "mine"


def test_what_is_set_when_a_graph_is_compiled_counts():
    """As with `torch.compile` alone: a pass that was set at `compile` and is not any more does not run."""
    old, new, report = Mine(), Mine(), Report()
    with inductor_config.patch({HOOK: old}):
        compiled = fusion_passes.compile(unfused, CONFIG, report=report)
    with inductor_config.patch({HOOK: new}):
        call(compiled)
    assert (len(old.seen), len(new.seen), report.count()) == (0, 1, 1)


def test_a_reset_in_between_changes_nothing():
    mine, report = Mine(), Report()
    compiled = fusion_passes.compile(unfused, CONFIG, report=report)
    torch.compiler.reset()
    with inductor_config.patch({HOOK: mine}):
        call(compiled)
    assert (len(mine.seen), report.count()) == (1, 1)


def test_outside_of_dynamo_the_passes_of_the_beginning_count():
    mine = Mine()
    with inductor_config.patch({HOOK: mine}):
        chain = fusion_passes.inductor_options(CONFIG)[HOOK]
    assert [mine, *passes_in(chain)[1:]] == passes_in(chain)
    chain(torch.fx.symbolic_trace(unfused).graph)
    assert len(mine.seen) == 1


def test_what_is_set_in_a_block_is_still_there_behind_it():
    mine = Mine()
    before = getattr(inductor_config, HOOK)
    try:
        with fusion_passes.enabled(CONFIG) as report:
            setattr(inductor_config, HOOK, mine)
            call(torch.compile(unfused))
        assert getattr(inductor_config, HOOK) is mine
    finally:
        setattr(inductor_config, HOOK, before)
    assert (len(mine.seen), report.count()) == (1, 1)


@pytest.mark.parametrize("compiles", [True, False])
def test_disable_leaves_what_others_have_set(compiles):
    mine = Mine()
    with inductor_config.patch({HOOK: None}):
        fusion_passes.enable(CONFIG)
        setattr(inductor_config, HOOK, mine)
        if compiles:
            call(torch.compile(unfused))
        fusion_passes.disable()
        assert getattr(inductor_config, HOOK) is mine


def test_ours_does_not_come_back_when_somebody_restores_the_hook():
    report = fusion_passes.enable(CONFIG)
    with inductor_config.patch({HOOK: Mine()}):
        fusion_passes.disable()
    call(torch.compile(unfused))
    assert report.graphs == ()
    assert getattr(inductor_config, HOOK) is None


def test_blocks_and_the_process_nest():
    outer, inner, process = Report(), Report(), Report()

    def compiled_into():
        torch.compiler.reset()
        before = [len(report.graphs) for report in (outer, inner, process)]
        call(torch.compile(unfused))
        after = [len(report.graphs) for report in (outer, inner, process)]
        return [name for name, a, b in zip(("outer", "inner", "process"), before, after, strict=True) if b > a]

    with fusion_passes.enabled(CONFIG, report=outer):
        fusion_passes.enable(CONFIG, report=process)
        try:
            with fusion_passes.enabled(CONFIG, report=inner):
                assert compiled_into() == ["inner"]
            assert compiled_into() == ["outer"]
        except BaseException:
            fusion_passes.disable()
            raise
    try:
        assert compiled_into() == ["process"], "it was switched on in the block, until disable"
    finally:
        fusion_passes.disable()
    assert compiled_into() == []
    assert getattr(inductor_config, HOOK) is None


def test_an_explicit_compile_in_a_block_is_its_own(caplog):
    report, own = Report(), Report()
    with fusion_passes.enabled(CONFIG, report=report):
        call(fusion_passes.compile(unfused, PassConfig(level="O0"), report=own))
    assert (len(report.graphs), len(own.graphs)) == (0, 1)
    assert "did not run" not in caplog.text
    assert "an explicit compile or an inner block goes before" in report.why_not("relu_squared")


def test_options_of_hidden_code_that_replace_ours_are_a_warning(caplog):
    mine = Mine()
    with fusion_passes.enabled(CONFIG) as report:
        call(torch.compile(unfused, options={HOOK: mine}))
        assert "code was compiled where the passes are switched on, and they did not run" in caplog.text
        caplog.clear()
        torch.compiler.reset()
        call(torch.compile(unfused, backend="eager"))
        call(torch.compile(lambda x: unfused(x) + 1))
    assert not caplog.text
    assert (len(mine.seen), len(report.graphs)) == (1, 1)


def test_enable_reaches_every_thread_and_disable_leaves_none():
    """From torch 2.13 each thread has its own settings of Inductor."""
    report = fusion_passes.enable(CONFIG)
    seen = []

    def work():
        torch.compiler.reset()
        call(torch.compile(unfused))
        seen.append(len(report.graphs))

    try:
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            fusion_passes.disable()
    finally:
        fusion_passes.disable()
    assert seen == [1, 1]


def test_options_of_options_are_one_pass():
    first, report = Report(), Report()
    options = fusion_passes.inductor_options(CONFIG, report=first)
    mine = Mine()
    with inductor_config.patch({HOOK: mine}):
        call(torch.compile(unfused, options=fusion_passes.inductor_options(CONFIG, options=options, report=report)))
    assert (len(mine.seen), len(first.graphs), len(report.graphs)) == (1, 0, 1)
