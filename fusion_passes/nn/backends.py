"""What can compute ``nn.Attention``, and what each of them supports: a class and a place in ``BACKENDS`` each.

What a backend cannot do is said when the layer is built, not at the first call.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fusion_passes.nn.kv_cache import AttentionMetadata, PagedKVCache
from fusion_passes.ops import paged_attention
from fusion_passes.quant import FP8_DTYPES, QuantSpec


@dataclass(frozen=True)
class Request:
    """What a layer asks of a backend. device: its type, None if it is not known yet."""

    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page_size: int
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    quantize_query: bool = False
    quantize_probs: bool = False
    device: str | None = None


class AttentionBackend:
    """A way to compute attention over a cache. None in a field means any."""

    name: ClassVar[str]
    supports_quant_query_input: ClassVar[bool] = False
    """Takes FP8 queries with q_scale, so that the layer quantises them in plain torch before the op."""
    supports_quant_probs: ClassVar[bool] = False
    supports_window: ClassVar[bool] = False
    supports_softcap: ClassVar[bool] = False
    supports_sinks: ClassVar[bool] = False
    head_dims: ClassVar[tuple[int, ...] | None] = None
    page_sizes: ClassVar[tuple[int, ...] | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    @classmethod
    def supports_fused_output_quant(cls, spec: QuantSpec) -> bool:
        """Whether the attention output can leave quantised like this."""
        del spec
        return False

    @classmethod
    def why_unsupported(cls, request: Request) -> list[str]:
        """Every reason why this backend cannot do what is asked; empty if it can."""
        table = (
            ("head size", request.head_dim, cls.head_dims),
            ("page size", request.page_size, cls.page_sizes),
            ("dtype", request.dtype, cls.dtypes),
            ("cache dtype", request.cache_dtype, cls.cache_dtypes),
            ("device", request.device, cls.devices),
        )
        reasons = [
            f"{what} {value} is not among {', '.join(map(str, supported))}"
            for what, value, supported in table
            if supported is not None and value is not None and value not in supported
        ]
        flags = (
            ("quantised queries", request.quantize_query, cls.supports_quant_query_input),
            ("quantised probabilities", request.quantize_probs, cls.supports_quant_probs),
            ("a sliding window", request.window is not None, cls.supports_window),
            ("a soft cap", request.softcap > 0.0, cls.supports_softcap),
            ("sinks", request.sinks, cls.supports_sinks),
        )
        return reasons + [f"it has no {what.removeprefix('a ')}" for what, asked, has in flags if asked and not has]

    @classmethod
    def attend(
        cls,
        query: Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        q_scale: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        prob_scale: Tensor | None,
        output_scale: Tensor | None,
        sinks: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """query: [tokens, heads, head_dim]. Returns the same shape in dtype. The rest as in ``ops.paged_attention``."""
        raise NotImplementedError


class SDPA(AttentionBackend):
    """Gathers the pages and computes in fp32, in plain torch: the reference, on the CPU and on a GPU."""

    name = "sdpa"
    supports_quant_query_input = True
    supports_quant_probs = True
    supports_window = True
    supports_softcap = True
    supports_sinks = True
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cache_dtypes = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)
    devices = ("cpu", "cuda")

    @classmethod
    def supports_fused_output_quant(cls, spec: QuantSpec) -> bool:
        """Static, one scale for the tensor."""
        return spec.static and spec.granularity == "tensor"

    @classmethod
    def attend(
        cls,
        query: Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        q_scale: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        prob_scale: Tensor | None,
        output_scale: Tensor | None,
        sinks: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """``ops.paged_attention`` by gathering."""
        return paged_attention(
            *(query, cache.key, cache.value, metadata.block_table, metadata.query_start, metadata.seq_lens),
            *(q_scale, k_scale, v_scale, prob_scale, output_scale, sinks),
            scale=scale,
            window=window,
            softcap=softcap,
            dtype=dtype,
            max_query_len=metadata.max_query_len,
            implementation="gather",
        )


# In order of preference.
BACKENDS: tuple[type[AttentionBackend], ...] = (SDPA,)


def choose(name: str, request: Request) -> type[AttentionBackend]:
    """The backend of this name, or for "auto" the first that can do what is asked.

    Raises ValueError, with every reason of every backend that was considered, if there is none.
    """
    considered = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    if not considered:
        raise ValueError(f"backend must be 'auto' or one of {[b.name for b in BACKENDS]}, got {name!r}")
    refusals = []
    for backend in considered:
        reasons = backend.why_unsupported(request)
        if not reasons:
            return backend
        refusals.append(f"{backend.name}: {'; '.join(reasons)}")
    raise ValueError("no attention backend can do this layer:\n  " + "\n  ".join(refusals))
