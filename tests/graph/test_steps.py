"""The alphabet of chain idioms: one step, whichever op says it, with all that the op says."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F

from fusion_passes.graph.steps import (
    Abs,
    Clamp,
    ExactCast,
    Expand,
    Inverse,
    OrderedView,
    Power,
    Round,
    RoundingCast,
    Scaled,
    Shifted,
    View,
    clamped_before,
    is_scalar,
    scalar,
    step,
    top,
    up,
)
from fusion_passes.testing import capture

aten, prims = torch.ops.aten, torch.ops.prims
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def node_of(target, *args, **kwargs):
    """A call in a graph of its own: of a placeholder for each tensor, or of the nodes that it is given."""
    nodes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.fx.Node)]
    graph = nodes[0].graph if nodes else torch.fx.Graph()

    def node(x):
        if not isinstance(x, torch.Tensor):
            return x
        made = graph.placeholder(f"x{len(graph.nodes)}")
        made.meta["val"] = x
        return made

    def val(x):
        return x.meta["val"] if isinstance(x, torch.fx.Node) else x

    made = graph.call_function(target, tuple(map(node, args)), {name: node(x) for name, x in kwargs.items()})
    made.meta["val"] = target(*map(val, args), **{name: val(x) for name, x in kwargs.items()})
    return made


def x(dtype=FP32):
    return torch.randn(2, 3, dtype=dtype)


def last(fn, *inputs, **options):
    """The node that a captured function returns."""
    (graph,) = capture(fn, *inputs, **options)
    (returned,) = graph.find_nodes(op="output")[0].all_input_nodes
    return returned


CLAMPS = {
    "clamp": (lambda x: x.clamp(-2.0, 3.0), (-2.0, 3.0)),
    "clamp with tensors": (lambda x: x.clamp(torch.full((), -2.0), torch.full((3,), 3.0)), (-2.0, 3.0)),
    "clamp_min of clamp_max": (lambda x: x.clamp_max(3.0).clamp_min(-2.0), (-2.0, 3.0)),
    "clamp_max of clamp_min": (lambda x: x.clamp_min(-2.0).clamp_max(3.0), (-2.0, 3.0)),
    "hardtanh": (lambda x: F.hardtanh(x, -2.0, 3.0), (-2.0, 3.0)),
    "minimum, the bound first": (lambda x: torch.minimum(torch.full((2, 1), 3.0), x), (-math.inf, 3.0)),
    "maximum": (lambda x: torch.maximum(x, torch.full((2, 3), -2.0)), (-2.0, math.inf)),
    "above only": (lambda x: x.clamp(max=3.0), (-math.inf, 3.0)),
}


@pytest.mark.parametrize("name", CLAMPS)
def test_clamps(name):
    fn, bounds = CLAMPS[name]
    node = last(fn, x())
    steps = up(node, Clamp)
    found = (-math.inf, math.inf)
    for clamp in steps:
        assert not clamp.broadcasts
        found = clamped_before(found, *clamp.bounds)
    assert found == bounds
    assert top(steps, node).op == "placeholder"


@pytest.mark.parametrize(
    ("target", "args", "bounds"),
    [
        (aten.clamp.default, (-2, None), (-2.0, math.inf)),
        (aten.clamp.Tensor, (None, torch.ones(3)), None),
        (aten.clamp_min.Tensor, (torch.ones(()),), None),
        (aten.clamp_max.default, (3.0,), (-math.inf, 3.0)),
        (aten.hardtanh.default, (), (-1.0, 1.0)),
    ],
)
def test_bounds_of_one_clamp(target, args, bounds):
    found = step(node_of(target, x(), *args))
    assert isinstance(found, Clamp)
    assert found.bounds == bounds
    assert (found.low is None) == ((bounds is not None and bounds[0] == -math.inf) or args[:1] == (None,))


def test_a_bound_that_is_larger_than_the_tensor():
    clamp = step(last(lambda x: torch.minimum(x, torch.full((4, 2, 3), 3.0)), x()))
    assert isinstance(clamp, Clamp)
    assert clamp.broadcasts
    assert step(node_of(aten.minimum.default, x(), x())) is None  # neither is a bound


def test_scaled_from_either_side():
    for target, args, by, divides in (
        (aten.mul.Tensor, (x(), 3.0), 3.0, False),
        (aten.div.Tensor, (x(), 4.0), 4.0, True),
        (aten.mul.Tensor, (node_of(aten.full.default, [], 3), x()), 3.0, False),
        (aten.div.Tensor, (x(), node_of(aten.full.default, [], 4)), 4.0, True),
    ):
        found = step(node_of(target, *args))
        assert type(found) is Scaled
        assert (found.by, found.divides, found.operand.op) == (by, divides, "placeholder")
        assert found.factor == (1.0 / by if divides else by)
    for number in (0.0, math.inf, math.nan):
        assert step(node_of(aten.mul.Tensor, x(), number)) is None
    assert step(node_of(aten.mul.Tensor, x(), x())) is None
    assert step(node_of(aten.div.Tensor_mode, x(), 2.0, rounding_mode="floor")) is None


def test_a_number_over_the_operand():
    full = node_of(aten.full.default, [], 448.0)
    for node, by in (
        (node_of(aten.div.Tensor, full, x()), 448.0),
        (node_of(aten.reciprocal.default, x()), 1.0),
        (node_of(aten.pow.Tensor_Scalar, x(), -1), 1.0),
    ):
        found = step(node)
        assert isinstance(found, Inverse)
        assert (found.by, found.operand.op) == (by, "placeholder")


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (BF16, FP32, ExactCast),
        (FP16, torch.float64, ExactCast),
        (FP32, BF16, RoundingCast),
        (BF16, FP16, RoundingCast),
        (torch.float8_e4m3fn, BF16, RoundingCast),
        (FP32, FP32, OrderedView),
    ],
)
@pytest.mark.parametrize("target", [prims.convert_element_type.default, aten._to_copy.default])
def test_casts(target, before, after, kind):
    args, kwargs = ((), {"dtype": after}) if target is aten._to_copy.default else ((after,), {})
    assert type(step(node_of(target, x().to(before), *args, **kwargs))) is kind


def test_what_is_no_cast():
    assert step(node_of(prims.convert_element_type.default, torch.arange(3), FP32)) is None
    moved = node_of(aten._to_copy.default, x(), dtype=BF16)
    moved.meta["val"] = moved.meta["val"].to("meta")
    assert step(moved) is None


def test_of_one_tensor():
    assert type(step(node_of(aten.round.default, x()))) is Round
    assert type(step(node_of(aten.abs.default, x()))) is Abs
    assert step(node_of(aten.round.decimals, x(), decimals=1)) is None
    assert step(node_of(aten.tanh.default, x())) is None
    assert step(node_of(aten.tanh.default, x()).all_input_nodes[0]) is None


@pytest.mark.parametrize(
    ("target", "args", "kind"),
    [
        (aten.reshape.default, ([3, 2],), OrderedView),
        (aten.clone.default, (), OrderedView),
        (aten.unsqueeze.default, (0,), OrderedView),
        (aten.permute.default, ([1, 0],), View),
        (aten.expand.default, ([2, 3],), OrderedView),
        (aten.expand.default, ([4, 2, 3],), Expand),
        (aten.slice.Tensor, (1, 0, 3), OrderedView),
        (aten.slice.Tensor, (1, 0, 2), type(None)),
        (aten.select.int, (0, 0), type(None)),
    ],
)
def test_views(target, args, kind):
    assert type(step(node_of(target, x(), *args))) is kind


def test_the_one_part_of_a_split_is_two_steps():
    split = node_of(aten.split.Tensor, x(), 3, 1)
    steps = up(node_of(operator.getitem, split, 0), View)
    assert [type(taken) for taken in steps] == [OrderedView, OrderedView]
    assert top(steps, split).op == "placeholder"


def test_up_stops_at_another_kind():
    node = last(lambda x: x.float().abs().clamp(max=2.0).view(6).round(), x(BF16))
    steps = up(node, Round, View, Clamp)
    assert [type(taken) for taken in steps] == [Round, OrderedView, Clamp]
    assert type(step(top(steps, node))) is Abs
    assert up(node, Clamp) == []
    assert top([], node) is node


SCALARS = {
    # what is done to a scale s of 0.37: (factor, whether it is of 1 / s)
    "s": (lambda s: s + 0, None),
    "2 s": (lambda s: s * 2, (2.0, False)),
    "s / 4": (lambda s: (s / 4).view(1, 1), (0.25, False)),
    "1 / s": (lambda s: 1 / s, (1.0, True)),
    "3 / (2 s)": (lambda s: torch.full((), 3.0) / (s * 2).expand(1, 1), (1.5, True)),
    "1 / (1 / s)": (lambda s: s.reciprocal() ** -1, (1.0, False)),
    "too small": (lambda s: s * 1e-30 * 1e-30, (1e-30, False)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_how_a_scalar_is_prepared(name):
    fn, expected = SCALARS[name]
    s = torch.tensor([0.37])
    node = last(fn, s)
    assert is_scalar(node)
    tensor, factor, inverse = scalar(node)
    if expected is None:
        assert tensor is node
    else:
        assert (pytest.approx(factor), inverse) == expected
        assert (tensor.op == "placeholder") == (name != "too small")


def test_a_scalar_in_16_bits_is_not_looked_through():
    node = last(lambda s: 1 / s.view(1, 1), torch.tensor([0.37], dtype=BF16))
    assert scalar(node) == (node, 1.0, False)


def test_a_constant_is_computed_as_the_graph_does():
    ones = node_of(aten.full.default, [1], 0.1, dtype=FP32)
    assert scalar(node_of(aten.reciprocal.default, ones)) == (None, (1 / torch.tensor(0.1)).item(), False)
    assert scalar(0.1) == (None, 0.1, False)
    assert scalar(node_of(aten.mul.Tensor, ones, 3.0)) == (None, (3 * torch.tensor(0.1)).item(), False)


def test_what_is_no_scalar():
    assert not is_scalar(last(lambda x: x * 2, x()))
    assert not is_scalar(last(lambda i: i * 2, torch.tensor(3)))
    assert not is_scalar(True)


POWERS = {
    "square": (lambda x: x.square(), 2.0),
    "times itself": (lambda x: x * x, 2.0),
    "root": (lambda x: x.sqrt(), 0.5),
    "power of a half": (lambda x: x**0.5, 0.5),
    "one over the root": (lambda x: x.rsqrt(), -0.5),
    "negative power": (lambda x: x**-0.5, -0.5),
}


@pytest.mark.parametrize("name", POWERS)
def test_powers(name):
    fn, exponent = POWERS[name]
    found = step(last(fn, x()))
    assert isinstance(found, Power)
    assert (found.exponent, found.operand.op) == (exponent, "placeholder")


def test_a_quotient_of_one_tensor_is_no_power():
    node = node_of(aten.abs.default, x())
    assert step(node_of(aten.div.Tensor, node, node)) is None
    assert isinstance(step(node_of(aten.mul.Tensor, node, node)), Power)


def test_a_power_that_is_no_number():
    assert step(node_of(aten.pow.Tensor_Tensor, x(), x())) is None


def test_a_number_added():
    for node in (node_of(aten.add.Tensor, x(), 2.5), node_of(aten.add.Scalar, x(), 2.5), last(lambda x: 2.5 + x, x())):
        found = step(node)
        assert isinstance(found, Shifted)
        assert found.by == 2.5
    assert step(node_of(aten.add.Tensor, x(), 2.5, alpha=2)) is None
    assert step(node_of(aten.add.Tensor, x(), x())) is None
