"""paged_attention against dense attention in fp64: mixed batches, formats, scales, poison, refusals."""

import math
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_passes import reference
from fusion_passes.nn import AttentionMetadata, PagedKVCache
from fusion_passes.ops import paged_attention, paged_attention_group_quant
from fusion_passes.ops.paged_attention import (
    PagedAttentionArguments,
    PagedAttentionGroupQuantArguments,
    gather,
    why_unsupported,
)
from fusion_passes.quant import QuantSpec, choose_scale, codes, dequantize, quantize

OP = torch.ops.fusion_passes.paged_attention.default
GROUP_OP = torch.ops.fusion_passes.paged_attention_group_quant.default
E4M3, E5M2, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALES = {"q_scale": 0.017, "k_scale": 0.013, "v_scale": 0.0071}
OUTPUT_SCALE = 0.0043


def gathered(*tensors, **options):
    call = PagedAttentionGroupQuantArguments if "group_size" in options else PagedAttentionArguments
    return gather(call(*tensors, **options))


# (new tokens, all tokens): prefill, decode, chunked prefill, padding, one token alone, decode over a page's edge
MIXED = ((5, 5), (1, 37), (4, 21), (0, 0), (1, 1), (1, 49), (0, 9))


class Problem:
    """Sequences in a shuffled cache whose unused slots are NaN, with more tokens and table entries than are used."""

    def __init__(self, lengths=MIXED, heads=6, kv_heads=2, head_dim=16, page_size=16, cache=E4M3, layout="HND"):
        self.lengths, self.heads, self.kv_heads = lengths, heads, kv_heads
        columns = max(math.ceil(n / page_size) for _, n in lengths) + 1
        used = [math.ceil(n / page_size) for _, n in lengths]
        pages = sum(used) + 3
        order = iter(torch.randperm(pages).tolist())
        table = torch.full((len(lengths), columns), -7, dtype=torch.int32)
        self.cache = PagedKVCache(pages, page_size, kv_heads, head_dim, cache, layout=layout)
        fp8 = cache in (E4M3, E5M2)
        self.keys, self.values = [], []
        for half in (self.cache.key, self.cache.value):
            reference.bits(half).fill_(127 if fp8 else torch.nan)
        for s, (_, n) in enumerate(lengths):
            table[s, : used[s]] = torch.tensor([next(order) for _ in range(used[s])], dtype=torch.int32)
            for name, half, kept in (("k", self.cache.key, self.keys), ("v", self.cache.value, self.values)):
                x = torch.randn(n, kv_heads, head_dim) + (name == "v") * 0.3
                scale = SCALES[f"{name}_scale"] if fp8 else 1.0
                stored = quantize(x, scale, cache) if fp8 else x.to(cache)
                kept.append(dequantize(stored, scale).double())
                for i in range(n):
                    page = int(table[s, i // page_size])
                    reference.bits(half)[page, :, i % page_size] = reference.bits(stored)[i]
        total = sum(q for q, _ in lengths)
        self.total = total
        packed = torch.randn(total + 2, heads + 3, head_dim)
        packed[total:] = torch.nan
        self.query = packed[:, 1 : heads + 1]  # strided
        self.metadata = AttentionMetadata.from_lengths(
            [q for q, _ in lengths], [n for _, n in lengths], table, page_size, tokens=total + 2
        )
        self.scales = {n: torch.tensor([x]) for n, x in SCALES.items() if fp8 and n != "q_scale"}

    def args(self, query, device="cpu"):
        m = self.metadata
        args = (query, self.cache.key, self.cache.value, m.block_table, m.query_start, m.seq_lens)
        return tuple(x.to(device) for x in args)

    def expected(self, query, scale, window=None, softcap=0.0, sinks=None, prob_scale=None):
        """Each query alone, in fp64. query: what goes into the product, [tokens, heads, head_dim]."""
        out = torch.zeros(query.shape, dtype=torch.float64)
        first, group = 0, self.heads // self.kv_heads
        for (count, length), keys, values in zip(self.lengths, self.keys, self.values, strict=True):
            for i in range(count):
                last = length - count + i
                low = 0 if window is None else max(0, last - window + 1)
                for h in range(self.heads):
                    k, v = (x[low : last + 1, h // group] for x in (keys, values))
                    logits = k @ query[first + i, h].double() * scale
                    if softcap:
                        logits = softcap * torch.tanh(logits / softcap)
                    sink = [] if sinks is None else [sinks[h].double()]
                    top = torch.stack([*logits, *sink]).max()
                    p = (logits - top).exp()
                    total = p.sum() + sum((x - top).exp() for x in sink)
                    if prob_scale is not None:
                        p = quantize(p, prob_scale, self.cache.dtype).double() * prob_scale
                    out[first + i, h] = p @ v / total
            first += count
        return out


def run(problem, query_dtype=BF16, dtype=None, device="cpu", implementation="op", **options):
    """The output, and what it should be before it is rounded."""
    query = problem.query.to(query_dtype)
    used, scales = query, dict(problem.scales)
    if query_dtype in (E4M3, E5M2):
        query = quantize(problem.query, SCALES["q_scale"], query_dtype)
        used, scales["q_scale"] = dequantize(query, SCALES["q_scale"]), torch.tensor(SCALES["q_scale"])
        dtype = dtype or FP32
    if dtype in (E4M3, E5M2):
        scales["output_scale"] = torch.tensor(OUTPUT_SCALE)
    tensors = {n: x.to(device) for n, x in ({**scales, **options}).items() if isinstance(x, torch.Tensor)}
    function = paged_attention if implementation == "op" else gathered
    out = function(*problem.args(query, device), **{**options, **tensors}, scale=0.31, dtype=dtype)
    options.pop("max_query_len", None)
    return out.cpu(), problem.expected(used, 0.31, **options)


def check(out, expected, total, exact=True):
    """exact: fp32 up to the rounding of the output; the kernels multiply in fp16, or in bf16."""
    slack = 2e-5 if exact else 2e-5 + 2**-9 * expected.abs().max()
    assert out.is_contiguous()
    if out.dtype in (E4M3, E5M2):
        low, want, high = (codes(quantize((expected + x).float(), OUTPUT_SCALE, out.dtype)) for x in (-slack, 0, slack))
        got = codes(out)
        assert ((got >= low - 1) & (got <= high + 1)).all()
        assert (got == want).float().mean() > (0.99 if exact else 0.97)
        assert (out[total:].view(torch.uint8) == 0).all()
    else:
        eps = torch.finfo(out.dtype).eps
        torch.testing.assert_close(out.double(), expected, rtol=max(eps, 2e-5), atol=float(slack))
        assert (out[total:] == 0).all()


CASES = {
    "plain": ({}, {}),
    "page 48": ({"page_size": 48, "layout": "NHD"}, {}),
    "page 128": ({"page_size": 128}, {"query_dtype": FP16}),
    "page 1": ({"page_size": 1, "lengths": ((2, 3), (1, 5))}, {}),
    "MHA": ({"heads": 3, "kv_heads": 3}, {}),
    "GQA 8": ({"heads": 8, "kv_heads": 1, "head_dim": 32}, {"dtype": E4M3}),
    "bf16 cache": ({"cache": BF16, "layout": "NHD"}, {}),
    "bf16 cache, FP8 query": ({"cache": BF16}, {"query_dtype": E4M3, "dtype": BF16}),
    "fp16 cache, FP8 output": ({"cache": FP16}, {"query_dtype": FP16, "dtype": E4M3}),
    "e5m2": ({"cache": E5M2}, {"query_dtype": E5M2, "dtype": E5M2}),
    "FP8 throughout": ({}, {"query_dtype": E4M3, "dtype": E4M3}),
    "window": ({}, {"window": 7}),
    "window 1": ({}, {"window": 1, "query_dtype": E4M3}),
    "softcap": ({}, {"softcap": 0.9, "query_dtype": E4M3}),
    "sinks": ({}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, -torch.inf, 2.0])}),
    "all": (
        {"cache": E4M3, "layout": "NHD"},
        {"window": 19, "softcap": 2.0, "sinks": torch.linspace(-1, 2, 6), "query_dtype": E4M3, "dtype": E4M3},
    ),
    "probabilities": ({}, {"prob_scale": torch.tensor(0.0029), "dtype": FP32}),
    "long and short": ({"lengths": ((40, 60), (1, 37), (20, 20), (0, 0), (3, 50), (17, 40))}, {}),
    "long and short, at most 40": (
        {"lengths": ((40, 60), (1, 37), (0, 0), (16, 50), (17, 40))},
        {"max_query_len": 40, "query_dtype": E4M3, "dtype": E4M3, "window": 30},
    ),
    "nothing to do": ({"lengths": ((0, 0), (0, 3))}, {}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", ["op", "gather"])
@pytest.mark.parametrize("case", CASES)
def test_against_dense(case, implementation, device):
    shape, options = CASES[case]
    problem = Problem(**shape)
    out, expected = run(problem, device=device, implementation=implementation, **options)
    if "prob_scale" in options:  # a probability at the edge between two codes may fall to either side
        assert (out - expected).abs().max() < 0.02 * expected.abs().max()
        assert (out - expected).norm() < 2e-3 * expected.norm()
    else:
        check(out, expected, problem.total, exact=device == "cpu" or implementation == "gather")


def test_prob_scale_is_used():
    problem = Problem()
    exact, _ = run(problem, dtype=FP32)
    coarse, _ = run(problem, dtype=FP32, prob_scale=torch.tensor(0.0029))
    saturated, _ = run(problem, dtype=FP32, prob_scale=torch.tensor(1e-4))
    assert 0 < (coarse - exact).norm() < 0.05 * exact.norm()
    assert (saturated - exact).norm() > 0.2 * exact.norm()


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale", "output_scale"])
def test_each_scale_is_applied_once(name):
    problem = Problem(((3, 7), (1, 20)))
    query = quantize(problem.query[:4], 0.017)
    tensors = {n: torch.tensor(x) for n, x in {**SCALES, "output_scale": 0.05}.items()}
    args = problem.args(query)
    base = paged_attention(*args, **tensors, scale=0.3, dtype=E4M3)
    tensors[name] = tensors[name] * 4
    out = paged_attention(*args, **tensors, scale=0.3, dtype=E4M3)
    if name in ("q_scale", "k_scale"):
        tensors[name] = tensors[name] / 4
        same = paged_attention(*args, **tensors, scale=1.2, dtype=E4M3)
    else:
        factor = 4.0 if name == "v_scale" else 0.25
        full = paged_attention(*args, **tensors | {name: tensors[name] / 4}, scale=0.3, dtype=E4M3)
        assert torch.equal(base.float(), full.float())
        del tensors["output_scale"]
        if name == "v_scale":
            tensors[name] = tensors[name] / 4
        exact = paged_attention(*args, **tensors, scale=0.3, dtype=FP32)
        same = quantize(exact * factor, 0.05)
    assert (codes(out) - codes(same)).abs().max() <= 1
    assert not torch.equal(codes(out), codes(base))


def test_a_query_with_a_scale_is_quantized_inside():
    problem = Problem()
    query, scale = problem.query.bfloat16()[: problem.total], torch.tensor(0.017)
    inside = paged_attention(*problem.args(query), scale, **problem.scales, scale=0.3)
    outside = paged_attention(*problem.args(quantize(query, scale)), scale, **problem.scales, scale=0.3, dtype=BF16)
    assert torch.equal(inside, outside)


def test_fp8_output_saturates():
    problem = Problem()
    out = paged_attention(
        *problem.args(problem.query.bfloat16()),
        **problem.scales,
        output_scale=torch.tensor(1e-5),
        scale=1.0,
        dtype=E4M3,
    )
    values = out[: problem.total].float()
    assert values.abs().max() == 448
    assert values.isfinite().all()
    assert (values.abs() == 448).float().mean() > 0.9


def test_a_decode_is_the_last_row_of_a_prefill():
    prefill = Problem(((23, 23),))
    out, _ = run(prefill)
    decode = prefill.args(prefill.query.bfloat16()[[22, 22]])  # the second only pads the batch
    start = torch.tensor([0, 1], dtype=torch.int32)
    for function in (paged_attention, gathered):
        last = function(*decode[:4], start, decode[5], **prefill.scales, scale=0.31, max_query_len=1)
        torch.testing.assert_close(last[0], out[22], rtol=1e-2, atol=1e-5)
        assert (last[1] == 0).all()


def test_pages_left_of_the_window_may_be_gone():
    problem = Problem(((2, 45),))
    problem.metadata.block_table[0, :2] = -1
    for implementation in ("op", "gather"):
        out, expected = run(problem, window=12, implementation=implementation)
        check(out, expected, problem.total)


def test_padded_sequences_with_queries():
    """A CUDA graph for three decodes, of which one is real."""
    problem = Problem(((1, 20), (0, 0), (0, 0)))
    args = list(problem.args(torch.randn(3, 6, 16).bfloat16()))
    args[4] = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    for function in (paged_attention, gathered):
        out = function(*args, **problem.scales, scale=0.3, max_query_len=1)
        assert (out[1:] == 0).all()
        assert out[0].abs().min() > 0


@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)], ids=str)
@pytest.mark.parametrize("function", [paged_attention, gathered])
@pytest.mark.parametrize("device", DEVICES)
def test_empty(shape, function, device):
    tokens, seqs, columns = shape
    cache = PagedKVCache(4, 16, 2, 16, BF16, device=device)
    index = {"dtype": torch.int32, "device": device}
    batch = torch.zeros(seqs, columns, **index), torch.zeros(seqs + 1, **index), torch.zeros(seqs, **index)
    out = function(torch.randn(tokens, 4, 16, device=device).bfloat16(), cache.key, cache.value, *batch, scale=1.0)
    assert out.shape == (tokens, 4, 16)
    assert (out == 0).all()


