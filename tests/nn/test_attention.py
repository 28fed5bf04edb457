"""nn.Attention: a serving loop against dense attention, one graph for all steps, scales and where they come from."""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fusion_passes.nn import (
    Attention,
    AttentionMetadata,
    PagedKVCache,
    StaticKVCache,
    process_weights_after_loading,
)
from fusion_passes.quant import codes, dequantize, quantize

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SCALES = {"q_scale": 0.031, "k_scale": 0.017, "v_scale": 0.0071, "prob_scale": 0.0029}


def layer(kv_cache_dtype="fp8_e4m3", heads=4, kv_heads=2, **options):
    result = Attention(heads, kv_heads, 16, kv_cache_dtype=kv_cache_dtype, block_size=16, dtype=BF16, **options)
    if result.quantized:
        result.set_scales(**SCALES)
    return result


def steps(table, page_size, tokens=None):
    """A prefill with a chunk of another sequence, a mixture, a decode with one sequence at rest, a padded decode."""
    for query_lens, seq_lens in (([5, 9], [5, 9]), ([1, 20], [6, 29]), ([1, 1], [7, 30]), ([0, 1], [7, 31])):
        yield query_lens, AttentionMetadata.from_lengths(query_lens, seq_lens, table, page_size, tokens=tokens)


def serve(attention, cache, table, run=None, tokens=None):
    """Run the steps with random tokens. Returns the outputs, and what dense attention says."""
    history = [([], []), ([], [])]
    rounded = (lambda x, s: dequantize(quantize(x, s), s)) if attention.quantized else lambda x, s: x.float()
    for query_lens, metadata in steps(table, cache.page_size, tokens):
        x = torch.randn(metadata.slot_mapping.shape[0], attention.num_heads + 2 * attention.num_kv_heads, 16)
        x[sum(query_lens) :] = torch.nan
        q, k, v = x.bfloat16().split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], 1)
        out = (run or attention)(q, k, v, metadata)
        expected, first = [], 0
        for (keys, values), count in zip(history, query_lens, strict=True):
            part = slice(first, first + count)
            first += count
            keys.append(rounded(k[part], SCALES["k_scale"]))
            values.append(rounded(v[part], SCALES["v_scale"]))
            query = rounded(q[part], SCALES["q_scale"]) if attention.quantize_query else q[part].float()
            key, value = torch.cat(keys), torch.cat(values)
            hidden = torch.ones(count, len(key), dtype=torch.bool).tril(len(key) - count).logical_not()
            if attention.window is not None:
                hidden |= torch.ones(count, len(key), dtype=torch.bool).tril(len(key) - count - attention.window)
            heads = (y.transpose(0, 1) for y in (query, key, value))
            dense = F.scaled_dot_product_attention(*heads, ~hidden, scale=attention.scale, enable_gqa=True)
            expected.append(dense.transpose(0, 1))
        yield out, torch.cat(expected)


def shuffled():
    return torch.tensor([[4, 0, 6], [5, 2, 1]], dtype=torch.int32)


OPTIONS = [
    {"kv_cache_dtype": "auto"},
    {},
    {"quantize_query": False, "window": 6},
    {"kv_heads": 1},
]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_serving(options, static, layout):
    attention = layer(**options)
    if static:
        cache = attention.allocate_static_cache(2, 40, layout=layout)
        table = cache.block_table
    else:
        cache, table = attention.allocate_cache(7, layout=layout), shuffled()
    for out, expected in serve(attention, cache, table, tokens=31):
        assert out.dtype == BF16
        torch.testing.assert_close(out[: len(expected)].float(), expected, rtol=1e-2, atol=1e-4)
        assert (out[len(expected) :] == 0).all()
    assert not cache.key.float().isnan().any()


def test_one_graph_serves_every_step():
    attention = layer()
    cache = attention.allocate_cache(7)
    compilations = []

    def count(module, inputs):
        compilations.append(module)
        return module.forward

    compiled = torch.compile(attention, fullgraph=True, backend=count, dynamic=None)

    def run(q, k, v, metadata):
        for x in (q, k, v, metadata.slot_mapping):
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            return compiled(q, k, v, metadata)

    for tokens in (31, 40, 64):
        for out, expected in serve(attention, cache, shuffled(), run, tokens=tokens):
            torch.testing.assert_close(out[: len(expected)].float(), expected, rtol=1e-2, atol=1e-4)
    assert len(compilations) == 1


