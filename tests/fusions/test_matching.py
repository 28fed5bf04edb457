"""Where a rule applies and where not: decided per place, told with the reason; what is not fused is left alone."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import get_code

import fusion_passes
from fusion_passes import MatchStatus, PassConfig, PostGradPassManager, Report
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.idioms import recognize
from fusion_passes.testing import capture, capture_cuda, print_graph, run
from tests.fusions.accuracy import check
from tests.fusions.attention_quant_cases import divide
from tests.fusions.captured import cuda_graph_of, graph_of
from tests.fusions.cases import CASES, FAMILIES, FIRST, declined, each, fused, op_of, place_that_is_refused
from tests.fusions.without_code import FUSE, STOCK, WithoutCode

CUDA_BACKENDS = ("cudnn", "flash", "efficient", "math")


@pytest.mark.parametrize("rule", [rule.name for rule in FUSIONS])
def test_every_rule_has_cases(rule):
    cases = CASES.get(rule, ())
    applies = [case for case in cases if case.fuses]
    assert len({case.name for case in cases}) == len(cases), "two cases of one name"
    for kind, families in FAMILIES[rule].items():
        found = {case.family for case in applies if case.kind == kind}
        assert found == families, f"{kind}: a way to spell the quantization is missing, or not in the table"
    assert any(case.place for case in cases), "no case with a place that is refused"
    assert any(case.dynamic for case in applies), "no case with a dynamic size"
    assert any(case.strided for case in applies), "no case with strided inputs"
    assert any(case.scales for case in applies), "no case with a live scale"
    assert all(case.reference for case in applies), "a case that fuses needs its fp32 reference"
    assert any(not case.fuses for case in cases), "no case that must not fuse"
    assert all(case.reason for case in cases if not case.fuses), "a case that must not fuse needs the reason"


def rewrite(graph, config=FUSE):
    report = Report()
    PostGradPassManager(config, report)(graph)
    return report


def why_not(report, rule):
    return "\n".join(report.declined(rule))


def outputs_of(graph):
    torch.manual_seed(0)
    return torch.utils._pytree.tree_leaves(run(graph))


def bits(x):
    return x.contiguous().view(-1).view(torch.uint8)


@fused
def test_applies_once(rule, case):
    graph = graph_of(case)
    report = rewrite(graph)
    assert [site.status for site in report.sites if site.rule == rule] == [MatchStatus.FUSED], report
    assert op_of(rule, case) in print_graph(graph)
    graph.lint()
    before = print_graph(graph)
    assert rewrite(graph).count() == 0, "what is fused is fused again"
    assert print_graph(graph) == before


@declined
def test_what_must_not_fuse_is_bit_for_bit_the_stock_graph(rule, case):
    graph = graph_of(case)
    before, values = print_graph(graph), outputs_of(graph)
    report = rewrite(graph)
    assert report.count(rule=rule) == 0
    assert print_graph(graph) == before
    for x, y in zip(values, outputs_of(graph), strict=True):
        assert torch.equal(bits(x), bits(y))
    assert re.search(case.reason, why_not(report, rule)), why_not(report, rule)
    assert "the rule failed" not in why_not(report, rule)


@fused
def test_the_settings_decide(rule, case):
    """Nothing below the rule's level, when switched off, or without profit: the CPU has no faster kernel."""
    graph = graph_of(case)
    before = print_graph(graph)
    assert rewrite(graph, PassConfig(level="O0", profitability="ignore")).sites == ()
    assert rewrite(graph, PassConfig(**{rule: "off"}, profitability="ignore")).sites == ()
    assert [site.status for site in rewrite(graph, PassConfig()).sites] == [MatchStatus.UNPROFITABLE]
    assert print_graph(graph) == before


@each(lambda case: case.cuda and not case.effect and "dropout" not in case.name)
@torch.no_grad()
def test_the_same_on_cuda(rule, case, hopper):
    """Every attention backend of CUDA, on fake tensors; a case without that backend is none of its business.  The ops
    of flash and efficient are read like that of cudnn: one case of each kind is enough for these."""
    for backend in CUDA_BACKENDS if case in FIRST or case.strided else ("cudnn", "math"):
        if backend == "math" and torch.__version__ < "2.12":
            continue  # its rounding to bf16 is optimised away before a cast: an attention in fp32, without a kernel
        if (graph := cuda_graph_of(case, backend)) is None:
            continue
        before = print_graph(graph)
        report = rewrite(graph)
        if case.fuses:
            assert report.count(rule=rule) == 1, f"{backend}: {report}\n{before}"
            graph.lint()
        else:
            assert report.count(rule=rule) == 0
            assert print_graph(graph) == before


