"""``paged_attention``: causal attention of new tokens over a paged KV cache; prefill, decode and mixtures in one batch.

``paged_attention_group_quant`` is the same with FP8 output and a scale for each group of a head's columns. Lengths,
pages and scales stay on the device, so that a captured CUDA graph serves other batches. On the CPU both are their
reference.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import SymInt, Tensor

from fusion_passes import reference
from fusion_passes.graph.symbolic import known
from fusion_passes.ops import kv_cache, support
from fusion_passes.ops.declare import Arguments, declare
from fusion_passes.ops.kernel import Kernel, names
from fusion_passes.quant import FP8_DTYPES, SMALLEST_SCALE, QuantSpec, check_lower_bound, choose_scale, quantize

IMPLEMENTATIONS = ("auto", "triton", "gather")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)
MAX_SEQUENCES = 65535
"""Of a CUDA grid's third dimension."""
ROW_BYTES = 16
"""What the kernels copy at a time."""
GATHER_BYTES = 1 << 28
"""What ``gather`` aims to use for the keys, values and scores of the sequences that it takes at a time."""

_TAKES = {
    "query": names(KERNEL_DTYPES),
    "cache": names(KERNEL_DTYPES),
    "head size": ", ".join(map(str, KERNEL_HEAD_DIMS)),
    "page size": "any",
    "output": "bfloat16/float16, FP8 per tensor or group",
}
DECODE = Kernel(
    name="the paged decode kernel",
    module="fusion_passes.kernels.paged_decode",
    takes={"for": "sequences with 1 to 16 new tokens"} | _TAKES,
)
HOPPER_PREFILL = Kernel(
    name="the Hopper paged prefill kernel",
    module="fusion_passes.kernels.paged_prefill_sm90",
    capability=((9, 0), (9, 0)),
    triton=((3, 6), (3, 8)),  # Gluon, as in `attention_quant`
    takes={
        "for": "more new tokens; what it does not take the portable one does",
        "query": "of the cache's dtype, or quantized first",
        "cache": names(KERNEL_DTYPES),
        "head size": "64, 128, 256 (FP8: 64, 128)",
        "page size": "any with pages that fill tiles",
        "output": "bfloat16/float16, FP8 per tensor or group of a whole head",
    },
)
PREFILL = Kernel(
    name="the portable paged prefill kernel",
    module="fusion_passes.kernels.paged_prefill",
    takes={"for": "more new tokens"} | _TAKES,
)
KERNELS = (DECODE, HOPPER_PREFILL, PREFILL)

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, Tensor])
"""The output of ``paged_attention``, or codes and scales of ``paged_attention_group_quant``."""


