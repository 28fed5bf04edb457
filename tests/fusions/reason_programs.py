"""For each reason a program that shows it: the sentence as the report has it, and what the report says.

Each changes one thing of a program that fuses (`BASES`).  Nothing is compiled to code.
"""

import dataclasses
import math
import operator
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from fusion_passes import PassConfig, PostGradPassManager, Report, TracedRule
from fusion_passes.graph.match import Match
from fusion_passes.graph.read import is_tensor, value
from fusion_passes.graph.rewrite import Insertion, check_readers
from fusion_passes.idioms import NearMiss, attention, kv_cache, quantize
from fusion_passes.idioms.opaque import OPAQUE, OpaqueOp
from fusion_passes.idioms.reading import read_all
from fusion_passes.idioms.rope import SPELLINGS
from fusion_passes.measured import Measurement, judge
from fusion_passes.measured.attention_quant import verdict as attention_verdict
from fusion_passes.measured.rope_quant_kv_write import verdict as rope_verdict
from fusion_passes.ops import kv_cache_write
from fusion_passes.ops.attention_quant import KERNELS, AttentionQuantArguments
from fusion_passes.ops.kv_cache_write import why_no_kernel
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.ops.quantize_dynamic import quantize_fp8_dynamic
from fusion_passes.quant import QuantSpec
from fusion_passes.testing import capture, capture_cuda
from tests.fusions import paged_cases as paged
from tests.fusions.paged_attention_quant_cases import inputs as paged_inputs
from tests.fusions.test_query_quant import vllm_whole
from tests.fusions.without_code import FUSE
from tests.generated_code import moved_to_cuda
from tests.idioms.test_quantize import torchao_op

_library = torch.library.Library("fusion_passes_reasons", "FRAGMENT")
_library.define("own_op(Tensor x) -> Tensor")
_library.impl("own_op", lambda x: x.to(torch.float8_e4m3fn), "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusion_passes_reasons::own_op", lambda x: torch.empty_like(x, dtype=torch.float8_e4m3fn), lib=_library
)
own_op = torch.ops.fusion_passes_reasons.own_op
_library.define("saturate(Tensor x, Tensor scale, float limit=448.0) -> Tensor")
_library.impl(
    "saturate", lambda x, scale, limit=448.0: (x / scale).to(torch.float8_e4m3fn), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "fusion_passes_reasons::saturate", lambda x, *_: torch.empty_like(x, dtype=torch.float8_e4m3fn), lib=_library
)
_ATTEND = "(Tensor query, Tensor key, Tensor value, int window=0) -> (Tensor output, Tensor logsumexp)"
_library.define(f"attend{_ATTEND}")
_library.define(f"attend.windowed{_ATTEND}")
own_attention = torch.ops.fusion_passes_reasons.attend
aten = torch.ops.aten
BF16, E4M3, FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
MEASURED = PassConfig()
sdpa = F.scaled_dot_product_attention


def judged(graph, config=FUSE):
    report = Report()
    PostGradPassManager(config, report, judge=False)(graph)
    return re.sub(r"\bs\d+\b", "s0", str(report))  # the number of a symbol is not ours


def cpu(fn, *inputs, config=FUSE, grad=False, **options):
    with torch.set_grad_enabled(grad):
        return judged(capture(fn, *inputs, **options)[0], config)


def cuda(fn, *inputs, config=FUSE, **options):
    with torch.no_grad():
        return judged(capture_cuda(fn, *inputs, **options), config)


def raised(call):
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


# An attention whose output is quantized


def qkv(heads=4, kv_heads=4, head_dim=16, dtype=BF16):
    return [torch.randn(2, n, 24, head_dim).to(dtype) for n in (heads, kv_heads, kv_heads)]


def flat(o):
    return o.transpose(1, 2).flatten(2)


def saturate(x, dtype=E4M3):
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def divide(o, s):
    return saturate(flat(o).float() / s)


def dense(quantize=divide, attend=sdpa, more=(), on=cpu, operands=None, scale=0.02, **options):
    def fn(q, k, v, s, *more):
        return quantize(attend(q, k, v, *more), s)

    scale = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale)
    return on(fn, *(operands or qkv()), scale, *more, **options)


def softmax(scores, v):
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v


def scores(q, k, scale=0.25):
    return q @ k.mT * scale


def by_hand(q, k, v, mask=None):
    return softmax(scores(q, k) if mask is None else scores(q, k) + mask, v)


def mask(*outer):
    return torch.randn(*outer, 24, 24).bfloat16()


def future(q):
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)


def with_logsumexp(q, k, v, s):
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return divide(out, s), logsumexp


def returned(q, k, v, s):
    out = sdpa(q, k, v)
    return divide(out, s), out


def summed(q, k, v, s):
    out = sdpa(q, k, v)
    return divide(out, s), out.sum()


def trained(q, k, v, s):
    return divide(sdpa(q, k, v), s).float() * s


def broken_rows(q, k, v, other):
    s = scores(q, k).float()
    empty = (other.float() == -math.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(s, -1)).to(v.dtype) @ v


def per(scale, **options):
    return dense(lambda o, s: saturate(flat(o).float() / s), scale=torch.rand(scale) + 0.1, **options)


def dynamic(spec):
    return dense(lambda o, s: quantize_fp8_dynamic(flat(o), spec)[0])


def per_token(o, s):
    o = flat(o).float()
    return saturate(o / (o.abs().amax(-1, keepdim=True) / 448.0))


def per_group(o, s):
    o = flat(o).float().unflatten(-1, (-1, 16))
    return saturate(o / (o.abs().amax(-1, keepdim=True) / 448.0))


def kernel(index, capability=(9, 0), **changed):
    q, k, v = (torch.randn(1, 2, 128, 64, dtype=BF16) for _ in range(3))
    return str(
        KERNELS[index].unsupported(AttentionQuantArguments(**{"query": q, "key": k, "value": v, **changed}), capability)
    )


def wide(head_dim, dtype=BF16):
    return dense(on=cuda, operands=qkv(head_dim=head_dim, dtype=dtype))


def with_parameter(q, k, v, m, dim=None):
    """`softmax` by its definition; the sum without the dimension of the keys, where there is one head and query."""
    e = torch.exp((x := (scores(q, k) + m).float()) - x.amax(-1, keepdim=True))
    return (e / e.sum(-1)).to(v.dtype) @ v


def two_masks(q, k, v, m, n):
    return softmax(scores(q, k) + m + n, v)


def captured():
    with torch.no_grad():
        return capture(lambda q, k, v: divide(sdpa(q, k, v), torch.tensor(0.02)), *qkv())[0]


def broken(node):
    raise ValueError("broken on purpose")


def asked_for_a_size(dim):
    """The size of what becomes [batch, length, hidden], read beside the quantization."""
    graph = captured()
    view = next(n for n in graph.nodes if is_tensor(n) and value(n).shape == (2, 24, 64))
    with graph.inserting_after(view):
        size = graph.call_function(aten.sym_size.int, (view, dim))
    size.meta["val"] = int(view.meta["val"].shape[dim])
    output = graph.output_node()
    output.args = ((*output.args[0], size),)
    return judged(graph), graph


def written_to():
    graph = captured()
    codes = next(n for n in graph.nodes if is_tensor(n) and value(n).dtype is E4M3)
    query = graph.find_nodes(op="placeholder")[0]
    with graph.inserting_before(codes):
        graph.call_function(aten.mul_.Scalar, (query, 2.0)).meta["val"] = query.meta["val"]
    return judged(graph)


def one_head_of_keys(q, k, v, m):
    """Multi-query keys with values for every head, computed in fp32; [batch * heads, …] in 16 bits nowhere."""
    q, v = (x.reshape(-1, 24, 16).float() for x in (q, v))
    k = k.float().expand(2, 4, 24, 16).reshape(-1, 24, 16)
    probabilities = torch.softmax(torch.bmm(q, k.mT).view(2, 4, 24, 24) * 0.25 + m.float(), -1)
    return torch.bmm(probabilities.view(-1, 24, 24), v).view(2, 4, 24, 16).to(BF16)


