"""The cases of every rule: a new rule gets all tests of this folder from its file of cases.

Such a file has RULE, the rule's name; CASES; FAMILIES, its kinds of place with the ways to spell the quantization of
each; and maybe LARGE: cases of the size of real models, which only a GPU takes in a short time.
"""

import importlib
from pathlib import Path

import pytest

from fusion_passes.fusions.builtin import FUSIONS
from tests.fusions.case import Case

_FILES = sorted(Path(__file__).parent.glob("*_cases.py"))
_MODULES = [
    module for file in _FILES if hasattr(module := importlib.import_module(f"tests.fusions.{file.stem}"), "RULE")
]


def _of(rule: str, name: str) -> tuple:
    return tuple(item for module in _MODULES if rule == module.RULE for item in getattr(module, name, ()))


CASES: dict[str, tuple[Case, ...]] = {rule.name: _of(rule.name, "CASES") for rule in FUSIONS}
FAMILIES: dict[str, dict[str, frozenset[str]]] = {
    rule.name: {kind: ways for module in _MODULES if rule.name == module.RULE for kind, ways in module.FAMILIES.items()}
    for rule in FUSIONS
}
LARGE: dict[str, tuple[Case, ...]] = {rule.name: _of(rule.name, "LARGE") for rule in FUSIONS}


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
