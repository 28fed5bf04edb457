"""Whether an attention with FP8 output was measured to be faster than stock attention and quantisation."""

from __future__ import annotations

from fusion_passes.measured import Measurement, Verdict, judge, records
from fusion_passes.ops.attention_quant import AttentionQuantArguments, choose
from fusion_passes.ops.support import device_capability, device_name
from fusion_passes.symbolic import hint


def verdict(a: AttentionQuantArguments) -> Verdict:
    """By the card, the kernel that takes this call (real or fake tensors), the head size, and the kind of mask.

    Not by dtype: it was measured from bf16 to e4m3fn, and the others move as many bytes.  On a machine without a card,
    fake CUDA tensors go by compute capability.
    """
    kernel, query = choose(a), a.query
    if kernel is None:
        return Verdict(None, "no kernel supports it")
    head_dim, q_len, kv_len = query.shape[3], hint(query.shape[2]), hint(a.key.shape[2])
    kind = "causal" if a.is_causal else "full" if a.attn_mask is None else "masked"
    capability, name = list(device_capability(query.device) or ()), device_name(query.device)
    card = name or f"a card of compute capability {'.'.join(map(str, capability))}"
    found = []
    for record in records("attention_quant"):
        if record["card"] != name and (name is not None or record["capability"] != capability):
            continue
        for row in record["rows"]:
            shape = row["shape"]
            row_kind = "causal" if shape["causal"] else "masked" if shape["mask"] else "full"
            is_self = shape["q_len"] in (None, shape["length"])
            alike = shape["head_dim"] == head_dim and row_kind == kind and is_self == (q_len == kv_len)
            if alike and kernel.name in row["ratio"]:
                found.append(Measurement(shape["length"], row["ratio"][kernel.name]))
    queries = "" if q_len == kv_len else f", {q_len} queries"
    return judge(found, kv_len, f"{kernel.name} with head size {head_dim}, {kind}{queries},", card)
