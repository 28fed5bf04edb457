"""What can compute ``nn.Attention``, and what each of them supports: a class and a place in ``BACKENDS`` each.

What a backend cannot do is said when the layer is built, not at the first call.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion_passes.nn import flex
from fusion_passes.nn.kv_cache import STATIC_PAGE_MULTIPLE, AttentionMetadata, Layout, PagedKVCache, StaticKVCache
from fusion_passes.ops import kv_cache, paged_attention, paged_attention_group_quant
from fusion_passes.ops.paged_attention import KERNEL_DTYPES, KERNEL_HEAD_DIMS, PagedAttentionArguments
from fusion_passes.ops.support import device_capability
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


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asks its backend to compute. Arguments as in ``ops.paged_attention``.

    dtype: of the result. group_size: not None for what ``ops.paged_attention_group_quant`` returns.
    """

    query: Tensor
    cache: PagedKVCache
    metadata: AttentionMetadata
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    prob_scale: Tensor | None
    output_scale: Tensor | None
    sinks: Tensor | None
    scale: float
    window: int | None
    softcap: float
    dtype: torch.dtype
    group_size: int | None

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, keys, values, block table, where queries start, lengths: the first arguments of the ops."""
        m = self.metadata
        return self.query, self.cache.key, self.cache.value, m.block_table, m.query_start, m.seq_lens

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the ops that are numbers."""
        return {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "max_query_len": self.metadata.max_query_len,
        }


class AttentionBackend:
    """A way to compute attention over a cache. None in a field means any.

    The fields are what docs/attention.md shows as the support matrix.
    """

    name: ClassVar[str]
    supports_quant_query_input: ClassVar[bool] = False
    """Takes FP8 queries with q_scale, so that the layer quantizes them in plain torch before the op."""
    supports_quant_probs: ClassVar[bool] = False
    supports_window: ClassVar[bool] = False
    supports_softcap: ClassVar[bool] = False
    supports_sinks: ClassVar[bool] = False
    ignores_hidden_values: ClassVar[bool] = True
    """Slots that a query does not see may hold anything. False: finite numbers only, NaN there may spread."""
    head_dims: ClassVar[tuple[int, ...] | None] = None
    min_head_dim: ClassVar[int] = 1
    page_sizes: ClassVar[tuple[int, ...] | None] = None
    """Of paged caches. Those of static caches, multiples of 128, all backends take."""
    layouts: ClassVar[tuple[Layout, ...]] = ("HND", "NHD")
    """In order of preference."""
    max_cache_elements: ClassVar[int | None] = None
    """Of the keys, and as many of the values."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    @classmethod
    def supports_fused_output_quant(cls, spec: QuantSpec) -> bool:
        """Whether the attention output can leave quantized like this."""
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
        if request.head_dim < cls.min_head_dim:
            reasons.append(f"head size {request.head_dim} is below {cls.min_head_dim}")
        flags = (
            ("quantized queries", request.quantize_query, cls.supports_quant_query_input),
            ("quantized probabilities", request.quantize_probs, cls.supports_quant_probs),
            ("a sliding window", request.window is not None, cls.supports_window),
            ("a soft cap", request.softcap > 0.0, cls.supports_softcap),
            ("sinks", request.sinks, cls.supports_sinks),
        )
        return reasons + [f"it has no {what.removeprefix('a ')}" for what, asked, has in flags if asked and not has]

    @classmethod
    def why_not_cache(cls, cache: PagedKVCache) -> list[str]:
        """Every reason why this backend cannot read this cache; empty if it can."""
        reasons = []
        static = isinstance(cache, StaticKVCache) and cache.page_size % STATIC_PAGE_MULTIPLE == 0
        if cls.page_sizes is not None and not static and cache.page_size not in cls.page_sizes:
            reasons.append(f"page size {cache.page_size} is not among {', '.join(map(str, cls.page_sizes))}")
        if cache.layout not in cls.layouts:
            reasons.append(f"layout {cache.layout} is not among {', '.join(cls.layouts)}")
        if cls.max_cache_elements is not None and cache.key.numel() > cls.max_cache_elements:
            reasons.append(f"{cache.key.numel()} elements are more than {cls.max_cache_elements}")
        return reasons

    @classmethod
    def attend(cls, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Compute it: [tokens, heads, head_dim] in call.dtype, and with a group_size the scales too."""
        raise NotImplementedError


