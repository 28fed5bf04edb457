"""Dynamic FP8 quantization per group: every spelling, and what must not pass for one."""

import math

import pytest
import torch

from fusion_passes.idioms import recognize
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.spellings.group_quantize import SPELLINGS
from fusion_passes.ops.quantize_dynamic import quantize_fp8_dynamic
from fusion_passes.quant import QuantSpec
from fusion_passes.testing import capture, run, same_codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
TINY = torch.finfo(torch.float32).tiny


def the(graph):
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    (found,) = idioms.of(GroupQuantize)
    assert not list(idioms.of(Quantize))
    return found


def read(fn, *args, **options):
    (graph,) = capture(fn, *args, **options)
    return the(graph)


def miss(fn, *args):
    """The one sentence why there is no such quantization."""
    (graph,) = capture(fn, *args)
    idioms = recognize(graph)
    assert list(idioms.of(GroupQuantize)) == []
    (near_miss,) = idioms.near_misses
    return near_miss.reason


@pytest.fixture
def x():
    return torch.randn(6, 128, dtype=BF16) * 3


LEAST_MAGNITUDE = {
    "lower bound of the magnitude, no clamp": 1e-4,
    "lower bound of the magnitude, in its dtype": 2.0**-13,
    "lower bound of the scale, scales by columns": 1.0 / 512.0,
    "times the largest code over the magnitude": 1e-4,
    "by way of float64": 1e-12,
    "no lower bound": 0.0,
}
UNCLAMPED = ("lower bound of the magnitude, no clamp", "times the largest code over the magnitude")


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name, dtype, fp8):
    x = torch.randn(6, 128).mul(3).to(dtype)
    x[2, 32:64] = 0.0
    (graph,) = capture(lambda x: SPELLINGS[name](x, fp8), x)
    found = the(graph)
    assert (found.dtype, found.group_size, found.max_scale) == (fp8, 32, math.inf)
    limit = torch.finfo(fp8).max
    least = LEAST_MAGNITUDE[name] / limit if name in LEAST_MAGNITUDE else TINY
    assert found.min_scale == pytest.approx(least, rel=1e-6, abs=0.0)
    assert found.clamp == (None if name in UNCLAMPED else (-limit, limit))
    assert found.input.op == "placeholder"
    codes, scales = run(graph)
    want, want_scales = found.reference(x)
    assert same_codes(codes, want.reshape(codes.shape), max_steps=1) < 0.01
    torch.testing.assert_close(scales.flatten(), want_scales)
    assert found.scales is not None
    assert found.scales.meta["val"].shape.numel() == scales.numel()
    assert found.scales.meta["val"].dtype is torch.float32


def test_opaque_op(x):
    spec = QuantSpec(E4M3, "group", 32, static=False)
    found = read(lambda x: quantize_fp8_dynamic(x, spec), x)
    assert (found.opaque, found.group_size, found.min_scale) == ("fusion_passes.quantize_fp8_dynamic", 32, TINY)
    assert found.scales is not None
    assert read(lambda x: quantize_fp8_dynamic(x, spec, 0.25), x).max_scale == 0.25
    assert read(lambda x: quantize_fp8_dynamic(x, spec, None, 0.125), x).min_scale == 0.125
    assert read(lambda x: quantize_fp8_dynamic(x, spec)[0], x).scales is None
    (graph,) = capture(lambda x: quantize_fp8_dynamic(x, spec)[1], x)
    assert not list(recognize(graph).of(GroupQuantize))


def grouped(x, scales_of, group=32):
    groups = x.float().unflatten(-1, (-1, group))
    scales = scales_of(groups)
    return (groups / scales).clamp(-448.0, 448.0).to(E4M3), scales


def largest(groups):
    return groups.abs().amax(-1, keepdim=True)


def test_views_of_the_codes_are_recorded(x):
    found = read(lambda x: grouped(x.view(3, 2, 128), lambda g: (largest(g) / 448.0).clamp(min=TINY)), x)
    assert [view.meta["val"].shape for view in found.views][-1] == (3, 2, 4, 32)
    assert found.input.meta["val"].shape == (6, 128)


def test_magnitudes_that_are_quantized_themselves(x):
    found = read(lambda x: grouped(x.float().abs(), lambda g: (largest(g) / 448.0).clamp(min=TINY)), x)
    assert found.input.target is torch.ops.aten.abs.default


def test_bounds_of_the_scale(x):
    assert read(lambda x: grouped(x, lambda g: (largest(g) / 448.0).clamp(1e-9, 0.5)), x).max_scale == 0.5
    assert read(lambda x: grouped(x, lambda g: largest(g).clamp(min=0.448) / 448.0), x).min_scale == pytest.approx(1e-3)
    assert read(lambda x: grouped(x, lambda g: largest(g) / 448.0), x).min_scale == 0.0


def test_the_lower_bound_is_the_one_that_the_graph_computes(x):
    """Rounded to fp32 step by step.  (Torch may divide by a number by multiplying with its reciprocal.)"""
    for scales_of in (
        lambda g: largest(g).clamp(min=1e-10) / 448.0,
        lambda g: largest(g).clamp(min=1e-10) * (1.0 / 448.0),
        lambda g: (largest(g).double().clamp(min=1e-10) / 448.0).float(),
        lambda g: (largest(g) / 448.0).clamp(min=1e-12),
        lambda g: (largest(g).clamp(min=1e-10) / 448.0).clamp(min=1e-13),
    ):
        found = read(lambda x, scales_of=scales_of: grouped(x, scales_of), x)
        _, scales = grouped(torch.zeros(1, 32), scales_of)
        assert found.min_scale == pytest.approx(float(scales), rel=2.0**-23, abs=0.0)


