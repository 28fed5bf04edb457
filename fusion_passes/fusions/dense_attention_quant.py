"""`attention_quant` for scaled dot product attention.

scaled_dot_product_attention → transpose, reshape, contiguous … → saturate(x / scale).to(fp8)
becomes   fusion_passes::attention_quant → the same views
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.fusions.attention_match import StaticMatch
from fusion_passes.fusions.rule import Rule
from fusion_passes.fusions.static_quant import check_static
from fusion_passes.graph.match import Call
from fusion_passes.graph.read import through_views, value
from fusion_passes.graph.symbolic import known
from fusion_passes.graph.views import best_layout, replay
from fusion_passes.idioms import Idioms
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.measured.attention_quant import verdict as measured_verdict
from fusion_passes.ops.attention_quant import (
    LAYOUTS,
    MASK_DTYPES,
    OUTPUT_DTYPES,
    AttentionQuantArguments,
    empty_output,
    why_unsupported,
)
from fusion_passes.quant import dtype_name


@dataclass(frozen=True, eq=False)
class DenseMatch(StaticMatch):
    """Of scaled dot product attention."""

    attention: Attention

    @property
    def arguments(self) -> AttentionQuantArguments:
        """What decides which kernel takes the call."""
        a = self.attention
        mask = None if a.attn_mask is None else value(a.attn_mask)
        tensors = (value(a.query), value(a.key), value(a.value), mask)
        return AttentionQuantArguments(*tensors, is_causal=a.is_causal, scale=a.scale, dtype=self.quantize.dtype)


@dataclass(frozen=True)
class DenseAttentionQuant(Rule[DenseMatch]):
    """The output of an `Attention` reaches, through views only, a static FP8 quantization."""

    name = "attention_quant"
    summary = "attention + static FP8 output quantization"

    def pattern(self, idioms: Idioms) -> Iterator[DenseMatch]:
        """Every static quantization whose input is the output of an `Attention`."""
        for quantize in idioms.of(Quantize):
            attention, before = _behind_attention(quantize.input, idioms)
            if attention is not None:
                yield DenseMatch.of(attention, before, quantize)

    def legality(self, m: DenseMatch) -> None:
        """The kernel must compute what the graph computes: see the sentences."""
        a, q = m.attention, m.quantize
        m.require(
            not a.used_outputs,
            f"the attention's {', '.join(a.used_outputs)} is used too, and the fused op has none",
        )
        query = value(a.query)
        check_static(m, q, query, OUTPUT_DTYPES)
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
        mask = None if a.attn_mask is None else value(a.attn_mask)
        if mask is not None:
            m.require(
                mask.dtype in MASK_DTYPES and mask.device == query.device,
                f"the mask is {dtype_name(mask.dtype)} on {mask.device}; the fused op takes "
                f"{', '.join(map(dtype_name, MASK_DTYPES))} on {query.device}",
            )
            scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            fits = (
                known(x == 1) or known(x == y) for x, y in zip(reversed(mask.shape), reversed(scores), strict=False)
            )
            m.require(
                mask.ndim <= 4 and all(fits),
                f"a mask of {list(mask.shape)} is not known to broadcast to {list(scores)}",
            )
        why = why_unsupported(m.arguments)
        m.require(why is None, str(why))

    def profitability(self, m: DenseMatch) -> None:
        """Where the kernel that would run was measured to beat stock's best attention and quantization kernels."""
        query = value(m.attention.query)
        m.require(query.is_cuda, f"the fused op has no faster kernel on the {query.device.type.upper()}")
        verdict = measured_verdict(m.arguments)
        m.require(verdict.is_faster, verdict.why)

    def replacement(self, m: DenseMatch, call: Call) -> Node:
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

    def describe(self, m: DenseMatch) -> str:
        """`attention bf16 [1, 32, 8192, 128] x [1, 8, 8192, 128], causal -> float8_e4m3fn`."""
        query, key = value(m.attention.query), value(m.attention.key)
        kind = m.attention.mask_kind
        mask = "causal" if m.attention.is_causal else f"{kind} mask" if kind else "full"
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