def one_query(tuned=True):
    """A step of decoding, with what `mode="max-autotune"` does to its products."""
    q, k, v = qkv(head_dim=64)
    with inductor_config.patch(coordinate_descent_tuning=tuned):
        return dense(attend=by_hand, operands=[q[:, :, :1], k, v], more=(mask()[:1],), on=cuda)


def padded(q, k, v, m):
    """The second product with 8 more keys, as Inductor does it on a GPU where it is faster."""
    probabilities = torch.softmax((scores(q, k) + m).float(), -1).to(v.dtype)
    return F.pad(probabilities, (0, 8)) @ F.pad(v, (0, 0, 0, 8))


def cut(q, k, v, m):
    """The first product with 8 more keys, which are cut off again."""
    product = torch.bmm(q.flatten(0, 1), F.pad(k.flatten(0, 1).mT, (0, 8)))[..., : k.shape[2]]
    return softmax(product.view(*q.shape[:3], -1) * 0.25 + m, v)


def rounded_twice(x, s):
    """The half-precision quotient is returned too, or some versions of torch leave it out."""
    quotient = (x / s).half()
    return quotient.clamp(-448, 448).bfloat16().to(E4M3), quotient


def bounded_in_half(x):
    """As in `rounded_twice`."""
    magnitudes = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return saturate(x / (magnitudes.float() / 448.0)), magnitudes


def with_argument(of, limit):
    """What is told of an op that quantizes and has an argument that the table does not name."""
    with mock.patch.dict(OPAQUE, {"fusion_passes_reasons::saturate": OpaqueOp("x", "scale")}):
        return of(lambda x, s: torch.ops.fusion_passes_reasons.saturate(x, s, limit))


def quantized_in_graph(make):
    """What is told of a graph that torch would not make: make(graph, x of [4, 16], a node that is no tensor)."""
    graph = Graph()
    x, unknown = graph.placeholder("x"), graph.placeholder("unknown")
    x.meta["val"] = torch.empty(4, 16, device="meta")
    node = make(graph, x, unknown)
    node.meta["val"] = torch.empty(4, 16, device="meta", dtype=E4M3)
    return " ".join(found.reason for found in quantize.recognize(graph) if isinstance(found, NearMiss))


def scaled_by_unknown(graph, x, unknown):
    scaled = graph.call_function(aten.mul.Tensor, (x, unknown))
    scaled.meta["val"] = x.meta["val"]
    return graph.call_function(torch.ops.prims.convert_element_type.default, (scaled, E4M3))


def up_to_unknown(graph, x, unknown):
    return graph.call_function(
        torch.ops.quantized_decomposed.quantize_per_tensor.default, (x, 0.1, 0, -448, unknown, E4M3)
    )


def address_refused():
    """Of a query that begins 2 bytes behind a multiple of 16."""
    module = sys.modules["fusion_passes.ops.attention_quant"]
    x = torch.empty(1 + 2 * 128 * 64, dtype=BF16)[1:].view(1, 2, 128, 64)
    with mock.patch("fusion_passes.ops.support.device_capability", return_value=(9, 0)):
        _, refusals = module._kernels_for(AttentionQuantArguments(x, x, x))
    return " ".join(why for why, _ in refusals.values())


Shown = tuple[str, Callable[[], str]]
NAN_BOUND = "clamps to nan, which makes every code NaN"
BAD_SCALE = "the scale is {}, which float32 does not hold with its reciprocal: keep it between 1.2e-38 and 8.5e+37"
NOT_AS = "the attention's output is quantized, but not as the fused op does: "

