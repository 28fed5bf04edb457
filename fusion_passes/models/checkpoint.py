"""A folder in Hugging Face's layout (config.json, safetensors) as a `PagedLlama`, quantized at load if it is not yet.

safetensors is imported where a file is read: `pip install fusion_passes[examples]`.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_passes.models.llama import Config, RopeScaling
from fusion_passes.models.paged_llama import PagedLlama, load_hugging_face, projection_names
from fusion_passes.models.quantization import ADVICE, Quantization, read_quantization
from fusion_passes.nn import (
    Attention,
    AttentionMetadata,
    FP8Linear,
    calibrate,
    process_weights_after_loading,
    quantize_,
)
from fusion_passes.nn.loading import shortened

CALIBRATION_LENGTH = 512
"""Tokens that the calibration text is cut into."""


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder, each read from its file when it is asked for, to the CPU.

    Raises FileNotFoundError, ImportError or ValueError, which say what is missing.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("safetensors reads the weights: pip install safetensors") from error
        self.folder = Path(folder)
        self.config = self._json("config.json")
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            files: dict[str, str] = self._json(index.name)["weight_map"]
            if missing := sorted({file for file in files.values() if not (self.folder / file).exists()}):
                raise FileNotFoundError(f"{self.folder} lacks {', '.join(missing)}, which its index names")
            names = sorted(set(files.values()))
        else:
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(f"{self.folder} has no *.safetensors file; other formats are not read")
        self._files: dict[str, Any] = {}
        for name in names:
            try:
                file = safe_open(self.folder / name, framework="pt")
            except Exception as error:  # safetensors' own error class, which its stub does not have
                raise ValueError(f"{self.folder / name} is not a readable safetensors file: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
        if index.exists() and (missing := sorted(files.keys() - self._files.keys())):
            raise ValueError(f"the files of {self.folder} lack {', '.join(missing[:8])}, which the index names")

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:  # Mapping's own reads the tensor
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def quantization(self) -> Quantization | None:
        """What config.json or ModelOpt's hf_quant_config.json says; None if neither says that it is quantized.

        Raises ValueError for a method that is not known.
        """
        settings = self.config.get("quantization_config") or self.config.get("compression_config")
        if not settings and (self.folder / "hf_quant_config.json").exists():
            settings = self._json("hf_quant_config.json")
        return read_quantization(settings) if settings else None

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} has no {name}: a folder in Hugging Face's layout is needed")
        try:
            read: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        return read


def config_from_hugging_face(settings: Mapping[str, Any]) -> Config:
    """The Config of a Llama's config.json, of transformers 4 or 5. Raises ValueError for what PagedLlama cannot do."""
    if settings.get("model_type") != "llama":
        raise ValueError(f"only Llama models are supported, config.json says {settings.get('model_type')!r}")
    for name, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if settings.get(name, only) != only:
            raise ValueError(f"config.json: {name}={settings[name]!r} is not supported, only {only!r}")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if name not in settings]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    rope = dict(settings.get("rope_scaling") or {}) | dict(settings.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: RoPE of type {kind!r} is not supported, only 'default' and 'llama3'")
    scaled = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind == "llama3" and (missing := [name for name in scaled if name not in rope]):
        raise ValueError(f"config.json: RoPE of type 'llama3' lacks {', '.join(missing)}")
    heads = settings["num_attention_heads"]
    return Config(
        hidden=settings["hidden_size"],
        intermediate=settings["intermediate_size"],
        layers=settings["num_hidden_layers"],
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        vocab=settings["vocab_size"],
        rope_base=float(rope.get("rope_theta", settings.get("rope_theta", 10_000.0))),
        eps=settings.get("rms_norm_eps", 1e-6),
        rope_scaling=None
        if kind == "default"
        else RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        ),
        tied=settings.get("tie_word_embeddings", False),
        context=settings.get("max_position_embeddings", 2048),
    )


