"""What an op does where its kernel cannot run: it runs all the same, says so once, and asks the device nothing."""

import contextlib
import functools
import importlib
import logging
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_passes import reference
from fusion_passes.ops import (
    attention_quant,
    kv_cache,
    kv_cache_write,
    paged_attention,
    quantize_fp8,
    rope_quant_kv_write,
    support,
)
from fusion_passes.quant import codes, quantize

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OP, WRITE, ROPE, PAGED, QUANTIZE, DYNAMIC = (
    importlib.import_module(f"fusion_passes.ops.{name}")
    for name in (
        *("attention_quant", "kv_cache_write", "rope_quant_kv_write"),
        *("paged_attention", "quantize", "quantize_dynamic"),
    )
)
MODULES = OP, WRITE, ROPE, PAGED, QUANTIZE, DYNAMIC


class TritonLike(Exception):
    """What Triton raises where it cannot compile a kernel."""

    __module__ = "triton.compiler.errors"


@pytest.fixture
def card(monkeypatch):
    """The CUDA implementations, on CPU tensors: `card.kernel(**functions)` is what each module of kernels is then;
    `card.capability` and `card.triton` are an H200's."""

    class Card:
        capability = (9, 0)
        triton = (3, 6)
        kernels: ModuleType | str = "no kernels were given"

        def kernel(self, **functions):
            self.kernels = ModuleType("kernels")
            vars(self.kernels).update(functions)

    made = Card()
    for module in (support, *MODULES):
        for name, answer in {
            "device_capability": lambda device: made.capability,
            "triton_version": lambda: made.triton,
            "kernel_module": lambda name: made.kernels,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, answer)
    monkeypatch.setattr(kv_cache, "values_are_checked", lambda device: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(support, "_told", set())
    monkeypatch.setattr(support, "_failed", {})
    for remembered in (OP._decided, WRITE._why_no_kernel):
        remembered.cache_clear()
    yield made
    for remembered in (OP._decided, WRITE._why_no_kernel):
        remembered.cache_clear()


def attend(*tensors, **options):
    return OP._cuda(OP.AttentionQuantArguments(*tensors, **options))


def by_hand(query, key, value, mask=None, scale=1.0, **options):
    out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, **options)
    return quantize(out.float(), scale)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def qkv(length=16, head_dim=64, dtype=BF16, kv_heads=2):
    return [torch.randn(2, heads, length, head_dim).to(dtype) for heads in (4, kv_heads, kv_heads)]


def from_reference(calls):
    """A kernel that computes the reference, and notes the strides that it gets."""

    def launch(out, query, key, value, attn_mask, output_scale, **options):
        calls.append([x.stride() for x in (query, key, value)])
        names = "is_causal", "scale", "output_scale_factor", "output_scale_inverse"
        options = {name: options[name] for name in names}
        out.copy_(reference.attention_quant(query, key, value, attn_mask, output_scale, dtype=out.dtype, **options))

    return launch


