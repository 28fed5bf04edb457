"""Reload, and sleep and wake: addresses stay, what was given is restored, what is lost is refused."""

import logging
import re
import warnings

import pytest
import torch
from torch import nn

from fusion_passes.models.llama import PRESETS
from fusion_passes.models.paged_llama import PagedLlama, randomize
from fusion_passes.nn import Attention, AttentionMetadata, FP8Linear, Settled, process_weights_after_loading, quantize_

GIVEN = {"q_scale": 0.031, "k_scale": 0.017, "v_scale": 0.0071, "prob_scale": 0.0043}
LOST = [0.0, -0.5, float("nan"), float("inf")]


def layer(**options):
    options = dict(kv_cache_dtype="fp8_e4m3", quantize_probs=True, block_size=16, dtype=torch.bfloat16) | options
    return Attention(4, 2, 16, **options)


def addresses(module):
    return {name: buffer.data_ptr() for name, buffer in module.named_buffers()}


def scales(attention):
    return {name: getattr(attention, f"_{name}").item() for name in GIVEN}


def fp32(values):
    return {name: torch.tensor(x).item() for name, x in values.items()}


def fill(module, value):
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.copy_(torch.tensor(value))


def run(attention, factor=1.0):
    attention.kv_cache or attention.allocate_cache(2)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (factor * torch.randn(9, h, 16, generator=generator).bfloat16() for h in (4, 2, 2))
    metadata = AttentionMetadata.from_lengths([9], [9], torch.tensor([[1]], dtype=torch.int32), 16)
    with torch.no_grad():
        return attention(q, k, v, metadata)


# Attention


