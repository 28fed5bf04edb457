"""Cases of `attention_quant`: put together from a form of attention, a way to quantize, and the views between them.

Every case takes query, key and value (or one packed tensor), a mask where there is one, and the output scale last.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from fusion_passes import reference
from fusion_passes.ops.quantize import quantize_fp8
from tests.fusions.case import STATIC, Case

RULE = "attention_quant"
FAMILIES = {"": STATIC}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SCALE = 0.37


# Inputs: (tokens, device) -> query, key, value [batch, heads, length, head_dim], then a mask, then the scale


def random(*shape, device, dtype=torch.bfloat16):
    return (1.5 * torch.randn(shape, device=device)).to(dtype)


def output_scale(device):
    return torch.tensor(SCALE, device=device)


def qkv(heads=HEADS, kv_heads=HEADS, batch=2, dtype=torch.bfloat16, q_len=None, kv_len=None, head_dim=HEAD_DIM):
    def inputs(tokens, device):
        lengths = (heads, q_len or tokens), (kv_heads, kv_len or tokens), (kv_heads, kv_len or tokens)
        heads_of = (random(batch, *size, head_dim, device=device, dtype=dtype) for size in lengths)
        return (*heads_of, output_scale(device))

    return inputs


def batched(tokens, device):
    return (*(random(tokens, HEADS, 5, HEAD_DIM, device=device) for _ in range(3)), output_scale(device))


def with_mask(make_mask, base=None):
    def inputs(tokens, device):
        *tensors, scale = (base or qkv())(tokens, device)
        return (*tensors, make_mask(tokens, device), scale)

    return inputs


def bool_mask(tokens, device):
    mask = torch.rand(2, 1, tokens, tokens, device=device) > 0.3
    return mask | torch.eye(tokens, dtype=torch.bool, device=device)


def float_mask(tokens, device):
    return random(tokens, tokens, device=device)


def packed(batch=2):
    return lambda tokens, device: (random(batch, tokens, 3 * HEADS * HEAD_DIM, device=device), output_scale(device))


def expanded(tokens, device):
    """A query whose batch of one has an odd stride, and one key and value for all heads and batches."""
    odd = random(2, tokens, HEADS, HEAD_DIM + 16, device=device)[1:, ..., :HEAD_DIM].transpose(1, 2)
    key, value = (random(1, 1, tokens, HEAD_DIM, device=device).expand(1, HEADS, -1, -1) for _ in range(2))
    return odd, key, value, output_scale(device)


def permuted(tokens, device):
    heads_last = (random(tokens, 2, HEADS, HEAD_DIM, device=device).permute(1, 2, 0, 3) for _ in range(3))
    return (*heads_last, output_scale(device))


def scale_shaped(*shape, dtype=torch.float32, index=None):
    def inputs(tokens, device):
        *tensors, scale = qkv()(tokens, device)
        return (*tensors, scale.to(dtype).expand(shape).contiguous())

    return inputs


# Attention: (query, key, value, mask) -> [batch, heads, length, head_dim]


def sdpa(enable_gqa=False, **options):
    return lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=enable_gqa, **options)


def exact_attention(is_causal=False, scale=None):
    return lambda q, k, v, mask: reference.attention(q, k, v, mask, is_causal=is_causal, scale=scale)


def repeat_kv(q, k, v, mask):
    """Grouped heads as Llama repeats them."""
    batch, few, length, dim = k.shape
    k, v = (
        x[:, :, None].expand(batch, few, q.shape[1] // few, length, dim).reshape(batch, q.shape[1], length, dim)
        for x in (k, v)
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v, mask):
    """The eager attention of transformers, whose causal mask is added."""
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v


# Quantization: (x, scale) -> codes; with the exact quotient


def clamp(x, dtype=E4M3):
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def divided(x, scale):
    return x.float() / scale


def multiplied(x, scale):
    return x.float() * scale


def divide(x, scale):
    return clamp(x.float() / scale)


def divide_in_input_dtype(x, scale):
    return clamp(x / scale)


def divide_e5m2(x, scale):
    return clamp(x.float() / scale, E5M2)


def reciprocal(x, scale):
    return clamp(x.float() * scale.reciprocal())


def one_over(x, scale):
    return clamp(x * (1 / scale))


def inverse(x, scale):
    return clamp(x.float() * scale)


def inverse_from_left(x, scale):
    return clamp(scale * x.float())


def factor(x, scale):
    return clamp(x.float() / (scale * 2.0))


def number(x, scale):
    return clamp(x.float() / 0.37)


def inverse_number(x, scale):
    return clamp(2.5 * x.float())


def opaque(x, scale):
    return quantize_fp8(x, scale.reshape(()), E4M3)


def clamp_in_steps(x, scale):
    return (x.float() / scale).clamp_max(448.0).clamp_min(-448.0).to(E4M3)


def minimum_maximum(x, scale):
    limit = torch.full((), 448.0, device=x.device)
    return torch.maximum(torch.minimum(x.float() / scale, limit), -limit).to(E4M3)


# Views: [batch, heads, length, head_dim] -> as the next layer reads it


def bsh(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def th(x):
    return x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3])


def one_th(x):
    return th(x)[None]


def stay(x):
    return x


def contiguous(x):
    return x.permute(0, 2, 1, 3).contiguous().view(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def noop_views(x):
    y = x.transpose(1, 2).contiguous().expand(x.shape[0], -1, -1, -1).to(x.dtype)
    return y.reshape(-1, y.shape[-1]).unflatten(0, y.shape[:3]).unsqueeze(0).squeeze(0)[:, :, 0:].flatten(2)


def heads_of(packed_qkv):
    """[batch, length, 3 * heads * head_dim] -> query, key, value, as slices of it."""
    return tuple(x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in packed_qkv.chunk(3, -1))


def heads_of_by_three_splits(packed_qkv):
    """The same, with a split of its own for each."""
    size = packed_qkv.shape[-1] // 3
    each = (packed_qkv.split(size, -1)[i] for i in range(3))
    return tuple(x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in each)


def case(
    name,
    quantize=divide,
    family="divide",
    exact=divided,
    *,
    attend=None,
    attention=None,
    views=bsh,
    views_last=False,
    inputs=None,
    grouped=False,
    mask=False,
    unpack=None,
    length_dims=None,
    **fields,
):
    """views_last: the codes go through the views, instead of the attention's output."""
    options = attention or {}
    attend = attend or sdpa(grouped, **options)
    exact_attend = exact_attention(**options)
    scales = () if quantize in (number, inverse_number) else (-1,)

    def operands(tensors):
        if unpack is not None:
            return (*unpack(tensors[0]), None)
        return (*tensors[:3], tensors[3] if mask else None)

    def fn(*tensors):
        out = attend(*operands(tensors))
        return views(quantize(out, tensors[-1])) if views_last else quantize(views(out), tensors[-1])

    def exact_codes(*tensors):
        return exact(views(exact_attend(*operands(tensors))), tensors[-1])

    if length_dims is None:
        length_dims = ((0, 1),) if unpack else ((0, 2), (1, 2), (2, 2))
    fields.setdefault("scales", scales)
    return Case(name, fn, inputs or qkv(), reference=exact_codes, family=family, dynamic=length_dims, **fields)


