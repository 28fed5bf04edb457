"""`query_quant` in generated code: the quantization is part of the kernel that computes the query, RoPE or a norm."""

import re

import pytest
import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.idioms import recognize
from fusion_passes.idioms.opaque import OPAQUE
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.quant import codes
from fusion_passes.testing import capture, capture_cuda, print_graph, run
from tests.fusions import paged_cases as paged
from tests.fusions.test_effects import kernels
from tests.fusions.without_code import FUSE, STOCK, WithoutCode
from tests.generated_code import cpp_code, triton_code
from tests.idioms.test_quantize import torchao_op

E4M3 = torch.float8_e4m3fn
CODE = {"cpu": cpp_code, "cuda": triton_code}


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def inside(x, cos, sin, *rest):
    *batch, q, k, v = rest
    return paged.attend(rotated(x, cos, sin), *batch, q, k, v, dtype=torch.bfloat16)


def opaque(x, cos, sin, *rest):
    *batch, q, k, v = rest
    return paged.attend(quantize_fp8(rotated(x, cos, sin), q), *batch, q, k, v, dtype=torch.bfloat16)


def normed(x, cos, sin, *rest):
    *batch, q, k, v = rest
    x = rotated(F.rms_norm(x, x.shape[-1:], eps=1e-5), cos, sin)
    return paged.attend(quantize_fp8(x, q), *batch, q, k, v, dtype=torch.bfloat16)


