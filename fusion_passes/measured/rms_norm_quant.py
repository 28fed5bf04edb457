"""Whether RMSNorm with FP8 output was measured to be faster than what Inductor makes of the norm and a quantization."""

from __future__ import annotations

from torch import Tensor

from fusion_passes.graph.symbolic import fixed, hint
from fusion_passes.measured import Card, Measurement, Verdict, is_older, judge, records


def verdict(x: Tensor, group_size: int | None, *, opaque: bool) -> Verdict:
    """By the card, the dtype, the size of a row and the number of rows of x, real or fake; by the scales (group_size
    None: a static one; the size of a row: one per token) and by whether an op quantizes that Inductor does not look
    into.

    What comes before the norm counts too, since Inductor takes a sum into its kernel and the fused op does not: a
    ratio is the worse of that without and that with a sum.  On a machine without a card, fake CUDA tensors go by
    compute capability.
    """
    if not x.is_cuda:
        return Verdict(None, f"the fused op has no faster kernel on the {x.device.type.upper()}")
    size, card = fixed(x.shape[-1]), Card.of(x.device)
    scales = "tensor" if group_size is None else "token" if group_size == size else f"group of {group_size}"
    kind = f"{scales}, opaque" if opaque else scales
    found = []
    for record in records("rms_norm_quant"):
        if not card.is_of(record):
            continue
        for row in record["rows"]:
            shape = row["shape"]
            if (shape["size"], shape["dtype"]) == (size, str(x.dtype)) and kind in row["ratio"]:
                ratio = min(row["ratio"][kind], row["ratio"][f"sum, {kind}"])
                found.append(Measurement(shape["rows"], ratio, is_older(record, row)))
    by = "an opaque op" if opaque else "plain torch"
    what = f"RMSNorm of rows of {x.shape[-1]} with FP8 output, scales per {scales}, that {by} quantizes,"
    return judge(found, hint(x.numel() // x.shape[-1]), what, card, "rows")
