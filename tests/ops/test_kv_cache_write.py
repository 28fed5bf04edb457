"""kv_cache_write: the codes in every slot, in both memory orders; what is skipped, mutated, compiled, refused."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_passes import reference
from fusion_passes.nn import PagedKVCache
from fusion_passes.ops import kv_cache_write, paged_attention
from fusion_passes.ops.kv_cache_write import scatter
from fusion_passes.quant import quantize
from tests.generated_code import allocations

OP = torch.ops.fusion_passes.kv_cache_write.default
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
K_SCALE, V_SCALE = 0.37, 2.9


def inputs(dtype=E4M3, layout="HND", tokens=7, page_size=16, device="cpu", source=BF16):
    """Keys and values as views of one projection, a cache full of NaN, slots out of order with holes."""
    packed = torch.randn(tokens, 9, 8, device=device).to(source)
    _, key, value = packed.split([3, 3, 3], 1)
    cache = PagedKVCache(5, page_size, 3, 8, dtype, layout=layout, device=device)
    for half in (cache.key, cache.value):
        reference.bits(half).fill_(127 if half.dtype in (E4M3, E5M2) else torch.nan)
    slots = torch.randperm(5 * page_size)[:tokens]
    slots[1::3] = -1
    scales = (torch.tensor([K_SCALE], device=device), torch.tensor(V_SCALE, device=device))
    return key, value, cache.key, cache.value, slots.to(device), *(scales if dtype in (E4M3, E5M2) else (None, None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("write", [kv_cache_write, scatter])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("dtype", "page_size", "tokens"), [(E4M3, 16, 7), (E5M2, 48, 1), (BF16, 1, 4), (E4M3, 16, 0)])
def test_every_slot(dtype, page_size, tokens, layout, write, device):
    key, value, key_cache, value_cache, slots, k_scale, v_scale = inputs(dtype, layout, tokens, page_size, device)
    before = [reference.bits(x).clone() for x in (key_cache, value_cache)]
    write(key, value, key_cache, value_cache, slots, k_scale, v_scale)
    for x, cache, old, scale in ((key, key_cache, before[0], K_SCALE), (value, value_cache, before[1], V_SCALE)):
        codes = reference.bits(x if dtype == BF16 else quantize(x, scale, dtype))
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                old[slot // page_size, :, slot % page_size] = codes[token]
        assert torch.equal(old.view(torch.uint8), reference.bits(cache).view(torch.uint8))


@pytest.mark.parametrize("write", [kv_cache_write, scatter])
def test_no_token_has_a_slot(write):
    key, value, key_cache, value_cache, _, *scales = inputs()
    before = key_cache.view(torch.uint8).clone()
    write(key, value, key_cache, value_cache, torch.full((7,), -1), *scales)
    assert torch.equal(before, key_cache.view(torch.uint8))


def test_codes_are_written_as_they_are():
    key, value, key_cache, value_cache, slots, *_ = inputs()
    kv_cache_write(key.to(E4M3), value.to(E4M3), key_cache, value_cache, slots)
    page, offset = slots[0] // 16, slots[0] % 16
    assert torch.equal(key_cache[page, :, offset].float(), key[0].to(E4M3).float())


def test_saturates_and_keeps_nan():
    key, value, key_cache, value_cache, slots, *scales = inputs(tokens=1)
    key = torch.full_like(key, 1e4)
    value = torch.full_like(value, torch.nan)
    kv_cache_write(key, value, key_cache, value_cache, slots, *scales)
    page, offset = slots[0] // 16, slots[0] % 16
    assert (key_cache[page, :, offset].float() == 448).all()
    assert value_cache[page, :, offset].float().isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "layout"), [(E4M3, "HND"), (BF16, "NHD")])
def test_opcheck(dtype, layout, device):
    key, value, key_cache, value_cache, slots, *scales = inputs(dtype, layout, device=device)
    for cache in (key_cache, value_cache):
        reference.bits(cache).zero_()  # a NaN is not equal to itself
    # test_schema compares arguments by torch.allclose, which FP8 does not have (torch 2.13); bf16 passes it.
    some = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    utils = some if dtype == E4M3 else "ALL"
    torch.library.opcheck(OP, (key, value, key_cache, value_cache, slots, *scales), test_utils=utils)


class Step(torch.nn.Module):
    """A cache that is written, read, written and read again."""

    def __init__(self, dtype):
        super().__init__()
        self.cache = PagedKVCache(11, 16, 2, 32, dtype, layout="NHD")
        self.register_buffer("scale", torch.tensor(0.5) if dtype == E4M3 else None)

    def forward(self, x, slots, table, start, lengths):
        results = []
        for factor in (1.0, 3.0):
            key = x * factor
            kv_cache_write(key, -key, self.cache.key, self.cache.value, slots, self.scale, self.scale)
            caches = (self.cache.key, self.cache.value)
            out = paged_attention(x, *caches, table, start, lengths, None, self.scale, self.scale, scale=0.3)
            results.append(out * 2)
        return results


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_compiled_in_place_and_in_order(dtype):
    x = torch.randn(5, 2, 32).bfloat16()
    index = {"dtype": torch.int32}
    batch = (
        torch.arange(33, 38),
        torch.tensor([[2]], **index),
        torch.tensor([0, 5], **index),
        torch.tensor([6], **index),
    )
    model = Step(dtype)
    with torch.no_grad():
        eager = model(x, *batch)
        expected = reference.bits(model.cache.key).clone()
        reference.bits(model.cache.key).zero_()
        address = model.cache.key.data_ptr()
        compiled, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x, *batch)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(expected, reference.bits(model.cache.key))
    assert address == model.cache.key.data_ptr()
    assert code.count("fusion_passes.kv_cache_write.default(") == 2
    assert max(allocations(code)) < model.cache.key.numel(), "a cache was copied"
    assert "clone" not in code.split("def call")[1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.zeros(7, 2, 8).bfloat16()}, ValueError, r"key must be \[tokens, 3, 8\]"),
        ({"value": torch.zeros(7, 3, 8)}, TypeError, "key and value must have one dtype"),
        ({"slot_mapping": torch.zeros(7)}, TypeError, "slot_mapping must be int32 or int64"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)}, ValueError, "an entry for each token"),
        ({"slot_mapping": torch.full((7,), 80)}, IndexError, "names slot 80, the cache has 80"),
        ({"k_scale": torch.tensor(1.0, dtype=torch.float64)}, TypeError, "k_scale must be float32"),
        ({"k_scale": torch.ones(3)}, ValueError, "v_scale|k_scale must hold one element"),
        ({"v_scale": torch.ones((), device="meta")}, ValueError, "v_scale is on meta, the rest on cpu"),
        ({"value_cache": torch.zeros(5, 3, 16, 4)}, ValueError, "both alike"),
        ({"value_cache": torch.zeros(5, 3, 16, 8)}, TypeError, "one dtype"),
        ({"key_cache": torch.zeros(5, 3, 8, 16).to(E4M3).mT}, ValueError, "last dimension of key_cache"),
    ],
)
def test_bad_arguments(change, error, message):
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
    with pytest.raises(error, match=message):
        kv_cache_write(**dict(zip(names, inputs(), strict=True)) | change)


def test_dtypes_that_do_not_go_together():
    key, value, key_cache, value_cache, slots, *_ = inputs(BF16)
    with pytest.raises(ValueError, match=r"this cache is .*bfloat16: leave them out"):
        kv_cache_write(key, value, key_cache, value_cache, slots, torch.ones(()))
    with pytest.raises(TypeError, match=r"does not take keys of .*float16"):
        kv_cache_write(key.half(), value.half(), key_cache, value_cache, slots)


def test_scatter_asks_the_device_nothing():
    """A fake tensor has no values, so that a question to them is an error; as it is while a CUDA graph is captured."""
    with FakeTensorMode() as mode:
        scatter(*(mode.from_tensor(x) for x in inputs()))


def test_scatter_skips_slots_outside_the_cache():
    key, value, key_cache, value_cache, slots, *scales = inputs()
    slots[0] = 5 * 16
    scatter(key, value, key_cache, value_cache, slots, *scales)
    assert (key_cache.view(torch.uint8) != 127).any(-1).any(1).sum() == (slots[1:] >= 0).sum()
