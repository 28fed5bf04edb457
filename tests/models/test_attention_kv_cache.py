"""The models over a KV cache, for every backend: eagerly, compiled stock and compiled with the passes.

Raw FP8 codes of both compiled runs against each other, and against dense attention in fp32 over the dequantized cache.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import PassConfig, Report, reference
from fusion_passes.nn import backends
from fusion_passes.quant import codes, dequantize, quantize
from tests.fusions.accuracy import check
from tests.models.attention_kv_cache import (
    BATCHES,
    DTYPES,
    HEAD_DIMS,
    HEADS,
    LENGTHS,
    SHARED_PAGES,
    lengths_of,
)
from tests.models.attention_kv_cache import AttentionKVCacheFp8StaticQuantFusedModel as Fused
from tests.models.attention_kv_cache import AttentionKVCacheFp8StaticQuantPatternModel as Model

FUSE = PassConfig(profitability="ignore")
SAMPLE = 16
"""Sequences that are compared with dense attention, of a batch of any size."""


def dense(model, query, metadata, **_):
    """Attention in fp32 of some sequences over what the cache holds now, and which tokens are theirs."""
    attention, cache = model.attention, model.attention.kv_cache
    query = query.unflatten(-1, (-1, attention.head_dim))
    if attention.quantize_query:
        query = dequantize(quantize(query, attention._q_scale, attention.cache_dtype), attention._q_scale)
    starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    tokens, parts = [], []
    for s in range(0, len(lengths), -(-len(lengths) // SAMPLE)):
        first, last, length = starts[s], starts[s + 1], lengths[s]
        if first == last:
            continue
        pages = metadata.block_table[s, : -(-length // cache.page_size)].long()
        key, value = (
            dequantize(half[pages], scale) if attention.quantized else half[pages].float()
            for half, scale in ((cache.key, attention._k_scale), (cache.value, attention._v_scale))
        )
        key, value = (x.transpose(0, 1).flatten(1, 2)[:, :length] for x in (key, value))
        new = last - first
        seen = torch.ones(new, length, dtype=torch.bool, device=key.device).tril(length - new)
        heads = query[first:last].float().transpose(0, 1)
        out = F.scaled_dot_product_attention(heads, key, value, seen, scale=attention.scale, enable_gqa=True)
        parts.append(out.transpose(0, 1).flatten(1))
        tokens += range(first, last)
    return torch.cat(parts), torch.tensor(tokens, device=query.device)


def judge(model, got, stock, inputs):
    """Fused codes against the stock ones, and both against dense attention."""
    assert not got.float().isnan().any()
    assert (codes(got) - codes(stock)).abs().max() <= 1
    exact, tokens = dense(model, inputs[0], inputs[3])
    check(got[tokens], stock[tokens], exact / model.output_scale)
    limit = torch.finfo(got.dtype).max * model.output_scale
    for each in (got, stock):
        # One step of FP8; near 0, where steps are tiny, the rounding of the probabilities.
        values = dequantize(each[tokens], model.output_scale)
        torch.testing.assert_close(
            values, exact.clamp(-limit, limit), rtol=1 / 8, atol=2 * torch.finfo(model.dtype).eps
        )


def dynamic(inputs):
    query, key, value, metadata, positions = inputs
    for x in (query, key, value, metadata.slot_mapping, metadata.block_table, metadata.seq_lens, positions):
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(metadata.query_start, 0)
    return inputs


@torch.no_grad()
def compare(model, problems, columns, rules=("attention_quant",)):
    """Compile once without and once with the passes, and run all problems (lists of lengths) through both."""
    page = model.attention.block_size
    most = max(sum(2 + new // page for new, _ in lengths) for lengths in problems)
    model.attention.allocate_cache(SHARED_PAGES + most)  # one for all problems
    report = Report()
    stock = torch.compile(model, fullgraph=True, dynamic=None)
    runs = []
    for lengths in problems:
        inputs = dynamic(model.example_inputs(lengths, columns))
        runs.append([x.clone() for x in stock(*inputs, return_codes=True)])
    torch.compiler.reset()
    fused = fusion_passes.compile(model, FUSE, report=report, fullgraph=True)
    for lengths, (output, expected) in zip(problems, runs, strict=True):
        inputs = dynamic(model.example_inputs(lengths, columns))
        got_output, got = fused(*inputs, return_codes=True)
        judge(model, got, expected, inputs)
        difference = (got_output.float() - output.float()).norm() / output.float().norm()
        # Rounding to FP8 once is a relative error of 0.026; the codes of both differ in few places, by a step.
        assert difference < 0.026, f"{difference}"
    fuses = model.attention.backend.supports_fused_output_quant(fusion_passes.quant.QuantSpec())
    for rule in rules:
        assert report.count(rule=rule) == fuses, report


SMALL = [((3, 3), (1, 21), (0, 0), (5, 17), (1, 1)), ((1, 40), (1, 31))]


@pytest.mark.parametrize(
    ("backend", "dtype", "quantize", "kv_cache_dtype"),
    [
        ("sdpa", torch.bfloat16, "plain", "fp8_e4m3"),
        ("triton", torch.float16, "opaque", "fp8_e5m2"),
        ("triton", torch.bfloat16, "opaque", "auto"),
    ],
)
def test_compiled(backend, dtype, quantize, kv_cache_dtype):
    model = Model(5, 1, 64, dtype, quantize, backend=backend, kv_cache_dtype=kv_cache_dtype, block_size=16)
    compare(model, SMALL, 4)


@torch.no_grad()
def test_compiled_with_rope():
    """Both fusions. A code of the query that differs by a step moves the output by more than its rounding."""
    model, report = Model(6, 2, 64, rope=True, block_size=16), Report()
    cache = model.attention.allocate_cache(80)
    runs = []
    for compiled in (
        torch.compile(model, fullgraph=True),
        fusion_passes.compile(model, FUSE, report=report, fullgraph=True),
    ):
        inputs = model.example_inputs(SMALL[0], 4)
        torch.compiler.reset()
        output, got = compiled(*inputs, return_codes=True)
        runs.append((output.float(), got, codes(cache.key), codes(cache.value)))
    for rule in ("attention_quant", "rope_quant_kv_write"):
        assert report.count(rule=rule) == 1, report
    (output, got, key, value), (fused_output, fused, fused_key, fused_value) = runs
    assert (key - fused_key).abs().max() <= 1
    assert (key != fused_key).float().mean() < 1e-3
    assert torch.equal(value, fused_value)
    assert ((codes(got) - codes(fused)).abs() > 1).float().mean() < 0.01
    assert (fused_output - output).norm() < 0.026 * output.norm()
    cos, sin = model.rope[inputs[4]][:, None].chunk(2, -1)
    turned = reference.rope(inputs[0].unflatten(-1, (-1, 64)), cos, sin, rotary_dim=64).flatten(1)
    exact, tokens = dense(model, turned, inputs[3])
    errors = [(dequantize(x[tokens], model.output_scale) - exact).norm() for x in (got, fused)]
    assert errors[1] <= 1.02 * errors[0]


# Our kernels with every head shape and size, the other backends with each shape and each size; what else there is, in
# turn, so that each value meets each backend.
FORMS = list(itertools.product(DTYPES, ("plain", "opaque")))
SHAPES = {
    "triton": list(itertools.product(HEADS, HEAD_DIMS)),
    "flex": list(zip(HEADS, (256, 64, 128, 256), strict=True)),
    "sdpa": list(zip(HEADS, (64, 128, 256, 64), strict=True)),
}
FULL = [
    (*shape, backend, *FORMS[(i + j) % len(FORMS)])
    for j, backend in enumerate(backends.BACKENDS)
    for i, shape in enumerate(SHAPES[backend.name])
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dim", "backend", "dtype", "quantize"), FULL, ids=lambda x: getattr(x, "name", str(x))
)
def test_compiled_on_gpu(heads, dim, backend, dtype, quantize):
    """All batches and lengths in one graph."""
    fp8 = torch.float8_e4m3fn in backend.cache_dtypes
    cache = "fp8_e4m3" if fp8 else "auto"
    model = Model(*heads, dim, dtype, quantize, backend=backend.name, kv_cache_dtype=cache, device="cuda")
    compare(model, [lengths_of(kind, batch) for batch in BATCHES for kind in LENGTHS], 16)


@torch.no_grad()
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_codes_are_those_of_dense_attention(dtype, kv_cache_dtype):
    model = Model(6, 2, 64, dtype, kv_cache_dtype=kv_cache_dtype, block_size=16)
    inputs = model.example_inputs(lengths_of("mixed", 7)[:4], 9)
    _, got = model(*inputs, return_codes=True)
    exact, tokens = dense(model, inputs[0], inputs[3])
    off = (codes(got[tokens]) - codes(quantize(exact, model.output_scale))).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 10 * torch.finfo(dtype).eps  # rounded to dtype first
    fused = Fused(6, 2, 64, dtype, kv_cache_dtype=kv_cache_dtype, block_size=16)
    inputs = fused.example_inputs(lengths_of("mixed", 7)[:4], 9)
    judge(fused, fused(*inputs, return_codes=True)[1], got, inputs)


@torch.no_grad()
def test_rope_turns_query_and_key_by_their_positions():
    model = Model(4, 2, 64, rope=True, block_size=16)
    plain = Model(4, 2, 64, block_size=16)
    inputs = model.example_inputs(((3, 20), (1, 9)), 3)
    query, key, value, metadata, positions = inputs
    _, got = model(*inputs, return_codes=True)
    turned = []
    for x in (query, key):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2, 32)).transpose(-1, -2).contiguous())
        angle = positions[:, None, None] * 10000.0 ** (-torch.arange(32) / 32)
        out = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
        turned.append(out.transpose(-1, -2).reshape(x.shape).to(x.dtype))
    plain.example_inputs(((3, 20), (1, 9)), 3)
    _, expected = plain(*turned, value, metadata, return_codes=True)
    assert (codes(got) - codes(expected)).abs().max() <= 1
    _, other = plain(query, key, value, metadata, return_codes=True)
    assert (codes(other) != codes(expected)).float().mean() > 0.5


def test_scales_are_told_from_their_inverse_and_from_one():
    model = Model(8, 1, 64)
    scales = {float(b) for n, b in model.attention.named_buffers() if n.endswith("_scale")} | {
        float(model.output_scale),
        float(model.projection.weight_scale),
    }
    assert len(scales | {1 / s for s in scales} | {1.0}) == 2 * 6 + 1
    _, got = model(*model.example_inputs(lengths_of("odd", 7), 3), return_codes=True)
    magnitude = got.float().abs()
    assert 4 < magnitude.median() < 64  # neither lost among the subnormals nor saturated
    assert (magnitude == 448).float().mean() < 0.05


def test_lengths():
    for kind, batch in itertools.product(LENGTHS, BATCHES):
        lengths = lengths_of(kind, batch)
        assert len(lengths) == batch
        assert all(0 <= new <= length <= 1024 for new, length in lengths)
    assert {new for new, _ in lengths_of("mixed", 7)} == {0, 1, 5, 7, 33}
