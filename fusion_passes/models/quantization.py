"""How public tools write an FP8 checkpoint: the names of its scales, what its configuration says of each projection.

All names go through `PROJECTION_SCALES` and `ATTENTION_SCALES`; docs/generate.md shows them. What a projection is, its
tensors decide. The configuration names what cannot be loaded before anything is read, and what is odd.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROJECTION_SCALES = {
    "weight_scale": {
        "weight_scale": "AutoFP8, compressed-tensors, ModelOpt, Quark",
        "weight_scale_inv": "transformers: what codes are multiplied with, as everywhere; inverse to what made them",
    },
    "input_scale": {
        "input_scale": "AutoFP8, compressed-tensors, ModelOpt, Quark",
        "activation_scale": "transformers",
        "act_scale": "AutoFP8 before 0.1",
    },
}
"""Scales below a projection: what each is, and the names that it goes by with who writes them."""

_OF_ONE = {
    "{x}_scale": "compressed-tensors, AutoFP8",
    "attn.{x}_scale": "vLLM",
    "{x}_proj.{x}_scale": "ModelOpt",
    "{x}_proj.output_scale": "Quark, older compressed-tensors",
}
ATTENTION_SCALES = {f"{x}_scale": {name.format(x=x): tool for name, tool in _OF_ONE.items()} for x in "qkv"} | {
    "kv_scale": {"kv_scale": "AutoFP8 before 0.1", "attn.kv_scale": "vLLM"},
    "prob_scale": {"prob_scale": "this library", "attn.prob_scale": "vLLM", "prob_output_scale": "Quark"},
}
"""Scales below `self_attn.`, keyed by what `nn.Attention.set_scales` calls them."""

ZERO_POINTS = ("_zero_point",)
"""Ends of names of tensors that are 0 in a symmetric quantization, the only one that FP8 has here."""
NEEDLESS = ("rotary_emb.inv_freq", ".output_scale", ".weight_shape")
"""Ends of names of tensors that a model has no use for."""

METHODS = ("fp8", "compressed-tensors", "modelopt", "quark", "fbgemm_fp8")
"""Values of quant_method that are read; each may still say something that cannot be loaded."""
ADVICE = (
    "use a checkpoint with one static scale for each weight and each input, or the bf16 one, which is quantized at load"
)
DYNAMIC = "the activations are quantized dynamically"
UNQUANTIZED = "the activations are not quantized"
PER_CHANNEL = "the weights have one scale for each output channel"


@dataclass(frozen=True)
class Group:
    """Projections that are quantized alike. targets: their names as `matches` reads them, or "Linear" for all.

    obstacles: why they cannot be loaded, in words; () if they can, None if they are not quantized.
    """

    targets: tuple[str, ...]
    obstacles: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class Quantization:
    """What a configuration says.

    excluded: names of what is left as it is, as `matches` reads them. cache: why the scales of the cache are none for
    an FP8 cache, in words.
    """

    method: str
    groups: tuple[Group, ...] = (Group(("Linear",)),)
    excluded: tuple[str, ...] = ()
    cache: str | None = None
    _schemes: dict[str, tuple[str, ...] | None] = field(default_factory=dict, compare=False, repr=False)

    def obstacles(self, projection: str) -> tuple[str, ...] | None:
        """Why a projection cannot be loaded, () if it can, None if it is not quantized.

        A group that names it goes before one for all.
        """
        if projection not in self._schemes:
            named = [g for g in self.groups if any(t != "Linear" and matches(projection, t) for t in g.targets)]
            rest = [g for g in self.groups if "Linear" in g.targets]
            excluded = any(matches(projection, entry) for entry in self.excluded)
            self._schemes[projection] = None if excluded or not named + rest else (named + rest)[0].obstacles
        return self._schemes[projection]


def matches(name: str, entry: str) -> bool:
    """Whether an entry of a list of modules means this one: by its name, by the name of a module that it is in, by the
    end of either from a dot on, by wildcards, or by a regular expression, bare (transformers) or after `re:`
    (compressed-tensors, Quark; from the beginning of the name).

    Raises ValueError for an expression after `re:` that is none.
    """
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], name) is not None
        except re.error as error:
            raise ValueError(f"the quantization_config has {entry!r}, no regular expression: {error}") from error
    if f".{entry}." in f".{name}." or fnmatch.fnmatchcase(name, entry):
        return True
    try:
        return re.fullmatch(entry, name) is not None
    except re.error:  # a wildcard, not an expression
        return False


def read_quantization(settings: Mapping[str, Any]) -> Quantization:
    """The quantization_config of a config.json, or a hf_quant_config.json.

    Raises ValueError for a method that is not FP8, and for a configuration that does not say its method.
    """
    method = settings.get("quant_method")
    if method is None:
        if "quantization" in settings or "quant_algo" in settings:
            method = "modelopt"
        elif "config_groups" in settings:
            method = "compressed-tensors"
        else:
            raise ValueError("the quantization_config has no quant_method: add the one that made the checkpoint")
    method = str(method).lower()
    if method.startswith("modelopt"):
        return _modelopt(settings)
    if method not in METHODS:
        raise ValueError(f"it is quantized by {method!r}, known are {', '.join(METHODS)}, with FP8 weights: {ADVICE}")
    return {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "quark": _quark,
        "fbgemm_fp8": _fbgemm,
    }[method](settings)


def _fp8(settings: Mapping[str, Any]) -> Quantization:
    """AutoFP8, transformers, and others that vLLM reads as `fp8`."""
    obstacles = []
    if (block := settings.get("weight_block_size")) is not None:
        obstacles.append(_per_block(block))
    if str(settings.get("activation_scheme", "static")).lower() != "static":
        obstacles.append(DYNAMIC)
    return Quantization(
        "fp8", (Group(("Linear",), tuple(obstacles)),), _names(settings, "modules_to_not_convert", "ignored_layers")
    )


def _fbgemm(settings: Mapping[str, Any]) -> Quantization:
    """transformers' `fbgemm_fp8` has no other form."""
    return Quantization(
        "fbgemm_fp8", (Group(("Linear",), (PER_CHANNEL, DYNAMIC)),), _names(settings, "modules_to_not_convert")
    )


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    sparsity = [] if sparse == "dense" else [f"the weights are sparse ({sparse})"]
    groups: tuple[Group, ...] = (Group(("Linear",), tuple(sparsity)),)
    if (listed := settings.get("config_groups")) is not None:
        groups = tuple(
            Group(tuple(group.get("targets") or ("Linear",)), (*sparsity, *_of_group(group)))
            for group in listed.values()
            if group.get("weights") is not None
        )
    return Quantization(
        "compressed-tensors", groups, _names(settings, "ignore"), _of_cache(settings.get("kv_cache_scheme"))
    )


