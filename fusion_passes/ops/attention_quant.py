"""`attention_quant`: scaled dot-product attention whose output is FP8, and what each of its kernels supports.

The kernels' limits stand here as data, apart from the kernels, because they are asked for twice: by the legality of a
fusion, on fake tensors with symbolic sizes and without a GPU, and by the dispatcher on each call. Only what is known
for all values of a symbolic size counts as supported, and no question adds a guard.

What no kernel supports runs all the same: on copies that one does, or by scaled_dot_product_attention.
"""

import dataclasses
import functools
from dataclasses import KW_ONLY, dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_passes import reference
from fusion_passes.graph.symbolic import known
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kernel import Kernel, names
from fusion_passes.ops.support import Capability, kernel_module, launched, say_slow
from fusion_passes.quant import saturate

OP = "attention_quant"
LAYOUTS = ("bshd", "bhsd")
ALIGNMENT = 16
"""Bytes, of the addresses and strides that TMA takes."""
NEWER = "install a Triton that it works with"
MAX_DECISIONS = 4096
"""Of calls whose kernel is remembered; dynamic sizes make many."""
OUTPUT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MASK_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16)
SDPA_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionQuantArguments(Arguments):
    """Attention with FP8 output: `saturate(attention(query, key, value) / (output_scale * output_scale_factor))`.

    query: [batch, heads, q_len, head_dim]; key, value: [batch, kv_heads, kv_len, head_dim]; any floating-point dtype
    and strides. On CUDA a kernel takes bf16 and fp16, the head sizes in `KERNELS`, and a contiguous last dimension.
    attn_mask, is_causal, scale: as in `fusion_passes.reference.attention`; a mask is broadcast, never materialised.
    output_scale: fp32, one element, on query's device; read on the device in each call, so that a change in place is
    followed, under CUDA graphs too. None: 1.
    output_scale_inverse: the product of scales multiplies the output, instead of dividing it.

    Returns FP8 codes [batch, heads, q_len, head_dim]. Their memory is [batch, q_len, heads, head_dim] for layout
    "bshd", what the projection after the attention reads, or in the order of the shape for "bhsd".

    The attention value goes to FP8 from fp32: it is not rounded to query's dtype first, as separate operators would.
    Overflow saturates, NaN stays NaN. There is no gradient.

    Where no kernel takes the tensors as they lie, it takes copies with a contiguous last dimension; where none takes
    these either, for their dtype, their head size or the GPU, `scaled_dot_product_attention` runs, and its output is
    quantized in plain torch, rounded as separate operators do. The logger `fusion_passes.ops.attention_quant` warns of
    either, once for each reason.

    Raises ValueError or TypeError for arguments without a meaning.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    output_scale: Tensor | None = None
    _: KW_ONLY
    is_causal: bool = False
    scale: float | None = None
    output_scale_factor: float = 1.0
    output_scale_inverse: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn
    layout: str = "bshd"

    def validate(self) -> None:
        """Raise ValueError, or TypeError for a dtype, if the call cannot mean anything."""
        query, key, value, attn_mask, output_scale = self.query, self.key, self.value, self.attn_mask, self.output_scale
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
            shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            raise ValueError(
                f"query, key and value must be [batch, heads, length, head_dim], got {shapes}: add a batch dim"
            )
        if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
            raise TypeError(
                "query, key and value must have one floating-point dtype, "
                f"got {query.dtype}, {key.dtype} and {value.dtype}"
            )
        if not query.device == key.device == value.device:
            raise ValueError(
                f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}"
            )
        batch, heads, q_len, head_dim = query.shape
        kv_heads, kv_len = key.shape[1], key.shape[2]
        if any(known(a != b) for a, b in zip(key.shape, value.shape, strict=True)):
            raise ValueError(f"key and value must have one shape, got {list(key.shape)} and {list(value.shape)}")
        if known(key.shape[0] != batch) or known(key.shape[3] != head_dim):
            raise ValueError(
                f"query and key must share batch and head_dim, got {list(query.shape)} and {list(key.shape)}: "
                "expand the batch, and pad or project the heads, before the call"
            )
        if known(kv_heads == 0) or known(heads % kv_heads != 0):
            raise ValueError(f"the number of query heads, {heads}, must be a multiple of the key heads, {kv_heads}")
        if self.dtype not in OUTPUT_DTYPES:
            raise TypeError(f"dtype must be one of {OUTPUT_DTYPES}, got {self.dtype}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be 'bshd' or 'bhsd', got {self.layout!r}")
        if attn_mask is not None:
            if self.is_causal:
                raise ValueError("attn_mask and is_causal exclude each other: fold the causal part into the mask")
            if attn_mask.dtype not in MASK_DTYPES or attn_mask.device != query.device:
                raise TypeError(
                    f"attn_mask must be bool or floating point on {query.device}, "
                    f"got {attn_mask.dtype} on {attn_mask.device}"
                )
            target = (batch, heads, q_len, kv_len)
            sizes = zip(reversed(attn_mask.shape), reversed(target), strict=False)
            if attn_mask.ndim > 4 or any(known(size != 1) and known(size != full) for size, full in sizes):
                raise ValueError(f"attn_mask of shape {list(attn_mask.shape)} does not broadcast to {list(target)}")
        if output_scale is not None:
            if output_scale.dtype is not torch.float32:
                raise TypeError(f"output_scale must be float32, got {output_scale.dtype}: convert it with .float()")
            if known(output_scale.numel() != 1):
                raise ValueError(
                    "output_scale must hold one element (per-tensor quantization), "
                    f"got shape {list(output_scale.shape)}"
                )
            if output_scale.device != query.device:
                raise ValueError(
                    f"output_scale is on {output_scale.device}, query on {query.device}: move it there once, "
                    "for instance by making it a buffer of the module"
                )

    @property
    def aligned(self) -> bool:
        """Whether TMA takes the addresses of query, key and value."""
        return (self.query.data_ptr() | self.key.data_ptr() | self.value.data_ptr()) % ALIGNMENT == 0

    @property
    def signature(self) -> tuple[object, ...]:
        """All that validation and the choice of a kernel look at."""
        tensors = (self.query, self.key, self.value, self.attn_mask, self.output_scale)
        described = (None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors)
        return *described, self.is_causal, self.scale, self.dtype, self.layout, self.aligned

    def empty(self) -> Tensor:
        """Memory for the result."""
        return empty_output(self.query, self.dtype, self.layout)

    @property
    def is_packed(self) -> bool:
        """Whether the last dimensions of query, key and value are contiguous, as every kernel needs them."""
        return self.query.stride(-1) == self.key.stride(-1) == self.value.stride(-1) == 1

    def packed(self) -> "AttentionQuantArguments":
        """The same call, with copies of what is not."""
        query, key, value = (_packed(x) for x in (self.query, self.key, self.value))
        return dataclasses.replace(self, query=query, key=key, value=value)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionKernel(Kernel):
    """A kernel of the op and the calls that it takes."""

    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    masks: bool = True
    cross_lengths: bool = True  # q_len may differ from kv_len
    stride_bytes: int | None = None  # every stride but the last is a multiple; so is the address, checked on a call
    positive_scale: bool = False

    @property
    def limits(self) -> dict[str, str]:
        """In words, by what they are about."""
        return super().limits | {
            "inputs": f"{names(self.dtypes)}, head size {', '.join(map(str, self.head_dims))}",
            "output": names(OUTPUT_DTYPES),
            "mask": "bool or float, broadcast; causal" if self.masks else "causal, but no tensor",
            "lengths": "any" if self.cross_lengths else "as many queries as keys",
            "strides": "last is 1" + (f", others multiples of {self.stride_bytes} bytes" if self.stride_bytes else ""),
        }

    def unsupported(self, a: AttentionQuantArguments, capability: Capability | None = None) -> str | None:
        """Why this kernel cannot take a call, as a sentence, or None if it can. Real or fake tensors.

        capability: of the GPU that will run it; asked of query's device if None.
        """
        query, key = a.query, a.key
        head_dim = query.shape[-1]
        if not any(known(head_dim == d) for d in self.head_dims):
            return f"{self.name} has no head size {head_dim}, only {', '.join(map(str, self.head_dims))}"
        if query.dtype not in self.dtypes:
            return f"{self.name} takes {names(self.dtypes, ' or ')} inputs, not {names((query.dtype,))}"
        if a.attn_mask is not None and not self.masks:
            return f"{self.name} takes no attention mask"
        if not self.cross_lengths and not known(query.shape[2] == key.shape[2]):
            return f"{self.name} needs as many queries as keys, got {query.shape[2]} and {key.shape[2]}"
        if self.positive_scale and a.scale is not None and not a.scale > 0.0:
            return f"{self.name} needs a positive softmax scale, got {a.scale}"
        for label, x in (("query", query), ("key", key), ("value", a.value)):
            if not known(x.stride(-1) == 1):
                return f"{label} has stride {x.stride(-1)} in its last dimension; {self.name} needs 1"
            if self.stride_bytes is not None:
                unit = self.stride_bytes // x.element_size()
                for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
                    if not known(size == 1) and not known(stride % unit == 0):
                        return f"{label} has a stride of {stride} elements; {self.name} needs multiples of {unit}"
        return self.why_not_on(query.device, capability)


# In order of preference.
KERNELS = (
    AttentionKernel(
        name="the Hopper attention kernel",
        module="fusion_passes.kernels.attention_quant_sm90",
        head_dims=(64, 128, 256),
        capability=((9, 0), (9, 0)),
        triton=((3, 6), (3, 8)),  # Gluon is experimental: 3.8 renamed its TMA functions
        masks=False,
        cross_lengths=False,
        stride_bytes=ALIGNMENT,  # TMA
        positive_scale=True,
    ),
    AttentionKernel(
        name="the portable attention kernel",
        module="fusion_passes.kernels.attention_quant",
        head_dims=(64, 80, 96, 128, 192, 256),
        triton=((3, 2), None),
    ),
)


def choose(a: AttentionQuantArguments, capability: Capability | None = None) -> AttentionKernel | None:
    """The first of `KERNELS` that supports a call, or None. Arguments as in `Kernel.unsupported`.

    On fake tensors this is the kernel of the worst case: the sizes of a call may allow a better one.
    """
    return next((kernel for kernel in KERNELS if kernel.unsupported(a, capability) is None), None)


def why_unsupported(a: AttentionQuantArguments, capability: Capability | None = None) -> str | None:
    """Why no kernel supports a call (the sentence of the least demanding one), or None if one does.

    CPU tensors are always supported, by the reference, unless a capability is named.
    """
    if a.query.device.type == "cpu" and capability is None:
        return None
    why = None
    for kernel in KERNELS:
        if (why := kernel.unsupported(a, capability)) is None:
            break
    return why


def empty_output(query: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """An output of query's shape whose memory is as `layout` says."""
    batch, heads, q_len, head_dim = query.shape
    if layout == "bshd":
        return query.new_empty((batch, q_len, heads, head_dim), dtype=dtype).permute(0, 2, 1, 3)
    return query.new_empty((batch, heads, q_len, head_dim), dtype=dtype)


