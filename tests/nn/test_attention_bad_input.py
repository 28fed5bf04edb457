"""What nn.Attention refuses, when it is built or when it is called: a sentence, never an illegal memory access."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from fusion_passes.nn import Attention, AttentionMetadata, process_weights_after_loading

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    monkeypatch.setenv("FUSION_PASSES_CHECK", "1")
    return request.param


def call(device, backend="auto", **changes):
    """A layer with 4 pages of 16 and the arguments of a batch for it. changes: of the metadata."""
    attention = Attention(
        *(4, 2, 64),
        kv_cache_dtype="auto" if backend == "flex" else "fp8_e4m3",
        backend=backend,
        block_size=16,
        dtype=BF16,
        device=device,
    )
    if attention.quantized:
        attention.set_scales(q_scale=0.031, k_scale=0.017, v_scale=0.0071)
    attention.allocate_cache(4)
    qkv = torch.randn(7, 8, 64, device=device).to(BF16).split([4, 2, 2], 1)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=device)
    metadata = AttentionMetadata.from_lengths([5, 2], [20, 2], table, 16)
    return attention, (*qkv, dataclasses.replace(metadata, **changes))


def ints(*values, dtype=torch.int32):
    return lambda device: torch.tensor(values, dtype=dtype, device=device)


VALUES = {
    "slot outside the cache": (
        {"slot_mapping": ints(0, 1, 2, 64, 4, 5, 6, dtype=torch.int64)},
        "names slot 64, the cache has 64: that is on page 4 of a cache with 4. If the slots were",
    ),
    "block table too short": (
        {"block_table": ints([3], [2])},
        "block_table is too short: 1 pages of 16 tokens hold 16",
    ),
    "page outside the cache": ({"block_table": ints([3, 4], [2, 0])}, "block_table[0, 1] is 4, the cache has 4 pages"),
    "negative page": ({"block_table": ints([3, 1], [-1, 0])}, "block_table[1, 0] is -1"),
    "starts that fall": ({"query_start": ints(0, 5, 3)}, "query_start must rise from 0"),
    "starts below 0": ({"query_start": ints(-5, -2, 3)}, "query_start must rise from 0"),
    "starts far below 0": ({"query_start": ints(-(2**31), 1 - 2**31, 2 - 2**31)}, "query_start must rise from 0"),
    "starts that overflow": ({"query_start": ints(2**31 - 1, -(2**31), 40 - 2**31)}, "query_start must rise from 0"),
    "starts of all kinds": ({"query_start": ints(0, 2**31 - 1, -(2**31))}, "query_start must rise from 0"),
    "a length below 0": ({"seq_lens": ints(-3, 2)}, "no sequence is shorter than its queries"),
    "lengths far below 0": ({"seq_lens": ints(-(2**31), 5 - 2**31)}, "no sequence is shorter than its queries"),
    "lengths beyond all": ({"seq_lens": ints(2**31 - 1, 2**31 - 64)}, "block_table is too short"),
    "pages beyond all": ({"block_table": ints([2**31 - 1, 1], [-(2**31), 0])}, "block_table[0, 0] is 2147483647"),
    "slots beyond all": (
        {"slot_mapping": ints(0, 1, -(2**63), 2**63 - 1, 4, 5, 6, dtype=torch.int64)},
        "names slot 9223372036854775807, the cache has 64",
    ),
    "starts beyond the tokens": ({"query_start": ints(0, 5, 9)}, "query_start must rise from 0 to at most the 7"),
    "more new tokens than tokens": ({"seq_lens": ints(20, 1)}, "no sequence is shorter than its queries"),
    "a broken promise": ({"max_query_len": 3}, "max_query_len is 3, but the sequences have [5, 2] queries"),
}


@pytest.mark.parametrize("backend", ["triton", "sdpa", pytest.param("flex", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_the_metadata(name, backend, device):
    if backend == "flex" and device == "cpu":
        pytest.skip("FlexAttention needs a GPU")
    changes, message = VALUES[name]
    changes = {field: x(device) if callable(x) else x for field, x in changes.items()}
    attention, inputs = call(device, backend, **changes)
    with pytest.raises((ValueError, IndexError), match=re.escape(message)):
        attention(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "compiled"), [("triton", False), ("triton", True), ("flex", False)])
@pytest.mark.parametrize("name", VALUES)
@torch.no_grad()
def test_unchecked_values_touch_nothing_outside(name, backend, compiled, monkeypatch):
    """The result may be anything, the cache's other slots are as they were, and the device goes on.

    What is around the output: tests/kernels/test_paged_bad_values.py.
    """
    monkeypatch.delenv("FUSION_PASSES_CHECK", raising=False)
    changes, _ = VALUES[name]
    changes = {field: x("cuda") if callable(x) else x for field, x in changes.items()}
    attention, inputs = call("cuda", backend, **changes)
    slots = inputs[3].slot_mapping
    other = torch.ones(4 * 16, dtype=torch.bool, device="cuda")
    other[slots[(slots >= 0) & (slots < 4 * 16)]] = False

    def others() -> list[torch.Tensor]:
        caches = (attention.kv_cache.key, attention.kv_cache.value)
        return [x.view(torch.uint8).transpose(1, 2).reshape(4 * 16, -1)[other] for x in caches]

    for x in (attention.kv_cache.key, attention.kv_cache.value):
        x.copy_(torch.randn(x.shape, device="cuda"))
    before = others()
    run = torch.compile(attention, fullgraph=True) if compiled else attention
    assert run(*inputs).shape == (7, 4, 64)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(others(), before, strict=True))
    attention, inputs = call("cuda", backend)
    assert attention(*inputs).isfinite().all()


@pytest.mark.parametrize("name", ["_q_scale", "_k_scale", "_v_scale", "output_scale"])
def test_a_scale_on_another_device(name, device):
    """Such a scale is never read by a kernel: meta stands for any device but the query's."""
    for elsewhere in ("meta", *["cpu"] * (device == "cuda")):
        attention, inputs = call(device)
        options = {}
        if name == "output_scale":
            options["output_scale"] = torch.tensor(0.01, device=elsewhere)
        else:
            setattr(attention, name, getattr(attention, name).to(elsewhere))
        with pytest.raises(ValueError, match=f"^{name.removeprefix('_')} is on {elsewhere}") as error:
            attention(*inputs, **options)
        if name == "output_scale":
            assert "making it a buffer" in str(error.value)
        elif elsewhere == "meta":
            assert "to_empty(device=" in str(error.value)
            assert "process_weights_after_loading(model, device=" in str(error.value)
        else:
            assert "move the layer with .to()" in str(error.value)


