"""What an op says beyond what a reader looks at, and shapes that broadcast: read right, or not at all."""

import importlib
import math
import operator

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.graph.arguments import arguments
from fusion_passes.graph.steps import constant, is_cast
from fusion_passes.idioms import recognize, rope
from fusion_passes.idioms.attention import Attention
from fusion_passes.idioms.group_quantize import GroupQuantize
from fusion_passes.idioms.opaque import OPAQUE
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.testing import capture, capture_cuda
from tests.idioms.perturbed import Program, wrong

aten, prims = torch.ops.aten, torch.ops.prims
E4M3 = torch.float8_e4m3fn


def call(target, *args, **kwargs):
    """One call in a graph, of inputs for its tensors."""
    graph = torch.fx.Graph()

    def node(value):
        if not isinstance(value, torch.Tensor):
            return value
        made = graph.placeholder(f"x{len(graph.nodes)}")
        made.meta["val"] = value
        return made

    made = graph.call_function(target, tuple(map(node, args)), {name: node(x) for name, x in kwargs.items()})
    made.meta["val"] = target(*args, **kwargs)
    return made


def found(fn, *inputs):
    """What is read in the graph of a function, all of it right."""
    (graph,) = capture(fn, *inputs)
    assert wrong(Program.captured(graph)) == []
    return list(recognize(graph))


def test_arguments_by_name_with_defaults():
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    assert arguments(call(aten.amax.default, x, [1]), "dim", "keepdim", "self")[:2] == ([1], False)
    assert arguments(call(aten.amax.default, x, dim=[1], keepdim=True), "self", "dim", "keepdim")[1:] == ([1], True)
    assert arguments(call(aten.add.Tensor, x, y), "self", "other") is not None
    assert arguments(call(aten.clone.default, x, memory_format=torch.contiguous_format), "self") is not None


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "names"),
    [
        (aten.add.Tensor, (torch.ones(2), torch.ones(2)), {"alpha": 2}, ("self", "other")),
        (aten.amax.default, (torch.ones(2, 3), [1], True), {}, ("self", "dim")),
        (aten.sum.dim_IntList, (torch.ones(2, 3), [1]), {"dtype": torch.float64}, ("self", "dim", "keepdim")),
        (aten.gelu.default, (torch.ones(2),), {"approximate": "tanh"}, ("self",)),
        (aten.div.Tensor_mode, (torch.ones(2), torch.ones(2)), {"rounding_mode": "floor"}, ("self", "other")),
        (aten.clamp.Tensor, (torch.ones(2), torch.ones(2)), {}, ("self", "max")),
    ],
)
def test_a_call_that_says_more_is_not_read(target, args, kwargs, names):
    assert arguments(call(target, *args, **kwargs), *names) is None
    assert arguments(call(target, *args, **kwargs), *names, "no such argument") is None


def test_constants_are_what_their_dtype_holds():
    def full(x, dtype):
        node = torch.fx.Graph().call_function(aten.full.default, ([2], x), {"dtype": dtype})
        node.meta["val"] = torch.full([2], x, dtype=dtype)
        return node

    def cast(node, dtype):
        made = node.graph.call_function(prims.convert_element_type.default, (node, dtype))
        made.meta["val"] = node.meta["val"].to(dtype)
        return made

    assert constant(full(0.3, torch.bfloat16)) == float(torch.tensor(0.3, dtype=torch.bfloat16))
    assert constant(cast(full(0.3, torch.float32), torch.bfloat16)) == float(torch.tensor(0.3, dtype=torch.bfloat16))
    assert constant(cast(full(2.7, torch.float32), torch.int64)) == 2.0
    assert constant(cast(cast(full(-0.5, torch.float32), torch.int32), torch.float32)) == 0.0
    assert constant(cast(full(3.0, torch.float32), torch.bool)) == 1.0
    assert constant(cast(full(-1e5, torch.float32), torch.float16)) == -math.inf
    assert constant(cast(full(math.inf, torch.float32), torch.int32)) is None


def test_a_copy_to_another_device_is_no_cast():
    node = call(aten._to_copy.default, torch.ones(2), dtype=torch.bfloat16)
    assert is_cast(node)
    node.meta["val"] = node.meta["val"].to("meta")
    assert not is_cast(node)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_causal_mask_of_one_row_that_is_spread_by_a_mask_of_ones(rows):
    def fn(q):
        causal = torch.arange(4) <= torch.arange(rows)[:, None]
        keep = causal & torch.ones(4, 4, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=keep)

    (attention,) = found(fn, torch.randn(2, 3, 4, 8))
    assert isinstance(attention, Attention)
    assert attention.is_causal == (rows == 4)