def inputs(tokens=9):
    angle = torch.randn(tokens, 1, paged.HEAD_DIM // 2)
    caches = (paged.cache("cpu", E4M3, scale=s) for s in (paged.K_SCALE, paged.V_SCALE))
    scales = (paged.scalar(s, "cpu") for s in (paged.Q_SCALE, paged.K_SCALE, paged.V_SCALE))
    x = paged.random(tokens, paged.HEADS, paged.HEAD_DIM, device="cpu")
    return (x, angle.cos().bfloat16(), angle.sin().bfloat16(), *caches, *paged.batch(tokens, "cpu"), *scales)


@pytest.mark.parametrize("device", CODE)
@pytest.mark.parametrize("fn", [inside, opaque, normed])
def test_the_query_is_quantized_in_the_kernel_that_computes_it(fn, device):
    tensors = inputs()
    stock, ours = (CODE[device](fn, *tensors, config=config) for config in (STOCK, FUSE))
    assert len(kernels(ours)) == 1 <= len(kernels(stock))
    assert "ops.fusion_passes.quantize_fp8" not in ours
    assert ("ops.fusion_passes.quantize_fp8" in stock) == (fn is not inside)
    (attention,) = re.findall(r"torch\.ops\.fusion_passes\.paged_attention\.default\((\w+),", ours)
    (query,) = re.findall(rf"{attention} = (empty_strided\w+\(.*)", ours)
    assert "float8_e4m3fn" in query


@pytest.mark.parametrize("fn", [inside, opaque])
@torch.no_grad()
def test_compiled_it_is_as_close_to_fp32_as_the_unfused_code(fn):
    """Inductor quantizes what the kernel has in fp32; the op read it rounded to bf16."""
    tensors = inputs(33)
    x, cos, sin, *batch, q, k, v = tensors
    query = (rotated(x.float(), cos.float(), sin.float()) / q).clamp(-448.0, 448.0).to(E4M3)
    exact = paged.exact(query, *batch, q, k, v)
    report = Report()
    errors = []
    for config in (FUSE, STOCK):
        torch.compiler.reset()
        out = fusion_passes.compile(fn, config, report=report)(*tensors)
        errors.append((out.float() - exact).square().mean())
    assert report.count(rule="query_quant") == 1
    assert errors[0] <= 1.05 * errors[1]


@torch.no_grad()
def test_op_by_op_it_is_bit_for_bit_the_same():
    for fn in (inside, opaque):
        tensors = inputs()
        ours, stock = WithoutCode(fn, FUSE), WithoutCode(fn, STOCK)
        assert torch.equal(ours(*tensors), stock(*tensors))
        assert ours.report.count(rule="query_quant") == 1


@torch.no_grad()
def test_one_op_whose_query_is_exposed_and_whose_output_is_quantized():
    """Both rules want the same op: the second sees what the first has made."""

    def both(*tensors):
        out = inside(*tensors[:-1]).flatten(1)
        return (out.float() / tensors[-1]).clamp(-448.0, 448.0).to(E4M3)

    tensors = (*inputs(), torch.tensor(0.37))
    ours, stock = WithoutCode(both, FUSE), WithoutCode(both, STOCK)
    out, want = ours(*tensors), stock(*tensors)
    assert [(site.rule, site.status) for site in ours.report.sites] == [
        ("query_quant", "fused"),
        ("attention_quant", "fused"),
    ]
    assert (codes(out) - codes(want)).abs().max() <= 1
    assert ours.after[0].count("paged_attention.default") == 1


@torch.no_grad()
def test_one_op_that_quantizes_for_two_attentions_is_replaced_once():
    def two(x, cos, sin, *rest):
        *batch, q, k, v = rest
        query = quantize_fp8(rotated(x, cos, sin), q)
        return [paged.attend(query, *batch, q, k, v, dtype=torch.bfloat16, window=window) for window in (None, 5)]

    tensors = inputs()
    ours, stock = WithoutCode(two, FUSE), WithoutCode(two, STOCK)
    for a, b in zip(ours(*tensors), stock(*tensors), strict=True):
        assert torch.equal(a, b)
    assert ours.report.count(rule="query_quant") == 1


def test_profit_is_asked_for(monkeypatch):
    """Where there is nothing to fuse with, and where nobody measured, it is declined."""
    monkeypatch.setattr("fusion_passes.measured.device_capability", lambda device: (9, 0))
    monkeypatch.setattr("fusion_passes.measured.query_quant.records", lambda fusion: ())
    tensors = inputs()
    reasons = []
    for fn in (opaque, lambda x, *rest: opaque_alone(x, *rest)):
        report = Report()
        PostGradPassManager(PassConfig(), report)(capture_cuda(fn, *tensors))
        reasons += [site.reason for site in report.sites]
    assert "4 heads of 64 that is quantized by an op" in reasons[0]
    assert "was not measured on a card of compute capability 9.0" in reasons[0]
    assert "comes from an input of the graph, which Inductor does not fuse a quantization into" in reasons[1]


def opaque_alone(x, cos, sin, *rest):
    *batch, q, k, v = rest
    return paged.attend(quantize_fp8(x, q), *batch, q, k, v, dtype=torch.bfloat16)


# Ops of other libraries: by what the table says of them, and by what they compute

_library = torch.library.Library("_C", "FRAGMENT")


def _static_scaled_fp8_quant(result, input, scale, group_shape=None):
    """As vLLM's CUDA kernel does: times the reciprocal, and fmin makes the largest code of NaN."""
    y = input.float() * (1.0 / scale)
    result.copy_(torch.where(y <= 448.0, y, 448.0).clamp_min(-448.0).to(result.dtype))


if not hasattr(torch.ops._C, "static_scaled_fp8_quant"):
    _library.define(
        "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()"
    )
    _library.impl("static_scaled_fp8_quant", _static_scaled_fp8_quant, "CompositeExplicitAutograd")
    torch.library.register_fake("_C::static_scaled_fp8_quant", lambda *_, **__: None, lib=_library)


def vllm(x, scale):
    result = torch.empty(x.shape, dtype=E4M3, device=x.device)
    torch.ops._C.static_scaled_fp8_quant(result.view(-1, x.shape[-1]), x.view(-1, x.shape[-1]), scale)
    return result


def vllm_whole(x, scale):
    result = torch.empty_like(x, dtype=E4M3)
    torch.ops._C.static_scaled_fp8_quant(result, x, scale)
    return result


def own(x, scale):
    return quantize_fp8(x, scale)


def torchao(x, scale):
    return torch.ops.torchao.quantize_affine_float8_non_decomposed(x, scale, E4M3)


OPS = {
    "fusion_passes::quantize_fp8": own,
    "torchao::quantize_affine_float8_non_decomposed": torchao,
    "_C::static_scaled_fp8_quant": vllm_whole,
}
HARD = (0.0, -0.0, 1e-8, 448.0, 449.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan)


def test_every_opaque_op_is_here():
    assert OPS.keys() == OPAQUE.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPS)
