"""Backends: what they say they can do and the page that says so too, the choice, FlexAttention, one from outside."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import pytest
import torch

from fusion_passes import reference
from fusion_passes.nn import Attention, AttentionMetadata, PagedKVCache, StaticKVCache, backends, flex
from fusion_passes.ops import support
from fusion_passes.ops.paged_attention import PagedAttentionArguments, _cuda, why_unsupported
from fusion_passes.quant import QuantSpec, dtype_name

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
REQUEST = backends.Request(head_dim=128, dtype=BF16, cache_dtype=E4M3, page_size=64)
YES = {True: "yes", False: "no"}


def matrix():
    """The table of docs/attention.md, from the classes."""

    def listed(values):
        return "any" if values is None else ", ".join(map(str, values))

    def dtypes(values):
        return ", ".join(map(dtype_name, values))

    rows = {
        "device": lambda b: listed(b.devices),
        "query, key, value": lambda b: dtypes(b.dtypes),
        "cache": lambda b: dtypes(b.cache_dtypes),
        "layout": lambda b: listed(b.layouts),
        "head size": lambda b: listed(b.head_dims) if b.min_head_dim == 1 else f"from {b.min_head_dim} on",
        "page size": lambda b: listed(b.page_sizes),
        "elements of the keys": lambda b: (
            "any number" if b.max_cache_elements is None else f"up to {b.max_cache_elements}"
        ),
        "quantized query": lambda b: YES[b.supports_quant_query_input],
        "quantized probabilities": lambda b: YES[b.supports_quant_probs],
        "FP8 output, static per tensor": lambda b: YES[b.supports_fused_output_quant(QuantSpec())],
        "FP8 output, dynamic per group": lambda b: YES[
            b.supports_fused_output_quant(QuantSpec(E4M3, "group", 128, static=False))
        ],
        "sliding window": lambda b: YES[b.supports_window],
        "soft cap": lambda b: YES[b.supports_softcap],
        "sinks": lambda b: YES[b.supports_sinks],
        "NaN in slots that are not visible": lambda b: "stays there" if b.ignores_hidden_values else "may spread",
    }
    names = " | ".join(f"`{b.name}`" for b in backends.BACKENDS)
    lines = [f"| | {names} |", "|---" * (len(backends.BACKENDS) + 1) + "|"]
    lines += [f"| {row} | {' | '.join(cell(b) for b in backends.BACKENDS)} |" for row, cell in rows.items()]
    return "\n".join(lines)


def test_the_page_says_what_the_classes_say():
    assert matrix() in PAGE.read_text()


@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("static", [False, True])
def test_no_backend_has_other_output(backend, static):
    for spec in (QuantSpec(E4M3, "token", static=static), QuantSpec(E4M3, "group", 64, static=True)):
        assert not backend.supports_fused_output_quant(spec)
    assert not backend.supports_fused_output_quant(QuantSpec(static=False))


# The choice


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "triton"),
        ({"device": "cuda"}, "triton"),
        ({"device": "cpu"}, "triton"),
        ({"head_dim": 96}, "sdpa"),
        ({"head_dim": 96, "device": "cuda"}, "sdpa"),
        ({"head_dim": 96, "cache_dtype": BF16, "device": "cuda"}, "flex"),
        ({"head_dim": 96, "cache_dtype": BF16, "device": "cpu"}, "sdpa"),
        ({"head_dim": 96, "cache_dtype": BF16}, "sdpa"),
        ({"dtype": torch.float32}, "sdpa"),
        ({"cache_dtype": torch.float8_e4m3fnuz, "device": "cuda"}, "sdpa"),
    ],
    ids=str,
)
def test_auto_takes_the_first_that_can(changes, name):
    assert backends.choose("auto", backends.Request(**(vars(REQUEST) | changes))).name == name


@pytest.mark.parametrize(
    ("capability", "cache", "reason"),
    [
        ((9, 0), E4M3, None),
        ((8, 9), E4M3, None),
        ((8, 6), E4M3, "compute capability 8.9, this has 8.6"),
        ((8, 6), BF16, None),
        ((7, 5), BF16, "compute capability 8.0, this has 7.5"),
        (None, BF16, "this is another GPU"),
    ],
)
def test_triton_asks_the_gpu(monkeypatch, capability, cache, reason):
    """As the op does at the call, where "auto" would gather."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(backends, "device_capability", lambda device: capability)
    request = backends.Request(head_dim=128, dtype=BF16, cache_dtype=cache, page_size=64, device="cuda")
    reasons = backends.Triton.why_unsupported(request)
    assert len(reasons) == (reason is not None)
    assert all(reason in each for each in reasons)
    if capability is not None:
        x, y = torch.zeros(1, 1, 128, dtype=BF16), torch.zeros(1, 1, 16, 128).to(cache)
        one = torch.ones(1, 1, dtype=torch.int32)
        call = PagedAttentionArguments(x, y, y, one, torch.ones(2, dtype=torch.int32), one[0], scale=1.0)
        assert (why_unsupported(call, capability) is None) == (reason is None)


