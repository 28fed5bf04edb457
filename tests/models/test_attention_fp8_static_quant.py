"""The attention models, eagerly: against the fp32 reference, against each other, and what their graph holds."""

import pytest
import torch

from fusion_passes import reference
from fusion_passes.quant import codes, dequantize
from tests.models.attention_fp8_static_quant import BATCHES, DTYPES, HEADS
from tests.models.attention_fp8_static_quant import (
    AttentionFp8StaticQuantFusedModel as Fused,
)
from tests.models.attention_fp8_static_quant import (
    AttentionFp8StaticQuantPatternModel as Unfused,
)

GEOMETRY = dict(num_heads=5, num_kv_heads=1, head_dim=64, out_features=80)
SEQS = (1, 7, 65)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq", SEQS)
@pytest.mark.parametrize("model_type", [Unfused, Fused])
def test_codes_are_those_of_the_reference(model_type, seq, dtype):
    check_codes(model_type(**GEOMETRY, dtype=dtype), 3, seq)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("model_type", [Unfused, Fused])
def test_codes_are_those_of_the_reference_on_gpu(model_type, heads, batch, dtype):
    check_codes(model_type(*heads, dtype=dtype, out_features=128, device="cuda"), batch, seq=17)


def check_codes(model, batch, seq):
    inputs = model.example_inputs(batch, seq)
    output, got = model(*inputs, return_codes=True)
    assert output.shape == (batch, seq, model.projection.out_features)
    heads = [model.split_heads(x) for x in inputs]
    expected = reference.attention_quant(*heads, None, model.output_scale, is_causal=True)
    expected = expected.transpose(1, 2).reshape_as(got)
    assert got.is_contiguous()
    # The model rounds probabilities and output to dtype, the reference does not: one code off, or a value near 0.
    scale, eps = model.output_scale, torch.finfo(model.dtype).eps
    torch.testing.assert_close(dequantize(got, scale), dequantize(expected, scale), rtol=1 / 8, atol=eps)
    assert (codes(got) != codes(expected)).float().mean() < 10 * eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_is_the_product_of_the_codes(dtype):
    model = Unfused(**GEOMETRY, dtype=dtype)
    output, got = model(*model.example_inputs(2, 9), return_codes=True)
    weight = dequantize(model.projection.weight, model.projection.weight_scale)
    expected = (dequantize(got, model.output_scale) @ weight.T).view_as(output)
    torch.testing.assert_close(output.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_opaque_and_plain_and_own_quantization_agree():
    inputs = Unfused(**GEOMETRY).example_inputs(7, 33)

    def own(x, scale):
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    outputs = [Unfused(**GEOMETRY, quantize=form)(*inputs) for form in ("plain", "opaque", own)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_scales_are_told_from_their_inverse_and_from_one():
    model = Unfused(**GEOMETRY)
    scales = {float(model.output_scale), float(model.projection.weight_scale)}
    assert len(scales | {1 / scale for scale in scales} | {1.0}) == 5
    _, got = model(*model.example_inputs(7, 33), return_codes=True)
    magnitude = got.float().abs()
    assert 16 < magnitude.median() < 64  # neither lost among the subnormals nor saturated
    assert (magnitude == 448).float().mean() < 1e-3


@pytest.mark.parametrize("model_type", [Unfused, Fused])
def test_causal(model_type):
    model = model_type(**GEOMETRY)
    query, key, value = model.example_inputs(2, 12)
    before = model(query, key, value)
    key[:, -1], value[:, -1] = 7.0, -7.0
    after = model(query, key, value)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (Unfused(**GEOMETRY), ["_scaled_dot_product", "_scaled_mm"]),
        (Unfused(**GEOMETRY, quantize="opaque"), ["_scaled_dot_product", "quantize_fp8", "_scaled_mm"]),
        (Fused(**GEOMETRY), ["fusion_passes.attention_quant", "_scaled_mm"]),
    ],
    ids=["plain", "opaque", "fused"],
)
def test_graph_has_the_calls_in_order(model, wanted, post_grad_graphs):
    (graph,) = post_grad_graphs(model, *model.example_inputs(2, 9))
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    opaque = [call for call in calls if any(word in call for word in ("scaled", "quantize", "fusion_passes"))]
    assert len(opaque) == len(wanted), opaque
    assert all(word in call for word, call in zip(wanted, opaque, strict=True)), opaque
