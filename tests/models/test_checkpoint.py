"""Folders in Hugging Face's layout, written here in each of the formats, and what is wrong with some of them."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from fusion_passes.models.checkpoint import Checkpoint, config_from_hugging_face, load_folder
from fusion_passes.models.llama import PRESETS, RopeScaling
from fusion_passes.models.paged_llama import PagedLlama, load_hugging_face
from fusion_passes.models.quantization import ATTENTION_SCALES, PROJECTION_SCALES
from fusion_passes.nn import AttentionMetadata, FP8Linear, process_weights_after_loading
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


KV = ("self_attn.k_scale", "self_attn.v_scale")


def fp8_tensors(scale_shape=(), weight_scale="weight_scale", input_scale="input_scale", attention=KV, plain=()):
    """An FP8 checkpoint: all scales differ, and none is 1. plain: ends of the names of projections that are not FP8."""
    tensors = plain_tensors()
    for layer in range(CONFIG.layers):
        prefix = f"model.layers.{layer}."
        for i, name in enumerate(PROJECTIONS):
            if f"{prefix}{name}".endswith(tuple(plain)):
                continue
            scale = torch.tensor(0.0011 + 0.0003 * i + 0.0001 * layer)
            weight = quantize(tensors[f"{prefix}{name}.weight"], scale, FP8)
            tensors[f"{prefix}{name}.weight"] = weight
            tensors[f"{prefix}{name}.{weight_scale}"] = scale.expand(scale_shape).clone()
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
    "transformers": (dict(weight_scale="weight_scale_inv", input_scale="activation_scale"), "fp8", 1),
    "quark": (dict(attention=[f"self_attn.{x}_proj.output_scale" for x in "kvq"]), "quark", 2),
    "vllm": (dict(attention=[f"self_attn.attn.{x}_scale" for x in "kvq"]), "fp8", 1),
}


@pytest.mark.parametrize("name", FORMATS)
def test_fp8_formats(tmp_path, name):
    options, method, shards = FORMATS[name]
    tensors = fp8_tensors(**options)
    path = folder(tmp_path, tensors, shards, quantization_config={"quant_method": method})
    told = []
    model = load_folder(path, TEXT, block_size=16, tell=told.append)
    chosen = "none" if name in ("compressed-tensors", "vllm", "quark") else "query of 2 layers"
    assert told == [f"weights are FP8 already; scales chosen on the calibration text: {chosen}"]
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        input_scale, weight_scale = (options.get(x, x) for x in ("input_scale", "weight_scale"))
        for ours, parts in (
            (layer.attention.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (layer.attention.o, ["self_attn.o_proj"]),
            (layer.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.mlp.down, ["mlp.down_proj"]),
        ):
            assert isinstance(ours, FP8Linear)
            scales = [tensors[f"{prefix}{part}.{weight_scale}"].item() for part in parts]
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
        places = options.get("attention", KV)
        given = {
            place.replace("_proj.output", "").split("_scale")[0][-1]: tensors[prefix + place].item() for place in places
        }
        if "kv_scale" in places[0]:
            given = dict.fromkeys("kv", tensors[prefix + places[0]].item())
        assert {x: attention.get_buffer(f"_{x}_scale").item() for x in given} == given
        if "q" not in given:  # chosen on the text
            assert 0.0 < attention._q_scale.item() < 0.2
    plain = {
        name: dequantize(t, tensors[name.removesuffix("weight") + weight_scale], torch.bfloat16)
        if t.dtype == FP8
        else t
        for name, t in tensors.items()
        if name.endswith("weight")
    }
    (tmp_path / "plain").mkdir()
    reference = load_folder(folder(tmp_path / "plain", plain), TEXT, block_size=16)
    # Two roundings of their own; projections in the wrong order would be 1 and more.
    assert distance(logits(model, TEXT[:40]), logits(reference, TEXT[:40])) < 0.2


def distance(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


def test_bf16_is_quantized_on_the_text(tmp_path):
    tensors = plain_tensors()
    told = []
    fp8 = load_folder(folder(tmp_path, tensors), TEXT, block_size=16, tell=told.append)
    assert told == [
        "weights of 8 products quantized to FP8 at load; scales chosen on the calibration text: the input of each, "
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


GROUP = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}
GROUP["input_activations"] = GROUP["weights"] | {"dynamic": False}
EXCLUDING = {  # down_proj of all layers, as each tool says it
    "fp8 by a name": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "down_proj"]},
    "fp8 by all names": {"quant_method": "fp8", "ignored_layers": [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]},
    "fp8 by a bare expression": {
        "quant_method": "fp8",
        "modules_to_not_convert": [r"model\.layers\.(0|1)\.mlp\.down_proj"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": GROUP},
        "ignore": ["lm_head", "re:.*down_proj"],
    },
    "compressed-tensors by targets": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": GROUP | {"targets": ["re:.*self_attn", "re:.*(gate|up)_proj$"]}},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.mlp.down_proj*"]},
    "modelopt of old": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*down_proj"]}},
    "quark": {"quant_method": "quark", "exclude": ["re:.*down_proj", "lm_head"]},
    "quark by patterns": {"quant_method": "quark", "layer_quant_config": {"*down_proj": None}},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", EXCLUDING)
def test_what_a_checkpoint_excludes_stays_as_it_is(tmp_path, name):
    tensors, told = fp8_tensors(plain=["down_proj"]), []
    if name == "modelopt of old":
        path = folder(tmp_path, tensors)
        (path / "hf_quant_config.json").write_text(json.dumps(EXCLUDING[name]))
    else:
        path = folder(tmp_path, tensors, quantization_config=EXCLUDING[name])
    model = load_folder(path, TEXT, block_size=16, tell=told.append)
    for index, layer in enumerate(model.layers):
        assert type(layer.mlp.down) is torch.nn.Linear
        assert torch.equal(layer.mlp.down.weight, tensors[f"model.layers.{index}.mlp.down_proj.weight"])
        assert {type(x) for x in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up)} == {FP8Linear}
    assert told[0].startswith("weights are FP8 already, 2 products are left as the checkpoint has them; ")


@pytest.mark.parametrize(
    ("plain", "ignored", "sentence"),
    [
        (["down_proj"], [], "does not exclude model.layers.0.mlp.down_proj, .*: they stay as they are"),
        ([], ["re:.*down_proj"], "excludes model.layers.0.mlp.down_proj, .*, which are FP8: they are loaded as FP8"),
    ],
)
def test_tensors_are_believed(tmp_path, plain, ignored, sentence):
    config = {"quant_method": "compressed-tensors", "ignore": ignored}
    path = folder(tmp_path, fp8_tensors(plain=plain), quantization_config=config)
    with pytest.warns(UserWarning, match=sentence):
        model = load_folder(path, TEXT, block_size=16)
    assert {isinstance(layer.mlp.down, FP8Linear) for layer in model.layers} == {not plain}


def quark(**weight):
    scheme = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    return {"quant_method": "quark", "global_quant_config": {"weight": scheme | weight, "input_tensors": scheme}}


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ["quantized dynamically in model.layers.0"]),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            ["one scale for each block of 128 x 128", "quantized dynamically"],
        ),
        ({"quant_method": "fbgemm_fp8"}, ["one scale for each output channel", "quantized dynamically"]),
        ({"config_groups": {"a": GROUP | {"input_activations": None}}}, ["the activations are not quantized"]),
        ({"config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}}}, ["the weights are int8"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["the format is NVFP4"]),
        (quark(dtype="fp4"), ["the weights are fp4"]),
        (quark(qscheme="per_channel"), ["the weights have scales per channel"]),
        (
            {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"},
            ["scales are for NVFP4", "kv_cache_dtype='auto'"],
        ),
        ({"quant_method": "mxfp4"}, ["quantized by 'mxfp4'", "quantized at load"]),
        ({"bits": 4}, ["has no quant_method"]),
        ({"quant_method": "compressed-tensors", "ignore": ["re:("]}, [r"'re:\(', no regular expression"]),
    ],
    ids=str,
)
def test_the_reason_of_a_refusal_is_the_real_one(tmp_path, config, sentences):
    path = folder(tmp_path, fp8_tensors(), quantization_config=config)
    with pytest.raises(ValueError) as error:
        load_folder(path, TEXT, block_size=16)
    for sentence in sentences:
        assert re.search(sentence, str(error.value))
    assert ("dynamically" in str(error.value)) == any("dynamically" in sentence for sentence in sentences)


def test_the_documentation_has_every_name():
    text = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
    names = {name for names in (*PROJECTION_SCALES.values(), *ATTENTION_SCALES.values()) for name in names}
    shown = {re.sub(r"(?<![a-z])[qkv](?=_)", "k", name) for name in names}
    assert [name for name in shown if f"`{name}`" not in text] == []


def test_a_reload_writes_in_place(tmp_path):
    tensors = fp8_tensors(plain=["down_proj"])
    model = load_folder(folder(tmp_path, tensors, quantization_config=EXCLUDING["fp8 by a name"]), TEXT, block_size=16)
    expected = logits(model, TEXT[:40])
    before = {
        name: x.data_ptr() for name, x in [*model.named_buffers(), *model.named_parameters()] if "kv_c" not in name
    }
    with torch.no_grad():
        for x in (*model.buffers(), *model.parameters()):
            x.copy_(torch.tensor(0.0))
    load_hugging_face(model, tensors)
    process_weights_after_loading(model)
    assert torch.equal(logits(model, TEXT[:40]), expected)
    after = {
        name: x.data_ptr() for name, x in [*model.named_buffers(), *model.named_parameters()] if "kv_c" not in name
    }
    assert after == before


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
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq'"),
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
        (
            {f"{Q}.input_scale": None},
            r"no .*q_proj\.input_scale, nor activation_scale or act_scale, as where activations are quantized",
        ),
        (
            {f"{Q}.weight_scale": None},
            r"no .*q_proj\.weight_scale, nor weight_scale_inv for its FP8.*or the bf16 one, which is quantized",
        ),
        ({f"{Q}.weight_scale": torch.rand(64, 1)}, "only one scale for the whole tensor"),
        ({f"{Q}.weight_scale": torch.tensor(0.0)}, "must be positive and finite"),
        ({f"{Q}.weight": torch.zeros(64, 64)}, "k_proj, .*v_proj FP8 and .*q_proj not: all of them or none"),
        ({f"{Q}.weight": torch.zeros(64, 64).to(torch.float8_e5m2)}, "float8_e5m2, only"),
        ({f"{Q}.weight": torch.zeros(64, 32).to(FP8)}, "the config asks for"),
        ({f"{Q}.bias": torch.zeros(64)}, "no place for: .*q_proj.bias"),
        ({"model.layers.1.self_attn.k_scale": torch.rand(2)}, "only one scale for the whole tensor.*; delete it"),
        (
            {"model.layers.1.self_attn.k_scale": torch.tensor(0.0)},
            "k_scale must be positive and finite, got 0.0.*delete",
        ),
        (
            {"model.layers.1.self_attn.attn.k_scale": torch.tensor(0.5)},
            r"k_scale is 0\.022, .*k_scale is 0\.5: they mean",
        ),
        ({f"{Q}.weight_scale": torch.tensor(127, dtype=torch.uint8)}, "uint8: only scales in floating point"),
        ({f"{Q}.weight_zero_point": torch.tensor(3.0)}, "weight_zero_point is not 0"),
        ({f"{Q}.weight": torch.zeros(64, 64, dtype=torch.int8)}, "q_proj.weight is torch.int8: neither"),
        (
            {f"{Q}.weight": None, f"{Q}.weight_packed": torch.zeros(64, 8)},
            "but .*weight_packed: weights of fewer than 8",
        ),
        ({"lm_head.weight": torch.zeros(256, 64).to(FP8)}, "lm_head.weight is .*only the projections of a layer"),
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