@pytest.mark.parametrize("way", ["to_empty", "assign"])
def test_the_way_out_of_meta(way):
    """What the error says is what helps."""
    attention = Attention(4, 2, 64, kv_cache_dtype="fp8_e4m3", block_size=16, dtype=BF16, device="meta")
    attention.allocate_cache(4)
    _, inputs = call("cpu")
    with pytest.raises(ValueError, match="q_scale is on meta, the query on cpu"):
        attention(*inputs)
    scales = {"q_scale": torch.tensor(0.031), "k_scale": torch.tensor(0.017), "v_scale": torch.tensor(0.0071)}
    if way == "to_empty":
        attention.to_empty(device="cpu").load_state_dict(scales)
    else:
        attention.load_state_dict(scales, assign=True)
        process_weights_after_loading(attention, device="cpu")
        with pytest.raises(ValueError, match="the cache is on meta, the query on cpu: give the layer one there"):
            attention(*inputs)
        attention.allocate_cache(4, device="cpu")
    attention.process_weights_after_loading()
    assert torch.equal(attention(*inputs), call("cpu")[0](*inputs))


# Pages of another size


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_metadata_for_pages_of_another_size(static, compiled, device):
    """Without an error it would be wrong numbers: the slots of another cache."""
    attention, (*qkv, metadata) = call(device)
    table, right, wrong = metadata.block_table, 16, 32
    if static:
        table, right, wrong = attention.allocate_static_cache(2, 200).block_table, 256, 200
    run = torch.compile(attention, fullgraph=True, backend="eager") if compiled else attention
    message = (
        f"the metadata is for pages of {wrong} tokens, the layer's cache has pages of {right}: make it with page_size"
    )
    other = AttentionMetadata.from_lengths([5, 2], [20, 2], table, wrong)
    for inputs in ((*qkv, other), (qkv[0], None, None, other)):
        with pytest.raises(torch._dynamo.exc.Unsupported if compiled else ValueError) as error:
            run(*inputs)
        assert message in str(error.value)
    expected = attention(*qkv, AttentionMetadata.from_lengths([5, 2], [20, 2], table, right))
    for page_size in (right, None):
        fitting = dataclasses.replace(
            AttentionMetadata.from_lengths([5, 2], [20, 2], table, right), page_size=page_size
        )
        assert torch.equal(run(*qkv, fitting), expected)


@pytest.mark.parametrize(
    ("table", "page_size", "error", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), 16, TypeError, "must be int32, got torch.int64: convert it with .int()"),
        ([[3, 1], [2, 0]], 16, TypeError, "must be a tensor, int32 [seqs, max_pages], got list: make one with torch"),
        (torch.zeros(2, dtype=torch.int32), 16, ValueError, "block_table must be [seqs, max_pages], got [2]"),
        (torch.zeros(2, 2, dtype=torch.int32), 0, ValueError, "page_size must be positive, the cache's, got 0"),
    ],
    ids=["int64", "list", "one row", "no page"],
)
def test_tables_that_are_none(table, page_size, error, message):
    with pytest.raises(error, match=re.escape(message)):
        AttentionMetadata.from_lengths([1, 1], [2, 2], table, page_size)


