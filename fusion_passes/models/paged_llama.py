"""A Llama decoder with a KV cache: the new tokens of many sequences in, the logits of chosen tokens out.

    model = PagedLlama(PRESETS["8b"], fp8=True, device="cuda")
    load_hugging_face(model, tensors)             # or randomize(model)
    model.allocate_cache(pages=4096)
    model.compile_layers(fusion_passes.compile)
    logits = model(tokens, positions, metadata, rows)

q, k and v are one projection, and gate and up one: at a few tokens a step a product costs what its weights cost to
read, and three small ones read worse than one. The sum with the residual stream is done at the beginning of the next
layer, so that a layer compiled by itself has it in one kernel with the norm and the quantisation that follow. Layers
are compiled one by one: all have the same graph, so the second to the last cost nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_passes.models.llama import Config, RMSNorm, rope_table, rotate
from fusion_passes.nn import Attention, AttentionMetadata, FP8Linear
from fusion_passes.nn.linear import FP8
from fusion_passes.nn.loading import Settled, SettledAfterLoading, restore
from fusion_passes.quant import FP8_DTYPES, dequantize, quantize

MakeLinear = Callable[[int, int], nn.Module]


class DecoderAttention(nn.Module):
    """Projections, RoPE and attention with the cache."""

    def __init__(self, config: Config, linear: MakeLinear, attention: Attention) -> None:
        super().__init__()
        self.head_dim, self.heads = config.head_dim, (config.heads, config.kv_heads, config.kv_heads)
        self.qkv = linear(config.hidden, sum(self.heads) * config.head_dim)
        self.o = linear(config.heads * config.head_dim, config.hidden)
        self.attention = attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, 1)
        return self.o(self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v, metadata).flatten(1))


class DecoderMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, config: Config, linear: MakeLinear) -> None:
        super().__init__()
        self.gate_up = linear(config.hidden, 2 * config.intermediate)
        self.down = linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One layer. forward: x and residual [tokens, hidden], whose sum is the residual stream, to the next two."""

    def __init__(self, config: Config, linear: MakeLinear, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.eps)
        self.attention = DecoderAttention(config, linear, attention)
        self.mlp_norm, self.mlp = RMSNorm(config.hidden, config.eps), DecoderMLP(config, linear)

    def forward(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        x = self.attention(self.attention_norm(residual), cos, sin, metadata)
        residual = residual + x
        return self.mlp(self.mlp_norm(residual)), residual


class PagedLlama(SettledAfterLoading):
    """forward: tokens and positions [tokens], the batch's metadata, and the rows whose logits are wanted.

    fp8: layers are FP8Linear, but for the head; nn.Linear otherwise, for `calibrate` and `quantize_`.
    kv_cache_dtype, backend, block_size and attention_options: as in `nn.Attention`.
    attention: the class of the attention layers, `nn.Attention` or one derived from it.
    dtype: of weights and activations that are not FP8.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: Config,
        *,
        fp8: bool = False,
        kv_cache_dtype: str = "fp8_e4m3",
        block_size: int = 64,
        backend: str = "auto",
        attention: type[Attention] = Attention,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **attention_options: Any,
    ) -> None:
        super().__init__()
        device = torch.get_default_device() if device is None else torch.device(device)
        self.config, self.dtype, self.block_size = config, dtype, block_size

        def linear(features_in: int, features_out: int) -> nn.Module:
            kind = FP8Linear if fp8 else nn.Linear
            return kind(features_in, features_out, bias=False, device=device, dtype=dtype)

        def attend() -> Attention:
            return attention(
                *(config.heads, config.kv_heads, config.head_dim),
                kv_cache_dtype=kv_cache_dtype,
                block_size=block_size,
                backend=backend,
                device=device,
                dtype=dtype,
                **attention_options,
            )

        self.embedding = nn.Embedding(config.vocab, config.hidden, device=device, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, linear, attend()).to(device) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps).to(device)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False, device=device, dtype=dtype)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.to(dtype)
        for name, table in self._tables().items():
            self.register_buffer(name, table, persistent=False)
        self._begin, self._layer, self._end = _begin, _layer, _end

    @property
    def attention_layers(self) -> list[Attention]:
        """The attention of each layer, from the first to the last."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def _tables(self) -> dict[str, Tensor]:
        cos, sin = rope_table(self.config.context, self.config, self.embedding.weight)
        return {"cos": cos[:, None], "sin": sin[:, None]}  # one for all heads

    def process_weights_after_loading(self, name: str = "", *, device: torch.device | str | None = None) -> Settled:
        """Write the tables of RoPE again, in place. On meta: nothing."""
        if self.cos.is_meta:
            return Settled()
        lost = [table for table, values in self._tables().items() if restore(self.get_buffer(table), values)]
        return Settled(restored=tuple(f"{name}.{table}" if name else table for table in lost))

    def allocate_cache(self, pages: int) -> None:
        """Give each layer a new cache of so many pages; one block table serves all."""
        for layer in self.attention_layers:
            layer.allocate_cache(pages)

    def compile_layers(self, compile: Callable[[Any], Any], *, ends: Callable[[Any], Any] | None = None) -> None:
        """compile: `torch.compile`, or `fusion_passes.compile` with its options; identity to undo it.

        ends: what compiles the embedding and the head; the same if None.
        """
        ends = compile if ends is None else ends
        self._begin, self._layer, self._end = ends(_begin), compile(_layer), ends(_end)

    def forward(
        self, tokens: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor | None = None
    ) -> Tensor:
        """tokens, positions: int [tokens]. rows: int, the tokens whose logits are wanted; all if None.

        Returns [rows, vocab] in the model's dtype. Positions must be below config.context.
        """
        x, residual, cos, sin = self._begin(self, tokens, positions)
        for layer in self.layers:
            x, residual = self._layer(layer, x, residual, cos, sin, metadata)
        return self._end(self, x, residual, rows)


# Functions, not methods: compiled once each, whichever layer or model comes first.
def _begin(model: PagedLlama, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = model.embedding(tokens)
    return x, torch.zeros_like(x), model.cos[positions], model.sin[positions]


def _layer(
    layer: nn.Module, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata
) -> tuple[Tensor, Tensor]:
    return layer(x, residual, cos, sin, metadata)


def _end(model: PagedLlama, x: Tensor, residual: Tensor, rows: Tensor | None) -> Tensor:
    if rows is not None:
        x, residual = x[rows], residual[rows]
    return model.head(model.norm(x + residual))


# Projections of a layer, and what they are in a checkpoint.
_LINEAR = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_INPUT_SCALES = ("input_scale", "act_scale")  # the second: AutoFP8 before 0.1
# Where a checkpoint may keep the scales of a layer's cache, below `self_attn.`: compressed-tensors and AutoFP8, vLLM's
# own names, ModelOpt, and the scale of a projection's output in older ones.
_ATTENTION_SCALES = {
    **{
        f"{x}_scale": (f"{x}_scale", f"attn.{x}_scale", f"{x}_proj.{x}_scale", f"{x}_proj.output_scale")
        for x in ("q", "k", "v")
    },
    "kv_scale": ("kv_scale", "attn.kv_scale"),
    "prob_scale": ("prob_scale", "attn.prob_scale"),
}
_NEEDLESS = ("rotary_emb.inv_freq", ".output_scale", ".weight_shape")


@torch.no_grad()
def load_hugging_face(model: PagedLlama, tensors: Mapping[str, Tensor]) -> list[set[str]]:
    """Load a Llama checkpoint: bf16 or fp16, or FP8 with one static `weight_scale` and `input_scale` a projection.

    tensors: by their names in the checkpoint; may read each when it is asked for. A projection becomes FP8Linear or
    nn.Linear as its weight is FP8 or not. What is fused here takes the largest scale of its parts: codes of the others
    are quantised again, which rounds them once more.

    Returns the scales that were found for each layer's attention, of `q_scale`, `k_scale`, `v_scale`, `prob_scale`.

    Raises ValueError that names what is missing, left over, of another shape, or quantised in another way.
    """
    reader = _Reader(tensors, model.embedding.weight.device)
    model.embedding.weight.copy_(reader.shaped("model.embed_tokens.weight", model.embedding.weight))
    model.norm.weight.copy_(reader.shaped("model.norm.weight", model.norm.weight))
    if not model.config.tied:
        model.head.weight.copy_(reader.shaped("lm_head.weight", model.head.weight))
    found: list[set[str]] = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{index}."
        for ours, theirs in _NORMS.items():
            weight = layer.get_submodule(ours).weight
            assert isinstance(weight, Tensor)
            weight.copy_(reader.shaped(f"{prefix}{theirs}.weight", weight))
        for ours, parts in _LINEAR.items():
            old = layer.get_submodule(ours)
            layer.set_submodule(ours, reader.linear([prefix + part for part in parts], old, model.dtype))
        found.append(reader.attention_scales(f"{prefix}self_attn.", layer.attention.attention))
    left = [name for name in tensors if name not in reader.used and not name.endswith(_NEEDLESS)]
    if left := [name for name in left if not (model.config.tied and name == "lm_head.weight")]:
        raise ValueError(f"the checkpoint has tensors that this model has no place for: {_some(left)}")
    return found


class _Reader:
    """Takes tensors out of a checkpoint and remembers which."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self.used: set[str] = set()

    def take(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ValueError(f"the checkpoint has no {name}")
        self.used.add(name)
        return self.tensors[name].to(self.device)

    def shaped(self, name: str, like: Tensor) -> Tensor:
        tensor = self.take(name)
        if tensor.shape != like.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, the config asks for {list(like.shape)}")
        return tensor

    def scale(self, *names: str) -> Tensor:
        """A positive number, as fp32 []; the first of the names that there is."""
        name = next((name for name in names if name in self.tensors), names[0])
        if name not in self.tensors:
            raise ValueError(
                f"the checkpoint has no {name}: FP8 weights need one static scale each; use a checkpoint that has "
                "them, or the bf16 one, which is quantised at load"
            )
        scale = self.take(name).float()
        if scale.numel() != 1:
            raise ValueError(f"{name} is {list(scale.shape)}: only one scale for the whole tensor is supported")
        if not 0.0 < scale.item() < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {scale.item()}")
        return scale.reshape(())

    def linear(self, parts: list[str], old: nn.Module, dtype: torch.dtype) -> nn.Module:
        """One layer of several projections, their outputs one after the other."""
        weights = [self.take(f"{part}.weight") for part in parts]
        fp8 = [weight.dtype in FP8_DTYPES for weight in weights]
        if any(fp8) != all(fp8):
            raise ValueError(f"{', '.join(parts)}: all of them FP8 or none, since they are fused into one")
        wanted = [sum(len(weight) for weight in weights), *weights[0].shape[1:]]
        if wanted != [old.out_features, old.in_features] or any(w.shape[1:] != weights[0].shape[1:] for w in weights):
            shapes = ", ".join(f"{part} {list(w.shape)}" for part, w in zip(parts, weights, strict=True))
            raise ValueError(f"{shapes}: the config asks for {[old.out_features, old.in_features]} in all")
        layer: nn.Module
        if not all(fp8):
            if any(not weight.is_floating_point() for weight in weights):
                raise ValueError(f"{parts[0]}.weight is {weights[0].dtype}: neither FP8 nor a plain checkpoint")
            layer = nn.Linear(wanted[1], wanted[0], bias=False, device="meta", dtype=dtype)
            layer.weight = nn.Parameter(torch.cat(weights).to(dtype), requires_grad=False)
            return layer
        for part, weight in zip(parts, weights, strict=True):
            if weight.dtype != FP8:
                raise ValueError(f"{part}.weight is {weight.dtype}, only {FP8} is supported")
            if not any(f"{part}.{name}" in self.tensors for name in _INPUT_SCALES):
                raise ValueError(
                    f"{part} has no input_scale: activations that are quantised dynamically are not supported; "
                    "use a checkpoint with static scales, or the bf16 one, which is quantised at load"
                )
        scales = torch.stack([self.scale(f"{part}.weight_scale") for part in parts])
        inputs = torch.stack([self.scale(*(f"{part}.{name}" for name in _INPUT_SCALES)) for part in parts])
        layer = FP8Linear(wanted[1], wanted[0], bias=False, device="meta")
        layer.weight_scale, layer.input_scale = scales.amax(), inputs.amax()
        layer.weight = torch.cat(
            [
                weight if torch.equal(scale, layer.weight_scale) else _requantized(weight, scale, layer.weight_scale)
                for weight, scale in zip(weights, scales, strict=True)
            ]
        )
        return layer

    def attention_scales(self, prefix: str, attention: Attention) -> set[str]:
        """Set the scales of a layer's cache; those of a cache that is not FP8 have no use."""
        found: dict[str, Tensor] = {}
        for scale, names in _ATTENTION_SCALES.items():
            for name in (prefix + name for name in names):
                if name in self.tensors:
                    found.setdefault(scale, self.scale(name))
        if attention.quantized and found:
            attention.set_scales(**found)
        given = set(found) - {"kv_scale"}
        return given | {"k_scale", "v_scale"} if "kv_scale" in found else given


def _requantized(codes: Tensor, scale: Tensor, new: Tensor) -> Tensor:
    return quantize(dequantize(codes, scale), new, codes.dtype)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@torch.no_grad()
def randomize(model: PagedLlama, seed: int = 0) -> None:
    """Random weights of a trained model's size, and scales that suit them; the same on every device of one kind."""
    generator = torch.Generator(model.embedding.weight.device).manual_seed(seed)

    def normal(like: Tensor, deviation: float) -> Tensor:
        x = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        return x.normal_(0.0, deviation, generator=generator)

    for module in model.modules():
        if isinstance(module, FP8Linear):
            deviation = module.in_features**-0.5
            module.weight_scale.fill_(deviation * 6.0 / 448.0)  # largest of some million normal numbers
            module.weight.copy_(quantize(normal(module.weight, deviation), module.weight_scale, FP8))
            module.input_scale.fill_(8.0 / 448.0)
        elif isinstance(module, nn.Linear):
            module.weight.copy_(normal(module.weight, module.in_features**-0.5))
        elif isinstance(module, Attention) and module.quantized:
            module.set_scales(q_scale=0.041, k_scale=0.037, v_scale=0.043)  # reach 16 to 19; values are about 1
    model.embedding.weight.copy_(normal(model.embedding.weight, 1.0))
