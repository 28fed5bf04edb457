"""Attention: every spelling on every backend, and what must not pass for one."""

import math

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.idioms import attention_mask, recognize
from fusion_passes.idioms.attention import BACKENDS, Attention
from fusion_passes.idioms.spellings.attention import SPELLINGS
from fusion_passes.testing import capture, capture_cuda, capture_traced, run

BF16 = torch.bfloat16
aten = torch.ops.aten
FUSED = ("cudnn", "flash", "efficient")


def the(graph):
    """The one attention of a graph."""
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    (attention,) = idioms.of(Attention)
    return attention


def read(fn, *args, **options):
    (graph,) = capture(fn, *args, **options)
    return the(graph)


def reasons(graph):
    idioms = recognize(graph)
    assert list(idioms.of(Attention)) == []
    assert all(m.what == "attention" for m in idioms.near_misses)
    return [m.reason for m in idioms.near_misses]


def miss(fn, *args, **options):
    """The one sentence why there is no attention."""
    (graph,) = capture(fn, *args, **options)
    (reason,) = reasons(graph)
    return reason


def qkv(heads=4, kv_heads=2, q_len=16, kv_len=24, head_dim=32, dtype=BF16):
    shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return tuple(torch.randn(2, h, length, head_dim, dtype=dtype) for h, length in shapes)


def softmax(scores, q):
    return torch.softmax(scores.float(), -1).to(q.dtype)


def value_of(graph, node):
    """The value that `node` has when the graph runs."""
    names = graph.find_nodes(op="placeholder")
    if node in names:
        return graph.owning_module.meta["fusion_passes_inputs"][names.index(node)]
    copy = torch.fx.Graph()
    mapped = {}
    copy.graph_copy(graph, mapped)
    copy.output(mapped[node])
    module = torch.fx.GraphModule(graph.owning_module, copy)
    module.meta = graph.owning_module.meta
    return run(module.graph)


def assert_reads(graph, attention, expected):
    """What was read, computed from the values of its inputs, is what the graph computes."""
    inputs = [value_of(graph, node).cpu() for node in attention.inputs]
    torch.testing.assert_close(attention.reference(*inputs), expected, atol=2e-2, rtol=2e-2)


MASKS = {
    "sdpa, bool mask": "bool",
    "sdpa, float mask": "float",
    "softmax by hand": "float",
    "eager attention of transformers": "float",
}
CAUSAL = {"sdpa, is_causal", "sdpa, lower triangle as mask", "sdpa after repeat_kv", "causal masked_fill by hand"}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_on_the_cpu(name):
    inputs = [(*qkv(dtype=dtype), torch.randn(16, 24, dtype=dtype)) for dtype in (BF16, torch.float16, torch.float32)]
    # One graph for all dtypes: tracing is what takes the time.
    (graph,) = capture(lambda inputs: [SPELLINGS[name](*each) for each in inputs], inputs)
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    outputs = graph.find_nodes(op="output")[0].args[0]
    for output, each in zip(outputs, inputs, strict=True):
        attention = idioms.at(output, Attention)
        assert attention.kv_heads == 2
        assert attention.is_causal == (name in CAUSAL)
        assert attention.mask_kind == MASKS.get(name)
        assert_reads(graph, attention, SPELLINGS[name](*each))


