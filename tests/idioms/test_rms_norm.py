"""RMSNorm: every spelling in every dtype, and what must not pass for one."""

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.idioms import recognize
from fusion_passes.idioms.rms_norm import RMSNorm
from fusion_passes.idioms.spellings.rms_norm import SPELLINGS
from fusion_passes.testing import capture_cuda, capture_traced, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HIDDEN = 32


def read(fn, *inputs, capture=capture_traced, **options):
    """The norms of a graph, none of which is a near miss."""
    graph = capture(fn, *inputs, **options)
    idioms = recognize(graph)
    assert [m.reason for m in idioms.near_misses] == []
    return graph, list(idioms.of(RMSNorm))


def the(fn, *inputs, **options):
    _, (norm,) = read(fn, *inputs, **options)
    return norm


def x(dtype=BF16, *shape):
    return (torch.randn(shape or (3, 5, HIDDEN)) * 2).to(dtype)


def weight(dtype=BF16, *shape):
    return torch.randn(shape or (HIDDEN,)).to(dtype)


def returned(graph):
    (node,) = graph.find_nodes(op="output")[0].all_input_nodes
    return node


def llama(x, weight, eps=1e-6):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


EXPECTED = {
    # spelling: (weight, offset, eps, whether x and weight are rounded to x's dtype after the norm, after its scale)
    "Llama, Qwen, Mistral": (True, 0.0, 1e-6, True, False),
    "Llama 4": (True, 0.0, 1e-6, True, False),
    "Gemma": (True, 1.0, 1e-6, False, False),
    "T5": (True, 0.0, 1e-6, True, False),
    "CPM-Ant": (True, 0.0, 1e-6, True, False),
    "DeepSeek V4": (False, 0.0, 1e-6, True, True),
    "without a weight": (False, 0.0, 1e-6, True, False),
    "without eps": (True, 0.0, 0.0, False, False),
    "F.rms_norm, default eps": (True, 0.0, torch.finfo(FP32).eps, False, False),
    "F.rms_norm, no weight": (False, 0.0, 1e-6, True, False),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("on", [capture_traced, capture_cuda])
@pytest.mark.parametrize("name", [name for name in SPELLINGS if "groups" not in name])
def test_spelling(name, on, dtype):
    """The whole function is one norm, with what the spelling says, and its reference is what the graph computes."""
    inputs = x(dtype), weight(dtype)
    graph, (norm,) = read(SPELLINGS[name], *inputs, capture=on)
    weighted, offset, eps, rounded, scale_rounded = EXPECTED.get(name, (True, 0.0, 1e-6, False, False))
    if name == "one over the root" and dtype is FP32:
        offset = 1.0  # in 16 bits the sum rounds, and is a weight of its own
    assert norm.output is returned(graph)
    assert (norm.weight is not None, norm.weight_offset) == (weighted, offset)
    assert norm.eps == pytest.approx(eps, rel=1e-6)
    assert norm.normalized_dtype is (dtype if rounded else FP32)
    assert norm.scale_dtype is (dtype if scale_rounded else FP32)
    if on is capture_traced and norm.weight in (None, *graph.find_nodes(op="placeholder")):
        (want,) = run(graph)
        torch.testing.assert_close(norm.reference(*inputs[: len(norm.inputs)]), want, rtol=2e-6, atol=1e-6)


def test_groups():
    """The groups are a norm; the weight is of the whole row, and stays outside."""
    graph, (norm,) = read(SPELLINGS["Mamba 2, in groups"], x(), weight())
    assert norm.weight is None
    assert norm.output is not returned(graph)
    assert norm.input.meta["val"].shape == (3, 5, 2, HIDDEN // 2)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", ["Llama, Qwen, Mistral", "OLMo 2, gpt-oss", "Gemma", "F.rms_norm"])
def test_a_weight_in_fp32(name):
    norm = the(SPELLINGS[name], x(), weight(FP32))
    assert norm.weight.op == "placeholder"
    assert norm.output.meta["val"].dtype is (FP32 if name.startswith("Llama") else BF16)


def test_sizes_are_symbolic():
    tokens = x()
    norm = the(llama, tokens, weight(), mark_dynamic=[(tokens, 0), (tokens, 1)])
    assert norm.weight is not None


def test_a_weight_with_ones_in_front_and_a_query_by_heads():
    norm = the(
        lambda q, w: llama(q.view(4, 6, HIDDEN).transpose(0, 1), w), x(BF16, 4, 6 * HIDDEN), weight(BF16, 1, HIDDEN)
    )
    assert norm.weight.op == "placeholder"


def test_what_others_read_is_not_claimed():
    """The norm ends where two read on: here each has a weight of its own."""

    def fn(x, first, second):
        y = x.float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return first * y, second * y

    norm = the(fn, x(), weight(), weight())
    assert norm.weight is None
    assert len(norm.output.users) == 2
    assert all(set(node.users) <= norm.nodes for node in norm.nodes - {norm.output})


def test_a_cast_for_what_comes_next_is_not_claimed():
    norm = the(lambda x, w: llama(x, w).float() * 2.0, x(), weight())
    assert norm.output.meta["val"].dtype is BF16


def test_only_one_rounding_follows_the_weight():
    norm = the(lambda x, w: llama(x, w).to(FP16), x(), weight())
    assert norm.output.meta["val"].dtype is BF16
    norm = the(lambda x, w: llama(x, w).to(FP16), x(), weight(FP32))
    assert norm.output.meta["val"].dtype is FP16


def test_a_second_rounding_is_not_claimed():
    """To fp16 and then to bf16 is not the same as to bf16."""
    graph, (norm,) = read(SPELLINGS["without a weight"], x(), weight())
    cast = norm.output
    assert (cast.target, norm.normalized_dtype) == (torch.ops.prims.convert_element_type.default, BF16)
    node = cast.args[0]
    with graph.inserting_before(cast):
        for dtype in (FP16, FP32):
            made = graph.call_function(cast.target, (node, dtype))
            made.meta["val"] = node.meta["val"].to(dtype)
            node = made
    cast.args = (node, BF16)
    (norm,) = recognize(graph).of(RMSNorm)
    assert norm.output.meta["val"].dtype is norm.normalized_dtype is FP16


def test_the_square_of_a_norm():
    """A row is as long as the weight of one row would be."""

    def fn(x):
        y = F.rms_norm(x, x.shape[-1:])
        return y * y

    assert the(fn, x(FP32, 1, HIDDEN)).weight is None


def misses(fn, *inputs):
    idioms = recognize(capture_traced(fn, *inputs))
    assert not list(idioms.of(RMSNorm))
    return [m.reason for m in idioms.near_misses]


def in_16_bits(x):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_mean_in_16_bits():
    (reason,) = misses(in_16_bits, x())
    assert reason == "the mean of the squares is bfloat16: cast x to float32 before it is squared"


def scale(x, source=None, dims=-1, power=-0.5):
    return ((x if source is None else source).float().pow(2).mean(dims, keepdim=True) + 1e-6).pow(power)


NO_NORM = {
    "another dimension": lambda x, y: x * scale(x, dims=-2),
    "several dimensions": lambda x, y: x * scale(x, dims=(-1, -2)),
    "another power": lambda x, y: x * scale(x, power=-1.0),
    "another power of what it divides by": lambda x, y: x / scale(x),
    "the scale of another tensor": lambda x, y: x * scale(x, y),
    "divided by x": lambda x, y: scale(x) / x,
    "squares over the number of them less one": lambda x, y: x * x.var(-1, keepdim=True, correction=1).rsqrt(),
    "the scale along another dimension": lambda x, y: x * scale(x).squeeze(-1)[..., None, :],
    "eps on the root": lambda x, y: x / (x.float().square().mean(-1, keepdim=True).sqrt() + 1e-6),
    "a scale with a factor": lambda x, y: x * (2.0 * scale(x)),
    "a mean of cubes": lambda x, y: x * (x.float().pow(3).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "eps that is a tensor": lambda x, y: x * (x.float().square().mean(-1, keepdim=True) + y[0, 0, 0]).rsqrt(),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "a divisor that is rounded": lambda x, y: x / scale(x, power=0.5).to(BF16),
}


@pytest.mark.parametrize("name", NO_NORM)
def test_what_is_no_norm(name):
    """Sizes are alike on purpose."""
    square = [torch.randn(4, 4, 4) for _ in range(2)]
    assert misses(NO_NORM[name], *square) == []