DENSE: tuple[Shown, ...] = (
    ("the attention's logsumexp is used too, and the fused op has none",
     lambda: cpu(with_logsumexp, *qkv(), torch.tensor(0.02))),
    ("it is causal and has a mask; the fused op takes one of both",
     lambda: dense(attend=lambda q, k, v, m: softmax(scores(q, k).masked_fill(future(q), -math.inf) + m, v),
                   more=(mask(),))),
    ("key [2, 4, 24, 16] and value [2, 4, 24, 32] have different shapes",
     lambda: dense(operands=[*qkv()[:2], qkv(head_dim=32)[2]])),
    ("the mask is float64 on cpu; the fused op takes bool, float32, bfloat16, float16 on cpu",
     lambda: dense(attend=by_hand, more=(mask().double(),))),
    ("a mask of [s0, s0] is not known to broadcast to [2, 4, 24, 24]",
     lambda: (lambda m: dense(attend=lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), more=(m,), on=cuda,
                              mark_dynamic=((m, 0), (m, 1))))(mask())),
    ("the fused op has no faster kernel on the CPU", lambda: dense(config=MEASURED)),
    ("the attention's output is returned too: fusing would compute it twice",
     lambda: cpu(returned, *qkv(), torch.tensor(0.02))),
    ("the attention's output is also read by sum_1 (aten.sum.default): fusing would compute it twice",
     lambda: cpu(summed, *qkv(), torch.tensor(0.02))),
    ("the attention's output is kept for the backward pass (for inference, compile and call the model under "
     "torch.no_grad()): fusing would compute it twice",
     lambda: cpu(trained, *(x.requires_grad_() for x in qkv()), torch.tensor(0.02), grad=True)),
    ("the attention's output goes to aten.add.Tensor, not to a quantization", lambda: dense(lambda o, s: o + s)),
    ("the attention's output is rounded to bfloat16 before it is quantized; the fused op rounds once: let the "
     "attention give bfloat16",
     lambda: dense(lambda o, s: divide(o.bfloat16(), s), operands=qkv(dtype=torch.float32))),
    ("the attention's output is rounded to bfloat16 before it is quantized; the fused op rounds once: let the "
     "attention give bfloat16",
     lambda: dense(lambda o, s: per_token(o.bfloat16(), s), operands=qkv(dtype=torch.float32))),
    ("the attention's output is changed by aten.round.default (round_1) before it is quantized",
     lambda: dense(lambda o, s: quantize_fp8(flat(o).round(), s, E4M3))),
    ("the attention's output is quantized with dynamic per-token or per-group scales, one for each 16 elements; the "
     "fused op takes one static scale", lambda: dense(per_group)),
    ("the attention's output is quantized with a dynamic scale per token; the fused op takes one static scale",
     lambda: dynamic(QuantSpec(E4M3, "token", static=False))),
    ("the attention's output is quantized with scales that are computed from it; the fused op takes one static scale",
     lambda: dense(lambda o, s: saturate(flat(o) / (flat(o).abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)))),
    ("the attention's output is made int8; the fused op writes FP8 only",
     lambda: dense(lambda o, s: (o / s).round().clamp(-128, 127).to(torch.int8))),
    ("the attention's output goes to fusion_passes_reasons.own_op.default: the formula of "
     "fusion_passes_reasons.own_op is not known",
     lambda: dense(lambda o, s: own_op(o))),
    ("the quantization rounds to whole numbers before the cast; the fused op does not",
     lambda: dense(lambda o, s: saturate((flat(o).float() / s).round()))),
    ("the graph quantizes to float8_e4m3fnuz, the fused op to float8_e4m3fn or float8_e5m2",
     lambda: dense(lambda o, s: saturate(flat(o).float() / s, FNUZ))),
    ("the graph rounds to float8_e4m3fnuz before it quantizes; the fused op does not",
     lambda: dense(lambda o, s: saturate(saturate(flat(o).float() / s, FNUZ).float()))),
    ("the graph clamps to (-240.0, 240.0), the fused op to the range of float8_e4m3fn, ±448",
     lambda: dense(lambda o, s: (o / s).clamp(-240, 240).to(E4M3))),
    ("without a clamp, what a cast to float8_e4m3fn makes of values that are too large depends on the torch version "
     "on cpu; the fused op saturates: clamp before the cast", lambda: dense(lambda o, s: (o / s).to(E4M3))),
    ("_C.static_scaled_fp8_quant makes the largest code of NaN; the fused op keeps NaN",
     lambda: dense(lambda o, s: vllm_whole(flat(o).contiguous(), s), on=cuda, operands=qkv(head_dim=64))),
    ("the scale is bfloat16; make it float32", lambda: dense(scale=torch.tensor(0.02).bfloat16())),
    (NOT_AS + NAN_BOUND, lambda: dense(lambda o, s: (o / s).clamp(-math.nan, 448.0).to(E4M3))),
    (NAN_BOUND, lambda: cpu(lambda x: x.clamp(math.nan, 448.0).to(E4M3), torch.randn(4))),
    ("clamps to arg1_1, which is not a constant",
     lambda: cpu(lambda x, s: torch.clamp(x, max=s).to(E4M3), torch.randn(4), torch.tensor(448.0))),
    (BAD_SCALE.format("1e-40"), lambda: cpu(lambda x: saturate(x / 1e-40), torch.randn(4))),
    (BAD_SCALE.format("inf"), lambda: cpu(lambda x: saturate(x * (1 / torch.full((), 1e-40))), torch.randn(4))),
    (BAD_SCALE.format("0"), lambda: cpu(lambda x: saturate(x / 0.0), torch.randn(4))),
    ("scale has shape [2, 24, 1]: a per-token or per-group quantization, not a static per-tensor one",
     lambda: per((2, 24, 1))),
    ("scale has shape [64]: a per-channel quantization, not a static per-tensor one", lambda: per((64,))),
    ("the scale is computed in the graph from the tensor itself: a dynamic quantization",
     lambda: dense(lambda o, s: saturate(o.float() / (o.float().abs().amax() / 448.0)))),
    ("the scale has dtype int64, not a floating-point one", lambda: dense(scale=torch.tensor(3))),
    ("the scale is a symbolic number (SymInt); make it a tensor",
     lambda: cpu(lambda x: saturate(x / x.shape[0]), torch.randn(7), dynamic=True)),
    ("the scale's shape broadcasts the tensor from [4] to [1, 4]",
     lambda: cpu(lambda x, s: saturate(x / s), torch.randn(4), torch.rand(1, 1))),
    ("scaled twice: mul scales the tensor before the quantization does",
     lambda: cpu(lambda x, s: saturate(x * 2.0 / s), torch.randn(4), torch.tensor(0.1))),
    ("the quotient is rounded to float16 and to bfloat16",
     lambda: cpu(rounded_twice, torch.randn(4), torch.tensor(0.1))),
    ("attention with dropout_p=0.5",
     lambda: dense(attend=lambda q, k, v: aten._scaled_dot_product_efficient_attention(
         q, k, v, None, False, 0.5, False)[0], on=cuda, operands=qkv(head_dim=64))),
    ("the scores are scaled by -1.0", lambda: dense(attend=lambda q, k, v: sdpa(q, k, v, scale=-1.0))),
    ("the scores are scaled by -0.25", lambda: dense(attend=lambda q, k, v: softmax(scores(q, k, -0.25), v))),
    ("is_causal with q_len 8 and kv_len 24: the flash op aligns that at the bottom right",
     lambda: dense(attend=lambda q, k, v: sdpa(q[:, :, :8], k, v, is_causal=True), on=cuda, backend="flash",
                   operands=qkv(head_dim=64))),
    ("a mask of torch.int64 is added to the scores",
     lambda: dense(attend=by_hand, more=(torch.zeros(24, 24, dtype=torch.int64),))),
    ("gt masks where it is True; the idiom needs a mask that is True = attend",
     lambda: dense(attend=lambda q, k, v, m: softmax(scores(q, k).masked_fill(m > 0, -math.inf), v), more=(mask(),))
     ),
    ("looks like attention, but rows are emptied by something other than the scores",
     lambda: dense(attend=broken_rows, more=(torch.randn(2, 4, 24, 24),))),
    ("looks like attention, but the softmax passes through aten.mul (mul_1)",
     lambda: dense(attend=lambda q, k, v, m: (torch.softmax(scores(q, k).float(), -1) * m).to(v.dtype) @ v,
                   more=(mask(),))),
    ("looks like attention, but the softmax is over dimension [-2], not over the keys",
     lambda: dense(attend=lambda q, k, v, m: torch.softmax((scores(q, k) + m).float(), -2).to(v.dtype) @ v,
                   more=(mask(),))),
    ("looks like attention, but the scores pass through aten.tanh (tanh)",
     lambda: dense(attend=lambda q, k, v: softmax(scores(q, k).tanh(), v))),
    ("looks like attention, but add adds a mask before the scale is applied",
     lambda: dense(attend=lambda q, k, v, m: softmax((q @ k.mT + m) * 0.25, v), more=(mask(),))),
    ("masks the scores with -9984, not with -inf",
     lambda: dense(attend=lambda q, k, v: softmax(scores(q, k).masked_fill(future(q), -10000.0), v))),
    ("the key is broadcast from [1, 4, 16, 24] to [2, 4, 16, 24]: expand it before the attention, to the batch "
     "and heads of the others", lambda: dense(operands=[x[: 2 - i % 2] for i, x in enumerate(qkv())], attend=sdpa)),
    ("looks like attention, but the value is scaled by 3",
     lambda: dense(attend=lambda q, k, v, m: torch.bmm(
         torch.softmax((scores(q, k) + m).float(), -1).to(v.dtype).flatten(0, 1), v.flatten(0, 1) * 3.0
     ).view(v.shape), more=(mask(),))),
    ("the portable attention kernel has no head size 72, only 64, 80, 96, 128, 192, 256", lambda: wide(72)),
    ("the portable attention kernel takes bfloat16 or float16 inputs, not float32", lambda: wide(64, torch.float32)),
    ("the Hopper attention kernel takes no attention mask",
     lambda: kernel(0, attn_mask=torch.zeros(128, 128, dtype=BF16))),
    ("the Hopper attention kernel needs as many queries as keys, got 64 and 128",
     lambda: kernel(0, query=torch.randn(1, 2, 64, 64, dtype=BF16))),
    ("the Hopper attention kernel needs a positive softmax scale, got -1.0", lambda: kernel(0, scale=-1.0)),
    ("query has stride 128 in its last dimension; the portable attention kernel needs 1",
     lambda: kernel(1, query=torch.randn(1, 2, 64, 128, dtype=BF16).mT)),
    ("query has a stride of 65 elements; the Hopper attention kernel needs multiples of 8",
     lambda: kernel(0, query=torch.randn(1, 2, 128, 65, dtype=BF16)[..., :64])),
    ("the Hopper attention kernel needs an NVIDIA GPU of compute capability 9.0, found 8.9",
     lambda: kernel(0, capability=(8, 9))),
    ("two masks, arg3_1 and arg2_1",
     lambda: dense(attend=two_masks, more=(mask(), mask()))),
    ("looks like attention, but aten.sum drops the dimension of the keys",
     lambda: dense(attend=with_parameter, operands=[x[:1, :1] for x in qkv()], more=(mask(),))),
    ("looks like attention, but where mixes the scores with another tensor",
     lambda: dense(attend=lambda q, k, v, m: softmax(torch.where(m > 0, scores(q, k), m), v), more=(mask(),))),
    ("masks scores that are scaled by -0.5 afterwards",
     lambda: dense(attend=lambda q, k, v: softmax(scores(q, k).masked_fill(future(q), -math.inf) * -0.5, v))),
    ("the mask broadcasts the scores from [1, 4, 24, 24] to [2, 4, 24, 24]",
     lambda: dense(attend=lambda q, k, v, m: softmax((q[:1] @ k[:1].mT) + m, v), more=(mask(2, 1),))),
    ("the product is not reshaped to [batch, heads, length, head_dim]",
     lambda: cpu(lambda q, k, v, m: torch.bmm(torch.softmax((torch.bmm(q, k.mT) + m).float(), -1).to(BF16), v),
                 *(x.flatten(0, 1) for x in qkv()), mask())),
    ("the mask is 0.5, not a tensor",
     lambda: dense(attend=lambda q, k, v, m: softmax(scores(q, k) + m + 0.5, v), more=(mask(),))),
    ("a mask is applied to scores of [2, 2, 2, 24, 24], not [batch, heads, …]",
     lambda: dense(attend=lambda q, k, v, m: softmax(
         (scores(q, k).view(2, 2, 2, 24, 24) + m).view(2, 4, 24, 24), v), more=(mask(2, 1),))),
    ("a cast and a view before an op that quantizes",
     lambda: dense(lambda o, s: quantize_fp8(flat(o).float().view(-1, 64), s, E4M3))
     .replace("1 fused", "a cast and a view before an op that quantizes")),
    ("_C.static_scaled_fp8_quant computes something else on cpu",
     lambda: cpu(lambda x, s: vllm_whole(x, s), torch.randn(4, 16).bfloat16(), torch.tensor(0.1))),
    ("the zero point of quantized_decomposed.quantize_per_tensor is 3, not 0",
     lambda: cpu(lambda x: torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 3, -448, 448, E4M3),
                 torch.randn(4, 16))),
    ("the query is not [batch, heads, length, head_dim] in torch.bfloat16",
     lambda: dense(attend=by_hand, operands=[*(x.float() for x in qkv()[:2]), qkv()[2]], more=(mask(),))),
    ("looks like attention, but add adds no mask to the scores",
     lambda: dense(attend=lambda q, k, v: softmax(scores(q, k) + scores(k, q), v))),
    ("the scale is True, not a number or a tensor", lambda: cpu(lambda x: saturate(x * True), torch.randn(4))),
    ("the input of fusion_passes.quantize_fp8 is not a high-precision tensor",
     lambda: cpu(lambda x, s: quantize_fp8(x, s, E4M3), torch.arange(4), torch.tensor(0.1))),
    ("the lower bound of the magnitudes, 1e-10, is less than the smallest normal number of float16, 6.10352e-05, "
     "which they are in: clamp them in float32",
     lambda: cpu(bounded_in_half, torch.randn(4, 32).half())),
    ("could not be read: broken on purpose", lambda: next(read_all(captured(), "attention", broken)).reason),
    ("the portable attention kernel needs Triton 9.0 or later, found 3.6",
     lambda: str(dataclasses.replace(KERNELS[1], triton=((9, 0), None)).unsupported(
         AttentionQuantArguments(*torch.randn(3, 1, 2, 128, 64, dtype=BF16)), (9, 0)))),
    ("looks like attention of [2, 4, 24, 16], [2, 1, 24, 16] and [2, 4, 24, 16], which do not fit each other: give key "
     "and value as many heads",
     lambda: dense(attend=one_head_of_keys, operands=[qkv()[0], qkv(kv_heads=1)[1], qkv()[2]], more=(mask(),))),
    ("looks like attention of one query, but Inductor computes its product as a multiplication and a sum: "
     "torch._inductor.config.coordinate_descent_tuning = False keeps the product", one_query),
    ("looks like attention, but the softmax passes through aten.constant_pad_nd (…): where Inductor padded the "
     "product, torch._inductor.config.shape_padding = False keeps it as it is",
     lambda: dense(attend=padded, more=(mask(),))),
    ("looks like attention, but the scores pass through aten.slice (…): where Inductor padded the product, "
     "torch._inductor.config.shape_padding = False keeps it as it is", lambda: dense(attend=cut, more=(mask(),))),
    ("quantizes arg0_1, which is not a high-precision floating-point tensor",
     lambda: cpu(lambda x: saturate(x / (x.abs().amax(-1, keepdim=True) / 448.0)), torch.randint(1, 9, (4, 32)))),
    ("quantizes arg0_1, which is not a high-precision floating-point tensor",
     lambda: cuda(lambda x: x.clamp(-1.0, 1.0).float().to(E4M3), torch.randn(4, 8).to(torch.float8_e5m2))),
    ("the scale, unknown, is not a tensor", lambda: quantized_in_graph(scaled_by_unknown)),
    ("the range of quantized_decomposed.quantize_per_tensor is not constant",
     lambda: quantized_in_graph(up_to_unknown)),
    ("the scale is on cpu and the tensor on cuda:0: make the scale a buffer, so that .to(device) moves it",
     lambda: cuda(lambda x: saturate(x / torch.rand((), device="cpu")), torch.randn(4, 8))),
    ("fusion_passes_reasons.saturate is called with limit=100.0, which is not read",
     lambda: with_argument(lambda op: cpu(op, torch.randn(4, 8), torch.tensor(0.1)), 100.0)),
    ("the Hopper attention kernel needs addresses that are multiples of 16 bytes", address_refused),
)  # fmt: skip

