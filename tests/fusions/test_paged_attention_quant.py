"""`attention_quant` over a KV cache: what holds for it alone, beside the tests that hold for every rule."""

import pytest
import torch

from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.fusions.paged_attention_quant import PagedGroupMatch, PagedMatch
from fusion_passes.quant import QuantSpec, choose_scale, codes, dequantize, quantize
from fusion_passes.testing import capture, capture_cuda, print_graph
from tests.fusions import paged_attention_quant_cases as cases
from tests.fusions import paged_cases as paged
from tests.fusions.without_code import FUSE, STOCK, WithoutCode

E4M3 = torch.float8_e4m3fn
GROUP = QuantSpec(E4M3, "group", 32, static=False)
RECORD = {
    "card": "a card",
    "capability": [9, 0],
    "rows": [
        {
            "kind": kind,
            "shape": {"tokens": tokens, "heads": 4, "head_dim": 64, "fp8_cache": False},
            "ratio": {"tensor": ratio, "group": 1.5, "opaque": ratio, "inside": 0.8},
        }
        for kind in ("output", "query")
        for tokens, ratio in ((8, 1.2), (64, 0.9))
    ],
}


def find(name):
    return next(case for case in cases.CASES if case.name == name)


def declined(case, tokens):
    report = Report()
    PostGradPassManager(PassConfig(), report)(capture_cuda(case.fn, *case.inputs(tokens, "cpu")))
    return [site.reason for site in report.sites if site.status != "fused"], report.count()


@pytest.fixture
def measured(monkeypatch):
    """A card was measured at 8 and 64 tokens."""
    monkeypatch.setattr("fusion_passes.measured.device_capability", lambda device: (9, 0))
    for module in ("paged_attention_quant", "query_quant"):
        monkeypatch.setattr(f"fusion_passes.measured.{module}.records", lambda name: (RECORD,))


def test_applied_where_it_was_measured_to_be_faster(measured):
    static, groups = find("paged: tokens x hidden"), find("groups: in the shape of groups")
    assert declined(static, 8) == ([], 1)
    assert declined(groups, 64) == ([], 1)
    reasons, fused = declined(static, 33)
    assert fused == 0
    assert "with FP8 output, scales per tensor, takes 1.11 times as long as stock torch.compile" in reasons[0]
    reasons, fused = declined(groups, 65)
    assert fused == 0
    assert "for 8 to 64 tokens, not for 65" in reasons[0]


@pytest.mark.parametrize("name", ["paged: FP8 query and cache", "paged: factor", "paged: inverse number"])
def test_a_scale_that_must_be_made_is_not_measured(name, measured):
    """The fused op divides by one tensor; an inverse, a factor or a number takes a kernel of its own."""
    reasons, fused = declined(find(name), 8)
    assert fused == 0
    assert "making one of the graph's takes a kernel: nobody measured that" in reasons[0]


@torch.no_grad()
def test_scales_are_made_on_the_device():
    """No number of the graph reaches the host, and none is taken from a tensor."""
    for name in ("paged: FP8 query and cache", "paged: factor", "paged: inverse number"):
        case = find(name)
        graph = capture_cuda(case.fn, *case.inputs(7, "cpu"))
        PostGradPassManager(FUSE, Report())(graph)
        text = print_graph(graph)
        assert not any(word in text for word in ("item", "_local_scalar", "device=cpu"))


@torch.no_grad()
def test_layers_of_which_one_has_heads_that_the_groups_do_not_divide():
    """Decided layer by layer."""

    def layers(wide, narrow, *rest):
        first, second = rest[:5], rest[5:]
        outputs = []
        for query, batch in ((wide, first), (narrow, second), (wide * 2.0, first)):
            out = paged.attend(query, *batch).flatten(1)
            outputs.append(cases.in_groups(out, 48))
        return outputs

    batch = paged.batch(7, "cpu")
    tensors = []
    for head_dim in (96, 64):
        shape = (2 * paged.COLUMNS, 2, paged.PAGE, head_dim)
        tensors += [*(torch.randn(shape).bfloat16() for _ in range(2)), *batch]
    queries = (torch.randn(7, 6, head_dim).bfloat16() for head_dim in (96, 64))
    run = WithoutCode(layers)
    run(*queries, *tensors)
    assert run.report.count(rule="attention_quant") == 2
    assert "groups of 48 do not divide a head of 64" in "\n".join(run.report.declined("attention_quant"))


@torch.no_grad()
def test_scales_that_are_used_before_the_codes_are_made():
    """The fused op makes both at once, so what reads the scales comes behind it."""

    def fn(*tensors):
        out = paged.attend(*tensors).flatten(1)
        scales = choose_scale(out, GROUP)
        largest = scales.amax()
        return quantize(out, scales), largest, scales * 2.0

    case = find("groups: in the shape of groups")
    inputs = case.inputs(7, "cpu")
    ours, stock = WithoutCode(fn), WithoutCode(fn, STOCK)
    (codes, largest, doubled), want = ours(*inputs), stock(*inputs)
    assert ours.fused == 1
    assert largest == (doubled / 2.0).max()
    torch.testing.assert_close(doubled, want[2], rtol=2**-8, atol=0.0)
    assert codes.dtype is E4M3