def test_gather_asks_the_device_nothing():
    """A fake tensor has no values, so that a question to them is an error; as it is while a CUDA graph is captured."""
    problem = Problem()
    args = (*problem.args(problem.query.bfloat16()), torch.tensor(0.1), *problem.scales.values(), None, torch.ones(1))
    with FakeTensorMode() as mode:
        fake = [x if x is None else mode.from_tensor(x) for x in args]
        assert (
            gathered(*fake, torch.zeros(6), scale=0.3, window=3, softcap=1.0, dtype=E4M3).shape == problem.query.shape
        )


HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("shape", "options", "capability", "reason"),
    [
        ({"head_dim": 128}, {}, HOPPER, None),
        ({"cache": E5M2, "page_size": 48}, {}, HOPPER, None),
        ({"cache": BF16}, {}, (8, 0), None),
        ({}, {}, (8, 0), "8.9 for FP8, this is 8.0"),
        ({"head_dim": 48}, {}, HOPPER, "head_dim is 48, they have 16, 32, 64, 128, 256"),
        ({"cache": FP32}, {"dtype": FP32}, HOPPER, "query is torch.float32"),
        ({}, {"dtype": FP32}, HOPPER, "the output is torch.float32"),
        ({}, {}, None, "need an NVIDIA GPU"),
    ],
    ids=str,
)
def test_why_the_pages_are_gathered(shape, options, capability, reason):
    problem = Problem(**{"lengths": ((1, 5),)} | shape)
    query = problem.query.to(FP32 if problem.cache.key.dtype is FP32 else BF16)
    why = why_unsupported(PagedAttentionArguments(*problem.args(query), scale=1.0, **options), capability)
    assert (why is None) if reason is None else reason in why


