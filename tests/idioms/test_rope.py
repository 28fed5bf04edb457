"""Rotary embedding: every spelling in every dtype, and what must not pass for one."""

import time

import pytest
import torch

from fusion_passes.graph import region
from fusion_passes.idioms import NearMiss, rope
from fusion_passes.idioms.rope import SPELLINGS, Rope
from fusion_passes.testing import capture, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS, HEADS, HEAD_DIM = 6, 3, 32

pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")


def inputs(name, dtype, tokens=TOKENS, heads=HEADS):
    """x as a slice of a projection, and unlike angles, so that no two columns are the same."""
    half = 8 if name.startswith("the first") else HEAD_DIM // 2
    x = torch.randn(tokens, (heads + 1) * HEAD_DIM).to(dtype)[:, HEAD_DIM:].unflatten(-1, (heads, HEAD_DIM))
    return x, torch.randn(tokens, half).to(dtype), torch.randn(tokens, half).to(dtype)


def found(graph):
    """The rotary embeddings, in graph order."""
    ropes = list(rope.recognize(graph))
    assert all(isinstance(r, Rope) for r in ropes), [str(r) for r in ropes]
    return sorted(ropes, key=lambda r: r.output)


def values(graph, nodes):
    """The values of some nodes of a captured graph."""
    output = graph.output_node()
    old = output.args
    output.args = (tuple(nodes),)
    results = run(graph)
    output.args = old
    return results


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    cases = [inputs(name, dtype) for dtype in (BF16, FP16, FP32)]
    (graph,) = capture(lambda tensors: [SPELLINGS[name](*x) for x in tensors], cases)
    ropes = found(graph)
    assert len(ropes) == len(cases)
    for r, case, out in zip(ropes, cases, run(graph), strict=True):
        assert r.rotary_dim == 2 * case[1].shape[-1]
        assert r.interleaved == ("neighbours" in name or "every_two" in name)
        read = values(graph, r.inputs)
        (got,) = values(graph, [r.output])
        error = torch.finfo(got.dtype).eps
        torch.testing.assert_close(r.reference(*read), got.float(), rtol=4 * error, atol=4 * error)
        assert got.numel() == out.numel()
        assert r.x.meta["val"].shape == r.output.meta["val"].shape


@pytest.mark.parametrize("name", SPELLINGS)
def test_dynamic_tokens_and_one_head(name):
    """With one head the tables have the shape of x."""
    cases = [inputs(name, BF16, heads=heads) for heads in (HEADS, 1)]
    marks = [(tensor, 0) for case in cases for tensor in case]
    (graph,) = capture(lambda cases: [SPELLINGS[name](*case) for case in cases], cases, mark_dynamic=marks)
    several, one = found(graph)
    for r, heads in ((several, HEADS), (one, 1)):
        assert heads in r.x.meta["val"].shape
        assert "index" not in str(r.x.target)
        assert r.cos.source is not r.x


def turned_back(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), -1)


def last_dimensions(x, cos, sin):
    passed, x1, x2 = x.split([HEAD_DIM - 16, 8, 8], -1)
    cos, sin = cos[..., :8], sin[..., :8]
    return torch.cat((passed, x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def columns_backwards(x, cos, sin):
    cos = torch.cat((cos[..., 8:], cos[..., :8]), -1)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def other_pairs(x, cos, sin):
    a, b, c, d = x.chunk(4, -1)
    cos, c2, sin, s2 = (y for t in (cos, sin) for y in t.chunk(2, -1))
    return torch.cat((a * cos - b * sin, b * cos + a * sin, c * c2 - d * s2, d * c2 + c * s2), -1)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (turned_back, "the other way round"),
        (last_dimensions, "not the first"),
        (columns_backwards, "the columns of cos"),
        (other_pairs, "a pair is neither"),
    ],
)
def test_what_is_told_apart(fn, reason):
    x, cos, sin = inputs("", FP32)
    (graph,) = capture(lambda x, cos, sin: fn(x, cos[:, None], sin[:, None]), x, cos, sin)
    (miss,) = rope.recognize(graph)
    assert isinstance(miss, NearMiss)
    assert reason in miss.reason


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, a, b: x * a + x.flip(-1) * b,
        lambda x, a, b: x * a + x * b,
        lambda x, a, b: torch.cat((x[..., 16:], x[..., :16]), -1) + x,
        lambda x, a, b: torch.cat((x[..., :16] * a[..., :16], x[..., 16:] + b[..., 16:]), -1),
        lambda x, a, b: x[..., :16] * a[..., :16] + x[..., 16:] * b[..., 16:],
        lambda x, a, b: torch.cat((x[..., :16] * 2.0 - x[..., 16:], x[..., 16:] * 2.0 + x[..., :16]), -1),
    ],
)
def test_what_is_none(fn):
    x, _, _ = inputs("", FP32)
    (graph,) = capture(fn, x, torch.randn(TOKENS, 1, HEAD_DIM), torch.randn(TOKENS, 1, HEAD_DIM))
    assert list(rope.recognize(graph)) == []


