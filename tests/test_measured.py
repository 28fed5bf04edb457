"""What was measured decides what is profitable; what was not is declined."""

import pytest
import torch

from fusion_passes import measured
from fusion_passes.measured import Measurement, judge, records
from fusion_passes.ops.attention_quant import KERNELS, AttentionQuantArguments

ROWS = [Measurement(256, 1.5), Measurement(256, 1.2), Measurement(1024, 0.9), Measurement(4096, 1.1)]


@pytest.mark.parametrize(
    ("length", "ratio"),
    [(256, 1.2), (255, None), (300, 0.9), (1024, 0.9), (2000, 0.9), (4096, 1.1), (4097, None), (None, None)],
)
def test_between_two_lengths_the_worse_counts_and_outside_nothing_does(length, ratio):
    assert judge(ROWS, length, "the kernel", "a card", "keys").ratio == ratio


def test_the_reasons_say_what_was_measured():
    assert judge([], 8, "the kernel", "a card", "keys").why == "the kernel was not measured on a card"
    assert "for 256 to 4096 keys, not for 8" in judge(ROWS, 8, "the kernel", "a card", "keys").why
    assert "the number of tokens is symbolic" in judge(ROWS, None, "the kernel", "a card", "tokens").why
    assert judge(ROWS, 1024, "the kernel", "a card", "keys").why == (
        "the kernel takes 1.11 times as long as stock torch.compile on a card at 1024 keys"
    )


def test_every_record_names_kernels_that_exist():
    """A renamed kernel would lose what was measured of it, without a word."""
    names = {kernel.name for kernel in KERNELS}
    rows = [row for record in records("attention_quant") for row in record["rows"]]
    assert rows
    assert {name for row in rows for name in row["ratio"]} == names


@pytest.mark.parametrize(
    ("shape", "causal", "pays"),
    [
        ((1, 32, 8192, 128), True, True),
        ((8, 32, 512, 128), True, True),
        ((2, 32, 4096, 64), False, True),
        ((4, 16, 1024, 192), True, False),
        ((1, 32, 7, 128), True, False),
    ],
)
def test_attention_quant_on_an_h200(shape, causal, pays, monkeypatch):
    """Fake CUDA tensors, as the pass sees them, on a machine that says it has compute capability 9.0."""
    import sys

    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from fusion_passes.measured import attention_quant

    op = sys.modules["fusion_passes.ops.support"]
    monkeypatch.setattr(op, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(op, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(measured, "device_name", lambda device: None)
    monkeypatch.setattr(measured, "device_capability", lambda device: (9, 0))
    mode = FakeTensorMode()
    q = FakeTensor(mode, torch.empty(shape, dtype=torch.bfloat16, device="meta"), torch.device("cuda:0"))
    verdict = attention_quant.verdict(AttentionQuantArguments(q, q, q, is_causal=causal))
    assert (verdict.ratio is not None and verdict.ratio >= 1.0) == pays, verdict.why


MEASURED_WRITE = {
    "tokens": 100, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16,
    "cache_dtype": torch.float8_e4m3fn, "quantized": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"tokens": 1}, ""),
        ({"tokens": 8192}, ""),
        ({"dtype": torch.float16, "cache_dtype": torch.float8_e5m2}, ""),
        ({"quantized": False}, ""),
        ({"tokens": 10**6}, "for 1 to 32768 tokens, not for 1000000"),
        ({"head_dim": 96}, "32/8 heads of 96 and an FP8 query, was not measured on a card of compute capability 9.0"),
        ({"heads": 24}, "24/8 heads of 128 and an FP8 query, was not measured"),
        ({"kv_heads": 4}, "32/4 heads of 128 and an FP8 query, was not measured"),
        ({"cache_dtype": torch.bfloat16}, "not for bfloat16 and caches of bfloat16"),
        ({"dtype": torch.float32}, "not for float32 and caches of float8_e4m3fn"),
    ],
)
def test_rope_quant_kv_write_on_an_h200(changed, told, monkeypatch):
    from fusion_passes.measured.rope_quant_kv_write import verdict

    monkeypatch.setattr(measured, "device_capability", lambda device: (9, 0))
    found = verdict(torch.device("cuda:0"), **MEASURED_WRITE | changed)
    assert told in found.why
    assert (found.ratio is None) == bool(told)
    assert told or found.ratio >= 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it is without a GPU")
def test_without_a_gpu_nothing_is_measured_and_the_reason_says_where():
    from fusion_passes.measured.rope_quant_kv_write import verdict

    why = verdict(torch.device("cuda:0"), **MEASURED_WRITE).why
    assert why.endswith("was not measured on a machine without a GPU")


@pytest.mark.parametrize(
    ("tokens", "pays"), [(1, True), (7, True), (8, True), (100, True), (8192, True), (9000, False)]
)
@pytest.mark.parametrize("inside", [True, False])
def test_query_quant_on_an_h200(tokens, pays, inside, monkeypatch):
    from fusion_passes.measured import query_quant

    monkeypatch.setattr(measured, "device_capability", lambda device: (9, 0))
    verdict = query_quant.verdict(on_cuda(tokens, 32, 128), inside=inside)
    assert (verdict.ratio is not None and verdict.ratio >= 1.0) == pays, verdict.why
    assert query_quant.verdict(on_cuda(8, 32, 80), inside=inside).ratio is None


@pytest.mark.parametrize("granularity", ["tensor", "group"])
def test_output_of_a_paged_attention_on_an_h200(granularity, monkeypatch):
    from fusion_passes.measured import paged_attention_quant

    monkeypatch.setattr(measured, "device_capability", lambda device: (9, 0))
    cache = on_cuda(3, 8, 128, dtype=torch.float8_e4m3fn)
    verdict = paged_attention_quant.verdict(on_cuda(8, 32, 128), cache, granularity)
    assert verdict.ratio is not None, verdict.why
    assert verdict.ratio >= 1.0, verdict.why
    assert paged_attention_quant.verdict(on_cuda(8, 32, 128), on_cuda(3, 8, 128), granularity).ratio is None


def on_cuda(*shape, dtype=torch.bfloat16):
    """A tensor without values."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    return FakeTensor(FakeTensorMode(), torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda:0"))