def test_rows_of_the_cache_that_are_not_aligned():
    problem = Problem(((1, 5),))
    query, key, value, *rest = problem.args(problem.query.bfloat16())
    padded = torch.zeros(*key.shape[:3], 24, dtype=torch.uint8).view(E4M3)[..., :16]
    for halves in ((padded, value), (key, padded)):
        arguments = PagedAttentionArguments(query, *halves, *rest, scale=1.0)
        assert "must start at multiples of 16 bytes" in why_unsupported(arguments, HOPPER)


@pytest.mark.gpu
def test_a_kernel_that_was_asked_for_is_not_replaced():
    problem = Problem(head_dim=48)
    with pytest.raises(NotImplementedError, match="head_dim is 48"):
        paged_attention(*problem.args(problem.query.bfloat16(), "cuda"), scale=1.0, implementation="triton")


def test_gather_in_parts(monkeypatch):
    monkeypatch.setattr(sys.modules[gather.__module__], "GATHER_BYTES", 1)
    problem = Problem()
    check(*run(problem, implementation="gather"), problem.total)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cache", "options"),
    [(E4M3, {"dtype": E4M3, "window": 5}), (BF16, {"sinks": True, "max_query_len": 5})],
    ids=str,
)
def test_opcheck(cache, options, device):
    problem = Problem(cache=cache)
    for half in (problem.cache.key, problem.cache.value):
        reference.bits(half)[half.float().isnan()] = 0  # a NaN is not equal to itself
    query = problem.query.bfloat16().nan_to_num()
    options = dict(options)
    sinks = torch.zeros(6, device=device) if options.pop("sinks", False) else None
    kv_scales = [problem.scales[n].to(device) if problem.scales else None for n in ("k_scale", "v_scale")]
    scales = [None, *kv_scales, None, None, sinks]
    # test_schema compares arguments by torch.allclose, which FP8 does not have (torch 2.13); bf16 passes it.
    some = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    utils = some if cache == E4M3 else "ALL"
    arguments = (*problem.args(query, device), *scales)
    torch.library.opcheck(OP, arguments, {"scale": 0.3, **options}, test_utils=utils)


