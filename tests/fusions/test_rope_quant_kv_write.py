"""rope_quant_kv_write in models: in place and in order, which query goes with which write, where the tables lie."""

import re

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.utils import run_and_get_code

import fusion_passes
from fusion_passes import PostGradPassManager, Report, reference
from fusion_passes.idioms.rope import SPELLINGS
from fusion_passes.nn import Attention, AttentionMetadata
from fusion_passes.ops import kv_cache_write, paged_attention
from fusion_passes.quant import codes as ordered
from fusion_passes.quant import quantize
from fusion_passes.testing import capture, print_graph
from tests.fusions.without_code import FUSE, STOCK, WithoutCode
from tests.generated_code import allocations

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 32, 8
OP = "fusion_passes.rope_quant_kv_write.default"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Layer(nn.Module):
    """A projection, rotary embedding and attention with an FP8 cache."""

    def __init__(self, scale, rotate="halves"):
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.qkv = nn.Linear(hidden, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False, dtype=torch.bfloat16)
        self.rotate = SPELLINGS[rotate]
        options = {"kv_cache_dtype": "fp8_e4m3", "dtype": torch.bfloat16, "backend": "sdpa"}
        self.attention = Attention(HEADS, KV_HEADS, HEAD_DIM, **options)
        self.attention.set_scales(q_scale=scale, k_scale=0.7 * scale, v_scale=0.3 * scale)
        self.attention.allocate_cache(pages=4)

    def forward(self, x, cos, sin, metadata):
        q, k, v = self.qkv(x).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)) for y in (q, k, v))
        q, k = (self.rotate(y, cos, sin).to(x.dtype) for y in (q, k))
        return self.attention(q, k, v, metadata).flatten(1)


class Model(nn.Module):
    """Layers that share cos and sin, looked up by position."""

    def __init__(self, layers=2, rotate="halves", bases=1):
        super().__init__()
        self.layers = nn.ModuleList(Layer(0.031 + 0.011 * i, rotate) for i in range(layers))
        half = HEAD_DIM // 2
        for i in range(bases):
            angle = torch.arange(64)[:, None] * (10.0 + 90.0 * i) ** -torch.linspace(0, 1, half)
            self.register_buffer(f"table_{i}", torch.cat((angle.cos(), angle.sin()), -1))
        self.bases = bases

    def forward(self, x, positions, metadata):
        tables = [getattr(self, f"table_{i}")[positions].chunk(2, -1) for i in range(self.bases)]
        for i, layer in enumerate(self.layers):
            x = x + layer(x, *tables[i % self.bases], metadata)
        return x

    @property
    def caches(self):
        return [
            half for layer in self.layers for half in (layer.attention.kv_cache.key, layer.attention.kv_cache.value)
        ]

    def clear(self):
        for cache in self.caches:
            reference.bits(cache).zero_()


def batch(device="cpu"):
    x = torch.randn(TOKENS, HEADS * HEAD_DIM).bfloat16().to(device)
    positions = torch.tensor([0, 1, 2, 3, 4, 9, 10, 11])
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device)
    return x, positions.to(device), AttentionMetadata.from_lengths([5, 3], [5, 12], table, 64)


def copies(code, cache):
    """Buffers of a cache's size, which Inductor may allocate flat, and calls that copy."""
    large = [size for size in allocations(code) if size >= cache.numel()]
    return large + re.findall(r"\.clone\(", code.split("def call")[1].split("def get_args")[0])


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_in_place_and_in_order(device):
    """Two layers: the attention reads what was written; no copy of a cache in the code, as in the stock code."""
    torch.manual_seed(0)
    model, inputs = Model().to(device), batch(device)
    addresses = [cache.data_ptr() for cache in model.caches]
    outputs, held, codes = [], [], []
    report = Report()
    for config in (STOCK, FUSE):
        torch.compiler.reset()
        model.clear()
        compiled = fusion_passes.compile(model, config, report=report, fullgraph=True)
        out, code = run_and_get_code(compiled, *inputs)
        outputs.append(out.float())
        held.append([cache.clone() for cache in model.caches])
        codes.append("\n".join(code))
    stock, ours = codes
    assert stock.count("torch.ops.fusion_passes.kv_cache_write.default(") == 2
    assert ours.count(f"torch.ops.{OP}(") == 2
    assert "kv_cache_write.default(" not in ours.replace(OP, "")
    assert copies(stock, model.caches[0]) == copies(ours, model.caches[0]) == []
    assert [cache.data_ptr() for cache in model.caches] == addresses
    assert report.count(rule="rope_quant_kv_write") == 2
    for i, (a, b) in enumerate(zip(*held, strict=True)):
        assert (a.float() != 0).any()
        assert torch.equal((a.float() != 0).any(-1), (b.float() != 0).any(-1))
        if i < 2:  # further layers see other inputs, with the roundings of the first
            assert (ordered(a) - ordered(b)).abs().max() <= 1
    assert (outputs[0] - outputs[1]).abs().max() <= 0.1 * outputs[0].abs().max()


