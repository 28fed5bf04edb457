"""Writes to a KV cache in functional graphs, with either version of the wrapper."""

import pytest
import torch
import torch._inductor.config as inductor_config

from fusion_passes.idioms import NearMiss, kv_cache
from fusion_passes.idioms.kv_cache import KVCacheWrite
from fusion_passes.ops import kv_cache_write
from fusion_passes.testing import capture

TOKENS, HEADS, HEAD_DIM = 3, 2, 8


def tensors(dtype=torch.float8_e4m3fn):
    key, value = torch.randn(2, TOKENS, HEADS, HEAD_DIM).bfloat16()
    caches = (torch.zeros(4, HEADS, 16, HEAD_DIM).to(dtype) for _ in range(2))
    return key, value, *caches, torch.arange(TOKENS), torch.tensor(0.3), torch.tensor([0.7])


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_read(version):
    with inductor_config.patch(enable_auto_functionalized_v2=version == 2):
        (graph,) = capture(kv_cache_write, *tensors())
    (write,) = kv_cache.recognize(graph)
    assert isinstance(write, KVCacheWrite)
    names = [n.name for n in (write.key, write.value, *write.caches, write.slot_mapping, write.k_scale, write.v_scale)]
    assert sorted(names) == sorted(n.name for n in graph.find_nodes(op="placeholder"))
    assert write.key.meta["val"].shape == write.value.meta["val"].shape == (TOKENS, HEADS, HEAD_DIM)
    assert sorted(write.written) == [1, 2]
    assert write.nodes == {write.output, *write.written.values()}
    assert len(write.caches) == 2


def test_without_scales_and_with_one_half_used():
    def fn(key, value, key_cache, value_cache, slots, *_):
        half = value_cache.clone()
        kv_cache_write(key, value, key_cache, half, slots)
        return half

    (graph,) = capture(fn, *tensors(torch.bfloat16))
    (write,) = kv_cache.recognize(graph)
    assert write.k_scale is write.v_scale is None
    assert {*write.written} <= {1, 2}


def test_a_write_in_place_is_told():
    (graph,) = capture(lambda x: x + 1, torch.zeros(3))
    call = next(n for n in graph.nodes if n.op == "call_function")
    call.target = torch.ops.fusion_passes.kv_cache_write.default
    (miss,) = kv_cache.recognize(graph)
    assert isinstance(miss, NearMiss)
    assert "in place already" in miss.reason
