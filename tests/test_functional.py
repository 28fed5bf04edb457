"""Functionalised writes, in both versions of the wrapper: what they write to, by which result, in what spelling."""

import operator

import pytest
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx import Graph

from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.graph.effects import memory
from fusion_passes.graph.functional import arguments_of, op_call, op_name, written_tensor, written_tensors
from fusion_passes.testing import capture

LIBRARY = torch.library.Library("functional_test", "DEF")
LIBRARY.define("maybe(Tensor(a!)? first, Tensor(b!) second, Tensor x, float by=2.0) -> Tensor")
LIBRARY.define("several(Tensor(a!)[] group, Tensor(b!) second, Tensor x) -> ()")
LIBRARY.define("returned(Tensor(a!) first, Tensor x) -> Tensor(a!)")
OPS = torch.ops.functional_test


@pytest.fixture
def graph():
    graph = Graph()
    for name in ("a", "b", "x"):
        graph.placeholder(name)
    return graph


def results(graph, call, indices):
    return [graph.call_function(operator.getitem, (call, i)) for i in indices]


@pytest.mark.parametrize("version", [1, 2])
def test_an_argument_that_is_left_out_takes_a_place_in_version_1_only(graph, version):
    _, b, x = graph.nodes
    if version == 1:
        given = {"first": None, "second": b, "x": x}
        call = graph.call_function(auto_functionalized, (OPS.maybe.default,), given)
    else:
        given = {"x": x, "_first_base_index": None, "_second_base_index": 0, "_all_bases": [b]}
        call = graph.call_function(auto_functionalized_v2, (OPS.maybe.default,), given)
    returned, new = results(graph, call, (0, 2 if version == 1 else 1))
    assert written_tensors(call) == (b,)
    assert written_tensor(returned) is None
    assert written_tensor(new) is b
    assert memory(new) is b
    assert arguments_of(call) == {"first": None, "second": b, "x": x, "by": 2.0}
    assert op_name(call) == "functional_test.maybe"
    names = ["functional_test::maybe"]
    assert [op_call(node, names).written for node in (returned, new)] == ["", "second"]
    assert op_call(new, names).defaults["by"] == 2.0


@pytest.mark.parametrize("version", [1, 2])
def test_a_list_of_tensors_is_written(graph, version):
    a, b, x = graph.nodes
    if version == 1:
        given = {"group": [a, x], "second": b, "x": x}
        call = graph.call_function(auto_functionalized, (OPS.several.default,), given)
        group, second = results(graph, call, (1, 2))
        first, last = results(graph, group, (0, 1))
        assert written_tensor(group) is None
    else:
        places = {"_group_length": 2, "_group_0_base_index": 0, "_group_1_base_index": 1, "_second_base_index": 2}
        given = {"x": x, **places, "_all_bases": [a, x, b]}
        call = graph.call_function(auto_functionalized_v2, (OPS.several.default,), given)
        first, last, second = results(graph, call, (1, 2, 3))
    assert {*written_tensors(call)} == {a, b, x}
    assert [written_tensor(node) for node in (first, last, second)] == [a, x, b]
    assert [memory(node) for node in (first, last, second)] == [a, x, b]


def test_what_an_op_writes_to_may_be_its_result(graph):
    a, _, x = graph.nodes
    given = {"x": x, "_first_base_index": 0, "_all_bases": [a]}
    call = graph.call_function(auto_functionalized_v2, (OPS.returned.default,), given)
    assert [memory(node) for node in results(graph, call, (0, 1))] == [a, a]


def test_a_part_of_a_tensor(graph):
    a, _, x = graph.nodes
    given = {"x": x, "_first_base_index": None, "_second_base_index": 0, "_second_slice_dim": 0, "_all_bases": [a]}
    call = graph.call_function(auto_functionalized_v2, (OPS.maybe.default,), given)
    (new,) = results(graph, call, (1,))
    found = op_call(new, ["functional_test::maybe"])
    assert (found.written, found.whole) == ("second", False)


def test_views_of_one_tensor_have_one_new_value(graph):
    """Whose it is cannot be said."""
    a, _, x = graph.nodes
    given = {"x": x, "_first_base_index": 0, "_second_base_index": 0, "_all_bases": [a]}
    call = graph.call_function(auto_functionalized_v2, (OPS.maybe.default,), given)
    (new,) = results(graph, call, (1,))
    assert written_tensor(new) is a
    assert op_call(new, ["functional_test::maybe"]) is None


@torch.compiler.nested_compile_region
def count(x, counter):
    counter.add_(1)
    return x.sin() + counter


@torch.no_grad()
def test_a_region_that_writes():
    """A wrapped call of no op, whose schema the graph keeps elsewhere."""
    (graph,) = capture(lambda x, counter: count(x, counter) + count(x + 1, counter), torch.randn(4), torch.zeros(4))
    calls = [node for node in graph.nodes if node.target is auto_functionalized_v2]
    new = [node for call in calls for node in call.users if node.args[1] == 1]
    (counter,) = written_tensors(calls[0])
    assert counter.op == "placeholder"
    assert [memory(node) for node in new] == [counter, counter]
    report = Report()
    PostGradPassManager(PassConfig(profitability="ignore"), report)(graph)
    assert report.count() == 0
