"""Right numbers: FP8 codes of the fused graph against the unfused one and an fp32 reference.

The graphs are captured once and run op by op; `test_modes.py` compiles them to code."""

import torch

from fusion_passes.quant import FP8_DTYPES
from tests.fusions.accuracy import check, pairs
from tests.fusions.captured import rewritten
from tests.fusions.cases import FIRST, each, fused, scaled
from tests.fusions.without_code import STOCK

SCALES = (0.25, 4.0)


@fused
@torch.no_grad()
def test_codes_are_those_of_the_reference(rule, case):
    """With more tokens too, where the case stands for others; the sizes are `test_shapes.py`'s matter."""
    for tokens in (7, 33) if case in FIRST or case.strided else (7,):
        inputs = case.inputs(tokens, "cpu")
        run, report = rewritten(case, tokens)
        stock, unchanged = rewritten(case, tokens, STOCK)
        assert report.count(rule=rule) >= 1, report
        assert unchanged.count() == 0
        check(run(*inputs), stock(*inputs), case.reference(*inputs))


@scaled
@torch.no_grad()
def test_each_scale_is_applied_once_and_not_inverted(rule, case):
    run, report = rewritten(case, 7)
    seen = []
    for value in SCALES:
        inputs = case.with_scale(value, 7, "cpu")
        exact = case.reference(*inputs)
        outputs = run(*inputs)
        check(outputs, case.fn(*inputs), exact)
        seen.append(outputs)
    assert report.count(rule=rule) >= 1, report
    assert any(not torch.equal(a, b) for a, b, _ in pairs(*seen, seen[0])), "the scale changes nothing"


@each(lambda case: case.fuses and case.scales and case.output_scale)
@torch.no_grad()
def test_out_of_range_values_saturate(rule, case):
    (run, report), tried = rewritten(case, 7), 0
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
    assert report.count(rule=rule) >= 1, report
    assert tried, "neither scale is out of range"


@fused
@torch.no_grad()
def test_nan_stays_nan(rule, case):
    """In one input after the other: NaN comes out where the reference has it, and nowhere else."""
    run, report = rewritten(case, 7)
    assert report.count(rule=rule) >= 1, report
    for i in range(len(case.inputs(7, "cpu"))):
        inputs = [*case.inputs(7, "cpu")]
        if inputs[i].dtype.is_floating_point:
            inputs[i] = inputs[i].clone()
            inputs[i][(-1,) * inputs[i].ndim] = torch.nan
            outputs = run(*inputs)
            for a, _, want in pairs(outputs, outputs, case.reference(*inputs)):
                assert torch.equal(a.isnan(), want.isnan())