def test_a_page_that_does_not_exist_is_told_from_a_slot():
    """The write comes first, and sees only slots."""
    attention, (*qkv, metadata) = call("cpu")
    table = metadata.block_table.clone()
    table[0, 1] = 9
    with pytest.raises(IndexError, match=r"names slot 147, the cache has 64: that is on page 9 of a cache with 4\. If"):
        attention(*qkv, AttentionMetadata.from_lengths([5, 2], [20, 2], table, 16))


@pytest.mark.parametrize("metadata", [None, {"seq_lens": 3}], ids=str)
def test_metadata_that_is_none(metadata):
    attention, (*qkv, _) = call("cpu")
    with pytest.raises(TypeError, match=r"metadata must be an AttentionMetadata, got (NoneType|dict)"):
        attention(*qkv, metadata)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.01, TypeError, "output_scale must be a tensor"),
        (torch.tensor(0.01, dtype=BF16), TypeError, "output_scale must be float32, got torch.bfloat16"),
        (torch.tensor([0.01, 0.02]), ValueError, "output_scale must hold one element"),
    ],
    ids=str,
)
def test_output_scales_that_are_none(scale, error, message):
    attention, inputs = call("cpu")
    with pytest.raises(error, match=message):
        attention(*inputs, output_scale=scale)


@pytest.mark.parametrize(
    "scale",
    [
        0.5,
        torch.tensor(0.5),
        torch.tensor([0.5]),
        torch.full((1, 1), 0.5),
        torch.tensor(0.5, dtype=BF16),
        torch.tensor(0.5, dtype=torch.float64),
        nn.Parameter(torch.tensor(0.5)),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {list(getattr(x, 'shape', []))}",
)
def test_scales_in_any_form(scale, device):
    """A scale is copied into the layer's own, whatever holds it; as an output scale a tensor of one fp32 element."""
    attention, inputs = call(device)
    attention.set_scales(k_scale=scale)
    assert (float(attention._k_scale), attention._k_scale.dtype) == (0.5, torch.float32)
    assert attention._k_scale.device.type == device
    assert attention._k_scale.shape == ()
    if isinstance(scale, torch.Tensor) and scale.dtype is torch.float32:
        with torch.no_grad():
            out = attention(*inputs, output_scale=scale.to(device))
        assert out.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), torch.ones(2)], ids=str)
def test_scales_that_mean_nothing(value):
    attention, _ = call("cpu")
    with pytest.raises(ValueError, match="v_scale must be one positive, finite number"):
        attention.set_scales(v_scale=value)
    assert float(attention._v_scale) == pytest.approx(0.0071)


@pytest.mark.parametrize(
    ("field", "change", "error", "message"),
    [
        ("block_table", lambda x: x.long(), TypeError, "block_table must be int32, got torch.int64: convert it w"),
        ("seq_lens", lambda x: x.float(), TypeError, "seq_lens must be int32, got torch.float32"),
        ("seq_lens", lambda x: x[:1], ValueError, "seq_lens has 1 sequences"),
        ("query_start", lambda x: x[:2], ValueError, "query_start one element more"),
        ("slot_mapping", lambda x: x[:3], ValueError, "slot_mapping"),
        ("slot_mapping", lambda x: x.float(), TypeError, "slot_mapping must be"),
        (
            "block_table",
            lambda x: x.to("meta"),
            ValueError,
            "block_table is on meta, the rest on [^:]*(:0)?: make it on ",
        ),
        (
            "slot_mapping",
            lambda x: x.to("meta"),
            ValueError,
            "slot_mapping is on meta, the rest on [^:]*(:0)?: make it on ",
        ),
    ],
)
def test_shapes_dtypes_and_devices_of_the_metadata(field, change, error, message, device):
    attention, (*qkv, metadata) = call(device)
    with pytest.raises(error, match=message):
        attention(*qkv, dataclasses.replace(metadata, **{field: change(getattr(metadata, field))}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads must be a multiple of num_kv_heads"),
        ({"num_kv_heads": 0}, "all sizes positive"),
        (
            {"backend": "flex"},
            "backend 'flex' cannot do this layer: cache dtype torch.float8_e4m3fn is not among torch.bfloat16",
        ),
        (
            {"backend": "flex", "kv_cache_dtype": "fp8_e5m2"},
            "torch.bfloat16, torch.float16. These can: 'triton', 'sdpa'",
        ),
        (
            {"backend": "triton", "dtype": torch.float32},
            "'triton' cannot do this layer: dtype torch.float32 is not among",
        ),
        ({"backend": "triton", "head_dim": 80}, "head size 80 is not among 16, 32, 64, 128, 256. These can: 'sdpa'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of"),
        ({"kv_cache_dtype": "auto", "quantize_query": True}, "need an FP8 cache"),
        ({"kv_cache_dtype": "auto", "quantize_probs": True}, "need an FP8 cache"),
        ({"window": 0}, "1 or more, got 0"),
        ({"softcap": -1.0}, "softcap must be positive"),
    ],
    ids=str,
)
def test_layers_that_cannot_be(arguments, message):
    arguments = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "kv_cache_dtype": "fp8_e4m3",
        "dtype": BF16,
    } | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        Attention(**arguments)
