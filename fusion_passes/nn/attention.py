"""Causal attention with a KV cache: bf16, fp16 or FP8 cache, new tokens of many sequences in one batch.

The query is quantized in plain torch before the op where the backend takes FP8 queries, so that Inductor fuses it with
what comes before: RoPE, a norm, the end of the projection. The scales are live tensors.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fusion_passes.nn import backends
from fusion_passes.nn.kv_cache import AttentionMetadata, Layout, PagedKVCache, StaticKVCache
from fusion_passes.nn.loading import Settled, SettledAfterLoading, positive_number, restore
from fusion_passes.nn.quant_fp8 import QuantFP8, native_dtype
from fusion_passes.ops import kv_cache_write
from fusion_passes.quant import FP8_DTYPES, QuantSpec

CACHE_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = {"q_scale": "_q_scale", "k_scale": "_k_scale", "v_scale": "_v_scale", "prob_scale": "_prob_scale"}
"""Keys of a checkpoint and the buffers that they go to."""
CALCULATED = ("q_scale", "k_scale", "v_scale")
"""What the first batch may set, in the order of `_uncalibrated`."""
RANGES = {"q_range": 200.0, "k_range": 200.0, "v_range": 100.0}
"""What the largest magnitude of the first batch becomes as a code: leaves room below e4m3fn's 448 for later ones."""
FNUZ_FACTOR = 2.0
"""The same bits are half as much in e4m3fnuz as in e4m3fn, for which checkpoints are calibrated."""
_FROM_META = (
    "call to_empty(device=...) before weights are loaded, or after load_state_dict(assign=True) "
    "process_weights_after_loading(model, device=...)"
)


