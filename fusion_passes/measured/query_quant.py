"""Whether quantizing the query in plain torch was measured to be faster than doing so in an op."""

from __future__ import annotations

from torch import Tensor

from fusion_passes.graph.symbolic import hint
from fusion_passes.measured import Card, Measurement, Verdict, is_older, judge, records


def verdict(query: Tensor, *, inside: bool) -> Verdict:
    """By the card, the heads and the number of tokens of the query as the attention op takes it, [tokens, heads,
    head_dim], real or fake, and whether that op quantizes it itself.  On a machine without a card, fake CUDA tensors go
    by compute capability."""
    _, heads, head_dim = query.shape
    card = Card.of(query.device)
    kind = "inside" if inside else "opaque"
    found = []
    for record in records("kv_attention-quantization"):
        if not card.is_of(record):
            continue
        for row in record["rows"]:
            shape = row["shape"]
            if (row["kind"], shape["heads"], shape["head_dim"]) == ("query", heads, head_dim):
                found.append(Measurement(shape["tokens"], row["ratio"][kind], is_older(record, row)))
    where = "by the attention op" if inside else "by an op"
    what = f"a query of {heads} heads of {head_dim} that is quantized {where}, in plain torch instead,"
    return judge(found, hint(query.shape[0]), what, card, "tokens")
