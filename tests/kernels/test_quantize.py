"""The kernels of quantize_fp8 and quantize_fp8_dynamic against the plain form, bit by bit.  On a card if there is."""

import math
import sys

import pytest
import torch

from fusion_passes.kernels import quantize as kernels
from fusion_passes.nn import QuantFP8
from fusion_passes.ops import quantize_fp8 as op
from fusion_passes.ops.quantize import QuantizeArguments, _cuda
from fusion_passes.quant import QuantSpec, choose_scale, max_value, quantize
from fusion_passes.quant import codes as ordered

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HARD = (0.0, -0.0, 1e-8, 448.0, 1e30, -1e30, math.inf, -math.inf, math.nan)


def hard(*shape, dtype=torch.bfloat16, values=HARD):
    x = torch.randn(shape, device=DEVICE) * 30
    x.view(-1)[: len(values)] = torch.tensor(values, device=DEVICE)[: x.numel()]
    return x.to(dtype)


def same(a, b):
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.float().nan_to_num(), b.float().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(7, 96), (1, 9), (3, 5, 1024), (0, 8)])
def test_by_a_scale(shape, fp8, dtype):
    x, scale = hard(*shape, dtype=dtype), torch.tensor([0.0371], device=DEVICE)
    out = torch.full_like(x, math.nan, dtype=fp8)
    kernels.by_scale(x, scale, out)
    same(out, quantize(x, scale.reshape(()), fp8))


@pytest.mark.parametrize("bound", [math.inf, 0.05])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize(("shape", "size"), [((7, 96), 32), ((5, 96), 96), ((3, 2, 256), 128), ((1, 2048), 2048)])
def test_by_group(shape, size, fp8, bound):
    """A NaN or an infinity spreads in its group alone; a group of zeros has the smallest scale."""
    check_groups(shape, size, fp8, torch.bfloat16, bound, torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("smallest", [0.0, 1e-10 / 448.0, 0.04])
def test_by_group_with_a_lower_bound(smallest, fp8, dtype):
    """With 0 a group of zeros has the scale 0 and NaN for codes."""
    check_groups((7, 96), 32, fp8, dtype, math.inf, smallest)


def check_groups(shape, size, fp8, dtype, bound, smallest):
    x = hard(*shape, dtype=dtype)
    x[..., -1, :size] = 0.0
    if len(shape) == 2 and shape[0] > 2:
        x[2, size:] = 1e-3
    out = torch.full_like(x, math.nan, dtype=fp8)
    scales = x.new_full((*shape[:-1], shape[-1] // size), math.nan, dtype=torch.float32)
    kernels.by_group(x, size, out, scales, bound, smallest)
    want = choose_scale(x, QuantSpec(fp8, "group", size, static=False), smallest).clamp_max(bound)
    same(scales, want)
    same(out, quantize(x, want, fp8))


GAPS = {
    "transposed slice": lambda x: x.transpose(0, 1)[..., :5],
    "permuted slice": lambda x: x.permute(2, 0, 1)[1:, ::2],
    "expanded": lambda x: x[:1].expand(4, 6, 8),
    "transposed": lambda x: x.transpose(0, 2),
    "contiguous": lambda x: x,
}


@pytest.mark.parametrize("gaps", GAPS)
def test_the_op_on_any_strides(gaps, monkeypatch):
    """`empty_like` keeps the order of dimensions where x has gaps, `contiguous` does not."""
    monkeypatch.setattr(sys.modules[op.__module__], "why_no_kernel", lambda x, dtype: None)
    x, scale = GAPS[gaps](hard(4, 6, 8)), torch.tensor(0.0371, device=DEVICE)
    out = _cuda(QuantizeArguments(x, scale, E4M3))
    assert out.stride() == torch.empty_like(x).stride()
    same(out, quantize(x, scale, E4M3))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@torch.no_grad()
def test_the_opaque_form_is_the_plain_one_on_the_card(fp8):
    """Contiguous, transposed, and a slice; each granularity."""
    tensors = (hard(37, 256), hard(256, 37).t(), hard(37, 512)[:, 128:384])
    for x in tensors:
        scale = torch.tensor(0.0371, device="cuda")
        opaque, plain = (QuantFP8(QuantSpec(fp8), form=form)(x, scale)[0] for form in ("opaque", "plain"))
        assert opaque.stride() == torch.empty_like(x, dtype=fp8).stride()
        same(opaque, plain)
        for granularity, size in (("tensor", None), ("token", None), ("group", 64)):
            spec = QuantSpec(fp8, granularity, size, static=False)
            finite = x.nan_to_num(0.0, 9.0, -9.0).clamp(-90.0, 90.0)
            for bound in (None, 0.05):
                forms = (QuantFP8(spec, form=form, scale_upper_bound=bound)(finite) for form in ("opaque", "plain"))
                (codes, scales), (plain_codes, plain_scales) = forms
                largest = finite.double().reshape(scales.numel(), -1).abs().amax(-1).reshape(scales.shape)
                if granularity != "tensor":  # whose scale is eager torch's in both forms
                    assert torch.equal(scales, (largest / max_value(fp8)).float().clamp(max=bound or math.inf))
                same(codes, quantize(finite, scales, fp8))
                # Eager torch divides by a number there by multiplying with its reciprocal: its scale may be the next
                # one, and a code the next one then.
                torch.testing.assert_close(plain_scales, scales, rtol=2.4e-7, atol=0.0)
                assert (ordered(codes) - ordered(plain_codes)).abs().max() <= 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiler says so itself, in other words")
def test_the_interpreter_refuses_arguments_that_a_kernel_does_not_have():
    x, scale = hard(4), torch.tensor(0.3)
    with pytest.raises(KeyError, match="_by_scale has no argument SPEED"):
        kernels._by_scale[(1,)](torch.empty(4), x, scale, 4, 448.0, 16, SPEED=2)
