"""The kernel of rope_quant_kv_write and kv_cache_write against the fp32 reference. On a card if there is one."""

import pytest
import torch

from fusion_passes import reference
from fusion_passes.kernels import rope_quant_kv_write as kernel
from fusion_passes.nn import PagedKVCache
from fusion_passes.ops import kv_cache_write, rope_quant_kv_write
from fusion_passes.quant import FP8_DTYPES, codes, quantize
from tests.kernels import hopper

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TIES = 2e-3
"""Share of codes that two fp32 computations may round to different sides."""


class Problem:
    """Query, key and value as slices of one projection, caches full of NaN, slots out of order with holes."""

    def __init__(
        self, tokens=5, heads=6, kv_heads=2, head_dim=32, rotary_dim=None, *, source=BF16, cache=E4M3, out=None,
        interleaved=False, wide=False, paired=False, table=False, cos_dtype=FP32, page_size=16, layout="HND",
        scaled=True, factor=1.0, inverse=False,
    ):  # fmt: skip
        self.rotary_dim = rotary_dim or head_dim
        packed = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(source)
        q, k, v = packed.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
        self.q, self.k, self.v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
        rows, width = (11 if table else tokens), self.rotary_dim if wide else self.rotary_dim // 2
        # Side by side, as in a table of cos and sin; not of one angle, so that a swap of halves shows.
        self.cos, self.sin = torch.rand(rows, 2 * width, device=DEVICE).sub(0.5).to(cos_dtype).split(width, -1)
        if paired:  # the two parts of complex numbers
            turns = torch.stack((self.cos, self.sin), -1).flatten(-2)
            self.cos, self.sin = turns[:, ::2], turns[:, 1::2]
        self.positions = torch.arange(tokens, device=DEVICE).mul(7).remainder(rows) - 1 if table else None
        halves = PagedKVCache(5, page_size, kv_heads, head_dim, cache, layout=layout, device=DEVICE)
        self.caches = halves.key, halves.value
        for half in self.caches:
            half.view(torch.uint8).fill_(0xFF)
        self.slots = torch.randperm(5 * page_size, device=DEVICE)[:tokens]
        self.slots[1::3] = -1
        self.slots[2::5] = 5 * page_size + 3
        self.scales = [torch.full((1,), x, device=DEVICE) if scaled else None for x in (0.013, 0.017, 0.009)]
        if cache not in FP8_DTYPES:
            self.scales[1:] = None, None
        self.out_dtype = out or (E4M3 if scaled else source)
        if self.out_dtype not in FP8_DTYPES:
            self.scales[0] = None
        self.interleaved, self.factor, self.inverse = interleaved, factor, inverse

    @property
    def options(self):
        return {
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "q_scale_factor": self.factor,
            "q_scale_inverse": self.inverse,
        }

    def tensors(self, caches):
        return (self.q, self.k, self.v, self.cos, self.sin, self.positions, *caches, self.slots, *self.scales)

    def fused(self, config=None):
        caches = [x.clone(memory_format=torch.preserve_format) for x in self.caches]
        out = torch.full(self.q.shape, torch.nan, device=DEVICE).to(self.out_dtype)
        kernel.launch(out, *self.tensors(caches), **self.options, config=config)
        return out, *caches

    def expected(self):
        """By the CPU implementation of the op."""
        caches = [x.cpu().clone(memory_format=torch.preserve_format) for x in self.caches]
        tensors = [x.cpu() if isinstance(x, torch.Tensor) else x for x in self.tensors(caches)]
        tensors[8] = tensors[8].where(tensors[8] < caches[0].shape[0] * caches[0].shape[2], -1)
        out = rope_quant_kv_write(*tensors, **self.options, dtype=self.out_dtype)
        return out, tensors[6], tensors[7]

    def check(self, config=None):
        for got, want in zip(self.fused(config), self.expected(), strict=True):
            check(got.cpu(), want)