LAYOUTS = {
    "head dimension not last": (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), True),
    "every second number": (lambda x: x.repeat_interleave(2, -1)[..., ::2], True),
    "one number for a head": (lambda x: x[..., :1].expand(x.shape), True),
    "one head for all": (lambda x: x[:, :1].expand(x.shape), False),
    "rows of an odd size": (lambda x: F.pad(x, (0, 3))[..., : x.shape[-1]], False),
    "an odd offset": (lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape), False),
    "flipped": (lambda x: x.flip(2), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_takes_any_layout(layout, card, caplog):
    """By a kernel: on copies where none takes the tensors as they lie."""
    calls = []
    card.kernel(launch=from_reference(calls))
    lay_out, copies = LAYOUTS[layout]
    tensors = [lay_out(x) for x in qkv(kv_heads=4)]
    for _ in range(2):
        out = attend(*tensors, is_causal=True, output_scale_factor=0.01)
        assert same(out, reference.attention_quant(*tensors, is_causal=True, output_scale_factor=0.01).contiguous())
    assert len(calls) == 2
    assert all(strides[-1] == 1 for call in calls for strides in call)
    assert (calls[0] == [x.stride() for x in tensors]) is not copies
    assert ("copies query, key or value in each call" in caplog.text) is copies
    assert len(caplog.records) == (1 if copies or layout == "an odd offset" else 0)


def test_a_copy_leaves_what_is_expanded(card):
    calls = []
    card.kernel(launch=from_reference(calls))
    x = torch.randn(1, 1, 64, 16, dtype=BF16).transpose(2, 3).expand(2, 4, 16, 64)
    attend(x, x, x)
    assert calls == [[(0, 0, 64, 1)] * 3]


def test_an_address_that_tma_does_not_take_is_the_portable_kernels(card, caplog):
    card.kernel(launch=from_reference([]))
    x = torch.randn(2 * 4 * 16 * 64 + 1).to(BF16)[1:].view(2, 4, 16, 64)
    attend(x, x, x)
    (record,) = caplog.records
    assert record.name == "fusion_passes.ops.attention_quant"
    assert record.getMessage() == (
        "attention_quant runs the portable attention kernel, which is slow: the Hopper attention kernel needs "
        "addresses that are multiples of 16 bytes; clone what is a slice with an odd offset"
    )


def broken(*args, **options):
    raise TritonLike("out of resource: shared memory\nand more")


WITHOUT = {
    "head size 72": ({}, dict(head_dim=72)),
    "takes bfloat16 or float16 inputs, not float32": ({}, dict(dtype=torch.float32)),
    "8.9 or later, found 8.0": (dict(capability=(8, 0)), {}),
    "without one": (dict(capability=None), {}),
    "found none": (dict(triton=None), {}),
    "cannot be imported": (dict(kernels="fusion_passes.kernels.attention_quant cannot be imported: moved"), {}),
    "Triton TritonLike: out of resource": ({}, {}),
}


@pytest.mark.parametrize("why", WITHOUT)
def test_attention_without_a_kernel_is_sdpa_and_a_quantization(why, card, caplog):
    """The numbers of stock's ops, also with a mask, one scale that multiplies, and grouped heads."""
    card.kernel(launch=broken)
    machine, inputs = WITHOUT[why]
    vars(card).update(machine)
    tensors, scale = qkv(**inputs), torch.tensor([0.02])
    for _ in range(2):
        assert same(attend(*tensors, None, scale, is_causal=True), by_hand(*tensors, scale=scale, is_causal=True))
    first = caplog.text
    assert why in first
    assert "scaled_dot_product_attention" in first or "runs without the portable attention kernel" in first
    mask = torch.rand(2, 1, 16, 16) > 0.3
    inverse = attend(*tensors, mask, scale.reciprocal(), output_scale_inverse=True)
    assert (codes(inverse) - codes(by_hand(*tensors, mask, scale=scale))).abs().max() <= 1
    added = torch.zeros(16, 16).masked_fill(~mask[0, 0], float("-inf"))  # fp32, whatever the query is
    want = reference.attention_quant(*tensors, added, scale)
    assert (codes(attend(*tensors, added, scale)) - codes(want)).abs().max() <= 1
    assert caplog.text == first


def test_a_kernel_that_triton_cannot_compile_is_not_tried_again(card, caplog):
    tried = []
    card.kernel(launch=lambda *args, **options: (tried.append(1), broken()))
    tensors = qkv()
    for _ in range(3):
        attend(*tensors)
    assert len(tried) == 2  # the one for Hopper, the portable one
    assert len(caplog.records) == 2


def test_an_error_that_is_not_triton_s_is_an_error(card):
    def launch(*args, **options):
        raise ValueError("a fault of ours")

    card.kernel(launch=launch, launch_write=launch, by_scale=launch)
    with pytest.raises(ValueError, match="a fault of ours"):
        attend(*qkv())
    with pytest.raises(ValueError, match="a fault of ours"):
        CUDA["quantize"](torch.randn(4), torch.tensor(0.1), E4M3)


def test_arguments_without_a_meaning_are_errors_all_the_same(card):
    card.capability = None
    query, key, value = qkv()
    with pytest.raises(ValueError, match="share batch and head_dim"):
        attend(query, key[:1], value[:1])
    with pytest.raises(ValueError, match="move it there once"):
        attend(query, key, value, None, torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="must be one float32 element"):
        CUDA["quantize"](query, torch.ones(2), E4M3)


def cases(device="cpu"):
    """Each op by name: its arguments, its result and what it has written, as a function of its implementation."""
    torch.manual_seed(1)
    query, key, value = (x.to(device, BF16) for x in torch.randn(5, 8, 64).split([4, 2, 2], 1))
    cos, sin = torch.rand(2, 9, 32, device=device)
    positions = torch.tensor([3, 0, 8, -1, 4], device=device)
    caches = torch.randn(2, 4, 2, 16, 64, device=device).to(E4M3)
    scale = torch.tensor(0.031, device=device)
    slots = torch.tensor([3, 9, -1, 33, 63], device=device)
    table, start, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 1]], [0, 5], [30]))

    def written(run, *before, **options):
        kept = [x.clone() for x in caches]
        out = run(*before, *kept, slots, *options.pop("scales"), **options)
        return [*([] if out is None else [out]), *kept]

    dynamic = {"dtype": E4M3, "granularity": "group", "group_size": 32}
    return {
        "quantize": (lambda run: [run(query, scale, E4M3)], quantize_fp8),
        "quantize_dynamic": (lambda run: run(query, **dynamic), torch.ops.fusion_passes.quantize_fp8_dynamic),
        "kv_cache_write": (lambda run: written(run, key, value, scales=(scale, scale)), kv_cache_write),
        "rope_quant_kv_write": (
            lambda run: written(run, query, key, value, cos, sin, positions, scales=[scale] * 3, rotary_dim=64),
            rope_quant_kv_write,
        ),
        "paged_attention": (
            lambda run: [run(query, *caches, table, start, lengths, None, scale, scale, scale=0.2)],
            paged_attention,
        ),
    }


