"""The opaque quantization op: contract and errors."""

import pytest
import torch

from fusion_passes.ops import quantize_fp8
from fusion_passes.quant import quantize

OP = torch.ops.fusion_passes.quantize_fp8.default


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("x", [torch.randn(3, 5), torch.randn(5, 3).T, torch.randn(2, 0).bfloat16()])
def test_contract(x, dtype):
    scale = torch.tensor([0.37])
    torch.library.opcheck(OP, (x, scale, dtype), test_utils=("test_schema", "test_faketensor"))
    out = quantize_fp8(x, scale, dtype)
    assert torch.equal(out.view(torch.uint8), quantize(x, 0.37, dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("scale", "dtype", "message"),
    [
        (torch.ones(2), torch.float8_e4m3fn, "scale must be one float32 element"),
        (torch.ones((), dtype=torch.float64), torch.float8_e4m3fn, "scale must be one float32 element"),
        (torch.ones((), device="meta"), torch.float8_e4m3fn, "make the scale a buffer"),
        (torch.ones(()), torch.int8, "dtype must be one of"),
    ],
)
def test_errors_say_what_to_do(scale, dtype, message):
    with pytest.raises((TypeError, ValueError), match=message):
        quantize_fp8(torch.randn(4), scale, dtype)
