import pytest
import torch

from fusion_passes.quant import FP8_DTYPES, QuantSpec, choose_scale, codes, dequantize, max_value, quantize, saturate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_max_values():
    assert [max_value(dtype) for dtype in FP8_DTYPES] == [448.0, 57344.0, 240.0, 57344.0]


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_saturates_on_every_version_of_torch(dtype):
    limit, infinity = max_value(dtype), float("inf")
    x = torch.tensor([limit, limit * 1.03, limit * 1.2, 1e30, infinity, -infinity])
    assert saturate(x, dtype).float().tolist() == [limit] * 5 + [-limit]
    assert saturate(torch.tensor([float("nan")]), dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("granularity", "group_size", "shape"), [("tensor", None, [1]), ("token", None, [5, 1]), ("group", 16, [5, 4])]
)
def test_round_trip(dtype, granularity, group_size, shape):
    spec = QuantSpec(dtype, granularity, group_size, static=False)
    x = torch.randn(5, 64) * torch.logspace(-3, 3, 5)[:, None]
    scale = choose_scale(x, spec)
    assert list(scale.shape) == shape
    assert scale.dtype is torch.float32
    error = (dequantize(quantize(x, scale, dtype), scale) - x).abs()
    step = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * step * scale.max()
    assert (error <= 1.01 * step * x.abs() + smallest).all()


def test_scale_of_zeros_is_not_zero():
    scale = choose_scale(torch.zeros(3, 4), QuantSpec())
    assert scale.item() > 0
    assert (quantize(torch.zeros(3, 4), scale).float() == 0).all()


@pytest.mark.parametrize("lower_bound", [0.0, 1e-10, 0.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(granularity="group", group_size=4, static=False)], ids=str)
def test_lower_bound_of_the_scale(spec, dtype, lower_bound):
    x = torch.tensor([[0.0] * 4, [448.0, 1.0, -7.0, 2.0], [1e-3] * 4, [torch.nan, 1.0, 2.0, 3.0]], dtype=dtype)
    if spec.granularity == "tensor":
        assert choose_scale(x[:1], spec, lower_bound).item() == pytest.approx(lower_bound)
        assert choose_scale(x[1:3], spec, lower_bound).item() == 1.0
        return
    scale = choose_scale(x, spec, lower_bound)
    small = max(x[2, 0].item() / 448.0, lower_bound)
    torch.testing.assert_close(scale[:, 0], torch.tensor([lower_bound, 1.0, small, torch.nan]), equal_nan=True)
    zeros = quantize(x, scale)[0].float()
    assert zeros.isnan().all() if lower_bound == 0.0 else (zeros == 0.0).all()


@pytest.mark.parametrize("lower_bound", [-1e-10, torch.inf, torch.nan])
def test_lower_bounds_that_are_none(lower_bound):
    with pytest.raises(ValueError, match="must be a finite number, 0 or more"):
        choose_scale(torch.ones(2, 4), QuantSpec(), lower_bound)


def test_codes_count_steps():
    for dtype in (E4M3, E5M2):
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        values = values[values.float().isfinite()]
        in_order = values[codes(values).argsort()].float()
        assert (in_order.diff() >= 0).all()
        assert codes(torch.tensor([0.0, -0.0]).to(dtype)).tolist() == [0, 0]
        assert set(codes(values).sort().values.diff().tolist()) == {0, 1}
    odd = codes(torch.tensor([float("nan"), float("inf"), 57344.0, -float("inf")]).to(E5M2)).tolist()
    assert min(abs(a - b) for a in odd for b in odd if a is not b) > 1000


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": torch.int8},
        {"granularity": "channel"},
        {"granularity": "group"},
        {"group_size": 16},
        {"granularity": "group", "group_size": 0},
    ],
)
def test_wrong_specs_fail_at_construction(arguments):
    with pytest.raises(ValueError, match=r"must|goes with"):
        QuantSpec(**arguments)


def test_groups_must_divide():
    with pytest.raises(ValueError, match="not a multiple"):
        choose_scale(torch.ones(2, 10), QuantSpec(granularity="group", group_size=4))
