"""``paged_attention``: causal attention of new tokens over a paged KV cache; prefill, decode and mixtures in one batch.

Lengths, pages and scales stay on the device, so that a captured CUDA graph serves other batches. On the CPU this is
the reference. On a GPU, for now, the pages of each sequence are gathered in plain torch: right, capturable, not fast.
"""

import torch
from torch import SymInt, Tensor

from fusion_passes import reference
from fusion_passes.ops import kv_cache
from fusion_passes.quant import FP8_DTYPES
from fusion_passes.symbolic import known

IMPLEMENTATIONS = ("auto", "gather")
GATHER_BYTES = 1 << 28
"""What ``gather`` aims to use for the keys, values and scores of the sequences that it takes at a time."""


def validate(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    prob_scale: Tensor | None,
    output_scale: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    softcap: float,
    dtype: torch.dtype | None,
    implementation: str,
) -> None:
    """Raise ValueError, or TypeError for a dtype, if the operator cannot mean anything with these arguments."""
    kv_cache.validate_cache(key_cache, value_cache)
    scales = {
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "prob_scale": prob_scale,
        "output_scale": output_scale,
    }
    kv_cache.validate_scales(**scales)
    _validate_batch(query, key_cache, block_table, query_start, seq_lens)
    kv_cache.validate_devices(
        query.device,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        query_start=query_start,
        seq_lens=seq_lens,
        sinks=sinks,
        **scales,
    )
    fp8_query, fp8_cache = query.dtype in FP8_DTYPES, key_cache.dtype in FP8_DTYPES
    if not fp8_query and query.dtype not in kv_cache.HIGH_PRECISION_DTYPES:
        raise TypeError(f"query must be FP8, bfloat16, float16 or float32, got {query.dtype}")
    if not fp8_cache and not fp8_query and query.dtype != key_cache.dtype:
        raise TypeError(f"query is {query.dtype}, the cache {key_cache.dtype}: one dtype, or an FP8 cache")
    if not fp8_cache and any(x is not None for x in (k_scale, v_scale, prob_scale)):
        raise ValueError(f"k_scale, v_scale and prob_scale belong to an FP8 cache, this one is {key_cache.dtype}")
    if q_scale is not None and not fp8_query and not fp8_cache:
        raise ValueError("q_scale with a query that is not FP8 asks to quantise it like the cache, which is not FP8")
    out_dtype = dtype or query.dtype
    if dtype is None and fp8_query:
        raise TypeError("dtype says what to return; it can only be left out if query is not FP8")
    if out_dtype not in (*kv_cache.HIGH_PRECISION_DTYPES, *FP8_DTYPES):
        raise TypeError(f"dtype must be FP8, bfloat16, float16 or float32, got {out_dtype}")
    if output_scale is not None and out_dtype not in FP8_DTYPES:
        raise ValueError(f"output_scale belongs to FP8 output, not to {out_dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window counts the keys that a query sees, its own among them: 1 or more, got {window}")
    if softcap < 0.0:
        raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
    if sinks is not None and (sinks.ndim != 1 or known(sinks.shape[0] != query.shape[1])):
        raise ValueError(f"sinks must be one logit for each of {query.shape[1]} heads, got {list(sinks.shape)}")
    if sinks is not None and sinks.dtype not in kv_cache.HIGH_PRECISION_DTYPES:
        raise TypeError(f"sinks must be bfloat16, float16 or float32, got {sinks.dtype}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


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
            raise TypeError(f"{name} must be int32, got {x.dtype}")
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, got {list(x.shape)}")
    seqs = seq_lens.shape[0]
    if known(block_table.shape[0] != seqs) or known(query_start.shape[0] != seqs + 1):
        raise ValueError(
            f"seq_lens has {seqs} sequences; block_table needs as many rows and query_start one element more, "
            f"got {list(block_table.shape)} and {list(query_start.shape)}"
        )


def _fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    max_query_len: int | SymInt | None = None,
    implementation: str = "auto",
) -> Tensor:
    scales = (q_scale, k_scale, v_scale, prob_scale, output_scale)
    validate(
        *(query, key_cache, value_cache, block_table, query_start, seq_lens, *scales, sinks),
        *(window, softcap, dtype, implementation),
    )
    return query.new_empty(query.shape, dtype=dtype or query.dtype)


def _cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    max_query_len: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    batch = (query, key_cache, value_cache, block_table, query_start, seq_lens)
    scales = (q_scale, k_scale, v_scale, prob_scale, output_scale)
    validate(*batch, *scales, sinks, window, softcap, dtype, implementation)
    _check(*batch, window, max_query_len)
    return reference.paged_attention(*batch, *scales, sinks, scale=scale, window=window, softcap=softcap, dtype=dtype)


def _cuda(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    max_query_len: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    batch = (query, key_cache, value_cache, block_table, query_start, seq_lens)
    scales = (q_scale, k_scale, v_scale, prob_scale, output_scale)
    validate(*batch, *scales, sinks, window, softcap, dtype, implementation)
    if kv_cache.values_are_checked(query.device):
        _check(*batch, window, max_query_len)
    return gather(
        *(*batch, *scales, sinks),
        scale=scale,
        window=window,
        softcap=softcap,
        dtype=dtype,
        max_query_len=max_query_len,
    )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    max_query_len: int | None,
) -> None:
    pages, _, page_size, _ = value_cache.shape
    kv_cache.check_batch(query.shape[0], pages, page_size, block_table, query_start, seq_lens, window, max_query_len)


