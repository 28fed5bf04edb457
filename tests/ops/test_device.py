"""Ops whose tensors are on another GPU than the current one."""

import pytest
import torch

from fusion_passes.ops import kv_cache_write, paged_attention, quantize_fp8, quantize_fp8_dynamic, rope_quant_kv_write
from fusion_passes.ops.support import on_its_device
from fusion_passes.quant import QuantSpec

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def calls(device):
    """Each op on the same numbers, by name, with all that it returns or writes."""
    torch.manual_seed(1)
    query, key, value = (x.to(device, BF16) for x in torch.randn(5, 8, 64).split([4, 2, 2], 1))
    cos, sin = (x.to(device) for x in torch.rand(2, 5, 32))
    caches = [x.to(E4M3).to(device) for x in torch.randn(2, 4, 2, 16, 64)]
    q_scale, k_scale, v_scale = (torch.tensor(x, device=device) for x in (0.031, 0.017, 0.0071))
    slots = torch.tensor([3, 9, 20, 33, 63], device=device)
    table, start, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 1]], [0, 5], [30]))
    yield "quantize_fp8", [quantize_fp8(query, q_scale)]
    for granularity in ("tensor", "token"):
        yield granularity, quantize_fp8_dynamic(query, QuantSpec(E4M3, granularity, static=False))
    kv_cache_write(key, value, *caches, slots, k_scale, v_scale)
    yield "kv_cache_write", caches
    rope = (query, key, value, cos, sin, None, *caches, slots, q_scale, k_scale, v_scale)
    yield "rope_quant_kv_write", [rope_quant_kv_write(*rope, rotary_dim=64), *caches]
    yield "paged_attention", [paged_attention(query, *caches, table, start, lengths, None, k_scale, v_scale, scale=0.2)]


@pytest.mark.gpu
@pytest.mark.parametrize("current", [0, 1])
def test_tensors_on_the_other_gpu(current):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(current):
        here, there = ([(n, [x.cpu() for x in xs]) for n, xs in calls(f"cuda:{i}")] for i in (current, 1 - current))
        assert torch.cuda.current_device() == current
    for (name, want), (_, got) in zip(here, there, strict=True):
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(want, got, strict=True)), name


def test_the_device_of_the_first_argument(monkeypatch):
    entered = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", Device)
    x = torch.empty(2, device="meta")
    assert on_its_device(lambda x, y, *, z: (x, y, z, list(entered)))(x, 3, z=4) == (x, 3, 4, [x.device])
    assert entered == [x.device, "left"]