class PagedAttentionOp(AttentionBackend):
    """``ops.paged_attention``, in one of its implementations."""

    implementation: ClassVar[str]
    supports_quant_query_input = True
    supports_quant_probs = True
    supports_window = True
    supports_softcap = True
    supports_sinks = True
    devices = ("cpu", "cuda")

    @classmethod
    def supports_fused_output_quant(cls, spec: QuantSpec) -> bool:
        """Static with one scale for the tensor, or dynamic with one for each group."""
        return spec.granularity == ("tensor" if spec.static else "group")

    @classmethod
    def attend(cls, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """The op, or the one with scales per group."""
        scales = (call.q_scale, call.k_scale, call.v_scale, call.prob_scale)
        options = call.options | {"dtype": call.dtype, "implementation": cls.implementation}
        if call.group_size is not None:
            return paged_attention_group_quant(*call.batch, *scales, call.sinks, **options, group_size=call.group_size)
        return paged_attention(*call.batch, *scales, call.output_scale, call.sinks, **options)


class Triton(PagedAttentionOp):
    """The kernels of this library; on the CPU their reference.

    NotImplementedError, with the reason, in a call that they cannot do.
    """

    name = "triton"
    implementation = "triton"
    head_dims = KERNEL_HEAD_DIMS
    cache_dtypes = KERNEL_DTYPES

    @classmethod
    def why_unsupported(cls, request: Request) -> list[str]:
        """Also what the GPU cannot do, if there is one."""
        reasons = super().why_unsupported(request)
        if request.device == "cuda" and torch.cuda.is_available():
            capability = device_capability(torch.device("cuda"))
            needed = (8, 9) if request.cache_dtype in FP8_DTYPES else (8, 0)
            if capability is None or capability < needed:
                found = "this is another GPU" if capability is None else "this has {}.{}".format(*capability)
                reasons.append(f"it needs an NVIDIA GPU of compute capability {needed[0]}.{needed[1]}, {found}")
        return reasons


class TritonOrGather(Triton):
    """What backend="auto" makes of it: what the kernels cannot do is gathered, and the op logs why, once."""

    implementation = "auto"


class Flex(AttentionBackend):
    """FlexAttention over the pages where they lie: for head sizes that our kernels do not have."""

    name = "flex"
    supports_window = True
    supports_softcap = True
    supports_sinks = True
    ignores_hidden_values = False
    min_head_dim = 16
    page_sizes = (16, 32, 64, 128, 256)
    layouts = ("NHD",)  # of which the pages in a row are one long sequence
    max_cache_elements = 2**31 - 1  # its kernels count in int32

    @classmethod
    def attend(cls, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """``flex.attention``. Compiled, it checks no values.

        Raises ValueError for a scale or an output that it does not have, and what ``ops.paged_attention`` does.
        """
        scales = ("q_scale", "k_scale", "v_scale", "prob_scale", "output_scale", "group_size")
        asked = ", ".join(name for name in scales if getattr(call, name) is not None)
        if asked or call.dtype != call.query.dtype:
            asked = asked or f"an output of {call.dtype}"
            raise ValueError(
                f"backend {cls.name} quantizes nothing and returns {call.query.dtype}: it cannot do {asked}"
            )
        arguments = PagedAttentionArguments(*call.batch, sinks=call.sinks, **call.options)
        if not torch.compiler.is_compiling() and kv_cache.values_are_checked(call.query.device):
            arguments.check_values()
        return flex.attention(*call.batch, call.sinks, page_size=call.cache.page_size, **call.options)


class SDPA(PagedAttentionOp):
    """Gathers the pages and computes in fp32, in plain torch: the reference, on the CPU and on a GPU."""

    name = "sdpa"
    implementation = "gather"
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cache_dtypes = (torch.bfloat16, torch.float16, torch.float32, *FP8_DTYPES)


# In order of preference.
BACKENDS: tuple[type[AttentionBackend], ...] = (Triton, Flex, SDPA)


def choose(name: str, request: Request) -> type[AttentionBackend]:
    """The backend of this name, or for "auto" the first that can do what is asked.

    Where the device is not known yet, "auto" takes only what runs on every one.

    Raises ValueError if there is none: with every reason of every backend, or of the one that was named and which
    others can.
    """
    considered = [backend for backend in BACKENDS if name in ("auto", backend.name)]
    anywhere = name == "auto" and request.device is None
    if not considered:
        raise ValueError(f"backend must be 'auto' or one of {[b.name for b in BACKENDS]}, got {name!r}")
    refusals = []
    for backend in considered:
        reasons = backend.why_unsupported(request)
        if anywhere and "cpu" not in backend.devices:
            reasons.append(f"the device is not known, it needs {' or '.join(backend.devices)}")
        if not reasons:
            return TritonOrGather if name == "auto" and backend is Triton else backend
        refusals.append(f"{backend.name}: {'; '.join(reasons)}")
    others = [repr(b.name) for b in BACKENDS if b.name != name and not b.why_unsupported(request)]
    if name != "auto" and others:
        raise ValueError(f"backend {name!r} cannot do this layer: {'; '.join(reasons)}. These can: {', '.join(others)}")
    raise ValueError("no attention backend can do this layer:\n  " + "\n  ".join(refusals))
