"""The examples run, and their graph is the one that they are there to show."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the model for a GPU is too large for a test


@pytest.fixture(scope="module")
def llama_fp8():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("llama_fp8", EXAMPLES / "llama_fp8.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_text_is_plain_bytes():
    text = (EXAMPLES / "calibration_text.txt").read_bytes()
    assert text.isascii()
    assert len(text) > 2048


def test_fp8_costs_little(llama_fp8):
    tokens = llama_fp8.batches()
    model = llama_fp8.llama(tokens.device)
    before = llama_fp8.loss(model, tokens)
    after = llama_fp8.loss(llama_fp8.to_fp8(model, tokens), tokens)
    assert abs(before - math.log(256)) < 0.3
    assert 0 < abs(after - before) < 0.03


def test_main_prints_both_losses(llama_fp8, capsys):
    llama_fp8.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["next-byte", "bf16", "FP8"]


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_causal"])
def test_each_layer_holds_attention_then_quantization_then_fp8_product(llama_fp8, attention, post_grad_graphs):
    model, args, kwargs = llama_fp8.build(attention)
    (graph,) = post_grad_graphs(model, *args, **kwargs)
    sdpa = [node for node in graph.nodes if "_scaled_dot_product" in str(node.target)]
    assert len(sdpa) == model.config.num_hidden_layers
    for node in sdpa:
        # Masked (keyword) or causal (positional flag); and the few key and value heads, or repeated ones.
        assert ("attn_mask" in node.kwargs) == (attention == "sdpa")
        assert (True in node.args) == (attention == "sdpa_causal")
        repeated = node.args[1].meta["val"].shape[1] == node.args[0].meta["val"].shape[1]
        assert repeated == (attention == "sdpa")
        chain, follow = [], next(user for user in node.users if user.args[1] == 0)
        while "_scaled_mm" not in str(follow.target):
            (follow,) = follow.users
            chain.append(str(follow.target).split(".")[1])
        assert [name for name in chain if name not in ("permute", "reshape", "clone")] == [
            "convert_element_type",
            "div",
            "clamp_min",
            "clamp_max",
            "convert_element_type",
            "_scaled_mm",
        ]


@torch.no_grad()
def test_both_attention_forms_are_the_same_model(llama_fp8):
    logits = []
    for attention in ("sdpa", "sdpa_causal"):
        model, args, kwargs = llama_fp8.build(attention)
        logits.append(model(*args, **kwargs).logits)
    torch.testing.assert_close(*logits)