GROUPS = {
    "bf16 query": ({"head_dim": 32}, {"group_size": 16}),
    "FP8 query, e5m2": ({"head_dim": 32, "layout": "NHD"}, {"group_size": 32, "query_dtype": E4M3, "dtype": E5M2}),
    "all": ({}, {"group_size": 8, "window": 9, "softcap": 2.0, "sinks": torch.linspace(-1, 2, 6)}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", ["op", "gather"])
@pytest.mark.parametrize("case", GROUPS)
def test_scales_per_group(case, implementation, device):
    shape, options = GROUPS[case]
    problem, options = Problem(**shape), dict(options)
    group_size, dtype = options.pop("group_size"), options.pop("dtype", None)
    query, scales = problem.query.bfloat16(), {n: x.to(device) for n, x in problem.scales.items()}
    used = query
    if options.pop("query_dtype", None):
        query = quantize(problem.query, SCALES["q_scale"])
        used, scales["q_scale"] = dequantize(query, SCALES["q_scale"]), torch.tensor(SCALES["q_scale"], device=device)
    function = paged_attention_group_quant if implementation == "op" else gathered
    tensors = {n: x.to(device) for n, x in options.items() if isinstance(x, torch.Tensor)}
    out, out_scales = function(
        *problem.args(query, device), **options | tensors | scales, scale=0.31, dtype=dtype, group_size=group_size
    )
    spec = QuantSpec(dtype or E4M3, "group", group_size, static=False)
    expected = problem.expected(used, 0.31, **options).float()
    expected[problem.total :] = 0
    want = choose_scale(expected, spec)
    assert out.dtype == spec.dtype
    assert out.is_contiguous()
    assert out_scales.is_contiguous()
    torch.testing.assert_close(out_scales.cpu(), want, rtol=4e-3, atol=0)
    slack = 0.0 if device == "cpu" or implementation == "gather" else 2**-9 * expected.abs().max()
    low, middle, high = (codes(quantize(expected + x, want, spec.dtype)) for x in (-slack, 0.0, slack))
    got = codes(out.cpu())
    assert ((got >= low - 1) & (got <= high + 1)).all()
    assert (got == middle).float().mean() > (0.97 if slack else 0.99)
    assert (codes(out.cpu())[problem.total :] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("lower_bound", [None, 1e-10, 0.0])
@pytest.mark.parametrize("implementation", ["op", "gather"])
def test_group_of_zeros_has_the_smallest_scale(implementation, lower_bound, dtype):
    problem = Problem(((0, 0), (1, 4)))
    function = paged_attention_group_quant if implementation == "op" else gathered
    arguments = problem.args(problem.query.to(dtype))
    options = {**problem.scales, "scale": 0.3, "group_size": 4, "scale_lower_bound": lower_bound}
    out, scales = function(*arguments, **options)
    least = torch.tensor(torch.finfo(FP32).tiny if lower_bound is None else lower_bound)
    assert (scales[1:] == least).all()
    assert out[1:].isnan().all() if lower_bound == 0.0 else (codes(out)[1:] == 0).all()
    assert (scales[0] > 1e-6).all()
    bound = scales[0].median().item()
    _, bounded = function(*arguments, **options | {"scale_lower_bound": bound})
    assert torch.equal(bounded, scales.clamp_min(bound))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group_size": 5}, ValueError, "group_size must divide head_dim, 16, got 5"),
        ({"group_size": 0}, ValueError, "group_size must divide head_dim, 16, got 0"),
        ({"group_size": 8, "dtype": BF16}, TypeError, "dtype must be FP8 for scales per group"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"scale_lower_bound": -1e-10}, ValueError, "a lower bound of scales must be a finite number, 0 or more"),
    ],
    ids=str,
)
def test_bad_groups(options, error, message):
    problem = Problem(((1, 4),))
    with pytest.raises(error, match=message):
        paged_attention_group_quant(*problem.args(problem.query.bfloat16()), scale=0.3, **{"group_size": 8} | options)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_groups(device):
    problem = Problem(cache=BF16)
    for half in (problem.cache.key, problem.cache.value):
        half[half.isnan()] = 0
    arguments = problem.args(problem.query.bfloat16().nan_to_num(), device)
    torch.library.opcheck(GROUP_OP, arguments, {"scale": 0.3, "group_size": 8, "scale_lower_bound": 1e-10})