def _fake(a: AttentionQuantArguments) -> Tensor:
    a.validate()
    return a.empty()


def _cpu(a: AttentionQuantArguments) -> Tensor:
    a.validate()
    out = reference.attention_quant(**a.by_name(without=("layout",)))
    return a.empty().copy_(out)


def _cuda(a: AttentionQuantArguments) -> Tensor:
    ways = _ways(a)
    out = a.empty()
    if out.numel() == 0:
        return out
    for way in ways:
        if (why := _launched(way, a, out)) is None:
            return out
        say_slow(OP, f"runs without {way.kernel.name}", why, NEWER)
    return out.copy_(plain(a))


@dataclass(frozen=True)
class _Way:
    """How a call can run: by this kernel; packed: on copies that it takes."""

    kernel: AttentionKernel
    module: ModuleType
    packed: bool = False


def _launched(way: _Way, a: AttentionQuantArguments, out: Tensor) -> str | None:
    """None, or why the kernel cannot be compiled."""
    a = a.packed() if way.packed else a
    query = a.query
    mask = None if a.attn_mask is None else a.attn_mask.dtype
    scale = query.shape[-1] ** -0.5 if a.scale is None else a.scale
    return launched(
        lambda: (way.kernel.name, query.device, query.dtype, a.dtype, query.shape[-1], mask, a.is_causal),
        lambda: way.module.launch(out, **a.by_name(without=("dtype", "layout"), scale=scale)),
    )