class Narrow(backends.AttentionBackend):
    name = "narrow"
    head_dims = (128,)


def test_a_backend_says_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", (Narrow,))
    with pytest.raises(ValueError) as error:
        Attention(
            *(4, 2, 16),
            window=4,
            quantize_query=True,
            kv_cache_dtype="fp8_e4m3",
            backend="narrow",
            dtype=BF16,
            device="cpu",
        )
    assert str(error.value) == (
        "no attention backend can do this layer:\n  narrow: head size 16 is not among 128; cache dtype "
        "torch.float8_e4m3fn is not among torch.bfloat16, torch.float16; device cpu is not among cuda; it has no "
        "quantized queries; it has no sliding window"
    )
    with pytest.raises(ValueError, match="narrow: the device is not known, it needs cuda"):
        Attention(4, 2, 128, dtype=BF16)
    assert Attention(4, 2, 128, dtype=BF16, backend="narrow", device="meta").backend is Narrow
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of \['narrow'\], got 'fast'"):
        Attention(4, 2, 128, backend="fast")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "cache dtype torch.float8_e4m3fn is not among torch.bfloat16, torch.float16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "cache dtype torch.float8_e5m2 is not among"),
        ({"kv_cache_dtype": "fp8_e4m3", "quantize_query": True}, "it has no quantized queries"),
        ({"block_size": 48}, "page size 48 is not among 16, 32, 64, 128, 256"),
        ({"device": "cpu"}, "device cpu is not among cuda"),
        ({"head_dim": 8}, "head size 8 is below 16"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not among"),
    ],
    ids=str,
)
def test_flex_declines(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Attention(**({"num_heads": 4, "num_kv_heads": 2, "head_dim": 96, "backend": "flex", "dtype": BF16} | options))


def test_a_cache_that_the_backend_cannot_read():
    attention = Attention(4, 2, 96, backend="flex", dtype=BF16)
    attention.bind_cache(None)
    assert attention.allocate_cache(3).layout == "NHD"
    assert attention.allocate_static_cache(2, 300).page_size == 384
    for cache, message in (
        (PagedKVCache(3, 64, 2, 96, BF16), "layout HND is not among NHD"),
        (PagedKVCache(3, 48, 2, 96, BF16, layout="NHD"), "page size 48 is not among"),
        (PagedKVCache(2**18, 64, 2, 96, BF16, layout="NHD", device="meta"), "3221225472 elements are more than"),
    ):
        with pytest.raises(ValueError, match=f"backend flex cannot read this cache: {message}"):
            attention.bind_cache(cache)
    q, k, v = torch.randn(1, 8, 96, dtype=BF16).split([4, 2, 2], 1)
    metadata = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), 384)
    with pytest.raises(ValueError, match="backend flex runs on cuda, not cpu"):
        attention(q, k, v, metadata)


# Output


