"""Custom operators that the fusions put into a graph: `torch.ops.fusion_passes.*`.

Each is declared once (`declare`): arguments, fake, CPU implementation, which is its reference, and a CUDA
implementation that imports its kernel on the first call.  Importing this package registers the ops of every file in it,
and needs neither Triton nor a GPU.
"""

import importlib
import pkgutil

from fusion_passes.ops.attention_quant import attention_quant
from fusion_passes.ops.kv_cache_write import kv_cache_write
from fusion_passes.ops.paged_attention import paged_attention, paged_attention_group_quant
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.ops.quantize_dynamic import quantize_fp8_dynamic
from fusion_passes.ops.rms_norm_quant import rms_norm_group_quant, rms_norm_quant
from fusion_passes.ops.rope_quant_kv_write import rope_quant_kv_write

__all__ = [
    "attention_quant",
    "kv_cache_write",
    "paged_attention",
    "paged_attention_group_quant",
    "quantize_fp8",
    "quantize_fp8_dynamic",
    "rms_norm_group_quant",
    "rms_norm_quant",
    "rope_quant_kv_write",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
