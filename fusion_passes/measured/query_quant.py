"""Whether quantising the query in plain torch was measured to be faster than doing so in an op."""

from __future__ import annotations

from torch import Tensor

from fusion_passes.measured import Measurement, Verdict, judge, records
from fusion_passes.ops.support import device_capability, device_name
from fusion_passes.symbolic import hint


def verdict(query: Tensor, *, inside: bool) -> Verdict:
    """By the card, the heads and the number of tokens of the query [tokens, heads, head_dim], real or fake, and whether
    the attention op quantises it itself.  On a machine without a card, fake CUDA tensors go by compute capability."""
    _, heads, head_dim = query.shape
    capability, name = list(device_capability(query.device) or ()), device_name(query.device)
    card = name or f"a card of compute capability {'.'.join(map(str, capability))}"
    kind = "inside" if inside else "opaque"
    found = []
    for record in records("kv_attention-quantisation"):
        if record["card"] != name and (name is not None or record["capability"] != capability):
            continue
        for row in record["rows"]:
            shape = row["shape"]
            if (row["kind"], shape["heads"], shape["head_dim"]) == ("query", heads, head_dim):
                found.append(Measurement(shape["tokens"], row["ratio"][kind]))
    where = "by the attention op" if inside else "by an op"
    what = f"a query of {heads} heads of {head_dim} that is quantised {where}, in plain torch instead,"
    return judge(found, hint(query.shape[0]), what, card)
