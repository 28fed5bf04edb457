"""Cases of `rope_quant_kv_write`: a rotary embedding, the query's quantization, and the write to a KV cache.

Every case takes a packed projection, cos and sin (or a table of both, and positions), the two caches, the slots, then
the scales of k, v and q.  It gives the query, and what the caches hold in the slots of the tokens.
"""

import torch

from fusion_passes import reference
from fusion_passes.idioms.rope import SPELLINGS
from fusion_passes.nn import PagedKVCache
from fusion_passes.ops import kv_cache_write
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.quant import FP8_DTYPES
from tests.fusions.case import STATIC, Case

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
K_SCALE, V_SCALE, Q_SCALE = 0.029, 0.017, 0.043

_library = torch.library.Library("fusion_passes_rope", "FRAGMENT")
_library.define("read_back(Tensor cache, Tensor slots) -> Tensor")


def _read_back(cache, slots):
    """What lies in the slots, [tokens, kv_heads, head_dim]; 0 for a token without one."""
    page, offset = slots.clamp_min(0) // cache.shape[2], slots.clamp_min(0) % cache.shape[2]
    rows = reference.bits(cache).transpose(1, 2)[page, offset]
    return torch.where((slots >= 0)[:, None, None], rows, 0).view(cache.dtype)


_library.impl("read_back", _read_back, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusion_passes_rope::read_back",
    lambda cache, slots: cache.new_empty(slots.shape[0], cache.shape[1], cache.shape[3]),
    lib=_library,
)

RULE = "rope_quant_kv_write"
FAMILIES = {"": STATIC}
read_back = torch.ops.fusion_passes_rope.read_back


def inputs(
    dtype=BF16, cache=E4M3, half=HEAD_DIM // 2, table=False, strided=False, shape=(), layout="HND", heads=HEADS,
    kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=40,
):  # fmt: skip
    def make(tokens, device):
        width = (heads + 2 * kv_heads) * head_dim
        packed = (2.0 * torch.randn(tokens, width + 3 * strided, device=device)).to(dtype)[:, 3 * strided :]
        rows = 50 if table else tokens
        cos, sin = torch.randn(2, rows, half, device=device).to(dtype)
        angles = (torch.cat((cos, sin), -1), torch.arange(tokens, device=device) * 7 % rows) if table else (cos, sin)
        halves = PagedKVCache(pages, 16, kv_heads, head_dim, cache, layout=layout, device=device)
        for held in (halves.key, halves.value):
            held.copy_(torch.randn(held.shape, device=device).to(cache))
            torch._dynamo.mark_static_address(held, guard=False)  # as buffers are: CUDA graphs may write to it
        slots = torch.randperm(pages * 16, device=device)[:tokens]
        slots[2::3] = -1
        scales = (torch.full(shape, x, device=device) for x in (K_SCALE, V_SCALE, Q_SCALE))
        return (packed, *angles, halves.key, halves.value, slots, *scales)

    return make


def saturate(y, dtype=E4M3):
    limit = torch.finfo(dtype).max
    return y.clamp(-limit, limit).to(dtype)


def divide(q, scale):
    return saturate(q.float() / scale)


def divide_e5m2(q, scale):
    return saturate(q.float() / scale, E5M2)


def reciprocal(q, scale):
    return saturate(q.float() * scale.reciprocal())


def inverse(q, scale):
    return saturate(q.float() * scale)


def number(q, scale):
    return saturate(q.float() / 0.37)


def opaque(q, scale):
    return quantize_fp8(q, scale, E4M3)


def keep(q, scale):
    return q


def by_scale(q, scale):
    return q / scale


def flat(q, scale):
    """[tokens, hidden]."""
    return saturate(q.flatten(1).float() / scale)


def apart(packed, heads, kv_heads, head_dim):
    q, k, v = packed.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
    return (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))


