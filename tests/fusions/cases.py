"""The cases of every rule.  A new rule gets all tests of this folder from its row here."""

import pytest

from fusion_passes.fusions import FUSIONS
from tests.fusions import attention_quant_cases
from tests.fusions.case import Case

CASES: dict[str, tuple[Case, ...]] = {
    "attention_quant": attention_quant_cases.CASES,
}
LARGE: dict[str, tuple[Case, ...]] = {
    "attention_quant": attention_quant_cases.LARGE,
}
"""Of the size of real models, which only a GPU takes in a short time."""


def each(condition=lambda case: True, cases=CASES):
    """A test for every case of every rule for which `condition` holds, as the arguments `rule` and `case`."""
    params = [
        pytest.param(rule.name, case, id=f"{rule.name}: {case.name}")
        for rule in FUSIONS
        for case in cases.get(rule.name, ())
        if condition(case)
    ]
    return pytest.mark.parametrize(("rule", "case"), params)


FIRST = {next(case for case in CASES[rule.name] if case.fuses) for rule in FUSIONS if rule.name in CASES}

fused = each(lambda case: case.fuses)
declined = each(lambda case: not case.fuses)
dynamic = each(lambda case: case.fuses and case.dynamic)
scaled = each(lambda case: case.fuses and case.scales)
first_of_each = each(lambda case: case in FIRST)
varied = each(lambda case: case.fuses and (case in FIRST or case.strided))