@pytest.mark.parametrize("rotate", ["rotate_half", "neighbours", "halves in fp32", "rotate_half, heads first"])
@torch.no_grad()
def test_tables_are_read_where_they_lie(rotate):
    """By position, without a gather before; also where a spelling doubles the columns, which leaves the gather."""
    run = WithoutCode(Model(rotate=rotate))
    run(*batch())
    (after,) = run.after
    assert after.count(OP) == run.fused == 2
    looked_up = "aten.index" not in after
    assert looked_up == ("rotate_half" not in rotate)
    assert ("positions=None" in after) == (not looked_up)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize("looked_up", [False, True])
@torch.no_grad()
def test_complex_numbers(looked_up):
    """Inductor runs these op by op; a table of them is read as it lies, two columns for each number."""
    q, k, v, cos, sin, slots, scale = tensors()
    turns, positions = torch.complex(cos, sin), torch.randperm(TOKENS)

    def rotate(x, turns):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns[:, None]).flatten(-2)

    def fn(key_cache, value_cache):
        by = turns[positions] if looked_up else turns
        kv_cache_write(rotate(k, by), v, key_cache, value_cache, slots, scale, scale)
        return quantize(rotate(q, by), scale), key_cache.float()

    results = []
    for config in (STOCK, FUSE):
        run = WithoutCode(fn, config)
        results.append(run(*(torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2))))
    assert run.fused == 1
    assert "aten.index" not in run.after[0]
    assert "aten.mul" not in run.after[0]
    for a, b in zip(*results, strict=True):
        assert (a.float() != b.float()).float().mean() < 5e-3


@torch.no_grad()
def test_layers_with_other_angles_are_not_mixed_up():
    """Local and global layers in turn: each query goes with the key of its layer."""
    torch.manual_seed(0)
    model, inputs = Model(layers=4, bases=2), batch()
    run, stock = WithoutCode(model), WithoutCode(model, STOCK)
    out = run(*inputs)
    model.clear()
    want = stock(*inputs)
    assert run.fused == 4
    assert (out - want).abs().max() <= 0.1 * want.abs().max()


def step(q, k, v, cos, sin, key_cache, value_cache, slots, scale):
    rotate = SPELLINGS["halves"]
    kv_cache_write(rotate(k, cos, sin), v, key_cache, value_cache, slots, scale, scale * 2.0)
    return quantize(rotate(q, cos, sin), scale * 3.0)


