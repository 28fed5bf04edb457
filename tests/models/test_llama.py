"""The Llama model: against Hugging Face's, in FP8, and with the fused op called by hand."""

import copy

import pytest
import torch

from fusion_passes.models.llama import PRESETS, Llama, to_fp8
from fusion_passes.nn import FP8Linear

TINY = PRESETS["tiny"]


@pytest.fixture
def model():
    return Llama(TINY).to(torch.bfloat16).eval().requires_grad_(False)


def tokens(batch=2, seq=33):
    return torch.randint(TINY.vocab, (batch, seq))


def relative(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def test_same_as_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab,
        hidden_size=TINY.hidden,
        intermediate_size=TINY.intermediate,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        head_dim=TINY.head_dim,
        rms_norm_eps=TINY.eps,
        rope_parameters={"rope_type": "default", "rope_theta": TINY.rope_base},
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {
        "model.embed_tokens.": "embedding.",
        "model.layers.": "blocks.",
        "model.norm.": "norm.",
        "lm_head.": "head.",
        "self_attn.": "attention.",
        "input_layernorm.": "attention_norm.",
        "post_attention_layernorm.": "mlp_norm.",
        "_proj.": ".",
    }
    state = {}
    for name, value in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name] = value * 5 if "q.weight" in name or "k.weight" in name else value
    ours = Llama(TINY).eval()
    ours.load_state_dict(state)
    for layer in theirs.model.layers:  # sharper attention, so that a wrong rotation shows
        layer.self_attn.q_proj.weight.data *= 5
        layer.self_attn.k_proj.weight.data *= 5
    x = tokens()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


def test_fp8_is_close_and_fused_is_as_close(model):
    x = tokens()
    expected = model(x)
    to_fp8(model, x)
    unfused = model(x)
    fused = model.fuse()(x)
    assert 0 < relative(unfused, expected) < 0.05
    assert 0 < relative(fused, unfused) < 0.05
    assert relative(fused, expected) < 1.3 * relative(unfused, expected)
    assert torch.equal(model.fuse(False)(x), unfused)
    assert isinstance(model.blocks[0].mlp.down, FP8Linear)
    assert not isinstance(model.head, FP8Linear)


def test_fuse_needs_fp8(model):
    with pytest.raises(ValueError, match="call to_fp8 first"):
        model.fuse()


def test_graphs_differ_only_by_the_fused_op(model, post_grad_graphs):
    x = tokens(1, 16)
    to_fp8(model, x)
    fused = copy.deepcopy(model).fuse()
    counts = []
    for variant in (model, fused):
        (graph,) = post_grad_graphs(variant, x)
        targets = [str(node.target) for node in graph.nodes]
        counts.append(
            {word: sum(word in t for t in targets) for word in ("_scaled_dot", "attention_quant", "_scaled_mm")}
        )
    assert counts == [
        {"_scaled_dot": TINY.layers, "attention_quant": 0, "_scaled_mm": 7 * TINY.layers},
        {"_scaled_dot": 0, "attention_quant": TINY.layers, "_scaled_mm": 7 * TINY.layers},
    ]
