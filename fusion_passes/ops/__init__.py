"""Custom operators that the fusions put into a graph: `torch.ops.fusion_passes.*`.

Each has a schema, an exact fake implementation, its reference as CPU implementation, and a CUDA implementation that
imports its kernel on the first call. Importing this package registers them and needs neither Triton nor a GPU.
"""

from fusion_passes.ops.attention_quant import attention_quant
from fusion_passes.ops.kv_cache_write import kv_cache_write
from fusion_passes.ops.paged_attention import paged_attention, paged_attention_group_quant
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.ops.quantize_dynamic import quantize_fp8_dynamic
from fusion_passes.ops.rope_quant_kv_write import rope_quant_kv_write

__all__ = [
    "attention_quant",
    "kv_cache_write",
    "paged_attention",
    "paged_attention_group_quant",
    "quantize_fp8",
    "quantize_fp8_dynamic",
    "rope_quant_kv_write",
]
