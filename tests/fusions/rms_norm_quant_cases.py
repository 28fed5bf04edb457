"""Cases of `rms_norm_quant`: a norm in several spellings, the views, and a way to quantize.

Every case takes x and a weight, then the scale where it is static.
"""

import torch
import torch.nn.functional as F

from fusion_passes import reference
from fusion_passes.idioms.spellings.rms_norm import SPELLINGS
from tests.fusions.attention_quant_cases import (
    clamp,
    clamp_in_steps,
    divide,
    divide_e5m2,
    divided,
    factor,
    inverse,
    inverse_from_left,
    inverse_number,
    multiplied,
    number,
    opaque,
    reciprocal,
)
from tests.fusions.case import STATIC, Case
from tests.fusions.paged_attention_quant_cases import by_layer, by_op, exact_groups, in_groups

RULE = "rms_norm_quant"
FAMILIES = {"": STATIC, "groups": frozenset({"plain", "opaque"})}
HIDDEN = 64
EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32


def inputs(dtype=BF16, weight=BF16, strided=False, static=True):
    def make(tokens, device):
        x = torch.randn(tokens, (3 if strided else 1) * HIDDEN, device=device).mul(2).to(dtype)[:, :HIDDEN]
        scale = [torch.tensor(0.02, device=device)] * static
        return (x, (1.0 + 0.2 * torch.randn(HIDDEN, device=device)).to(weight), *scale)

    return make


def exact_norm(x, weight, offset=0.0):
    return reference.rms_norm(x, weight, eps=EPS, weight_offset=offset)


def stay(x):
    return x


def case(
    name, norm="Llama, Qwen, Mistral", quantize_by=divide, family="divide", exact=divided, *, exact_norm=exact_norm,
    views=stay, dtype=BF16, weight=BF16, strided=False, **fields,
):  # fmt: skip
    """norm: its spelling, or a function of x and the weight."""
    norm = SPELLINGS.get(norm, norm)
    live = quantize_by not in (number, inverse_number)
    return Case(
        name,
        lambda x, weight, scale: quantize_by(views(norm(x, weight)), scale),
        inputs(dtype, weight, strided),
        **{
            "reference": lambda x, weight, scale: exact(views(exact_norm(x, weight)), scale),
            "family": family,
            "dynamic": ((0, 0),),
            "scales": (-1,) if live else (),
            "output_scale": live,
            "strided": strided,
            "differentiable": False,
            **fields,
        },
    )


def grouped(
    name, norm="Llama, Qwen, Mistral", quantize_by=by_layer, family="plain", *, exact=exact_groups, views=stay,
    dtype=BF16, then=lambda *both: both, **fields,
):  # fmt: skip
    """then: what the program returns of codes and scales, in the reference too."""
    norm = SPELLINGS.get(norm, norm)
    return Case(
        f"groups: {name}",
        lambda x, weight: then(*quantize_by(views(norm(x, weight)))),
        inputs(dtype, static=False),
        **{
            "reference": lambda x, weight: then(*exact(views(exact_norm(x, weight)))),
            "family": family,
            "dynamic": ((0, 0),),
            "kind": "groups",
            "becomes": "rms_norm_group_quant",
            "all_symbolic": False,  # whether the groups divide a row
            "output_scale": False,
            "differentiable": False,
            **fields,
        },
    )


def per_token(x):
    return in_groups(x, group=HIDDEN)


def exact_per_token(x):
    return exact_groups(x, group=HIDDEN)


def one_plus(x, weight):
    return exact_norm(x, weight, offset=1.0)


def unweighted(x, weight):
    return exact_norm(x, None)


def by_heads(x):
    return x.unflatten(-1, (4, 16)).transpose(0, 1)


FUSED = (
    case("Llama"),
    case("Llama, strided", strided=True),
    case("Gemma", "Gemma", reciprocal, "reciprocal", exact_norm=one_plus),
    case("OLMo 2, weight in fp32", "OLMo 2, gpt-oss", inverse, "inverse", multiplied, weight=FP32),
    case("T5, e5m2", "T5", divide_e5m2),
    case("F.rms_norm", "F.rms_norm", opaque, "opaque"),
    case("F.rms_norm in fp32", "F.rms_norm", inverse_from_left, "inverse", multiplied, dtype=FP32, weight=FP32),
    case("DeepSeek V4", "DeepSeek V4", number, "number", lambda x, s: x / 0.37, exact_norm=unweighted),
    case("no weight", "F.rms_norm, no weight", inverse_number, "number", lambda x, s: x * 2.5, exact_norm=unweighted),
    case("fp16, a factor", "ImageGPT", factor, exact=lambda x, s: x / (s * 2.0), dtype=torch.float16),
    case("views", views=by_heads),
    case("clamped in two steps, no-op views", quantize_by=clamp_in_steps, views=lambda x: x[None].squeeze(0)[:, 0:]),
)
DYNAMIC = (
    grouped("plain"),
    grouped("an op", quantize_by=by_op, family="opaque"),
    grouped("in the shape of groups", "OLMo 2, gpt-oss", in_groups),
    grouped("one for each token", "F.rms_norm", per_token, exact=exact_per_token),
    grouped("codes alone", then=lambda codes, scales: codes),
    grouped(
        "at least and at most",
        quantize_by=lambda x: in_groups(x, smallest=0.002, prepare=lambda s: s.clamp(max=0.004)),
        exact=lambda x: bounded(x),
    ),
)


def bounded(x):
    groups = x.float().unflatten(-1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(0.002, 0.004)
    return (groups / scales).flatten(-2), scales.squeeze(-1)


# What must not fuse


def declined(name, reason, **fields):
    return case(name, **{"fuses": False, "reason": reason, "reference": None, "scales": (), **fields})


def norm_returned(x, weight, scale):
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return divide(y, scale), y


DECLINED = (
    Case(
        "the norm is returned too",
        norm_returned,
        inputs(),
        fuses=False,
        reason=r"(is returned too|is also read)",
        place=True,
        differentiable=False,
    ),
    declined("whole numbers", r"rounds to whole numbers", quantize_by=lambda x, s: clamp((x / s).round()), place=True),
    declined("scale in bf16", r"make it float32", quantize_by=lambda x, s: divide(x, s.bfloat16()), place=True),
    declined("in bf16", r"mean of the squares is bfloat16", norm=lambda x, w: in_bf16(x) * w),
)


def in_bf16(x):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


CASES = FUSED + DYNAMIC + DECLINED
LARGE = tuple(
    Case(
        f"rows of {hidden}",
        lambda x, weight, scale: divide(F.rms_norm(x, x.shape[-1:], weight, EPS), scale),
        lambda tokens, device, hidden=hidden: (
            torch.randn(tokens, hidden, device=device).bfloat16(),
            torch.randn(hidden, device=device).bfloat16(),
            torch.tensor(0.02, device=device),
        ),
        reference=lambda x, weight, scale: exact_norm(x, weight) / scale,
    )
    for hidden in (128, 3072, 5120, 8192, 16384)
)
"""Of the size of real models: for a GPU."""
