"""QuantFP8 in both forms, against the functions of fusion_passes.quant."""

import dataclasses
import types

import pytest
import torch
from torch._inductor.utils import get_code

import fusion_passes
from fusion_passes import PassConfig
from fusion_passes.nn import QuantFP8
from fusion_passes.nn.quant_fp8 import native_dtype
from fusion_passes.quant import QuantSpec, choose_scale, codes, dequantize, quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DYNAMIC = [
    QuantSpec(static=False),
    QuantSpec(E5M2, "token", static=False),
    QuantSpec(E4M3, "group", 16, static=False),
]


@pytest.mark.parametrize("form", ["plain", "opaque"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_static(form, dtype):
    x, scale = torch.randn(7, 3, 32).bfloat16(), torch.tensor(0.0113)
    out, same = QuantFP8(QuantSpec(dtype), form=form)(x, scale)
    assert same is scale
    assert torch.equal(out.view(torch.uint8), quantize(x, 0.0113, dtype).view(torch.uint8))


@pytest.mark.parametrize("form", ["plain", "opaque"])
@pytest.mark.parametrize("spec", DYNAMIC, ids=lambda spec: spec.granularity)
@pytest.mark.parametrize("shape", [(7, 32), (1, 2, 32)])
def test_dynamic(form, spec, shape):
    x = (torch.randn(shape) * torch.logspace(-2, 2, 32)).bfloat16()
    out, scale = QuantFP8(spec, form=form)(x)
    assert torch.equal(scale, choose_scale(x, spec))
    assert torch.equal(codes(out), codes(quantize(x, scale, spec.dtype)))
    error = (dequantize(out, scale) - x.float()).abs()
    assert (error <= 0.13 * x.float().abs() + scale.max() * 0.01).all()


@pytest.mark.parametrize("form", ["plain", "opaque"])
def test_upper_bound(form):
    x = torch.tensor([[448.0, 1.0], [4480.0, -4480.0]])
    out, scale = QuantFP8(QuantSpec(granularity="token", static=False), form=form, scale_upper_bound=2.0)(x)
    assert scale.tolist() == [[1.0], [2.0]]
    assert out.float().tolist() == [[448.0, 1.0], [448.0, -448.0]]


@pytest.mark.parametrize("form", ["plain", "opaque"])
@pytest.mark.parametrize("spec", DYNAMIC, ids=lambda spec: spec.granularity)
def test_lower_bound(spec, form):
    x = torch.tensor([[448.0] + 31 * [1.0], 32 * [0.0]])
    for bound in (0.0, 1e-10, 2.0):
        layer = QuantFP8(spec, form=form, scale_lower_bound=bound)
        assert f"scale_lower_bound={bound}" in repr(layer)
        for rows in (x, x[1:]):
            out, scale = layer(rows)
            assert torch.equal(scale, choose_scale(rows, spec, bound))
            assert torch.equal(out.view(torch.uint8), quantize(rows, scale, spec.dtype).view(torch.uint8))
        assert scale.unique().tolist() == [pytest.approx(bound)]


@pytest.mark.parametrize("form", ["plain", "opaque"])
@pytest.mark.parametrize("spec", [QuantSpec(), *DYNAMIC], ids=lambda s: f"{s.granularity}-{s.static}")
def test_plain_is_visible_to_the_compiler(form, spec, post_grad_graphs):
    scale = [torch.tensor(0.02)] if spec.static else []
    (graph,) = post_grad_graphs(QuantFP8(spec, form=form), torch.randn(4, 32).bfloat16(), *scale)
    opaque = [node for node in graph.nodes if "fusion_passes" in str(node.target)]
    assert len(opaque) == (form == "opaque")


@pytest.mark.parametrize("spec", DYNAMIC, ids=lambda spec: spec.granularity)
def test_opcheck(spec):
    kwargs = {"dtype": spec.dtype, "granularity": spec.granularity, "group_size": spec.group_size}
    # test_schema compares by torch.allclose, which FP8 does not have (torch 2.13)
    utils = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    op = torch.ops.fusion_passes.quantize_fp8_dynamic.default
    torch.library.opcheck(op, (torch.randn(5, 32).bfloat16().t().t(),), kwargs, test_utils=utils)
    torch.library.opcheck(op, (torch.randn(32, 48).bfloat16().t(),), kwargs, test_utils=utils)


def test_bad_arguments():
    with pytest.raises(ValueError, match="static scales are given with the call"):
        QuantFP8()(torch.ones(3))
    with pytest.raises(ValueError, match="dynamic ones are chosen by it"):
        QuantFP8(DYNAMIC[0])(torch.ones(3), torch.ones(()))
    with pytest.raises(ValueError, match="static scales per token have no opaque op"):
        QuantFP8(QuantSpec(granularity="token"), form="opaque")
    with pytest.raises(ValueError, match="must be positive and is for dynamic scales"):
        QuantFP8(scale_upper_bound=1.0)
    with pytest.raises(ValueError, match="scale_lower_bound is for dynamic scales"):
        QuantFP8(scale_lower_bound=1e-10)
    with pytest.raises(ValueError, match="must be a finite number, 0 or more"):
        QuantFP8(QuantSpec(static=False), scale_lower_bound=-1.0)
    with pytest.raises(ValueError, match="is less than scale_lower_bound"):
        QuantFP8(QuantSpec(static=False), scale_lower_bound=1.0, scale_upper_bound=0.5)
    with pytest.raises(ValueError, match="form must be"):
        QuantFP8(form="fast")
    with pytest.raises(ValueError, match="scale is on meta, x on cpu"):
        QuantFP8()(torch.ones(3), torch.ones((), device="meta"))


def test_native_dtype(monkeypatch):
    assert native_dtype(E4M3) is E4M3
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert native_dtype(E4M3) is torch.float8_e4m3fnuz
    assert native_dtype(E5M2, "cuda") is torch.float8_e5m2fnuz
    assert native_dtype(E4M3, "cpu") is E4M3
    properties.gcnArchName = "gfx950"
    assert native_dtype(E4M3) is E4M3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["plain", "opaque"])
@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(E5M2), *DYNAMIC], ids=str)
def test_codes_are_in_the_native_form(spec, form, compiled, monkeypatch):
    fnuz = {E4M3: torch.float8_e4m3fnuz, E5M2: torch.float8_e5m2fnuz}[spec.dtype]
    seen = []

    def native(dtype, device):
        if not torch.compiler.is_compiling():
            seen.append(device.type)
        return fnuz

    monkeypatch.setattr("fusion_passes.nn.quant_fp8.native_dtype", native)
    x, scale = torch.randn(4, 32).bfloat16() * 300, [torch.tensor(1.7)] if spec.static else []
    layer = QuantFP8(spec, form=form)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    out, scale = run(x, *scale)
    assert compiled or seen == ["cpu"]
    native_spec = dataclasses.replace(spec, dtype=fnuz)
    if not spec.static:
        assert torch.equal(scale, choose_scale(x, native_spec))
    assert out.dtype == fnuz
    assert torch.equal(out.view(torch.uint8), quantize(x, scale, fnuz).view(torch.uint8))