@each(lambda case: case.fuses and case.cuda and not case.effect)
@torch.no_grad()
def test_profit_is_judged_without_a_failure(rule, case, hopper, caplog):
    """What nobody measured is declined with its sentence, not with an exception of the rule."""
    with caplog.at_level("WARNING", "fusion_passes"):
        report = rewrite(cuda_graph_of(case, "cudnn"), PassConfig())
    sites = [site for site in report.sites if site.rule == rule]
    assert sites, report
    assert all(site.status in (MatchStatus.FUSED, MatchStatus.UNPROFITABLE) for site in sites), report
    assert "a rule failed" not in caplog.text, caplog.text


@pytest.mark.parametrize("rule", FUSIONS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("method", ["pattern", "legality", "replacement", "describe", "explain"])
def test_an_exception_in_a_rule_is_no_match_with_its_text(rule, method, monkeypatch):
    """Never an aborted compilation; the graph is as it was, also where nodes had been added."""
    case = next(case for case in CASES[rule.name] if case.fuses)
    if method == "explain":
        case = next(case for case in CASES[rule.name] if not case.fuses and not case.place)
    graph = graph_of(case)
    before = print_graph(graph)
    original = getattr(type(rule), method)

    def broken(self, *args):
        if method == "replacement":
            original(self, *args)
        raise ValueError("broken on purpose")

    monkeypatch.setattr(type(rule), method, broken)
    monkeypatch.setattr("fusion_passes.compiler.manager.log.warning", lambda *_, **__: None)
    report = rewrite(graph)
    if method in ("pattern", "legality", "replacement"):
        assert [site.status for site in report.sites] == [MatchStatus.ILLEGAL]
        assert "ValueError: broken on purpose" in report.sites[0].reason
    if method != "describe":
        assert print_graph(graph) == before
    else:
        assert report.count() == 1


@pytest.mark.parametrize("rule", FUSIONS, ids=lambda rule: rule.name)
def test_asked_for_by_name_and_applied_nowhere_is_a_warning_with_the_reason(rule, caplog):
    config = PassConfig(**{rule.name: "on"}, profitability="ignore")
    for case in (case for case in CASES[rule.name] if case.place):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fusion_passes"):
            rewrite(graph_of(case), config)
        assert f"{rule.name} was asked for and applied nowhere" in caplog.text
        assert re.search(case.reason, caplog.text)


@pytest.mark.parametrize("rule", FUSIONS, ids=lambda rule: rule.name)
def test_two_places_are_decided_one_by_one(rule):
    """Two models of different geometry in one graph: each place has its own verdict, in any order."""
    good = next(case for case in CASES[rule.name] if case.fuses)
    bad = place_that_is_refused(rule.name)
    for first, second in ((good, bad), (bad, good)):
        inputs = (*first.inputs(5, "cpu"), *second.inputs(9, "cpu"))
        split = len(first.inputs(5, "cpu"))

        def both(*tensors, first=first, second=second, split=split):
            return first.fn(*tensors[:split]), second.fn(*tensors[split:])

        with torch.no_grad():
            (graph,) = capture(both, *inputs)
        report = rewrite(graph)
        assert sorted(site.status for site in report.sites) == ["fused", "illegal"]


@pytest.mark.parametrize("rule", FUSIONS, ids=lambda rule: rule.name)
def test_all_places_of_a_graph_fuse(rule):
    """Cases of different geometry side by side, all in one graph."""
    cases = [case for case in CASES[rule.name] if case.fuses]
    operands = [case.inputs(tokens, "cpu") for case, tokens in zip(cases, range(3, 3 + len(cases)), strict=True)]

    def all_of_them(operands):
        return [case.fn(*tensors) for case, tensors in zip(cases, operands, strict=True)]

    with torch.no_grad():
        (graph,) = capture(all_of_them, operands)
    report = rewrite(graph)
    assert report.count(rule=rule.name) == len(cases), report


@torch.no_grad()
def test_layers_of_which_one_has_an_unsupported_head_size(hopper):
    """64 has a kernel and 72 has none."""

    def layers(x64, x72, scale):
        return [
            (F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2).float() / scale)
            .clamp(-448.0, 448.0)
            .to(torch.float8_e4m3fn)
            for x in (x64, x72, x64 * 2.0)
        ]

    inputs = (torch.randn(1, 2, 16, size).bfloat16() for size in (64, 72))
    graph = capture_cuda(layers, *inputs, torch.tensor(0.37), backend="flash")
    report = rewrite(graph)
    assert report.count() == 2
    assert "has no head size 72, only 64, 80" in why_not(report, "attention_quant")