@torch.no_grad()
def test_values_per_group_are_as_close_to_fp32_as_those_of_the_stock_graph():
    """The fused op chooses its scales from the fp32 attention, the graph from what was rounded to bf16."""
    case = find("groups: scales repeated")
    inputs = case.inputs(67, "cpu")
    arguments, _ = cases.split(inputs, output=False)
    exact = paged.exact(*arguments).flatten(1)
    errors = []
    for config in (FUSE, STOCK):
        codes, scales = WithoutCode(case.fn, config)(*inputs)
        errors.append((dequantize(codes, scales) - exact).square().mean())
    assert errors[0] <= errors[1]


LEAST_MAGNITUDE = dict(zip(cases.BOUNDED, (1e-4, 2.0**-13, 1.0 / 512.0, 1e-4, 1e-12, 0.0), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", cases.BOUNDED)
@torch.no_grad()
def test_groups_that_the_lower_bound_decides(name, dtype):
    """Zeros, magnitudes below the bound, a NaN and an infinity, each in groups of their own: as in the graph."""
    case, least = find(f"groups: {name}"), LEAST_MAGNITUDE[name]
    query, key, value, table, start, lengths = cases.inputs(query=dtype, output=False)(7, "cpu")
    value[:, 0] *= least / 10
    pages = table[:, 0].long()
    value[pages[0], 1, 0, 40], value[pages[1], 1, 0, 3] = torch.inf, torch.nan
    start[-1] -= 1
    lengths[-1] -= 1
    ours, stock = WithoutCode(case.fn), WithoutCode(case.fn, STOCK)
    (out, scales), (want, want_scales) = (run(query, key, value, table, start, lengths) for run in (ours, stock))
    assert ours.fused == 1
    assert scales.stride() == want_scales.stride()
    torch.testing.assert_close(scales, want_scales, rtol=2.0**-8, atol=0.0, equal_nan=True)
    assert torch.equal(out.isnan(), want.isnan())
    off = (codes(out) - codes(want)).abs()
    assert (off > 0).float().mean() < 0.1
    scales, out, want, off = scales.reshape(7, 8), *(x.reshape(7, 8, 32) for x in (out, want, off))
    subnormal = 2.0**-24 if dtype is torch.float16 else 0.0  # the step to which the unfused attention is rounded
    error = (out.float() - want.float()).nan_to_num().abs() * scales.nan_to_num()[..., None]
    assert ((off <= 1) | (error <= subnormal)).all()
    small = torch.full((7, 8), False)
    small[:, :4] = True
    small[6] = True
    torch.testing.assert_close(scales[small], torch.full_like(scales[small], least / 448.0), rtol=3e-7, atol=0.0)
    assert out[6].isnan().all() == (least == 0.0)
    assert (scales[:4, [5, 7]] == torch.inf).all()
    assert scales[4:6, [4, 6]].isnan().all()
    assert (scales[:4, [4, 6]] > 1e-3).all()
    assert (scales[4:6, [5, 7]] > 1e-3).all()


@torch.no_grad()
def test_a_bound_that_is_no_number_like_others_in_the_dtype_of_the_magnitudes():
    """In fp16 1e-10 is 0, but not where Inductor keeps the digits of fp32: it would not be known what zeros give."""

    def fn(*tensors):
        groups = paged.attend(*tensors).unflatten(-1, (-1, 32))
        scales = groups.abs().amax(-1).clamp(min=1e-10)[..., None].float() / 448.0
        return (groups / scales).clamp(-448.0, 448.0).to(E4M3), scales

    fused = {}
    for dtype in (torch.bfloat16, torch.float16):
        run = WithoutCode(fn)
        run(*cases.inputs(query=dtype, output=False)(7, "cpu"))
        fused[dtype] = run.fused
    assert fused == {torch.bfloat16: 1, torch.float16: 0}
    assert "less than the smallest normal number of float16" in "\n".join(run.report.declined("attention_quant"))


@torch.no_grad()
def test_the_report_names_the_place():
    descriptions = {}
    for name in ("paged: FP8 query and cache", "groups: scales repeated"):
        case = find(name)
        run = WithoutCode(case.fn)
        run(*case.inputs(7, "cpu"))
        (site,) = run.report.sites
        descriptions[name] = site.what
        assert "paged_cases.py" in site.where
    assert descriptions == {
        "paged: FP8 query and cache": (
            "paged attention float8_e4m3fn [7, 4, 64], cache float8_e4m3fn -> float8_e4m3fn"
        ),
        "groups: scales repeated": (
            "paged attention float8_e4m3fn [7, 4, 64], cache float8_e4m3fn -> float8_e4m3fn in groups of 32"
        ),
    }


def test_the_kinds_of_match_are_told_apart():
    from fusion_passes.fusions.attention_quant import AttentionQuant
    from fusion_passes.idioms import recognize

    kinds = {"paged: tokens x hidden": PagedMatch, "groups: opaque": PagedGroupMatch}
    for name, kind in kinds.items():
        case = find(name)
        with torch.no_grad():
            (graph,) = capture(case.fn, *case.inputs(7, "cpu"))
        (match,) = AttentionQuant().pattern(recognize(graph))
        assert type(match) is kind
