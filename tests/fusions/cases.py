"""The cases of every rule.  A new rule gets all tests of this folder from its row here."""

import pytest

from fusion_passes.fusions.builtin import FUSIONS
from tests.fusions import (
    attention_quant_cases,
    paged_attention_quant_cases,
    query_quant_cases,
    rope_quant_kv_write_cases,
)
from tests.fusions.case import STATIC, Case

CASES: dict[str, tuple[Case, ...]] = {
    "attention_quant": attention_quant_cases.CASES + paged_attention_quant_cases.CASES,
    "query_quant": query_quant_cases.CASES,
    "rope_quant_kv_write": rope_quant_kv_write_cases.CASES,
}
FAMILIES: dict[str, dict[str, frozenset[str]]] = {
    "attention_quant": {"": STATIC, "paged": STATIC, "groups": frozenset({"plain", "opaque"})},
    "query_quant": {"": frozenset({"inside", "opaque"})},
    "rope_quant_kv_write": {"": STATIC},
}
"""Of each rule, its kinds of place, and the ways to spell the quantisation of each."""
LARGE: dict[str, tuple[Case, ...]] = {
    "attention_quant": attention_quant_cases.LARGE,
    "rope_quant_kv_write": rope_quant_kv_write_cases.LARGE,
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


FIRST = {
    next(case for case in CASES[rule] if case.fuses and case.kind == kind)
    for rule, kinds in FAMILIES.items()
    for kind in kinds
}

fused = each(lambda case: case.fuses)
declined = each(lambda case: not case.fuses)
dynamic = each(lambda case: case.fuses and case.dynamic)
scaled = each(lambda case: case.fuses and case.scales)
first_of_each = each(lambda case: case in FIRST)
first_with_output_scale = each(lambda case: case in FIRST and case.output_scale)
varied = each(lambda case: case.fuses and (case in FIRST or case.strided))


def place_that_is_refused(rule: str) -> Case:
    """One that is found, and declined for what else the graph does."""
    return next(case for case in CASES[rule] if case.place)


def op_of(rule: str, case: Case) -> str:
    """What the op is called that a case becomes."""
    return f"fusion_passes.{case.becomes or rule}"
