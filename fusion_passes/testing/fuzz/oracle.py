"""What must be the same with and without the fusions, and how near the rest must be.

Three results of one output are compared: stock's, the fused one, and an ideal one, in fp32 without any rounding to 16
bits on the way.  Where a fusion may round less often, the fused value may be as far from the ideal one as

    one step of its dtype + 2 * the largest error of stock beyond one step + 4 * eps * the largest magnitude

with eps of the narrowest dtype that the program computes in; and on average not further than 5/4 of stock's error, plus
eps of the mean magnitude, plus three values that fall to the other side of a rounding's border.  NaN stands where stock
has it.

All that is estimated from one sample, of a few hundred values, and the noise has a long tail: where the codes of a
query differ by one step a probability may jump, and the scale of a whole group with it.  So a result that seems too far
is judged again by many other inputs, all of its values together: a fault of the program shows in them too, and what
jumps by chance is stock as often as the fused one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_passes.quant import FP8_DTYPES

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20, torch.float64: 2.0**-20}
OTHER_SEEDS = range(1, 33)
"""Of the inputs by which a result that seems too far is judged."""


class Fault(AssertionError):
    """The fused program is not the program.  kind: of difference, in a word or two, to tell faults apart."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class TooFar(Fault):
    """The values are further from the ideal ones than they may be: of these inputs, perhaps by chance."""


class NotTraced(Exception):
    """Stock makes no graph or no code of the program, so that there is nothing to compare with."""


@dataclass(frozen=True)
class Near:
    """A result that need not be equal bit for bit, three times: stock's, the fused one, the ideal one."""

    name: str
    stock: Tensor
    fused: Tensor
    ideal: Tensor
    eps: float


def narrowest(tensors: Iterable[Any]) -> float:
    """The eps of the narrowest floating-point dtype of 16 bits or more among some tensors."""
    return max((EPS.get(x.dtype, 0.0) for x in tensors if isinstance(x, Tensor)), default=0.0) or 2.0**-20


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal element for element; NaN is NaN, whichever one, and the zeros differ by their signs."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    x, y = a.float(), b.float()
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def check_same_bits(name: str, stock: Any, fused: Any) -> None:
    """Raise unless two results are equal bit for bit."""
    if isinstance(stock, Tensor):
        check_form(name, stock, fused)
        if not same_bits(stock, fused):
            raise Fault("another value", f"{name}, which no fusion computes: {_worst(stock, fused)}")
    elif stock != fused:
        raise Fault("another value", f"{name}: {stock} and {fused}")


def check_form(name: str, stock: Tensor, fused: Any, *, strides: bool = True) -> None:
    """Raise unless shape, dtype and strides agree."""
    if not isinstance(fused, Tensor) or stock.dtype != fused.dtype or stock.shape != fused.shape:
        raise Fault("another form", f"{name}: {_form(stock)} and {_form(fused)}")
    if strides and not same_strides(stock.shape, stock.stride(), fused.stride()):
        raise Fault("other strides", f"{name} of {list(stock.shape)}: {stock.stride()} and {fused.stride()}")


