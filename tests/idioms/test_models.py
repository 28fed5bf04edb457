"""Unmodified transformers models, and that no graph makes a reader raise."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_passes.idioms import recognize
from fusion_passes.idioms.attention import Attention
from fusion_passes.testing import capture, capture_cuda, run


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["cpu", "cudnn", "math"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_llama(llama, implementation, backend):
    llama.set_attn_implementation(implementation)
    ids = torch.randint(0, 128, (2, 16))
    with torch.no_grad():
        if backend == "cpu":
            (graph,) = capture(lambda ids: llama(ids).logits, ids)
        else:
            graph = capture_cuda(llama, ids, backend=backend)
        logits = llama(ids).logits
    idioms = recognize(graph)
    assert idioms.near_misses == []
    first, second = idioms.of(Attention)
    assert (first.kv_heads, second.kv_heads) == (2, 2)
    assert first.backend == ("math" if "math" in (backend, "math" * (implementation == "eager")) else second.backend)
    if implementation == "sdpa":
        assert (first.is_causal, first.attn_mask) == (True, None)  # a mask made from constants: it was run
    else:
        assert first.mask_kind == "float"  # the lowest bf16 number, not -inf
    torch.testing.assert_close(run(graph)[0], logits, atol=2e-2, rtol=2e-2)


UNARY = (
    torch.relu,
    torch.tanh,
    torch.exp,
    lambda x: x.float(),
    lambda x: x.bfloat16(),
    lambda x: x.to(torch.float8_e4m3fn).float(),
    lambda x: (x / 0.5).clamp(-448, 448).to(torch.float8_e5m2).float(),
    lambda x: x * 2.0,
    lambda x: 1.0 / x,
    lambda x: x.transpose(-1, -2).contiguous(),
    lambda x: x.reshape(-1, *x.shape[1:]).clone(),
    lambda x: torch.softmax(x.float(), -1),
    lambda x: x.masked_fill(x > 0, float("-inf")),
    lambda x: x.cumsum(-1),
    lambda x: x.amax(-1, keepdim=True).expand_as(x),
    lambda x: x.sort(-1).values,
    lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    lambda x: torch.fft.rfft(x.float(), dim=-1).abs()[..., :1].expand_as(x),
    lambda x: x + torch.arange(x.shape[-1]).to(x.dtype),
    lambda x: torch.where(x > 0, 0.0, float("-inf")),
)
BINARY = (
    torch.matmul,
    torch.add,
    torch.mul,
    torch.div,
    torch.minimum,
    lambda x, y: torch.softmax(x.float() @ y.float().transpose(-1, -2), -1),
    lambda x, y: torch.where(x.float() > y.float(), x.float(), y.float()),
    lambda x, y: (x.float() / y.float().amax()).to(torch.float8_e4m3fn).float(),
)


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_never_raise(seed):
    choose = random.Random(seed)
    steps = [
        (choose.choice(UNARY), None) if choose.random() < 0.6 else (None, choose.choice(BINARY)) for _ in range(14)
    ]
    picks = [(choose.random(), choose.random()) for _ in steps]

    def model(x):
        values = [x, x * 0.5]
        for (unary, binary), (left, right) in zip(steps, picks, strict=True):
            a, b = values[int(left * len(values))], values[int(right * len(values))]
            if unary is not None:
                values.append(unary(a))
            else:
                dtype = torch.promote_types(a.dtype, b.dtype)
                values.append(binary(a.to(dtype), b.to(dtype)))
        return values[2:]

    x = torch.randn(2, 2, 8, 8, dtype=torch.bfloat16)
    for graph in capture(model, x, dynamic=seed % 2 == 1):
        before = str(graph)
        idioms = recognize(graph)
        assert str(graph) == before
        assert not [m for m in idioms.near_misses if "could not be read" in m.reason]
        # Without the values that Inductor puts on the nodes nothing can be read, and nothing is raised.
        for node in graph.nodes:
            node.meta.pop("val", None)
        assert not list(recognize(graph).of(Attention))


def test_other_models():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

        def forward(self, x):
            return self.layers(x).flatten(1)

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x):
            return self.layer(x)

    with torch.no_grad():
        (graph,) = capture(Convolution().eval(), torch.randn(1, 3, 8, 8))
        assert len(recognize(graph)) == 0
        assert recognize(graph).near_misses == []
        for graph in capture(Transformer().eval(), torch.randn(2, 5, 16)):
            recognize(graph)


def test_training_graphs():
    x = torch.randn(2, 2, 8, 8, dtype=torch.bfloat16, requires_grad=True)

    def step(x):
        return (F.scaled_dot_product_attention(x, x, x).float() / 0.5).sum()

    forward, *_ = capture(step, x)
    (attention,) = recognize(forward).of(Attention)
    assert attention.used_outputs == ("logsumexp",)