def batch(kv_cache_dtype="fp8_e4m3", head_dim=32, **options):
    attention = Attention(4, 2, head_dim, kv_cache_dtype=kv_cache_dtype, block_size=16, dtype=BF16, **options)
    attention.set_scales(q_scale=0.031, k_scale=0.017, v_scale=0.0071)
    attention.allocate_cache(4)
    metadata = AttentionMetadata.from_lengths([5, 2], [5, 2], torch.tensor([[3], [1]], dtype=torch.int32), 16, tokens=9)
    return attention, (*torch.randn(9, 8, head_dim, dtype=BF16).split([4, 2, 2], 1), metadata)


def test_output_with_scales_per_group():
    attention, inputs = batch()
    plain = attention(*inputs).float()
    codes, scales = attention(*inputs, output_group_size=16)
    assert (codes.dtype, codes.shape, scales.shape) == (E4M3, (9, 4, 32), (9, 4, 2))
    values = codes.float() * scales.repeat_interleave(16, -1)
    torch.testing.assert_close(values, plain, rtol=0.08, atol=1e-3)
    torch.testing.assert_close(scales[:7], plain[:7].unflatten(-1, (2, 16)).abs().amax(-1) / 448, rtol=0.01, atol=0)
    assert (values[7:] == 0).all()
    other, _ = attention(*inputs, output_group_size=32, output_dtype=torch.float8_e5m2)
    assert other.dtype == torch.float8_e5m2