class Attention(SettledAfterLoading):
    """Softmax attention of new tokens over a KV cache that they are written to first.

    num_kv_heads: divides num_heads. scale: of the logits, ``head_dim ** -0.5`` if None.
    window: of keys that a query sees, its own among them. softcap: ``softcap * tanh(logit / softcap)``; 0 for none.
    sinks: a learned logit for each head, parameter ``sinks`` [num_heads], that takes its share of the softmax.
    kv_cache_dtype: "auto" (dtype), "fp8_e4m3" or "fp8_e5m2".
    backend: "auto" or a name from ``nn.backends.BACKENDS``.
    block_size: tokens in a page of the cache.
    quantize_query: None: where the cache is FP8 and the backend takes FP8 queries.
    quantize_probs: the probabilities go into the product with V as FP8, with ``_prob_scale``.
    calculate_kv_scales: the first batch with tokens in it sets, on the device, the scales of query, key and value that
    nobody has given.
    device: torch's default device if None. A layer on meta, or on the CPU by default, may be moved to any other.
    dtype: of query, key and value; torch's default dtype if None.

    Scales and ranges are fp32 buffers, moved by `.to(device)` and spared by `.to(dtype)`. They are not in the
    state_dict of a layer whose cache is not FP8, and never required by load_state_dict: see docs/attention.md.

    Raises ValueError where the arguments contradict each other or no backend can do what they ask.
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _prob_scale: Tensor
    q_range: Tensor
    k_range: Tensor
    v_range: Tensor
    _uncalibrated: Tensor
    sinks: nn.Parameter | None
    kv_cache: PagedKVCache | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        kv_cache_dtype: str = "auto",
        backend: str = "auto",
        block_size: int = 64,
        quantize_query: bool | None = None,
        quantize_probs: bool = False,
        calculate_kv_scales: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (num_heads, num_kv_heads, head_dim, block_size)
        if not all(isinstance(n, int) and n >= 1 for n in sizes) or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads and all sizes positive integers, got {num_heads} and "
                f"{num_kv_heads} heads of {head_dim}, block_size {block_size}"
            )
        if window is not None and not (isinstance(window, int) and window >= 1):
            raise ValueError(f"window counts the keys that a query sees, its own among them: 1 or more, got {window!r}")
        if not _is_finite(softcap) or softcap < 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, got {softcap!r}")
        if scale is not None and not _is_finite(scale):
            raise ValueError(f"scale must be a finite number, or None for head_dim ** -0.5, got {scale!r}")
        if kv_cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be one of {list(CACHE_DTYPES)}, got {kv_cache_dtype!r}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap, self.block_size = window, softcap, block_size
        self.kv_cache_dtype = kv_cache_dtype
        self.dtype = dtype or torch.get_default_dtype()
        # A layer that is moved later is built on meta, or on the CPU because nobody named a device.
        may_move = "meta" if device is not None else ("meta", "cpu")
        device = torch.get_default_device() if device is None else torch.device(device)
        known_device = None if device.type in may_move else device
        fp8 = CACHE_DTYPES[kv_cache_dtype]
        self.cache_dtype = self.dtype if fp8 is None else native_dtype(fp8, known_device)
        if fp8 is None and (quantize_query or quantize_probs or calculate_kv_scales):
            raise ValueError(
                "quantize_query, quantize_probs and calculate_kv_scales need an FP8 cache, kv_cache_dtype is 'auto'"
            )
        request = backends.Request(
            head_dim=head_dim,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            page_size=block_size,
            window=window,
            softcap=softcap,
            sinks=sinks,
            quantize_query=bool(quantize_query),
            quantize_probs=quantize_probs,
            device=None if known_device is None else known_device.type,
        )
        self.backend = backends.choose(backend, request)
        if quantize_query is None:
            quantize_query = self.quantized and self.backend.supports_quant_query_input
        self.quantize_query, self.quantize_probs = quantize_query, quantize_probs
        self.query_quant = QuantFP8(QuantSpec(self.cache_dtype)) if quantize_query else None
        self.calculate_kv_scales = calculate_kv_scales
        # What a checkpoint or a caller has set, kept on the host: a buffer's memory may come back without its value.
        self._given: dict[str, float] = {}
        for name, default in self._defaults().items():
            self.register_buffer(name, default.to(device), persistent=False)
        self.register_parameter(
            "sinks", nn.Parameter(torch.zeros(num_heads, dtype=self.dtype, device=device)) if sinks else None
        )
        self.kv_cache = None

    @property
    def quantized(self) -> bool:
        """Whether the cache is FP8."""
        return self.cache_dtype in FP8_DTYPES

    def allocate_cache(
        self, pages: int, *, layout: Layout | None = None, device: torch.device | str | None = None
    ) -> PagedKVCache:
        """Give the layer a new cache of so many pages of block_size tokens, on its own device if None.

        layout: what the backend prefers if None.
        """
        cache = PagedKVCache(
            *(pages, self.block_size, self.num_kv_heads, self.head_dim, self.cache_dtype),
            layout=layout or self.backend.layouts[0],
            device=device or self._k_scale.device,
        )
        self.bind_cache(cache)
        return cache

    def allocate_static_cache(
        self, batch: int, max_len: int, *, layout: Layout | None = None, device: torch.device | str | None = None
    ) -> StaticKVCache:
        """Give the layer a new cache with one contiguous stretch for each sequence."""
        cache = StaticKVCache(
            *(batch, max_len, self.num_kv_heads, self.head_dim, self.cache_dtype),
            layout=layout or self.backend.layouts[0],
            device=device or self._k_scale.device,
        )
        self.bind_cache(cache)
        return cache

    def bind_cache(self, cache: PagedKVCache | None) -> None:
        """Use this cache, which other layers may use too; None: none. Raises ValueError if it does not fit."""
        if cache is not None:
            _, kv_heads, _, head_dim = cache.key.shape
            found, wanted = (
                (kv_heads, head_dim, cache.dtype),
                (self.num_kv_heads, self.head_dim, self.cache_dtype),
            )
            if found != wanted:
                raise ValueError(f"the layer needs a cache of (kv heads, head_dim, dtype) {wanted}, got {found}")
            if reasons := self.backend.why_not_cache(cache):
                raise ValueError(f"backend {self.backend.name} cannot read this cache: {'; '.join(reasons)}")
        self.kv_cache = cache

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        metadata: AttentionMetadata,
        *,
        output_scale: Tensor | None = None,
        output_group_size: int | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query: [tokens, num_heads, head_dim]; key, value: [tokens, num_kv_heads, head_dim]; any strides.

        Each may also be FP8 codes of cache_dtype, already quantized with the layer's scale for it.
        key and value None: nothing is written, for a layer that reads what another one has written.
        output_scale: fp32, one element: the output leaves as FP8 codes.
        output_group_size: the output leaves as FP8 codes with a scale, chosen on the way, for each so many columns of a
        head.
        output_dtype: of those codes; the cache's dtype if None, or e4m3 as the device has it if the cache is not FP8.

        Returns [tokens, num_heads, head_dim], in the layer's dtype if it leaves unquantized, and with output_group_size
        the fp32 scales, [tokens, num_heads, head_dim // output_group_size], as well. Padding is 0.
        """
        cache = self._checked_cache(query, key, value, metadata)
        out_dtype = self._output_dtype(output_scale, output_group_size, output_dtype, query.device)
        if self.calculate_kv_scales:
            self._calculate_scales(query, key, value, metadata)
        k_scale, v_scale = (self._k_scale, self._v_scale) if self.quantized else (None, None)
        if key is not None and value is not None:
            scales = (None, None) if key.dtype in FP8_DTYPES else (k_scale, v_scale)
            kv_cache_write(key, value, cache.key, cache.value, metadata.slot_mapping, *scales)
        if self.query_quant is not None and query.dtype not in FP8_DTYPES:
            query, _ = self.query_quant(query, self._q_scale)
        call = backends.AttentionCall(
            query=query,
            cache=cache,
            metadata=metadata,
            q_scale=self._q_scale if query.dtype in FP8_DTYPES else None,
            k_scale=k_scale,
            v_scale=v_scale,
            prob_scale=self._prob_scale if self.quantize_probs else None,
            output_scale=output_scale,
            sinks=self.sinks,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            dtype=out_dtype,
            group_size=output_group_size,
        )
        return self.backend.attend(call)

    def set_scales(self, **values: Tensor | float) -> None:
        """Set scales by their names in a checkpoint: q_scale, k_scale, v_scale, prob_scale, or kv_scale for two.

        ``value = code * scale`` with codes in e4m3fn (or e5m2); on hardware with the fnuz form the layer uses twice
        the scale. Changed in place, so that compiled and captured graphs follow. calculate_kv_scales leaves it alone.
        Waits for the device, so not during a capture.

        Raises ValueError for another name and for a scale that is not one positive, finite number; none is set then.
        """
        scales = {}
        for name, value in _split_kv_scale(values).items():
            if name not in SCALES:
                raise ValueError(f"scales are {list(SCALES)} and kv_scale, got {name!r}")
            buffer = self._buffers[SCALES[name]]
            if buffer is None or buffer.is_meta:
                raise ValueError(f"{name} cannot be set on the meta device: call to_empty(device=...) first")
            scales[name] = buffer, self._native_scale(name, value)
        for name, (buffer, scale) in scales.items():
            buffer.fill_(scale)
            self._given[name] = scale
            if name in CALCULATED:
                self._uncalibrated[CALCULATED.index(name)] = False

    def process_weights_after_loading(self, name: str = "", *, device: torch.device | str | None = None) -> Settled:
        """Settle the scales when all weights are in, whatever loaded them; no buffer but one on meta changes its place.

        Scales that came from a checkpoint or set_scales are written again, so that they are what was given even where
        their memory was released and came back as zeros. All others become 1, also where dummy weights or to_empty have
        filled them with something, and all are 1 if the cache is not FP8; the ranges become what they were at first.
        With calculate_kv_scales the first batch is armed again for the scales that nobody gave.
        name: of the layer, for messages. device: for buffers that are still on the meta device.

        Returns what was restored, reset and re-armed. Warns of scales in use that are 1 because nobody gave them, and
        of a good value in a buffer that is not the given one: it is lost, set_scales would have kept it.
        Raises ValueError if there are buffers on meta and no device is given.
        """
        if not self.quantized:
            self._given.clear()
        label, prefix = name or "attention", f"{name}." if name else ""
        restored = []
        for buffer, value in self._defaults().items():
            current, scale = self._buffers[buffer], buffer.removeprefix("_")
            if current is None or current.is_meta:
                if device is None:
                    raise ValueError(
                        f"{name or 'the layer'}: {scale} is on the meta device: "
                        "say where to make it: process_weights_after_loading(..., device=...)"
                    )
                self._buffers[buffer] = value.to(device)
                continue
            held = None if isinstance(current, FakeTensor) or scale not in self._given else positive_number(current)
            if restore(current, value) and (scale in self._given or buffer in RANGES):
                restored.append(prefix + scale)
                if held is not None:
                    warnings.warn(
                        f"{label}: {scale} was {held:g} in its buffer and is {self._given[scale]:g} again, as it was "
                        "given: a write to the buffer lasts until weights are loaded, set_scales for good",
                        stacklevel=2,
                    )
        used = ["k_scale", "v_scale", *["q_scale"] * self.quantize_query, *["prob_scale"] * self.quantize_probs]
        not_given = [scale for scale in used if scale not in self._given] if self.quantized else []
        missing = [scale for scale in not_given if not (self.calculate_kv_scales and scale in CALCULATED)]
        if missing:
            warnings.warn(
                f"{label}: the {self.kv_cache_dtype} cache uses {', '.join(missing)} = 1, which no "
                "checkpoint has set: accuracy may suffer. Load scales, call set_scales, or use calculate_kv_scales",
                stacklevel=2,
            )
        rearmed = [s for s in CALCULATED if self.calculate_kv_scales and s not in self._given]
        return Settled(
            restored=tuple(restored),
            reset=tuple(prefix + scale for scale in missing),
            rearmed=tuple(prefix + scale for scale in rearmed),
        )

    def _defaults(self) -> dict[str, Tensor]:
        """All buffers before the first batch: scales are those that were given, and 1."""
        values = {buffer: self._given.get(scale, 1.0) for scale, buffer in SCALES.items()} | RANGES
        fp32 = {buffer: torch.tensor(x, dtype=torch.float32, device="cpu") for buffer, x in values.items()}
        uncalibrated = [self.calculate_kv_scales and scale not in self._given for scale in CALCULATED]
        return fp32 | {"_uncalibrated": torch.tensor(uncalibrated, device="cpu")}

    def _calculate_scales(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, metadata: AttentionMetadata
    ) -> None:
        """The scales of the first batch, without a branch on the device's values; padding does not count."""
        token = metadata.is_token[:, None, None]
        first = self._uncalibrated & token.any()
        for i, (x, scale, limit) in enumerate(
            (
                (query, self._q_scale, self.q_range),
                (key, self._k_scale, self.k_range),
                (value, self._v_scale, self.v_range),
            )
        ):
            if x is None or x.dtype in FP8_DTYPES or x.shape[0] == 0:
                continue
            amax = torch.where(token, x.detach().float().abs(), 0.0).flatten().amax()
            chosen = torch.where((amax > 0.0) & amax.isfinite(), amax / limit, 1.0)
            scale.copy_(torch.where(first[i], chosen, scale))
        self._uncalibrated.copy_(self._uncalibrated & ~first)

    def _checked_cache(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        metadata: AttentionMetadata,
    ) -> PagedKVCache:
        if self.kv_cache is None:
            raise RuntimeError("the layer has no cache: call allocate_cache, allocate_static_cache or bind_cache")
        if not isinstance(metadata, AttentionMetadata):
            raise TypeError(
                f"metadata must be an AttentionMetadata, got {type(metadata).__name__}: "
                "make one with AttentionMetadata.from_lengths"
            )
        if metadata.page_size is not None and metadata.page_size != self.kv_cache.page_size:
            raise ValueError(
                f"the metadata is for pages of {metadata.page_size} tokens, the layer's cache has pages of "
                f"{self.kv_cache.page_size}: make it with page_size=attention.kv_cache.page_size"
            )
        if (key is None) != (value is None):
            raise ValueError("key and value are given together or not at all")
        if query.shape[1:] != (self.num_heads, self.head_dim):
            raise ValueError(f"query must be [tokens, {self.num_heads}, {self.head_dim}], got {list(query.shape)}")
        dtypes = (self.dtype, self.cache_dtype) if self.quantized else (self.dtype,)
        if query.dtype not in dtypes:
            raise TypeError(f"the layer is for queries of {self.dtype}, got {query.dtype}")
        if query.dtype in FP8_DTYPES and not self.backend.supports_quant_query_input:
            raise TypeError(f"backend {self.backend.name} takes no FP8 queries")
        if query.device.type not in self.backend.devices:
            raise ValueError(
                f"backend {self.backend.name} runs on {', '.join(self.backend.devices)}, not {query.device}"
            )
        for name, buffer in SCALES.items():
            if (device := self._buffers[buffer].device) != query.device:  # type: ignore[union-attr]
                advice = "move the layer with .to()" if device.type != "meta" else _FROM_META
                raise ValueError(f"{name} is on {device}, the query on {query.device}: {advice}")
        if (device := self.kv_cache.key.device) != query.device:
            raise ValueError(
                f"the cache is on {device}, the query on {query.device}: give the layer one there, "
                "with allocate_cache(..., device=...) or bind_cache"
            )
        return self.kv_cache

    def _output_dtype(
        self, scale: Tensor | None, group_size: int | None, dtype: torch.dtype | None, device: torch.device
    ) -> torch.dtype:
        """What the output leaves in. Raises ValueError or TypeError for an output that there is not."""
        if scale is None and group_size is None:
            if dtype is not None:
                raise ValueError("output_dtype goes with output_scale or output_group_size")
            return self.dtype
        if scale is not None and not isinstance(scale, Tensor):
            raise TypeError(f"output_scale must be a tensor, read on the device in each call, got {scale!r}")
        if scale is not None and group_size is not None:
            raise ValueError("output_scale is one given scale, output_group_size asks for many: give one of them")
        if group_size is not None and (group_size < 1 or self.head_dim % group_size):
            raise ValueError(f"output_group_size must divide head_dim, {self.head_dim}, got {group_size}")
        dtype = dtype or (self.cache_dtype if self.quantized else native_dtype(torch.float8_e4m3fn, device))
        spec = QuantSpec(dtype) if group_size is None else QuantSpec(dtype, "group", group_size, static=False)
        if not self.backend.supports_fused_output_quant(spec):
            raise ValueError(f"backend {self.backend.name} has no output quantized as {spec}")
        return dtype

    def _native_scale(self, name: str, value: Tensor | float) -> float:
        scale = positive_number(value)
        if scale is None:
            raise ValueError(f"{name} must be one positive, finite number, got {value!r}")
        return scale * FNUZ_FACTOR if self._fnuz and name != "prob_scale" else scale

    @property
    def _fnuz(self) -> bool:
        return self.cache_dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = {name: state_dict.pop(prefix + name) for name in (*SCALES, "kv_scale") if prefix + name in state_dict}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not self.quantized:
            return
        for name, value in _split_kv_scale(found).items():
            buffer = self._buffers[SCALES[name]]
            if buffer is not None and buffer.is_meta:
                if not local_metadata.get("assign_to_params_buffers", False):
                    continue  # like any other weight: there is nothing to copy to
                self._buffers[SCALES[name]] = torch.ones(
                    (), device=value.device if isinstance(value, Tensor) else "cpu"
                )
            try:
                self.set_scales(**{name: value})
            except ValueError as error:
                error_msgs.append(f"{prefix}{name if name in found else 'kv_scale'}: {error}")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        names = set(self._given)
        if self.calculate_kv_scales and not self._uncalibrated.is_meta:
            names |= {name for name, yet_to in zip(CALCULATED, self._uncalibrated.tolist(), strict=True) if not yet_to}
        for name in SCALES:
            if name in names and self.quantized:
                scale = self._buffers[SCALES[name]]
                assert scale is not None
                halved = self._fnuz and name != "prob_scale"
                destination[prefix + name] = scale / FNUZ_FACTOR if halved else scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Attention":
        before = {name: self._buffers[name] for name in self._defaults()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        lost = set()
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None:
                continue
            if new.dtype != old.dtype:
                new = self._buffers[name] = old.to(new.device)
            if not _has_values_of(new, old):
                lost.add(name)
        if lost:
            self._given = {scale: x for scale, x in self._given.items() if SCALES[scale] not in lost}
            defaults = self._defaults()  # without what is no longer given
            for name in lost | {"_uncalibrated"}:
                self._buffers[name].copy_(defaults[name])  # type: ignore[union-attr]
        return self

    def extra_repr(self) -> str:
        options = {"window": self.window, "softcap": self.softcap or None, "sinks": self.sinks is not None or None}
        shown = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
        return (
            f"{self.num_heads}, {self.num_kv_heads}, {self.head_dim}, cache {self.cache_dtype}, "
            f"backend={self.backend.name}{shown}"
        )


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def _has_values_of(new: Tensor, old: Tensor) -> bool:
    """Whether ``Module._apply`` has carried the values over: to_empty, from meta or not, leaves whatever was there."""
    if new.is_meta or old.is_meta:
        return new.is_meta and old.is_meta
    return new is old or isinstance(new, FakeTensor) or torch.equal(new.cpu(), old.cpu())


def _split_kv_scale(values: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """kv_scale, which older checkpoints have, stands for those of k_scale and v_scale that are not given."""
    split = dict(values)
    if "kv_scale" in split:
        both = split.pop("kv_scale")
        split = {"k_scale": both, "v_scale": both} | split
    return split
