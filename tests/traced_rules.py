"""A rule for tests of the passes themselves: small, on the CPU, and its op says when it ran."""

import torch
import torch.nn.functional as F

import fusion_passes

CALLS: list[int] = []
"""One entry for each time that the fused op ran."""


@torch.library.custom_op("fusion_passes_tests::relu_squared", mutates_args=())
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(1)
    return F.relu(x) ** 2


@relu_squared.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def unfused(x):
    return F.relu(x) ** 2


def relu_squared_rule(**options):
    return fusion_passes.TracedRule(
        name="relu_squared",
        summary="relu(x) ** 2 in one op",
        search=unfused,
        replace=fused,
        example_inputs=(torch.empty(4, 8),),
        **options,
    )


def fused(x):
    return torch.ops.fusion_passes_tests.relu_squared(x)
