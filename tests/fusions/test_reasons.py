"""Every reason that the code can give has a program that shows it, and what the report says there is that sentence."""

import re

import pytest
import torch

from fusion_passes.ops.quantize import quantize_fp8
from tests.fusions.reason_programs import (
    BASES,
    QUERY,
    SHOWN,
    asked_for_a_size,
    dense,
    flat,
    over_cache,
    shared_position,
    step,
)
from tests.fusions.reason_sentences import refusals, sentences
from tests.fusions.refusal_programs import REFUSED, TAKEN, call


@pytest.mark.parametrize(("sentence", "program"), [pytest.param(*shown, id=shown[0][:60]) for shown in SHOWN])
def test_the_program_has_this_reason(sentence, program, hopper):
    assert re.search(re.escape(sentence).replace("…", ".+"), program())


@pytest.mark.parametrize("base", BASES)
def test_the_programs_fuse_but_for_what_is_changed(base, hopper):
    assert "1 fused" in BASES[base]()


def test_every_reason_in_the_code_has_a_program():
    """A new reason comes with its program."""
    assert [s for s in sentences() if not any(s.is_shown_by(sentence) for sentence, _ in SHOWN)] == []


def test_who_asks_for_a_size_does_not_read(hopper):
    """It gets the size from an input of the fusion, and nothing of what is fused stays."""
    told, graph = asked_for_a_size(1)
    assert "1 fused" in told
    (size,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert size.args[0].op == "placeholder"
    assert size.args[0].meta["val"].shape[size.args[1]] == 24
    assert not any("scaled_dot_product" in str(node.target) for node in graph.nodes)


def test_one_kv_head_with_one_position_for_all_tokens(hopper):
    """Neither says which dimension counts heads, but the cache does."""
    assert "1 fused" in step(shared_position, kv_heads=1)


def test_a_cast_and_a_view_before_an_op_that_quantizes(hopper):
    assert "1 fused" in dense(lambda o, s: quantize_fp8(flat(o).float().view(-1, 64), s, torch.float8_e4m3fn))


def test_a_number_for_a_bound_of_scales_may_be_whole(hopper):
    def bounded(o):
        options = {"dtype": torch.float8_e4m3fn, "granularity": "group", "group_size": 32, "scale_upper_bound": 1}
        return torch.ops.fusion_passes.quantize_fp8_dynamic(o, **options)[0]

    assert "a scale is at most 1 in the graph" in over_cache(bounded)


def test_an_op_whose_formula_is_known_is_not_called_unknown(hopper):
    """Where another thing stands in the way of it."""
    unknown = "of which the formula is not known"
    known = [program for sentence, program in QUERY if sentence.startswith(("the op ", "the scale is on"))]
    assert len(known) >= 3
    assert not any(unknown in program() for program in known)


@pytest.mark.parametrize(("sentence", "program"), [pytest.param(*shown, id=shown[0][:60]) for shown in REFUSED])
def test_the_call_is_refused_for_this_reason(sentence, program):
    assert re.fullmatch(re.escape(sentence).replace("…", ".+"), program())


@pytest.mark.parametrize("op", TAKEN)
def test_the_calls_are_taken_but_for_what_is_changed(op):
    call(op)


def test_every_refusal_of_an_op_has_a_call():
    """Limits of kernels that a report names too are shown by their programs there."""
    shown = [sentence for sentence, _ in (*REFUSED, *SHOWN)]
    assert [s for s in refusals() if not any(s.is_shown_by(sentence) for sentence in shown)] == []
