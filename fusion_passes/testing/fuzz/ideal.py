"""What a program computes without rounding to 16 bits on the way: what stock and the fused one are measured against.

Rounding to FP8 and to integers stays, since that is what the program says of its results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary


class InFP32(TorchDispatchMode):
    """Within it, every op is called twice: as it is, and with all that has 16 bits in fp32.

    The program sees the tensors that it would see without: a cast to a dtype that a tensor has already makes no copy,
    in fp32 neither, and a write to a tensor shows in its views.  What an op calls itself is not changed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide = WeakTensorKeyDictionary()

    def of(self, x: Any) -> Any:
        """A tensor in fp32: what it would be without rounding.  Anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        if x not in self._wide:
            self._wide[x] = x.to(_wide(x.dtype), copy=True)
        return self._wide[x]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wide_args, wide_kwargs = pytree.tree_map(self._argument, (args, kwargs))
        result = func(*args, **kwargs)
        wide_result = func(*wide_args, **wide_kwargs)
        for x, y in zip(pytree.tree_leaves(result), pytree.tree_leaves(wide_result), strict=True):
            if isinstance(x, Tensor):
                self._wide[x] = y
        return result

    def _argument(self, x: Any) -> Any:
        return _wide(x) if isinstance(x, torch.dtype) else self.of(x)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
