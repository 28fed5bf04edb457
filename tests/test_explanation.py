"""`explain`: what it finds out, what it says, and that it leaves everything as it was."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_passes
from fusion_passes import PassConfig
from fusion_passes.compiler.inductor import HOOK
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.tools.compare import compare
from fusion_passes.tools.explain import Accuracy
from fusion_passes.tools.places import merged_names, shorten_path, split_place
from tests.models.attention_fp8_static_quant import AttentionFp8StaticQuantPatternModel
from tests.traced_rules import CALLS, relu_squared_rule, unfused

FP8 = torch.float8_e4m3fn
TRACED = PassConfig(extra_fusions=(relu_squared_rule(),))
X = torch.randn(4, 8)


def explain(model, *args, **options):
    return fusion_passes.explain(model, *args, samples=1, progress=False, **options)


@pytest.fixture(scope="module")
def attention():
    return AttentionFp8StaticQuantPatternModel(2, 1, 64)


@pytest.fixture(scope="module")
def fused(attention):
    inputs = attention.example_inputs(1, 32)
    return explain(
        attention, *inputs, kwargs={"return_codes": True}, config=PassConfig(profitability="ignore", debug_dir=None)
    )


def the_outcome(explanation, fusion="attention_quant"):
    return next(outcome for outcome in explanation.outcomes if outcome.fusion == fusion)


def test_every_fusion_has_an_outcome(fused):
    assert [outcome.fusion for outcome in fused.outcomes] == [rule.name for rule in FUSIONS]


def test_outcome_of_a_fusion(fused):
    outcome = the_outcome(fused)
    assert (outcome.fusion, outcome.fused, outcome.places) == ("attention_quant", 1, 1)
    assert not outcome.misses
    assert not fused.unmet
    assert fused.report.count() == 1


def test_numbers(fused):
    output, codes = fused.accuracy.fused_and_stock
    assert output.output == "[0]"
    assert 0 < output.relative_l2 < 0.1
    assert codes.max_steps is not None
    assert 0 < codes.share < 0.2
    assert all(d.equal for d in fused.accuracy.fused_and_fp32), "the CPU op is the fp32 reference"
    assert fused.accuracy.deterministic
    assert fused.timing.speedup == fused.timing.stock / fused.timing.fused > 0
    assert {*fused.pass_seconds} == {"recognise", "fuse", "clean"}
    assert sum(fused.pass_seconds.values()) < fused.fused.seconds
    assert fused.stock.graphs == fused.fused.graphs == 1


def test_page(fused):
    page = str(fused)
    told = re.sub(" +", " ", page)
    assert max(map(len, page.split("\n"))) <= 120
    assert page.startswith(f"AttentionFp8StaticQuantPatternModel on cpu, torch {torch.__version__}\n\nFUSIONS\n")
    for text in (
        "attention_quant fused at 1 of 1 place\n",
        "1x fused attention_quant attention bfloat16 [1, 2, 32, 64]",
        "at tests/models/attention_fp8_static_quant.py:",
        "of the FP8 codes differ, by at most ",
        "times as fast (wall clock, median of ",
        "of the first call with compilation",
    ):
        assert text in told


def test_json(fused):
    data = json.loads(fused.to_json())
    assert data["fusions"]["attention_quant"]["statuses"] == {"fused": 1}
    assert data["graphs"][0]["sites"][0]["status"] == "fused"
    assert data["config"]["profitability"] == "ignore"
    assert data["accuracy"]["fused_and_stock"][1]["dtype"] == "float8_e4m3fn"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_unprofitable_is_said_plainly_and_required_is_unmet(attention):
    result = explain(attention, *attention.example_inputs(1, 32), config=PassConfig(attention_quant="required"))
    assert result.unmet == ("attention_quant",)
    page = str(result)
    assert "fused at 0 of 1 place (1 unprofitable), and it is required" in page
    assert 'To see the rewritten graph anyway: profitability="ignore"' in " ".join(page.split())
    assert "because the fused op has no faster kernel on the CPU" in page
    assert all(d.equal for d in result.accuracy.fused_and_stock)
    assert "equal in every element" in page


def test_near_miss():
    def attention_only(q):
        return F.scaled_dot_product_attention(q, q, q)

    result = explain(attention_only, torch.randn(1, 2, 16, 64), config=PassConfig())
    outcome = the_outcome(result)
    assert outcome.places == 0
    assert outcome.misses
    assert "the attention's output goes to" in outcome.misses[0].reason
    page = str(result)
    assert "no place for it in this model" in page
    assert "NEAR MISSES" in page
    assert "test_explanation.py:" in page


def test_switched_off():
    result = explain(torch.neg, X, config=PassConfig(attention_quant="off"))
    assert str(the_outcome(result)) == "switched off"


def test_random_model_is_called_random():
    dropout = nn.Dropout(0.5)
    before = torch.get_rng_state()
    result = explain(dropout, X)
    assert not result.accuracy.deterministic
    assert "dropout without model.eval()" in str(result)
    assert torch.equal(before, torch.get_rng_state())


class Stateful(nn.Module):
    """Writes to its buffer and to its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        x += 1
        return unfused(x) * self.count


def test_no_run_sees_what_another_left_behind():
    CALLS.clear()
    model, x = Stateful(), X.clone()
    result = explain(model, x, config=TRACED)
    assert CALLS, "the fused op did not run"
    assert all(d.equal for d in (*result.accuracy.fused_and_stock, *result.accuracy.stock_and_itself))
    assert all(d.equal for d in result.accuracy.fused_and_fp32)
    assert model.count == 0
    assert torch.equal(x, X)