def check(got, want):
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    if got.dtype in FP8_DTYPES:
        off = (codes(got) - codes(want)).abs()
        assert off.max() <= 1
        assert (off != 0).float().mean() <= TIES
    else:
        torch.testing.assert_close(got, want, rtol=torch.finfo(got.dtype).eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "NHD", "cos_dtype": BF16, "wide": True},
        {"interleaved": True},
        {"interleaved": True, "paired": True, "table": True},
        {"paired": True, "wide": True},
        {"interleaved": True, "wide": True, "source": FP16},
        {"rotary_dim": 16, "table": True, "source": FP32},
        {"rotary_dim": 24, "head_dim": 40, "interleaved": True, "page_size": 12},
        {"cache": BF16, "scaled": False},
        {"cache": BF16, "out": E5M2, "tokens": 1},
        {"cache": E5M2, "out": BF16, "table": True, "cos_dtype": FP16},
        {"scaled": False, "out": E4M3, "factor": 0.5},
        {"inverse": True, "factor": 1e3, "heads": 3, "kv_heads": 3},
        {"heads": 5, "kv_heads": 1, "tokens": 7},
    ],
    ids=str,
)
def test_against_the_reference(options):
    Problem(**options).check()


@pytest.mark.parametrize("config", [(4, 1, 1), (8, 2, 4), (2, 4, 2)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_way_to_cut_the_work(config, interleaved):
    Problem(tokens=7, heads=6, kv_heads=3, rotary_dim=16, interleaved=interleaved).check(config)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_saturates_and_keeps_nan(dtype):
    p = Problem(cache=dtype, out=dtype)
    p.q[0], p.k[0], p.v[0] = 3e38, 3e38, torch.inf
    p.q[3, 1, 5], p.k[3, 1, 5], p.v[3, 1, 5] = torch.nan, torch.nan, torch.nan
    p.check()


@pytest.mark.parametrize(
    ("source", "cache", "layout"), [(BF16, E4M3, "HND"), (FP16, E5M2, "NHD"), (BF16, BF16, "NHD"), (E4M3, E4M3, "HND")]
)
def test_the_write_alone(source, cache, layout):
    p = Problem(tokens=9, head_dim=24, source=BF16 if source == E4M3 else source, cache=cache, layout=layout)
    k, v = p.k.to(source), p.v.to(source)
    scales = p.scales[1:] if source != cache else (None, None)
    got = [x.clone(memory_format=torch.preserve_format) for x in p.caches]
    kernel.launch_write(k, v, *got, p.slots, *scales)
    want = [x.cpu() for x in p.caches]
    slots = p.slots.cpu()
    slots = slots.where(slots < want[0].shape[0] * want[0].shape[2], -1)
    kv_cache_write(k.cpu(), v.cpu(), *want, slots, *(x if x is None else x.cpu() for x in scales))
    for a, b in zip(got, want, strict=True):
        if source == cache:
            assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
        else:
            check(a.cpu(), b)


def test_strides():
    """Tokens apart by an odd number, a transposed query, an expanded value, a last dimension that is not contiguous."""
    p = Problem(tokens=6, heads=4, kv_heads=4, head_dim=16)
    p.q = torch.randn(4, 6, 16, device=DEVICE).bfloat16().transpose(0, 1)
    p.k = torch.randn(6, 4 * 16 + 1, device=DEVICE).bfloat16()[:, 1:].unflatten(-1, (4, 16))
    p.v = torch.randn(6, 1, 16, device=DEVICE).bfloat16().expand(6, 4, 16)
    p.check()
    p.v = torch.randn(6, 16, 4, device=DEVICE).bfloat16().mT
    p.check()


def test_positions_outside_of_the_table_are_the_nearest_row():
    p = Problem(table=True)
    outside = p.positions.clone()
    outside[3], outside[4] = 10**6, -(10**6)
    p.positions = outside
    got = p.fused()
    p.positions = outside.clamp(-11, 10)
    for a, b in zip(got, p.expected(), strict=True):
        check(a.cpu(), b)


def test_no_tokens():
    p = Problem(tokens=0)
    before = [x.clone() for x in p.caches]
    _, *after = p.fused()
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
def test_a_cache_of_more_than_2_to_the_31_elements():
    p = Problem(tokens=3, heads=2, kv_heads=2, head_dim=128, page_size=256)
    pages = 2**31 // (2 * 256 * 128) + 3
    caches = [torch.zeros(pages, 2, 256, 128, dtype=torch.uint8, device="cuda").view(E4M3) for _ in range(2)]
    p.slots = torch.tensor([pages * 256 - 1, 5, (pages - 2) * 256], device="cuda")
    out = torch.empty(p.q.shape, dtype=E4M3, device="cuda")
    kernel.launch(out, *p.tensors(caches), **p.options)
    want = reference.as_cached(p.v, p.scales[2], E4M3)
    for token, slot in enumerate(p.slots.tolist()):
        row = caches[1][slot // 256, :, slot % 256]
        assert torch.equal(row.view(torch.uint8), want[token].view(torch.uint8))


COMPILE = """
from fusion_passes.kernels.rope_quant_kv_write import _rope_quant_kv_write as kernel
from tests.kernels.hopper import build

pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr"), "*bf16")
pointers |= dict.fromkeys(("out_ptr", "key_cache_ptr", "value_cache_ptr"), "*fp8e4nv")
pointers |= dict.fromkeys(("positions_ptr", "slot_ptr"), "*i64")
pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32")
constants = dict(
    HEADS=32, KV_HEADS=8, HEAD_DIM=128, HALF=64, PAGE_SIZE=64, WIDE=False, STEP=1, INTERLEAVED=False, Q_SCALED=True,
    Q_INVERSE=False, BLOCK_Q=16, BLOCK_KV=8, BLOCK_HALF=64, BLOCK_REST=64,
    BLOCK_D=128, EARLY=True, q_scale_ptr=None,
)
kinds = {
    "write": dict(HEADS=0, HALF=0, BLOCK_HALF=1, BLOCK_REST=128, positions_ptr=None),
    "halves": {},
    "neighbours": dict(INTERLEAVED=True, WIDE=True, HALF=32, BLOCK_HALF=32),
}
for name, changes in kinds.items():
    made = build(kernel, constants | changes, pointers | {"q_scale_factor": "fp32"})
    text = made.asm["ptx"]
    print(name, made.metadata.shared, "ld.global.v4" in text or ".v4.b32" in text, "st.local" in text)
"""


def test_it_compiles_for_hopper_with_wide_loads_and_without_shared_memory():
    """Each kind of call, with what the interpreter takes and the compiler does not."""
    write, halves, neighbours = hopper.run(COMPILE)
    assert write == ["write", "0", "True", "False"]
    assert halves == ["halves", "0", "True", "False"]
    assert neighbours[2:] == ["True", "False"]


def check_divided(got, want):
    """Next to a rounding border the quick division may go to the other side; of all bf16 numbers hardly one does."""
    off = (codes(got) - codes(want)).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-4


@pytest.mark.parametrize("scale", [0.0371, 2.9])
@pytest.mark.parametrize("name", ["rope_quant_kv_write", "kv_cache_write"])
def test_codes_are_those_of_a_division(name, scale):
    """All bf16 numbers, infinities and NaN among them; nothing is turned."""
    every = torch.arange(2**16, device=DEVICE).to(torch.int16).view(BF16).view(-1, 8, 256)
    slots = torch.arange(len(every), device=DEVICE)
    caches = [torch.zeros(len(every) // 16, 8, 16, 256, dtype=E4M3, device=DEVICE) for _ in range(2)]
    scale = torch.tensor(scale, device=DEVICE)
    want = quantize(every, scale, E4M3)
    if name == "kv_cache_write":
        kernel.launch_write(every, every, *caches, slots, scale, scale)
    else:
        out, cos = torch.zeros_like(want), torch.ones(len(every), 1, device=DEVICE)
        kernel.launch(
            *(out, every, every, every, cos, torch.zeros_like(cos), None, *caches, slots, scale, scale, scale),
            rotary_dim=2,
            interleaved=False,
            q_scale_factor=1.0,
            q_scale_inverse=False,
        )
        passed = (slice(None), slice(None), slice(2, None))  # what is turned has inf - inf in it
        check_divided(out[passed], want[passed])
    got = reference.bits(caches[1]).transpose(1, 2).reshape(want.shape)
    check_divided(got.view(E4M3), want)
