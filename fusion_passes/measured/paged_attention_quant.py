"""Whether a paged attention with FP8 output was measured to be faster than the same attention and a quantization."""

from __future__ import annotations

from torch import Tensor

from fusion_passes.graph.symbolic import hint
from fusion_passes.measured import Card, Measurement, Verdict, is_older, judge, records


def verdict(output: Tensor, key_cache: Tensor, granularity: str) -> Verdict:
    """By the card, the heads, whether the cache is FP8, the granularity of the scales ("tensor" or "group") and the
    number of tokens of the output [tokens, heads, head_dim], real or fake.

    Not by the lengths of the sequences: the quantization, which is saved, does not see them.  On a machine without a
    card, fake CUDA tensors go by compute capability.
    """
    if not output.is_cuda:
        return Verdict(None, f"the fused op has no faster kernel on the {output.device.type.upper()}")
    _, heads, head_dim = output.shape
    card = Card.of(output.device)
    fp8_cache = key_cache.dtype.itemsize == 1
    found = []
    for record in records("kv_attention-quantization"):
        if not card.is_of(record):
            continue
        for row in record["rows"]:
            shape = row["shape"]
            alike = (shape["heads"], shape["head_dim"], shape["fp8_cache"]) == (heads, head_dim, fp8_cache)
            if row["kind"] == "output" and alike and granularity in row["ratio"]:
                found.append(Measurement(shape["tokens"], row["ratio"][granularity], is_older(record, row)))
    cache = "an FP8 cache" if fp8_cache else "a cache that is not FP8"
    what = f"attention of {heads} heads of {head_dim} over {cache} with FP8 output, scales per {granularity},"
    return judge(found, hint(output.shape[0]), what, card, "tokens")
