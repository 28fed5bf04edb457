"""rope_quant_kv_write behind the rotary embeddings of models: which are fused, with right numbers, at any size."""

import inspect

import pytest
import torch

import fusion_passes
from fusion_passes import PostGradPassManager, Report
from fusion_passes.fusions.rope_quant_kv_write import RopeQuantKVWrite
from fusion_passes.idioms import recognize
from fusion_passes.ops import kv_cache_write
from fusion_passes.quant import quantize
from fusion_passes.testing import capture, print_graph
from tests.fusions import rope_models as models
from tests.fusions.rope_models import HEAD_DIM
from tests.fusions.without_code import FUSE, WithoutCode

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS = 4, 2
Q_SCALE, K_SCALE, V_SCALE = 0.043, 0.029, 0.017
STANDS_FOR_OTHERS = (models.llama_heads_last, models.gptj, models.gpt_oss, models.meta)
"""With heads last, a gathered table, half as many columns, complex numbers: these with several sequences in each run of
the suite, the others in the slow one."""
SLOW = [pytest.mark.slow]
OP = "fusion_passes.rope_quant_kv_write.default"

pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")


def inputs(rotate, dtype, batch, length, *, own=True):
    """Projections, positions (the same for all sequences unless `own`), slots, caches, and tables if there are any."""
    packed = torch.randn(batch, length, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    first = 7 * torch.arange(batch if own else 1) + 2
    caches = (torch.zeros(8, KV_HEADS, 16, HEAD_DIM).to(E4M3) for _ in range(2))
    partial = rotate is models.gptj or "partial" in rotate.__name__
    tables = (models.table_of(16 if partial else HEAD_DIM),) if "table" in inspect.signature(rotate).parameters else ()
    return packed, first[:, None] + torch.arange(length), torch.randperm(128)[: batch * length], *caches, *tables


def any_size(args):
    """The same with all sizes but 1 symbolic."""
    for tensor in args[:3]:
        for dim, size in enumerate(tensor.shape[:2]):
            if size > 1:
                torch._dynamo.mark_dynamic(tensor, dim)
    return args


def layer(rotate, quantized=True):
    def fn(packed, positions, slots, key_cache, value_cache, *tables):
        sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        q, k, v = (x.contiguous() for x in packed.split(sizes, -1))
        q, k = rotate(q, k, positions, *tables)
        scales = [torch.full((), x, device=packed.device) for x in (K_SCALE, V_SCALE, Q_SCALE)]
        kv_cache_write(k, v.reshape(-1, KV_HEADS, HEAD_DIM), key_cache, value_cache, slots, *scales[:2])
        return quantize(q, scales[2]) if quantized else q

    return fn


def check(rotate, out, packed, positions, slots, key_cache, value_cache, *tables):
    """Against the model's own steps in fp32.  Its tables may be rounded to 16 bits, codes to three bits and one."""
    heads = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    q, k, v = packed.float().split(heads, -1)
    q, k = rotate(q, k, positions, *tables)
    page, offset = slots // 16, slots % 16
    scale = Q_SCALE if out.dtype == E4M3 else 1.0
    close = {"rtol": 2**-3.9, "atol": 0.02}
    torch.testing.assert_close(out.float() * scale, q, **close)
    torch.testing.assert_close(key_cache.float()[page, :, offset] * K_SCALE, k, **close)
    torch.testing.assert_close(value_cache.float()[page, :, offset] * V_SCALE, v.view(-1, KV_HEADS, HEAD_DIM), **close)


@pytest.mark.parametrize("rotate", models.READ)
@torch.no_grad()
def test_one_sequence(rotate):
    """With a dimension of size 1, whose stride says nothing."""
    args = inputs(rotate, torch.bfloat16, 1, 6)
    run = WithoutCode(layer(rotate))
    out = run(*args)
    assert run.fused == 1, list(run.report.declined("rope_quant_kv_write"))
    check(rotate, out, *args)


@pytest.mark.parametrize(
    ("rotate", "own"),
    [
        *(pytest.param(rotate, True, marks=() if rotate in STANDS_FOR_OTHERS else SLOW) for rotate in models.READ),
        *((rotate, False) for rotate in (models.llama, models.glm, models.halves_heads_last, models.vllm)),
        *((rotate, False) for rotate in (models.meta_by_position, models.torchtune)),
    ],
)
@torch.no_grad()
def test_several_sequences(rotate, own):
    """Of any number and length: compiled once, without a guard, and run at two sizes."""
    run = WithoutCode(layer(rotate, quantized=own))
    for batch, length in ((3, 6), (4, 9)):
        args = any_size(inputs(rotate, torch.float16, batch, length, own=own))
        check(rotate, run(*args), *args)
    assert run.fused == 1, list(run.report.declined("rope_quant_kv_write"))
    assert run.new_guards == [[]]


@pytest.mark.parametrize(
    ("rotate", "reason"),
    [
        (models.modded, "it turns the other way round"),
        (models.deepseek, "the dimensions come out in another order than they go in"),
    ],
)
@torch.no_grad()
def test_what_is_declined(rotate, reason):
    args = inputs(rotate, torch.bfloat16, 2, 6)
    run = WithoutCode(layer(rotate))
    out = run(*args)
    assert run.fused == 0
    assert any(f"the key's rotation is not read: {reason}" in x for x in run.report.declined("rope_quant_kv_write"))
    check(rotate, out, *args)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_in_inductor_s_code(device):
    """Positions that all sequences share, of a length that is not known while compiling."""
    report = Report()
    compiled = fusion_passes.compile(layer(models.llama), FUSE, report=report, fullgraph=True)
    for batch, length in ((2, 6), (4, 9)):
        args = [x.to(device) for x in inputs(models.llama, torch.bfloat16, batch, length, own=False)]
        check(models.llama, compiled(*any_size(args)), *args)
    assert report.count(rule="rope_quant_kv_write") == 1


@pytest.mark.parametrize(("rotate", "batch", "copies"), [(models.gpt_oss, 1, 1), (models.gpt_oss, 2, 0)])
@torch.no_grad()
def test_the_query_keeps_its_layout(rotate, batch, copies):
    """One sequence's heads lie before its tokens in memory, as `cat` left them: then the result is copied, which was
    not measured."""
    (graph,) = capture(layer(rotate), *inputs(rotate, torch.bfloat16, batch, 6))
    (match,) = RopeQuantKVWrite().pattern(recognize(graph))
    assert match.is_copied == (copies > 0)
    PostGradPassManager(FUSE, Report())(graph)
    text = print_graph(graph)
    assert text.count(OP) == 1
    assert text.partition(OP)[2].count("aten.clone") == copies


@torch.no_grad()
def test_layers_share_what_says_the_rows():
    """All sequences have the same positions: the row of each token is computed once."""

    def fn(packed, positions, slots, *caches):
        one = layer(models.llama)
        return [one(packed, positions, slots, *caches[2 * i : 2 * i + 2]) for i in range(3)]

    args = inputs(models.llama, torch.bfloat16, 2, 6, own=False)
    caches = [torch.zeros_like(args[3], dtype=torch.float32).to(E4M3) for _ in range(6)]
    (graph,) = capture(fn, *args[:3], *caches)
    report = Report()
    PostGradPassManager(FUSE, report)(graph)
    assert report.count() == 3
    rows = {node.kwargs["positions"] for node in graph.nodes if "rope_quant_kv_write" in str(node.args[:1])}
    assert len(rows) == 1