def _of_group(group: Mapping[str, Any]) -> list[str]:
    weights, inputs = group["weights"], group.get("input_activations")
    obstacles = []
    if (kind := _kind(weights)) != "float8":
        obstacles.append(f"the weights are {kind}")
    strategy = weights.get("strategy") or "tensor"
    if strategy == "channel":
        obstacles.append(PER_CHANNEL)
    elif strategy == "block":
        obstacles.append(_per_block(weights.get("block_structure")))
    elif strategy != "tensor":
        obstacles.append(f"the weights have one scale for each group of {weights.get('group_size')}")
    if inputs is None:
        return [*obstacles, UNQUANTIZED]
    if inputs.get("dynamic"):
        obstacles.append(DYNAMIC)
    elif (strategy := inputs.get("strategy") or "tensor") != "tensor":
        obstacles.append(f"the activations have one scale for each {strategy}")
    if (kind := _kind(inputs)) != "float8":
        obstacles.append(f"the activations are {kind}")
    return obstacles


def _kind(scheme: Mapping[str, Any]) -> str:
    """float8, int8, float4, ..."""
    return f"{scheme.get('type', 'int')}{scheme.get('num_bits', 8)}"


def _of_cache(scheme: object) -> str | None:
    if isinstance(scheme, Mapping) and (kind := _kind(scheme)) != "float8":
        return kind
    return None


_MODELOPT = {
    "FP8": (),
    "FP8_PER_CHANNEL_PER_TOKEN": (PER_CHANNEL, DYNAMIC),
    "FP8_PB_WO": ("the weights have one scale for each block", UNQUANTIZED),
}


def _modelopt(settings: Mapping[str, Any]) -> Quantization:
    settings = settings.get("quantization", settings)

    def obstacles(algorithm: object) -> tuple[str, ...] | None:
        name = str(algorithm).upper()
        return _MODELOPT.get(name, (f"the format is {name}",)) if algorithm else None

    algorithm = settings.get("quant_algo", "FP8")
    if str(algorithm).upper() == "MIXED_PRECISION":
        layers = settings.get("quantized_layers") or {}
        groups = tuple(Group((name,), obstacles(layer.get("quant_algo"))) for name, layer in layers.items())
    else:
        groups = (Group(("Linear",), obstacles(algorithm)),)
    cache = settings.get("kv_cache_quant_algo")
    return Quantization(
        "modelopt",
        groups,
        _names(settings, "exclude_modules", "ignore"),
        _of_cache(settings.get("kv_cache_scheme")) if not cache or str(cache).upper() == "FP8" else str(cache),
    )


def _quark(settings: Mapping[str, Any]) -> Quantization:
    groups, cache = [], None
    for pattern, layer in (settings.get("layer_quant_config") or {}).items():
        groups.append(Group((pattern,), _of_quark(layer)))
        output = (layer or {}).get("output_tensors")
        if output and output.get("dtype") != "fp8_e4m3" and pattern.endswith(("k_proj", "v_proj")):
            cache = str(output.get("dtype"))
    everywhere = settings.get("global_quant_config", {})
    groups.append(Group(("Linear",), () if everywhere == {} else _of_quark(everywhere)))
    return Quantization("quark", tuple(groups), _names(settings, "exclude"), cache)


def _of_quark(layer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    if not layer or not layer.get("weight"):
        return None
    obstacles: list[str] = []
    for what, key in (("weights", "weight"), ("activations", "input_tensors")):
        schemes = layer.get(key) or {}
        for scheme in schemes if isinstance(schemes, list) else [schemes]:
            if not scheme:
                obstacles.append(UNQUANTIZED)
            elif (kind := scheme.get("dtype")) != "fp8_e4m3":
                obstacles.append(f"the {what} are {kind}")
            elif scheme.get("is_dynamic"):
                obstacles.append(f"the {what} are quantized dynamically")
            elif (scale := scheme.get("qscheme", "per_tensor")) != "per_tensor":
                obstacles.append(f"the {what} have scales {scale.replace('_', ' ')}")
    return tuple(obstacles)


def _per_block(block: object) -> str:
    sizes = " x ".join(map(str, block)) if isinstance(block, Iterable) and not isinstance(block, str) else str(block)
    return f"the weights have one scale for each block of {sizes}"


def _names(settings: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(str(entry) for key in keys for entry in settings.get(key) or ())
