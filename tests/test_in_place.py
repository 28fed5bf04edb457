"""A KV cache is written where it lies: no copy of one in the generated code, however the program holds it."""

import pytest
import torch
from torch import nn

from fusion_passes import PassConfig, Report
from fusion_passes.nn import Attention, AttentionMetadata
from fusion_passes.ops import kv_cache_write, paged_attention
from fusion_passes.quant import quantize
from tests.fusions.without_code import FUSE, STOCK, WithoutCode
from tests.generated_code import allocations, cpp_code, triton_code

E4M3 = torch.float8_e4m3fn
PAGES, KV_HEADS, PAGE, HEAD_DIM = 37, 2, 16, 64
CACHE = PAGES * KV_HEADS * PAGE * HEAD_DIM
CODE = {"cpu": cpp_code, "cuda": triton_code}


def layer():
    attention = Attention(4, KV_HEADS, HEAD_DIM, kv_cache_dtype="fp8_e4m3", block_size=PAGE, dtype=torch.bfloat16)
    attention.set_scales(q_scale=0.031, k_scale=0.017, v_scale=0.0071)
    attention.allocate_cache(PAGES)
    return attention


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x, metadata):
        for attention in self.layers:
            x = attention(x, *heads(x), metadata)
        return x


def heads(x):
    """Key and value, made of the tokens."""
    return x[:, :KV_HEADS] * 1.5, x[:, KV_HEADS:] * 0.5


def metadata():
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    return AttentionMetadata.from_lengths([3, 1], [3, 10], table, PAGE)


def attend(x, key, value, metadata, scale):
    batch = (metadata.block_table, metadata.query_start, metadata.seq_lens)
    return paged_attention(x, key, value, *batch, None, scale, scale, scale=0.1)


def step(x, key, value, metadata, scale, keys=None):
    kv_cache_write(*(keys or heads(x)), key, value, metadata.slot_mapping, scale, scale)
    return attend(x, key, value, metadata, scale)


def arguments(x, key, value, metadata, scale):
    return step(x, key, value, metadata, scale)


def one_tensor_for_all_layers(x, caches, metadata, scale):
    for cache in caches.unbind(0):
        x = step(x, cache[0], cache[1], metadata, scale)
    return x


def one_cache_for_two_layers(x, key, value, metadata, scale):
    return step(step(x, key, value, metadata, scale), key, value, metadata, scale)


def heads_last(x, key, value, metadata, scale):
    return step(x, key.transpose(1, 2), value.transpose(1, 2), metadata, scale)


def with_quantized_output(x, key, value, metadata, scale):
    return quantize(step(x, key, value, metadata, scale).flatten(1), scale, E4M3)


