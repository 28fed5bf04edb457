"""Right numbers: FP8 codes of the fused graph against the unfused one and an fp32 reference."""

import torch

from fusion_passes.quant import FP8_DTYPES
from tests.fusions.accuracy import check, pairs
from tests.fusions.cases import each, fused, scaled
from tests.fusions.without_code import FUSE, STOCK, WithoutCode

SCALES = (0.25, 4.0)


@torch.no_grad()
def run_both(rule, case, inputs):
    """The outputs of the fused and of the unfused graph."""
    fused, stock = WithoutCode(case.fn, FUSE), WithoutCode(case.fn, STOCK)
    outputs = fused(*inputs), stock(*inputs)
    assert fused.report.count(rule=rule) >= 1, fused.report
    assert stock.before == stock.after
    return outputs


@fused
@torch.no_grad()
def test_codes_are_those_of_the_reference(rule, case):
    for tokens in (7, 33):
        inputs = case.inputs(tokens, "cpu")
        check(*run_both(rule, case, inputs), case.reference(*inputs))
        torch.compiler.reset()


@scaled
@torch.no_grad()
def test_each_scale_is_applied_once_and_not_inverted(rule, case):
    run = WithoutCode(case.fn)
    seen = []
    for value in SCALES:
        inputs = case.with_scale(value, 7, "cpu")
        exact = case.reference(*inputs)
        outputs = run(*inputs)
        check(outputs, case.fn(*inputs), exact)
        seen.append(outputs)
    assert run.fused >= 1
    assert any(not torch.equal(a, b) for a, b, _ in pairs(*seen, seen[0])), "the scale changes nothing"


@each(lambda case: case.fuses and case.scales and case.output_scale)
@torch.no_grad()
def test_out_of_range_values_saturate(rule, case):
    run, tried = WithoutCode(case.fn), 0
    for value in (1e-6, 1e7):  # a scale multiplies or divides
        inputs = case.inputs(7, "cpu")
        inputs[-1].fill_(value)
        outputs, stock = run(*inputs), case.fn(*inputs)
        for a, b, want in pairs(outputs, stock, case.reference(*inputs)):
            if a.dtype in FP8_DTYPES and want.abs().max() > torch.finfo(a.dtype).max:
                tried += 1
                assert not a.isnan().any()
                assert a.float().abs().max() == torch.finfo(a.dtype).max
                check(a, b, want)
    assert run.fused >= 1
    assert tried, "neither scale is out of range"


@fused
@torch.no_grad()
def test_nan_stays_nan(rule, case):
    """In one input after the other: NaN comes out where the reference has it, and nowhere else."""
    run = WithoutCode(case.fn)
    for i in range(len(case.inputs(7, "cpu"))):
        inputs = [*case.inputs(7, "cpu")]
        if inputs[i].dtype.is_floating_point:
            inputs[i] = inputs[i].clone()
            inputs[i][(-1,) * inputs[i].ndim] = torch.nan
            outputs = run(*inputs)
            for a, _, want in pairs(outputs, outputs, case.reference(*inputs)):
                assert torch.equal(a.isnan(), want.isnan())
