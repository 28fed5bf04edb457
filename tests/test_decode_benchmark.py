"""The variants that `benchmarks/decode.py` compares are the same model."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fusion_passes import Report

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def decode():
    flags = [(torch._inductor.config, "force_disable_caches"), (torch._dynamo.config, "recompile_limit")]
    before = [getattr(config, name) for config, name in flags]
    spec = importlib.util.spec_from_file_location("decode", BENCHMARKS / "decode.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # it imports common from beside it
        spec.loader.exec_module(module)
    yield module
    for (config, name), value in zip(flags, before, strict=True):
        setattr(config, name, value)


@torch.no_grad()
def test_opaque_and_exposed_are_the_same_model(decode):
    model = decode.build("tiny", 3, 300, "cpu")
    tokens, positions, metadata = decode.batch_of(model, 3, 300)
    assert metadata.seq_lens.tolist() == [300] * 3
    assert len(set(metadata.block_table.flatten().tolist())) == 15
    assert all(layer.kv_cache.key.float().isfinite().all() for layer in model.attention_layers)
    logits = []
    for opaque in (True, False):
        for layer in model.attention_layers:
            layer.opaque = opaque
        logits.append(model(tokens, positions, metadata))
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0.1


def test_variants_differ_as_said(decode):
    model = decode.build("tiny", 1, 64, "cpu")
    opaque = {}
    for variant in decode.VARIANTS:
        decode.prepare(model, variant, Report())
        opaque[variant] = {layer.opaque for layer in model.attention_layers}
    assert opaque == {"opaque": {True}, "exposed": {False}, "measured": {False}, "ignore": {False}}
    assert decode.VARIANTS["exposed"][1].level < decode.VARIANTS["ignore"][1].level