def test_output_that_is_refused():
    attention, inputs = batch()
    for options, message in (
        ({"output_group_size": 24}, "output_group_size must divide head_dim, 32, got 24"),
        ({"output_group_size": 0}, "output_group_size must divide head_dim, 32, got 0"),
        ({"output_group_size": 16, "output_scale": torch.tensor(0.5)}, "give one of them"),
        ({"output_dtype": E4M3}, "output_dtype goes with output_scale or output_group_size"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*inputs, **options)
    attention.backend = Narrow
    with pytest.raises(ValueError, match="backend narrow has no output quantized as QuantSpec"):
        attention._output_dtype(torch.tensor(0.5), None, None, torch.device("cpu"))


def test_the_backend_is_asked_about_the_output_that_it_writes(monkeypatch):
    asked = []
    supports = backends.SDPA.supports_fused_output_quant
    monkeypatch.setattr(
        backends.SDPA, "supports_fused_output_quant", lambda spec: asked.append(spec.dtype) or supports(spec)
    )
    for cache_dtype, dtype in (("fp8_e5m2", torch.float8_e5m2), ("fp8_e4m3", E4M3), ("auto", E4M3)):
        attention, inputs = batch(backend="sdpa", kv_cache_dtype=cache_dtype)
        assert attention(*inputs, output_scale=torch.tensor(0.5)).dtype == dtype
        assert asked.pop() == dtype
        assert attention(*inputs, output_group_size=16)[0].dtype == dtype
        assert asked.pop() == dtype


# FlexAttention. On the CPU its mask and its layout are tested, run by a dense product: the kernel needs a GPU.

# (new tokens, all tokens): prefill, decode, chunked prefill, padding, one token alone, decode over a page's edge
MIXED = ((5, 5), (1, 37), (4, 21), (0, 0), (1, 1), (1, 49), (0, 9))
LONG = ((200, 230), (1, 20), (0, 0), (129, 300))
FLEX = {
    "mixed": (MIXED, {}),
    "blocks of one sequence": (LONG, {}),
    "window": (LONG, {"window": 21}),
    "soft cap": (MIXED, {"softcap": 0.9}),
    "sinks": (MIXED, {"sinks": True}),
    "decode": (((1, 37), (1, 20), (0, 0), (1, 1)), {"max_query_len": 1}),
    "decode, two heads in a group": (((1, 37), (1, 20), (0, 0), (1, 1)), {"max_query_len": 1, "heads": 4}),
    "few tokens each": (((3, 37), (1, 20), (0, 0), (2, 2)), {"max_query_len": 3, "window": 19}),
    "static": (LONG, {"page_size": 384}),
    "fp16, no GQA": (MIXED, {"dtype": FP16, "heads": 2}),
    "tokens of no sequence": (MIXED, {"empty": [2, 5]}),
    "nothing": (((0, 0), (0, 3)), {}),
}


def flex_problem(lengths, heads=6, kv_heads=2, head_dim=24, page_size=16, dtype=BF16, device="cpu"):
    used = [math.ceil(n / page_size) for _, n in lengths]
    order = torch.randperm(sum(used) + 3, dtype=torch.int32)
    table = torch.full((len(lengths), max(used) + 2), -7, dtype=torch.int32)
    for s, count in enumerate(used):
        table[s, :count] = order[sum(used[:s]) :][:count]
    cache = PagedKVCache(len(order), page_size, kv_heads, head_dim, dtype, layout="NHD", device=device)
    for half in (cache.key, cache.value):
        half.copy_(torch.randn(half.shape))
    total = sum(new for new, _ in lengths) + 2
    query = torch.randn(total, heads, head_dim, dtype=dtype).to(device)
    metadata = AttentionMetadata.from_lengths(
        *([new for new, _ in lengths], [n for _, n in lengths], table.to(device), page_size), tokens=total
    )
    return query, cache.key, cache.value, metadata.block_table, metadata.query_start, metadata.seq_lens


def over_listed_blocks(query, key, value, score_mod, mask, scale, enable_gqa, kernel_options, return_aux):
    """What FlexAttention's kernel computes: the visible keys of the blocks that the mask lists, and of no others."""
    from torch.nn.attention.flex_attention import AuxOutput

    del kernel_options, return_aux
    batch, heads, rows, _ = query.shape
    keys = mask.BLOCK_SIZE[1]
    assert key.shape[0] == 1
    assert enable_gqa == (heads != key.shape[1])
    assert mask.seq_lengths == (rows, key.shape[2])
    q, kv = torch.arange(rows)[:, None], torch.arange(key.shape[2])
    out, lse = [], []
    for b in range(batch):
        listed = mask.kv_indices[b, 0, 0, : mask.kv_num_blocks[b, 0, 0]]
        assert len(listed.unique()) == len(listed)
        seen = mask.mask_mod(torch.tensor(b), torch.tensor(0), q, kv) & torch.isin(kv // keys, listed)
        score = query[b].float() @ key[0].float().repeat_interleave(heads // key.shape[1], 0).mT * scale
        score = (score if score_mod is None else score_mod(score, b, 0, q, kv)).masked_fill(~seen, -torch.inf)
        lse.append(score.logsumexp(-1))
        out.append(score.softmax(-1).nan_to_num() @ value[0].float().repeat_interleave(heads // key.shape[1], 0))
    return torch.stack(out).to(query.dtype), AuxOutput(lse=torch.stack(lse))


def check_flex(run, name, device="cpu", **shape):
    lengths, options = FLEX[name][0], dict(FLEX[name][1])
    shape |= {k: v for k, v in options.items() if k in ("page_size", "dtype", "heads")}
    problem = flex_problem(lengths, device=device, **shape)
    problem[-1][options.pop("empty", [])] = 0  # a CUDA graph's batch that is padded by lengths of 0
    options = {k: v for k, v in options.items() if k in ("window", "softcap", "max_query_len")}
    sinks = torch.linspace(-1, 2, problem[0].shape[1], device=device) if name == "sinks" else None
    out = run(
        *problem,
        sinks,
        page_size=problem[1].shape[2],
        scale=0.31,
        **({"window": None, "softcap": 0.0, "max_query_len": None} | options),
    )
    options.pop("max_query_len", None)
    expected = reference.paged_attention(*problem, sinks=sinks, scale=0.31, dtype=torch.float32, **options)
    assert (out.shape, out.dtype) == (expected.shape, problem[0].dtype)
    error = 4 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=error, atol=2 * error)
    assert (out[-2:] == 0).all()


@pytest.mark.parametrize("name", FLEX)
def test_flex_lists_every_block_that_a_query_sees(name, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", over_listed_blocks)
    check_flex(flex._attention, name)


def test_flex_traces_in_one_graph():
    def run(*batch, max_query_len, **options):
        compiled = torch.compile(functools.partial(flex._attention, **options), backend="aot_eager", fullgraph=True)
        return compiled(*batch, max_query_len=max_query_len)

    check_flex(run, "window")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLEX)
def test_flex_on_gpu(name):
    check_flex(flex.attention, name, "cuda", head_dim=96)


# Bad input: each backend by itself, for whoever calls it without the layer


def attend(backend, kv_cache_dtype="auto", **changes):
    """Call it with one argument, or a tensor of the metadata, changed by a function."""
    attention, (query, _, _, metadata) = batch(kv_cache_dtype, backend="sdpa")
    cache = PagedKVCache(4, 16, 2, 32, attention.cache_dtype, layout="NHD")
    of_batch = {f: changes.pop(f)(getattr(metadata, f)) for f in list(changes) if hasattr(metadata, f)}
    arguments = dict.fromkeys(("q_scale", "k_scale", "v_scale", "prob_scale", "output_scale", "sinks"))
    arguments |= {"query": query, "scale": 0.31, "window": None, "softcap": 0.0, "dtype": BF16, "group_size": None}
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    metadata = dataclasses.replace(metadata, **of_batch)
    return backend.attend(backends.AttentionCall(cache=cache, metadata=metadata, **arguments))


@pytest.mark.parametrize("backend", backends.BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("field", "change", "error", "message"),
    [
        ("query", lambda x: x[..., :16], ValueError, "query must be [tokens, heads, 32]"),
        ("query", lambda x: x[:, :3], ValueError, "must be a multiple of the key heads"),
        ("query", lambda x: x.half(), (TypeError, ValueError), "torch.float16"),
        ("query", lambda x: x.to("meta"), ValueError, "key_cache is on cpu, the rest on meta"),
        ("block_table", lambda x: x.long(), TypeError, "block_table must be int32, got torch.int64"),
        ("block_table", lambda x: x.to("meta"), ValueError, "block_table is on meta"),
        ("block_table", lambda x: x[:1], ValueError, "block_table needs as many rows"),
        ("block_table", lambda x: x - 7, IndexError, "block_table[0, 0] is -4"),
        ("query_start", lambda x: x[:2], ValueError, "query_start one element more"),
        ("query_start", lambda x: x.to("meta"), ValueError, "query_start is on meta"),
        ("seq_lens", lambda x: x.float(), TypeError, "seq_lens must be int32, got torch.float32"),
        ("seq_lens", lambda x: x[:1], ValueError, "seq_lens has 1 sequences"),
        ("seq_lens", lambda x: x + 20, ValueError, "block_table is too short"),
        ("sinks", lambda x: torch.zeros(3), ValueError, "sinks must be one logit for each of 4 heads"),
        ("sinks", lambda x: torch.zeros(4, device="meta"), ValueError, "sinks is on meta"),
        ("window", lambda x: 0, ValueError, "1 or more, got 0"),
        ("k_scale", lambda x: torch.tensor(0.5), ValueError, "k_scale"),
        ("q_scale", lambda x: torch.tensor(0.5), ValueError, "q_scale"),
        ("output_scale", lambda x: torch.tensor(0.5), ValueError, "output_scale"),
    ],
)
def test_every_backend_checks_its_arguments(backend, field, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        attend(backend, **{field: change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_scale": torch.tensor(0.5), "prob_scale": torch.tensor(0.1)}, "it cannot do k_scale, prob_scale"),
        ({"output_scale": torch.tensor(0.5), "dtype": E4M3}, "it cannot do output_scale"),
        ({"group_size": 16, "dtype": E4M3}, "it cannot do group_size"),
        ({"dtype": torch.float32}, "it cannot do an output of torch.float32"),
    ],
    ids=["scales", "output", "groups", "dtype"],
)
def test_flex_leaves_nothing_out_in_silence(options, message):
    with pytest.raises(ValueError, match=f"backend flex quantizes nothing and returns torch.bfloat16: {message}"):
        attend(backends.Flex, **{name: lambda _, x=x: x for name, x in options.items()})


def test_flex_checks_while_it_is_compiled(monkeypatch):
    monkeypatch.setattr(backends.Flex, "devices", ("cpu", "cuda"))
    attention = Attention(4, 2, 32, backend="flex", block_size=16, dtype=BF16, window=3)
    attention.allocate_cache(4)
    _, (*qkv, metadata) = batch("auto")
    graphs = []
    compiled = torch.compile(attention, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    for x in (*qkv, metadata.slot_mapping):
        torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        assert compiled(*qkv, metadata).shape == (9, 4, 32)
        assert len(graphs) == 1
        wrong = dataclasses.replace(metadata, block_table=metadata.block_table.long())
        with pytest.raises(Exception, match="block_table must be int32"):
            compiled(*qkv, wrong)


# The kernels that were asked for


def test_triton_by_name_does_not_gather(monkeypatch):
    """Also where the layer was moved to a GPU after it was built."""
    asked = []
    monkeypatch.setattr(backends, "paged_attention", lambda *_, implementation, **__: asked.append(implementation))
    monkeypatch.setattr(
        backends, "paged_attention_group_quant", lambda *_, implementation, **__: asked.append(implementation)
    )
    for backend in ("triton", "auto", "sdpa"):
        attention, inputs = batch(backend=backend)
        attention(*inputs)
        attention(*inputs, output_group_size=16)
    assert asked == ["triton", "triton", "auto", "auto", "gather", "gather"]


def test_auto_says_once_why_it_gathers(caplog, monkeypatch):
    monkeypatch.setattr(support, "_told", set())
    x, one = torch.randn(1, 1, 128, dtype=BF16), torch.ones(1, 1, dtype=torch.int32)
    cache = torch.randn(2, 1, 16, 128, dtype=BF16)
    arguments = x, cache, cache, one, torch.tensor([0, 1], dtype=torch.int32), one[0]
    results = [
        _cuda(PagedAttentionArguments(*arguments, scale=1.0, implementation=implementation))
        for implementation in ("gather", "auto", "auto")
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    assert [record.getMessage() for record in caplog.records] == [
        "paged_attention gathers the pages, which is slow: the Triton kernels do not support this call: they need an "
        "NVIDIA GPU and Triton; give it what they take, or take implementation='gather' (backend='sdpa' of "
        "nn.Attention) by name"
    ]
    with pytest.raises(NotImplementedError, match="they need an NVIDIA GPU and Triton; implementation='auto' does"):
        _cuda(PagedAttentionArguments(*arguments, scale=1.0, implementation="triton"))


# The page's code, in one go as a reader would run it


def snippets():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_runs(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS)
    names = {}
    shapes = []
    with torch.no_grad():
        for snippet in snippets():
            exec(snippet, names)
            shapes.append(tuple(names["out"].shape))
            assert names["out"].isfinite().all()
    assert shapes == [(8, 32, 128)] * 4
    assert names["attention"].backend.name == "one_by_one"
    assert (names["codes"].shape, names["scales"].shape) == ((8, 4096), (8, 1))
    assert isinstance(names["cache"], StaticKVCache)


# One from outside


def test_the_backend_of_the_page(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", backends.BACKENDS)
    exec(next(snippet for snippet in snippets() if "BACKENDS" in snippet), {})
    attention = Attention(4, 2, 32, backend="one_by_one", block_size=16, dtype=BF16)
    attention.allocate_cache(4)
    _, inputs = batch("auto")
    expected = Attention(4, 2, 32, backend="sdpa", block_size=16, dtype=BF16)
    expected.allocate_cache(4)
    torch.testing.assert_close(attention(*inputs), expected(*inputs), rtol=0.02, atol=1e-3)
    message = r"backend 'one_by_one' cannot do this layer: it has no sinks\. These can: 'triton', 'flex', 'sdpa'$"
    with pytest.raises(ValueError, match=message):
        Attention(4, 2, 32, backend="one_by_one", sinks=True, dtype=BF16)


def test_static_caches_of_any_size_are_taken():
    for backend in backends.BACKENDS:
        assert not backend.why_not_cache(StaticKVCache(2, 300, 2, 64, BF16, layout=backend.layouts[0]))