@pytest.mark.parametrize("backend", [*FUSED, "math"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_on_cuda(name, backend):
    if backend == "flash" and "mask" in name:
        pytest.skip("the flash backend takes no mask")
    q, k, v = qkv(kv_heads=4 if backend == "efficient" else 2, kv_len=16)
    mask = torch.randn(16, 16, dtype=BF16)
    graph = capture_cuda(SPELLINGS[name], q, k, v, mask, backend=backend)
    attention = the(graph)
    assert attention.backend == (backend if "sdpa" in name else "math")
    if backend == "flash" and "sdpa" in name:
        assert attention.scale is not None
    assert attention.kv_heads == k.shape[1]
    assert_reads(graph, attention, SPELLINGS[name](q, k, v, mask))


@pytest.mark.parametrize("backend", ["cudnn", "efficient", "math"])
@pytest.mark.parametrize("kv_len", [16, 13])
def test_a_bool_mask_is_the_mask_itself(backend, kv_len):
    q, k, v = qkv(kv_heads=4, kv_len=kv_len)
    mask = torch.rand(2, 1, 16, kv_len) > 0.3
    graph = capture_cuda(lambda *a: F.scaled_dot_product_attention(*a), q, k, v, mask, backend=backend)
    attention = the(graph)
    assert (attention.mask_kind, attention.attn_mask.op) == ("bool", "placeholder")
    assert attention.attn_mask.meta["val"].shape == mask.shape


@pytest.mark.parametrize("fill", [-math.inf, -65504.0])
@pytest.mark.parametrize("negated", [False, True])
def test_additive_forms_of_a_bool_mask(fill, negated, monkeypatch):
    monkeypatch.setattr(attention_mask, "OLD_CUDNN_MASKS", True)  # torch 2.11

    def additive(m, q):
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        return torch.where(~m, fill, zero) if negated else torch.where(m, zero, fill)

    q, k, v = qkv(kv_heads=4)
    mask = torch.rand(16, 24) > 0.3

    def cudnn(q, k, v, m):
        return aten._scaled_dot_product_cudnn_attention(q, k, v, additive(m, q), False)[0]

    assert the(capture_cuda(cudnn, q, k, v, mask)).mask_kind == "bool"

    def efficient(q, k, v, m):
        bias = additive(m, q).expand(2, 4, 16, 24)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, False)[0]

    assert the(capture_cuda(efficient, q, k, v, mask)).mask_kind == ("bool" if fill == -math.inf else "float")


def test_an_inverted_mask_stays_additive():
    q, k, v = qkv(kv_heads=4)
    masked = torch.rand(16, 24) > 0.7
    attention = read(
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k, v, torch.zeros(16, 24, dtype=BF16).masked_fill(m, -math.inf)
        ),
        *(q, k, v, masked),
    )
    assert attention.mask_kind == "float"


def test_causal_masks_by_hand():
    q, k, v = qkv(kv_heads=4)

    def masked(mask):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2], k.shape[2]))

    causal = [
        lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(),
        lambda q, k: ~torch.ones(q, k, dtype=torch.bool).triu(1),
        lambda q, k: torch.arange(k)[None, :] <= torch.arange(q)[:, None],
        lambda q, k: torch.arange(q).view(1, 1, -1, 1) >= torch.arange(k),
        lambda q, k: ~(torch.arange(k) > torch.arange(q)[:, None]),
        lambda q, k: torch.arange(k) < 1 + torch.arange(q)[:, None],
    ]
    for mask in causal:
        attention = read(masked(mask), q, k, v)
        assert (attention.is_causal, attention.attn_mask) == (True, None)
    others = [
        lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(k - q),  # aligned at the bottom right
        lambda q, k: torch.ones(q, k, dtype=torch.bool).tril(-1),
        lambda q, k: torch.arange(k) <= torch.arange(1)[:, None],  # for all queries the same
        lambda q, k: torch.ones(q, k, dtype=torch.bool).triu(),
        lambda q, k: torch.arange(k)[None, :] < torch.arange(q)[:, None],
        lambda q, k: torch.arange(q)[:, None] <= torch.arange(k)[None, :],
        lambda q, k: (torch.arange(k) <= torch.arange(q)[:, None]) & (torch.arange(k) > torch.arange(q)[:, None] - 4),
    ]
    for mask in others:
        attention = read(masked(mask), q, k, v)
        assert (attention.is_causal, attention.mask_kind) == (False, "bool")


