"""The FP8 quantization of an RMSNorm's output: the norm writes FP8.

    RMSNorm → saturate(x / scale).to(fp8)                   becomes   rms_norm_quant
    RMSNorm → scales = amax over groups / 448,              becomes   rms_norm_group_quant
              saturate(x / scales).to(fp8)

Inductor makes one kernel of these itself, unless an op that it does not look into quantizes; so this pays for such ops,
and where Inductor reads x twice.

Rounding: the fused op computes the norm in fp32 and rounds once, to FP8, where the graph rounds to bf16 or fp16 before
(and some models within the norm).  Its codes differ from the unfused ones by at most one step, and are closer to an
fp32 reference.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.fusions.dynamic_quant import check_dynamic, lower_bound, scales_of, upper_bound
from fusion_passes.fusions.rule import Rule
from fusion_passes.fusions.static_quant import check_static
from fusion_passes.graph.match import Call, Match
from fusion_passes.graph.read import keeps_order, through_views, value
from fusion_passes.graph.symbolic import known
from fusion_passes.graph.views import replay
from fusion_passes.idioms import Idioms
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.rms_norm import RMSNorm
from fusion_passes.measured.rms_norm_quant import verdict as measured_verdict
from fusion_passes.quant import FP8_DTYPES, dtype_name


@dataclass(frozen=True, eq=False)
class RMSNormQuantMatch(Match):
    """`views` lead from the norm's output to the codes."""

    norm: RMSNorm
    quantize: Quantize | GroupQuantize
    views: tuple[Node, ...]

    @property
    def site(self) -> Node:
        """The norm."""
        return self.norm.output


@dataclass(frozen=True)
class RMSNormQuant(Rule[RMSNormQuantMatch]):
    """The output of an RMSNorm reaches, through views only, an FP8 quantization, and nothing else."""

    name = "rms_norm_quant"
    summary = "RMSNorm + FP8 quantization, static, per token or per group: the norm's kernel writes FP8"
    ops = ("rms_norm_quant", "rms_norm_group_quant")

    def pattern(self, idioms: Idioms) -> Iterator[RMSNormQuantMatch]:
        """Every quantization whose input is the output of an RMSNorm."""
        found: list[Quantize | GroupQuantize] = [*idioms.of(Quantize), *idioms.of(GroupQuantize)]
        for q in found:
            source, before = through_views(q.input)
            if (norm := idioms.at(source, RMSNorm)) is None:
                continue
            scale = q.scale if isinstance(q, Quantize) else None
            scales = q.scales if isinstance(q, GroupQuantize) else None
            yield RMSNormQuantMatch(
                output=q.output,
                nodes=norm.nodes | q.nodes | {*before},
                inputs=(*norm.inputs, *([] if scale is None else [scale])),
                side_outputs=() if scales is None else (scales,),
                norm=norm,
                quantize=q,
                views=(*before, *q.views),
            )

    def legality(self, m: RMSNormQuantMatch) -> None:
        """The quantization is one that the kernel does, of groups within a row."""
        x, q = value(m.norm.input), m.quantize
        if isinstance(q, Quantize):
            check_static(m, q, x, FP8_DTYPES)
            return
        check_dynamic(m, q, x)
        m.require(
            known(x.shape[-1] % q.group_size == 0), f"groups of {q.group_size} do not divide a row of {x.shape[-1]}"
        )
        m.require(
            all(map(keeps_order, m.views)),
            "the norm's output is transposed before it is quantized; the fused op has groups in its own order",
        )

    def profitability(self, m: RMSNormQuantMatch) -> None:
        """Where it was measured to beat Inductor's kernel, or two of them where an op quantizes."""
        q = m.quantize
        verdict = measured_verdict(value(m.norm.input), getattr(q, "group_size", None), opaque=q.opaque is not None)
        m.require(verdict.is_faster, verdict.why)

    def replacement(self, m: RMSNormQuantMatch, call: Call) -> Node | tuple[Node, ...]:
        """The fused op, then the views; scales in the shape of the graph's."""
        norm, q, ops = m.norm, m.quantize, torch.ops.fusion_passes
        options = {"eps": norm.eps, "weight_offset": norm.weight_offset, "dtype": q.dtype}
        if isinstance(q, Quantize):
            options |= {"scale_factor": q.scale_factor, "scale_inverse": q.inverse}
            codes = call(ops.rms_norm_quant.default, norm.input, norm.weight, q.scale, **options)
            return replay(m.views, codes, call)
        bounds = {"scale_lower_bound": lower_bound(q), "scale_upper_bound": upper_bound(q)}
        options |= {"group_size": q.group_size, **bounds}
        both = call(ops.rms_norm_group_quant.default, norm.input, norm.weight, **options)
        codes = replay(m.views, call(operator.getitem, both, 0), call)
        return codes if q.scales is None else (codes, scales_of(q, call(operator.getitem, both, 1), call))

    def describe(self, m: RMSNormQuantMatch) -> str:
        """`RMSNorm bfloat16 [8192, 4096] -> float8_e4m3fn in groups of 128`."""
        x, q = value(m.norm.input), m.quantize
        groups = f" in groups of {q.group_size}" if isinstance(q, GroupQuantize) else ""
        return f"RMSNorm {dtype_name(x.dtype)} {list(x.shape)} -> {dtype_name(q.dtype)}{groups}"