def tensors():
    q, k, v = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
    cos, sin = torch.randn(2, TOKENS, HEAD_DIM // 2)
    return q, k, v, cos, sin, torch.randperm(64)[:TOKENS], torch.tensor(0.1)


@pytest.mark.parametrize("version", [1, 2])
@torch.no_grad()
def test_one_tensor_for_both_caches(version):
    """Both halves of one allocation, with either version of the wrapper around the op."""
    q, k, v, cos, sin, slots, scale = tensors()

    def fn(both):
        codes = step(q, k, v, cos, sin, both[0], both[1], slots, scale)
        return codes, both.view(torch.uint8).sum()

    results = []
    for config in (STOCK, FUSE):
        both = torch.zeros(2, 4, KV_HEADS, 16, HEAD_DIM).to(E4M3)
        with inductor_config.patch(enable_auto_functionalized_v2=version == 2):
            run = WithoutCode(fn, config)
            codes, total = run(both)
        assert run.fused == (config is FUSE)
        results.append((codes.float(), total, both.float()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][1] > 0


@pytest.mark.parametrize("unused", ["key_cache", "value_cache", "query"])
@torch.no_grad()
def test_outputs_that_nobody_uses(unused):
    """Caches made in the graph, of which one or the other is read."""
    q, k, v, cos, sin, slots, scale = tensors()

    def fn(q):
        caches = [torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2)]
        codes = step(q, k, v, cos, sin, *caches, slots, scale)
        read = {"key_cache": caches[1:], "value_cache": caches[:1], "query": caches}[unused]
        return [] if unused == "query" else codes, [cache.float() for cache in read]

    results = [WithoutCode(fn, config) for config in (STOCK, FUSE)]
    stock, ours = (torch.utils._pytree.tree_leaves(run(q)) for run in results)
    for a, b in zip(stock, ours, strict=True):
        assert torch.equal(a.float(), b.float())
    if unused != "query":
        assert results[1].fused == 1
    else:
        assert "no query is rotated" in "\n".join(results[1].report.declined("rope_quant_kv_write"))


@torch.no_grad()
@pytest.mark.parametrize("used_later", [False, True])
def test_a_reader_between_the_write_and_the_query(used_later):
    """It comes behind the fused op then, which is where the cache is written.  What was read before the write is not
    sure to be computed before that place, so if it is used later nothing is fused."""
    q, k, v, cos, sin, slots, scale = tensors()
    caches = [torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2)]

    def fn(key_cache, value_cache):
        rotate = SPELLINGS["halves"]
        before = key_cache.float().sum()
        kv_cache_write(rotate(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
        total = key_cache.float().abs().sum()
        codes = quantize(rotate(q, cos, sin), scale)
        kv_cache_write(v, v, key_cache, value_cache, slots, scale, scale)
        return before if used_later else 0.0 * total, total, codes, key_cache.float().abs().sum()

    results = []
    for config in (STOCK, FUSE):
        run = WithoutCode(fn, config)
        outputs = run(*(cache.clone() for cache in caches))
        results.append([x.float() for x in outputs])
    assert run.fused == (not used_later)
    if used_later:
        assert "reads what the fused op overwrites" in "\n".join(run.report.declined("rope_quant_kv_write"))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    before, total, _, last = results[0]
    assert before == 0 != total != last


@torch.no_grad()
def test_a_query_that_the_attention_quantizes():
    """`query_quant` takes it out, and it becomes part of this op."""
    q, k, v, cos, sin, slots, scale = tensors()
    index = {"dtype": torch.int32}
    batch = torch.tensor([[0, 1, 2, 3]], **index), torch.tensor([0, TOKENS], **index), torch.tensor([TOKENS], **index)

    def fn(key_cache, value_cache):
        rotate = SPELLINGS["halves"]
        kv_cache_write(rotate(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
        return paged_attention(rotate(q, cos, sin), key_cache, value_cache, *batch, scale, scale, scale, scale=0.2)

    run = WithoutCode(fn)
    run(*(torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2)))
    assert run.report.count(rule="query_quant") == run.report.count(rule="rope_quant_kv_write") == 1
    assert "q_scale=arg" in run.after[0]
    assert "aten.div" not in run.after[0]


@torch.no_grad()
def test_a_query_made_of_what_was_written_is_declined():
    q, k, v, cos, sin, slots, scale = tensors()

    def fn(key_cache, value_cache):
        rotate = SPELLINGS["halves"]
        kv_cache_write(rotate(k, cos, sin), v, key_cache, value_cache, slots, scale, scale)
        return quantize(rotate(q * key_cache.float().sum(), cos, sin), scale)

    caches = [torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2)]
    (graph,) = capture(fn, *caches)
    before, report = print_graph(graph), Report()
    PostGradPassManager(FUSE, report)(graph)
    assert report.count() == 0
    assert "is made of one output and needed for another" in "\n".join(report.declined("rope_quant_kv_write"))
    assert print_graph(graph) == before


@torch.no_grad()
def test_what_is_written_is_new_memory_to_inductor():
    """In the fake values, as the wrapper makes them: memory shared with the old cache would be a reason to copy it."""
    tensors_of = Model(layers=1), *batch()
    (graph,) = capture(*tensors_of)
    PostGradPassManager(FUSE, Report())(graph)
    (fused,) = (node for node in graph.nodes if "rope_quant_kv_write" in str(node.args[:1]))
    old = {node.meta["val"].untyped_storage()._cdata for node in fused.all_input_nodes}
    new = [part.meta["val"].untyped_storage()._cdata for part in fused.users]
    assert len(set(new)) == len(new) == 3
    assert not old & set(new)


def in_pairs(table, positions):
    return table[positions].view(-1, HEAD_DIM // 2, 2).unbind(-1)


def every_second(table, positions):
    return table[positions][:, ::2], table[positions][:, 1::2]


def behind_the_first(table, positions):
    return table[torch.cat((positions, positions))][TOKENS // 2 :][:TOKENS].chunk(2, -1)


def in_fp64(table, positions):
    return (half.double() for half in table[positions].chunk(2, -1))


@pytest.mark.parametrize("lookup", [in_pairs, every_second, behind_the_first, in_fp64])
@torch.no_grad()
def test_rows_that_are_not_the_table_s_are_not_read_from_it(lookup):
    q, k, v, *_, slots, scale = tensors()
    table, positions = torch.randn(64, HEAD_DIM), torch.randperm(64)[:TOKENS]

    def fn(key_cache, value_cache):
        cos, sin = lookup(table, positions)
        return step(q, k, v, cos, sin, key_cache, value_cache, slots, scale)

    results = []
    for config in (STOCK, FUSE):
        caches = [torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2)]
        run = WithoutCode(fn, config)
        results.append((run(*caches), *caches))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.float(), b.float())
    declined = run.report.declined("rope_quant_kv_write")
    assert run.fused == (lookup is not in_fp64), declined
    assert not any("the rule failed" in reason for reason in declined)


@pytest.mark.parametrize("own", ["value", "value of the query", "key twice"])
@torch.no_grad()
def test_a_rotation_that_is_written_is_no_query(own):
    """The value, or the key before it is rotated again, has the angles of the query too."""
    q, k, v, cos, sin, slots, scale = tensors()
    rotate = SPELLINGS["halves"]

    def fn(key_cache, value_cache):
        key, value = rotate(k, cos, sin), v
        if own == "key twice":
            key = rotate(key, cos, sin)
        else:
            value = rotate(v if own == "value" else q[:, :KV_HEADS], cos, sin)
        kv_cache_write(key, value, key_cache, value_cache, slots, scale, scale * 2.0)
        return quantize(rotate(q, cos, sin), scale * 3.0)

    results = []
    for config in (STOCK, FUSE):
        caches = [torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2)]
        run = WithoutCode(fn, config)
        results.append((run(*caches), *caches))
    assert run.fused == 1
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.float(), b.float())