CAUSAL = {"is_causal": True}

FUSED = (
    case("causal", attention=CAUSAL),
    case("tokens x hidden", inverse, "inverse", multiplied, views=th),
    case("1 x tokens x hidden", opaque, "opaque", views=one_th, inputs=qkv(batch=1), attention=CAUSAL),
    case("grouped heads", opaque, "opaque", grouped=True, inputs=qkv(kv_heads=KV_HEADS), attention=CAUSAL),
    case("repeat_kv", attend=repeat_kv, inputs=qkv(kv_heads=KV_HEADS), attention=CAUSAL),
    case("by hand", attend=by_hand, attention=CAUSAL, one_token_on_cuda=False),
    case("softmax scale", reciprocal, "reciprocal", attention={"scale": 0.3}),
    case("bool mask", number, "number", lambda x, s: x / 0.37, mask=True, inputs=with_mask(bool_mask), length_dims=()),
    case("float mask", one_over, "reciprocal", mask=True, inputs=with_mask(float_mask), length_dims=()),
    case("decode", grouped=True, inputs=qkv(kv_heads=KV_HEADS, q_len=1), length_dims=((1, 2), (2, 2))),
    case("prefill behind a cache", views=th, inputs=qkv(kv_len=70), length_dims=((0, 2),)),
    case("packed", unpack=heads_of, inputs=packed(), attention=CAUSAL, strided=True),
    case("packed, split three times", unpack=heads_of_by_three_splits, inputs=packed(), strided=True),
    case("expanded key and value", inputs=expanded, strided=True, length_dims=((0, 2), (1, 2), (2, 2))),
    case("permuted", inputs=permuted, strided=True, views=th),
    case("batch", inputs=batched, attention=CAUSAL, length_dims=((0, 0), (1, 0), (2, 0))),
    case("no views", views=stay),
    case("contiguous", views=contiguous),
    case("no-op views", views=noop_views),
    case("codes through the views", views=th, views_last=True),
    case("codes made contiguous", inverse, "inverse", multiplied, views=contiguous, views_last=True),
    case("commuted", inverse_from_left, "inverse", multiplied),
    case("divide in bf16", divide_in_input_dtype),
    case("factor", factor, exact=lambda x, s: x / (s * 2.0)),
    case("inverse number", inverse_number, "number", lambda x, s: x * 2.5),
    case("clamp in two steps", clamp_in_steps),
    case("minimum and maximum", minimum_maximum),
    case("e5m2", divide_e5m2),
    case("fp16", inputs=qkv(dtype=torch.float16), attention=CAUSAL),
    case("scale of shape [1]", inputs=scale_shaped(1)),
    case("scale of shape [1, 1, 1]", inputs=scale_shaped(1, 1, 1)),
    case(
        "one scale of a table",
        lambda x, table: divide(x, table[1]),
        exact=lambda x, table: x / table[1],
        inputs=scale_shaped(3),
    ),
)