@pytest.mark.timed
@pytest.mark.parametrize("last", [2.0, 3.0])
def test_tables_are_compared_once_for_all_the_ways_through_the_graph(last):
    """Two sums of 24 steps, each of which reads the one before twice: 2^24 ways to the start."""
    graph = torch.fx.Graph()
    start = graph.placeholder("x")
    tables = []
    for factor in (2.0, last):
        node = graph.call_function(torch.ops.aten.mul.Tensor, (start, factor))
        for _ in range(24):
            node = graph.call_function(torch.ops.aten.add.Tensor, (node, node))
        tables.append(rope.Table(node, 0, 8))
    before = time.process_time()
    assert tables[0].same(tables[1]) == (last == 2.0)
    assert time.process_time() - before < 0.3


def heads_of_three(qkv, cos, sin):
    q, k, v = qkv.split(HEAD_DIM, -1)  # side by side in each head, as in GPT-NeoX
    return *(SPELLINGS["rotate_half"](x, cos, sin) for x in (q, k)), v


def part_of_a_head(q, cos, sin):
    passed, x = q.split([2 * HEAD_DIM, HEAD_DIM], -1)
    return SPELLINGS["neighbours"](x, cos, sin), passed


def some_heads(qkv, cos, sin):
    q, k, _ = qkv.split([1, 1, 1], 1)
    return [SPELLINGS["halves"](x, cos, sin) for x in (q, k)]


@pytest.mark.parametrize(("fn", "count"), [(heads_of_three, 2), (part_of_a_head, 1), (some_heads, 2)])
def test_the_split_that_x_comes_from_is_none_of_its_nodes(fn, count):
    """It gives other tensors too, which nothing of a rotation computes."""
    _, cos, sin = inputs("", FP32)
    (graph,) = capture(fn, torch.randn(TOKENS, 3, 3 * HEAD_DIM if fn is not some_heads else HEAD_DIM), cos, sin)
    ropes = found(graph)
    assert len(ropes) == count
    for r in ropes:
        assert r.x not in r.nodes
        above = {r.x, *r.x.all_input_nodes}
        assert not above & r.nodes
        assert not any("split" in str(node.target) and r.x in node.users for node in r.nodes)
        (want,) = values(graph, [r.output])
        torch.testing.assert_close(r.reference(*values(graph, r.inputs)), want.float(), rtol=1e-5, atol=1e-5)


def test_layers_of_a_model_share_one_run():
    """Sixteen layers, each with a projection that is split into query, key and value: what is turned is that part."""

    def fn(x, cos, sin):
        for layer in range(16):
            q, k, v = (x * (layer + 2)).split([2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], -1)
            q, k = (SPELLINGS["rotate_half"](y.unflatten(-1, (-1, HEAD_DIM)), cos, sin).flatten(1) for y in (q, k))
            x = torch.cat((q, k, v), -1)
        return x

    _, cos, sin = inputs("", FP32)
    (graph,) = capture(fn, torch.randn(TOKENS, 4 * HEAD_DIM), cos, sin)
    region.run.cache_clear()
    rope._rotation.cache_clear()
    ropes = found(graph)
    assert len(ropes) == 32
    assert region.run.cache_info().misses == 1
    splits = graph.find_nodes(op="call_function", target=torch.ops.aten.split_with_sizes.default)
    assert len(splits) == 16
    assert not any(set(splits) & r.nodes for r in ropes)