def test_the_largest_code_as_a_tensor_over_the_magnitude(x):
    def fn(x, code=448.0):
        groups = x.float().view(6, 4, 32)
        inverse = torch.full((6, 4, 1), code) / largest(groups).clamp(min=1e-4)
        return (groups * inverse).to(E4M3), inverse**-1

    found = read(fn, x)
    assert (found.inverse, found.min_scale) == (True, pytest.approx(1e-4 / 448.0))
    assert found.scales.target is torch.ops.aten.pow.Tensor_Scalar
    assert (
        miss(lambda x: fn(x, 224.0), x) == "the scales are the largest magnitude times 0.00446429, not divided by 448"
    )


def test_a_lower_bound_in_16_bits(x):
    def fn(x):
        groups = x.view(6, 4, 32)
        scales = groups.abs().amax(-1).clamp(min=1e-10)[..., None].float() / 448.0
        return (groups / scales).clamp(-448.0, 448.0).to(E4M3), scales

    assert read(fn, x).min_scale == pytest.approx(1e-10 / 448.0)
    reason = miss(fn, x.half())
    assert "lower bound of the magnitudes, 1e-10, is less than the smallest normal number of float16, 6.1" in reason
    assert "clamp them in float32" in reason


def test_the_node_that_holds_the_scales(x):
    """The one that the graph goes on with, on the way to the division or beside it."""

    def squeezed(x):
        groups = x.view(6, 4, 32)
        scales = (groups.abs().amax(-1, keepdim=True).float() / 448.0).squeeze(-1)
        return (groups / scales[..., None]).to(E4M3), scales.t()

    def beside(x, of=lambda magnitude: magnitude / 448.0):
        groups = x.view(6, 4, 32)
        magnitude = groups.abs().amax(-1, keepdim=True).float().clamp(min=1e-6)
        return (groups * (448.0 / magnitude)).to(E4M3), of(magnitude)

    assert read(squeezed, x).scales.meta["val"].shape == (6, 4)
    assert read(beside, x).scales.meta["val"].shape == (6, 4, 1)
    assert read(lambda x: beside(x, lambda magnitude: magnitude / 224.0), x).scales is None
    assert read(lambda x: beside(x)[0], x).scales is None


def test_dynamic_tokens(x):
    function = SPELLINGS["scales repeated over their groups"]
    found = read(lambda x: function(x, E4M3), x, mark_dynamic=((x, 0),))
    assert found.group_size == 32


NOT_READ = {
    "powers of two": (lambda g: (largest(g) / 448.0).clamp(min=TINY).log2().ceil().exp2(), "pass through aten.exp2"),
    "powers of two by pow": (lambda g: 2.0 ** (largest(g) / 448.0).log2().ceil(), "rounded to powers of two"),
    "a clamped reciprocal": (lambda g: 1.0 / (448.0 / largest(g)).clamp(max=1e6), "reciprocal of the scales passes"),
    "times a factor in bf16": (
        lambda g: (largest(g).to(BF16) / 448.0).squeeze(-1).float()[..., None],
        "which rounds them to bfloat16: choose them in float32",
    ),
    "half the range": (lambda g: largest(g) / 224.0, "times 0.00446429, not divided by 448"),
    # (The view keeps torch 2.11 from dropping the cast there and back.)
    "rounded to bf16": (lambda g: (largest(g) / 448.0).to(BF16).squeeze(-1).float()[..., None], "pass through"),
    "of the values": (lambda g: g.amax(-1, keepdim=True) / 448.0, "the largest element, not"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_scales_that_are_another(name, x):
    scales_of, reason = NOT_READ[name]
    assert reason in miss(lambda x: grouped(x, scales_of), x)


def test_what_is_no_quantization_per_group_is_left_to_the_reader_of_static_ones(x):
    per_tensor = "a dynamic quantization"
    assert per_tensor in miss(lambda x: (x / (x.abs().amax() / 448.0)).to(E4M3), x)
    other = torch.randn(6, 4, 1)
    reason = miss(lambda x, other: grouped(x, lambda g: other.abs().amax(-1, keepdim=True) / 448.0), x, other)
    assert "per-group" in reason


def test_a_quotient_or_scales_of_16_bits(x):
    def quotient(x):
        groups = x.view(6, 4, 32)
        scales = (groups.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=TINY)
        return (groups / scales).to(BF16).clamp(-448.0, 448.0).to(E4M3), scales

    assert miss(quotient, x) == "the quotient is rounded to bfloat16 before it is quantized"
    scales = miss(lambda x: (x / (x.abs().amax(-1, keepdim=True) / 448.0)).clamp(-448.0, 448.0).to(E4M3), x)
    assert "which rounds them to bfloat16: choose them in float32" in scales


def test_a_static_scale_of_a_vector_is_none_of_a_group():
    (graph,) = capture(lambda x, s: (x / s).clamp(-448.0, 448.0).to(E4M3), torch.randn(32), torch.tensor(0.3))
    idioms = recognize(graph)
    assert idioms.near_misses == []
    assert list(idioms.of(Quantize))


def test_an_order_that_is_not_kept_is_not_read(x):
    """The scale of a group of columns belongs to other elements than those that it divides."""

    def crossed(x):
        groups = x.float().view(6, 4, 32)
        scales = (groups.transpose(1, 2).reshape(6, 4, 32).abs().amax(-1, keepdim=True) / 448.0).clamp(min=TINY)
        return (groups / scales).to(E4M3), scales

    assert "per-group" in miss(crossed, x)