def test_a_mask_that_attends_everywhere_is_none():
    def attention(q, k, v):
        mask = torch.arange(k.shape[2])[None, :] >= torch.zeros(q.shape[2], 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = read(attention, *qkv(kv_heads=4))
    assert (found.attn_mask, found.mask_kind, found.is_causal) == (None, None, False)


def test_a_causal_mask_of_dynamic_size():
    def attention(q, k, v):
        mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert read(attention, *qkv(kv_heads=4), dynamic=True).is_causal


def test_masks_and_scales_in_the_math_form():
    q, k, v = qkv(kv_heads=4)
    mask, keep = torch.randn(16, 24, dtype=BF16), torch.rand(2, 1, 16, 24) > 0.3

    def swapped(q, k, v, m):
        return softmax(m + 0.5 * (q @ k.mT), q) @ v

    attention = read(swapped, q, k, v, mask)
    assert (attention.mask_kind, attention.scale) == ("float", 0.5)

    def both(q, k, v, m):
        future = torch.ones(16, 24, dtype=torch.bool).triu(1)
        scores = (q @ k.mT).masked_fill(~m, -math.inf) * 0.3
        return softmax(scores.masked_fill(future, -math.inf), q) @ v

    attention = read(both, q, k, v, keep)
    assert (attention.is_causal, attention.mask_kind, attention.attn_mask.op) == (True, "bool", "placeholder")

    def on_both_operands(q, k, v):
        return softmax((q * 0.5) @ (k.mT / 4.0), q) @ v

    assert read(on_both_operands, q, k, v).scale == 0.125

    def scale_in_the_softmax(q, k, v):
        return torch.softmax((q @ k.mT).float() * 0.3, -1).to(BF16) @ v

    assert read(scale_in_the_softmax, q, k, v).scale == pytest.approx(0.3)


SCALES = {"divided": lambda s: s / 8.0, "multiplied": lambda s: s * 0.125}


def without_empty_rows(q, k, v, scale, judge=lambda s, scaled: scaled):
    s = q @ k.transpose(-1, -2)
    empty = (judge(s, scale(s)) == -math.inf).all(-1, keepdim=True)
    return torch.where(empty, 0.0, torch.softmax(scale(s), -1)) @ v


@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rows_emptied_by_scores_that_are_scaled_right_before_the_softmax(scale, dtype, on_cuda):
    # Inductor computes that scale twice (torch 2.13), or behind the maximum (before).
    given = qkv(kv_heads=4, kv_len=16, dtype=dtype)

    def attend(q, k, v):
        return without_empty_rows(q, k, v, scale)

    graph = capture_cuda(attend, *given, backend="math") if on_cuda else capture_traced(attend, *given)
    attention = the(graph)
    assert attention.scale == pytest.approx(0.125)
    attended = F.scaled_dot_product_attention(*given, scale=0.125)
    torch.testing.assert_close(value_of(graph, attention.output), attended, atol=2e-2, rtol=2e-2)


OTHER_SCORES = {
    "scaled again": lambda s, scaled: scaled * 4.0,  # in fp16 -20,000 is no infinity, and four times that is one
    "not scaled": lambda s, scaled: s,
    "negated": lambda s, scaled: -scaled,
    "rounded to fp16": lambda s, scaled: scaled.to(torch.float16),
    "transposed": lambda s, scaled: scaled.transpose(-1, -2),
}


@pytest.mark.parametrize("judge", OTHER_SCORES.values(), ids=OTHER_SCORES)
def test_rows_emptied_by_other_scores(judge):
    def attend(q, k, v):
        return without_empty_rows(q, k, v, SCALES["divided"], judge)

    (reason,) = reasons(capture_traced(attend, *qkv(kv_heads=4, kv_len=16)))
    assert reason == "looks like attention, but rows are emptied by something other than the scores"


def test_default_scale_is_none():
    mask = torch.randn(16, 24, dtype=BF16)
    assert read(SPELLINGS["eager attention of transformers"], *qkv(), mask).scale is None


def test_expansion_of_heads():
    q, k, v = qkv(kv_heads=1)
    expanded = [
        lambda q, k, v: F.scaled_dot_product_attention(q, k.expand(2, 4, 24, 32), v.expand(2, 4, 24, 32)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)),
    ]
    for attention in expanded:
        assert read(attention, q, k, v).kv_heads == 1
    q, k, v = qkv(kv_heads=2)
    # Tiled, not interleaved: another grouping, so the repeated tensors are what is read.
    tiled = read(lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), q, k, v)
    assert tiled.kv_heads == 4
    # Only one of the two is repeated.
    half = read(
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v), *qkv(4, 2)[:2], qkv(4, 4)[2]
    )
    assert half.kv_heads == 4


@pytest.mark.parametrize("name", ["sdpa, is_causal", "sdpa after repeat_kv", "eager attention of transformers"])
def test_dynamic_batch_and_lengths(name):
    q, k, v = qkv()
    mask = torch.randn(16, 24, dtype=BF16)
    dynamic = [(x, dim) for x in (q, k, v) for dim in (0, 2)] + [(mask, 0), (mask, 1)]
    attention = read(SPELLINGS[name], q, k, v, mask, mark_dynamic=dynamic)
    assert attention.kv_heads == 2
    assert isinstance(attention.query.meta["val"].shape[2], torch.SymInt)
    assert attention.is_causal == ("eager" not in name)


