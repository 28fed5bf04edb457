"""Multi-query attention whose one KV head is broadcast, which `scaled_dot_product_attention` takes unasked."""

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.idioms import recognize
from fusion_passes.idioms.attention import Attention
from fusion_passes.quant import codes
from fusion_passes.reference import attention
from fusion_passes.testing import capture, capture_cuda
from tests.fusions.without_code import STOCK, WithoutCode


def program(q, k, v, s):
    out = F.scaled_dot_product_attention(q, k, v)
    return (out.transpose(1, 2).flatten(2).float() / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def inputs(batch=2, kv_batch=2, kv_heads=1, heads=4):
    q = torch.randn(batch, heads, 24, 16)
    k, v = torch.randn(2, kv_batch, kv_heads, 24, 16)
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.tensor(0.02)


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_one_head_for_all_queries(batch):
    tensors = inputs(batch, batch)
    ours, stock = WithoutCode(program), WithoutCode(program, STOCK)
    got, want = ours(*tensors), stock(*tensors)
    assert ours.fused == 1, ours.report
    assert (codes(got) - codes(want)).abs().max() <= 1
    q, k, v, s = tensors
    exact = attention(q, k, v).transpose(1, 2).flatten(2) / s
    assert (got.float() - exact).square().mean() <= (want.float() - exact).square().mean()


@torch.no_grad()
def test_it_is_read_with_the_one_head():
    q, k, v, s = inputs()
    (graph,) = capture(program, q, k, v, s)
    (read,) = recognize(graph).of(Attention)
    assert [n.meta["val"].shape for n in (read.query, read.key, read.value)] == [q.shape, k.shape, v.shape]
    assert read.key.op == read.value.op == "placeholder"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its rounding to bf16 is optimised away: an attention in fp32")
@torch.no_grad()
def test_on_cuda():
    graph = capture_cuda(program, *inputs(), backend="math")
    (read,) = recognize(graph).of(Attention)
    assert read.kv_heads == 1


@pytest.mark.parametrize(
    "shapes", [{"kv_batch": 1, "kv_heads": 4}, {"kv_batch": 1, "kv_heads": 1}, {"heads": 1, "kv_heads": 4}]
)
@torch.no_grad()
def test_another_broadcast_is_declined_with_what_to_do(shapes):
    tensors = inputs(**shapes)
    ours, stock = WithoutCode(program), WithoutCode(program, STOCK)
    assert torch.equal(ours(*tensors).view(torch.uint8), stock(*tensors).view(torch.uint8))
    assert ours.fused == 0
    assert "expand it before the attention" in str(ours.report)


@torch.no_grad()
def test_one_head_of_keys_and_all_of_values():
    """Read with the keys as they are expanded, or not at all; never with the heads of one for the other."""
    q, k, _, s = inputs()
    v = torch.randn(2, 4, 24, 16).bfloat16()
    ours, stock = WithoutCode(program), WithoutCode(program, STOCK)
    got, want = ours(q, k, v, s), stock(q, k, v, s)
    assert (codes(got) - codes(want)).abs().max() <= 1
