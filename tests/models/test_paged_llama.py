"""The Llama model with a KV cache: against Hugging Face's, in chunks, compiled layer by layer, and its loading."""

import dataclasses

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fusion_passes import PassConfig, Report, inductor_options
from fusion_passes.models.llama import PRESETS, RopeScaling
from fusion_passes.models.paged_llama import PagedLlama, load_hugging_face, randomize
from fusion_passes.nn import AttentionMetadata

TINY = dataclasses.replace(PRESETS["tiny"], context=128)
PAGE = 16


def hugging_face(config):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_base}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low}
        rope |= {"high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.original_context}
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.eps,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
        rope_parameters=rope,
    )
    model = transformers.LlamaForCausalLM(theirs).eval().requires_grad_(False)
    for layer in model.model.layers:  # sharper attention, so that a wrong rotation shows
        layer.self_attn.q_proj.weight *= 5
        layer.self_attn.k_proj.weight *= 5
        layer.input_layernorm.weight.uniform_(0.5, 1.5)
    return model


def paged(config=TINY, **options):
    options = {"kv_cache_dtype": "auto", "dtype": torch.float32, "block_size": PAGE} | options
    model = PagedLlama(config, **options).eval().requires_grad_(False)
    model.allocate_cache(16)
    return model


def block_table(rows, columns):
    return torch.randperm(16).int()[: rows * columns].view(rows, columns)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 16)], ids=["plain", "scaled"])
def test_same_as_hugging_face_in_chunks(tied, scaling):
    config = dataclasses.replace(TINY, rope_scaling=scaling, tied=tied)
    theirs, ours = hugging_face(config), paged(config)
    assert load_hugging_face(ours, theirs.state_dict()) == [set()] * config.layers
    tokens, table = torch.randint(config.vocab, (2, 40)), block_table(2, 3)
    expected = theirs(tokens).logits
    logits = []
    # Two prompts of different lengths, then a step with a chunk and a single token, then the rest.
    for spans in ([(0, 25), (0, 7)], [(25, 26), (7, 30)], [(26, 40), (30, 40)]):
        lengths, ends = [b - a for a, b in spans], [b for _, b in spans]
        metadata = AttentionMetadata.from_lengths(lengths, ends, table, PAGE)
        new = torch.cat([tokens[i, a:b] for i, (a, b) in enumerate(spans)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        logits.append(ours(new, positions, metadata).split(lengths))
    got = torch.stack([torch.cat(parts) for parts in zip(*logits, strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


def test_rows_are_the_chosen_tokens():
    model = paged()
    tokens, positions = torch.randint(256, (9,)), torch.arange(9)
    metadata = AttentionMetadata.from_lengths([9], [9], block_table(1, 1), PAGE)
    every = model(tokens, positions, metadata)
    rows = torch.tensor([8, 3])
    torch.testing.assert_close(model(tokens, positions, metadata, rows), every[rows])


def test_all_layers_are_one_compilation():
    model = paged(fp8=True, kv_cache_dtype="fp8_e4m3", dtype=torch.bfloat16)
    randomize(model)
    tokens, positions = torch.randint(256, (21,)), torch.arange(21)
    metadata = AttentionMetadata.from_lengths([21], [21], block_table(1, 2), PAGE)
    expected = model(tokens, positions, metadata)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model.compile_layers(lambda f: torch.compile(f, backend=backend, fullgraph=True))
    assert torch.equal(model(tokens, positions, metadata), expected)
    assert len(graphs) == 3  # the embedding, a layer, the head


def test_caches_are_written_in_place_with_the_passes():
    model = paged(fp8=True, kv_cache_dtype="fp8_e4m3", dtype=torch.bfloat16)
    randomize(model)
    metadata = AttentionMetadata.from_lengths([1, 1], [20, 31], block_table(2, 2), PAGE, max_query_len=1)
    report = Report()
    options = inductor_options(PassConfig(profitability="ignore"), report=report)
    model.compile_layers(lambda f: torch.compile(f, options=options, fullgraph=True), ends=lambda f: f)
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(model, torch.tensor([3, 5]), torch.tensor([19, 30]), metadata)
    fused = [site.rule for site in report.sites if site.status == "fused"]
    assert fused == ["rope_quant_kv_write", "attention_quant", "rms_norm_quant", "rms_norm_quant"]
    cache = model.attention_layers[0].kv_cache.key
    allocated = [line for line in code.splitlines() if "empty_strided" in line and "import" not in line]
    assert allocated
    assert not [line for line in allocated if f"({cache.numel()}," in line or str(tuple(cache.shape)) in line]
