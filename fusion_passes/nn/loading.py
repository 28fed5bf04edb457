"""What is settled when weights are in: at a load, at a reload, and when memory that was given back has returned.

The contract of `process_weights_after_loading` is in docs/attention.md: addresses stay, values are restored or refused.
All of it happens while loading, where the host may wait for the device; no forward does.
"""

import logging
import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """What `process_weights_after_loading` did, each by its full name: ``layers.3.attention.k_scale``.

    restored: held something else than what was given, or than what they always hold, and hold it again.
    reset: scales in use that nobody has given; they are 1.
    rearmed: scales that the next batch with tokens chooses, also where an earlier batch had chosen them.
    """

    restored: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    rearmed: tuple[str, ...] = ()

    def __add__(self, other: "Settled") -> "Settled":
        return Settled(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Settled)))


class SettledAfterLoading(nn.Module):
    """A module that `process_weights_after_loading` visits."""

    def process_weights_after_loading(self, name: str = "", *, device: torch.device | str | None = None) -> Settled:
        """Settle what no checkpoint holds, in place. name: of the module in its model. device: for buffers on meta."""
        raise NotImplementedError


def process_weights_after_loading(model: nn.Module, *, device: torch.device | str | None = None) -> Settled:
    """Settle all scales and tables of the model; call it after every load, whatever loaded the weights.

    Calling it again changes nothing that it has settled. It re-arms `calculate_kv_scales`: scales that a batch has
    chosen are chosen again from the next one, so call it while no cache holds tokens that are still needed.
    device: where buffers are made that are still on the meta device; all others keep their address.

    Returns what was restored, reset and re-armed, which the logger ``fusion_passes.nn.loading`` says too.
    Raises ValueError that names every layer with a scale that is lost, or on meta without a device, after all others
    are settled.
    """
    settled, errors = Settled(), []
    for name, module in model.named_modules():
        if isinstance(module, SettledAfterLoading):
            try:
                settled += module.process_weights_after_loading(name, device=device)
            except ValueError as error:
                errors.append(str(error))
    for field in fields(Settled):
        if names := getattr(settled, field.name):
            _log.info("%s: %s", field.name, shortened(names))
    if errors:
        raise ValueError(shortened(errors, "; ", 4))
    return settled


def positive_number(value: object) -> float | None:
    """The value, a number or a tensor with one, as an fp32 number; None if it is not one positive, finite number.

    Waits for the value's device.
    """
    try:
        scale = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # text, None, lists of them
        return None
    if scale.is_meta or scale.is_complex() or scale.numel() != 1:
        return None
    number = float(scale.float())
    return number if 0.0 < number < math.inf else None


def restore(buffer: Tensor, value: Tensor) -> bool:
    """Write the value to the buffer where it lies. Returns whether it held another one."""
    value = value.to(buffer.device, buffer.dtype)
    lost = not isinstance(buffer, FakeTensor) and not torch.equal(buffer, value)
    buffer.copy_(value)
    return lost


def shortened(names: "list[str] | tuple[str, ...]", separator: str = ", ", most: int = 8) -> str:
    """The first of the names, and how many more there are."""
    more = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
