"""rms_norm_quant and rms_norm_group_quant: against the parts in plain torch, compiled, without a kernel, refused."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.ops import rms_norm_group_quant, rms_norm_quant
from fusion_passes.quant import QuantSpec, choose_scale, codes, quantize

OP = torch.ops.fusion_passes.rms_norm_quant.default
GROUP_OP = torch.ops.fusion_passes.rms_norm_group_quant.default
MODULE = sys.modules[rms_norm_quant.__module__]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TIES = 5e-3
"""Share of codes that two computations in fp32 may round to different sides."""


def inputs(*shape, dtype=BF16, device="cpu"):
    shape = shape or (3, 5, 64)
    return (torch.randn(shape, device=device) * 2).to(dtype), torch.randn(shape[-1], device=device).to(dtype)


def norm(x, weight, offset=0.0):
    """By torch's own, in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float().reshape(-1) + offset, 1e-5)


def assert_near(got, want):
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    assert got.is_contiguous()
    steps = (codes(got) - codes(want)).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) <= TIES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_by_a_scale(fp8, dtype, device):
    x, weight = inputs(dtype=dtype, device=device)
    scale = torch.tensor([0.02], device=device)
    got = rms_norm_quant(x, weight, scale, eps=1e-5, weight_offset=1.0, scale_factor=0.5, dtype=fp8)
    assert_near(got, quantize(norm(x, weight, 1.0), 0.01, fp8))
    got = rms_norm_quant(x, None, scale.reciprocal(), eps=1e-5, scale_inverse=True, dtype=fp8)
    assert_near(got, quantize(norm(x, None), 0.02, fp8))
    assert_near(rms_norm_quant(x, weight[None], eps=1e-5, dtype=fp8), quantize(norm(x, weight), 1.0, fp8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, 32, 16])
def test_by_group(size, device):
    x, weight = inputs(device=device)
    bounds = {"scale_lower_bound": 0.003, "scale_upper_bound": 0.006}
    for options, (low, high) in (({}, (None, math.inf)), (bounds, (0.003, 0.006))):
        got, scales = rms_norm_group_quant(x, weight, eps=1e-5, group_size=size, **options)
        want = choose_scale(norm(x, weight), QuantSpec(E4M3, "group", size, static=False), low).clamp_max(high)
        torch.testing.assert_close(scales, want, rtol=1e-5, atol=0.0)
        assert_near(got, quantize(norm(x, weight), want))


LAYOUTS = {
    "a slice": lambda x: x[..., : x.shape[-1] // 2],
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "no rows": lambda x: x[:0],
    "one row": lambda x: x[0, 0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, device):
    x, weight = inputs(device=device)
    x = LAYOUTS[layout](x)
    weight = weight.repeat(2)[::2][: x.shape[-1]]
    got, (grouped, scales) = (
        rms_norm_quant(x, weight, eps=1e-5),
        rms_norm_group_quant(x, weight, eps=1e-5, group_size=16),
    )
    assert got.shape == grouped.shape == x.shape
    assert scales.shape == (*x.shape[:-1], x.shape[-1] // 16)
    assert got.is_contiguous()
    assert scales.is_contiguous()
    if x.numel():
        assert_near(got, quantize(norm(x, weight), 1.0))
        assert_near(grouped, quantize(norm(x, weight), scales))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128), (7, 3072), (3, 5120), (513, 4096), (2, 32768), (3, 32769)])
def test_sizes_on_a_gpu(shape):
    """Rows that are longer than the kernel's run in plain torch."""
    x, weight = inputs(*shape, device="cuda")
    scale = torch.tensor(0.02, device="cuda")
    assert_near(rms_norm_quant(x, weight, scale, eps=1e-5), quantize(norm(x, weight), 0.02))
    for size in {shape[1], math.gcd(shape[1], 128)}:
        got, scales = rms_norm_group_quant(x, weight, eps=1e-5, group_size=size)
        assert_near(got, quantize(norm(x, weight), scales))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    x, weight = inputs(device=device)
    scale = torch.tensor(0.02, device=device)
    for dtype in (E4M3, E5M2):
        torch.library.opcheck(OP, (x, weight, scale), {"eps": 1e-5, "weight_offset": 1.0, "dtype": dtype})
    torch.library.opcheck(OP, (x.transpose(0, 1), None, None), {"eps": 1e-5, "dtype": E4M3})
    torch.library.opcheck(GROUP_OP, (x, weight), {"eps": 1e-5, "group_size": 16, "dtype": E4M3})


BAD = {
    "x of whole numbers": (TypeError, "x must be", lambda x, w: rms_norm_quant(x.int(), w, eps=1e-5)),
    "x in FP8": (TypeError, "x must be", lambda x, w: rms_norm_quant(x.to(E4M3), w, eps=1e-5)),
    "a scalar": (ValueError, "a dimension", lambda x, w: rms_norm_quant(x[0, 0, 0], eps=1e-5)),
    "another dtype": (TypeError, "dtype must be", lambda x, w: rms_norm_quant(x, w, eps=1e-5, dtype=BF16)),
    "a short weight": (ValueError, "each of the 64", lambda x, w: rms_norm_quant(x, w[:32], eps=1e-5)),
    "a weight per row": (ValueError, "each of the 64", lambda x, w: rms_norm_quant(x, x[0], eps=1e-5)),
    "a weight of one": (ValueError, "each of the 64", lambda x, w: rms_norm_quant(x, w[0], eps=1e-5)),
    "a weight of whole numbers": (TypeError, "floating point", lambda x, w: rms_norm_quant(x, w.int(), eps=1e-5)),
    "many scales": (ValueError, "one float32", lambda x, w: rms_norm_quant(x, w, x[0, 0].float(), eps=1e-5)),
    "a scale in bf16": (ValueError, "one float32", lambda x, w: rms_norm_quant(x, w, w[:1], eps=1e-5)),
    "groups that do not fit": (ValueError, "divide", lambda x, w: rms_norm_group_quant(x, w, eps=1e-5, group_size=24)),
    "no group": (ValueError, "divide", lambda x, w: rms_norm_group_quant(x, w, eps=1e-5, group_size=0)),
    "a negative bound": (
        ValueError, "lower bound",
        lambda x, w: rms_norm_group_quant(x, w, eps=1e-5, group_size=64, scale_lower_bound=-1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_call_without_a_meaning(name):
    kind, sentence, call = BAD[name]
    with pytest.raises(kind, match=sentence):
        call(*inputs())


def test_it_runs_without_its_kernel(caplog):
    """What the CUDA implementation does where no kernel takes a call: the same numbers, and a line that says why."""
    x, weight = inputs(4, 96)
    a = MODULE.RMSNormQuantArguments(x, weight, None, eps=1e-5)
    assert torch.equal(codes(MODULE._cuda(a)), codes(rms_norm_quant(x, weight, eps=1e-5)))
    assert "compute capability" in caplog.text
    groups = MODULE.RMSNormGroupQuantArguments(x, weight, eps=1e-5, group_size=24)
    for got, want in zip(
        MODULE._cuda_groups(groups), rms_norm_group_quant(x, weight, eps=1e-5, group_size=24), strict=True
    ):
        assert torch.equal(got.float(), want.float())
    assert "groups of a power of two or of a whole row, not of 24" in caplog.text
    long = MODULE.RMSNormQuantArguments(torch.randn(1, 32769), None, eps=1e-5)
    assert "rows of up to 32768, not of 32769" in long.run(E4M3, lambda *_: None)
