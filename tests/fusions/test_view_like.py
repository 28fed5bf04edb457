"""What takes all of a tensor counts as a view in every rule: `x[0]` of one row, a split into one part."""

import pytest
import torch
import torch.nn.functional as F

from fusion_passes import PostGradPassManager, Report
from fusion_passes.graph.read import through_views
from fusion_passes.ops import kv_cache_write
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.testing import capture, run, same_codes
from tests.fusions import paged_cases as paged
from tests.fusions import rope_quant_kv_write_cases as rope
from tests.fusions.attention_quant_cases import bsh, divide
from tests.fusions.paged_attention_quant_cases import in_groups
from tests.fusions.without_code import FUSE

E4M3 = torch.float8_e4m3fn

OF_ONE = {
    "x[0]": lambda x: x[0],
    "x[-1]": lambda x: x[-1],
    "unbind": lambda x: x.unbind(0)[0],
    "unbind, [-1]": lambda x: x.unbind(0)[-1],
    "squeeze": lambda x: x.squeeze(0),
    "squeeze of several": lambda x: x.squeeze((0,)),
    "a slice": lambda x: x[:1].flatten(0, 1),
    "index behind": lambda x: x.transpose(0, 1)[:, 0],
}
"""[1, tokens, …] -> [tokens, …]"""

OF_ALL = {
    "chunk": lambda x: x.chunk(1, -1)[0],
    "split": lambda x: x.split(x.shape[-1], -1)[0],
    "split of more": lambda x: x.split(1000, -1)[0],
    "split_with_sizes": lambda x: x.split([x.shape[0]])[0],
    "tensor_split": lambda x: x.tensor_split(1)[0],
    "narrow": lambda x: x.narrow(-1, 0, x.shape[-1]),
    "expand": lambda x: x.expand(1, *x.shape).squeeze(0),
}
"""[tokens, …] -> the same."""

WAYS = {**OF_ONE, **{name: lambda x, way=way: way(x.squeeze(0)) for name, way in OF_ALL.items()}}


def rewritten(fn, *inputs, **options):
    """(report, outputs of the graph before, and after)."""
    report = Report()
    with torch.no_grad():
        (graph,) = capture(fn, *inputs, **options)
        before = torch.utils._pytree.tree_leaves(run(graph))
    PostGradPassManager(FUSE, report)(graph)
    return report, before, torch.utils._pytree.tree_leaves(run(graph))


def assert_fused(rule, fn, *inputs):
    report, before, after = rewritten(fn, *inputs)
    assert report.count(rule=rule) == 1, list(report.declined(rule))
    for x, y in zip(before, after, strict=True):
        assert x.stride() == y.stride()
        if x.dtype is E4M3:
            same_codes(x, y)
        else:
            torch.testing.assert_close(x, y, rtol=0.01, atol=1e-6)  # bf16 before it is fused


def qkv(batch=1):
    return tuple(torch.randn(batch, 4, 6, 16).bfloat16() for _ in range(3))


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_attention_quant(name, behind):
    def fn(q, k, v, scale):
        out = bsh(F.scaled_dot_product_attention(q, k, v))
        return WAYS[name](divide(out, scale)) if behind else divide(WAYS[name](out), scale)

    assert_fused("attention_quant", fn, *qkv(), torch.tensor(0.3))


@pytest.mark.parametrize("name", WAYS)
def test_paged_attention(name):
    def fn(*tensors):
        *arguments, scale = tensors
        return divide(WAYS[name](paged.attend(*arguments).flatten(1)[None]), scale)

    def groups(*tensors):
        return in_groups(WAYS[name](paged.attend(*tensors).flatten(1)[None]), 32)

    query = paged.random(7, paged.HEADS, paged.HEAD_DIM, device="cpu")
    caches = (paged.cache("cpu", torch.bfloat16, "HND", 1.0) for _ in range(2))
    arguments = (query, *caches, *paged.batch(7, "cpu"))
    assert_fused("attention_quant", fn, *arguments, torch.tensor(0.3))
    if "behind" not in name:
        assert_fused("attention_quant", groups, *arguments)


@pytest.mark.parametrize("name", WAYS)
def test_query_quant(name):
    def fn(x, cos, sin, *rest):
        *batch, q, k, v = rest
        codes = WAYS[name](quantize_fp8(x[None].relu(), q))
        return paged.attend(codes, *batch, q, k, v, dtype=torch.bfloat16)

    from tests.fusions.test_query_quant import inputs

    assert_fused("query_quant", fn, *inputs())


@pytest.mark.parametrize("name", WAYS)
def test_rope_quant_kv_write(name):
    turn, way = rope.batched, WAYS[name]

    def fn(packed, cos, sin, key_cache, value_cache, slots, k_scale, v_scale, q_scale):
        q, k, v = rope.apart(packed, rope.HEADS, rope.KV_HEADS, rope.HEAD_DIM)
        cos, sin = (way(x[None]) for x in (cos, sin))
        kv_cache_write(way(turn(k, cos, sin)[None]), way(v[None]), key_cache, value_cache, slots, k_scale, v_scale)
        codes = way(rope.divide(way(turn(q, cos, sin)[None]), q_scale)[None])
        return codes, rope.read_back(key_cache, slots), rope.read_back(value_cache, slots)

    report, _, _ = rewritten(fn, *rope.inputs()(7, "cpu"))
    assert report.count(rule="rope_quant_kv_write") == 1, list(report.declined("rope_quant_kv_write"))


@pytest.mark.parametrize("name", ["x[0]", "x[-1]"])
def test_what_may_take_a_part_is_no_view(name):
    """Of a batch whose size is not known, or is two."""

    def fn(q, k, v, scale):
        return divide(WAYS[name](bsh(F.scaled_dot_product_attention(q, k, v))), scale)

    for tensors, dynamic in ((qkv(batch=2), False), (qkv(batch=3), True)):
        marks = [(x, 0) for x in tensors] if dynamic else []
        report, before, after = rewritten(fn, *tensors, torch.tensor(0.3), mark_dynamic=marks)
        assert report.count(rule="attention_quant") == 0
        assert torch.equal(before[0].view(torch.uint8), after[0].view(torch.uint8))


def test_parts_of_a_split_that_has_others_are_no_views():
    (graph,) = capture(lambda x: (x.unbind(0), x.split(2, -1), x.chunk(1, -1)[0].sin()), torch.randn(3, 4))
    for node in graph.nodes:
        if str(node.target).endswith("getitem>") or getattr(node.target, "__name__", "") == "getitem":
            source, views = through_views(node)
            assert (source is node) == (len(node.args[0].meta["val"]) > 1)
            assert len(views) in (0, 2)
