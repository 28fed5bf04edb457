"""What was measured decides what is profitable; what was not is declined."""

import pytest
import torch

from fusion_passes.measured import Measurement, judge, records
from fusion_passes.ops.attention_quant import KERNELS, AttentionQuantArguments

ROWS = [Measurement(256, 1.5), Measurement(256, 1.2), Measurement(1024, 0.9), Measurement(4096, 1.1)]


@pytest.mark.parametrize(
    ("length", "ratio"),
    [(256, 1.2), (255, None), (300, 0.9), (1024, 0.9), (2000, 0.9), (4096, 1.1), (4097, None), (None, None)],
)
def test_between_two_lengths_the_worse_counts_and_outside_nothing_does(length, ratio):
    assert judge(ROWS, length, "the kernel", "a card").ratio == ratio


def test_the_reasons_say_what_was_measured():
    assert judge([], 8, "the kernel", "a card").why == "the kernel was not measured on a card"
    assert "lengths from 256 to 4096, not for 8" in judge(ROWS, 8, "the kernel", "a card").why
    assert judge(ROWS, 1024, "the kernel", "a card").why == (
        "the kernel takes 1.11 times as long as stock torch.compile on a card at length 1024"
    )


def test_every_record_names_kernels_that_exist():
    """A renamed kernel would lose what was measured of it, without a word."""
    names = {kernel.name for kernel in KERNELS}
    measured = [row for record in records("attention_quant") for row in record["rows"]]
    assert measured
    assert {name for row in measured for name in row["ratio"]} == names


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

    op = sys.modules["fusion_passes.ops.attention_quant"]
    monkeypatch.setattr(op, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(op, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(attention_quant, "device_capability", lambda device: (9, 0))
    mode = FakeTensorMode()
    q = FakeTensor(mode, torch.empty(shape, dtype=torch.bfloat16, device="meta"), torch.device("cuda:0"))
    verdict = attention_quant.verdict(AttentionQuantArguments(q, q, q, is_causal=causal))
    assert (verdict.ratio is not None and verdict.ratio >= 1.0) == pays, verdict.why


@pytest.mark.parametrize(
    ("tokens", "head_dim", "quantized", "pays"),
    [(1, 128, True, True), (100, 128, True, True), (8192, 128, True, True), (10**6, 128, True, False),
     (100, 96, True, False)],
)  # fmt: skip
def test_rope_quant_kv_write_on_an_h200(tokens, head_dim, quantized, pays, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from fusion_passes.measured import rope_quant_kv_write

    monkeypatch.setattr(rope_quant_kv_write, "device_capability", lambda device: (9, 0))
    meta = torch.empty(tokens, 32, head_dim, dtype=torch.bfloat16, device="meta")
    query = FakeTensor(FakeTensorMode(), meta, torch.device("cuda:0"))
    verdict = rope_quant_kv_write.verdict(query, tokens=tokens, quantized=quantized)
    assert (verdict.ratio is not None and verdict.ratio >= 1.0) == pays, verdict.why


@pytest.mark.parametrize(
    ("tokens", "pays"), [(1, True), (7, True), (8, True), (100, True), (8192, True), (9000, False)]
)
@pytest.mark.parametrize("inside", [True, False])
def test_query_quant_on_an_h200(tokens, pays, inside, monkeypatch):
    from fusion_passes.measured import query_quant

    monkeypatch.setattr(query_quant, "device_capability", lambda device: (9, 0))
    verdict = query_quant.verdict(on_cuda(tokens, 32, 128), inside=inside)
    assert (verdict.ratio is not None and verdict.ratio >= 1.0) == pays, verdict.why
    assert query_quant.verdict(on_cuda(8, 32, 80), inside=inside).ratio is None


@pytest.mark.parametrize("granularity", ["tensor", "group"])
def test_output_of_a_paged_attention_on_an_h200(granularity, monkeypatch):
    from fusion_passes.measured import paged_attention_quant

    monkeypatch.setattr(paged_attention_quant, "device_capability", lambda device: (9, 0))
    cache = on_cuda(3, 8, 128, dtype=torch.float8_e4m3fn)
    verdict = paged_attention_quant.verdict(on_cuda(8, 32, 128), cache, granularity)
    assert verdict.ratio is not None, verdict.why
    assert verdict.ratio >= 1.0, verdict.why
    assert paged_attention_quant.verdict(on_cuda(8, 32, 128), on_cuda(3, 8, 128), granularity).ratio is None


def on_cuda(*shape, dtype=torch.bfloat16):
    """A tensor without values."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    return FakeTensor(FakeTensorMode(), torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda:0"))
