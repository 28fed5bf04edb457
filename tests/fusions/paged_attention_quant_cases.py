"""Cases of `attention_quant` with a KV cache: a batch, an attention, the views, and a way to quantize.

Every case takes query, the two caches, block table, query starts and lengths, then scales: of q, k and v where the
cache is FP8, and the output's where it is static.
"""

from dataclasses import replace

import torch

from fusion_passes.idioms.spellings.group_quantize import SPELLINGS
from fusion_passes.ops import kv_cache_write
from fusion_passes.ops.quantize_dynamic import quantize_fp8_dynamic
from fusion_passes.quant import QuantSpec, choose_scale, quantize
from tests.fusions import paged_cases as paged
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
from tests.fusions.paged_cases import E4M3, HEAD_DIM, HEADS

RULE = "attention_quant"
FAMILIES = {"paged": STATIC, "groups": frozenset({"plain", "opaque"})}
GROUP = 32
TINY = torch.finfo(torch.float32).tiny


def inputs(*, query=torch.bfloat16, cache=None, layout="HND", strided=False, output=True, shape=()):
    """cache: its dtype, query's if None; FP8 comes with scales of k and v, and of q where query is FP8 too."""

    def make(tokens, device):
        dtype = cache or query
        fp8 = dtype.itemsize == 1
        q = paged.random(tokens, (3 if strided else 1) * HEADS * HEAD_DIM, device=device)
        q = (q / paged.Q_SCALE).to(query) if query.itemsize == 1 else q.to(query)
        q = q[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
        caches = (
            paged.cache(device, dtype, layout, paged.K_SCALE),
            paged.cache(device, dtype, layout, paged.V_SCALE),
        )
        scales = [paged.Q_SCALE] * (query.itemsize == 1) + [paged.K_SCALE, paged.V_SCALE] * fp8
        scales = [paged.scalar(s, device) for s in scales]
        out = [paged.scalar(paged.OUTPUT_SCALE, device, shape)] * output
        return (q, *caches, *paged.batch(tokens, device), *scales, *out)

    return make


def split(tensors, output=True):
    """(arguments of the attention, scale of the output)."""
    *rest, scale = tensors if output else (*tensors, None)
    batch, scales = rest[:6], rest[6:]
    scales = [None] * (len(scales) == 2) + list(scales)
    return (*batch, *scales), scale


def flat(x):
    return x.flatten(1)


def case(
    name,
    quantize_by=divide,
    family="divide",
    exact=divided,
    *,
    views=flat,
    views_last=False,
    query=torch.bfloat16,
    cache=None,
    options=None,
    layout="HND",
    strided=False,
    shape=(),
    write=None,
    **fields,
):
    """write: what is done to the arguments before the attention."""
    options = {**(options or {}), **({"dtype": torch.bfloat16} if query.itemsize == 1 else {})}
    fp8 = (cache or query).itemsize == 1
    scales = (query.itemsize == 1) + 2 * fp8 + (quantize_by not in (number, inverse_number))
    fields.setdefault("scales", tuple(range(-scales - (quantize_by in (number, inverse_number)), 0))[:scales])

    def fn(*tensors):
        arguments, scale = split(tensors)
        if write is not None:
            write(*arguments)
        out = paged.attend(*arguments, **options)
        return views(quantize_by(out, scale)) if views_last else quantize_by(views(out), scale)

    def exact_codes(*tensors):
        arguments, scale = split(tensors)
        return exact(views(paged.exact(*arguments, **options)), scale)

    return Case(
        f"paged: {name}",
        fn,
        inputs(query=query, cache=cache, layout=layout, strided=strided, shape=shape),
        reference=exact_codes,
        family=family,
        dynamic=((0, 0),),
        strided=strided,
        kind="paged",
        becomes="paged_attention",
        differentiable=False,
        **fields,
    )


def written(query, key_cache, value_cache, table, start, lengths, q, k, v):
    """The new tokens' keys and values go to the cache first."""
    token = torch.arange(query.shape[0], device=query.device)
    rows = query.float()[:, : paged.KV_HEADS].to(torch.bfloat16)
    kv_cache_write(rows, -rows, key_cache, value_cache, token, k, v)


FUSED = (
    case("tokens x hidden"),
    case("FP8 query and cache", inverse, "inverse", multiplied, query=E4M3),
    case("FP8 cache alone", opaque, "opaque", cache=E4M3),
    case("sliding window, soft cap", number, "number", lambda x, s: x / 0.37, options={"window": 7, "softcap": 20.0}),
    case("strided", reciprocal, "reciprocal", strided=True, layout="NHD", cache=E4M3),
    case("inverse from the left", inverse_from_left, "inverse", multiplied, views=lambda x: x),
    case("inverse number", inverse_number, "number", lambda x, s: x * 2.5),
    case("factor", factor, exact=lambda x, s: x / (s * 2.0)),
    case("clamp in two steps", clamp_in_steps, shape=(1,)),
    case("e5m2", divide_e5m2, query=torch.float16),
    case("codes through the views", views_last=True),
    case("no-op views", views=lambda x: x.contiguous().reshape(-1, HEADS, HEAD_DIM).unsqueeze(0).squeeze(0).flatten(1)),
    case("at most eight new tokens", options={"max_query_len": 128}),
    case("written before", cache=E4M3, write=written),
)


# Dynamic scales


def by_layer(x, **options):
    """As `quant.choose_scale` and `quant.quantize` have it."""
    spec = QuantSpec(E4M3, "group", GROUP, static=False)
    scales = choose_scale(x, spec)
    return quantize(x, scales, E4M3), scales


def by_op(x):
    return quantize_fp8_dynamic(x, QuantSpec(E4M3, "group", GROUP, static=False))


def in_groups(x, group=GROUP, smallest=TINY, prepare=lambda s: s):
    groups = x.float().unflatten(-1, (-1, group))
    scales = prepare((groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=smallest))
    return clamp(groups / scales).flatten(-2), scales.squeeze(-1)


def by_reciprocal(x):
    groups = x.reshape(-1, x.shape[-1] // GROUP, GROUP)
    scales = (groups.abs().amax(-1).float() * (1.0 / 448.0)).clamp(min=TINY)
    return (groups * (1.0 / scales)[..., None]).to(E4M3).view(x.shape), scales


def exact_groups(x, group=GROUP):
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return (groups / scales).flatten(-2), scales.squeeze(-1)


def grouped(
    name,
    quantize_by,
    family="plain",
    *,
    views=flat,
    exact=exact_groups,
    then=lambda *both: both,
    query=torch.bfloat16,
    **fields,
):
    """then: what the program returns of both, in the reference too."""
    options = {"dtype": torch.bfloat16} if query.itemsize == 1 else {}

    def fn(*tensors):
        arguments, _ = split(tensors, output=False)
        return then(*quantize_by(views(paged.attend(*arguments, **options))))

    def exact_codes(*tensors):
        arguments, _ = split(tensors, output=False)
        return then(*exact(views(paged.exact(*arguments, **options))))

    fields = {"scales": (-3, -2, -1) if query.itemsize == 1 else (), "reference": exact_codes, **fields}
    return Case(
        f"groups: {name}",
        fn,
        inputs(query=query, cache=query, output=False),
        family=family,
        dynamic=((0, 0),),
        kind="groups",
        becomes="paged_attention_group_quant",
        differentiable=False,
        all_symbolic=False,
        output_scale=False,
        **fields,
    )


BOUNDED = (
    "lower bound of the magnitude, no clamp",
    "lower bound of the magnitude, in its dtype",
    "lower bound of the scale, scales by columns",
    "times the largest code over the magnitude",
    "by way of float64",
    "no lower bound",
)
GROUPS = (
    grouped("scales repeated", by_layer, query=E4M3),
    grouped("opaque", by_op, "opaque"),
    grouped("in the shape of groups", in_groups),
    grouped("by the reciprocal", by_reciprocal),
    grouped("whole heads", lambda x: in_groups(x, HEAD_DIM), exact=lambda x: exact_groups(x, HEAD_DIM)),
    grouped("no views", in_groups, views=lambda x: x),
    grouped("codes alone", in_groups, then=lambda codes, scales: codes),
    grouped("scales transposed behind", in_groups, then=lambda codes, scales: (codes, scales.t().contiguous())),
    grouped("scales of at least 1e-10", lambda x: in_groups(x, smallest=1e-10)),
    *(grouped(name, lambda x, function=SPELLINGS[name]: function(x, E4M3)) for name in BOUNDED),
    grouped("scales used twice", in_groups, then=lambda codes, scales: (codes, scales, scales * 2.0)),
)


def declined(name, reason, quantize_by, **fields):
    return grouped(name, quantize_by, fuses=False, reason=reason, reference=None, **fields)


def static(name, reason, quantize_by, **fields):
    return replace(case(name, quantize_by, fuses=False, reason=reason, **fields), reference=None, scales=())


def magnitudes_too(x):
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = (largest / 448.0).clamp(min=TINY)
    return clamp(groups / scales).flatten(-2), scales.squeeze(-1), largest


def without_the_bound(x):
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return clamp(groups / scales.clamp(min=1e-12)).flatten(-2), scales.squeeze(-1)


def neither_bound_nor_clamp(x):
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return (groups / scales).to(E4M3).flatten(-2), scales.squeeze(-1)


def in_bf16(x):
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return clamp(groups / scales).flatten(-2), scales.squeeze(-1)


def in_float64(x):
    groups = x.double().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return clamp(groups / scales).flatten(-2), scales.squeeze(-1)


def by_columns(x):
    groups = x.unflatten(-1, (-1, GROUP)).transpose(0, 1).float()
    scales = (groups.abs().amax(-1) / 448.0).clamp(min=1e-10)
    return clamp(groups / scales[..., None]).transpose(0, 1).flatten(1), scales


DECLINED = (
    static("read elsewhere", r"the attention's output is returned too", lambda x, s: (divide(x, s), x), place=True),
    static("clamp at 240", r"clamps to \(-240\.0, 240\.0\)", lambda x, s: (x / s).clamp(-240, 240).to(E4M3)),
    static("whole numbers", r"whole numbers", lambda x, s: clamp((x.float() / s).round())),
    static("not quantized", r"goes to .*sin", lambda x, s: x.sin()),
    declined("scales are powers of two", r"exp2", lambda x: in_groups(x, prepare=lambda s: s.log2().ceil().exp2())),
    declined("scales without the bound", r"is also read by", without_the_bound, place=True),
    declined("neither bound nor clamp", r"clamp before the cast", neither_bound_nor_clamp, cuda=False),
    declined("scales in bf16", r"rounds them to bfloat16: choose them in float32", in_bf16),
    declined("scales in float64", r"scales are float64, in the fused op float32", in_float64),
    declined("scales by columns, made so", r"transposed before it is quantized; the fused op has groups", by_columns),
    declined("scales of at most 0.1", r"at most 0\.1", lambda x: in_groups(x, prepare=lambda s: s.clamp(max=0.1))),
    declined("two heads in a group", r"do not divide a head", lambda x: in_groups(x, 2 * HEAD_DIM)),
    declined("heads last", r"transposed", in_groups, views=lambda x: x.transpose(1, 2).flatten(1)),
    declined("magnitudes used too", r"is returned too", magnitudes_too, place=True),
    declined("per token", r"do not divide a head|per-token", lambda x: in_groups(x, HEADS * HEAD_DIM)),
)

CASES = FUSED + GROUPS + DECLINED
