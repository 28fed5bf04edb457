"""On a card: the graphs that `capture_cuda` simulates are the ones that torch makes."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_passes.idioms import recognize
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.spellings.attention import SPELLINGS
from fusion_passes.testing import capture, capture_cuda, run

pytestmark = pytest.mark.gpu
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attributes(graph):
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    (a,) = idioms.of(Attention)
    inputs = [tuple(node.meta["val"].shape) for node in a.inputs]
    return a.backend, a.mask_kind, a.is_causal, a.scale, a.used_outputs, inputs, tuple(a.output.meta["val"].stride())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_real_and_simulated_graphs_are_read_alike(name, backend):
    if backend == "flash" and "mask" in name:
        pytest.skip("the flash backend takes no mask")
    kv_heads = 4 if backend == "efficient" else 2
    q, k, v = (torch.randn(2, heads, 64, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, kv_heads, kv_heads))
    inputs = q, k, v, torch.randn(64, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad(), sdpa_kernel(BACKENDS[backend]):
        (graph,) = capture(SPELLINGS[name], *inputs)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = SPELLINGS[name](*(x.float() for x in inputs))  # in bf16 a spelling by hand rounds its scores
    assert attributes(graph) == attributes(capture_cuda(SPELLINGS[name], *inputs, backend=backend))
    (attention,) = recognize(graph).of(Attention)
    placeholders = graph.find_nodes(op="placeholder")
    if all(node in placeholders for node in attention.inputs):
        values = [graph.owning_module.meta["fusion_passes_inputs"][placeholders.index(n)] for n in attention.inputs]
        torch.testing.assert_close(attention.reference(*values).float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", ["cudnn", "efficient", "math"])
def test_bool_masks(backend):
    q, k, v = (torch.randn(1, 4, 64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    mask = torch.rand(64, 64, device="cuda") > 0.3
    with torch.no_grad(), sdpa_kernel(BACKENDS[backend]):
        (graph,) = capture(F.scaled_dot_product_attention, q, k, v, mask)
    (attention,) = recognize(graph).of(Attention)
    assert (attention.backend, attention.mask_kind, attention.attn_mask.op) == (backend, "bool", "placeholder")


def test_padding_of_the_head_dimension():
    q = torch.randn(1, 4, 64, 20, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        (graph,) = capture(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    assert attributes(graph) == attributes(
        capture_cuda(F.scaled_dot_product_attention, q, q, q, is_causal=True, backend="flash")
    )


def test_a_cuda_graph_runs_on_the_cpu():
    q = torch.randn(1, 4, 64, 64, dtype=torch.bfloat16)
    graph = capture_cuda(F.scaled_dot_product_attention, q, q, q)
    torch.testing.assert_close(run(graph)[0], F.scaled_dot_product_attention(q, q, q))
