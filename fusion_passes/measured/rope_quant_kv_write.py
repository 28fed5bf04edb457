"""Whether RoPE, quantisation and the write to the cache in one kernel was measured to be faster than Inductor's own."""

from __future__ import annotations

from torch import Tensor

from fusion_passes.measured import Measurement, Verdict, judge, records
from fusion_passes.ops.support import device_capability, device_name
from fusion_passes.symbolic import hint


def verdict(query: Tensor, *, tokens: int, quantized: bool) -> Verdict:
    """By the card, the head size, and whether the query is quantised, at the numbers of tokens measured.

    query: a real or fake tensor, [..., head_dim].  On a machine without a card, fake CUDA tensors go by compute
    capability.
    """
    capability, name = list(device_capability(query.device) or ()), device_name(query.device)
    card = name or f"a card of compute capability {'.'.join(map(str, capability))}"
    head_dim = query.shape[-1]
    found = [
        Measurement(row["shape"]["tokens"], row["ratio"]["fused"])
        for record in records("kv_attention-rope_write")
        if record["card"] == name or (name is None and record["capability"] == capability)
        for row in record["rows"]
        if row["shape"]["head_dim"] == head_dim and row["shape"]["quantized"] == quantized
    ]
    kind = "an FP8 query" if quantized else "a query that is not quantised"
    what = f"RoPE and the cache's write in one kernel, with {kind} and head size {head_dim},"
    return judge(found, hint(tokens), what, card)
