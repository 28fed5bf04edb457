"""Attention → FP8 quantization: the attention kernel writes the FP8 codes itself.

The rules for the kinds of attention are in `dense_attention_quant` (scaled dot product attention) and
`paged_attention_quant` (attention with a KV cache).

Saves the attention output's way to memory and back in high precision, and the quantization kernel.

Rounding: the unfused graph rounds the attention output to bf16 or fp16 before it is quantized; the fused op divides the
fp32 accumulator by the scale and rounds once, to FP8.  Its codes differ from the unfused ones by at most one step, and
are closer to an fp32 reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from fusion_passes.fusions.dense_attention_quant import DenseAttentionQuant, DenseMatch
from fusion_passes.fusions.paged_attention_quant import (
    PagedAttentionGroupQuant,
    PagedAttentionQuant,
    PagedGroupMatch,
    PagedMatch,
)
from fusion_passes.fusions.rule import Alternatives, Rule
from fusion_passes.graph.functional import op_call, op_name
from fusion_passes.graph.match import Match
from fusion_passes.graph.read import (
    CASTS,
    aten,
    calls,
    is_high_precision,
    is_tensor,
    is_view,
    outside_users,
    reading,
    target_name,
    value,
)
from fusion_passes.graph.steps import CLAMPS, DIVISIONS, MULTIPLICATIONS, is_cast, is_exact_cast
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.group_quantize import OPAQUE as DYNAMIC
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.paged_attention import PagedAttention
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.quant import FP8_DTYPES, dtype_name


@dataclass(frozen=True)
class AttentionQuant(Alternatives):
    """The output of an attention reaches, through views only, an FP8 quantization, and nothing else."""

    name = "attention_quant"
    anchor = "attention"
    summary = "attention + FP8 output quantization: the attention kernel writes FP8"
    ops = ("attention_quant", "paged_attention", "paged_attention_group_quant")
    rules: ClassVar[Mapping[type[Match], Rule[Any]]] = {
        DenseMatch: DenseAttentionQuant(),
        PagedMatch: PagedAttentionQuant(),
        PagedGroupMatch: PagedAttentionGroupQuant(),
    }

    def legality(self, m: Match) -> None:
        """No one else reads the attention's output; and what the kind of match asks."""
        for node, user in outside_users(m.nodes, m.outputs):
            m.require(
                not _is_output(node, m.site),
                f"the attention's output {reading(node, user)}: fusing would compute it twice",
            )
        super().legality(m)

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Where the output of each attention goes instead."""
        attentions: list[Attention | PagedAttention] = [*idioms.of(Attention), *idioms.of(PagedAttention)]
        for attention in attentions:
            if value(attention.output).dtype in FP8_DTYPES:
                continue
            if (miss := _other_quantization(attention, idioms)) is None:
                goes = f"the attention's output goes to {_readers(attention.output)}"
                miss = NearMiss(attention.output, self.name, goes)
            yield miss


def _is_output(node: Node, site: Node) -> bool:
    """True where `node` is the attention's output, behind views and casts."""
    while node is not site and (is_view(node) or is_cast(node)):
        node = node.all_input_nodes[0]
    return node is site


STEPS = frozenset({*CASTS, *DIVISIONS, *MULTIPLICATIONS, *CLAMPS, aten.round.default})
"""What a quantization consists of, beside views."""


def _other_quantization(attention: Attention | PagedAttention, idioms: Idioms) -> NearMiss | None:
    """What the fused op does not take of the quantization that an attention's output reaches, or of the way there: the
    first of it.  None where it reaches none."""
    output = attention.output
    near = {miss.node: miss for miss in idioms.near_misses if miss.what in ("quantize", "group_quantize")}
    before, work = {output: output}, [output]
    while work:
        node = work.pop()
        for user in node.users:
            if user in before or user.op != "call_function":
                continue
            before[user] = node
            if (reason := _obstacle(attention, _way(user, before), idioms, near.get(user))) is not None:
                return NearMiss(output, AttentionQuant.name, f"the attention's output is {reason}", supersedes=user)
            if is_tensor(user) and (is_view(user) or calls(user, *STEPS)):
                work.append(user)
    return None


def _way(node: Node, before: Mapping[Node, Node]) -> list[Node]:
    """The nodes that lead to `node` from where the walk began, which is left out."""
    way: list[Node] = []
    while before[node] is not node:
        way.insert(0, node)
        node = before[node]
    return way


def _obstacle(
    attention: Attention | PagedAttention, way: list[Node], idioms: Idioms, near: NearMiss | None
) -> str | None:
    """Why the quantization at the end of a way is not fused, in words; None where there is no quantization."""
    end = way[-1]
    grouped = idioms.at(end, GroupQuantize)
    read = grouped or idioms.at(end, Quantize)
    scales = _dynamic_scales(end, grouped)
    dense = isinstance(attention, Attention)
    integers = is_tensor(end) and value(end).dtype in (torch.int8, torch.uint8)
    if near is None and read is None and scales is None and not integers:
        return None
    steps = [node for node in way if not is_view(node) and not is_exact_cast(node)]
    between = steps[0] if steps else end
    if between is not end and (read is None or between not in read.nodes):
        if is_cast(between) and is_high_precision(between):
            dtype = dtype_name(value(between).dtype)
            return (
                f"rounded to {dtype} before it is quantized; the fused op rounds once: let the attention give {dtype}"
            )
        if read is not None:
            return f"changed by {target_name(between)} ({between.name}) before it is quantized"
    if near is not None and dense and near.what == "group_quantize":
        scales = "scales that are computed from it"
    if scales is not None:
        takes = "one static scale" + ("" if dense else ", or dynamic ones for groups within a head")
        return f"quantized with {scales}; the fused op takes {takes}"
    if near is not None:
        return f"quantized, but not as the fused op does: {near.reason}"
    return f"made {dtype_name(value(end).dtype)}; the fused op writes FP8 only" if integers else None


def _dynamic_scales(node: Node, grouped: GroupQuantize | None) -> str | None:
    """The scales of the dynamic quantization that `node` ends, in words; None where it ends none."""
    if grouped is not None:
        return f"dynamic per-token or per-group scales, one for each {grouped.group_size} elements"
    if (call := op_call(node, among=(DYNAMIC,))) is not None and call.arguments["granularity"] != "group":
        return f"a dynamic scale per {call.arguments['granularity']}"
    return None


def _readers(node: Node) -> str:
    """Where the output of an attention goes that reaches no quantization, behind views and casts."""
    while len(node.users) == 1:
        (user,) = node.users
        if not (is_view(user) or calls(user, *CASTS)):
            break
        node = user
    readers = ", ".join(sorted({target_name(user) for user in node.users})) or "nothing"
    names = [op_name(user) for user in node.users if user.op == "call_function"]
    if unknown := sorted({name for name in names if not name.startswith(("aten.", "prims.", "fusion_passes."))}):
        return f"{readers}: the formula of {', '.join(unknown)} is not known"
    return f"{readers}, not to a quantization"