def same_strides(shape: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Those of dimensions of size 1 say nothing."""
    return len(a) == len(b) and (0 in shape or all(size == 1 or x == y for size, x, y in zip(shape, a, b, strict=True)))


def check_all_near(results: Callable[[Sequence[int]], Iterable[Sequence[Near]]]) -> None:
    """Raise unless all results are near the ideal ones.  results: of the inputs of each seed, in the same order."""
    try:
        for of_one_seed in results([0]):
            for near in of_one_seed:
                check_near(near.name, near.stock, near.fused, near.ideal, near.eps)
    except TooFar:
        for of_one in zip(*results(OTHER_SEEDS), strict=True):
            stock, fused, ideal = (
                torch.cat([getattr(near, of).flatten() for near in of_one]) for of in ("stock", "fused", "ideal")
            )
            name = f"{of_one[0].name} of {len(of_one)} seeds"
            check_near(name, stock, fused, ideal, max(near.eps for near in of_one))


def check_near(name: str, stock: Tensor, fused: Tensor, ideal: Tensor, eps: float) -> None:
    """Raise unless the fused result is as near to the ideal one as the module says: TooFar, or a Fault that no other
    inputs excuse."""
    if stock.numel() == 0:
        return
    s, f, i = stock.double(), fused.double(), ideal.double()
    empty = s.isnan() & (f == 0)  # a row that attends to nothing: documented in `Attention`
    lost = (s.isnan() != f.isnan()) & ~empty
    if lost.any():
        raise Fault("another NaN", f"{name}: {_worst(stock, fused)}")
    kept = ~(s.isnan() | f.isnan() | i.isnan())
    if (s.isinf() & kept & (s != f) & (i == s)).any():
        raise Fault("another infinity", f"{name}: {_worst(stock, fused)}")
    kept &= ~(s.isinf() | f.isinf() | i.isinf())
    s, f, i = s[kept], f[kept], i[kept]
    if not len(s):
        return
    of_stock, of_fused = (s - i).abs(), (f - i).abs()
    magnitude = i.abs().max()
    noise = (of_stock - _step(torch.maximum(s.abs(), i.abs()), stock.dtype)).clamp(min=0.0).max()
    beyond = 2.0 * noise + 4.0 * eps * magnitude
    allowed = _step(torch.maximum(f.abs(), i.abs()), stock.dtype) + beyond
    if (of_fused > allowed).any():
        at = int((of_fused - allowed).argmax())
        raise TooFar(
            "too far from fp32",
            f"{name}: {int((of_fused > allowed).sum())} of {len(f)} values, such as {f[at]:g} where stock has "
            f"{s[at]:g} and fp32 {i[at]:g}; {float(allowed[at]):g} is allowed",
        )
    bound = 1.25 * of_stock.mean() + eps * i.abs().mean() + 3.0 * _step(magnitude, stock.dtype) / len(f)
    if len(f) >= 32 and of_fused.mean() > bound:
        raise TooFar(
            "further from fp32 than stock",
            f"{name}: an error of {of_fused.mean():g} on average, of stock {of_stock.mean():g}, allowed {bound:g}",
        )


def _step(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours of a dtype at these magnitudes, or a little more."""
    if dtype in FP8_DTYPES or dtype.is_floating_point:
        info = torch.finfo(dtype)
        return magnitude.clamp(min=info.tiny) * info.eps
    return torch.ones_like(magnitude)


def check_aliases(outputs: tuple[list[Any], list[Any]], inputs: tuple[list[Any], list[Any]]) -> None:
    """Raise unless outputs share memory with each other and with inputs as they do in stock.

    outputs, inputs: stock's and the fused ones."""
    stock, fused = (_shared(o, i) for o, i in zip(outputs, inputs, strict=True))
    if stock != fused:
        raise Fault("other aliasing", f"shared memory: stock {sorted(stock)}, fused {sorted(fused)}")


def _shared(outputs: list[Any], inputs: list[Any]) -> set[str]:
    named = [(f"input {i}", x) for i, x in enumerate(inputs)] + [(f"output {i}", x) for i, x in enumerate(outputs)]
    at = [
        (name, x.untyped_storage().data_ptr())
        for name, x in named
        if isinstance(x, Tensor) and x.untyped_storage().size()
    ]
    return {
        f"{a} and {b}"
        for i, (a, here) in enumerate(at)
        for b, there in at[i + 1 :]
        if here == there and b.startswith("output")
    }


def _form(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _worst(stock: Tensor, fused: Tensor) -> str:
    a, b = stock.double().flatten(), fused.double().flatten()
    differ = (a != b) & ~(a.isnan() & b.isnan())
    at = int((torch.where(differ, (a - b).abs().nan_to_num(1e30, 1e30), -1.0)).argmax())
    return f"{int(differ.sum())} of {len(a)} differ, such as {b[at]:g} where stock has {a[at]:g}"