@dataclass(frozen=True, eq=False)
class BatchArguments(Arguments, ABC, Generic[Result]):
    """What both ops are called with: what the fields mean, ``paged_attention`` says."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    prob_scale: Tensor | None = None
    _: KW_ONLY
    scale: float
    window: int | None = None
    softcap: float = 0.0
    dtype: torch.dtype | None = None
    max_query_len: int | SymInt | None = None
    implementation: str = "auto"

    def __post_init__(self) -> None:
        kv_cache.validate_cache(self.key_cache, self.value_cache)
        scales = {
            "q_scale": self.q_scale,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "prob_scale": self.prob_scale,
            "output_scale": self.output_scale,
        }
        kv_cache.validate_scales(**scales)
        _validate_batch(self.query, self.key_cache, self.block_table, self.query_start, self.seq_lens)
        kv_cache.validate_devices(
            self.query.device,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            block_table=self.block_table,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            sinks=self.sinks,
            **scales,
        )
        self._validate_numbers()
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {self.implementation!r}")
        self._validate_output()

    def _validate_numbers(self) -> None:
        query, cache, sinks = self.query, self.key_cache, self.sinks
        fp8_query, fp8_cache = query.dtype in FP8_DTYPES, cache.dtype in FP8_DTYPES
        if not fp8_query and query.dtype not in kv_cache.HIGH_PRECISION_DTYPES:
            raise TypeError(f"query must be FP8, bfloat16, float16 or float32, got {query.dtype}")
        if not fp8_cache and not fp8_query and query.dtype != cache.dtype:
            raise TypeError(f"query is {query.dtype}, the cache {cache.dtype}: one dtype, or an FP8 cache")
        if not fp8_cache and any(x is not None for x in (self.k_scale, self.v_scale, self.prob_scale)):
            raise ValueError(f"k_scale, v_scale and prob_scale belong to an FP8 cache, this one is {cache.dtype}")
        if self.q_scale is not None and not fp8_query and not fp8_cache:
            raise ValueError(
                "q_scale with a query that is not FP8 asks to quantize it like the cache, which is not FP8"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window counts the keys that a query sees, its own among them: 1 or more, got {self.window}"
            )
        if self.softcap < 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, got {self.softcap}")
        if sinks is not None and (sinks.ndim != 1 or known(sinks.shape[0] != query.shape[1])):
            raise ValueError(f"sinks must be one logit for each of {query.shape[1]} heads, got {list(sinks.shape)}")
        if sinks is not None and sinks.dtype not in kv_cache.HIGH_PRECISION_DTYPES:
            raise TypeError(f"sinks must be bfloat16, float16 or float32, got {sinks.dtype}")

    @property
    @abstractmethod
    def out_dtype(self) -> torch.dtype:
        """What ``dtype`` comes to."""

    @property
    @abstractmethod
    def sinks(self) -> Tensor | None:
        """A field of either."""

    @property
    def output_scale(self) -> Tensor | None:
        """A field of ``paged_attention``."""
        return None

    @property
    def group_size(self) -> int | None:
        """A field of ``paged_attention_group_quant``."""
        return None

    @property
    def scale_lower_bound(self) -> float | None:
        """A field of ``paged_attention_group_quant``."""
        return None

    @abstractmethod
    def empty(self) -> Result:
        """Memory for the result."""

    @abstractmethod
    def rounded(self, out: Tensor) -> Result:
        """The result from the fp32 attention."""

    @abstractmethod
    def _validate_output(self) -> None:
        """Raise ValueError or TypeError for an output without a meaning."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to attend to, and all of the output is 0."""
        return 0 in (self.query.shape[0], *self.block_table.shape, self.key_cache.shape[0], self.key_cache.shape[2])

    def check_values(self) -> None:
        """Raise ValueError or IndexError for lengths and pages without a meaning. Waits for the device."""
        pages, _, page_size, _ = self.value_cache.shape
        kv_cache.check_batch(
            *(self.query.shape[0], pages, page_size, self.block_table, self.query_start, self.seq_lens),
            window=self.window,
            max_query_len=None if self.max_query_len is None else int(self.max_query_len),
        )


@dataclass(frozen=True, eq=False)
class PagedAttentionArguments(BatchArguments[Tensor]):
    """Causal attention of each sequence's new tokens, its last ones, over all its tokens in the cache.

    query: [tokens, heads, head_dim], the new tokens of all sequences in a row, any strides; bf16, fp16, fp32, or FP8
    codes with q_scale. A query that is not FP8 but has a q_scale is quantized like the cache first.
    key_cache, value_cache: [pages, kv_heads, page_size, head_dim], any memory order with head_dim innermost; FP8 codes
    with k_scale and v_scale, or query's dtype. The new tokens are in it already.
    block_table: int32 [seqs, max_pages], the pages of each sequence; entries beyond its length are never used.
    query_start: int32 [seqs + 1], from 0: the tokens of sequence s are query_start[s] to query_start[s + 1] - 1.
    seq_lens: int32 [seqs], cached and new tokens together. The last query sees all keys, the one before all but one.
    q_scale, k_scale, v_scale, prob_scale, output_scale: fp32, one element, read on the device in each call; None: 1.
    prob_scale: if given, ``exp(logit - row maximum)`` goes into the product with V as FP8 codes of the cache's dtype;
    the sum of the softmax is over the unquantized numbers. The kernels take the maximum of the keys seen so far.
    sinks: [heads], a logit for each head that takes its share of the softmax and has no value.
    scale: of the logits. softcap: ``softcap * tanh(logit / softcap)``, after all scales; 0 for none.
    window: of keys that a query sees, its own among them; None for all.
    dtype: of the output, query's if None. FP8 output is ``saturate(attention / output_scale)``, from fp32.
    max_query_len: no sequence has more new tokens. A promise that saves work: 1 when all sequences decode.
    implementation: on a GPU "triton" for the kernels, NotImplementedError where they cannot; "gather" for plain torch,
    slow; "auto" for "triton" unless ``why_unsupported`` has a reason, then "gather" and a line in the log. On the
    CPU all are the reference.

    Returns contiguous [tokens, heads, head_dim]. A token beyond query_start[-1], or of a sequence of length 0, is 0.
    What is not visible to any query is never multiplied, so stale NaN in unused slots stays there.

    Raises ValueError or TypeError for arguments without a meaning. Lengths that contradict each other, a table too
    short and pages outside the cache are errors on the CPU, and on a GPU with FUSION_PASSES_CHECK=1; otherwise nothing
    outside the cache is read, and the result is undefined. There is no gradient.
    """

    output_scale: Tensor | None = None
    sinks: Tensor | None = None

    def _validate_output(self) -> None:
        dtype = self.out_dtype
        if self.dtype is None and self.query.dtype in FP8_DTYPES:
            raise TypeError("dtype says what to return; it can only be left out if query is not FP8")
        if dtype not in (*kv_cache.HIGH_PRECISION_DTYPES, *FP8_DTYPES):
            raise TypeError(f"dtype must be FP8, bfloat16, float16 or float32, got {dtype}")
        if self.output_scale is not None and dtype not in FP8_DTYPES:
            raise ValueError(f"output_scale belongs to FP8 output, not to {dtype}")

    @property
    def out_dtype(self) -> torch.dtype:
        """What ``dtype`` comes to."""
        return self.dtype or self.query.dtype

    def empty(self) -> Tensor:
        """Memory for the result."""
        return self.query.new_empty(self.query.shape, dtype=self.out_dtype)

    def rounded(self, out: Tensor) -> Tensor:
        """The result from the fp32 attention."""
        return reference.rounded(out, self.output_scale, self.out_dtype)


