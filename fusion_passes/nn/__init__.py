"""Layers that a model's author uses: plain torch, which Inductor and the passes see through."""

from fusion_passes.nn.attention import Attention
from fusion_passes.nn.kv_cache import AttentionMetadata, PagedKVCache, StaticKVCache
from fusion_passes.nn.linear import FP8Linear, calibrate, quantize_
from fusion_passes.nn.loading import Settled, process_weights_after_loading
from fusion_passes.nn.quant_fp8 import QuantFP8

__all__ = [
    "Attention",
    "AttentionMetadata",
    "FP8Linear",
    "PagedKVCache",
    "QuantFP8",
    "Settled",
    "StaticKVCache",
    "calibrate",
    "process_weights_after_loading",
    "quantize_",
]