@each(lambda case: case.fuses)
def test_a_place_is_found_once_by_one_rule(rule, case):
    """No rule finds a place twice, and none shadows another: whatever is switched off, the rest is found alike."""
    graph = graph_of(case)
    idioms = recognize(graph)
    found = {r.name: [m.output for m in r.pattern(idioms)] for r in FUSIONS}
    everywhere = [node for nodes in found.values() for node in nodes]
    assert found[rule], "the case has no place for its rule"
    assert len(set(everywhere)) == len(everywhere)


@torch.no_grad()
def test_two_models_of_other_geometry_in_one_process():
    """One after the other and again, with one set of rules: nothing of the first is taken for the second."""
    runs = {rule: [WithoutCode(CASES[rule.name][0].fn) for _ in range(2)] for rule in FUSIONS}
    for rule, pair in runs.items():
        case = CASES[rule.name][0]
        for run_of, tokens in zip(pair, (7, 33), strict=True):
            for _ in range(2):
                inputs = case.inputs(tokens, "cpu")
                check(run_of(*inputs), case.fn(*inputs), case.reference(*inputs))
    assert {run_of.report.count() for pair in runs.values() for run_of in pair} == {1}


@pytest.mark.parametrize("rule", FUSIONS, ids=lambda rule: rule.name)
def test_a_declined_program_compiles_to_the_stock_code(rule):
    """Character by character, but for the number of the compilation."""
    cases = (case for case in CASES[rule.name] if not case.fuses)
    case, inputs = next((c, x) for c in cases if isinstance(c.fn(*(x := c.inputs(7, "cpu"))), torch.Tensor))
    with torch.no_grad():
        codes = []
        for compiled in (torch.compile(case.fn), fusion_passes.compile(case.fn, FUSE)):
            torch.compiler.reset()
            codes.append([re.sub(r"AOT ID: .*", "", code) for code in get_code(compiled, *inputs)])
    assert codes[0]
    assert codes[0] == codes[1]


