"""Folders in Hugging Face's layout, written here in each of the formats, and what is wrong with some of them."""

import dataclasses
import json

import pytest
import torch

from fusion_passes.models.checkpoint import Checkpoint, config_from_hugging_face, load_folder
from fusion_passes.models.llama import PRESETS, RopeScaling
from fusion_passes.models.paged_llama import PagedLlama, load_hugging_face
from fusion_passes.nn import AttentionMetadata, FP8Linear
from fusion_passes.quant import dequantize, quantize

safetensors = pytest.importorskip("safetensors.torch")

CONFIG = dataclasses.replace(PRESETS["tiny"], hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16)
CONFIG = dataclasses.replace(CONFIG, context=64, rope_base=10_000.0)
JSON = {
    "model_type": "llama",
    "hidden_size": CONFIG.hidden,
    "intermediate_size": CONFIG.intermediate,
    "num_hidden_layers": CONFIG.layers,
    "num_attention_heads": CONFIG.heads,
    "num_key_value_heads": CONFIG.kv_heads,
    "head_dim": CONFIG.head_dim,
    "vocab_size": CONFIG.vocab,
    "rms_norm_eps": CONFIG.eps,
    "rope_theta": CONFIG.rope_base,
    "max_position_embeddings": CONFIG.context,
}
PROJECTIONS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
FP8 = torch.float8_e4m3fn
TEXT = torch.arange(150) * 7 % 256


def plain_tensors():
    """A bf16 checkpoint."""
    tensors = {"model.embed_tokens.weight": torch.randn(256, 64), "lm_head.weight": torch.randn(256, 64) / 8}
    tensors["model.norm.weight"] = torch.rand(64) + 0.5
    for layer in range(CONFIG.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.rand(64) + 0.5
        for name, shape in PROJECTIONS.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape) / 8
        tensors[f"{prefix}self_attn.rotary_emb.inv_freq"] = torch.rand(8)  # older checkpoints have it
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def fp8_tensors(scale_shape=(), input_scale="input_scale", attention=("self_attn.k_scale", "self_attn.v_scale")):
    """An FP8 checkpoint: all scales differ, and none is 1."""
    tensors = plain_tensors()
    for layer in range(CONFIG.layers):
        prefix = f"model.layers.{layer}."
        for i, name in enumerate(PROJECTIONS):
            scale = torch.tensor(0.0011 + 0.0003 * i + 0.0001 * layer)
            weight = quantize(tensors[f"{prefix}{name}.weight"], scale, FP8)
            tensors[f"{prefix}{name}.weight"] = weight
            tensors[f"{prefix}{name}.weight_scale"] = scale.expand(scale_shape).clone()
            tensors[f"{prefix}{name}.{input_scale}"] = torch.tensor(0.013 + 0.002 * i).expand(scale_shape).clone()
        for i, name in enumerate(attention):
            tensors[prefix + name] = torch.tensor(0.021 + 0.004 * i + 0.001 * layer).expand(scale_shape).clone()
    return tensors


