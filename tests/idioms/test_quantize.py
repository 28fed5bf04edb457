"""Static FP8 quantization: every spelling in every dtype, and what must not pass for one."""

import functools
import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.idioms import recognize
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.spellings.quantize import SPELLINGS
from fusion_passes.testing import capture, capture_cuda, run, same_codes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
LIBRARIES: list[torch.library.Library] = []


def the(graph):
    """The one quantization of a graph."""
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    (quantize,) = idioms.of(Quantize)
    return quantize


def read(fn, *args, **options):
    (graph,) = capture(fn, *args, **options)
    return the(graph)


def miss(fn, *args, **options):
    """The one sentence why there is no quantization."""
    (graph,) = capture(fn, *args, **options)
    idioms = recognize(graph)
    assert list(idioms.of(Quantize)) == []
    (near_miss,) = idioms.near_misses
    assert near_miss.what == "quantize"
    return near_miss.reason


def saturate(y, dtype=E4M3):
    limit = torch.finfo(dtype).max
    return y.clamp(-limit, limit).to(dtype)


@pytest.fixture
def x():
    return torch.randn(6, 32, dtype=BF16) * 40


@pytest.fixture
def scale():
    return torch.tensor(0.37)


EXPECTED = {
    # spelling: (scale is a tensor, scale_factor, inverse, rounding)
    "multiply by an inverse scale": (True, 1.0, True, "cast"),
    "multiply from the left": (True, 1.0, True, "cast"),
    "scale as a number": (False, 0.37, False, "cast"),
    "inverse scale as a number": (False, 2.5, True, "cast"),
    "scale with a factor": (True, 2.0, False, "cast"),
    "to whole numbers": (True, 1.0, False, "integer"),
    "cast only": (False, 1.0, False, "cast"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    spelling = SPELLINGS[name]
    cases = [
        (dtype, fp8, shape)
        for dtype, shape in ((BF16, ()), (BF16, (1,)), (torch.float16, (1, 1)), (torch.float32, ()))
        for fp8 in (E4M3, E5M2)
    ]
    inputs = [(torch.randn(6, 32).mul(40).to(dtype), torch.full(shape, 0.37), fp8) for dtype, fp8, shape in cases]
    # One graph for all cases: tracing is what takes the time.
    (graph,) = capture(
        lambda tensors: [spelling(x, scale, fp8) for (x, scale), (_, fp8, _) in zip(tensors, cases, strict=True)],
        [(x, scale) for x, scale, _ in inputs],
    )
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    outputs = graph.find_nodes(op="output")[0].args[0]
    for output, (x, scale, fp8), codes in zip(outputs, inputs, run(graph), strict=True):
        quantize = idioms.at(output, Quantize)
        tensor, factor, inverse, rounding = EXPECTED.get(name, (True, 1.0, False, "cast"))
        assert quantize.dtype == fp8
        assert (quantize.scale is not None) == tensor
        assert quantize.scale_factor == pytest.approx(factor)
        assert (quantize.inverse, quantize.rounding) == (inverse, rounding)
        limit = torch.finfo(fp8).max
        low = -math.inf if name == "clamp above only" else -limit
        assert quantize.clamp == (None if name in ("no clamp", "cast only") else (low, limit))
        assert quantize.input.op == "placeholder"
        assert quantize.output is output
        reference = quantize.reference(x, scale if tensor else None)
        for view in quantize.views:
            reference = view.target(reference.float(), *view.args[1:]).to(fp8)
        assert same_codes(codes, reference, max_steps=1) < 0.01


def test_compute_dtype(x, scale):
    assert read(lambda x, s: saturate(x / s), x, scale).compute_dtype == BF16
    assert read(lambda x, s: saturate(x.float() / s), x, scale).compute_dtype == torch.float32
    assert read(lambda x, s: saturate(x / s), x, scale[None]).compute_dtype == torch.float32
    assert read(lambda x, s: saturate((x.float() / s).to(BF16)), x, scale).compute_dtype == BF16


def test_the_input_is_what_was_there_before_the_casts(x, scale):
    # The producer's own rounding to bf16 is no part of the quantization. (The view keeps torch 2.11 from dropping it.)
    quantize = read(lambda x, s: saturate(F.silu(x).to(BF16).reshape(3, 64).float() / s), x.float(), scale)
    assert quantize.input.meta["val"].dtype == BF16
    quantize = read(lambda x: F.silu(x).to(BF16).to(E4M3), x.float())
    assert quantize.input.meta["val"].dtype == BF16


def test_other_bounds_are_recorded(x, scale):
    assert read(lambda x, s: (x / s).clamp(-240.0, 240.0).to(E4M3), x, scale).clamp == (-240.0, 240.0)
    assert read(lambda x, s: (x / s).clamp(-240, 240).clamp(-448, 448).to(E4M3), x, scale).clamp == (-240.0, 240.0)


def test_how_the_scale_is_prepared(x, scale):
    quantize = read(lambda x, s: saturate(x.float() / s.view(1, 1).expand(6, 1)), x, scale)
    assert quantize.scale.op == "placeholder"
    quantize = read(lambda x, s: saturate(x.float() * (1.0 / (2.0 * s))), x, scale)
    assert (quantize.scale.op, quantize.scale_factor, quantize.inverse) == ("placeholder", 2.0, False)
    quantize = read(lambda x, s: saturate(x.float() / (1.0 / s)), x, scale)
    assert (quantize.scale.op, quantize.inverse) == ("placeholder", True)
    # bf16 rounds the reciprocal: then the reciprocal is the scale.
    quantize = read(lambda x, s: saturate(x.float() * s.reciprocal()), x, scale.bfloat16())
    assert (quantize.scale.op, quantize.inverse) == ("call_function", True)
    quantize = read(lambda x, s: saturate(x.float() / s[3]), x, torch.rand(5))
    assert quantize.scale.op == "call_function"


def test_what_prepares_the_scale_is_not_in_the_nodes(x, scale):
    quantize = read(lambda x, s: saturate(x.float() * (1.0 / s)), x, scale)
    names = {str(node.target) for node in quantize.nodes}
    assert "aten.reciprocal.default" not in names
    assert len(quantize.nodes) == 5  # cast, mul, two clamps, cast


def test_scales_that_are_not_one_static_number(x, scale):
    per_token = "a per-token or per-group quantization, not a static per-tensor one"
    assert miss(lambda x, s: saturate(x / s), x, torch.rand(6, 1)) == f"scale has shape [6, 1]: {per_token}"
    assert "per-channel" in miss(lambda x, s: saturate(x * s), x, torch.rand(32))
    assert "per-group" in miss(lambda x, s: saturate(x.view(6, 4, 8) / s), x, torch.rand(6, 4, 1))
    assert "dynamic quantization" in miss(lambda x: saturate(x / (x.abs().amax() / 448)), x)
    assert (
        miss(lambda x, s: saturate(x / s), x, torch.tensor(3)) == "the scale has dtype int64, not a floating-point one"
    )
    assert "symbolic number (SymInt)" in miss(lambda x: saturate(x / x.shape[0]), x, dynamic=True)
    assert "the scale is 0, which float32 does not hold" in miss(lambda x: (x / 0.0).to(E4M3), x)
    assert "scaled twice" in miss(lambda x, s, t: saturate(x * s * t), x, scale, scale + 1)
    assert "broadcasts the tensor from [6, 32] to [1, 6, 32]" in miss(
        lambda x, s: saturate(x / s), x, scale.reshape(1, 1, 1)
    )
    assert "not a constant" in miss(lambda x, s, b: (x.float() / s).clamp(-b, b).to(E4M3), x, scale, scale + 1)


def test_a_scale_on_the_cpu_for_a_tensor_on_cuda(x, scale):
    graph = capture_cuda(lambda x, s: saturate(x / s), x, scale)
    assert the(graph).scale is not None
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["val"].ndim == 0:
            node.meta["val"] = scale
    assert "make the scale a buffer" in recognize(graph).near_misses[0].reason


def test_one_element_that_is_made_of_the_tensor_is_no_second_scale(x, scale):
    """One token: the norm's factor has one element."""
    norm = read(lambda x, s: saturate(x.float() * x.float().pow(2).mean(-1, keepdim=True).rsqrt() / s), x[:1], scale)
    assert (norm.scale.op, norm.input.target) == ("placeholder", torch.ops.aten.mul.Tensor)
    assert "scaled twice" in miss(lambda x, y, s: saturate(x.float() * y.pow(2).mean() / s), x[:1], x.float(), scale)


def test_no_quantization_is_not_even_nearly_one(x):
    (graph,) = capture(
        lambda x, i: (x.float() * 2, i.to(E4M3), x.to(torch.int8), x.to(E4M3).to(BF16)), x, torch.arange(4)
    )
    idioms = recognize(graph)
    assert len(list(idioms.of(Quantize))) == 1
    assert idioms.near_misses == []


@pytest.mark.parametrize("shape", [(32,), (6, 32), (1, 6, 32), (2, 3, 32)])
def test_shapes(shape, scale):
    assert read(lambda x, s: saturate(x / s), torch.randn(shape, dtype=BF16), scale).scale_factor == 1.0


def test_dynamic_sizes(x, scale):
    for spelling in ("divide", "scale reshaped and expanded", "views between the steps"):
        function = SPELLINGS[spelling]
        quantize = read(lambda x, s, function=function: function(x, s, E4M3), x, scale, dynamic=True)
        assert quantize.input.op == "placeholder"


def test_a_float_argument_that_became_a_tensor(x):
    quantize = read(lambda x, s: saturate(x / s), x, 0.3, dynamic=True)
    assert quantize.scale is not None


def test_perturbations(x, scale):
    def views(x, s):
        y = x.view(2, 3, 32).float().transpose(0, 1).clone() / s
        return saturate(y.contiguous().reshape(3, 64).unsqueeze(0))

    quantize = read(views, x, scale)
    assert quantize.input.meta["val"].shape == (2, 3, 32)
    assert [str(view.target) for view in quantize.views][-1] == "aten.unsqueeze.default"


def test_opaque_ops(x, scale):
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    quantize_per_tensor = torch.ops.quantized_decomposed.quantize_per_tensor
    quantize = read(lambda x: quantize_per_tensor(x.float(), 0.37, 0, -448, 448, E4M3), x)
    assert (quantize.opaque, quantize.rounding) == ("quantized_decomposed.quantize_per_tensor", "integer")
    assert (quantize.scale, quantize.scale_factor, quantize.clamp) == (None, 0.37, (-448.0, 448.0))
    assert quantize.input.op == "placeholder"
    quantize = read(lambda x, s: quantize_per_tensor.tensor(x.float(), s, torch.tensor(0), -448, 448, E4M3), x, scale)
    assert quantize.scale.op == "placeholder"
    assert "is 3, not 0" in miss(lambda x: quantize_per_tensor(x.float(), 0.37, 3, -448, 448, E4M3), x)
    (graph,) = capture(lambda x: quantize_per_tensor(x.float(), 0.37, 3, -128, 127, torch.int8), x)
    assert len(recognize(graph)) == 0


def test_own_opaque_op(x, scale):
    importlib.import_module("fusion_passes.ops.quantize")

    def quantize_fp8(x, s):
        return torch.ops.fusion_passes.quantize_fp8(x, s, E4M3)

    quantize = read(quantize_fp8, x, scale)
    assert (quantize.opaque, quantize.compute_dtype) == ("fusion_passes.quantize_fp8", torch.float32)
    assert same_codes(quantize_fp8(x, scale), quantize.reference(x, scale)) == 0


@functools.cache
def torchao_op():
    """torchao's opaque quantization; where it is not installed, an op of the same name and schema."""
    try:
        importlib.import_module("torchao.quantization.quant_primitives")
    except ImportError:
        library = torch.library.Library("torchao", "FRAGMENT")
        name = "quantize_affine_float8_non_decomposed"
        library.define(f"{name}(Tensor tensor, Tensor scale, ScalarType float8_dtype=float8_e4m3fn) -> Tensor")
        library.impl(
            name, lambda x, s, dtype=E4M3: (x.float() / s).clamp(-448.0, 448.0).to(dtype), "CompositeExplicitAutograd"
        )
        library.impl(name, lambda x, s, dtype=E4M3: torch.empty_like(x, dtype=dtype), "Meta")
        LIBRARIES.append(library)  # an op lives as long as its library
    return torch.ops.torchao.quantize_affine_float8_non_decomposed


def test_torchao_op(x):
    op = torchao_op()
    assert read(lambda x, s: op(x, s, E4M3), x, torch.full((1, 1), 0.37)).clamp == (-448.0, 448.0)
    assert "shape [6, 1]" in miss(lambda x, s: op(x, s, E4M3), x, torch.rand(6, 1))