@pytest.mark.gpu
def test_one_cuda_graph_serves_other_lengths():
    first, second = Problem(((1, 20), (1, 45))), Problem(((1, 33), (1, 3)))
    args = list(first.args(first.query[:2].bfloat16(), "cuda"))
    args[3] = args[3][:, :3].contiguous()
    scales = {n: x.cuda() for n, x in first.scales.items()}
    call = lambda: paged_attention(*args, **scales, scale=0.31, max_query_len=1)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    new = second.args(second.query[:2].bfloat16(), "cuda")
    args[0].copy_(new[0])
    for half, other in zip(args[1:3], new[1:3], strict=True):
        pages = min(len(half), len(other))
        half.view(torch.uint8)[:pages].copy_(other.view(torch.uint8)[:pages])
    args[3].copy_(new[3][:, :3])
    args[5].copy_(new[5])
    graph.replay()
    check(out.cpu(), second.expected(second.query[:2].bfloat16(), 0.31), 2, exact=False)


def change(**changes):
    problem = Problem(((2, 20), (1, 4)))
    names = ("query", "key_cache", "value_cache", "block_table", "query_start", "seq_lens")
    arguments = dict(zip(names, problem.args(problem.query[:3].bfloat16()), strict=True)) | problem.scales
    arguments |= {"scale": 1.0}
    return {n: x(arguments[n]) if callable(x) else x for n, x in changes.items()}, arguments


