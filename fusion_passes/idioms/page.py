"""The page docs/spellings.md, made from the tables: `python -m fusion_passes.idioms.page > docs/spellings.md`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from fusion_passes.idioms import opaque, rope
from fusion_passes.idioms.quantize import QUANTIZED_DECOMPOSED
from fusion_passes.idioms.spellings import attention, group_quantize, quantize, rms_norm

INTRODUCTION = """\
# Spellings

What the passes read in a graph, as plain torch functions. They are the test cases too: each is captured in several
dtypes and on several backends, read, and compared with the reference of what was read. What is not listed may be read
as well: the readers go by grammar, so operands may be swapped, sizes may be dynamic, and views and clones may stand
between the steps. `python -m fusion_passes explain` says where a reading stopped, and why.

To be read is not to be fused: [what a fusion declines](fusions.md), such as a rounding to whole numbers, another clamp
than the FP8 type's, or none at all where a cast overflows differently from one torch version to another, is read too,
and reported with its reason.

Made from the tables `SPELLINGS` in `fusion_passes/idioms`; do not edit by hand.
"""

SECTIONS: tuple[tuple[str, str, Mapping[str, Callable[..., Any]]], ...] = (
    ("Attention", "`q [batch, heads, q_len, head_dim]`, `k` and `v` with as many heads or fewer.", attention.SPELLINGS),
    (
        "Rotary embedding",
        "`x [tokens, heads, head_dim]`, `cos` and `sin` with a column for each pair of dimensions that is turned.",
        rope.SPELLINGS,
    ),
    ("Static per-tensor quantization", "`x [tokens, hidden]`, `scale` with one element.", quantize.SPELLINGS),
    ("RMSNorm", "`x [..., hidden]`, `weight [hidden]`.", rms_norm.SPELLINGS),
    (
        "Dynamic quantization per group",
        "`x [tokens, hidden]`; codes and scales of groups of 32.",
        group_quantize.SPELLINGS,
    ),
)


def spellings_page() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for title, inputs, spellings in SECTIONS:
        parts.append(f"## {title}\n\n{inputs}\n")
        parts += [f"### {name}\n\n```python\n{_body(function)}\n```\n" for name, function in spellings.items()]
    ops = "\n".join(f"- `{name}`" for name in (*opaque.OPAQUE, QUANTIZED_DECOMPOSED))
    parts.append(f"### ops that quantize in one call\n\n{ops}\n")
    return "\n".join(parts)


def _body(function: Callable[..., Any]) -> str:
    """The lines of a function below its signature."""
    _, _, body = inspect.getsource(function).partition(":\n")
    return textwrap.dedent(body).rstrip()


if __name__ == "__main__":
    print(spellings_page(), end="")