def declined(name, reason, fn, inputs=None, **fields):
    return Case(name, fn, inputs or qkv(), fuses=False, reason=reason, **fields)


def read_before_the_quantization(q, k, v, scale):
    out = bsh(F.scaled_dot_product_attention(q, k, v))
    return divide(out, scale), out


def read_behind_a_view(q, k, v, scale):
    out = F.scaled_dot_product_attention(q, k, v)
    return divide(bsh(out), scale), out.sum()


def two_quantizations(q, k, v, scale):
    out = bsh(F.scaled_dot_product_attention(q, k, v))
    return divide(out, scale), divide(out, scale * 3.0)


def log_sum_exp_used(q, k, v, scale):
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return divide(bsh(out), scale), lse


def simple(between=lambda x: x, quantize=divide, **options):
    def fn(q, k, v, scale):
        return quantize(between(bsh(F.scaled_dot_product_attention(q, k, v, **options))), scale)

    return fn


def with_another_length(tokens, device):
    *tensors, scale = qkv()(tokens, device)
    return (*tensors, random(max(tokens - 2, 1), 3, device=device), scale)


def slice_to_another_length(q, k, v, other, scale):
    """Whether this is a no-op is not known while compiling."""
    return divide(bsh(F.scaled_dot_product_attention(q, k, v))[:, : other.shape[0]], scale)


def per_token_scale(tokens, device):
    *tensors, _ = qkv()(tokens, device)
    return (*tensors, torch.rand(2, tokens, 1, device=device) + 0.1)


def per_channel_scale(tokens, device):
    *tensors, _ = qkv()(tokens, device)
    return (*tensors, torch.rand(HEADS * HEAD_DIM, device=device) + 0.1)


def dynamic_scale(x, scale):
    return divide(x, x.float().abs().amax() / 448.0)


ON_CPU = {"cuda": False}

DECLINED = (
    declined("read elsewhere", r"the attention's output is returned too", read_before_the_quantization, place=True),
    declined(
        "read elsewhere behind a view",
        r"the attention's output is also read by sum_1 \(aten\.sum\.default\)",
        read_behind_a_view,
    ),
    declined("two quantizations", r"the attention's output is also read by", two_quantizations),
    declined("logsumexp used", r"logsumexp is used too", log_sum_exp_used, **ON_CPU),
    declined(
        "clamp at 240",
        r"clamps to \(-240\.0, 240\.0\)",
        simple(quantize=lambda x, s: (x / s).clamp(-240, 240).to(E4M3)),
    ),
    declined(
        "clamp above only", r"clamps to \(-inf, 448\.0\)", simple(quantize=lambda x, s: (x / s).clamp(max=448).to(E4M3))
    ),
    declined("no clamp", r"without a clamp", simple(quantize=lambda x, s: (x / s).to(E4M3)), **ON_CPU),
    declined("whole numbers", r"whole numbers", simple(quantize=lambda x, s: clamp((x.float() / s).round()))),
    declined("scale per token", r"per-token", simple(), per_token_scale),
    declined("scale per channel", r"per-channel", simple(), per_channel_scale),
    declined("dynamic scale", r"a dynamic quantization", simple(quantize=dynamic_scale)),
    declined("scale in bf16", r"bfloat16", simple(), scale_shaped(1, dtype=torch.bfloat16)),
    declined("scale in fp64", r"float64", simple(), scale_shaped(1, dtype=torch.float64)),
    declined("scale as an integer", r"int32", simple(), scale_shaped(1, dtype=torch.int32)),
    declined("scaled twice", r"scaled twice", simple(between=lambda x: x.float() * 2.5)),
    declined("slice between", r"goes to .*slice", simple(between=lambda x: x[:, :-1])),
    declined("slice to another length", r"goes to .*slice", slice_to_another_length, with_another_length),
    declined("addition between", r"goes to .*add", simple(between=lambda x: x + 1)),
    declined(
        "not quantized",
        r"goes to output|goes to .*sin",
        lambda q, k, v, s: F.scaled_dot_product_attention(q, k, v).sin(),
    ),
    declined("broadcasts", r"broadcasts", simple(), scale_shaped(1, 1, 1, 1)),
    declined("dropout", r"dropout", simple(dropout_p=0.5)),
)

LARGE = tuple(
    case(
        f"{heads}/{kv_heads} heads of {head_dim}",
        attention=CAUSAL,
        grouped=heads != kv_heads,
        inputs=qkv(heads, kv_heads, 3, head_dim=head_dim),
        length_dims=((0, 2), (1, 2), (2, 2)),
    )
    for heads, kv_heads, head_dim in ((32, 8, 128), (16, 16, 64), (8, 1, 256), (12, 4, 80))
)
"""Of the size of real models: for a GPU."""

CASES = FUSED + tuple(replace(c, scales=()) for c in DECLINED)
