"""Whether RoPE, quantization and the write to the cache in one kernel was measured to be faster than Inductor's own."""

from __future__ import annotations

import torch

from fusion_passes.graph.symbolic import hint
from fusion_passes.measured import Card, Measurement, Verdict, is_older, judge, records
from fusion_passes.quant import dtype_name


def verdict(
    device: torch.device,
    *,
    tokens: int | torch.SymInt,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    quantized: bool,
) -> Verdict:
    """By the card, the heads of query and cache and their size, and whether the query is quantized, at the numbers of
    tokens measured.

    The time is that of the bytes, so dtypes count by their width: the benchmark turns queries and keys of two bytes and
    writes FP8 caches, and nothing else is measured.  On a machine without a card, fake CUDA tensors go by compute
    capability.
    """
    card = Card.of(device)
    kind = "an FP8 query" if quantized else "a query that is not quantized"
    what = f"RoPE and the cache's write in one kernel, with {heads}/{kv_heads} heads of {head_dim} and {kind},"
    if dtype.itemsize != 2 or cache_dtype.itemsize != 1:
        return Verdict(
            None,
            f"{what} was measured for bf16 and FP8 caches, not for {dtype_name(dtype)} and caches of "
            f"{dtype_name(cache_dtype)}",
        )
    found = []
    for record in records("kv_attention-rope_write"):
        for row in record["rows"] if card.is_of(record) else ():
            shape = row["shape"]
            sizes = (shape["heads"], shape["kv_heads"], shape["head_dim"], shape["quantized"])
            if sizes == (heads, kv_heads, head_dim, quantized):
                older = is_older(record, row, "rope_quant_kv_write")
                found.append(Measurement(shape["tokens"], row["ratio"]["fused"], older))
    return judge(found, hint(tokens), what, card, "tokens")
