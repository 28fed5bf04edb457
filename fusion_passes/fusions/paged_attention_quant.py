"""`attention_quant` for attention over a paged KV cache: static per tensor, and dynamic per group.

    paged_attention → reshape … → saturate(x / scale).to(fp8)
    becomes   paged_attention(output_scale=scale) → the same views

    paged_attention → reshape … → scales = amax over groups / 448, saturate(x / scales).to(fp8)
    becomes   paged_attention_group_quant(scale_lower_bound=the graph's) → the same views

The op takes one scale that divides.  One that multiplies is inverted on the device in each call, and one with a factor
multiplied: a tiny kernel, but a kernel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.fusions.attention_match import AttentionMatch, StaticMatch
from fusion_passes.fusions.dynamic_quant import check_dynamic, lower_bound, scales_of
from fusion_passes.fusions.rule import Rule
from fusion_passes.fusions.static_quant import check_static
from fusion_passes.graph.functional import call_by_name
from fusion_passes.graph.match import Call
from fusion_passes.graph.read import aten, keeps_order, through_views, value
from fusion_passes.graph.symbolic import known
from fusion_passes.graph.views import replay
from fusion_passes.idioms import Idioms
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.paged_attention import PagedAttention
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.measured.paged_attention_quant import verdict as measured_verdict
from fusion_passes.quant import FP8_DTYPES, dtype_name


@dataclass(frozen=True, eq=False)
class PagedMatch(StaticMatch):
    """Of attention over a paged KV cache."""

    attention: PagedAttention


@dataclass(frozen=True)
class PagedAttentionQuant(Rule[PagedMatch]):
    """The output of a `PagedAttention` reaches, through views only, a static FP8 quantization."""

    name = "attention_quant"
    summary = "paged attention + static FP8 output quantization"

    def pattern(self, idioms: Idioms) -> Iterator[PagedMatch]:
        """Every static quantization whose input is the output of a `PagedAttention`."""
        for quantize in idioms.of(Quantize):
            source, before = through_views(quantize.input)
            attention = _attention(source, idioms)
            if attention is not None:
                yield PagedMatch.of(attention, before, quantize)

    def legality(self, m: PagedMatch) -> None:
        """The op divides its fp32 result by one fp32 scale and saturates."""
        check_static(m, m.quantize, value(m.attention.query), FP8_DTYPES)

    def profitability(self, m: PagedMatch) -> None:
        """Where it was measured, with the scale as it is."""
        q = m.quantize
        m.require(
            q.scale is not None and q.scale_factor == 1.0 and not q.inverse,
            "the fused op divides by a scale, and making one of the graph's takes a kernel: nobody measured that",
        )
        verdict = measured_verdict(value(m.attention.output), value(m.attention.arguments["key_cache"]), "tensor")
        m.require(verdict.is_faster, verdict.why)

    def replacement(self, m: PagedMatch, call: Call) -> Node:
        """The attention with an output scale, then the views."""
        scale = _divisor(m.quantize, value(m.attention.output).device, call)
        changed = {"output_scale": scale, "dtype": m.quantize.dtype}
        codes = call_by_name(call, torch.ops.fusion_passes.paged_attention.default, m.attention.arguments | changed)
        return replay(m.views, codes, call)

    def describe(self, m: PagedMatch) -> str:
        """`paged attention bfloat16 [256, 32, 128], cache float8_e4m3fn -> float8_e4m3fn`."""
        return f"{_shape(m.attention)} -> {dtype_name(m.quantize.dtype)}"


@dataclass(frozen=True, eq=False)
class PagedGroupMatch(AttentionMatch):
    """`before`: the views between the attention and the quantization."""

    attention: PagedAttention
    quantize: GroupQuantize
    before: tuple[Node, ...]


@dataclass(frozen=True)
class PagedAttentionGroupQuant(Rule[PagedGroupMatch]):
    """The output of a `PagedAttention` reaches, through views only, a dynamic FP8 quantization per group."""

    name = "attention_quant"
    summary = "paged attention + FP8 output quantization with a scale for each group"

    def pattern(self, idioms: Idioms) -> Iterator[PagedGroupMatch]:
        """Every dynamic quantization per group whose input is the output of a `PagedAttention`."""
        for quantize in idioms.of(GroupQuantize):
            source, before = through_views(quantize.input)
            attention = _attention(source, idioms)
            if attention is None:
                continue
            yield PagedGroupMatch(
                output=quantize.output,
                nodes=attention.nodes | quantize.nodes | {*before},
                inputs=attention.inputs,
                side_outputs=() if quantize.scales is None else (quantize.scales,),
                attention=attention,
                quantize=quantize,
                before=before,
            )

    def legality(self, m: PagedGroupMatch) -> None:
        """The scales must be those of `quant.choose_scale` with some lower bound, of groups within a head."""
        q, output = m.quantize, value(m.attention.output)
        check_dynamic(m, q, output)
        m.require(
            q.max_scale == math.inf, f"a scale is at most {q.max_scale:g} in the graph; the fused op has no such bound"
        )
        head_dim = output.shape[-1]
        m.require(
            known(head_dim % q.group_size == 0),
            f"groups of {q.group_size} do not divide a head of {head_dim}",
        )
        m.require(
            all(map(keeps_order, m.before)),
            "the attention's output is transposed before it is quantized; the fused op has groups in its own order",
        )

    def profitability(self, m: PagedGroupMatch) -> None:
        """Where it was measured."""
        verdict = measured_verdict(value(m.attention.output), value(m.attention.arguments["key_cache"]), "group")
        m.require(verdict.is_faster, verdict.why)

    def replacement(self, m: PagedGroupMatch, call: Call) -> Node | tuple[Node, ...]:
        """The op with two results: codes behind the views, scales in the shape of the graph's."""
        q = m.quantize
        op = torch.ops.fusion_passes.paged_attention_group_quant.default
        changed = {"dtype": q.dtype, "group_size": q.group_size, "scale_lower_bound": lower_bound(q)}
        both = call_by_name(call, op, m.attention.arguments | changed)
        codes = replay((*m.before, *q.views), call(operator.getitem, both, 0), call)
        return codes if q.scales is None else (codes, scales_of(q, call(operator.getitem, both, 1), call))

    def describe(self, m: PagedGroupMatch) -> str:
        """`paged attention bfloat16 [256, 32, 128], cache float8_e4m3fn -> float8_e4m3fn in groups of 128`."""
        q = m.quantize
        return f"{_shape(m.attention)} -> {dtype_name(q.dtype)} in groups of {q.group_size}"


def _attention(node: Node, idioms: Idioms) -> PagedAttention | None:
    """The attention whose output the node is, in high precision."""
    attention = idioms.at(node, PagedAttention)
    return None if attention is None or value(node).dtype in FP8_DTYPES else attention


def _divisor(q: Quantize, device: torch.device, call: Call) -> Node:
    """One fp32 tensor that the graph's quantization divides by."""
    if q.scale is None:
        number = 1.0 / q.scale_factor if q.inverse else q.scale_factor
        return call(aten.full.default, [], number, dtype=torch.float32, device=device)
    scale = q.scale if q.scale_factor == 1.0 else call(aten.mul.Tensor, q.scale, q.scale_factor)
    return call(aten.reciprocal.default, scale) if q.inverse else scale


def _shape(attention: PagedAttention) -> str:
    query, cache = value(attention.query), value(attention.arguments["key_cache"])
    return f"paged attention {dtype_name(query.dtype)} {list(query.shape)}, cache {dtype_name(cache.dtype)}"