def grouped_bias(q, k, v, bias, s):
    """The mask has a batch of its own: groups of heads, behind a reshape of the scores."""
    batch, heads, length, _ = q.shape
    scores = (q @ k.mT * 0.125).view(batch, 2, heads // 2, length, length) + bias
    out = torch.softmax(scores.view(batch, heads, length, length).float(), -1).to(q.dtype) @ v
    return (out.transpose(1, 2).flatten(2) / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def mask_twice(q, k, v, bias, s):
    scores = q @ k.mT * 0.125 + bias + bias
    out = torch.softmax(scores.float(), -1).to(q.dtype) @ v
    return (out / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def narrow_positions(q, k, v, bias, s):
    """uint8 differences wrap around: only the diagonal is <= 0."""
    i = torch.arange(q.shape[2], dtype=torch.uint8)
    mask = (i[None] - i[:, None]) <= 0
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return (out / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def no_keepdim(q, k, v, bias, s):
    scores = (q @ k.mT * 0.125).float()
    exponential = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = (exponential / exponential.sum(-1)).to(q.dtype) @ v
    return (out / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("fn", [grouped_bias, mask_twice, narrow_positions, no_keepdim])
@torch.no_grad()
def test_what_looks_like_attention_and_is_another_is_as_stock_has_it(fn):
    """Each was read wrongly once."""
    batch, heads = (1, 1) if fn is no_keepdim else (2, 4)
    q, k, v = torch.randn(3, batch, heads, 16, 64).bfloat16().unbind()
    bias = torch.randn(2, 1, 16, 16) if fn is grouped_bias else torch.randn(16, 16)
    inputs = q, k, v, bias.bfloat16(), torch.tensor(0.02)
    ours, stock = WithoutCode(fn), WithoutCode(fn, STOCK)
    exact = fn(*(x.float() for x in inputs[:4]), inputs[4]).float()
    got, want = ours(*inputs).float(), stock(*inputs).float()
    assert (got - exact).abs().mean() <= 1.5 * (want - exact).abs().mean() + 0.05


def test_a_place_whose_input_another_fusion_made():
    """Found before anything was rewritten, so its match still names the old node."""
    from fusion_passes import TracedRule

    rule = TracedRule(
        name="silu_mul",
        search=lambda x, y: torch.nn.functional.silu(x) * y,
        replace=lambda x, y: torch.ops.fusion_passes_tests.silu_mul(x, y),
        example_inputs=tuple(torch.empty(2, 4, 8).unbind()),
    )

    def chain(x, a, b, c):
        for y in (a, b, c):
            x = torch.nn.functional.silu(x) * y
        return x

    run = WithoutCode(chain, PassConfig(extra_fusions=(rule,)))
    inputs = torch.randn(4, 4, 8).unbind()
    torch.testing.assert_close(run(*inputs), chain(*inputs))
    assert run.after[0].count("fusion_passes_tests.silu_mul") == 3 == run.report.count(rule="silu_mul")


@torch.library.custom_op("fusion_passes_tests::silu_mul", mutates_args=())
def silu_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * y


silu_mul.register_fake(lambda x, y: torch.empty_like(x))


def test_a_near_miss_beside_a_place_that_fuses_is_told():
    """A model with two kinds of layers: one of them has a soft cap."""

    def two_layers(q, s):
        first = F.scaled_dot_product_attention(q, q, q)
        scores = torch.tanh(q @ q.mT * 0.125 / 30.0) * 30.0
        second = torch.softmax(scores.float(), -1).to(q.dtype) @ q
        return [(x / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn) for x in (first, second)]

    with torch.no_grad():
        run = WithoutCode(two_layers)
        run(torch.randn(1, 2, 16, 64).bfloat16(), torch.tensor(0.02))
    assert run.report.count() == 1
    (miss,) = run.report.graphs[0].misses
    assert "the scores pass through aten.mul" in miss.reason or "aten.tanh" in miss.reason


def test_a_value_with_another_head_size_is_declined_in_a_sentence():
    def other_value(q, v, s):
        out = F.scaled_dot_product_attention(q, q, v)
        return (out / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    with torch.no_grad():
        run = WithoutCode(other_value)
        run(torch.randn(1, 2, 16, 64).bfloat16(), torch.randn(1, 2, 16, 32).bfloat16(), torch.tensor(0.02))
    (site,) = run.report.sites
    assert site.reason == "key [1, 2, 16, 64] and value [1, 2, 16, 32] have different shapes"


@torch.no_grad()
def test_a_rounding_to_another_fp8_dtype_on_the_way_is_declined():
    """The fused op rounds once; the graph's codes are e5m2 numbers."""
    q, k, v = torch.randn(3, 1, 2, 16, 64).bfloat16().unbind()

    def fn(q, k, v, scale):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
        return (out / scale).to(torch.float8_e5m2).float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    run = WithoutCode(fn)
    codes = run(q, k, v, torch.tensor(0.02))
    assert run.fused == 0
    assert "rounds to float8_e5m2 before it quantizes" in "\n".join(run.report.declined("attention_quant"))
    assert torch.equal(codes.float(), codes.float().to(torch.float8_e5m2).float())


FIXED, GROUPS = "quantized, but not as the fused op does: ", "; the fused op takes one static scale"


def per_token(x, s):
    return (x / (x.abs().amax(-1, keepdim=True) / 448.0)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def per_group(x, s):
    groups = x.unflatten(-1, (-1, 32))
    return per_token(groups, s).flatten(-2)


def opaque(granularity):
    def quantize(x, s):
        return torch.ops.fusion_passes.quantize_fp8_dynamic(
            x.flatten(1), dtype=torch.float8_e4m3fn, granularity=granularity
        )[0]

    return quantize


@pytest.mark.parametrize(
    ("quantize", "scale", "reason"),
    [
        (per_token, (), f"quantized with dynamic per-token or per-group scales, one for each 128 elements{GROUPS}"),
        (per_group, (), f"quantized with dynamic per-token or per-group scales, one for each 32 elements{GROUPS}"),
        (opaque("token"), (), f"quantized with a dynamic scale per token{GROUPS}"),
        (divide, (2, 16, 1), f"{FIXED}scale has shape [2, 16, 1]: a per-token or per-group quantization, not a static"),
        (divide, (128,), f"{FIXED}scale has shape [128]: a per-channel quantization, not a static per-tensor one"),
        (divide, (1, 1, 128), f"{FIXED}scale has shape [1, 1, 128]: a per-channel quantization, not a static per-ten"),
        (
            lambda x, s: divide(x, x.abs().amax() / 448.0),
            (),
            f"{FIXED}the scale is computed in the graph from the tensor itself: a dynamic quantization",
        ),
        (lambda x, s: (x / s).round().clamp(-128, 127).to(torch.int8), (), "made int8; the fused op writes FP8 only"),
        (lambda x, s: x + s, (), "goes to aten.add.Tensor, not to a quantization"),
        (lambda x, s: silu_mul(x, x), (), "silu_mul.default: the formula of fusion_passes_tests.silu_mul is not known"),
    ],
)
def test_the_one_line_of_an_attention_says_what_its_output_is_instead(quantize, scale, reason):
    def attention(q, s):
        x = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 16, 128)
        return quantize(x.float(), s)

    with torch.no_grad():
        run = WithoutCode(attention)
        run(torch.randn(2, 2, 16, 64).bfloat16(), torch.rand(scale) + 0.1)
    (graph,) = run.report.graphs
    assert not graph.sites
    (miss,) = graph.misses
    assert miss.what == "attention_quant"
    assert reason in miss.reason