# Attention over a KV cache

TINY = 1.1754943508222875e-38


def grouped(scales, quantize=lambda x, s: saturate(x / s), config=FUSE, view=lambda o: o, size=32):
    def fn(*tensors):
        groups = view(paged.attend(*tensors)).flatten(1).float().unflatten(-1, (-1, size))
        return quantize(groups, scales(groups.abs().amax(-1, keepdim=True)))

    return cpu(fn, *paged_inputs(output=False)(7, "cpu"), config=config)


def over_cache(quantize, config=FUSE):
    def fn(*tensors):
        return quantize(paged.attend(*tensors).flatten(1))

    return cpu(fn, *paged_inputs(output=False)(7, "cpu"), config=config)


def with_symbolic_scales():
    """Sequences and their length are not known, and the scales are returned with both dimensions."""

    def fn(x, *batch):
        groups = paged.attend(x.flatten(0, 1), *batch).view(x.shape).flatten(2).float().unflatten(-1, (-1, 32))
        scales = groups.abs().amax(-1, keepdim=True) / 448.0
        return saturate(groups / scales), scales

    q, *batch = paged_inputs(output=False)(8, "cpu")
    x = q.contiguous().view(2, 4, *q.shape[1:])
    return cuda(fn, x, *batch, mark_dynamic=((x, 0), (x, 1)))