def gather(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """``reference.paged_attention`` without a question to the device: plain torch that a CUDA graph can capture.

    Some sequences at a time, each with all the keys that its row of the block table can hold and max_query_len queries
    (all tokens, if that is unknown). Entries of the table outside the cache are read as the nearest page.
    """
    tokens, heads, head_dim = query.shape
    seqs, columns = block_table.shape
    pages, kv_heads, page_size, _ = key_cache.shape
    keys = columns * page_size if pages else 0
    queries = tokens if max_query_len is None else min(max_query_len, tokens)
    if seqs * keys * queries == 0:
        return reference.rounded(query.new_zeros(query.shape, dtype=torch.float32), output_scale, dtype or query.dtype)
    query = reference.as_queried(query, q_scale, key_cache.dtype)
    each = 4 * (2 * keys * kv_heads * head_dim + 2 * queries * heads * keys)
    step = max(1, GATHER_BYTES // each)
    row = torch.arange(queries, device=query.device)
    position = torch.arange(keys, device=query.device)
    first, counts = query_start[:-1].long(), query_start.diff()
    table = block_table.clamp(0, pages - 1).long()
    parts = []
    for i in range(0, seqs, step):
        part = slice(i, i + step)
        taken = (first[part, None] + row).clamp(0, tokens - 1)
        at = seq_lens[part, None] - counts[part, None] + row  # [sequences, queries]: the position of a query
        seen = reference.visible(at, position, window) & (row < counts[part, None])[..., None]
        key, value = (
            reference.bits(cache)[table[part]].view(cache.dtype).transpose(2, 3).flatten(1, 2)
            for cache in (key_cache, value_cache)
        )
        parts.append(
            reference.cached_attention(
                reference.bits(query)[taken].view(query.dtype),
                key,
                value,
                seen,
                sinks,
                logit_scale=reference.product(scale, q_scale, k_scale),
                softcap=softcap,
                prob_scale=prob_scale,
            )
        )
    by_sequence = torch.cat(parts)  # [seqs, queries, heads, head_dim]
    token = torch.arange(tokens, device=query.device)
    seq = torch.searchsorted(query_start[1:].long().contiguous(), token, right=True)
    used = seq < seqs
    seq = seq.clamp_max(seqs - 1)
    out = by_sequence[seq, (token - first[seq]).clamp(0, queries - 1)].masked_fill(~used[:, None, None], 0.0)
    return reference.rounded(reference.scaled(out, v_scale), output_scale, dtype or query.dtype)


_library = torch.library.Library("fusion_passes", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start, "
    "Tensor seq_lens, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? prob_scale=None, "
    "Tensor? output_scale=None, Tensor? sinks=None, *, float scale, int? window=None, float softcap=0.0, "
    'ScalarType? dtype=None, SymInt? max_query_len=None, str implementation="auto") -> Tensor',
    # The caches must be read where they lie.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.impl("paged_attention", _cpu, "CPU")
_library.impl("paged_attention", _cuda, "CUDA")
torch.library.register_fake("fusion_passes::paged_attention", _fake, lib=_library)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    max_query_len: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Causal attention of each sequence's new tokens, its last ones, over all its tokens in the cache.

    query: [tokens, heads, head_dim], the new tokens of all sequences in a row, any strides; bf16, fp16, fp32, or FP8
    codes with q_scale. A query that is not FP8 but has a q_scale is quantised like the cache first.
    key_cache, value_cache: [pages, kv_heads, page_size, head_dim], any memory order with head_dim innermost; FP8 codes
    with k_scale and v_scale, or query's dtype. The new tokens are in it already.
    block_table: int32 [seqs, max_pages], the pages of each sequence; entries beyond its length are never used.
    query_start: int32 [seqs + 1], from 0: the tokens of sequence s are query_start[s] to query_start[s + 1] - 1.
    seq_lens: int32 [seqs], cached and new tokens together. The last query sees all keys, the one before all but one.
    q_scale, k_scale, v_scale, prob_scale, output_scale: fp32, one element, read on the device in each call; None: 1.
    prob_scale: if given, ``exp(logit - row maximum)`` goes into the product with V as FP8 codes of the cache's dtype;
    the sum of the softmax is over the unquantised numbers.
    sinks: [heads], a logit for each head that takes its share of the softmax and has no value.
    scale: of the logits. softcap: ``softcap * tanh(logit / softcap)``, after all scales; 0 for none.
    window: of keys that a query sees, its own among them; None for all.
    dtype: of the output, query's if None. FP8 output is ``saturate(attention / output_scale)``, from fp32.
    max_query_len: no sequence has more new tokens. A promise that saves work: 1 when all sequences decode.
    implementation: "gather", or "auto" for the best that there is. On the CPU both are the reference.

    Returns contiguous [tokens, heads, head_dim]. A token beyond query_start[-1], or of a sequence of length 0, is 0.
    What is not visible to any query is never multiplied, so stale NaN in unused slots stays there.

    Raises ValueError or TypeError for arguments without a meaning. Lengths that contradict each other, a table too
    short and pages outside the cache are errors on the CPU, and on a GPU with FUSION_PASSES_CHECK=1; otherwise nothing
    outside the cache is read, and the result is undefined. There is no gradient.
    """
    out: Tensor = torch.ops.fusion_passes.paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start,
        seq_lens,
        q_scale,
        k_scale,
        v_scale,
        prob_scale,
        output_scale,
        sinks,
        scale=scale,
        window=window,
        softcap=softcap,
        dtype=dtype,
        max_query_len=max_query_len,
        implementation=implementation,
    )
    return out
