"""What the tests that hold for every rule need of one: small programs that it fuses, and some that it must not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STATIC = frozenset({"divide", "reciprocal", "inverse", "number", "opaque"})
"""Ways to spell a static quantization: x / s, x * (1 / s), x * inverse, a Python number, an op that hides it."""


@dataclass(frozen=True)
class Case:
    """One program.

    fn, inputs: `fn(*inputs(tokens, device))`; tokens is the size that varies, all else of the shapes is the case's own.
    fuses: whether the rule applies, under `profitability="ignore"`.  reason: where it does not, a regular expression
        for what the report says.
    scales: which inputs are fp32 scales, counted from the end.  dynamic: (input, dimension) that are `tokens`.
    reference: what `fn` returns in fp32, before anything is rounded or saturated to FP8.
    kind: of place, where a rule has several: each has all ways to spell it.  family: the way that this case spells the
        quantization, such as one of `STATIC`.
    becomes: the op that is called then, where it is not named like the rule.
    output_scale: whether its last input is the scale of a static quantization, which may come in any form.
    place: one that must not fuse: whether it is found and refused, not overlooked with a near miss.
    all_symbolic: whether it fuses where every size is symbolic, as with `dynamic=True`: what a kernel must know of a
        head, no one can then prove.
    differentiable: whether gradients flow through the op that is fused.
    effect: it writes to inputs that it does not return, which a graph captured without a card leaves out.
    strided: inputs that are not contiguous.  cuda: whether it is the same on CUDA.
    one_token_on_cuda: whether it fuses there with one token too: Inductor makes a product with one row, where it is
        spelled out, into a multiplication and a sum, which is not read as attention.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[int, torch.device | str], tuple[Tensor, ...]]
    fuses: bool = True
    reason: str = ""
    scales: tuple[int, ...] = ()
    dynamic: tuple[tuple[int, int], ...] = ()
    reference: Callable[..., Any] | None = None
    kind: str = ""
    family: str = ""
    becomes: str = ""
    output_scale: bool = True
    place: bool = False
    differentiable: bool = True
    all_symbolic: bool = True
    effect: bool = False
    strided: bool = False
    cuda: bool = True
    one_token_on_cuda: bool = True

    def with_scale(self, value: float, tokens: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """Inputs in which every scale is `value`."""
        inputs = self.inputs(tokens, device)
        for i in self.scales:
            inputs[i].fill_(value)
        return inputs


class Layer(nn.Module):
    """A case whose scales, its last inputs, are state of a module: "buffer", a "parameter" or a "trained
    parameter"."""

    def __init__(self, case: Case, device: torch.device | str = "cpu", *, kind: str = "buffer") -> None:
        super().__init__()
        self.case, self.device = case, device
        for i in case.scales:
            scale = case.inputs(7, device)[i].clone()
            if kind == "buffer":
                self.register_buffer(f"scale_{-i}", scale)
            else:
                self.register_parameter(f"scale_{-i}", nn.Parameter(scale, requires_grad=kind == "trained parameter"))

    @property
    def scales(self) -> list[Tensor]:
        return [getattr(self, f"scale_{-i}") for i in self.case.scales]

    def tensors(self, tokens: int) -> tuple[Tensor, ...]:
        """The inputs without the scales."""
        inputs = self.case.inputs(tokens, self.device)
        return inputs[: len(inputs) - len(self.case.scales)]

    def forward(self, *tensors: Tensor) -> Any:
        return self.case.fn(*tensors, *self.scales)