@pytest.mark.parametrize("value", [*LOST, 0.77], ids=str)
@pytest.mark.parametrize("loaded", [False, True])
def test_given_scales_come_back_where_they_were(value, loaded):
    """As zeros, or as whatever lies in the memory that an engine gets back."""
    attention = layer()
    if loaded:
        attention.load_state_dict({name: torch.tensor(x) for name, x in GIVEN.items()})
    else:
        attention.set_scales(**GIVEN)
    expected, before = run(attention), addresses(attention)
    fill(attention, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settled = process_weights_after_loading(nn.ModuleDict({"attn": attention}))
        again = process_weights_after_loading(nn.ModuleDict({"attn": attention}))
    assert torch.equal(run(attention), expected)
    assert addresses(attention) == before
    names = [*GIVEN, "q_range", "k_range", "v_range"]
    assert settled == Settled(restored=tuple(f"attn.{name}" for name in names))
    assert again == Settled()
    # Only a good value may have been meant, so only its loss is a warning.
    assert len(caught) == (len(GIVEN) if value == 0.77 else 0)
    if caught:
        assert "attn: q_scale was 0.77 in its buffer and is 0.031 again, as it was given" in str(caught[0].message)


def test_a_part_of_the_scales_is_lost():
    attention = layer()
    attention.set_scales(**GIVEN)
    attention._v_scale.zero_()
    assert attention.process_weights_after_loading("a") == Settled(restored=("a.v_scale",))
    assert scales(attention) == fp32(GIVEN)


def test_a_reload_without_scales_keeps_them_and_one_with_scales_takes_its_own():
    attention = layer(sinks=True)
    attention.set_scales(**GIVEN)
    before = addresses(attention)
    fill(attention, 0.0)
    attention.load_state_dict({"sinks": torch.ones(4)})
    attention.process_weights_after_loading()
    assert scales(attention) == fp32(GIVEN)
    fill(attention, 0.0)
    for assign in (False, True):
        attention.load_state_dict({"sinks": torch.ones(4), "kv_scale": torch.tensor([0.5])}, assign=assign)
    attention.process_weights_after_loading()
    assert scales(attention) == fp32(GIVEN | {"k_scale": 0.5, "v_scale": 0.5})
    assert addresses(attention) == before


@pytest.mark.parametrize("value", [*LOST, [0.1, 0.2]], ids=str)
@pytest.mark.parametrize("name", [*GIVEN, "kv_scale"])
def test_a_checkpoint_s_bad_scale_is_refused_and_the_old_one_stays(name, value):
    attention = layer()
    attention.set_scales(**GIVEN)
    with pytest.raises(RuntimeError, match=rf"\ba\.{name}: \w+ must be one positive, finite number"):
        nn.ModuleDict({"a": attention}).load_state_dict({f"a.{name}": torch.tensor(value)})
    with pytest.raises(ValueError, match="must be one positive, finite number"):
        attention.set_scales(**{name: value})
    assert scales(attention) == fp32(GIVEN)
    assert attention.process_weights_after_loading() == Settled()


def test_calibration_is_armed_again(caplog):
    """Also where it was armed or done when the memory went; given scales take no part."""
    attention = layer(calculate_kv_scales=True)
    attention.set_scales(v_scale=0.0071, prob_scale=0.0043)
    model, before = nn.ModuleDict({"attn": attention}), addresses(attention)
    armed = Settled(rearmed=("attn.q_scale", "attn.k_scale"))
    assert process_weights_after_loading(model) == armed
    fill(attention, 0.0)  # before the first batch
    with caplog.at_level(logging.INFO, "fusion_passes.nn.loading"):
        settled = process_weights_after_loading(model)
    assert settled.rearmed == armed.rearmed
    assert "rearmed: attn.q_scale, attn.k_scale" in caplog.messages
    expected, chosen = run(attention), scales(attention)
    assert 0.0 < chosen["k_scale"] < 0.1
    fill(attention, 0.0)  # after it
    process_weights_after_loading(model)
    assert scales(attention) == fp32({"q_scale": 1.0, "k_scale": 1.0, "v_scale": 0.0071, "prob_scale": 0.0043})
    assert torch.equal(run(attention), expected)
    assert scales(attention) == chosen
    assert process_weights_after_loading(model) == armed  # which forgets what the batch has chosen
    run(attention, 3.0)
    assert attention._k_scale.item() == pytest.approx(3 * chosen["k_scale"], rel=0.01)
    assert {name: x for name, x in addresses(attention).items() if "cache" not in name} == before


def test_what_nobody_gave_is_reset_and_said():
    attention = layer()
    attention.set_scales(k_scale=0.017)
    fill(attention, 0.0)
    with pytest.warns(UserWarning, match="v_scale, q_scale, prob_scale = 1, which no checkpoint has set"):
        settled = attention.process_weights_after_loading("a")
    assert settled.reset == ("a.v_scale", "a.q_scale", "a.prob_scale")
    assert scales(attention) == fp32({"q_scale": 1.0, "k_scale": 0.017, "v_scale": 1.0, "prob_scale": 1.0})


def test_to_empty_takes_the_host_s_copy_too():
    attention = layer()
    attention.set_scales(**GIVEN)
    attention.to_empty(device="cpu")
    with pytest.warns(UserWarning, match="which no checkpoint has set"):
        attention.process_weights_after_loading()
    assert set(scales(attention).values()) == {1.0}


def test_a_compiled_layer_follows():
    attention = layer(calculate_kv_scales=True)
    attention.set_scales(**GIVEN)
    expected = run(attention)
    attention.compile(backend="aot_eager", fullgraph=True)
    run(attention)
    for _ in range(2):
        fill(attention, 0.0)
        process_weights_after_loading(attention)
        assert torch.equal(run(attention), expected)


@pytest.mark.gpu
def test_a_captured_graph_follows():
    attention = layer(device="cuda", calculate_kv_scales=True)
    attention.set_scales(**GIVEN)
    attention.allocate_cache(2)
    q, k, v = torch.randn(9, 8, 16, device="cuda").bfloat16().split([4, 2, 2], 1)
    metadata = AttentionMetadata.from_lengths([9], [9], torch.tensor([[1]], dtype=torch.int32, device="cuda"), 16)
    with torch.no_grad():
        expected = attention(q, k, v, metadata)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # which nothing in a forward may wait in
            out = attention(q, k, v, metadata)
    fill(attention, 0.0)
    process_weights_after_loading(attention)
    graph.replay()
    assert torch.equal(out, expected)


# FP8Linear


def linear(**values):
    result = FP8Linear.from_linear(nn.Linear(32, 16, dtype=torch.bfloat16), 0.0117)
    for name, value in values.items():
        result.get_buffer(name).fill_(value)
    return result


@pytest.mark.parametrize("value", LOST, ids=str)
@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_lost_scales_of_a_linear_are_refused_until_they_are_loaded(name, value):
    model = nn.ModuleDict({"attn": layer(), "a": linear(**{name: value}), "b": linear(), "c": linear(input_scale=0.0)})
    model["attn"].set_scales(**GIVEN)
    fill(model["attn"], 0.0)
    with pytest.raises(ValueError, match=rf"a: {name} is .*load .* again.*; c: input_scale is 0\.0"):
        process_weights_after_loading(model)
    assert scales(model["attn"]) == fp32(GIVEN)  # is settled all the same
    before = addresses(model)
    model.load_state_dict(nn.ModuleDict({"attn": layer(), "a": linear(), "b": linear(), "c": linear()}).state_dict())
    assert process_weights_after_loading(model) == Settled()
    assert addresses(model) == before


@pytest.mark.parametrize("value", [*LOST, [0.1, 0.2]], ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_a_linear_loads_no_bad_scale(value, assign):
    model = nn.Sequential(linear())
    before = addresses(model)
    state = model.state_dict() | {"0.input_scale": torch.tensor(value)}
    with pytest.raises(RuntimeError, match=r"0\.input_scale must be one positive, finite number, got") as error:
        model.load_state_dict(state, assign=assign)
    assert "Missing" not in str(error.value)
    assert (model[0].input_scale.item(), addresses(model)) == (torch.tensor(0.0117).item(), before)


@pytest.mark.parametrize("scale", [torch.tensor([0.5]), torch.tensor([[0.5]]), torch.tensor(0.5).half()], ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_a_linear_loads_a_scale_of_any_shape_and_dtype(scale, assign):
    layer = linear()
    layer.load_state_dict(layer.state_dict() | {"input_scale": scale}, assign=assign)
    assert (layer.input_scale.item(), layer.input_scale.shape, layer.input_scale.dtype) == (0.5, (), torch.float32)
    assert layer(torch.randn(2, 32).bfloat16()).isfinite().all()


@pytest.mark.parametrize("value", LOST, ids=str)
def test_nothing_is_quantized_with_a_bad_scale(value):
    model = nn.Sequential(nn.Linear(32, 16))
    with pytest.raises(ValueError, match=r"0: input_scale must be positive and finite, got .*: calibrate"):
        quantize_(model, {"0": value})
    model[0].weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match="0: the weight has an infinity or a NaN"):
        quantize_(model, {"0": 0.5})
    assert type(model[0]) is nn.Linear


# Tables, and the whole


def test_a_static_cache_s_table_comes_back():
    """Zeros would let all sequences write to one page."""
    attention = layer(kv_cache_dtype="auto", quantize_probs=False)
    table = attention.allocate_static_cache(3, 20).block_table
    address = table.data_ptr()
    table.zero_()
    assert process_weights_after_loading(attention) == Settled(restored=("kv_cache.block_table",))
    assert attention.kv_cache.block_table.tolist() == [[0], [1], [2]]
    assert attention.kv_cache.block_table.data_ptr() == address
    assert process_weights_after_loading(attention) == Settled()


def test_a_model_sleeps_and_wakes():
    model = PagedLlama(PRESETS["tiny"], fp8=True, block_size=16).requires_grad_(False)
    randomize(model)
    model.allocate_cache(2)
    metadata = AttentionMetadata.from_lengths([7], [7], torch.tensor([[1]], dtype=torch.int32), 16)

    def logits():
        return model(torch.arange(7), torch.arange(7), metadata)

    expected, before = logits(), addresses(model)
    weights = {name: x.clone() for name, x in model.state_dict().items() if not re.search(r"attention\.[qkv]_s", name)}
    fill(model, 0.0)
    with pytest.raises(
        ValueError, match=r"layers\.0\.attention\.qkv: weight_scale is 0\.0, input_scale is 0\.0.*and 4"
    ):
        process_weights_after_loading(model)
    model.load_state_dict(weights)
    assert process_weights_after_loading(model) == Settled()
    assert torch.equal(logits(), expected)
    fill(model, 0.0)
    model.load_state_dict(weights)
    settled = process_weights_after_loading(model)
    assert {"cos", "sin", "layers.1.attention.attention.k_scale"} < {*settled.restored}
    assert torch.equal(logits(), expected)
    assert addresses(model) == before