CUDA = {
    "quantize": support.unpacked(QUANTIZE.QuantizeArguments, QUANTIZE._cuda),
    "quantize_dynamic": support.unpacked(DYNAMIC.QuantizeDynamicArguments, DYNAMIC._cuda),
    "kv_cache_write": support.unpacked(WRITE.KVCacheWriteArguments, WRITE._cuda),
    "rope_quant_kv_write": support.unpacked(ROPE.RopeQuantKVWriteArguments, ROPE._cuda),
    "paged_attention": support.unpacked(PAGED.PagedAttentionArguments, PAGED._cuda),
}
OPS = list(CUDA)


def close(a, b):
    if a.dtype is E4M3:
        return (codes(a) - codes(b)).abs().max() <= 1
    return torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("machine", ["an old card", "no Triton", "not imported", "not compiled"])
def test_every_op_runs_without_its_kernel(name, machine, card, caplog, monkeypatch):
    def launch(*args, **options):
        broken()

    card.kernel(launch=launch, launch_write=launch, by_scale=launch, by_group=launch)
    monkeypatch.setattr(PAGED, "_launch", launch)
    monkeypatch.setattr(PAGED.support, "kernel_module", lambda name: card.kernels)
    card.capability = (7, 5) if machine == "an old card" else (9, 0)
    card.triton = None if machine == "no Triton" else (3, 6)
    if machine == "not imported":
        card.kernels = "the module cannot be imported"
    run, public = cases()[name]
    for _ in range(2):
        for got, want in zip(run(CUDA[name]), run(public), strict=True):
            assert got.shape == want.shape
            assert got.stride() == want.stride()
            assert close(got, want)
    (record,) = caplog.records
    assert record.name == f"fusion_passes.ops.{name}"
    assert record.levelno == logging.WARNING
    assert "which is slow: " in record.getMessage()


@pytest.mark.parametrize("name", OPS)
def test_the_way_without_a_kernel_asks_the_device_nothing(name, card):
    """As while a CUDA graph is captured: a fake tensor has no values, so that a question to them is an error."""
    card.capability = (7, 5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        run, _ = cases()[name]
        run(CUDA[name])


def test_neither_does_attention(card):
    card.capability = (7, 5)
    with FakeTensorMode():
        query, key, value = (torch.empty(2, 4, 16, 64, dtype=BF16) for _ in range(3))
        for mask in (None, torch.empty(16, 16, dtype=torch.bool), torch.empty(16, 16)):
            arguments = OP.AttentionQuantArguments(query, key, value, mask, torch.empty(1))
            assert OP.plain(arguments).shape == query.shape


def test_a_position_outside_of_the_table_is_the_nearest_one(card):
    """An index outside of a tensor would end the process on a GPU."""
    card.capability = (7, 5)
    query, key = torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    caches = torch.zeros(2, 1, 1, 16, 8)
    cos, sin = torch.rand(2, 6, 8)
    near, far = (
        ROPE._cuda(
            ROPE.RopeQuantKVWriteArguments(
                *(query, key, key, cos, sin, torch.tensor(positions), *caches, torch.arange(4)), rotary_dim=8
            )
        )
        for positions in ([0, 5, -6, 5], [0, 5, -9, 700])
    )
    assert torch.equal(near, far)


def test_kernels_by_name_are_not_replaced(card):
    card.capability = (7, 5)
    run, _ = cases()["paged_attention"]
    with pytest.raises(NotImplementedError, match=r"8\.9 for FP8, this is 7\.5; implementation='auto' does"):
        run(lambda *args, **options: CUDA["paged_attention"](*args, **options, implementation="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 64])
def test_a_cuda_graph_takes_the_way_without_a_kernel(head_dim):
    """No kernel for a head of 72; copies where the last dimension is not contiguous."""
    tensors = [x.cuda().transpose(2, 3).contiguous().transpose(2, 3) for x in qkv(128, head_dim)]
    scale = torch.tensor([0.02], device="cuda")
    attention_quant(*tensors, None, scale, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_quant(*tensors, None, scale, is_causal=True)
    scale.fill_(0.1)
    graph.replay()
    if head_dim == 72:
        want = by_hand(*tensors, scale=scale, is_causal=True)
    else:
        want = attention_quant(*(x.contiguous() for x in tensors), None, scale, is_causal=True)
    assert same(out, want)


def test_decisions_that_are_asked_for_are_kept(card, monkeypatch):
    """Of so many signatures, the one that was not asked for longest is forgotten first."""
    asked = []
    monkeypatch.setattr(OP, "_decided", functools.lru_cache(2)(OP._decided.__wrapped__))
    monkeypatch.setattr(OP, "_find_ways", lambda a: asked.append(a.query.shape[2]) or (a.query.shape[2],))
    for length in (1, 2, 1, 3, 1, 2):
        assert OP._ways(OP.AttentionQuantArguments(*qkv(length))) == (length,)
    assert asked == [1, 2, 3, 2]