def load_folder(
    folder: Path | str | Checkpoint,
    calibration: Tensor,
    *,
    device: torch.device | str | None = None,
    tell: Callable[[str], object] | None = None,
    **options: Any,
) -> PagedLlama:
    """The model of a folder: a quantized one as it is, any other with all projections quantized to FP8.

    What the checkpoint does not have is chosen on the calibration tokens, int [tokens]: the scales of weights and
    inputs of a bf16 checkpoint, and scales of query, key and value that are missing, if the cache is FP8. Projections
    that a quantized checkpoint leaves in bf16 stay so.
    tell: is called with a line that says what was chosen.  options: of PagedLlama.

    Warns where the tensors and the configuration contradict each other; the tensors are believed.
    Raises ValueError, FileNotFoundError or ImportError with what is wrong with the folder.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint(folder)
    config = config_from_hugging_face(checkpoint.config)
    try:
        quantization = checkpoint.quantization
        if quantization is not None:
            refuse_what_cannot_be_loaded(quantization, config.layers)
        model = PagedLlama(config, fp8=quantization is not None, device=device, **options).eval()
        model.requires_grad_(False)
        if quantization is not None and quantization.cache and any(x.quantized for x in model.attention_layers):
            raise ValueError(
                f"the cache's scales are for {quantization.cache}, not for FP8: load the folder with "
                "kv_cache_dtype='auto', or use a checkpoint with an FP8 cache or without scales for one"
            )
        found = load_hugging_face(model, checkpoint)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from error
    if quantization is not None:
        _warn_of_contradictions(model, quantization)
    chosen = settle_scales(model, calibration, found, quantize=quantization is None)
    if tell is not None:
        tell(chosen)
    return model


def refuse_what_cannot_be_loaded(quantization: Quantization, layers: int) -> None:
    """Raise ValueError with all that the configuration says against loading a model of so many layers."""
    places: dict[str, list[str]] = {}
    for part in (part for _, _, parts in projection_names(layers) for part in parts):
        for obstacle in quantization.obstacles(part) or ():
            places.setdefault(obstacle, []).append(part)
    if places:
        reasons = " and ".join(f"{obstacle} in {shortened(parts, most=2)}" for obstacle, parts in places.items())
        raise ValueError(f"its {quantization.method} configuration says that {reasons}; {ADVICE}")


def _warn_of_contradictions(model: PagedLlama, quantization: Quantization) -> None:
    excluded: list[str] = []
    quantized: list[str] = []
    for index, ours, parts in projection_names(len(model.layers)):
        fp8 = isinstance(model.layers[index].get_submodule(ours), FP8Linear)
        odd = [part for part in parts if (quantization.obstacles(part) is not None) != fp8]
        (excluded if fp8 else quantized).extend(odd)
    for parts, sentence in (
        (quantized, "does not exclude {}, which are not FP8: they stay as they are"),
        (excluded, "excludes {}, which are FP8: they are loaded as FP8"),
    ):
        if parts:
            warnings.warn(
                f"the checkpoint's quantization_config {sentence.format(shortened(parts, most=3))}. Correct its list",
                stacklevel=3,
            )


def settle_scales(model: PagedLlama, calibration: Tensor, found: list[set[str]], *, quantize: bool = True) -> str:
    """Run the model on calibration tokens, int [tokens], to choose all scales that it lacks.

    found: the scales that each layer's attention has already. quantize: each nn.Linear but the head becomes FP8Linear.

    Returns a line that says what was chosen.
    """
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "head"]
    missing = {
        attention: [x for x in ("q", "k", "v") if attention.quantized and f"{x}_scale" not in given]
        for attention, given in zip(model.attention_layers, found, strict=True)
    }
    chosen = _chosen(linears, sum(isinstance(x, FP8Linear) for x in model.modules()), quantize, list(missing.values()))
    if (quantize and linears) or any(missing.values()):
        if not calibration.numel():
            raise ValueError("the checkpoint lacks scales and there is no text to choose them on")
        with _observed(missing):
            if quantize and linears:
                scales = calibrate(model, lambda: _prefill(model, calibration), filter=lambda name, _: name in linears)
                quantize_(model, scales)
            else:
                _prefill(model, calibration)
    process_weights_after_loading(model)
    return chosen


def _chosen(linears: list[str], fp8: int, quantize: bool, missing: list[list[str]]) -> str:
    """What is quantized and chosen, in a line."""
    names = {"q": "query", "k": "key", "v": "value"}
    of_layers = {name: sum(x in lacks for lacks in missing) for x, name in names.items()}
    parts = [f"{name} of {count} layers" for name, count in of_layers.items() if count]
    if linears and quantize:
        parts.insert(0, "the input of each")
        weights = f"weights of {len(linears)} products quantized to FP8 at load"
    elif linears:
        kept = f"{len(linears)} products are left as the checkpoint has them"
        weights = f"weights are FP8 already, {kept}" if fp8 else kept
    else:
        weights = "weights are FP8 already"
    return f"{weights}; scales chosen on the calibration text: {', '.join(parts) or 'none'}"


@torch.no_grad()
def _prefill(model: PagedLlama, tokens: Tensor) -> None:
    """One pass over the tokens, in sequences of CALIBRATION_LENGTH, with a cache that is gone afterwards."""
    length = min(CALIBRATION_LENGTH, model.config.context, len(tokens))
    tokens = tokens[: len(tokens) // length * length].to(model.embedding.weight.device)
    seqs, pages = len(tokens) // length, -(-length // model.block_size)
    table = torch.arange(seqs * pages, dtype=torch.int32, device=tokens.device).view(seqs, pages)
    model.allocate_cache(seqs * pages)
    metadata = AttentionMetadata.from_lengths([length] * seqs, [length] * seqs, table, model.block_size)
    last = torch.arange(1, seqs + 1, device=tokens.device) * length - 1
    model(tokens, torch.arange(length, device=tokens.device).repeat(seqs), metadata, last)
    for attention in model.attention_layers:
        attention.bind_cache(None)


@contextlib.contextmanager
def _observed(missing: dict[Attention, list[str]]) -> Iterator[None]:
    """Layers set the scales that they miss from the first batch that they see, before they use them."""

    def observe(attention: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(attention, Attention)
        names = missing[attention]
        for name, x in zip(("q", "k", "v"), args, strict=False):
            if name in names:
                limit = attention.get_buffer(f"{name}_range")
                attention.set_scales(**{f"{name}_scale": x.float().abs().amax() / limit})
        missing[attention] = []

    handles = [attention.register_forward_pre_hook(observe) for attention in missing]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