INT = {"dtype": torch.int32}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": lambda x: x[0]}, ValueError, r"query must be \[tokens, heads, 16\]"),
        ({"query": lambda x: x[:, :5]}, ValueError, "5, must be a multiple of the key heads, 2"),
        ({"query": lambda x: x.double()}, TypeError, "query must be FP8"),
        ({"query": lambda x: x.to(E4M3)}, TypeError, "dtype says what to return"),
        ({"seq_lens": lambda x: x.long()}, TypeError, "seq_lens must be int32"),
        ({"query_start": lambda x: x[1:]}, ValueError, "query_start one element more"),
        ({"block_table": lambda x: x[0]}, ValueError, "block_table must have 2 dimensions"),
        ({"k_scale": torch.ones(2)}, ValueError, "k_scale must hold one element"),
        ({"v_scale": torch.ones((), device="meta")}, ValueError, "v_scale is on meta"),
        ({"q_scale": torch.tensor(2)}, TypeError, "q_scale must be float32"),
        ({"window": 0}, ValueError, "1 or more, got 0"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"sinks": torch.zeros(5)}, ValueError, "one logit for each of 6 heads"),
        ({"output_scale": torch.ones(())}, ValueError, "output_scale belongs to FP8 output"),
        ({"dtype": torch.uint8}, TypeError, "dtype must be FP8"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of"),
        ({"seq_lens": torch.tensor([60, 4], **INT)}, ValueError, "3 pages of 16 tokens hold 48, seq_lens asks for 60"),
        ({"seq_lens": torch.tensor([1, 4], **INT)}, ValueError, "no sequence is shorter than its queries"),
        ({"query_start": torch.tensor([0, 2, 4], **INT)}, ValueError, "at most the 3 tokens"),
        ({"query_start": torch.tensor([0, 2, 1], **INT)}, ValueError, "must rise from 0"),
        ({"max_query_len": 1}, ValueError, "max_query_len is 1"),
        ({"block_table": torch.tensor([[0, 9, 0], [0, 0, 0]], **INT)}, IndexError, r"block_table\[0, 1\] is 9"),
        ({"block_table": torch.tensor([[0, 1, 0], [-1, 0, 0]], **INT)}, IndexError, r"block_table\[1, 0\] is -1"),
    ],
)
def test_bad_arguments(changes, error, message):
    changed, arguments = change(**changes)
    with pytest.raises(error, match=message):
        paged_attention(**arguments | changed)


def test_scales_without_an_fp8_cache():
    problem = Problem(cache=BF16)
    args = problem.args(problem.query.bfloat16())
    with pytest.raises(ValueError, match=r"belong to an FP8 cache, this one is .*bfloat16"):
        paged_attention(*args, None, torch.ones(()), scale=1.0)
    with pytest.raises(ValueError, match="asks to quantize it like the cache"):
        paged_attention(*args, torch.ones(()), scale=1.0)
    with pytest.raises(TypeError, match="one dtype, or an FP8 cache"):
        paged_attention(args[0].half(), *args[1:], scale=1.0)


@pytest.mark.gpu
def test_values_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("FUSION_PASSES_CHECK", "1")
    changed, arguments = change(block_table=torch.tensor([[0, 9, 0], [0, 0, 0]], **INT))
    arguments = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in (arguments | changed).items()}
    with pytest.raises(IndexError, match=r"block_table\[0, 1\] is 9"):
        paged_attention(**arguments)