@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.gpu)])
def test_compiled(mode):
    device = "cuda" if mode == "reduce-overhead" else "cpu"
    attention = layer(sinks=True, softcap=5.0).to(device)
    table = shuffled().to(device)
    expected_layer = copy.deepcopy(attention)
    cache, other = attention.allocate_cache(7), expected_layer.allocate_cache(7)
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    with torch.no_grad():
        for step in range(3):
            if step == 2:
                for each in (attention, expected_layer):
                    each.set_scales(q_scale=0.1, k_scale=0.05)
            for _, metadata in list(steps(table, 16, 30))[:1]:
                x = torch.randn(30, 8, 16, device=device).bfloat16()
                q, k, v = x.split([4, 2, 2], 1)
                out = compiled(q, k, v, metadata).clone()
                torch.testing.assert_close(out, expected_layer(q, k, v, metadata), rtol=1e-2, atol=1e-3)
    assert torch.equal(cache.key.view(torch.uint8), other.key.view(torch.uint8))
    assert cache.key.float().abs().sum() > 0


def test_fp8_output_and_inputs_that_are_codes():
    attention = layer()
    attention.allocate_cache(7)
    _, metadata = next(steps(shuffled(), 16))
    q, k, v = torch.randn(14, 8, 16).bfloat16().split([4, 2, 2], 1)
    plain = attention(q, k, v, metadata)
    out = attention(q, k, v, metadata, output_scale=torch.tensor(0.0031))
    assert out.dtype == E4M3
    assert (codes(out) - codes(quantize(plain, 0.0031))).abs().max() <= 1
    attention.kv_cache.key.zero_()
    q8, k8, v8 = (quantize(x, SCALES[f"{n}_scale"]) for n, x in zip("qkv", (q, k, v), strict=True))
    assert torch.equal(attention(q8, k8, v8, metadata), plain)
    assert torch.equal(attention(q, None, None, metadata), plain)


def test_probabilities():
    attention = layer(quantize_probs=True)
    attention.allocate_cache(7)
    exact = copy.deepcopy(attention)
    exact.quantize_probs = False
    _, metadata = next(steps(shuffled(), 16))
    qkv = torch.randn(14, 8, 16).bfloat16().split([4, 2, 2], 1)
    out, expected = (each(*qkv, metadata).float() for each in (attention, exact))
    assert 0 < (out - expected).norm() < 0.05 * expected.norm()


# Scales


def test_an_unquantized_checkpoint_is_enough():
    model = nn.ModuleDict({"attn": layer(sinks=True)})
    plain = nn.ModuleDict({"attn": layer("auto", sinks=True)})
    assert list(plain.state_dict()) == ["attn.sinks"]
    plain["attn"].sinks.data.uniform_()
    assert model.load_state_dict(plain.state_dict(), strict=True).missing_keys == []
    assert torch.equal(model["attn"].sinks, plain["attn"].sinks)
    assert list(model.state_dict()) == [f"attn.{n}" for n in ("sinks", "q_scale", "k_scale", "v_scale", "prob_scale")]
    plain.load_state_dict(model.state_dict(), strict=True)
    assert plain["attn"]._k_scale == 1


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("assign", [False, True])
def test_checkpoint_scales(assign, shape):
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", device="meta" if assign else None)
    state = {"k_scale": torch.full(shape, 0.5, dtype=BF16), "v_scale": torch.full(shape, 0.25)}
    attention.load_state_dict(state, assign=assign)
    with pytest.warns(UserWarning, match=r"layers\.3: the fp8_e4m3 cache uses q_scale = 1"):
        attention.process_weights_after_loading("layers.3", device="cpu")
    buffers = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
    assert [float(getattr(attention, name)) for name in buffers] == [1.0, 0.5, 0.25, 1.0]
    assert {b.dtype for n, b in attention.named_buffers() if n != "_uncalibrated"} == {torch.float32}
    assert {b.device.type for b in attention.buffers()} == {"cpu"}
    again = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3")
    again.load_state_dict(attention.state_dict())
    assert again._k_scale == 0.5


