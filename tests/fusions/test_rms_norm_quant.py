"""What `rms_norm_quant` has beyond the tests of every rule: where it pays."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_passes.measured import rms_norm_quant as measured

RECORD = {
    "name": "rms_norm_quant-64",
    "card": "a card",
    "capability": [9, 0],
    "rows": [
        {
            "shape": {"rows": rows, "size": 64, "dtype": "torch.bfloat16"},
            "ratio": {"tensor": 1.1, "sum, tensor": 0.9, "token": 1.3, "sum, token": 1.2}
            | {"group of 32, opaque": 1.5, "sum, group of 32, opaque": 1.4},
        }
        for rows in (8, 64)
    ],
}


@pytest.fixture
def verdict(monkeypatch, hopper):
    monkeypatch.setattr(measured, "records", lambda fusion: (RECORD,) if fusion == "rms_norm_quant" else ())

    def judge(*shape, group_size=None, opaque=False, dtype=torch.bfloat16, device="cuda"):
        with FakeTensorMode():
            return measured.verdict(torch.empty(shape, dtype=dtype, device=device), group_size, opaque=opaque)

    return judge


def test_the_worse_of_with_and_without_a_sum_counts(verdict):
    assert verdict(8, 64).ratio == 0.9
    assert verdict(4, 8, 64, group_size=64).ratio == 1.2
    assert verdict(33, 64, group_size=32, opaque=True).ratio == 1.4


def test_what_nobody_measured(verdict):
    assert "scales per group of 32, that plain torch quantizes, was not measured" in verdict(8, 64, group_size=32).why
    assert "that an opaque op quantizes, was not measured" in verdict(8, 64, opaque=True).why
    assert "rows of 128 with FP8 output" in verdict(8, 128).why
    assert "for 8 to 64 rows, not for 65" in verdict(65, 64).why
    assert verdict(8, 64, dtype=torch.float16).ratio is None
    assert verdict(8, 64, device="cpu").why == "the fused op has no faster kernel on the CPU"
