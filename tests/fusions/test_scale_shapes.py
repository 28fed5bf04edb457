"""A scale without dimensions, in other shapes of one element: every rule reads it, and no reader raises."""

import pytest
import torch

from fusion_passes.ops import kv_cache_write
from fusion_passes.ops.quantize import quantize_fp8
from tests.fusions.reason_programs import E4M3, cuda, dense, divide, flat, qkv, query, saturate, step, torchao

SHAPES = {
    "one dimension": lambda s: s.reshape(1),
    "two dimensions": lambda s: s.view(1, 1),
    "three dimensions, none again": lambda s: s.reshape(1, 1, 1).squeeze(),
    "unsqueezed": lambda s: s.unsqueeze(0),
    "expanded": lambda s: s.expand(1),
    "row of an expansion": lambda s: s.expand(3)[1],
    "selected": lambda s: s.view(1).unbind(0)[0],
}
PLACES = {
    "attention": lambda shape: dense(lambda o, s: divide(o, shape(s)), on=cuda, operands=qkv(head_dim=64)),
    "attention, one op": lambda shape: dense(
        lambda o, s: quantize_fp8(flat(o), shape(s), E4M3), on=cuda, operands=qkv(head_dim=64)
    ),
    "query": lambda shape: query(lambda x, s: quantize_fp8(x, shape(s), E4M3), on=cuda),
    "query, op of torchao": lambda shape: query(lambda x, s: torchao(x, shape(s)), on=cuda),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", PLACES)
def test_the_shape_of_a_scale_is_no_obstacle(place, shape, hopper):
    told = PLACES[place](SHAPES[shape])
    assert "1 fused" in told
    assert "could not be read" not in told


@pytest.mark.parametrize("shape", ["one dimension", "three dimensions, none again"])
def test_scales_of_key_value_and_query(shape, hopper):
    def write(k, v, key_cache, value_cache, slots, *scales):
        kv_cache_write(k, v, key_cache, value_cache, slots, *map(SHAPES[shape], scales))

    told = step(write=write, quantize=lambda q, s: saturate(q.float() / SHAPES[shape](s)))
    assert "1 fused" in told
    assert "could not be read" not in told


def test_a_reader_of_a_reshape_to_three_dimensions(hopper):
    """Which is what a rotary embedding may end in."""
    told = cuda(lambda x, s: saturate(x / s.view(1, 1, 1)), torch.randn(2, 4, 8), torch.tensor(0.1))
    assert "could not be read" not in told