@pytest.mark.parametrize("alike", [False, True])
def test_heads_that_are_filled_up_from_different_sizes(alike):
    """A key with numbers where the query has zeros."""

    def fn(q, k, v):
        q, k, v = (F.pad(x, (0, 8 - x.shape[-1])) for x in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, scale=0.5)[0]
        return out[..., : 6 if alike else 5]

    sizes = (6, 6, 6) if alike else (5, 6, 6)
    graph = capture_cuda(fn, *(torch.randn(1, 2, 4, size) for size in sizes))
    assert wrong(Program.captured(graph)) == []
    (attention,) = recognize(graph).of(Attention)
    assert (attention.query.op == "placeholder") == alike


@pytest.mark.parametrize("times", [1.0, 3.0])
def test_a_scale_behind_the_maximum_belongs_to_the_sum_too(times):
    """Where one op gives the maximum and the sum of the exponentials, as on CUDA."""
    importlib.import_module("torch._inductor.inductor_prims")
    graph = torch.fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    product = graph.call_function(aten.bmm.default, (left, left))
    pair = graph.call_function(prims.prepare_softmax_online.default, (product, -1))
    largest, total = (graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    shifted = graph.call_function(aten.sub.Tensor, (product, largest))
    if times != 1.0:
        shifted = graph.call_function(aten.mul.Tensor, (shifted, times))
    weights = graph.call_function(aten.div.Tensor, (graph.call_function(aten.exp.default, (shifted,)), total))
    views = [graph.call_function(aten.reshape.default, (x, [2, 3, 4, 4])) for x in (left, right)]
    flat = [graph.call_function(aten.reshape.default, (x, [6, 4, 4])) for x in views]
    out = graph.call_function(aten.bmm.default, (weights, flat[1]))
    product.args = (flat[0], flat[0])
    graph.output((graph.call_function(aten.reshape.default, (out, [2, 3, 4, 4])),))
    for node in (*views, *flat):
        product.prepend(node)
    flipped = graph.call_function(aten.transpose.int, (flat[0], 1, 2))
    product.prepend(flipped)
    product.args = (flat[0], flipped)
    program = Program(graph, (torch.randn(6, 4, 4), torch.randn(6, 4, 4)))
    program.evaluate()
    assert wrong(program) == []
    assert len(recognize(graph)) == (times == 1.0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x / 0.3).clamp(5.0, -5.0).to(E4M3),
        lambda x: (x / 0.3).clamp(5.0, -5.0).clamp(-7.0, 2.0).to(E4M3),
        lambda x: (x / 0.3).clamp(-7.0, 2.0).clamp(5.0, -5.0).to(E4M3),
        lambda x: (x / 0.3).clamp_max(-500.0).clamp(-448.0, 448.0).to(E4M3),
        lambda x: (x / 0.3).round().clamp(-7.5, 7.5).to(E4M3),
    ],
)
def test_bounds_that_cross_and_bounds_behind_a_rounding(fn):
    (quantize,) = found(fn, torch.randn(4, 4) * 3)
    assert isinstance(quantize, Quantize)


def test_bounds_that_are_no_whole_numbers_before_a_rounding():
    assert found(lambda x: (x / 0.3).clamp(-7.5, 7.5).round().to(E4M3), torch.randn(4, 4) * 3) == []


def test_a_bound_that_broadcasts():
    assert found(lambda x: torch.minimum(x / 0.3, torch.full((), 448.0)).to(E4M3), torch.randn(4))
    (graph,) = capture(lambda x: torch.minimum(x / 0.3, torch.full((3, 4), 448.0)).to(E4M3), torch.randn(4))
    assert not list(recognize(graph))
    assert "a bound broadcasts the tensor from [4] to [3, 4]" in recognize(graph).near_misses[0].reason


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_complex_numbers_times_real_ones_turn_nothing():
    def fn(x, table):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[:, None]).flatten(-2)

    (graph,) = capture(fn, torch.randn(3, 2, 8), torch.randn(3, 4))
    assert list(rope.recognize(graph)) == []


def test_scales_that_are_returned_spread_over_their_groups():
    """One for each element is no tensor of one for each group."""

    def fn(x):
        scales = (x.abs().view(4, 2, 32).amax(-1, keepdim=True) / 448.0).clamp(min=1e-8)
        spread = scales.expand(4, 2, 32).reshape(4, 64)
        return (x / spread).clamp(-448.0, 448.0).to(E4M3), spread

    (quantize,) = found(fn, torch.randn(4, 64))
    assert isinstance(quantize, GroupQuantize)
    assert quantize.scales.meta["val"].shape == (4, 2, 1)


def test_an_argument_of_an_opaque_op_that_the_table_does_not_name():
    op = OPAQUE["_C::static_scaled_fp8_quant"]
    given = {"result": 0, "input": 0, "scale": 0, "group_shape": None}
    assert op.unread(given, {"group_shape": None}) == ""
    assert op.unread({**given, "group_shape": [1, 128]}, {"group_shape": None}) == "group_shape=[1, 128]"
    assert op.unread({**given, "dtype": E4M3}, {}) == ""