PAGED: tuple[Shown, ...] = (
    ("several sizes of the scales, [s0, s0], are symbolic", with_symbolic_scales),
    ("the lower bound of the scales is inf; the fused op takes a finite number, 0 or more",
     lambda: grouped(lambda m: (m / 448.0).clamp(min=math.inf))),
    ("the graph multiplies by the reciprocal of scales down to 2.23214e-40, which can be infinite: divide by the "
     "scales, or give them a lower bound of 1.18e-38 or more",
     lambda: grouped(lambda m: 448.0 / m.clamp(min=1e-37), lambda x, s: saturate(x * s))),
    ("the graph multiplies by the reciprocal of scales down to 0, which can be infinite: divide by the scales, or "
     "give them a lower bound of 1.18e-38 or more",
     lambda: grouped(lambda m: 448.0 / m, lambda x, s: saturate(x * s))),
    ("a scale is at most 0.5 in the graph; the fused op has no such bound",
     lambda: grouped(lambda m: (m / 448.0).clamp(TINY, 0.5))),
    ("the graph clamps to (-240.0, 240.0), the fused op to the range of float8_e4m3fn, ±448",
     lambda: grouped(lambda m: m / 448.0, lambda x, s: (x / s).clamp(-240, 240).to(E4M3))),
    ("without a clamp, and with scales down to 0, quotients can be too large; what a cast to float8_e4m3fn makes of "
     "them depends on the torch version on cpu, the fused op saturates: clamp before the cast",
     lambda: grouped(lambda m: m / 448.0, lambda x, s: (x / s).to(E4M3))),
    ("groups of 128 do not divide a head of 64", lambda: grouped(lambda m: m / 448.0, size=128)),
    ("the scales, or the magnitudes that they are made of, are clamped to nan",
     lambda: grouped(lambda m: (m / 448.0).clamp(min=math.nan))),
    ("the scales are the largest magnitude times 0.01, not divided by 448", lambda: grouped(lambda m: m * 0.01)),
    ("on the way from the largest magnitudes to the scales are numbers larger or smaller than both, which can be "
     "infinite or 0: divide by the largest code in one step", lambda: grouped(lambda m: m * 64.0 / (64.0 * 448.0))),
    ("the tensor is multiplied by its scales, not divided by them",
     lambda: grouped(lambda m: m / 448.0, lambda x, s: saturate(x * s))),
    ("the scales pass through aten.div (div), which rounds them to bfloat16: choose them in float32",
     lambda: over_cache(lambda o: saturate(o.unflatten(-1, (-1, 32)) / (
         o.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 448.0)))),
    ("the scales pass through aten.exp2 (exp2): rounded to powers of two, they are not the largest magnitude / code",
     lambda: grouped(lambda m: (m / 448.0).log2().ceil().exp2())),
    ("the scales pass through aten.sqrt (sqrt): not the largest magnitude / code", lambda: grouped(lambda m: m.sqrt())),
    ("the quotient is rounded to bfloat16 before it is quantized",
     lambda: grouped(lambda m: m / 448.0, lambda x, s: saturate((x / s).bfloat16()))),
    ("the scales come from the largest element, not from the largest magnitude",
     lambda: over_cache(lambda o: saturate(o.float().unflatten(-1, (-1, 32)) / (
         o.float().unflatten(-1, (-1, 32)).amax(-1, keepdim=True) / 448.0)))),
    ("the attention's output is rounded to float16 before it is quantized; the fused op rounds once: let the "
     "attention give float16", lambda: grouped(lambda m: m / 448.0, view=lambda o: o.half())),
    ("the attention's output is quantized with a dynamic scale per token; the fused op takes one static scale, or "
     "dynamic ones for groups within a head",
     lambda: over_cache(lambda o: quantize_fp8_dynamic(o, QuantSpec(E4M3, "token", static=False))[0])),
    ("the fused op divides by a scale, and making one of the graph's takes a kernel: nobody measured that",
     lambda: over_cache(lambda o: saturate(o.float() / 0.37), config=MEASURED)),
    ("the attention's output is transposed before it is quantized; the fused op has groups in its own order",
     lambda: grouped(lambda m: m / 448.0, view=lambda o: o.transpose(0, 1))),
    ("the scales are float64, in the fused op float32",
     lambda: grouped(lambda m: m.double() / 448.0, lambda x, s: (saturate(x / s), s))),
    ("the reciprocal of the scales passes through aten.clamp_max (clamp_max)",
     lambda: grouped(lambda m: (448.0 / m.clamp(min=1e-4)).clamp(max=1e6), lambda x, s: saturate(x * s))),
)  # fmt: skip

# Rotary embedding and the write to a KV cache

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 32, 8


def step(rotate="halves", quantize=lambda q, s: saturate(q.float() / s), write=kv_cache_write, table=None, dtype=BF16,
         cache=E4M3, config=FUSE, to_value=lambda v: v, kv_heads=KV_HEADS, queries=TOKENS, head=(),
         whole=None):  # fmt: skip
    turn = SPELLINGS[rotate] if isinstance(rotate, str) else rotate

    def fn(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
        cos, sin = (cos, sin) if table is None else table(cos, sin)
        scales = (scale, scale) if cache is E4M3 else ()
        write(turn(k, cos, sin), to_value(v), key_cache, value_cache, slots, *scales)
        return quantize(turn(q[:queries], cos, sin), scale)

    q, k, v = (torch.randn(TOKENS, heads, HEAD_DIM).to(dtype) for heads in (HEADS, kv_heads, kv_heads))
    cos, sin = torch.randn(2, TOKENS, HEAD_DIM // 2).to(dtype)
    written_heads, written_dim = head or (kv_heads, HEAD_DIM)
    caches = (torch.zeros(4, written_heads, 16, written_dim).to(cache) for _ in range(2))
    return cpu(whole or fn, q, k, v, cos, sin, *caches, torch.arange(TOKENS), torch.tensor(0.1), config=config)


def other_way_round(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), -1)


def of_last_dimensions(x, cos, sin):
    return torch.cat((x[..., :4], SPELLINGS["halves"](x[..., 4:], cos[:, :14], sin[:, :14])), -1)


def with_rest_doubled(x, cos, sin):
    return torch.cat((SPELLINGS["halves"](x[..., :28], cos[:, :14], sin[:, :14]), x[..., 28:] * 2.0), -1)


def in_another_order(x, cos, sin):
    x1, x2, cos, sin = x[..., ::2], x[..., 1::2], cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def in_blocks(x, cos, sin):
    return torch.cat([SPELLINGS["halves"](part, cos[:, :8], sin[:, :8]) for part in x.chunk(2, -1)], -1)


def by_two_tables(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * (cos * 1.5) + x1 * sin), -1)


def write_twice(k, v, key_cache, value_cache, slots, *scales):
    for half in (slots.where(slots % 2 == 0, -1), slots.where(slots % 2 == 1, -1)):
        kv_cache_write(k, v, key_cache, value_cache, half, *scales)


def quantized_before(k, v, key_cache, value_cache, slots, k_scale, v_scale):
    kv_cache_write(saturate(k / k_scale), saturate(v / v_scale), key_cache, value_cache, slots)


