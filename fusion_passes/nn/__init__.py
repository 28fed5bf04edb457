"""Layers that a model's author uses: plain torch, which Inductor and the passes see through."""

from fusion_passes.nn.linear import FP8Linear, calibrate, quantize_

__all__ = ["FP8Linear", "calibrate", "quantize_"]