def test_fused_kv_scale():
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3")
    attention.load_state_dict({"kv_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)})
    assert (attention._k_scale, attention._v_scale) == (0.5, 0.25)


@pytest.mark.parametrize("value", [torch.tensor(-1.0), torch.tensor(torch.nan), torch.zeros(1), torch.ones(2)])
def test_bad_checkpoint_scales(value):
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(RuntimeError, match="k_scale must be one positive, finite number"):
        attention.load_state_dict({"k_scale": value})
    assert attention._k_scale == 1
    with pytest.raises(ValueError, match="scales are"):
        attention.set_scales(o_scale=1.0)


def test_fnuz_doubles(monkeypatch):
    fnuz = torch.float8_e4m3fnuz
    monkeypatch.setattr("fusion_passes.nn.attention.native_dtype", lambda dtype, device=None: fnuz)
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3")
    attention.load_state_dict({"kv_scale": torch.tensor(0.5), "prob_scale": torch.tensor(0.5)})
    assert (attention._k_scale, attention._v_scale, attention._prob_scale) == (1.0, 1.0, 0.5)
    assert {n: float(x) for n, x in attention.state_dict().items()} == dict.fromkeys(
        ("k_scale", "v_scale", "prob_scale"), 0.5
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
def test_dummy_weights_leave_no_trace(kv_cache_dtype):
    model = nn.Sequential(Attention(4, 2, 16, kv_cache_dtype=kv_cache_dtype))
    with torch.no_grad():
        for x in model.buffers():
            x.copy_(torch.tensor(0.123))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process_weights_after_loading(model)
    assert len(caught) == (kv_cache_dtype != "auto")
    fresh = Attention(4, 2, 16, kv_cache_dtype=kv_cache_dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), fresh.buffers(), strict=True))


def test_meta_device_and_to_empty():
    with torch.device("meta"):
        attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True)
        attention.allocate_static_cache(3, 10)
    assert {x.device.type for x in attention.buffers()} == {"meta"}
    with pytest.raises(ValueError, match=r": q_scale is on the meta device.*device="):
        attention.process_weights_after_loading()
    with pytest.raises(ValueError, match=r"call to_empty\(device="):
        attention.set_scales(k_scale=0.5)
    attention.to_empty(device="cpu")
    fresh = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True)
    fresh.allocate_static_cache(3, 10)
    for (name, a), b in zip(attention.named_buffers(), fresh.buffers(), strict=True):
        assert torch.equal(a.float(), b.float()), name


def test_a_dtype_change_spares_scales_and_cache():
    attention = layer(sinks=True)
    cache = attention.allocate_cache(2)
    attention.half()
    assert attention.sinks.dtype == torch.float16
    assert attention._k_scale.dtype == attention.q_range.dtype == torch.float32
    assert cache.key.dtype == E4M3
    assert cache.key is attention.kv_cache.key
    copied = copy.deepcopy(attention)
    copied.set_scales(k_scale=3.0)
    assert attention._k_scale == torch.tensor(SCALES["k_scale"])
    assert not [n for n in attention.state_dict() if "cache" in n]


@pytest.mark.parametrize("through", [nn.Module, Attention])
@pytest.mark.parametrize("calculate", [False, True])
def test_to_empty_takes_away_what_was_given(monkeypatch, calculate, through):
    """Memory that nobody has written is not a scale, wherever the layer was before."""
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: torch.full_like(x, -195701, **kwargs))
    for was in ("cpu", "meta"):
        attention = layer(calculate_kv_scales=calculate, quantize_probs=True).to(was)
        (nn.Sequential(attention) if through is nn.Module else attention).to_empty(device="cpu")
        fresh = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=calculate, quantize_probs=True)
        for _ in range(2):
            for (name, a), b in zip(attention.named_buffers(), fresh.buffers(), strict=True):
                assert torch.equal(a, b), name
            assert not attention.state_dict()
            with pytest.warns(UserWarning, match="prob_scale = 1, which no checkpoint has set"):
                attention.process_weights_after_loading()


def test_what_is_carried_over_stays_given():
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True, device="meta")
    attention.load_state_dict({"k_scale": torch.tensor(0.5)}, assign=True)
    attention._apply(lambda x: torch.full_like(x, 7, device="cpu") if x.is_meta else x)
    assert (attention._q_scale, attention._k_scale, attention._v_scale) == (1.0, 0.5, 1.0)
    assert attention._uncalibrated.tolist() == [True, False, True]
    attention = layer().double().to("cpu")
    attention.process_weights_after_loading()
    assert {name: round(float(x), 6) for name, x in attention.state_dict().items()} == SCALES
    with FakeTensorMode():
        assert Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3").to("meta")._k_scale.is_meta
        assert Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3").to_empty(device="cpu")._k_scale.shape == ()


