"""A linear layer with static per-tensor FP8 weights and activations: `y = (q(x) @ q(W).T) * s_x * s_w + b`.

The quantization is spelled in plain torch and the product is `torch._scaled_mm`, so that what comes before the layer
(attention, a norm, an activation) can be fused with the quantization. `quantize_(model, calibrate(model, run))` is
the whole workflow for a model made of nn.Linear.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fusion_passes.nn.loading import Settled, SettledAfterLoading, positive_number
from fusion_passes.quant import QuantSpec, choose_scale, quantize

FP8 = torch.float8_e4m3fn
SCALES = ("weight_scale", "input_scale")
SPEC = QuantSpec(dtype=FP8, granularity="tensor", static=True)

Filter = Callable[[str, nn.Linear], bool]


class FP8Linear(SettledAfterLoading):
    """nn.Linear on FP8 (e4m3fn) codes, one static scale for the weight and one for the input.

    All of it is buffers, so `.to(device)` moves it; `.to(dtype)` and `.half()` change the bias alone. Keys of
    state_dict: `weight` fp8 [out_features, in_features], `weight_scale` fp32 [], `input_scale` fp32 [], and
    `bias` [out_features] where there is one. A new layer holds zeros and scales of 1 until a checkpoint is loaded.
    The scales are 0-d: they promote no dtype and broadcast anywhere. load_state_dict takes them as one number of any
    shape and dtype, and refuses what is not positive and finite; the layer then keeps the scale that it has.

    Raises ValueError if a feature count is not a multiple of 16, which cuBLAS asks of FP8 operands.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of the bias; the weight is always FP8."""
        super().__init__()
        if in_features % 16 or out_features % 16:
            raise ValueError(f"FP8 needs feature counts that are multiples of 16, got {in_features} -> {out_features}")
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=FP8, device=device))
        self.register_buffer("weight_scale", torch.ones((), dtype=torch.float32, device=device))
        self.register_buffer("input_scale", torch.ones((), dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, input_scale: Tensor | float | None = None) -> "FP8Linear":
        """Quantize a layer. input_scale: one positive number, or a tensor with one; 1 if None, to be set later.

        Raises ValueError for an input_scale that is none, and for weights that are not finite. Waits for the device.
        """
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype)
        layer.train(linear.training)
        weight = linear.weight.detach()
        scale = torch.as_tensor(1.0 if input_scale is None else input_scale, dtype=torch.float32, device=weight.device)
        if scale.numel() != 1:
            raise ValueError(f"input_scale must be one number for the whole tensor, got shape {list(scale.shape)}")
        layer.weight_scale = choose_scale(weight, SPEC).reshape(())
        if not weight.is_meta:
            if positive_number(scale) is None:
                raise ValueError(
                    f"input_scale must be positive and finite, got {scale.item()}: calibrate the layer again"
                )
            if positive_number(layer.weight_scale) is None:
                raise ValueError("the weight has an infinity or a NaN: load it again before it is quantized")
        layer.weight = quantize(weight, layer.weight_scale, FP8)
        layer.input_scale = scale.detach().reshape(()).clone()
        layer.bias = None if linear.bias is None else linear.bias.detach().clone()
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] in bf16, fp16 or fp32. Returns [..., out_features] in the same dtype."""
        if input.shape[-1] != self.in_features:
            raise ValueError(f"expected [..., {self.in_features}], got {list(input.shape)}")
        if self.input_scale.device != input.device:
            raise ValueError(f"the scales are on {self.input_scale.device}, the input is on {input.device}")
        codes = quantize(input.reshape(-1, self.in_features), self.input_scale, FP8)
        return self.matmul(codes, input.dtype).reshape(*input.shape[:-1], self.out_features)

    def matmul(self, codes: Tensor, out_dtype: torch.dtype) -> Tensor:
        """The product alone, for codes that something else made with input_scale: fp8 [tokens, in_features]."""
        bias = None if self.bias is None else self.bias.to(out_dtype)
        return torch._scaled_mm(
            codes, self.weight.t(), scale_a=self.input_scale, scale_b=self.weight_scale, bias=bias, out_dtype=out_dtype
        )

    def process_weights_after_loading(self, name: str = "", *, device: torch.device | str | None = None) -> Settled:
        """Refuse scales that are lost: only a checkpoint has them, so nothing is restored here. On meta: nothing.

        Raises ValueError that names the scales that are not positive and finite.
        """
        scales = {} if self.weight_scale.is_meta else {scale: self._buffers[scale] for scale in SCALES}
        lost = {scale: x for scale, x in scales.items() if positive_number(x) is None}
        if lost:
            values = ", ".join(f"{scale} is {x.tolist()}" for scale, x in lost.items() if x is not None)
            raise ValueError(
                f"{name or 'FP8Linear'}: {values}, not a positive, finite number: load the layer's weight and both "
                "scales again, then call process_weights_after_loading"
            )
        return Settled()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in SCALES:
            value = state_dict.get(prefix + name)
            if not isinstance(value, Tensor) or value.is_meta or isinstance(value, FakeTensor):
                continue
            if positive_number(value) is None:
                shown = value.tolist() if value.numel() == 1 else f"of shape {list(value.shape)}"
                error_msgs.append(
                    f"{prefix}{name} must be one positive, finite number, got {shown}: it stays as it was"
                )
                state_dict[prefix + name] = self._buffers[name]
            else:
                state_dict[prefix + name] = value.float().reshape(())
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FP8Linear":
        # Module.to(dtype) casts every floating-point buffer, and FP8 counts as one: the codes would become bf16.
        kept = {name: self._buffers[name] for name in ("weight", *SCALES)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


@torch.no_grad()
def calibrate(model: nn.Module, run: Callable[[], Any], *, filter: Filter | None = None) -> dict[str, Tensor]:
    """Static input scales from data: the largest magnitude that each nn.Linear sees while `run()` executes.

    run: calls the model, eagerly, on batches that are typical of its use.
    filter: `filter(name, linear)` says whether to quantize a layer; every nn.Linear if None. Subclasses are left out,
    since their forward may not be nn.Linear's.
    Returns {name: fp32 []}, for `quantize_` or to be saved.

    Raises ValueError if a layer was never called, or saw an infinity or a NaN.
    """
    layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and (filter is None or filter(n, m))}
    scales: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def observe(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            x = args[0] if args else kwargs["input"]
            if x.numel():
                scale = choose_scale(x.detach(), SPEC).reshape(())
                scales[name] = torch.maximum(scales[name], scale) if name in scales else scale

        handles.append(layer.register_forward_pre_hook(observe, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if missing := [name for name in layers if name not in scales]:
        raise ValueError(f"run() never called {', '.join(missing)}: calibrate with more data, or exclude it by filter")
    if broken := [name for name, scale in scales.items() if not scale.isfinite()]:
        raise ValueError(f"the input of {', '.join(broken)} is not finite")
    return scales


@torch.no_grad()
def quantize_(model: nn.Module, input_scales: Mapping[str, Tensor | float]) -> None:
    """Replace in place the nn.Linear layers that input_scales names by FP8Linear.

    A layer that sits under several names stays one layer, wherever it is. Raises ValueError, and changes nothing, if a
    name is not that of an nn.Linear or a layer's feature counts do not suit FP8.
    """
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    swaps: list[tuple[str, FP8Linear]] = []
    for name, scale in input_scales.items():
        linear = modules.get(name)
        if not name or not isinstance(linear, nn.Linear):
            raise ValueError(f"{name!r} is not an nn.Linear inside the model")
        try:
            layer = FP8Linear.from_linear(linear, scale)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        swaps += [(place, layer) for place in places[linear]]
    for place, layer in swaps:
        model.set_submodule(place, layer)
