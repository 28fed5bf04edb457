"""Every attribute of every op of every spelling, changed: what is still read must be what the graph computes.

Sizes are alike on purpose, so that a dimension taken for another one fits.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.idioms import recognize, rope
from fusion_passes.idioms.spellings import attention, group_quantize, quantize, rms_norm
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.testing import capture, capture_cuda
from tests.idioms.perturbed import Program, judged, path, perturbations, wrong

E4M3 = torch.float8_e4m3fn
SIZE = 4

pytestmark = pytest.mark.filterwarnings("ignore")  # of ops that are called in odd ways


def assert_read_right(graph, least):
    """Nothing that is read in the graph, or in what becomes of it by one change, is something else than it computes.

    least: of the changed programs, how many idioms are to be read in them: so that the test is no empty one."""
    program = Program.captured(graph)
    found, faults = judged(program)
    assert found
    assert faults == []
    read = 0
    for what, made in perturbations(program, path(program)):
        for changed in made():
            found, of_change = judged(changed)
            faults += [f"{what}: {fault}" for fault in of_change]
            read += found
    assert faults == []
    assert read >= least


def qkv(head_dim=SIZE):
    q, k = 1.5 * torch.randn(SIZE, SIZE, SIZE, head_dim), 1.5 * torch.randn(SIZE, 2, SIZE, head_dim)
    return q, k, torch.randn(SIZE, 2, SIZE, head_dim), torch.randn(SIZE, SIZE)


@pytest.mark.parametrize("name", attention.SPELLINGS)
def test_attention(name):
    (graph,) = capture(attention.SPELLINGS[name], *qkv())
    assert_read_right(graph, 30)


@pytest.mark.parametrize("backend", [pytest.param("math", marks=pytest.mark.slow), "cudnn"])
@pytest.mark.parametrize("name", ["sdpa, bool mask", "sdpa, lower triangle as mask", "causal masked_fill by hand"])
def test_attention_on_cuda(name, backend):
    assert_read_right(capture_cuda(attention.SPELLINGS[name], *qkv(head_dim=8), backend=backend), 30)


def test_attention_with_a_padded_head_dimension():
    q, *_ = qkv(head_dim=6)
    graph = capture_cuda(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, q + 1, q + 2, backend="flash")
    assert_read_right(graph, 20)


def empty_rows_by_all(scores):
    return (scores == -math.inf).all(-1, keepdim=True)


def empty_rows_by_any(scores):
    return ~(scores != -math.inf).any(-1, keepdim=True)


def empty_rows_by_a_negation(scores):
    return ~(~(scores == -math.inf)).any(-1)[..., None]


@pytest.mark.parametrize("empty", [empty_rows_by_all, empty_rows_by_any, empty_rows_by_a_negation])
def test_attention_with_empty_rows(empty):
    def fn(q, k, v, mask):
        scores = q @ k.transpose(-1, -2) * 0.3 + mask
        return torch.where(empty(scores), 0.0, torch.softmax(scores, -1)) @ v

    q, _, _, mask = qkv()
    mask[2] = -math.inf
    (graph,) = capture(fn, q, q.flip(0), q.flip(1), mask)
    program = Program.captured(graph)
    if list(recognize(graph)):
        assert_read_right(graph, 100)
    else:
        assert empty is empty_rows_by_any  # `ne` is not read
        assert wrong(program) == []


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("name", quantize.SPELLINGS)
def test_quantize(name, dtype):
    x = (torch.randn(SIZE, SIZE) * 40).to(dtype)
    (graph,) = capture(lambda x, s: quantize.SPELLINGS[name](x, s, E4M3), x, torch.tensor(0.37))
    assert_read_right(graph, 20)


def test_quantize_in_one_op():
    (graph,) = capture(lambda x, s: quantize_fp8(x, s, E4M3), torch.randn(SIZE, SIZE) * 40, torch.tensor(0.37))
    assert_read_right(graph, 10)


@pytest.mark.parametrize("name", group_quantize.SPELLINGS)
def test_group_quantize(name):
    (graph,) = capture(lambda x: group_quantize.SPELLINGS[name](x, E4M3), torch.randn(32, 128) * 3)
    assert_read_right(graph, 40)


@pytest.mark.parametrize("name", rope.SPELLINGS)
def test_rope(name):
    half = 2 if name.startswith("the first") else SIZE
    x = torch.randn(SIZE, SIZE, 2 * SIZE)
    (graph,) = capture(rope.SPELLINGS[name], x, torch.randn(SIZE, half), torch.randn(SIZE, half))
    assert_read_right(graph, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", rms_norm.SPELLINGS)
def test_rms_norm(name, dtype):
    x, weight = (torch.randn(SIZE, SIZE) * 3).to(dtype), torch.randn(SIZE).to(dtype)
    (graph,) = capture(rms_norm.SPELLINGS[name], x, weight)
    assert_read_right(graph, 20)