def all_rotated(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    q, k, v = (SPELLINGS["halves"](x, cos, sin) for x in (q, k, v))
    kv_cache_write(k.bfloat16(), v.bfloat16(), key_cache, value_cache, slots)
    return saturate(q / scale)


def old_values_used_later(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    turn, old = SPELLINGS["halves"], key_cache.float()
    kv_cache_write(turn(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
    return old.sum(-1), saturate(turn(q, cos, sin).float() / scale), old * 2


def cache_turned_around(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    turn = SPELLINGS["halves"]
    kv_cache_write(turn(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
    key_cache.copy_(key_cache.flip(0))
    return saturate(turn(q, cos, sin).float() / scale)


def query_of_the_cache(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    turn = SPELLINGS["halves"]
    kv_cache_write(turn(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
    return saturate(turn(q * key_cache.float().sum(), cos, sin).float() / scale)


def shared_position(x, cos, sin):
    """One position for all tokens."""
    return SPELLINGS["halves"](x, cos[:1], sin[:1])


def in_four_dimensions(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    """The key alone has a dimension for the batch."""
    turn, cos, sin = SPELLINGS["halves"], cos[:1], sin[:1]
    kv_cache_write(turn(k[None], cos, sin)[0], v, key_cache, value_cache, slots, scale, scale)
    return saturate(turn(q, cos, sin).float() / scale)


def turned_as(x, cos, sin, *tokens):
    """x [8, heads, head_dim], turned with its tokens in two or three dimensions."""
    first, second = x.view(*tokens, *x.shape[1:]).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).view(x.shape)


def rows_for_some(x, cos, sin):
    return turned_as(x, *(table[:4].view(1, 2, 2, 1, -1) for table in (cos, sin)), 2, 2, 2)


def tokens_in_other_dimensions(x, cos, sin):
    tokens = (2, 4) if x.shape[1] == HEADS else (4, 2)
    return turned_as(x, *(table[:1].view(1, 1, 1, -1) for table in (cos, sin)), *tokens)


def quarters_exchanged(x, cos, sin):
    """The first quarter turns by the second part of the tables."""
    a, b, c, d = x.chunk(4, -1)
    (cos_b, cos_a), (sin_b, sin_a) = (table[:, None].chunk(2, -1) for table in (cos, sin))
    return torch.cat((a * cos_a - c * sin_a, b * cos_b - d * sin_b, c * cos_a + a * sin_a, d * cos_b + b * sin_b), -1)


def written_again(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    """Other keys, before the query is quantized."""
    turn = SPELLINGS["halves"]
    kv_cache_write(turn(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
    kv_cache_write(k * 2, v * 2, key_cache, value_cache, slots + TOKENS, scale, scale)
    return saturate(turn(q, cos, sin).float() / scale)


def any_heads():
    """The number of the query's heads is symbolic."""

    def fn(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
        turn = SPELLINGS["halves"]
        kv_cache_write(turn(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
        return saturate(turn(q, cos, sin).float() / scale)

    q, k, v = (torch.randn(TOKENS, heads, HEAD_DIM).to(BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    torch._dynamo.mark_dynamic(q, 1)
    caches = (torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2))
    tables = torch.randn(2, TOKENS, HEAD_DIM // 2).to(BF16)
    return cpu(fn, q, k, v, *tables, *caches, torch.arange(TOKENS), torch.tensor(0.1))


def heads_first():
    """On a card on which it was measured; heads lie before tokens in memory."""

    def fn(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
        def turn(x):
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        kv_cache_write(turn(k.transpose(0, 1)).transpose(0, 1), v, key_cache, value_cache, slots, scale, scale)
        return saturate(turn(q.transpose(0, 1).contiguous()).float() / scale)

    q, k, v = (torch.randn(512, heads, 128).to(BF16) for heads in (32, 8, 8))
    caches = (torch.zeros(40, 8, 16, 128).to(E4M3) for _ in range(2))
    tables = torch.randn(2, 1, 512, 64).to(BF16)
    with torch.no_grad():
        (graph,) = capture(fn, q, k, v, *tables, *caches, torch.arange(512), torch.tensor(0.1))
    mode = FakeTensorMode()
    moved_to_cuda(graph, mode)
    return judged(graph, MEASURED)


ROPE: tuple[Shown, ...] = (
    ("it is not known which dimension of query and key counts heads", lambda: step(whole=in_four_dimensions)),
    ("the number of heads of the query is not known", any_heads),
    ("cos and sin have rows for some of the dimensions of the query's tokens, and one for the others",
     lambda: step(rows_for_some)),
    ("query and key have their tokens in other dimensions", lambda: step(tokens_in_other_dimensions)),
    ("the graph has the query's heads before its tokens in memory: the fused op's result would be copied, which was "
     "not measured", heads_first),
    ("the columns of cos are not in the order of the dimensions of x", lambda: step(quarters_exchanged)),
    ("… (auto_functionalized…) reads an output before … is computed, and what is written in between keeps it there",
     lambda: step(whole=written_again)),
    ("cos is float64, the op reads it in fp32 at most",
     lambda: step(table=lambda cos, sin: (cos.double(), sin.double()), quantize=lambda q, s: saturate(q / s))),
    ("cos is float32 and sin is bfloat16: make them one dtype",
     lambda: step(table=lambda cos, sin: (cos.float(), sin))),
    ("the key is multiplied by a scale, or divided by a multiple of one: the op divides by it",
     lambda: step(write=lambda k, v, kc, vc, slots, ks, vs: kv_cache_write(
         saturate(k.float() * ks), saturate(v.float() / vs), kc, vc, slots))),
    ("query, key and value are bfloat16, bfloat16 and float32 before they are rotated",
     lambda: step(to_value=lambda v: v.float(), write=lambda k, v, *rest: kv_cache_write(k.float(), v, *rest))),
    ("the key's tokens and heads are put into another order between its rotation and the write",
     lambda: step(write=lambda k, v, *rest: kv_cache_write(k.transpose(0, 1).reshape(k.shape), v, *rest))),
    ("the fused op has no faster kernel on the CPU", lambda: step(config=MEASURED)),
    ("the key's rotation is not read: it turns the other way round: sin has the other sign",
     lambda: step(other_way_round)),
    ("the dimensions that are turned are not the first ones of each head", lambda: step(of_last_dimensions)),
    ("the dimensions after the first 28 do not pass as they are", lambda: step(with_rest_doubled)),
    ("the key comes from aten.mul.Tensor, not from a rotary embedding that is read",
     lambda: step(lambda x, cos, sin: x * 1.5)),
    ("no query is rotated by the same cos and sin as the key",
     lambda: step(lambda x, cos, sin: SPELLINGS["halves"](x, cos if x.shape[1] == HEADS else cos * 1.5, sin))),
    ("the query's quantization is not read: clamps to nan, which makes every code NaN",
     lambda: step(quantize=lambda q, s: (q.float() / s).clamp(-448.0, math.nan).to(E4M3))),
    ("it turns the other way round: sin has the other sign", lambda: step(other_way_round)),
    ("query and key are float64 before they are rotated; the op takes bfloat16, float16, float32",
     lambda: step(dtype=torch.float64, table=lambda cos, sin: (cos.float(), sin.float()), write=quantized_before)),
    ("keys of float32 do not go into a cache of bfloat16",
     lambda: step(dtype=torch.float32, cache=BF16, whole=all_rotated)),
    ("the query has 4 tokens, the write 8", lambda: step(shared_position, queries=4)),
    ("cos and sin of the query have different shapes", lambda: step(table=lambda cos, sin: (cos, sin[:1]))),
    ("a head of the key has 32 numbers where it is rotated, and 64 where it is written",
     lambda: step(head=(1, 64), write=lambda k, v, *rest: kv_cache_write(k.view(-1, 1, 64), v.view(-1, 1, 64), *rest))),
    ("the dimensions come out in another order than they go in", lambda: step(in_another_order)),
    ("a pair is neither two neighbours nor a dimension of each half", lambda: step(in_blocks)),
    ("cos is put together from 2 tensors", lambda: step(by_two_tables)),
    ("… (…) is also read by … (auto_functionalized…): fusing would compute it twice", lambda: step(write=write_twice)),
    ("the kernel has no float64", lambda: str(why_no_kernel(torch.device("cpu"), torch.float64))),
    ("the RoPE and cache kernel needs an NVIDIA GPU of compute capability 8.9 or later, found cpu without one",
     lambda: with_answers(lambda: str(why_no_kernel(torch.device("cpu"), BF16)), device_capability=lambda _: None)),
    ("the RoPE and cache kernel needs Triton, found none",
     lambda: with_answers(lambda: str(why_no_kernel(torch.device("cpu"), BF16)), triton_version=lambda: None)),
    ("no kernel supports it",
     lambda: with_answers(lambda: attention_verdict(AttentionQuantArguments(*torch.randn(3, 1, 2, 8, 72))).why)),
    ("… was measured for bf16 and FP8 caches, not for float32 and caches of float8_e4m3fn", lambda: rope_verdict(
        torch.device("cpu"), tokens=8, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32, cache_dtype=E4M3,
        quantized=True).why),
)  # fmt: skip

# A user's own rule


def with_answers(call, **answers):
    with ExitStack() as stack:
        for question, answer in answers.items():
            stack.enter_context(mock.patch(f"fusion_passes.ops.support.{question}", answer))
        return call()


def silu_rule(replace, dtype=torch.float32):
    return TracedRule(
        name="own", search=lambda x, y: F.silu(x) * y, replace=replace,
        example_inputs=tuple(torch.empty(2, 4, 8, dtype=dtype).unbind()),
    )  # fmt: skip


def own(replace, fn=lambda x, y: F.silu(x) * y, *inputs, **options):
    config = PassConfig(extra_fusions=(silu_rule(replace),), profitability="ignore")
    return cpu(fn, *(inputs or (torch.randn(4, 8), torch.randn(4, 8))), config=config, **options)


def other_rows_emptied(q, k, v):
    """Without keepdim the rows that are judged become columns."""
    s = scores(q, k).float()
    empty = (s == -torch.inf).all(-1)
    return torch.where(empty, 0.0, torch.softmax(s, -1)).to(v.dtype) @ v


def refused(search=lambda x, y: F.silu(x) * y, replace=lambda x, y: F.silu(x) * y, examples=None):
    """What is said where a rule is made."""
    examples = torch.empty(2, 4, 8) if examples is None else examples
    given = tuple(examples.unbind()) if isinstance(examples, torch.Tensor) else examples
    try:
        TracedRule(name="own", search=search, replace=replace, example_inputs=given)
    except ValueError as error:
        return str(error)
    raise AssertionError("it is taken")


def of_number(fn, example):
    """A rule with a number among its parameters, where the graph has something else."""
    x = torch.empty(4, 8)
    rule = TracedRule(
        name="own", search=lambda x, a: F.silu(x) * a, replace=lambda x, a: x * a, example_inputs=(x, example)
    )
    config = PassConfig(extra_fusions=(rule,), profitability="ignore")
    return cpu(fn, torch.randn(4, 8), torch.randn(4, 8), config=config)


def half_place(replace, search=lambda x, y: F.silu(x) * y, dtype=torch.float16):
    """A place in fp16, or another dtype, of a rule with bf16 examples."""
    rule = TracedRule(
        name="own", search=search, replace=replace,
        example_inputs=tuple(torch.empty(2, 4, 8, dtype=torch.bfloat16).unbind()),
    )  # fmt: skip
    config = PassConfig(extra_fusions=(rule,), profitability="ignore")
    return cpu(search, *torch.randn(2, 4, 8).to(dtype), config=config)


def added_with_a_factor():
    rule = TracedRule(
        name="own", search=lambda x, y: F.silu(x) + y, replace=lambda x, y: x - y,
        example_inputs=tuple(torch.empty(2, 4, 8).unbind()),
    )  # fmt: skip
    config = PassConfig(extra_fusions=(rule,), profitability="ignore")
    return cpu(lambda x, y: torch.add(F.silu(x), y, alpha=2), *torch.randn(2, 4, 8), config=config)


def insertion_of_a_later_node():
    graph = Graph()
    x = graph.placeholder("x")
    first, later = graph.call_function(aten.sin.default, (x,)), graph.call_function(aten.cos.default, (x,))
    return Insertion(graph, (first,), {}).call(aten.neg.default, later)


def insertion_without_fakes():
    graph = Graph()
    x = graph.placeholder("x")
    return Insertion(graph, (graph.call_function(aten.sin.default, (x,)),), {}).call(aten.neg.default, x)


def needed_for_another_output():
    """A match of a rule of somebody's own, which torch's graphs have no place for among the built-in ones."""
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.sin.default, (x,))
    second = graph.call_function(aten.cos.default, (first,))
    return check_readers(Match(second, frozenset({first, second}), (first,), side_outputs=(first,)))


def refused_shapes(x, y):
    if x.shape[0] % 2:
        raise ValueError("an even number of rows, please")
    return F.silu(x) * y


def traced_elsewhere():
    """`search` refuses the shapes of the place."""
    examples = tuple(torch.empty(2, 4, 8).unbind())
    rule = TracedRule(name="own", search=refused_shapes, replace=lambda x, y: x * y, example_inputs=examples)
    config = PassConfig(extra_fusions=(rule,), profitability="ignore")
    return cpu(lambda x, y: F.silu(x) * y, *torch.randn(2, 3, 8), config=config)


def attention_of_tomorrow(overload="default", *window):
    """An attention op of a torch to come: with an overload, or an argument that says more."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 4, 24, 16, device="meta")
    node = graph.call_function(getattr(own_attention, overload), (x, x, x, *window))
    graph.output(graph.call_function(operator.getitem, (node, 0)))
    with mock.patch.dict(attention.BACKENDS, {"fusion_passes_reasons::attend": "flash"}):
        return " ".join(miss.reason for miss in attention.recognize(graph))


def attention_node(rank=4, whole=False, **given):
    """What is told of a graph with one fused attention, which torch would not make."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty((2, 4, 24, 16)[-rank:], device="meta")
    given = {name: x if value == "x" else value for name, value in given.items()}
    node = graph.call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x), given)
    graph.output(node if whole else graph.call_function(operator.getitem, (node, 0)))
    return " ".join(miss.reason for miss in attention.recognize(graph))


def write_node(op=None, twice=False, **given):
    """The same for a write to a KV cache."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 4, 24, 16, device="meta")
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    own = torch.ops.fusion_passes.kv_cache_write.default
    arguments = dict.fromkeys(names, x) | given
    if op is None:
        graph.call_function(own, tuple(arguments.values()))
    else:
        node = graph.call_function(op, (own,), arguments)
        for _ in range(1 + twice):
            graph.call_function(operator.getitem, (node, 1))
    return " ".join(item.reason for item in kv_cache.recognize(graph) if isinstance(item, NearMiss))


FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized

RULES: tuple[Shown, ...] = (
    ("the overload windowed of fusion_passes_reasons.attend is not read", lambda: attention_of_tomorrow("windowed")),
    ("argument window=3 has no place in the attention idiom", lambda: attention_of_tomorrow("default", 3)),
    ("sin_default (aten.sin.default) is one output and needed for another: the fused op computes all at once",
     lambda: raised(needed_for_another_output)),
    ("search cannot be traced on these tensors: ValueError: an even number of rows, please", traced_elsewhere),
    ("query, key and value are not all [batch, heads, length, head_dim]", lambda: attention_node(rank=3)),
    ("is_causal is x, not known while compiling", lambda: attention_node(is_causal="x")),
    ("the scale of the scores is x, not a number", lambda: attention_node(scale="x")),
    ("unknown argument window of aten._scaled_dot_product_flash_attention_for_cpu", lambda: attention_node(window=3)),
    ("the outputs of aten._scaled_dot_product_flash_attention_for_cpu are used as a whole by output",
     lambda: attention_node(whole=True)),
    ("the graph writes to the cache in place already, so its order is not to be read from it", write_node),
    ("key is no tensor of this graph", lambda: write_node(FUNCTIONALIZED, key=None)),
    ("what it returns is used in an unusual way", lambda: write_node(FUNCTIONALIZED, twice=True)),
    ("aten.add.Tensor has alpha=2, search 1", added_with_a_factor),
    ("a is … here, …, and a number in example_inputs", lambda: of_number(lambda x, y: F.silu(x) * y, 2.5)),
    ("a is 2.5 here, and 2 in example_inputs: another type", lambda: of_number(lambda x, y: F.silu(x) * 2.5, 2)),
    ("x is float32 here and bfloat16 in example_inputs: make a rule with such examples",
     lambda: half_place(lambda x, y: x * y, dtype=torch.float32)),
    ("looks like attention, but where empties other rows than those that it judges",
     lambda: dense(attend=other_rows_emptied, operands=[torch.randn(1, 4, 4, 16).bfloat16() for _ in range(3)])),
    ("a bound broadcasts the tensor from … to …",
     lambda: dense(lambda o, s: torch.minimum(flat(o).float() / s, torch.full((5, 1, 1, 1), 448.0)).to(E4M3))),
    ("clamps to 447.5, which is no whole number, before it rounds to whole numbers",
     lambda: dense(lambda o, s: (flat(o).float() / s).clamp(-447.5, 447.5).round().to(E4M3))),
    ("own: replace returns its parameter x: write clone()", lambda: refused(replace=lambda x, y: x)),
    ("example_inputs must be a tuple with one example for each parameter, got a int", lambda: refused(examples=3)),
    ("replace must be a function, got 3", lambda: refused(replace=3)),
    ("search must name its parameters, without * and **", lambda: refused(search=lambda *x: x[0])),
    ("search and replace must take the same parameters, ['x', 'y']", lambda: refused(replace=lambda a, b: a * b)),
    ("search takes ['x', 'y'], got 3 example inputs", lambda: refused(examples=torch.empty(3, 4, 8))),
    ("the example of y must be a tensor or a finite number, got 'y'",
     lambda: refused(examples=(torch.empty(4, 8), "y"))),
    ("search ignores ['y'], so it could never be told what they are",
     lambda: refused(search=lambda x, y: F.silu(x) * 2)),
    ("on the example inputs search gives float32 [4, 8] on cpu, replace gives float64 [4, 8] on cpu: they must give "
     "the same", lambda: refused(replace=lambda x, y: (x * y).double())),
    ("y is 2.0 here, not a tensor", lambda: own(lambda x, y: x * y, lambda x: F.silu(x) * 2.0, torch.randn(4, 8))),
    ("the replacement gives torch.bfloat16 on cpu, the graph has torch.float16 on cpu",
     lambda: half_place(lambda x, y: (x * y).bfloat16())),
    ("the replacement has shape (4, 8) and strides (1, 4), the graph (4, 8) and (8, 1)",
     lambda: own(lambda x, y: (x * y).t().contiguous().t())),
    ("cos_default is computed after sin_default", lambda: raised(insertion_of_a_later_node)),
    ("this graph carries no fake tensors, so shapes cannot be checked", lambda: raised(insertion_without_fakes)),
    ("… (aten.sym_size.int) asks for a size of …, which the fusion removes, and no input of the fusion has that size",
     lambda: asked_for_a_size(2)[0]),
    ("… (aten.mul_.Scalar) writes to an input between … and …", written_to),
    ("… (…) is made of one output and needed for another: the fused op computes all at once",
     lambda: step(whole=query_of_the_cache)),
    ("… (prims.convert_element_type.default) reads what the fused op overwrites, and may be computed after it",
     lambda: step(whole=old_values_used_later)),
    ("… (aten.copy_.default) overwrites what the fused op writes to by what is computed from it",
     lambda: step(whole=cache_turned_around)),
    ("the kernel was not measured on a card", lambda: judge([], 8, "the kernel", "a card", "tokens").why),
    ("the number of tokens is symbolic and has no example, so no measurement can be looked up",
     lambda: judge([Measurement(8, 1.2)], None, "the kernel", "a card", "tokens").why),
    ("the kernel was measured on a card for 8 to 8 tokens, not for 9",
     lambda: judge([Measurement(8, 1.2)], 9, "the kernel", "a card", "tokens").why),
    ("the kernel takes 2.00 times as long as stock torch.compile on a card at 8 tokens",
     lambda: judge([Measurement(8, 0.5)], 8, "the kernel", "a card", "tokens").why),
)  # fmt: skip

# A query that an op quantizes


def query(quantize, *more, on=cpu, config=FUSE, rotate=lambda x: x * 1.5):
    def fn(x, key, value, table, start, lengths, q, *more):
        return paged.attend(quantize(rotate(x), q, *more), key, value, table, start, lengths, q, q, q, dtype=BF16)

    x = paged.random(7, paged.HEADS, paged.HEAD_DIM, device="cpu")
    caches = (paged.cache("cpu", E4M3) for _ in range(2))
    return on(fn, x, *caches, *paged.batch(7, "cpu"), torch.tensor(0.1), *more, config=config)


TORCHAO = torchao_op()


def torchao(x, scale):
    return TORCHAO(x, scale, E4M3)


def half_written(x, s):
    out = torch.empty((2, *x.shape), dtype=E4M3, device=x.device)
    torch.ops._C.static_scaled_fp8_quant(out[0], x, s)
    return out.view(-1, *x.shape[1:])[: x.shape[0]]


def two_written_once():
    """Only half of the tensor that is the query is written."""

    def fn(x, key, value, table, start, lengths, q):
        out = torch.empty((2, *x.shape), dtype=E4M3, device=x.device)
        torch.ops._C.static_scaled_fp8_quant(out[0], x, q)
        return paged.attend(out.flatten(0, 1), key, value, table, start, lengths, q, q, q, dtype=BF16)

    x = paged.random(7, paged.HEADS, paged.HEAD_DIM, device="cpu")
    caches = (paged.cache("cpu", E4M3) for _ in range(2))
    return cuda(fn, x, *caches, *paged.batch(14, "cpu"), torch.tensor(0.1))


QUERY: tuple[Shown, ...] = (
    ("the op writes to a part of a tensor, or to one of another shape", two_written_once),
    ("the scale is on cpu and the query on cuda:0: make the scale a buffer, so that .to(device) moves it",
     lambda: query(lambda x, q: torchao(x, torch.full((), 0.1, device="cpu")), on=cuda)),
    ("the op is called with limit=100.0, which is not read", lambda: with_argument(query, 100.0)),
    ("the scale is bfloat16; make it float32", lambda: query(lambda x, q: torchao(x, q.bfloat16()))),
    ("the scale has shape [64]: not a static per-tensor quantization",
     lambda: query(lambda x, q, many: torchao(x, many), torch.rand(64))),
    ("the query is float8_e5m2, not bf16, fp16 or fp32",
     lambda: query(lambda x, q: torchao(x.to(torch.float8_e5m2), q))),
    ("on cpu the op computes something else than on cuda", lambda: query(vllm_whole)),
    ("the query comes from fusion_passes_reasons.own_op, of which the formula is not known",
     lambda: query(lambda x, q: own_op(x))),
    ("_C.static_scaled_fp8_quant writes to a part of a tensor, or to one of another shape",
     lambda: query(half_written, on=cuda, rotate=torch.relu)),
    ("the scale of torchao.quantize_affine_float8_non_decomposed is as large as the tensor: not a static per-tensor "
     "quantization", lambda: query(lambda x, q, many: torchao(x, many), torch.rand(7, 4, 64))),
    ("nobody measured it on the CPU", lambda: query(lambda x, q: quantize_fp8(x, q, E4M3), config=MEASURED)),
    ("the query comes from an input of the graph, which Inductor does not fuse a quantization into",
     lambda: query(lambda x, q: quantize_fp8(x, q, E4M3), config=MEASURED, on=cuda, rotate=lambda x: x)),
)  # fmt: skip

# An RMSNorm whose output is quantized


def norm(quantize, normalise=lambda x: F.rms_norm(x, x.shape[-1:]), on=cpu, config=FUSE):
    return on(lambda x: quantize(normalise(x)), torch.randn(4, 96).bfloat16(), config=config)


def norm_groups(y, size=32):
    groups = y.float().unflatten(-1, (-1, size)) if size < 64 else y.float().reshape(-1, size)
    return saturate(groups / (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-30))


NORM: tuple[Shown, ...] = (
    ("groups of 64 do not divide a row of 96", lambda: norm(lambda y: norm_groups(y, 64))),
    ("the norm's output is transposed before it is quantized; the fused op has groups in its own order",
     lambda: norm(lambda y: norm_groups(y.view(4, 3, 32).transpose(0, 1)))),
    ("the mean of the squares is bfloat16: cast x to float32 before it is squared",
     lambda: norm(saturate, lambda x: x * x.square().mean(-1, keepdim=True).rsqrt())),
    ("the fused op has no faster kernel on the CPU",
     lambda: norm(lambda y: saturate(y.float() / 0.5), config=MEASURED)),
    ("RMSNorm of rows of 96 with FP8 output, scales per group of 32, that plain torch quantizes, was not measured on "
     "a card of compute capability 9.0", lambda: norm(norm_groups, on=cuda, config=MEASURED)),
)  # fmt: skip

SHOWN: tuple[Shown, ...] = DENSE + PAGED + ROPE + QUERY + NORM + RULES
BASES: dict[str, Callable[[], str]] = {
    "dense": dense,
    "on CUDA": lambda: wide(64),
    "by hand": lambda: dense(attend=by_hand, more=(mask(),)),
    "by hand, one head, on CUDA": lambda: dense(
        attend=by_hand, operands=[x[:1, :1] for x in qkv(head_dim=64)], more=(mask(),), on=cuda
    ),
    "by hand, one query, on CUDA": lambda: one_query(tuned=False),
    "query": lambda: query(lambda x, q: quantize_fp8(x, q, E4M3)),
    "groups": lambda: grouped(lambda m: m / 448.0),
    "rope": step,
    "norm": lambda: norm(norm_groups),
    "own rule": lambda: own(lambda x, y: x * y),
}
"""The programs before they are changed: they fuse."""
