"""nn.Attention under torch.compile and CUDA graphs: sizes, strides, scales changed afterwards, layers of two kinds."""

import copy

import pytest
import torch
from torch import nn

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.nn import Attention, AttentionMetadata, QuantFP8, backends
from fusion_passes.quant import QuantSpec, codes

BF16 = torch.bfloat16
SCALES = {"q_scale": 0.031, "k_scale": 0.017, "v_scale": 0.0071, "prob_scale": 0.0029}
# Primes, powers of two; 4, 8 and 16 are also the number of heads, of all heads, and the sizes of head and page.
SIZES = (7, 2, 1, 3, 4, 5, 6, 8, 11, 13, 16, 17, 19, 23, 31, 32, 61, 64, 97, 127)


def layer(head_dim=16, device=None, **options):
    options = {"kv_cache_dtype": "fp8_e4m3", "block_size": 16, "dtype": BF16} | options
    attention = Attention(4, 2, head_dim, device=device, **options)
    if attention.quantized:
        attention.set_scales(**SCALES)
    return attention


def step(tokens, head_dim=16, columns=9, page_size=16, device="cpu"):
    """The first tokens of one sequence, and its metadata."""
    packed = torch.randn(tokens, 8, head_dim, device=device).to(BF16)
    table = torch.arange(columns, dtype=torch.int32, device=device)[None]
    return *packed.split([4, 2, 2], 1), AttentionMetadata.from_lengths([tokens], [tokens], table, page_size)


