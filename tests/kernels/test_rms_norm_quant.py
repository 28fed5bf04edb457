"""The kernel of rms_norm_quant and rms_norm_group_quant against the fp32 reference.  On a card if there is one."""

import math

import pytest
import torch

from fusion_passes import reference
from fusion_passes.kernels import rms_norm_quant as kernels
from fusion_passes.quant import QuantSpec, choose_scale, quantize, saturate
from fusion_passes.quant import codes as ordered

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIES = 5e-3
"""Share of codes that two fp32 computations, which add squares in another order, may round to different sides."""
SHAPES = [(1, 8), (7, 96), (5, 4096), (3, 5120), (70, 128)]


def rows(tokens, size, dtype, *, gap=0):
    """Rows with a gap between them; the first is 0, so that eps counts."""
    x = (torch.randn(tokens, size + gap, device=DEVICE) * 3).to(dtype)[:, :size]
    x[0] = 0.0
    return x


def assert_near(got, want):
    assert got.dtype is want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    steps = (ordered(got) - ordered(want)).abs().masked_fill(want.isnan(), 0)
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) <= TIES


@pytest.mark.parametrize("weight", [None, BF16, FP32])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_by_a_scale(shape, fp8, weight):
    x = rows(*shape, BF16, gap=16)
    weight = None if weight is None else torch.randn(shape[1], device=DEVICE).to(weight)
    scale, out = torch.tensor([0.0371], device=DEVICE), torch.full(shape, math.nan, device=DEVICE).to(fp8)
    kernels.by_scale(x, weight, scale, out, eps=1e-5, weight_offset=1.0, factor=0.5, inverse=False)
    y = reference.rms_norm(x, weight, eps=1e-5, weight_offset=1.0)
    assert_near(out, quantize(y, scale.reshape(()) * 0.5, fp8))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("scaled", [True, False])
def test_by_a_scale_that_multiplies(scaled, dtype):
    x, weight = rows(6, 200, dtype), torch.randn(200, device=DEVICE)
    scale, out = torch.tensor(3.0, device=DEVICE) if scaled else None, torch.zeros(6, 200, device=DEVICE).to(E4M3)
    kernels.by_scale(x, weight, scale, out, eps=0.5, weight_offset=0.0, factor=40.0, inverse=True)
    y = reference.rms_norm(x, weight, eps=0.5)
    assert_near(out, saturate(y * (120.0 if scaled else 40.0), E4M3))


@pytest.mark.parametrize("bounds", [(torch.finfo(FP32).tiny, math.inf), (0.004, 0.006)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("shape", "group"),
    [((1, 8), 8), ((7, 96), 96), ((7, 96), 32), ((3, 5120), 5120), ((3, 5120), 128), ((70, 128), 128), ((9, 384), 128)],
)
def test_by_group(shape, group, dtype, bounds):
    """A scale per token, and of groups of 128; a row of zeros has the smallest scale."""
    x, weight = rows(*shape, dtype, gap=8), torch.randn(shape[1], device=DEVICE).to(dtype)
    out = torch.full(shape, math.nan, device=DEVICE).to(E4M3)
    scales = torch.full((shape[0], shape[1] // group), math.nan, device=DEVICE)
    kernels.by_group(
        *(x, weight, group, out, scales),
        eps=1e-6,
        weight_offset=0.0,
        smallest_scale=bounds[0],
        largest_scale=bounds[1],
    )
    y = reference.rms_norm(x, weight, eps=1e-6)
    want = choose_scale(y, QuantSpec(E4M3, "group", group, static=False), bounds[0]).clamp_max(bounds[1])
    torch.testing.assert_close(scales, want, rtol=1e-5, atol=0.0)
    assert_near(out, quantize(y, want, E4M3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spreads_in_its_row_alone(bad):
    x, weight = rows(4, 256, BF16), torch.ones(256, device=DEVICE)
    x[2, 130] = bad
    out, scales = torch.zeros(4, 256, device=DEVICE).to(E4M3), torch.zeros(4, 2, device=DEVICE)
    options = {"eps": 1e-6, "weight_offset": 0.0}
    kernels.by_group(x, weight, 128, out, scales, smallest_scale=1e-30, largest_scale=math.inf, **options)
    y = reference.rms_norm(x, weight, eps=1e-6)
    want = choose_scale(y, QuantSpec(E4M3, "group", 128, static=False), 1e-30)
    torch.testing.assert_close(scales, want, rtol=1e-5, atol=0.0, equal_nan=True)
    assert scales[[0, 1, 3]].isfinite().all()
    assert scales[2].isnan().any()
    assert_near(out, quantize(y, want, E4M3))
    kernels.by_scale(x, weight, None, out, factor=0.01, inverse=False, **options)
    assert_near(out, quantize(y, 0.01, E4M3))
