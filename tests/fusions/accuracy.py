"""How far FP8 codes may be from an fp32 reference, with budgets from the data instead of tolerances.

Two runs are judged, fused and unfused, against `exact`: what both round to FP8, in fp32.
"""

import torch
from torch import Tensor

from fusion_passes.quant import FP8_DTYPES, codes

MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
TIES = 2e-3
"""Share of codes that may differ between two fp32 computations of one value: those next to a rounding border."""


def pairs(fused, unfused, exact):
    """The outputs of both runs and the reference, one by one, whatever holds them."""
    leaves = [torch.utils._pytree.tree_leaves(x) for x in (fused, unfused, exact)]
    assert len({len(x) for x in leaves}) == 1, "the runs differ in their number of outputs"
    return list(zip(*leaves, strict=True))


def check_layout(a: Tensor, b: Tensor) -> None:
    """Of one shape, dtype, device and memory layout; the strides of dimensions of size 1 say nothing."""
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True):
        assert size <= 1 or x == y, f"strides {a.stride()} and {b.stride()} of {list(a.shape)}"


def check(fused, unfused, exact) -> None:
    """Every output: no number further from the reference than rounding allows; NaN exactly where it is due."""
    for a, b, want in pairs(fused, unfused, exact):
        check_layout(a, b)
        if a.dtype not in FP8_DTYPES:
            # The unfused scale of a group is of an attention in bf16, which can be right by luck; hence a step of that.
            close = torch.maximum(2 * (b.float() - want).abs().nan_to_num().max(), want.abs().nan_to_num() * 2.0**-8)
            assert ((a.float() - want).abs().nan_to_num() <= close).all()
        elif a.is_cuda:
            check_values(a, b, want)
        else:
            check_steps(a, b, want)


def check_steps(fused: Tensor, unfused: Tensor, exact: Tensor) -> None:
    """For a fused op that computes in fp32: at most one step from the reference, and next to none are."""
    limit = torch.finfo(fused.dtype).max
    want = codes(exact.clamp(-limit, limit).to(fused.dtype))
    off, unfused_off = (codes(fused) - want).abs(), (codes(unfused) - want).abs()
    assert off.max() <= 1, f"{(off > 1).sum()} of {off.numel()} codes are more than one step off, {off.max()} at most"
    assert share(off) <= TIES
    apart = (codes(fused) - codes(unfused)).abs()
    assert (apart <= unfused_off + 1).all()
    assert share(apart) <= share(unfused_off) + TIES


def check_values(fused: Tensor, unfused: Tensor, exact: Tensor) -> None:
    """For a fused op that rounds in between, as the unfused one does: twice the largest error of that before its own
    rounding to FP8, or one step where a step is larger.  Near 0 a step is tiny beside the rounding of probabilities."""
    limit = torch.finfo(fused.dtype).max
    want = exact.clamp(-limit, limit)
    assert torch.equal(fused.isnan(), want.isnan()), "NaN is not where it is due"
    number = want.isfinite() & unfused.float().isfinite()
    fused, unfused, want = fused[number], unfused[number], want[number]
    if not want.numel():
        return
    budget = 2 * error_before_rounding(unfused, want).max()
    error = (fused.float() - want).abs()
    allowed = torch.maximum(step(want, fused.dtype), budget)
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (
        f"{(error > allowed).sum()} of {error.numel()} values are off by more than {budget:g} and one step; "
        f"the worst is {fused[worst].float():g} for {want[worst]:g}"
    )
    assert (
        error.square().mean()
        <= 1.1 * (unfused.float() - want).square().mean() + TIES * step(want, fused.dtype).square().mean()
    )


def error_before_rounding(rounded: Tensor, exact: Tensor) -> Tensor:
    """At least how far the value that was rounded to FP8 had been from the exact one."""
    return ((rounded.float() - exact).abs() - step(rounded.float(), rounded.dtype) / 2).clamp_min(0)


def step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of representable values around x."""
    exponent = x.abs().clamp_min(torch.finfo(dtype).smallest_normal).log2().floor()
    return torch.exp2(exponent - MANTISSA_BITS[dtype])


def share(steps: Tensor) -> float:
    return float((steps != 0).float().mean())