def counting(model, graphs):
    def backend(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("how", ["mark_unbacked", "mark_dynamic"])
@torch.no_grad()
def test_one_graph_for_twenty_sizes(how):
    """With mark_dynamic, one token is a graph of its own, as in all of torch."""
    attention, graphs = layer(), []
    attention.allocate_cache(9)
    run = counting(attention, graphs)
    for tokens in SIZES:
        inputs = step(tokens)
        if tokens == SIZES[0]:
            for x in (*inputs[:3], inputs[3].slot_mapping):
                getattr(torch._dynamo.decorators, how)(x, 0)
        assert torch.equal(run(*inputs), attention(*inputs))
    assert len(graphs) == (1 if how == "mark_unbacked" else 2)


@torch.no_grad()
def test_one_graph_for_any_batch_and_table():
    attention, graphs = layer(), []
    attention.allocate_cache(64)
    run = counting(attention, graphs)
    for seqs, columns in ((5, 3), (2, 2), (7, 5), (13, 4), (31, 2)):
        table = torch.randperm(64, dtype=torch.int32)[: seqs * 2].view(seqs, 2).repeat(1, 3)[:, :columns].contiguous()
        new = [1 + s % 3 for s in range(seqs)]
        metadata = AttentionMetadata.from_lengths(new, [n + 13 for n in new], table, 16)
        q, k, v = torch.randn(sum(new), 8, 16, dtype=BF16).split([4, 2, 2], 1)
        for x in (q, k, v, *(vars(metadata)[n] for n in ("slot_mapping", "query_start", "seq_lens", "block_table"))):
            torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(metadata.block_table, 1)
        assert torch.equal(run(q, k, v, metadata), attention(q, k, v, metadata))
    assert len(graphs) == 1


def padded(x):
    """With a gap behind each head and each token."""
    wide = x.new_full((x.shape[0] + 1, x.shape[1] + 1, x.shape[2] + 3), torch.nan)
    wide[: x.shape[0], : x.shape[1], : x.shape[2]] = x
    return wide[: x.shape[0], : x.shape[1], : x.shape[2]]


STRIDES = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "head_dim first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "padded": padded,
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one token for all": lambda x: x[:1].expand_as(x),
    "odd stride of size 1": lambda x: x[:1].as_strided((1, *x.shape[1:]), (7, *x.stride()[1:])),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", STRIDES)
@torch.no_grad()
def test_strides(name, compiled):
    attention = layer()
    attention.allocate_cache(9)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    q, k, v, metadata = step(1 if "size 1" in name else 5)
    strided = [STRIDES[name](x) for x in (q, k, v)]
    assert any(not x.is_contiguous() for x in strided) or q.shape[0] == 1
    out = run(*strided, metadata)
    assert torch.equal(out, attention(*(x.contiguous() for x in strided), metadata))


class Layers(nn.Module):
    """Head sizes in turn, each on the same numbers."""

    def __init__(self, *head_dims, **options):
        super().__init__()
        self.layers = nn.ModuleList(layer(head_dim, **options) for head_dim in head_dims)
        for each in self.layers:
            each.allocate_cache(9)

    def forward(self, q, k, v, metadata):
        return [each(*(x[..., : each.head_dim] for x in (q, k, v)), metadata) for each in self.layers]


@torch.no_grad()
def test_alternating_head_sizes_are_decided_per_layer():
    model = Layers(64, 24, 64, 24)
    assert [each.backend.name for each in model.layers] == ["triton", "sdpa"] * 2
    inputs = step(7, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for out, each in zip(compiled(*inputs), model.layers, strict=True):
        other = layer(each.head_dim, backend="sdpa")
        other.allocate_cache(9)
        assert torch.equal(out, other(*(x[..., : each.head_dim] for x in inputs[:3]), inputs[3]))


@torch.no_grad()
def test_alternating_head_sizes_fuse_per_layer():
    """Groups of 128 lie in one head of 128 and in two of 64."""
    quantize = QuantFP8(QuantSpec(torch.float8_e4m3fn, "group", 128, static=False))
    model, report = Layers(128, 64, 128), Report()

    def run(*inputs):
        return [quantize(out.flatten(1)) for out in model(*inputs)]

    config = PassConfig(profitability="ignore")
    inputs = step(7, 128)
    fused = fusion_passes.compile(run, config, report=report, fullgraph=True)(*inputs)
    expected = run(*inputs)
    assert [(site.status, site.reason) for site in report.sites if site.rule == "attention_quant"] == [
        ("fused", ""),
        ("illegal", "groups of 128 do not divide a head of 64"),
        ("fused", ""),
    ]
    for (got, scales), (want, want_scales) in zip(fused, expected, strict=True):
        torch.testing.assert_close(scales, want_scales, rtol=0.01, atol=0)
        assert (codes(got) - codes(want)).abs().max() <= 1


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("how", ["compiled", pytest.param("graph", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_every_scale_is_followed_when_it_changes_in_place(device, how):
    """graph: a CUDA graph, of the compiled layer and captured by hand of the layer itself."""
    if how == "graph" and device == "cpu":
        pytest.skip("a CPU has no CUDA graphs")
    attention = layer(64, device, quantize_probs=True)
    attention.allocate_cache(9)
    eager = copy.deepcopy(attention)
    output_scale = torch.tensor(0.0031, device=device)
    inputs = step(9, 64, device=device)
    runs = [torch.compile(attention, fullgraph=True, mode="reduce-overhead" if how == "graph" else None)]
    for _ in range(3):
        first = runs[0](*inputs, output_scale=output_scale).clone()
    if how == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attention(*inputs, output_scale=output_scale)

        def replay(*_, **__):
            graph.replay()
            return captured

        runs.append(replay)
    seen = [first]
    for name, factor in (("q_scale", 3.0), ("k_scale", 0.3), ("v_scale", 1.7), ("prob_scale", 9.0), ("output", 0.4)):
        if name == "output":
            output_scale.mul_(factor)
        else:
            for each in (attention, eager):
                each.set_scales(**{name: SCALES[name] * factor})
        expected = eager(*inputs, output_scale=output_scale)
        for run in runs:
            out = run(*inputs, output_scale=output_scale).clone()
            # Inductor divides by the scale as the op does; a kernel may add in another order than the reference.
            assert (out.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.02
        assert all((out.view(torch.uint8) != x.view(torch.uint8)).float().mean() > 0.05 for x in seen), name
        seen.append(out)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.11 itself, where it tunes FlexAttention
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("backend", backends.BACKENDS)
@torch.no_grad()
def test_modes(backend, mode):
    """One CUDA graph serves batches of one shape, with other lengths, pages and slots, in every backend."""
    fp8 = torch.float8_e4m3fn in backend.cache_dtypes
    attention = layer(64, "cuda", backend=backend.name, kv_cache_dtype="fp8_e4m3" if fp8 else "auto")
    attention.allocate_cache(16)
    eager = copy.deepcopy(attention)
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    for lengths in (([4, 1, 3], [4, 33, 40]), ([1, 7], [50, 7]), ([8], [60]), ([], []), ([1, 1, 1], [3, 60, 17])):
        table = torch.randperm(16, dtype=torch.int32, device="cuda")[:12].view(3, 4)
        metadata = AttentionMetadata.from_lengths(*lengths, table, 16, tokens=8)
        q, k, v = torch.randn(8, 8, 64, device="cuda", dtype=BF16).split([4, 2, 2], 1)
        out = compiled(q, k, v, metadata)
        torch.testing.assert_close(out, eager(q, k, v, metadata), rtol=0.02, atol=1e-3)
        assert not out[sum(lengths[0]) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 256, 533])
@pytest.mark.parametrize("backend", backends.BACKENDS)
@torch.no_grad()
def test_every_element_is_written_and_none_read_before(backend, tokens):
    fp8 = torch.float8_e4m3fn in backend.cache_dtypes
    attention = layer(64, "cuda", backend=backend.name, kv_cache_dtype="fp8_e4m3" if fp8 else "auto")
    cache = attention.allocate_cache(40)
    if backend.ignores_hidden_values:
        for half in (cache.key, cache.value):
            half.view(torch.uint8 if fp8 else torch.int16).fill_(127 if fp8 else 0x7FC0)  # NaN
    *qkv, metadata = step(tokens, 64, columns=40, device="cuda")
    poison = torch.full((64 << 20,), torch.nan, device="cuda")
    del poison  # goes back to the allocator, which hands it out again
    out = attention(*qkv, metadata)
    assert out.isfinite().all()
    other = layer(64, "cuda", backend="sdpa", kv_cache_dtype=attention.kv_cache_dtype)
    other.allocate_cache(40)
    torch.testing.assert_close(out, other(*qkv, metadata), rtol=0.02, atol=2e-3)


@torch.no_grad()
def test_a_copy_is_independent_and_to_moves_everything():
    attention = layer(calculate_kv_scales=True)
    attention.allocate_static_cache(1, 9)
    attention(*step(5, columns=1, page_size=128))
    copied = copy.deepcopy(attention)
    copied.set_scales(q_scale=7.0)
    copied.kv_cache.key.zero_()
    copied.k_range.fill_(3.0)
    assert attention._q_scale != 7.0
    assert attention.k_range == 200.0
    assert attention.kv_cache.key.float().any()
    names = {n for n, _ in attention.named_buffers()}
    assert names >= {"_q_scale", "_k_scale", "_v_scale", "_prob_scale", "q_range", "k_range", "v_range"}
    assert names >= {"kv_cache.key", "kv_cache.value", "kv_cache.block_table"}
    assert {x.device.type for x in copied.to("meta").buffers()} == {"meta"}


@torch.no_grad()
def test_the_settings_choose_the_form_of_the_querys_quantization():
    """Opaque where the passes' settings ask for it; the same codes."""
    attention, inputs = layer(), step(7)
    attention.allocate_cache(9)
    found, results = [], []
    for setting in (True, False):
        config = PassConfig(level="O0", custom_ops={"quant_fp8": setting})
        with fusion_passes.enabled(config):
            graphs = []
            results.append(counting(attention, graphs)(*inputs))
            found.append(any("quantize_fp8" in str(node.target) for node in graphs[0].graph.nodes))
        torch.compiler.reset()
    assert found == [True, False]
    assert torch.equal(*results)