def test_a_scale_that_is_no_number():
    # head_dim is dynamic too, so the graph computes head_dim ** -0.5.
    mask = torch.randn(16, 24, dtype=BF16)
    assert "the scores pass through aten.mul" in miss(
        SPELLINGS["eager attention of transformers"], *qkv(), mask, dynamic=True
    )


def test_padding_of_the_head_dimension():
    inputs = qkv(4, 4, 16, 16, head_dim=20)
    graph = capture_cuda(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *inputs, backend="flash"
    )
    attention = the(graph)
    assert attention.query.op == "placeholder"
    assert attention.output.meta["val"].shape == inputs[0].shape
    assert attention.scale == pytest.approx(20**-0.5)


def test_outputs_that_are_used():
    q, k, v = qkv(kv_heads=4)

    def cudnn(q, k, v):
        outputs = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return outputs[0], outputs[1]

    assert the(capture_cuda(cudnn, q, k, v)).used_outputs == ("logsumexp",)


def test_what_is_refused_in_fused_ops():
    q, k, v = qkv(kv_heads=4)

    def call(name, *args, **kwargs):
        graph = capture_cuda(lambda q, k, v: getattr(aten, name)(q, k, v, *args, **kwargs)[0], q, k, v)
        return reasons(graph)

    assert call("_scaled_dot_product_cudnn_attention", None, False, 0.1) == ["attention with dropout_p=0.1"]
    assert call("_scaled_dot_product_efficient_attention", None, False, 0.1) == ["attention with dropout_p=0.1"]
    (reason,) = call("_scaled_dot_product_flash_attention", 0.0, True)
    assert "the flash op aligns that at the bottom right" in reason


def test_arguments_nobody_knows():
    (graph,) = capture(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *qkv(kv_heads=4))
    (node,) = (n for n in graph.nodes if "flash" in n.name)
    node.kwargs = {**node.kwargs, "softcap": 3.0}
    assert reasons(graph) == ["unknown argument softcap of aten._scaled_dot_product_flash_attention_for_cpu"]


REFUSED = {
    "softcap": (lambda q, k, v: softmax(torch.tanh(q @ k.mT / 30) * 30, q) @ v, "the scores pass through aten.tanh"),
    "dropout": (lambda q, k, v: F.dropout(softmax(q @ k.mT, q), 0.1, True) @ v, "the softmax passes through dropout"),
    "sinks": (
        lambda q, k, v: softmax(torch.cat([q @ k.mT, q[..., :1]], -1), q)[..., :-1] @ v,
        "the softmax passes through aten.slice",
    ),
    "two masks": (lambda q, k, v: softmax(q @ k.mT + q[0, 0, :, :24].sum() + k[0, 0, :, 0], q) @ v, "two masks"),
    "finite fill": (
        lambda q, k, v: softmax((q @ k.mT).masked_fill(k[..., None, :, 0] > 0, -1e4), q) @ v,
        "masks the scores with -9984, not with -inf",
    ),
    "True masks": (
        lambda q, k, v: softmax((q @ k.mT).masked_fill(k[..., None, :, 0] > 0, -math.inf), q) @ v,
        "masks where it is True",
    ),
    "mask before scale": (
        lambda q, k, v: softmax((q @ k.mT + k[..., None, :, 0]) * 0.3, q) @ v,
        "adds a mask before the scale is applied",
    ),
    "over the queries": (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, "the softmax is over dimension"),
    "negative scale": (lambda q, k, v: softmax(-0.3 * (q @ k.mT), q) @ v, "the scores are scaled by -0.3"),
    "scaled value": (lambda q, k, v: softmax(q @ k.mT, q) @ (v * 2.0), "the value is scaled by 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_the_math_form(name):
    fn, reason = REFUSED[name]
    assert reason in miss(fn, *qkv(kv_heads=4))


def test_three_dimensions_are_refused():
    q, k, v = (x[0] for x in qkv(kv_heads=4))
    assert "[batch, heads, length, head_dim]" in miss(lambda q, k, v: softmax(q @ k.mT, q) @ v, q, k, v)


def test_ordinary_products_are_not_even_nearly_attention():
    q, k, v = qkv(kv_heads=4)
    (graph,) = capture(lambda q, k, v: ((q @ k.mT).relu() @ v, torch.softmax(q, -1)), q, k, v)
    idioms = recognize(graph)
    assert len(idioms) == 0
    assert idioms.near_misses == []


def test_every_backend_exists():
    for name in BACKENDS:
        namespace, _, op = name.partition("::")
        assert hasattr(getattr(torch.ops, namespace), op)
