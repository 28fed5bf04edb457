"""Attention → static FP8 quantisation: the attention kernel writes the FP8 codes itself.

    scaled_dot_product_attention → transpose, reshape, contiguous … → saturate(x / scale).to(fp8)
    becomes   fusion_passes::attention_quant → the same views

Saves the attention output's way to memory and back in high precision, and the quantisation kernel.

Rounding: the unfused graph rounds the attention output to bf16 or fp16 before it is quantised; the fused op divides the
fp32 accumulator by the scale and rounds once, to FP8.  Its codes differ from the unfused ones by at most one step, and
are closer to an fp32 reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.graph import following_views, target_name, through_views, value
from fusion_passes.idioms import Idioms, NearMiss
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.measured.attention_quant import verdict as measured_verdict
from fusion_passes.ops.attention_quant import LAYOUTS, OUTPUT_DTYPES, empty_output, why_unsupported
from fusion_passes.quant import dtype_name, max_value
from fusion_passes.rule import Call, Match, Rule
from fusion_passes.symbolic import known
from fusion_passes.views import best_layout, replay


@dataclass(frozen=True, eq=False)
class AttentionQuantMatch(Match):
    """`views` lead from the attention's output to the match's output, through and behind the quantisation."""

    attention: Attention
    quantize: Quantize
    views: tuple[Node, ...]

    @property
    def site(self) -> Node:
        """The attention: it tells the layers of a model apart."""
        return self.attention.output


@dataclass(frozen=True)
class AttentionQuant(Rule[AttentionQuantMatch]):
    """The output of an `Attention` reaches, through views only, a static per-tensor `Quantize`, and nothing else."""

    name = "attention_quant"
    anchor = "attention"
    summary = "attention + static FP8 output quantisation: the attention kernel writes FP8"

    def pattern(self, idioms: Idioms) -> Iterator[AttentionQuantMatch]:
        """Every static quantisation whose input is the output of an attention."""
        for quantize in idioms.of(Quantize):
            attention, before = _behind_attention(quantize.input, idioms)
            if attention is None:
                continue
            behind = following_views(quantize.output)
            yield AttentionQuantMatch(
                output=behind[-1] if behind else quantize.output,
                nodes=attention.nodes | quantize.nodes | {*before, *behind},
                inputs=tuple(n for n in (*attention.inputs, quantize.scale) if n is not None),
                attention=attention,
                quantize=quantize,
                views=(*before, *quantize.views, *behind),
            )

    def legality(self, m: AttentionQuantMatch) -> None:
        """The kernel must compute what the graph computes: see the sentences."""
        a, q = m.attention, m.quantize
        m.require(
            not a.used_outputs,
            f"the attention's {', '.join(a.used_outputs)} is used too, and the fused op has none "
            "(a training compile keeps it for the backward pass: use torch.no_grad())",
        )
        m.require(
            q.rounding == "cast",
            f"{q.opaque or 'the quantisation'} rounds to whole numbers before the cast; the fused op does not",
        )
        m.require(
            q.dtype in OUTPUT_DTYPES,
            f"the graph quantises to {dtype_name(q.dtype)}, "
            f"the fused op to {' or '.join(map(dtype_name, OUTPUT_DTYPES))}",
        )
        limit = max_value(q.dtype)
        m.require(
            q.clamp in (None, (-limit, limit)),
            f"the graph clamps to {q.clamp}, the fused op to the range of {dtype_name(q.dtype)}, ±{limit:g}",
        )
        query = value(a.query)
        m.require(
            q.clamp is not None or (query.is_cuda and q.dtype is torch.float8_e4m3fn),
            f"without a clamp, what a cast to {dtype_name(q.dtype)} makes of values that are too large depends on the "
            f"torch version on {query.device.type}; the fused op saturates: clamp before the cast",
        )
        if q.scale is not None:
            scale = value(q.scale)
            m.require(scale.dtype is torch.float32, f"the scale is {dtype_name(scale.dtype)}; make it float32")
            m.require(known(scale.numel() == 1), f"the scale has shape {list(scale.shape)}, not one element")
            m.require(
                scale.device == query.device,
                f"the scale is on {scale.device} and the query on {query.device}: make the scale a buffer, "
                "so that .to(device) moves it",
            )
        m.require(
            not (a.is_causal and a.attn_mask is not None), "it is causal and has a mask; the fused op takes one of both"
        )
        key, val = value(a.key), value(a.value)
        # The graph's own attention fails where batch, heads or lengths differ, so what is not known of them is so.
        differ = any(known(x != y) for x, y in zip(key.shape[:3], val.shape[:3], strict=True))
        m.require(
            not differ and known(key.shape[3] == val.shape[3]),
            f"key {list(key.shape)} and value {list(val.shape)} have different shapes",
        )
        m.require(
            key.dtype == val.dtype == query.dtype,
            f"query, key and value are {dtype_name(query.dtype)}, {dtype_name(key.dtype)} and {dtype_name(val.dtype)}",
        )
        m.require(
            key.device == val.device == query.device,
            f"query, key and value are on {query.device}, {key.device} and {val.device}",
        )
        mask = None if a.attn_mask is None else value(a.attn_mask)
        if mask is not None:
            scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            fits = (
                known(x == 1) or known(x == y) for x, y in zip(reversed(mask.shape), reversed(scores), strict=False)
            )
            m.require(
                mask.ndim <= 4 and all(fits),
                f"a mask of {list(mask.shape)} is not known to broadcast to {list(scores)}",
            )
        why = why_unsupported(query, key, val, mask, is_causal=a.is_causal, scale=a.scale, dtype=q.dtype)
        m.require(why is None, str(why))

    def profitability(self, m: AttentionQuantMatch) -> None:
        """Where the kernel that would run was measured to beat stock's best attention and quantisation kernels."""
        a = m.attention
        query, mask = value(a.query), None if a.attn_mask is None else value(a.attn_mask)
        m.require(query.is_cuda, f"the fused op has no faster kernel on the {query.device.type.upper()}")
        verdict = measured_verdict(
            query, value(a.key), value(a.value), mask, is_causal=a.is_causal, scale=a.scale, dtype=m.quantize.dtype
        )
        m.require(verdict.ratio is not None and verdict.ratio >= 1.0, verdict.why)

    def replacement(self, m: AttentionQuantMatch, call: Call) -> Node:
        """The fused op in the layout that needs the fewest copies, then the views."""
        a, q = m.attention, m.quantize
        codes = call(
            torch.ops.fusion_passes.attention_quant.default,
            a.query,
            a.key,
            a.value,
            a.attn_mask,
            q.scale,
            is_causal=a.is_causal,
            scale=a.scale,
            output_scale_factor=q.scale_factor,
            output_scale_inverse=q.inverse,
            dtype=q.dtype,
            layout=best_layout(LAYOUTS, lambda x, layout: empty_output(x, x.dtype, layout), m.views, a.output),
        )
        return replay(m.views, codes, call)

    def explain(self, idioms: Idioms) -> Iterator[NearMiss]:
        """Where the output of each attention goes instead."""
        for attention in idioms.of(Attention):
            node = attention.output
            if behind := following_views(node):
                node = behind[-1]
            readers = ", ".join(sorted({target_name(user) for user in node.users})) or "nothing"
            yield NearMiss(
                attention.output, self.name, f"the attention's output goes to {readers}, not to a quantisation"
            )

    def describe(self, m: AttentionQuantMatch) -> str:
        """`attention bf16 [1, 32, 8192, 128] x 8 kv heads, causal -> float8_e4m3fn`."""
        query, key = value(m.attention.query), value(m.attention.key)
        mask = (
            "causal" if m.attention.is_causal else f"{m.attention.mask_kind} mask" if m.attention.mask_kind else "full"
        )
        shape = f"{list(query.shape)} x {list(key.shape)}".replace("'", "")
        return f"attention {dtype_name(query.dtype)} {shape}, {mask} -> {dtype_name(m.quantize.dtype)}"


def _behind_attention(node: Node, idioms: Idioms) -> tuple[Attention | None, tuple[Node, ...]]:
    """The attention whose output `node` is through views only, and those views.  Its output may be a view itself: of
    the last matrix product, where it is spelled out."""
    source, views = through_views(node)
    for i, candidate in enumerate((source, *views)):
        if (attention := idioms.at(candidate, Attention)) is not None:
            return attention, views[i:]
    return None, ()