@pytest.mark.gpu
def test_to_device():
    attention = layer()
    attention.allocate_cache(2)
    attention.cuda()
    assert {x.device.type for x in attention.buffers()} == {"cuda"}
    _, metadata = next(steps(shuffled().clamp_max(1), 16))
    q, k, v = torch.randn(14, 8, 16).bfloat16().split([4, 2, 2], 1)
    with pytest.raises(ValueError, match=r"^q_scale is on cuda:0, the query on cpu: move the layer with \.to\(\)"):
        attention(q, k, v, metadata)


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_of_the_first_batch(compiled):
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True, block_size=16, dtype=BF16)
    attention.process_weights_after_loading()  # without a warning
    attention.allocate_cache(7)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    warm_up = AttentionMetadata.from_lengths([], [], shuffled(), 16, tokens=16)
    _, metadata = next(steps(shuffled(), 16, tokens=16))
    x = torch.randn(16, 8, 16).bfloat16()
    x[14:] = torch.nan
    x[3, 2, 1], x[4, 4, 2], x[5, 7, 3] = 30.0, -50.0, 20.0
    qkv = x.split([4, 2, 2], 1)
    with torch.no_grad():
        attention(*(y[:0] for y in qkv), AttentionMetadata.from_lengths([], [], shuffled(), 16))
        run(*qkv, warm_up)
        assert attention._k_scale == 1
        assert "k_scale" not in attention.state_dict()
        run(*qkv, metadata)
        scales = [float(s) for s in (attention._q_scale, attention._k_scale, attention._v_scale)]
        torch.testing.assert_close(scales, [30 / 200, 50 / 200, 20 / 100])
        run(*(y * 100 for y in qkv), metadata)
    assert scales == [float(s) for s in (attention._q_scale, attention._k_scale, attention._v_scale)]
    again = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True)
    again.load_state_dict(attention.state_dict())
    assert float(again._k_scale) == scales[1]
    assert not again._uncalibrated.any()


