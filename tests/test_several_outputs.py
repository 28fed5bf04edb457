"""A rule with several outputs: one op for a sine and a cosine of one tensor, and one that also writes to a buffer."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

from fusion_passes import Match, PassConfig, Rule, testing
from fusion_passes.compiler.manager import PostGradPassManager
from fusion_passes.graph.read import find_calls

aten = torch.ops.aten


@torch.library.custom_op("tests_several_outputs::sincos", mutates_args=())
def sincos(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@sincos.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("tests_several_outputs::keep", mutates_args=("kept",))
def keep(x: Tensor, kept: Tensor) -> None:
    kept.copy_(x)


@torch.library.custom_op("tests_several_outputs::sin_keep", mutates_args=("kept",))
def sin_keep(x: Tensor, kept: Tensor) -> Tensor:
    kept.copy_(x)
    return x.sin()


@sin_keep.register_fake
def _(x, kept):
    return torch.empty_like(x)


@dataclass(frozen=True)
class SinCos(Rule[Match]):
    name = "sincos"
    summary = "sine and cosine of one tensor"
    results: str = "both"

    def pattern(self, idioms) -> Iterator[Match]:
        for sin in find_calls(idioms.graph, [aten.sin.default]):
            (x,) = sin.all_input_nodes
            for cos in (user for user in x.users if user.target is aten.cos.default):
                yield Match(sin, frozenset({sin, cos}), (x,), side_outputs=(cos,))

    def replacement(self, m, call):
        both = call(torch.ops.tests_several_outputs.sincos.default, *m.inputs)
        first, second = (call(operator.getitem, both, i) for i in range(2))
        if self.results == "narrow":
            second = call(torch.ops.prims.convert_element_type.default, second, torch.float16)
        return first if self.results == "one" else (first, second)


class SinOfCos(SinCos):
    def pattern(self, idioms) -> Iterator[Match]:
        (sin,), (cos,) = (find_calls(idioms.graph, [op]) for op in (aten.sin.default, aten.cos.default))
        yield Match(sin, frozenset({sin, cos}), (*sin.all_input_nodes,), side_outputs=(cos,))


@dataclass(frozen=True)
class SinKeep(Rule[Match]):
    name = "sin_keep"
    summary = "sine of what is kept"

    def pattern(self, idioms) -> Iterator[Match]:
        for write in idioms.graph.nodes:
            if write.target is not auto_functionalized_v2:
                continue
            x = write.kwargs["x"]
            for sin in (user for user in x.users if user.target is aten.sin.default):
                kept = [user for user in write.users if user.args[1] == 1]
                yield Match(
                    sin, frozenset({sin, write, *kept}), (x, *write.kwargs["_all_bases"]), side_outputs=(*kept,)
                )

    def replacement(self, m, call):
        x, kept = m.inputs
        op = torch.ops.tests_several_outputs.sin_keep.default
        both = call(auto_functionalized_v2, op, x=x, _kept_base_index=0, _all_bases=[kept])
        return call(operator.getitem, both, 0), call(operator.getitem, both, 1)


def rewritten(fn, rule, *inputs):
    (graph,) = testing.capture(fn, *inputs)
    manager = PostGradPassManager(PassConfig(extra_fusions=(rule,)))
    manager(graph)
    (site,) = manager.report.sites
    return graph, site


def test_every_output_is_taken_over():
    x = torch.randn(7)
    graph, site = rewritten(lambda x: (x.sin(), x.cos()), SinCos(), x)
    assert site.status == "fused"
    assert not find_calls(graph, [aten.sin.default, aten.cos.default])
    for ours, expected in zip(testing.run(graph, x), (x.sin(), x.cos()), strict=True):
        torch.testing.assert_close(ours, expected)


def test_readers_between_the_outputs_come_behind_the_last():
    def fn(x):
        second = x.sin().exp().tanh()
        return second, x.cos() * 2.0

    x = torch.randn(7)
    graph, site = rewritten(fn, SinCos(), x)
    order = {node.target: i for i, node in enumerate(graph.nodes)}
    assert site.status == "fused", site.reason
    assert order[operator.getitem] < order[aten.exp.default] < order[aten.tanh.default]
    for ours, expected in zip(testing.run(graph, x), fn(x), strict=True):
        torch.testing.assert_close(ours, expected)


def test_an_output_that_another_needs_declines():
    x = torch.randn(7)
    _, site = rewritten(lambda x: (x.sin() + x.exp()).cos(), SinOfCos(), x)
    assert site.status == "illegal"
    assert "add (aten.add.Tensor) is made of one output and needed for another" in site.reason


@pytest.mark.parametrize(("results", "reason"), [("one", "1 results for 2 outputs"), ("narrow", "gives torch.float16")])
def test_results_that_do_not_fit_put_the_graph_back(results, reason):
    x = torch.randn(7)
    graph, site = rewritten(lambda x: (x.sin(), x.cos()), SinCos(results), x)
    assert site.status == "illegal"
    assert reason in site.reason
    assert len(find_calls(graph, [aten.sin.default, aten.cos.default])) == 2
    assert not find_calls(graph, [operator.getitem])


def test_a_write_in_place_goes_into_the_fused_op():
    def fn(x, kept):
        keep(x, kept)
        return x.sin() + kept

    x, kept = torch.randn(7), torch.zeros(7)
    graph, site = rewritten(fn, SinKeep(), x, kept)
    assert site.status == "fused", site.reason
    writes = find_calls(graph, [auto_functionalized_v2])
    assert [str(node.args[0]) for node in writes] == ["tests_several_outputs.sin_keep.default"]
    # Inductor looks at the memory of fake tensors: it would keep a copy of what is read later.
    memory = {node.meta["val"].untyped_storage()._cdata for node in (*writes[0].users, *writes[0].all_input_nodes)}
    assert len(memory) == 4
    manager = PostGradPassManager(PassConfig(extra_fusions=(SinKeep(),)))
    compiled = torch.compile(fn, options={"post_grad_custom_post_pass": manager})
    torch.testing.assert_close(compiled(x, kept), x.sin() + x)
    torch.testing.assert_close(kept, x)