@torch.no_grad()
def test_a_place_that_is_declined_leaves_the_others():
    """The key's tokens come out with the sequences side by side, not one after the other."""
    q, k, v, cos, sin, slots, scale = tensors()

    def fn(*caches):
        first = step(q, k, v, cos, sin, *caches[:2], slots, scale)
        sequences = [x.view(2, TOKENS // 2, -1, HEAD_DIM).transpose(1, 2) for x in (q, k)]
        angles = torch.cat((cos, sin), -1)[slots[: TOKENS // 2] % TOKENS][None, None].chunk(2, -1)
        halves = [x.chunk(2, -1) for x in sequences]
        c, s = angles
        turned = [torch.cat((a * c - b * s, b * c + a * s), -1).permute(2, 0, 1, 3).flatten(0, 1) for a, b in halves]
        kv_cache_write(turned[1], v, *caches[2:], slots, scale, scale)
        return first, quantize(turned[0], scale)

    run = WithoutCode(fn)
    run(*(torch.zeros(4, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(4)))
    assert run.fused == 1
    (reason,) = run.report.declined("rope_quant_kv_write")
    assert "put into another order" in reason


@torch.no_grad()
def test_a_key_that_is_rounded_to_fp8_on_its_way_is_declined():
    q, k, v, cos, sin, slots, _ = (x.bfloat16() if x.is_floating_point() else x for x in tensors())
    caches = [torch.zeros(4, KV_HEADS, 16, HEAD_DIM).bfloat16() for _ in range(2)]

    def fn(key_cache, value_cache):
        rotate = SPELLINGS["halves"]
        kv_cache_write(rotate(k, cos, sin).to(E4M3).to(torch.bfloat16), v, key_cache, value_cache, slots)
        return rotate(q, cos, sin)

    run = WithoutCode(fn)
    run(*caches)
    assert run.fused == 0
    assert torch.equal(caches[0], caches[0].to(E4M3).to(torch.bfloat16))