@pytest.mark.parametrize("given", [{"k_scale": 0.5, "q_scale": 0.125}, {"kv_scale": 0.25}, {"v_scale": 0.5}], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_the_first_batch_leaves_given_scales_alone(given, late):
    attention = Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True, block_size=16, dtype=BF16)
    if not late:
        attention.load_state_dict({name: torch.tensor(x) for name, x in given.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.process_weights_after_loading()
    attention.allocate_cache(7)
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    _, metadata = next(steps(shuffled(), 16))
    x = torch.randn(14, 8, 16).bfloat16()
    x[3, 2, 1], x[4, 4, 2], x[5, 7, 3] = 30.0, -50.0, 20.0
    qkv = x.split([4, 2, 2], 1)
    with torch.no_grad():
        if late:  # what is compiled follows
            run(*(y[:0] for y in qkv), AttentionMetadata.from_lengths([], [], shuffled(), 16))
            attention.set_scales(**given)
        run(*qkv, metadata)
    if "kv_scale" in given:
        given = dict.fromkeys(("k_scale", "v_scale"), given["kv_scale"])
    expected = {"q_scale": 30 / 200, "k_scale": 50 / 200, "v_scale": 20 / 100} | given
    found = {name: float(x) for name, x in attention.state_dict().items()}
    torch.testing.assert_close(found, expected)
    assert not attention._uncalibrated.any()


@pytest.mark.parametrize("value", ["x", None, 2j, [0.1, 0.2], 1e-60, torch.tensor(0.5, device="meta")], ids=str)
def test_scales_that_are_no_numbers(value):
    attention = layer()
    for name in ("k_scale", "kv_scale"):
        with pytest.raises(ValueError, match="k_scale must be one positive, finite number, got"):
            attention.set_scales(v_scale=0.5, **{name: value})
    assert attention._v_scale == torch.tensor(SCALES["v_scale"])  # all or none


# The device that is meant where none is named


def test_a_default_device_is_the_device_of_the_layer(monkeypatch):
    with torch.device("meta"):
        attention = Attention(4, 2, 96, backend="flex", dtype=BF16, sinks=True)
    assert {x.device.type for x in (*attention.buffers(), *attention.parameters())} == {"meta"}
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("mps"))  # which needs no such device
    with pytest.raises(ValueError, match="device mps is not among cuda"):
        Attention(4, 2, 96, backend="flex", dtype=BF16)


def test_what_a_layer_is_moved_to_is_not_known_when_it_is_built(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fusion_passes.nn.attention.native_dtype", lambda dtype, device=None: seen.append(device) or dtype
    )
    for device in (None, "meta", "cpu"):
        Attention(4, 2, 16, kv_cache_dtype="fp8_e4m3", device=device)
    assert seen == [None, None, torch.device("cpu")]


def test_a_default_device_is_not_that_of_the_host():
    attention = layer()
    cache = attention.allocate_static_cache(2, 40)
    inputs = torch.randn(3, 8, 16).bfloat16().split([4, 2, 2], 1)
    table = cache.block_table
    expected = AttentionMetadata.from_lengths([2, 1], [20, 1], table, cache.page_size)
    with torch.device("meta"):
        attention.to("cpu").set_scales(k_scale=0.5)
        attention.process_weights_after_loading()
        metadata = AttentionMetadata.from_lengths([2, 1], [20, 1], table, cache.page_size)
        out = attention(*inputs, metadata)
    assert out.device.type == "cpu"
    for a, b in zip(pytree.tree_leaves(metadata), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(a, b)


# Metadata, caches, backends


def test_metadata_is_a_pytree():
    _, metadata = next(steps(shuffled(), 16))
    leaves, tree = pytree.tree_flatten(dataclasses.replace(metadata, max_query_len=9))
    assert len(leaves) == 4
    loaded = pytree.treespec_loads(pytree.treespec_dumps(tree))  # as in an exported program
    assert loaded == tree
    for spec in (tree, loaded):
        again = pytree.tree_unflatten(leaves, spec)
        assert (again.max_query_len, again.page_size) == (9, 16)
    assert pytree.tree_map(lambda x: x.shape, metadata).slot_mapping == (14,)


def test_metadata_from_lengths():
    table = torch.tensor([[3, 1], [9, 9], [0, 2]], dtype=torch.int32)
    metadata = AttentionMetadata.from_lengths([2, 0], [17, 4], table, 16, tokens=4, max_query_len=2)
    assert metadata.slot_mapping.tolist() == [3 * 16 + 15, 16, -1, -1]
    assert metadata.query_start.tolist() == [0, 2, 2, 2]
    assert metadata.seq_lens.tolist() == [17, 4, 0]
    assert metadata.is_token.tolist() == [True, True, False, False]
    for lengths, message in ((([5], [4]), "0 <= query_len <= seq_len"), (([1], [33]), "2 pages x 16")):
        with pytest.raises(ValueError, match=message):
            AttentionMetadata.from_lengths(*lengths, table, 16)
    with pytest.raises(ValueError, match="do not fit"):
        AttentionMetadata.from_lengths([3], [3], table, 16, tokens=2)
    with pytest.raises(ValueError, match="max_query_len is 2"):
        AttentionMetadata.from_lengths([3], [3], table, 16, max_query_len=2)


def test_cache_layouts():
    for layout, strides in (("HND", (2 * 16 * 8, 16 * 8, 8, 1)), ("NHD", (2 * 16 * 8, 8, 2 * 8, 1))):
        cache = PagedKVCache(3, 16, 2, 8, BF16, layout=layout)
        assert cache.key.shape == (3, 2, 16, 8)
        assert cache.key.stride() == strides
    static = StaticKVCache(3, 130, 2, 8, BF16)
    assert static.page_size == 256
    assert static.block_table.tolist() == [[0], [1], [2]]


def test_bad_arguments():
    for arguments, message in (
        (dict(heads=4, kv_heads=3), "num_heads must be a multiple"),
        (dict(window=0), "1 or more, got 0"),
        (dict(softcap=-2.0), "softcap must be positive"),
        (dict(heads=4.0), "all sizes positive integers"),
        (dict(window=2.5), "1 or more, got 2.5"),
        (dict(softcap=torch.nan), "softcap must be positive, or 0 for none, got nan"),
        (dict(softcap="30"), "softcap must be positive, or 0 for none, got '30'"),
        (dict(scale=torch.nan), "scale must be a finite number"),
        (dict(scale="1"), "scale must be a finite number"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype must be one of"),
        (dict(kv_cache_dtype="auto", calculate_kv_scales=True), "need an FP8 cache"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**arguments)
    attention = layer()
    _, metadata = next(steps(shuffled(), 16))
    q, k, v = torch.randn(14, 8, 16).bfloat16().split([4, 2, 2], 1)
    with pytest.raises(RuntimeError, match="no cache: call allocate_cache"):
        attention(q, k, v, metadata)
    with pytest.raises(ValueError, match="the layer needs a cache of"):
        attention.bind_cache(PagedKVCache(2, 16, 2, 16, BF16))
    attention.allocate_cache(7)
    with pytest.raises(ValueError, match=r"query must be \[tokens, 4, 16\]"):
        attention(k, k, v, metadata)
    with pytest.raises(ValueError, match="together or not at all"):
        attention(q, k, None, metadata)
    with pytest.raises(TypeError, match=r"queries of torch\.bfloat16, got torch\.float32"):
        attention(q.float(), k, v, metadata)
    with pytest.raises(ValueError, match="output_dtype goes with output_scale"):
        attention(q, k, v, metadata, output_dtype=E4M3)
