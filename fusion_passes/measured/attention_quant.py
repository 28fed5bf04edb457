"""Whether an attention with FP8 output was measured to be faster than stock attention and quantization."""

from __future__ import annotations

from fusion_passes.graph.symbolic import hint
from fusion_passes.measured import Card, Measurement, Verdict, is_older, judge, records
from fusion_passes.ops.attention_quant import AttentionQuantArguments, choose


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
    card = Card.of(query.device)
    found = []
    for record in records("attention_quant"):
        if not card.is_of(record):
            continue
        for row in record["rows"]:
            shape = row["shape"]
            row_kind = "causal" if shape["causal"] else "masked" if shape["mask"] else "full"
            is_self = shape["q_len"] in (None, shape["length"])
            alike = shape["head_dim"] == head_dim and row_kind == kind and is_self == (q_len == kv_len)
            if alike and kernel.name in row["ratio"]:
                older = is_older(record, row, kernel.module.rpartition(".")[2])
                found.append(Measurement(shape["length"], row["ratio"][kernel.name], older))
    queries = "" if q_len == kv_len else f", {q_len} queries"
    return judge(found, kv_len, f"{kernel.name} with head size {head_dim}, {kind}{queries},", card, "keys")