@dataclass(frozen=True, eq=False)
class PagedAttentionGroupQuantArguments(BatchArguments[tuple[Tensor, Tensor]]):
    """``paged_attention`` quantized in groups of a head's columns, with scales chosen from the fp32 attention.

    dtype: FP8, e4m3fn if None. group_size: divides head_dim. scale_lower_bound: as of ``quant.choose_scale``. The rest
    as in ``paged_attention``.

    Returns codes [tokens, heads, head_dim] and fp32 scales [tokens, heads, head_dim // group_size], both contiguous,
    as ``quant.choose_scale`` and ``quant.quantize`` make them for ``QuantSpec(dtype, "group", group_size,
    static=False)``. Where the attention is 0, the scale is the lower bound and the codes are 0, or NaN if that is 0.
    """

    sinks: Tensor | None = None
    _: KW_ONLY
    group_size: int = 128
    scale_lower_bound: float | None = None

    def _validate_output(self) -> None:
        if self.out_dtype not in FP8_DTYPES:
            raise TypeError(f"dtype must be FP8 for scales per group, got {self.out_dtype}")
        if self.group_size < 1 or known(self.query.shape[2] % self.group_size != 0):
            raise ValueError(f"group_size must divide head_dim, {self.query.shape[2]}, got {self.group_size}")
        check_lower_bound(self.scale_lower_bound)

    @property
    def out_dtype(self) -> torch.dtype:
        """What ``dtype`` comes to."""
        return self.dtype or torch.float8_e4m3fn

    def empty(self) -> tuple[Tensor, Tensor]:
        """Memory for codes and scales."""
        codes = self.query.new_empty(self.query.shape, dtype=self.out_dtype)
        *outer, head_dim = self.query.shape
        return codes, self.query.new_empty((*outer, head_dim // self.group_size), dtype=torch.float32)

    def rounded(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales from the fp32 attention."""
        spec = QuantSpec(self.out_dtype, "group", self.group_size, static=False)
        scales = choose_scale(out, spec, self.scale_lower_bound)
        return quantize(out, scales, spec.dtype), scales


def _validate_batch(
    query: Tensor, key_cache: Tensor, block_table: Tensor, query_start: Tensor, seq_lens: Tensor
) -> None:
    _, kv_heads, _, head_dim = key_cache.shape
    if query.ndim != 3 or known(query.shape[2] != head_dim):
        raise ValueError(f"query must be [tokens, heads, {head_dim}] for this cache, got {list(query.shape)}")
    if known(kv_heads == 0) or known(query.shape[1] % kv_heads != 0):
        raise ValueError(
            f"the number of query heads, {query.shape[1]}, must be a multiple of the key heads, {kv_heads}"
        )
    for name, x, ndim in (("block_table", block_table, 2), ("query_start", query_start, 1), ("seq_lens", seq_lens, 1)):
        if x.dtype is not torch.int32:
            raise TypeError(f"{name} must be int32, got {x.dtype}: convert it with .int()")
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, got {list(x.shape)}")
    seqs = seq_lens.shape[0]
    if known(block_table.shape[0] != seqs) or known(query_start.shape[0] != seqs + 1):
        raise ValueError(
            f"seq_lens has {seqs} sequences; block_table needs as many rows and query_start one element more, "
            f"got {list(block_table.shape)} and {list(query_start.shape)}"
        )


def _cpu(a: BatchArguments[Result]) -> Result:
    a.check_values()
    own = ("implementation", "max_query_len", "output_scale", "group_size", "scale_lower_bound")
    out = reference.paged_attention(**a.by_name(without=own, dtype=torch.float32))
    return a.rounded(out)


def _cuda(a: BatchArguments[Result]) -> Result:
    if kv_cache.values_are_checked(a.query.device):
        a.check_values()
    if a.implementation == "gather" or a.is_empty:
        return gather(a)
    result = a.empty()
    if (why := why_unsupported(a) or _kernels(a, result)) is None:
        return result
    if a.implementation == "triton":
        raise NotImplementedError(f"the Triton kernels do not support this call: {why}; implementation='auto' does")
    advice = "give it what they take, or take implementation='gather' (backend='sdpa' of nn.Attention) by name"
    support.say_slow(
        "paged_attention", "gathers the pages", f"the Triton kernels do not support this call: {why}", advice
    )
    return gather(a)


def why_unsupported(a: BatchArguments[Any], capability: support.Capability | None = None) -> str | None:
    """Why ``implementation="auto"`` gathers the pages of these tensors, or None if the kernels take them.

    capability: of a device to ask about, query's own if None.
    """
    capability = capability or support.device_capability(a.query.device)
    tensors = {"query": a.query, "the cache": a.key_cache}
    dtypes = {name: x.dtype for name, x in tensors.items()} | {"the output": a.out_dtype}
    if capability is None or support.triton_version() is None:
        return "they need an NVIDIA GPU and Triton"
    if capability < (8, 0) or (capability < (8, 9) and any(x in FP8_DTYPES for x in dtypes.values())):
        return f"they need compute capability 8.0, and 8.9 for FP8, this is {capability[0]}.{capability[1]}"
    for name, dtype in dtypes.items():
        if dtype not in KERNEL_DTYPES:
            return f"{name} is {dtype}, they have bfloat16, float16, float8_e4m3fn and float8_e5m2"
    head_dim, seqs = a.query.shape[2], a.block_table.shape[0]
    if head_dim not in KERNEL_HEAD_DIMS:
        return f"head_dim is {head_dim}, they have {', '.join(map(str, KERNEL_HEAD_DIMS))}"
    if seqs > MAX_SEQUENCES:
        return f"{seqs} sequences, they have up to {MAX_SEQUENCES}"
    for cache in (a.key_cache, a.value_cache):
        starts = (cache.data_ptr(), *(stride * cache.itemsize for stride in cache.stride()[:3]))
        if any(start % ROW_BYTES for start in starts):
            return f"the rows of the cache must start at multiples of {ROW_BYTES} bytes"
    return None


def _kernels(a: BatchArguments[Result], result: Result) -> str | None:
    """Fill the result by the kernels: None where they ran, or why they cannot be imported or compiled."""
    for kernel in (DECODE, PREFILL):
        module = support.kernel_module(kernel.module)
        if isinstance(module, str):
            return module
    dtypes = a.query.dtype, a.key_cache.dtype, a.out_dtype
    return support.launched(
        lambda: ("paged", a.query.device, dtypes, a.query.shape[1:], a.key_cache.shape[1:], a.group_size),
        lambda: _launch(a, result),
    )


def _launch(a: BatchArguments[Any], result: Tensor | tuple[Tensor, Tensor]) -> None:
    """Sequences with few new tokens by one kernel, those with many by another, each sorted out on the device."""
    from fusion_passes.kernels import paged_decode, paged_prefill

    out, out_scales = result if isinstance(result, tuple) else (result, None)
    tokens = a.query.shape[0]
    if out.numel() == 0:
        return
    tensors = (
        *(a.query if a.query.stride(2) == 1 else a.query.contiguous(), a.key_cache, a.value_cache),
        *(a.block_table if a.block_table.stride(1) == 1 else a.block_table.contiguous(),),
        *(a.query_start.contiguous(), a.seq_lens.contiguous()),
        *(a.q_scale, a.k_scale, a.v_scale, a.prob_scale, a.output_scale),
        *(None if a.sinks is None else a.sinks.contiguous(),),
    )
    longest = tokens if a.max_query_len is None else min(int(a.max_query_len), tokens)
    smallest_scale = SMALLEST_SCALE if a.scale_lower_bound is None else a.scale_lower_bound
    few = max(1, min(longest, paged_decode.MAX_QUERY_LEN))
    paged_decode.launch(
        *(out, out_scales, *tensors),
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
        smallest_scale=smallest_scale,
        max_query_len=few,
        mixed=a.block_table.shape[0] > 1 and (a.max_query_len is None or longest > few),
    )
    if longest > few:
        paged_prefill.launch(
            *(out, None if out_scales is None else out_scales.flatten(1), *tensors),
            scale=a.scale,
            window=a.window,
            softcap=a.softcap,
            smallest_scale=smallest_scale,
            longer_than=few,
        )


def gather(a: BatchArguments[Result]) -> Result:
    """The op without a question to the device and without a kernel of ours: plain torch that a CUDA graph can capture.

    Some sequences at a time, each with all the keys that its row of the block table can hold and max_query_len queries
    (all tokens, if that is unknown). Entries of the table outside the cache are read as the nearest page.
    """
    query, query_start, seq_lens = a.query, a.query_start, a.seq_lens
    tokens, heads, head_dim = query.shape
    seqs, columns = a.block_table.shape
    pages, kv_heads, page_size, _ = a.key_cache.shape
    keys = columns * page_size if pages else 0
    queries = tokens if a.max_query_len is None else min(int(a.max_query_len), tokens)
    if seqs * keys * queries == 0:
        return a.rounded(query.new_zeros(query.shape, dtype=torch.float32))
    query = reference.as_queried(query, a.q_scale, a.key_cache.dtype)
    each = 4 * (2 * keys * kv_heads * head_dim + 2 * queries * heads * keys)
    step = max(1, GATHER_BYTES // each)
    row = torch.arange(queries, device=query.device)
    position = torch.arange(keys, device=query.device)
    first, counts = query_start[:-1].long(), query_start.diff()
    table = a.block_table.clamp(0, pages - 1).long()
    parts = []
    for i in range(0, seqs, step):
        part = slice(i, i + step)
        taken = (first[part, None] + row).clamp(0, tokens - 1)
        at = seq_lens[part, None] - counts[part, None] + row  # [sequences, queries]: the position of a query
        seen = reference.visible(at, position, a.window) & (row < counts[part, None])[..., None]
        key, value = (
            reference.bits(cache)[table[part]].view(cache.dtype).transpose(2, 3).flatten(1, 2)
            for cache in (a.key_cache, a.value_cache)
        )
        parts.append(
            reference.cached_attention(
                reference.bits(query)[taken].view(query.dtype),
                key,
                value,
                seen,
                a.sinks,
                logit_scale=reference.product(a.scale, a.q_scale, a.k_scale),
                softcap=a.softcap,
                prob_scale=a.prob_scale,
            )
        )
    by_sequence = torch.cat(parts)  # [seqs, queries, heads, head_dim]
    token = torch.arange(tokens, device=query.device)
    seq = torch.searchsorted(query_start[1:].long().contiguous(), token, right=True)
    used = seq < seqs
    seq = seq.clamp_max(seqs - 1)
    out = by_sequence[seq, (token - first[seq]).clamp(0, queries - 1)].masked_fill(~used[:, None, None], 0.0)
    return a.rounded(reference.scaled(out, a.v_scale))


paged_attention = declare(
    "paged_attention",
    PagedAttentionArguments,
    fake=PagedAttentionArguments.empty,
    cpu=_cpu,
    cuda=_cuda,
    kernels=KERNELS,
)
paged_attention_group_quant = declare(
    "paged_attention_group_quant",
    PagedAttentionGroupQuantArguments,
    fake=PagedAttentionGroupQuantArguments.empty,
    cpu=_cpu,
    cuda=_cuda,
    returns=tuple[Tensor, Tensor],
    kernels=KERNELS,
)
