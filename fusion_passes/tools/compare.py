"""How far apart the outputs of two runs are: numbers by their distance, FP8 by its codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusion_passes.quant import FP8_DTYPES, codes, dtype_name

APART = 2**15
"""`quant.codes` puts infinities and NaN at least that far from every number."""


@dataclass(frozen=True)
class Difference:
    """One tensor of one run against the same tensor of another.

    max_abs, relative_l2: `max |a - b|` and `|a - b| / |b|`, in fp32 at least, over the elements that are finite in
        both; None for FP8 and where there is no such element.
    share: of the elements that are not equal (two NaN are equal).
    max_steps: for FP8, the largest distance in representable values; None otherwise.
    non_finite: number of elements that are infinite or NaN on one side and something else on the other.
    problem: why the two cannot be compared, or "".
    """

    output: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    max_abs: float | None = None
    relative_l2: float | None = None
    share: float = 0.0
    max_steps: int | None = None
    non_finite: int = 0
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.share == 0.0 and not self.problem

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.equal:
            return "equal in every element"
        parts = []
        if self.max_steps is not None:
            parts.append(f"{self.share:.3%} of the FP8 codes differ")
            parts.append(f"by at most {self.max_steps} step{'s' * (self.max_steps != 1)}")
        elif self.max_abs is None or self.relative_l2 is None:
            parts.append(f"{self.share:.3%} of the elements differ")
        else:
            parts.append(f"max abs {self.max_abs:.3g}")
            parts.append(f"relative L2 {self.relative_l2:.3g}")
        if self.non_finite:
            parts.append(f"{self.non_finite} infinite or NaN on one side only")
        return ", ".join(parts)


def compare(run: object, other: object) -> tuple[Difference, ...]:
    """Every tensor in the output of `run` (a tensor, or any nesting of containers) against that of `other`."""
    left, right = dict(tensors(run)), dict(tensors(other))
    return tuple(
        difference(name, left[name], right[name])
        if name in left and name in right
        else Difference(name, problem="only one of the two runs has this output")
        for name in {**left, **right}
    )


def tensors(output: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output with their names: `[0]`, `['logits']`; `output` for one that is not in a container."""
    try:
        leaves: list[tuple[Any, Any]] = pytree.tree_flatten_with_path(output)[0]
    except ValueError:  # a container that somebody registered without names
        leaves = [((pytree.SequenceKey(i),), leaf) for i, leaf in enumerate(pytree.tree_leaves(output))]
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path) or "output", leaf


def difference(name: str, a: Tensor, b: Tensor) -> Difference:
    """`a` against `b`, which it may only differ from in its floating-point dtype."""
    about = Difference(name, dtype_name(a.dtype), tuple(a.shape))
    fields: dict[str, Any] = {"output": name, "dtype": about.dtype, "shape": about.shape}
    if a.shape != b.shape:
        return Difference(**fields, problem=f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    if a.layout != torch.strided or b.layout != torch.strided:
        return Difference(**fields, problem=f"{a.layout} tensors are not compared")
    fp8 = a.dtype in FP8_DTYPES
    if a.dtype != b.dtype and (fp8 or not (a.is_floating_point() and b.is_floating_point())):
        return Difference(**fields, problem=f"dtypes differ: {a.dtype} and {b.dtype}")
    if a.numel() == 0:
        return Difference(**fields)
    if fp8:
        steps = (codes(a) - codes(b)).abs()
        apart = int((steps >= APART).sum())
        near = int(torch.where(steps < APART, steps, 0).max())
        return Difference(**fields, share=_share(steps != 0), max_steps=near, non_finite=apart)
    if not (a.is_floating_point() or a.is_complex()):
        return Difference(**fields, share=_share(a != b))
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(wide), b.to(wide)
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    if bool(finite.any()):
        x, y = a[finite], b[finite]
        norm = float(torch.linalg.vector_norm(y))
        distance = float(torch.linalg.vector_norm(x - y))
        fields["max_abs"] = float((x - y).abs().max())
        fields["relative_l2"] = distance / norm if norm else (float("inf") if distance else 0.0)
    return Difference(**fields, share=_share(unequal), non_finite=int((unequal & ~finite).sum()))


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / mask.numel()