@torch.no_grad()
def test_the_plain_form_of_an_op_is_the_op_in_every_bit(name, dtype):
    """On CUDA's graph, since some compute something else on the CPU; run on the CPU, op by op."""
    torchao_op()
    x, _, _, *batch, q, k, v = inputs(53)
    x = (x * 3.0).to(dtype)
    x.view(-1)[: len(HARD)] = torch.tensor(HARD, dtype=torch.float32).to(dtype)

    def fn(x, key, value, table, start, lengths, q, k, v):
        query = OPS[name](x * 1.0, q)
        return query, paged.attend(query, key, value, table, start, lengths, q, k, v, dtype=torch.bfloat16)

    tensors = (x, *batch, q, k, v)
    graph = capture_cuda(fn, *tensors)
    want, _ = run(graph)
    report = Report()
    PostGradPassManager(FUSE, report)(graph)
    assert report.count(rule="query_quant") == 1, report
    assert name.split("::")[1] not in print_graph(graph)
    got, _ = run(graph)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert got.dtype is E4M3


@torch.no_grad()
def test_an_op_that_computes_something_else_on_another_device_is_declined():
    tensors = inputs()

    def fn(x, cos, sin, *rest):
        *batch, q, k, v = rest
        return paged.attend(vllm_whole(rotated(x, cos, sin), q), *batch, q, k, v, dtype=torch.bfloat16)

    ours, stock = WithoutCode(fn, FUSE), WithoutCode(fn, STOCK)
    assert torch.equal(ours(*tensors), stock(*tensors))
    assert "on cpu the op computes something else than on cuda" in "\n".join(ours.report.declined("query_quant"))


@torch.no_grad()
def test_an_op_that_writes_to_another_shape_is_declined():
    tensors = inputs()

    def fn(x, cos, sin, *rest):
        *batch, q, k, v = rest
        return paged.attend(vllm(rotated(x, cos, sin), q), *batch, q, k, v, dtype=torch.bfloat16)

    report = Report()
    graph = capture_cuda(fn, *tensors)
    before = print_graph(graph)
    PostGradPassManager(FUSE, report)(graph)
    assert print_graph(graph) == before
    assert "writes to a part of a tensor, or to one of another shape" in "\n".join(report.declined("query_quant"))


@torch.no_grad()
def test_a_quantization_that_makes_a_number_of_nan_does_not_become_one_that_keeps_it():
    def fn(x, key, value, table, start, lengths, s):
        return vllm_whole(paged.attend(x, key, value, table, start, lengths), s)

    caches = (paged.cache("cpu", torch.bfloat16) for _ in range(2))
    graph = capture_cuda(fn, inputs()[0], *caches, *paged.batch(9, "cpu"), torch.tensor(0.37))
    (quantize,) = recognize(graph).of(Quantize)
    assert not quantize.keeps_nan
    assert quantize.reference(torch.tensor([torch.nan, 1.0]), torch.tensor(0.5)).float().tolist() == [448.0, 2.0]
    report = Report()
    PostGradPassManager(FUSE, report)(graph)
    assert report.count() == 0
    assert "makes the largest code of NaN; the fused op keeps NaN" in "\n".join(report.declined("attention_quant"))


@torch.no_grad()
def test_what_an_op_writes_reaches_a_buffer_of_the_users_too():
    """The op's result is an input of the graph: what was written is seen after the call."""
    tensors = inputs()
    kept = torch.zeros(9, paged.HEADS, paged.HEAD_DIM).to(E4M3)

    def fn(x, cos, sin, *rest):
        *batch, q, k, v, result = rest
        torch.ops._C.static_scaled_fp8_quant(result, rotated(x, cos, sin), q)
        return paged.attend(result, *batch, q, k, v, dtype=torch.bfloat16)

    (graph,) = capture(fn, *tensors, kept)
    assert "copy_.default" in print_graph(graph)
    ours, stock = WithoutCode(fn, FUSE), WithoutCode(fn, STOCK)
    first, second = torch.zeros_like(kept), torch.zeros_like(kept)
    assert torch.equal(ours(*tensors, first), stock(*tensors, second))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert first.float().abs().max() > 0