def test_global_passes_do_not_reach_the_stock_model(caplog):
    CALLS.clear()
    with fusion_passes.enabled(TRACED):
        hook = getattr(torch._inductor.config, HOOK)
        explain(unfused, X, config=PassConfig())
        assert getattr(torch._inductor.config, HOOK) is hook
    assert not CALLS
    assert "did not run" not in caplog.text


def test_graph_breaks_and_a_compiled_model_and_torch_compile_options():
    def broken(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    result = explain(torch.compile(broken), X, dynamic=False, options={"epilogue_fusion": False})
    assert (result.fused.graphs, result.fused.graph_breaks) == (2, 1)
    assert "graphs    2, 1 graph break" in str(result)


def test_why_there_is_no_fp32():
    weight = torch.randn(8, 8, dtype=torch.bfloat16)
    result = explain(lambda x: x @ weight, X.bfloat16())
    assert result.accuracy.fused_and_fp32 == ()
    assert "Not compared with fp32: the model does not run in fp32 (RuntimeError: " in str(result)


def test_an_error_says_which_run_it_comes_from():
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        explain(lambda x: x + torch.ones(3), X)
    assert caught.value.__notes__ == ["while running with no compiler, as plain Python"]

    def only_eager(x):
        if torch.compiler.is_compiling():
            raise RuntimeError("not compiled")
        return x

    with pytest.raises(RuntimeError) as caught:
        explain(only_eager, X, fullgraph=True)
    assert caught.value.__notes__ == ["while running with stock torch.compile, without any pass"]


def test_progress_goes_to_stderr(capsys):
    fusion_passes.explain(torch.neg, X, samples=1)
    out, err = capsys.readouterr()
    assert not out
    steps = [
        "running eagerly",
        "compiling with stock torch.compile",
        "compiling with the passes",
        "comparing outputs",
        "timing",
    ]
    assert [line.split("] ")[1] for line in err.splitlines() if line.startswith("[")] == [f"{s} …" for s in steps]


def test_compare_numbers():
    (d,) = compare(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([1.0, 2.5, torch.nan]))
    assert (d.output, d.max_abs, d.share, d.non_finite) == ("output", 0.5, 1 / 3, 0)
    assert d.relative_l2 == pytest.approx(0.5 / 7.25**0.5)
    (d,) = compare(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 2.0]))
    assert (d.max_abs, d.non_finite, str(d)) == (
        0.0,
        1,
        "max abs 0, relative L2 0, 1 infinite or NaN on one side only",
    )


def test_compare_codes():
    a = torch.tensor([1.0, 2.0, -448.0, 0.0]).to(FP8)
    b = torch.tensor([1.125, 2.0, -416.0, torch.nan]).to(FP8)
    (d,) = compare(a, b)
    assert (d.share, d.max_steps, d.non_finite, d.max_abs) == (0.75, 1, 1, None)
    assert str(d) == "75.000% of the FP8 codes differ, by at most 1 step, 1 infinite or NaN on one side only"


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (torch.ones(2), torch.ones(3), "shapes differ: [2] and [3]"),
        (torch.ones(2, dtype=FP8), torch.ones(2), "dtypes differ: torch.float8_e4m3fn and torch.float32"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "50.000% of the elements differ"),
        (torch.ones(0), torch.ones(0), "equal in every element"),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2), "equal in every element"),
        ([torch.ones(2)], [], "only one of the two runs has this output"),
    ],
)
def test_compare_says(a, b, told):
    assert [str(d) for d in compare(a, b)] == [told]


def test_outputs_in_containers_have_names():
    nested = {"logits": X, "cache": [(X, X)], "text": "no tensor"}
    assert {d.output for d in compare(nested, nested)} == {"['logits']", "['cache'][0][0]", "['cache'][0][1]"}


def test_deterministic_is_about_stock_alone():
    different = compare(X, X + 1)
    assert Accuracy(fused_and_stock=different, stock_and_itself=compare(X, X)).deterministic


def test_paths_are_short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert shorten_path(f"{tmp_path}/model.py:3: x = y") == "model.py:3: x = y"
    assert shorten_path("/v/lib/site-packages/transformers/a.py:1: x") == "transformers/a.py:1: x"
    assert shorten_path("/elsewhere/model.py:3: x") == "/elsewhere/model.py:3: x"
    assert shorten_path("getitem") == "getitem"


def test_places_have_a_module_and_a_line():
    assert split_place("layers.0.attn, a.py:1: f(x, y)") == ("layers.0.attn", "a.py:1: f(x, y)")
    assert split_place("/a b.py:1: f(x, y)") == ("", "/a b.py:1: f(x, y)")
    assert split_place("getitem") == ("", "getitem")


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["attn"], "attn"),
        (["layers.7.attn2"], "layers.7.attn2"),
        ([f"layers.{n}.attn2" for n in (0, 1, 2, 10, 5)], "layers.[0-2,5,10].attn2"),
        (["a.0.b.1", "a.1.b.0"], "a.*.b.*"),
        (["attn", "attn"], "attn"),
    ],
)
def test_names_of_layers_are_merged(names, merged):
    assert merged_names(names) == merged


def test_layers_share_a_row():
    class Layer(nn.Module):
        def forward(self, x):
            return unfused(x)

    page = str(explain(nn.Sequential(Layer(), Layer(), Layer()), X, config=TRACED))
    assert "3x  fused   relu_squared" in page
    assert "in [0-2]\n" in page