def plain(a: AttentionQuantArguments) -> Tensor:
    """The op by scaled_dot_product_attention and a quantization in plain torch, which a CUDA graph can capture.

    Rounded to query's dtype in between, as separate operators are.  What scaled_dot_product_attention does not take
    (an FP8 query, a mask of another dtype) is computed in fp32.
    """
    query, key, mask = a.query, a.key, a.attn_mask
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        if query.dtype in SDPA_DTYPES and (mask is None or mask.dtype in (torch.bool, query.dtype)):
            out = F.scaled_dot_product_attention(
                *(query, key, a.value, mask),
                is_causal=a.is_causal,
                scale=a.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            ).float()
        else:
            out = reference.attention(query, key, a.value, mask, is_causal=a.is_causal, scale=a.scale)
        by = reference.product(a.output_scale_factor, a.output_scale)
        return saturate(out * by if a.output_scale_inverse else out / by, a.dtype)


@functools.lru_cache(MAX_DECISIONS)
def _decided(signature: tuple[object, ...]) -> list[tuple[_Way, ...]]:
    """The place for what is decided about calls with this signature."""
    return []


def _ways(a: AttentionQuantArguments) -> tuple[_Way, ...]:
    """Validate a call and find the kernels that can run it, best first; remembered by all that this looks at, since a
    call that launches a kernel of some microseconds must not spend more on questions."""
    decided = _decided(a.signature)
    if not decided:
        a.validate()
        decided.append(_find_ways(a))
    return decided[0]