def with_rope(x, cos, sin, key, value, metadata, scale):
    """One op rotates, quantizes and writes."""
    query, new_key, new_value = rotated(x, cos, sin), rotated(heads(x)[0], cos, sin), heads(x)[1]
    query = quantize(query, scale, E4M3)
    kv_cache_write(new_key, new_value, key, value, metadata.slot_mapping, scale, scale)
    batch = (metadata.block_table, metadata.query_start, metadata.seq_lens)
    return paged_attention(query, key, value, *batch, scale, scale, scale, scale=0.1, dtype=torch.bfloat16)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def angles():
    return (torch.rand(4, 1, HEAD_DIM // 2).bfloat16() for _ in range(2))


def read_before_the_write(x, key, value, metadata, scale):
    old = attend(x, key, value, metadata, scale)
    return step(x + old, key, value, metadata, scale, keys=heads(x))


def written_twice(x, key, value, metadata, scale):
    first = step(x, key, value, metadata, scale)
    return step(first, key, value, metadata, scale, keys=heads(x * 2.0))


def cache(*outer, heads_last=False):
    shape = (PAGES, PAGE, KV_HEADS, HEAD_DIM) if heads_last else (PAGES, KV_HEADS, PAGE, HEAD_DIM)
    return (torch.randn(*outer, *shape) * 50).to(E4M3)


def inputs(*caches):
    return (torch.randn(4, 4, HEAD_DIM).bfloat16(), *caches, metadata(), torch.tensor(0.017))


PROGRAMS = {
    "a buffer": lambda: (Layers(1), inputs()[:2]),
    "two layers": lambda: (Layers(2), inputs()[:2]),
    "arguments": lambda: (arguments, inputs(cache(), cache())),
    "one tensor for all layers": lambda: (one_tensor_for_all_layers, inputs(cache(3, 2))),
    "one cache for two layers": lambda: (one_cache_for_two_layers, inputs(cache(), cache())),
    "heads last": lambda: (heads_last, inputs(cache(heads_last=True), cache(heads_last=True))),
    "with RoPE": lambda: (with_rope, inputs(*angles(), cache(), cache())),
    "with a quantized output": lambda: (with_quantized_output, inputs(cache(), cache())),
}
REORDERED = {
    "read before the write": lambda: (read_before_the_write, inputs(cache(), cache())),
    "written twice": lambda: (written_twice, inputs(cache(), cache())),
}
"""Where torch moves a read behind the write that it preceded."""


def copies(device, fn, tensors, config):
    """How many buffers of the size of a cache the generated code allocates."""
    code = CODE[device](fn, *tensors, config=config)
    written_by = "rope_quant_kv_write" if config is FUSE and fn is with_rope else "kv_cache_write"
    assert code.count(f"torch.ops.fusion_passes.{written_by}") > 0
    return sum(size >= CACHE for size in allocations(code))


@pytest.mark.parametrize("device", CODE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_copy_of_a_cache_with_and_without_passes(program, device):
    for config in (STOCK, FUSE):
        fn, tensors = PROGRAMS[program]()
        assert copies(device, fn, tensors, config) == 0


@pytest.mark.parametrize("device", CODE)
@pytest.mark.parametrize("program", REORDERED)
def test_reads_come_before_the_write_so_that_no_copy_is_needed(program, device):
    fn, tensors = REORDERED[program]()
    assert copies(device, fn, tensors, STOCK) > 0, "the count cannot see a copy, or torch needs none any more"
    assert copies(device, fn, tensors, PassConfig(in_place_writes=False)) > 0
    assert copies(device, fn, tensors, PassConfig()) == 0


@pytest.mark.parametrize("program", [*PROGRAMS, *REORDERED])
@torch.no_grad()
def test_outputs_and_caches_are_those_of_the_stock_graph(program):
    results = []
    for config in (STOCK, PassConfig()):
        torch.manual_seed(0)
        fn, tensors = (PROGRAMS | REORDERED)[program]()
        run = WithoutCode(fn, config)
        out = run(*tensors)
        written = [x for x in (*tensors, *(fn.buffers() if isinstance(fn, nn.Module) else ())) if is_fp8(x)]
        results.append((out, written, run.report))
    (want, caches, _), (out, written, report) = results
    assert torch.equal(out.float(), want.float())
    assert len(caches) > 0
    for x, y in zip(written, caches, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert len(report.moves) == (program in REORDERED)


def is_fp8(x):
    return isinstance(x, torch.Tensor) and x.dtype is E4M3


@torch.no_grad()
def test_old_values_that_are_needed_together_with_the_new_are_copied():
    """Nothing is moved where a read of the old cache needs what was written."""

    def both(x, key, value, metadata, scale):
        new = step(x, key, value, metadata, scale)
        return attend(new, key, value, metadata, scale)

    def old_and_new(x, key, value, metadata, scale):
        before = key.view(torch.uint8)[0, 0].float()
        out = step(x, key, value, metadata, scale)
        return out, before * out.float().mean()

    for fn in (both, old_and_new):
        results = []
        for config in (STOCK, PassConfig()):
            torch.manual_seed(0)
            tensors = inputs(cache(), cache())
            run = WithoutCode(fn, config)
            outputs = run(*tensors)
            results.append(torch.utils._pytree.tree_leaves((outputs, tensors[1:3])))
        for x, y in zip(*results, strict=True):
            assert torch.equal(x.float(), y.float())


def test_the_report_says_what_was_moved():
    fn, tensors = REORDERED["read before the write"]()
    run = WithoutCode(fn, PassConfig())
    with torch.no_grad():
        run(*tensors)
    (move,) = run.report.moves
    assert isinstance(run.report, Report)
    assert run.report.count() == run.report.graphs[0].fused == len(run.report.sites) == 0, "nothing was fused"
    assert not any(move.what in line or "moved" in line for line in run.report.declined("in_place_writes"))
    assert "  moved        in_place_writes  " in str(run.report)
    assert move.what == (
        "fusion_passes.kv_cache_write in place: fusion_passes.paged_attention of what was there before comes first"
    )
