"""FP8Linear, calibrate and quantize_, against fp32 arithmetic on the dequantized operands."""

import copy

import pytest
import torch
from torch import nn

from fusion_passes.nn import FP8Linear, calibrate, quantize_
from fusion_passes.quant import dequantize, quantize

FP8 = torch.float8_e4m3fn


def layer_and_linear(bias=True, dtype=torch.bfloat16, in_features=64, out_features=48):
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    return FP8Linear.from_linear(linear, input_scale=0.0117), linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (533,), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_forward(dtype, shape, bias):
    check_forward(*layer_and_linear(bias, dtype), torch.randn(*shape, 64, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (533,), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_on_gpu(dtype, shape, bias):
    layer, linear = layer_and_linear(bias, dtype)
    check_forward(layer.cuda(), linear.cuda(), torch.randn(*shape, 64, dtype=dtype, device="cuda"))


def check_forward(layer, linear, x):
    bias, dtype = linear.bias is not None, x.dtype
    y = layer(x)
    codes = quantize(x, layer.input_scale)
    expected = dequantize(codes, layer.input_scale) @ dequantize(layer.weight, layer.weight_scale).T
    if bias:
        expected = expected + linear.bias.float()
    assert y.dtype == dtype
    assert y.shape == (*x.shape[:-1], 48)
    torch.testing.assert_close(y.float(), expected, rtol=4 * torch.finfo(dtype).eps, atol=2e-2 if bias else 4e-3)
    error = (y.float() - linear(x).float()).norm() / linear(x).float().norm()
    assert error < 0.06  # two operands of 3 mantissa bits


def test_each_scale_is_applied_once():
    layer = FP8Linear(16, 16, bias=False)
    layer.weight = torch.eye(16).to(FP8)
    layer.weight_scale.fill_(4.0)
    layer.input_scale.fill_(0.25)
    x = torch.arange(1.0, 17.0, dtype=torch.bfloat16).expand(2, 16)
    assert torch.equal(layer(x), 4 * x)
    assert torch.equal(layer.matmul(quantize(x, layer.input_scale), torch.bfloat16), 4 * x)


def test_out_of_range_input_saturates():
    layer = FP8Linear(16, 16, bias=False)
    layer.weight = torch.eye(16).to(FP8)
    layer.input_scale.fill_(0.5)
    y = layer(torch.tensor([[1e4, -1e4] * 8], dtype=torch.bfloat16))
    assert y[0, :2].tolist() == [224.0, -224.0]


def test_compiled_follows_a_scale_changed_in_place():
    layer, _ = layer_and_linear()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        first = compiled(x)
        layer.input_scale.mul_(64)
        layer.weight_scale.mul_(3)
        second = compiled(x)
    torch.testing.assert_close(second, layer(x))
    assert not torch.equal(first, second)


def test_state_dict():
    layer, _ = layer_and_linear()
    state = layer.state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "weight": ((48, 64), FP8),
        "weight_scale": ((), torch.float32),
        "input_scale": ((), torch.float32),
        "bias": ((48,), torch.bfloat16),
    }
    other = FP8Linear(64, 48, dtype=torch.bfloat16)
    other.load_state_dict(state)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(other(x), layer(x))
    assert not list(layer.parameters())


def test_a_dtype_change_spares_codes_and_scales():
    layer, _ = layer_and_linear()
    codes = layer.weight.clone()
    layer.to(torch.float16)
    assert layer.bias.dtype == torch.float16
    assert layer.weight_scale.dtype == layer.input_scale.dtype == torch.float32
    assert layer.weight.dtype == FP8
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    layer.to("meta", torch.bfloat16)
    assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
    assert layer.weight.dtype == FP8


def test_from_linear_leaves_the_original_alone():
    linear = nn.Linear(32, 16).eval()
    before = copy.deepcopy(linear.state_dict())
    layer = FP8Linear.from_linear(linear)
    layer.bias.zero_()
    assert layer.input_scale == 1.0
    assert not layer.training
    assert all(torch.equal(before[name], value) for name, value in linear.state_dict().items())


@pytest.mark.parametrize("sizes", [(24, 32), (32, 24)])
def test_sizes_must_suit_fp8(sizes):
    with pytest.raises(ValueError, match="multiples of 16"):
        FP8Linear(*sizes)


def test_bad_arguments():
    layer, linear = layer_and_linear()
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 64\], got \[2, 32\]"):
        layer(torch.randn(2, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="the scales are on cpu, the input is on meta"):
        layer(torch.randn(2, 64, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ValueError, match="one number for the whole tensor"):
        FP8Linear.from_linear(linear, torch.ones(64))


class Tied(nn.Module):
    """Two names for one layer, a subclass of nn.Linear, and a layer that is called only on request."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.again = self.first
        self.special = type("Special", (nn.Linear,), {})(32, 32)
        self.expert = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x, expert=False):
        y = self.special(self.norm(self.first(input=x)))
        return self.expert(y) if expert else y


def test_calibrate_takes_the_largest_magnitude_of_all_batches():
    model = Tied()
    batches = [torch.randn(4, 32), -9 * torch.rand(2, 32), torch.zeros(1, 32), torch.empty(0, 32)]
    scales = calibrate(model, lambda: [model(x) for x in batches], filter=lambda name, _: name == "first")
    assert scales.keys() == {"first"}
    assert scales["first"].shape == ()
    torch.testing.assert_close(scales["first"] * 448, torch.stack([x.abs().max() for x in batches[:2]]).max())
    assert not model.first._forward_pre_hooks


def test_calibrate_refuses_to_guess():
    model = Tied()
    with pytest.raises(ValueError, match="never called expert"):
        calibrate(model, lambda: model(torch.randn(2, 32)))
    with pytest.raises(ValueError, match="the input of first, expert is not finite"):
        calibrate(model, lambda: model(torch.full((2, 32), torch.inf), expert=True))
    with pytest.raises(ZeroDivisionError):
        calibrate(model, lambda: 1 / 0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_quantize_swaps_in_place():
    model = Tied()
    expected = copy.deepcopy(model)(x := torch.randn(8, 32), expert=True)
    quantize_(model, calibrate(model, lambda: model(x, expert=True)))
    assert type(model.first) is type(model.expert) is FP8Linear
    assert model.again is model.first
    assert type(model.special) is not FP8Linear
    assert (model.first.input_scale * 448 - x.abs().max()).abs() < 1e-5
    assert (model(x, expert=True) - expected).norm() / expected.norm() < 0.1


def test_quantize_changes_nothing_when_it_refuses():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    with pytest.raises(ValueError, match="2: FP8 needs feature counts that are multiples of 16, got 32 -> 10"):
        quantize_(model, {"0": 0.1, "2": 0.1})
    for name in ("1", "3", ""):
        with pytest.raises(ValueError, match="is not an nn"):
            quantize_(model, {"0": 0.1, name: 0.1})
    assert type(model[0]) is nn.Linear