@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(granularity="token", static=False)], ids=["static", "dynamic"])
@torch.no_grad()
def test_the_form_that_is_not_given_follows_the_settings_of_the_compilation(spec):
    """Compiled with one after the other: no code of the first serves the second."""
    layer, x, scale = QuantFP8(spec), torch.randn(5, 64).bfloat16(), torch.tensor(0.37) if spec.static else None
    opaque = PassConfig(custom_ops={"quant_fp8": True})

    def run(x, scale):
        return layer(x * 2.0, scale)[0]

    def calls(compiled):
        return "ops.fusion_passes.quantize_fp8" in get_code(compiled, x, scale)[0]

    assert not calls(torch.compile(run))
    assert calls(fusion_passes.compile(run, opaque))
    assert not calls(fusion_passes.compile(run, PassConfig(custom_ops={"quant_fp8": False})))
    assert calls(torch.compile(run, options=fusion_passes.inductor_options(opaque)))
    assert not calls(fusion_passes.compile(run))
    torch.compiler.reset()
    with fusion_passes.enabled(opaque):
        assert calls(torch.compile(run))
        assert not calls(fusion_passes.compile(run, PassConfig()))
    assert not calls(torch.compile(lambda x, scale: run(x, scale) * 1))


@pytest.mark.parametrize("form", ["plain", "opaque"])
@torch.no_grad()
def test_the_form_that_is_given_wins(form):
    layer, x, scale = QuantFP8(form=form), torch.randn(5, 64).bfloat16(), torch.tensor(0.37)
    for setting in (True, False):
        config = PassConfig(custom_ops={"quant_fp8": setting})
        compiled = fusion_passes.compile(lambda x, scale: layer(x * 2.0, scale)[0], config)
        assert ("ops.fusion_passes.quantize_fp8" in get_code(compiled, x, scale)[0]) == (form == "opaque")
        torch.compiler.reset()


@torch.no_grad()
def test_both_forms_that_the_settings_choose_give_the_same_codes():
    x = torch.randn(7, 64).bfloat16()
    for spec in (QuantSpec(granularity="group", group_size=32, static=False), QuantSpec(static=False)):
        layer = QuantFP8(spec)
        results = []
        for setting in (True, False):
            with fusion_passes.enabled(PassConfig(custom_ops={"quant_fp8": setting})):
                results.append(layer(x))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a.float(), b.float())


@torch.no_grad()
def test_without_an_op_for_its_spec_a_layer_is_plain_whatever_is_set(caplog):
    layer = QuantFP8(QuantSpec(granularity="token"))
    x, scale = torch.randn(5, 64).bfloat16(), torch.rand(5, 1) + 0.1
    config = PassConfig(custom_ops={"quant_fp8": True})
    code = get_code(fusion_passes.compile(lambda x, scale: layer(x, scale)[0], config), x, scale)[0]
    assert "quantize_fp8" not in code
    assert "custom_ops asks for quant_fp8, but static scales per token have no opaque op" in caplog.text
