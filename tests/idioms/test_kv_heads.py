"""Grouped queries: repetitions of heads in every spelling, and other orders, which must not pass for one."""

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.idioms import recognize
from fusion_passes.idioms.attention import Attention
from fusion_passes.testing import capture, run

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 4, 2, 8, 16


def two_casts(x):
    return x.to(torch.float8_e4m3fn).repeat_interleave(2, 1).float()


@pytest.mark.parametrize(
    ("spelling", "kv_heads"),
    [
        (lambda x: x.repeat_interleave(2, 1), 2),
        (lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(BATCH, HEADS, LENGTH, SIZE), 2),
        (lambda x: torch.stack((x, x), 2).flatten(1, 2), 2),
        (lambda x: x.unflatten(1, (2, 1)).repeat(1, 1, 2, 1, 1).flatten(1, 2), 2),
        (lambda x: x[:, :1].repeat(1, 4, 1, 1), 1),
        (lambda x: x[:, 1:].expand(-1, 4, -1, -1), 1),
        (lambda x: x.repeat_interleave(4, 1)[:, 2:6], 2),
        (lambda x: x.repeat(1, 2, 1, 1), None),
        (lambda x: torch.stack((x, x), 1).flatten(1, 2), None),
        (lambda x: x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2)[:, ::2], 2),
        (lambda x: x[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2)[:, :4], None),
        (two_casts, None),
    ],
)
def test_heads_that_are_repeated(spelling, kv_heads):
    """kv_heads: how many are left where it is read; None where a head is not beside its copies, or rounded between."""
    q, k, v = torch.randn(BATCH, HEADS, LENGTH, SIZE), *torch.randn(2, BATCH, KV_HEADS, LENGTH, SIZE)
    (graph,) = capture(lambda q, k, v: F.scaled_dot_product_attention(q, spelling(k), spelling(v)), q, k, v)
    (attention,) = recognize(graph).of(Attention)
    assert attention.kv_heads == (HEADS if kv_heads is None else kv_heads)
    want = F.scaled_dot_product_attention(q, spelling(k), spelling(v))
    keys, values = (_value(graph, node) for node in (attention.key, attention.value))
    torch.testing.assert_close(attention.reference(q, keys, values), want, rtol=1e-4, atol=1e-4)


def _value(graph, node):
    output = graph.output_node()
    old, output.args = output.args, ((node,),)
    try:
        return run(graph)[0]
    finally:
        output.args = old