def halves_of_a_table(x, table, positions):
    cos, sin = table[positions][:, None].to(x.dtype).chunk(2, -1)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def batched(x, cos, sin):
    """[batch, heads, length, head_dim] in between, tables [batch, length, head_dim], as transformers has it."""
    tokens, heads, head_dim = x.shape
    x = x.view(1, tokens, heads, head_dim).transpose(1, 2)
    cos, sin = (torch.cat((c, c), -1)[None].unsqueeze(1) for c in (cos, sin))
    x1, x2 = x[..., : head_dim // 2], x[..., head_dim // 2 :]
    out = x * cos + torch.cat((-x2, x1), -1) * sin
    return out.transpose(1, 2).reshape(tokens, heads, head_dim)


def case(
    name, quantize=divide, family="divide", exact=by_scale, rotate="halves", cache=E4M3, table=False, options=None,
    geometry=(HEADS, KV_HEADS, HEAD_DIM), write=kv_cache_write, alone=False, **fields,
):  # fmt: skip
    """One of all: `rotate` is the name of a spelling, or a function (x, cos, sin); alone: gives the query only."""
    half = 8 if isinstance(rotate, str) and rotate.startswith("the first") else geometry[2] // 2
    turn = SPELLINGS[rotate] if isinstance(rotate, str) else rotate
    interleaved = isinstance(rotate, str) and ("neighbours" in rotate or "every_two" in rotate)
    scaled = cache in FP8_DTYPES
    large = geometry != (HEADS, KV_HEADS, HEAD_DIM)
    make = inputs(
        cache=cache, table=table, half=half,
        **dict(zip(("heads", "kv_heads", "head_dim"), geometry, strict=True)) | (options or {}),
    )  # fmt: skip

    def fn(packed, cos, sin, key_cache, value_cache, slots, k_scale, v_scale, q_scale):
        # Dynamo takes globals for constants, under dynamic=True too.
        q, k, v = apart(packed, *geometry) if large else apart(packed, HEADS, KV_HEADS, HEAD_DIM)
        scales = (k_scale, v_scale) if scaled else ()
        write(turn(k, cos, sin), v, key_cache, value_cache, slots, *scales)
        codes = quantize(turn(q, cos, sin), q_scale)
        if alone:
            return codes
        return codes, read_back(key_cache, slots), read_back(value_cache, slots)

    def exact_outputs(packed, cos, sin, key_cache, value_cache, slots, k_scale, v_scale, q_scale):
        if table:
            cos, sin = cos[sin].chunk(2, -1)
        q, k, v = apart(packed.float(), *geometry)
        q, k = (
            reference.rope(x, cos[:, None], sin[:, None], rotary_dim=2 * half, interleaved=interleaved) for x in (q, k)
        )
        by_k, by_v = (k_scale, v_scale) if scaled else (1.0, 1.0)
        written = (slots >= 0)[:, None, None]
        if alone:
            return exact(q, q_scale)
        return exact(q, q_scale), torch.where(written, k / by_k, 0.0), torch.where(written, v / by_v, 0.0)

    tokens = ((0, 0), (2, 0), (5, 0)) if table else ((0, 0), (1, 0), (2, 0), (5, 0))
    return Case(
        name,
        fn,
        make,
        **{
            "reference": exact_outputs,
            "family": family,
            "dynamic": tokens,
            "strided": (options or {}).get("strided", False),
            "scales": (-3, -2, *(() if quantize in (number, keep) else (-1,))) if scaled else (),
            "differentiable": False,
            "effect": alone,
            **fields,
        },
    )


def write_quantized(key, value, key_cache, value_cache, slots, k_scale, v_scale):
    """Quantized in plain torch before, the value on its way through another shape."""
    value = saturate(value.flatten(1).float() / v_scale).view(value.shape)
    kv_cache_write(divide(key, k_scale), value, key_cache, value_cache, slots)


FUSED = (
    case("halves", flat, exact=lambda q, s: q.flatten(1) / s, options={"dtype": FP32}, alone=True),
    case("rotate_half", inverse, "inverse", lambda q, s: q * s, "rotate_half"),
    case("rotate_half, heads first", number, "number", lambda q, s: q / 0.37, "rotate_half, heads first"),
    case("neighbours", reciprocal, "reciprocal", rotate="neighbours as pairs", options={"layout": "NHD"}),
    case("the first dimensions", opaque, "opaque", rotate="the first dimensions"),
    case("looked up by position", rotate=halves_of_a_table, table=True),
    case("as in transformers", rotate=batched, options={"dtype": FP16}),
    case("strided", options={"strided": True, "dtype": FP32}, alone=True),
    case("halves in bf16"),
    case("key and value quantized before", write=write_quantized),
    case("e5m2", divide_e5m2, cache=E5M2, options={"shape": (1,)}),
    case("query as it is", keep, exact=lambda q, s: q),
    case("bf16 cache", cache=BF16),
    case("one KV head", rotate="rotate_half of chunks, in fp32", geometry=(3, 1, HEAD_DIM)),
)


def write_twice(key, value, key_cache, value_cache, slots, *scales):
    for half in slots.where(slots % 2 == 0, -1), slots.where(slots % 2 == 1, -1):
        kv_cache_write(key, value, key_cache, value_cache, half, *scales)


def quantized_by_an_inverse(key, value, key_cache, value_cache, slots, k_scale, v_scale):
    kv_cache_write(inverse(key, k_scale), divide(value, v_scale), key_cache, value_cache, slots)


def not_rotated(x, cos, sin):
    return x * 1.5


def heads_as_tokens(x, cos, sin):
    """As many heads as tokens, so that nobody notices in the shapes."""
    return SPELLINGS["halves"](x, cos, sin).transpose(0, 1).reshape(x.shape)


def turned_back(x, cos, sin):
    return SPELLINGS["halves"](x, cos, -sin)


class Differently:
    """The first call, for the key, turns by other angles than the second."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, cos, sin):
        return SPELLINGS["halves"](x, cos if x.shape[1] == HEADS else cos * 1.5, sin)


def in_fp32(key, value, key_cache, value_cache, slots, *scales):
    kv_cache_write(key.float(), value.float(), key_cache, value_cache, slots, *scales)


def declined(name, reason, **fields):
    return case(name, **{"fuses": False, "reason": reason, "reference": None, "scales": (), **fields})


DECLINED = (
    declined("key written twice", r"is also read by", write=write_twice, place=True),
    declined("key not rotated", r"the key comes from aten\.mul", rotate=not_rotated),
    declined("other angles", r"no query is rotated by the same cos and sin", rotate=Differently()),
    declined("tokens and heads scrambled", r"another order", rotate=heads_as_tokens),
    declined(
        "clamp at 240", r"clamps to \(-240", quantize=lambda q, s: (q.float() / s).clamp(-240, 240).to(E4M3), alone=True
    ),
    declined("whole numbers", r"whole numbers", quantize=lambda q, s: saturate((q.float() / s).round())),
    declined(
        "scale per head", r"not a static per-tensor", quantize=lambda q, s: saturate(q / (s * q.new_ones(HEADS, 1)))
    ),
    declined("key times an inverse scale", r"the key is multiplied by a scale", write=quantized_by_an_inverse),
    declined("value of another dtype", r"before they are rotated", write=in_fp32),
)

LARGE = tuple(
    case(
        f"{heads}/{kv_heads} heads of {head_dim}",
        rotate=rotate,
        geometry=(heads, kv_heads, head_dim),
        options={"pages": 136},
    )
    for heads, kv_heads, head_dim, rotate in (
        (32, 8, 128, "rotate_half"),
        (8, 1, 256, "halves in fp32"),
        (40, 8, 64, "neighbours"),
        (12, 4, 80, "halves"),
    )
)
"""Of the size of real models: for a GPU."""

CASES = FUSED + DECLINED
