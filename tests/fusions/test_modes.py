"""Training, `no_grad`, `inference_mode`, autocast: right in each, fused where it is inference."""

import contextlib

import pytest
import torch

import fusion_passes
from fusion_passes import Report
from tests.fusions.accuracy import check
from tests.fusions.cases import FIRST, each, first_of_each
from tests.fusions.without_code import FUSE, STOCK, WithoutCode

INFERENCE = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "no context": contextlib.nullcontext}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("context", INFERENCE)
@first_of_each
def test_fused_in_inference(rule, case, context, dynamic):
    """Without a context too, where nothing requires a gradient."""
    if dynamic and not case.all_symbolic:
        pytest.skip("every size is symbolic, and this case needs to know some")
    run = WithoutCode(case.fn, dynamic=dynamic)
    inputs = case.inputs(7, "cpu")
    with INFERENCE[context]():
        check(run(*inputs), case.fn(*inputs), case.reference(*inputs))
    assert run.fused == 1
    assert run.inference == [True]


def with_gradients(case):
    return [x.requires_grad_() if x.dtype.is_floating_point and x.ndim > 1 else x for x in case.inputs(7, "cpu")]


differentiable = each(lambda case: case in FIRST and case.differentiable)


@pytest.mark.parametrize("dynamic", [None, True])
@differentiable
def test_training_is_the_stock_graph(rule, case, dynamic):
    """Outputs and gradients are those of stock torch.compile, bit for bit."""

    def fn(*inputs):
        return case.fn(*inputs), sum(x.float().square().sum() for x in inputs if x.requires_grad)

    results = []
    for config in (FUSE, STOCK):
        torch.manual_seed(0)
        inputs = with_gradients(case)
        run = WithoutCode(fn, config, dynamic=dynamic)
        codes, loss = run(*inputs)
        loss.backward()
        results.append((codes, [x.grad for x in inputs if x.requires_grad], run))
    (codes, grads, ours), (stock_codes, stock_grads, stock) = results
    assert False in ours.inference
    assert ours.before == stock.before
    for x, y in zip(grads, stock_grads, strict=True):
        assert torch.equal(x, y)
    if ours.fused:  # the codes have no gradient, so they may be
        assert not codes.requires_grad
        detached = [x.detach() for x in inputs]
        check(codes.detach(), stock_codes.detach(), case.reference(*detached))
    else:
        assert torch.equal(codes.detach().view(torch.uint8), stock_codes.detach().view(torch.uint8))


@each(lambda case: case.fuses and case.differentiable and (case in FIRST or case.strided))
def test_gradients_through_the_attention(rule, case):
    """A loss on the values that are quantized: saved for the backward, so they are used twice and nothing is fused."""

    def fn(*inputs):
        out = torch.utils._pytree.tree_leaves(case.fn(*inputs))[0]
        return out.float()

    results = []
    for config in (FUSE, STOCK):
        torch.manual_seed(0)
        inputs = with_gradients(case)
        run = WithoutCode(fn, config)
        out = run(*inputs)
        if out.requires_grad:
            out.sum().backward()
        results.append((out.detach(), [x.grad for x in inputs if x.requires_grad], run.fused))
    (out, grads, fused), (stock_out, stock_grads, _) = results
    for x, y in zip(grads, stock_grads, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)
    assert torch.equal(out, stock_out)
    assert not fused or all(x is None for x in grads), "the fused op has no gradient"


@first_of_each
@torch.no_grad()
def test_autocast(rule, case):
    inputs = case.inputs(7, "cpu")
    run, stock = WithoutCode(case.fn), WithoutCode(case.fn, STOCK)
    exact = case.reference(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run(*inputs), stock(*inputs)
    check(*outputs, exact)
    assert run.before == stock.before
    assert run.fused == 1


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
@first_of_each
@torch.no_grad()
def test_compiled_to_code_and_run(rule, case, mode):
    """End to end, with the code that Inductor generates."""
    inputs, report = case.inputs(7, "cpu"), Report()
    compiled = fusion_passes.compile(case.fn, FUSE, report=report, mode=mode, fullgraph=True)
    check(compiled(*inputs), case.fn(*inputs), case.reference(*inputs))
    assert report.count(rule=rule) == 1


@each(lambda case: case.fuses and case.name in ("packed", "paged: strided"))
@torch.no_grad()
def test_strided_inputs_compiled_to_code_and_run(rule, case):
    inputs, report = case.inputs(7, "cpu"), Report()
    compiled = fusion_passes.compile(case.fn, FUSE, report=report, dynamic=True)
    check(compiled(*inputs), case.fn(*inputs), case.reference(*inputs))
    assert report.count(rule=rule) == 1