def _find_ways(a: AttentionQuantArguments) -> tuple[_Way, ...]:
    """On the tensors as they lie, or else on copies of them; the log says so where a compilation could not know it, and
    where there is no way."""
    ways, refusals = _kernels_for(a)
    for why, advice in refusals.values() if ways else ():
        if advice:
            say_slow(OP, f"runs {ways[0].kernel.name}", why, advice)
    if not ways and not a.is_packed:
        ways = tuple(dataclasses.replace(way, packed=True) for way in _kernels_for(a.packed())[0])
        if ways:
            why, _ = refusals[ways[0].kernel]
            advice = "make them with the head dimension last in memory, for instance by .contiguous()"
            say_slow(OP, "copies query, key or value in each call", why, advice)
    if not ways:
        why, advice = refusals[KERNELS[-1]]
        advice = advice or "give it what a kernel takes, or set attention_quant='off' to leave both to torch.compile"
        say_slow(OP, "runs scaled_dot_product_attention and quantizes its output in plain torch", why, advice)
    return ways


def _kernels_for(a: AttentionQuantArguments) -> tuple[tuple[_Way, ...], dict[AttentionKernel, tuple[str, str]]]:
    """The kernels that take these tensors and can be imported, best first; and for each other why it does not, and what
    to do about it, or "" where a fake tensor has told as much."""
    ways: list[_Way] = []
    refusals = {}
    for kernel in KERNELS:
        why, advice = kernel.unsupported(a), ""
        if why is None and kernel.stride_bytes is not None and not a.aligned:
            why = f"{kernel.name} needs addresses that are multiples of {ALIGNMENT} bytes"
            advice = "clone what is a slice with an odd offset"
        if why is None:
            module = kernel_module(kernel.module)
            if isinstance(module, ModuleType):
                ways.append(_Way(kernel, module))
                continue
            why, advice = module, NEWER
        refusals[kernel] = why, advice
    return tuple(ways), refusals


def _packed(x: Tensor) -> Tensor:
    """x with its last dimension contiguous; what is expanded stays so."""
    if x.stride(-1) == 1:
        return x
    once = x
    for dim in range(x.ndim - 1):
        if x.stride(dim) == 0:
            once = once.narrow(dim, 0, min(x.shape[dim], 1))
    return once.contiguous().expand(x.shape)


attention_quant = declare(
    OP,
    AttentionQuantArguments,
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    given=("attn_mask", "output_scale"),
    kernels=KERNELS,
)