def folder(path, tensors, shards=1, **settings):
    names = sorted(tensors)
    (path / "config.json").write_text(json.dumps(JSON | settings))
    if shards == 1:
        safetensors.save_file(tensors, path / "model.safetensors")
        return path
    places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        safetensors.save_file({name: tensors[name] for name in names if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def logits(model, tokens):
    model.allocate_cache(4)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    metadata = AttentionMetadata.from_lengths([len(tokens)], [len(tokens)], table, 16)
    with torch.no_grad():
        return model(tokens, torch.arange(len(tokens)), metadata)


FORMATS = {
    "autofp8": (dict(attention=["self_attn.k_scale", "self_attn.v_scale"]), "fp8", 1),
    "autofp8 of old": (dict(input_scale="act_scale", attention=["self_attn.kv_scale"]), "fp8", 3),
    "compressed-tensors": (
        dict(scale_shape=(1,), attention=[f"self_attn.{x}_scale" for x in "kvq"]),
        "compressed-tensors",
        3,
    ),
    "outputs of projections": (dict(attention=[f"self_attn.{x}_proj.output_scale" for x in "kv"]), "fp8", 1),
    "modelopt": (dict(attention=[f"self_attn.{x}_proj.{x}_scale" for x in "kv"]), "modelopt", 2),
    "vllm": (dict(attention=[f"self_attn.attn.{x}_scale" for x in "kvq"]), "fp8", 1),
}


@pytest.mark.parametrize("name", FORMATS)
def test_fp8_formats(tmp_path, name):
    options, method, shards = FORMATS[name]
    tensors = fp8_tensors(**options)
    path = folder(tmp_path, tensors, shards, quantization_config={"quant_method": method})
    told = []
    model = load_folder(path, TEXT, block_size=16, tell=told.append)
    chosen = "none" if name in ("compressed-tensors", "vllm") else "query of 2 layers"
    assert told == [f"weights are FP8 already; scales chosen on the calibration text: {chosen}"]
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        input_scale = options.get("input_scale", "input_scale")
        for ours, parts in (
            (layer.attention.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (layer.attention.o, ["self_attn.o_proj"]),
            (layer.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.mlp.down, ["mlp.down_proj"]),
        ):
            assert isinstance(ours, FP8Linear)
            scales = [tensors[f"{prefix}{part}.weight_scale"].item() for part in parts]
            assert ours.weight_scale.item() == max(scales)
            assert ours.input_scale.item() == max(tensors[f"{prefix}{part}.{input_scale}"].item() for part in parts)
            for part, scale, got in zip(
                parts, scales, ours.weight.split([PROJECTIONS[p][0] for p in parts]), strict=True
            ):
                codes = tensors[f"{prefix}{part}.weight"]
                if scale == max(scales):
                    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))
                expected = dequantize(codes, scale)
                error = (dequantize(got, ours.weight_scale) - expected).norm() / expected.norm()
                assert error < 0.03  # half a step of e4m3fn is 6 %, its mean far less
        attention = layer.attention.attention
        given = {place.split("_scale")[0][-1]: tensors[prefix + place].item() for place in options["attention"]}
        if "output" in options["attention"][0]:
            given = dict(zip("kv", [tensors[prefix + place].item() for place in options["attention"]], strict=True))
        if "kv_scale" in options["attention"][0]:
            given = dict.fromkeys("kv", tensors[prefix + options["attention"][0]].item())
        assert {x: attention.get_buffer(f"_{x}_scale").item() for x in given} == given
        if "q" not in given:  # chosen on the text
            assert 0.0 < attention._q_scale.item() < 0.2
    plain = {
        name: dequantize(t, tensors[name + "_scale"], torch.bfloat16) if t.dtype == FP8 else t
        for name, t in tensors.items()
        if name.endswith("weight")
    }
    (tmp_path / "plain").mkdir()
    reference = load_folder(folder(tmp_path / "plain", plain), TEXT, block_size=16)
    # Two roundings of their own; projections in the wrong order would be 1 and more.
    assert distance(logits(model, TEXT[:40]), logits(reference, TEXT[:40])) < 0.2


def distance(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


def test_bf16_is_quantised_on_the_text(tmp_path):
    tensors = plain_tensors()
    told = []
    fp8 = load_folder(folder(tmp_path, tensors), TEXT, block_size=16, tell=told.append)
    assert told == [
        "weights of 8 products quantised to FP8 at load; scales chosen on the calibration text: the input of each, "
        "query of 2 layers, key of 2 layers, value of 2 layers"
    ]
    assert fp8.layers[0].attention.attention.kv_cache is None  # that of the calibration is gone
    plain = PagedLlama(CONFIG, kv_cache_dtype="auto", block_size=16)
    load_hugging_face(plain, tensors)
    assert 0.0 < distance(logits(fp8, TEXT[:40]), logits(plain, TEXT[:40])) < 0.2
    scales = [module.input_scale.item() for module in fp8.modules() if isinstance(module, FP8Linear)]
    assert len(set(scales)) == 4 * CONFIG.layers
    attention = fp8.layers[1].attention.attention
    assert len({attention._q_scale.item(), attention._k_scale.item(), attention._v_scale.item(), 1.0}) == 4
    assert type(fp8.head) is torch.nn.Linear


def test_scales_stay_1_where_the_cache_is_not_fp8(tmp_path):
    path = folder(tmp_path, fp8_tensors(), quantization_config={"quant_method": "fp8"})
    model = load_folder(path, TEXT, block_size=16, kv_cache_dtype="auto")
    for layer in model.attention_layers:
        assert [layer.get_buffer(f"_{x}_scale").item() for x in ("q", "k", "v", "prob")] == [1.0] * 4


def test_tied_head(tmp_path):
    tensors = plain_tensors()
    del tensors["lm_head.weight"]
    model = load_folder(folder(tmp_path, tensors, tie_word_embeddings=True), TEXT, block_size=16)
    assert model.head.weight is model.embedding.weight


def test_config_of_transformers_4_and_5():
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled |= {"original_max_position_embeddings": 8192}
    expected = dataclasses.replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), rope_base=500_000.0)
    old = JSON | {"rope_scaling": scaled, "rope_theta": 500_000.0}
    new = JSON | {"rope_parameters": scaled | {"rope_theta": 500_000.0}}
    assert config_from_hugging_face(old) == config_from_hugging_face(new) == expected
    assert config_from_hugging_face(JSON | {"rope_scaling": None}) == CONFIG


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model_type": "qwen2"}, "only Llama models"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"hidden_size": 128}, "the config asks for"),
        ({"num_hidden_layers": 1}, "has tensors that this model has no place for"),
        ({"num_hidden_layers": 3}, r"has no model\.layers\.2\.input_layernorm"),
    ],
)
def test_configs_that_do_not_fit(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_folder(folder(tmp_path, plain_tensors(), **settings), TEXT, block_size=16)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({f"{Q}.input_scale": None}, "no input_scale: activations that are quantised dynamically"),
        ({f"{Q}.weight_scale": None}, "has no .*q_proj.weight_scale: .*or the bf16 one, which is quantised"),
        ({f"{Q}.weight_scale": torch.rand(64, 1)}, "only one scale for the whole tensor"),
        ({f"{Q}.weight_scale": torch.tensor(0.0)}, "must be positive and finite"),
        ({f"{Q}.weight": torch.zeros(64, 64)}, "all of them FP8 or none"),
        ({f"{Q}.weight": torch.zeros(64, 64).to(torch.float8_e5m2)}, "float8_e5m2, only"),
        ({f"{Q}.weight": torch.zeros(64, 32).to(FP8)}, "the config asks for"),
        ({f"{Q}.bias": torch.zeros(64)}, "no place for: .*q_proj.bias"),
        ({"model.layers.1.self_attn.k_scale": torch.rand(2)}, "only one scale for the whole tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit(tmp_path, change, sentence):
    tensors = fp8_tensors() | change
    path = folder(
        tmp_path, {k: v for k, v in tensors.items() if v is not None}, quantization_config={"quant_method": "fp8"}
    )
    with pytest.raises(ValueError, match=sentence):
        load_folder(path, TEXT, block_size=16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks hidden_size, vocab_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lacks low_freq_factor, high_freq_factor"),
    ],
)
def test_configs_that_lack_something(change, sentence):
    settings = {name: value for name, value in (JSON | change).items() if value is not None}
    with pytest.raises(ValueError, match=sentence):
        config_from_hugging_face(settings)


def test_folders_that_lack_something(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(JSON))
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path = folder(tmp_path, plain_tensors(), 3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks model-00002-of-00003"):
        Checkpoint(path)


def test_tensors_are_read_when_asked_for(tmp_path):
    tensors = plain_tensors()
    checkpoint = Checkpoint(folder(tmp_path, tensors, 2))
    assert sorted(checkpoint) == sorted(tensors)
    assert len(checkpoint) == len(tensors)
    assert "nothing" not in checkpoint
    assert all(torch.equal(checkpoint[name], tensors[name]) for name in tensors)
