"""Scales: every form is taken or refused with a reason, and a change in place after compilation is followed."""

import re

import pytest
import torch

import fusion_passes
from fusion_passes import PostGradPassManager, Report
from fusion_passes.testing import capture_cuda, print_graph
from tests.fusions.accuracy import check
from tests.fusions.case import Layer
from tests.fusions.cases import FIRST, each, first_with_output_scale
from tests.fusions.without_code import FUSE, STOCK, WithoutCode

first_with_scales = each(lambda case: case in FIRST and case.scales)


@each(lambda case: case.scales and case.fuses and (case in FIRST or case.strided))
@torch.no_grad()
def test_a_change_in_place_after_compilation_is_followed(rule, case):
    """By fill_, copy_, and through a view; without another compilation.  Of every way to spell the scale,
    `test_numbers.py` changes the value."""
    run = WithoutCode(case.fn)
    inputs = case.inputs(7, "cpu")
    changes = (
        lambda scale: None,
        lambda scale: scale.fill_(0.25),
        lambda scale: scale.copy_(torch.full_like(scale, 4.0)),
        lambda scale: scale.view(-1).mul_(0.125),
    )
    for change in changes:
        for i in case.scales:
            change(inputs[i])
        check(run(*inputs), case.fn(*inputs), case.reference(*inputs))
    assert len(run.after) == 1
    assert run.fused == 1


@pytest.mark.parametrize("kind", ["buffer", "parameter", "trained parameter"])
@first_with_scales
@torch.no_grad()
def test_state_of_a_module(rule, case, kind):
    """The scales are the last inputs of the first case, so they can come from the module instead."""
    layer = Layer(case, kind=kind)
    tensors = layer.tensors(7)
    run = WithoutCode(layer)
    for value in (0.25, 4.0):
        for scale in layer.scales:
            scale.fill_(value)
        full = (*tensors, *layer.scales)
        check(run(*tensors), case.fn(*full), case.reference(*full))
    assert run.fused == len(run.after) == 1


@first_with_output_scale
@torch.no_grad()
def test_python_numbers(rule, case):
    """A number that changes becomes a symbolic one in the second compilation: refused then, right always."""
    *tensors, _ = case.inputs(7, "cpu")
    run = WithoutCode(case.fn)
    for value in (0.37, 0.25, 4.0):
        outputs = run(*tensors, value)
        if run.fused == len(run.after):
            check(outputs, case.fn(*tensors, value), case.reference(*tensors, value))
    assert run.fused >= 1
    if run.fused < len(run.after):
        assert "symbolic number" in "\n".join(run.report.declined(rule))


def shaped(*shape, dtype=torch.float32):
    return torch.full(shape, 0.37).to(dtype)


HANDLED = {"0-d": shaped(), "[1]": shaped(1), "[1, 1]": shaped(1, 1)}
REFUSED = {
    "bf16": (shaped(dtype=torch.bfloat16), "bfloat16"),
    "fp16": (shaped(1, dtype=torch.float16), "float16"),
    "fp64": (shaped(1, dtype=torch.float64), "float64"),
    "integer": (shaped(1, dtype=torch.int64) + 1, "int64"),
    "two elements": (shaped(2, 1, 1), "scale has shape|broadcasts"),
}


@pytest.mark.parametrize("form", HANDLED)
@first_with_output_scale
@torch.no_grad()
def test_forms_of_one_fp32_element(rule, case, form):
    inputs = (*case.inputs(7, "cpu")[:-1], HANDLED[form])
    run = WithoutCode(case.fn)
    check(run(*inputs), case.fn(*inputs), case.reference(*inputs))
    assert run.fused == 1


@pytest.mark.parametrize("form", REFUSED)
@first_with_output_scale
@torch.no_grad()
def test_another_scale_is_refused_with_the_reason(rule, case, form):
    scale, reason = REFUSED[form]
    inputs = (*case.inputs(7, "cpu")[:-1], scale)
    run = WithoutCode(case.fn)
    assert torch.equal(run(*inputs).view(torch.uint8), WithoutCode(case.fn, STOCK)(*inputs).view(torch.uint8))
    assert run.fused == 0
    why = "\n".join(run.report.declined(rule))
    assert re.search(reason, why)
    assert "the rule failed" not in why


@first_with_output_scale
@torch.no_grad()
def test_a_scale_on_another_device_is_refused(rule, case, hopper):
    """A CPU scalar is legal beside CUDA tensors in the graph; the kernel could not read it without a copy."""
    inputs = case.inputs(8, "cpu")
    graph = capture_cuda(lambda *tensors: case.fn(*tensors, torch.rand((), device="cpu") + 1), *inputs[:-1])
    before, report = print_graph(graph), Report()
    PostGradPassManager(FUSE, report)(graph)
    assert report.count() == 0
    assert print_graph(graph) == before
    assert "make the scale a buffer" in "\n".join(report.declined(rule))


@first_with_scales
@torch.no_grad()
def test_frozen_weights_leave_the_scale_alone(rule, case):
    """`freezing` makes constants of buffers: the scale is then fixed on purpose, the fusion is as before."""
    layer = Layer(case).eval()
    tensors = layer.tensors(7)
    report = Report()
    compiled = fusion_passes.compile(layer, FUSE, report=report, options={"freezing": True})
    check(compiled(*tensors), layer(*tensors), case.reference(*tensors, *layer.scales))
    assert report.count(rule=rule) == 1


@pytest.mark.parametrize(("scale", "same"), [(1.2e-38, True), (1.0, True), (8.5e37, True), (1e-39, False)])
@torch.no_grad()
def test_a_live_scale_with_an_infinite_reciprocal(scale, same):
    """What `docs/fusions.md` says of it: dividing gives the codes, multiplying NaN and the largest; the fused op, which
    may do either, divides on the CPU."""

    def quantized(by):
        def fn(q, k, v, s):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
            return by(out, s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

        return fn

    divide, multiply = quantized(lambda x, s: x / s), quantized(lambda x, s: x * (1 / s))
    q, k = torch.randn(2, 1, 4, 8, 16).bfloat16()
    v = torch.zeros(1, 4, 8, 16).bfloat16()
    v[..., 8:] = 20 * scale if scale < 1.0 else scale / 16  # their sum must not overflow
    inputs = q, k, v, torch.tensor(scale)
    fused = WithoutCode(multiply)
    codes, stock, ours = (fn(*inputs).float() for fn in (divide, multiply, fused))
    assert fused.fused == 1
    assert ((codes[..., :8] == 0) & (codes[..., 8:] > 0) & (codes[..., 8:] < 30)).all()
    torch.testing.assert_close(ours, codes, rtol=0.07, atol=0.0)
    if same:
        torch.testing.assert_close(stock, codes, rtol=0.07, atol=0.0)
    else:
        assert stock[..., :8].isnan().all()
        assert (stock[..., 8:] == 448.0).all()
