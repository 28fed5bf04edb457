"""Cases of `query_quant`: RoPE or a norm, a quantization that an op hides, attention with a KV cache.

Every case takes what the query is made of, the two caches, block table, query starts and lengths, then the scales of
q, k and v.
"""

import torch
import torch.nn.functional as F

from fusion_passes.ops.quantize import quantize_fp8
from tests.fusions import paged_cases as paged
from tests.fusions.case import Case
from tests.fusions.paged_cases import E4M3, E5M2, HEAD_DIM, HEADS
from tests.idioms.test_quantize import torchao_op

RULE = "query_quant"
FAMILIES = {"": frozenset({"inside", "opaque"})}
_library = torch.library.Library("fusion_passes_query", "FRAGMENT")
_library.define("secret(Tensor x, Tensor scale) -> Tensor")
_library.impl("secret", lambda x, s: (x.float() / s).clamp(-448.0, 448.0).to(E4M3), "CompositeExplicitAutograd")
torch.library.register_fake("fusion_passes_query::secret", lambda x, s: torch.empty_like(x, dtype=E4M3), lib=_library)


def inputs(dtype=torch.bfloat16, cache=E4M3, strided=False, shape=(), prepare=lambda: None):
    """prepare: is called before anything is traced."""

    def make(tokens, device):
        prepare()
        width = (3 if strided else 1) * HEADS * HEAD_DIM
        x = paged.random(tokens, width, device=device, dtype=dtype)[:, : HEADS * HEAD_DIM]
        x = x.unflatten(1, (HEADS, HEAD_DIM))
        caches = (paged.cache(device, cache, scale=s) for s in (paged.K_SCALE, paged.V_SCALE))
        scales = (paged.scalar(s, device, shape) for s in (paged.Q_SCALE, paged.K_SCALE, paged.V_SCALE))
        return (x, *caches, *paged.batch(tokens, device), *scales)

    return make


def rope(x):
    """Neox-style, by a position that is the token's number."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0], device=x.device)[:, None] * torch.logspace(0, -2, half, device=x.device)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def norm(x):
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def inside(x, scale):
    return x


def opaque(x, scale):
    return quantize_fp8(x, scale, E4M3)


def opaque_e5m2(x, scale):
    return quantize_fp8(x, scale, E5M2)


def torchao(x, scale):
    return torch.ops.torchao.quantize_affine_float8_non_decomposed(x, scale, E4M3)


def flat(x, scale):
    """Quantized as [tokens, hidden]."""
    return quantize_fp8(x.flatten(1), scale, E4M3).unflatten(1, (HEADS, HEAD_DIM))


def case(name, quantize=inside, before=rope, family="", **fields):
    options = {key: fields.pop(key) for key in ("dtype", "cache", "strided", "shape", "prepare") if key in fields}
    dtype = options.get("dtype", torch.bfloat16)

    def fn(x, key, value, table, start, lengths, q, k, v):
        return paged.attend(quantize(before(x), q), key, value, table, start, lengths, q, k, v, dtype=dtype)

    def exact(x, key, value, table, start, lengths, q, k, v):
        codes = (before(x.float()) / q).clamp(-448.0, 448.0).to(E4M3)
        return paged.exact(codes, key, value, table, start, lengths, q, k, v)

    return Case(
        name,
        fn,
        inputs(**options),
        **{
            "reference": exact,
            "family": family or ("inside" if quantize is inside else "opaque"),
            "dynamic": ((0, 0),),
            "strided": options.get("strided", False),
            "scales": (-3, -2, -1),
            "becomes": "paged_attention",
            "differentiable": False,
            "output_scale": False,
            **fields,
        },
    )


FUSED = (
    case("inside of the attention"),
    case("opaque op", opaque),
    case("torchao's op", torchao, prepare=torchao_op),
    case("a norm", before=norm),
    case("opaque op on RoPE of a norm", opaque, before=lambda x: rope(norm(x)), dtype=torch.float16),
    case("opaque op on strided memory", opaque, before=lambda x: x * 1.5, strided=True),
    case("strided", before=lambda x: x, strided=True),
    case("opaque op with views", flat),
    case("scales of shape [1]", shape=(1,)),
    case("opaque op with scales of shape [1]", opaque, shape=(1,)),
    case("fp32", dtype=torch.float32),
)


def scale_per_token(x, scale):
    return torchao(x, scale * torch.ones(x.shape[0], 1, 1, device=x.device))


def scale_in_bf16(x, scale):
    return torchao(x, scale.bfloat16())


def declined(name, reason, quantize, **fields):
    return case(name, quantize, **{"fuses": False, "reason": reason, "reference": None, "scales": (), **fields})


SECRET = torch.ops.fusion_passes_query.secret
DECLINED = (
    declined("scale per token", r"not a static per-tensor", scale_per_token, prepare=torchao_op, place=True),
    declined(
        "scale in bf16", r"make it float32", lambda x, s: torchao(x, s.bfloat16()), prepare=torchao_op, place=True
    ),
    declined("an op that nobody knows", r"fusion_passes_query\.secret, of which the formula", SECRET),
)
CASES = FUSED + DECLINED
