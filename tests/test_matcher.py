"""TracedRule: a fusion as two functions, with what Inductor's matcher gets wrong put right."""

import pytest
import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import PassConfig, Report, TracedRule
from tests.traced_rules import fused, relu_squared_rule, unfused


@torch.no_grad()
def report_of(fn, *inputs, rule=None):
    report = Report()
    config = PassConfig(extra_fusions=(rule or relu_squared_rule(),))
    out = fusion_passes.compile(fn, config, report=report, fullgraph=True)(*inputs)
    torch.testing.assert_close(out, fn(*inputs))
    return report


def test_finds_every_place():
    report = report_of(lambda x, y: unfused(x) + unfused(y), torch.randn(4, 8), torch.randn(4, 8))
    assert report.count() == 2


def test_sizes_are_not_looked_at():
    assert report_of(unfused, torch.randn(3, 5)).count() == 1


def test_an_interior_value_that_is_used_elsewhere_is_declined_with_its_reader():
    report = report_of(lambda x: (F.relu(x) ** 2, F.relu(x).sum()), torch.randn(4, 8))
    # Without CSE in the graph the two relu are separate nodes: the fusion is legal.
    assert report.count() == 1

    def shared(x):
        y = F.relu(x)
        return y**2, y.sum()

    (site,) = report_of(shared, torch.randn(4, 8)).sites
    assert "is also read by sum_1 (aten.sum.default): fusing would compute it twice" in site.reason


def test_a_keyword_argument_that_the_pattern_does_not_name_is_declined():
    """torch up to 2.14 drops it in silence, and the replacement would ignore the factor."""
    rule = TracedRule(
        name="add",
        search=lambda x, y: x + y,
        replace=lambda x, y: torch.sub(x, -y),
        example_inputs=(torch.empty(4), torch.empty(4)),
    )
    (site,) = report_of(lambda x, y: torch.add(x, y, alpha=3), torch.randn(4), torch.randn(4), rule=rule).sites
    assert site.reason == "the graph says more than the pattern: aten.add.Tensor(alpha=3)"


def test_a_number_in_the_place_of_a_tensor_is_declined():
    rule = TracedRule(
        name="add",
        search=lambda x, y: x + y,
        replace=lambda x, y: torch.sub(x, -y),
        example_inputs=(torch.empty(4), torch.empty(4)),
    )
    (site,) = report_of(lambda x: x + 2.5, torch.randn(4), rule=rule).sites
    assert site.reason == "y is 2.5 here, not a tensor"


def test_reshape_and_in_place_ops_of_the_trace_match_the_graph():
    """A trace says `view`, and F.rms_norm leaves `add_` in it; the graph has `reshape` and is functional."""
    rule = TracedRule(
        name="norm",
        search=lambda x, w: F.rms_norm(x, (8,), w, 1e-6).reshape(-1),
        replace=lambda x, w: (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w).flatten(),
        example_inputs=(torch.empty(4, 8), torch.empty(8)),
    )
    report = report_of(
        lambda x, w: F.rms_norm(x, (8,), w, 1e-6).reshape(-1), torch.randn(4, 8), torch.randn(8), rule=rule
    )
    assert report.count() == 1


@pytest.mark.parametrize(
    ("search", "inputs", "message"),
    [
        (lambda x, y: F.relu(x), 2, r"search ignores \['y'\]"),
        (lambda x: (x + 1, x + 2), 1, "search must compute exactly one tensor"),
        (lambda x: x.no_such_method(), 1, "search cannot be traced"),
        (lambda x: x, 1, "search must compute exactly one tensor"),
        (lambda x, y: x + y, 1, "got 1 example inputs"),
    ],
)
def test_a_wrong_rule_fails_at_construction(search, inputs, message):
    with pytest.raises(ValueError, match=message):
        TracedRule(name="wrong", search=search, replace=search, example_inputs=(torch.empty(4, 8),) * inputs)


def test_parameters_must_agree():
    with pytest.raises(ValueError, match="must take the same parameters"):
        TracedRule(name="wrong", search=unfused, replace=lambda y: y, example_inputs=(torch.empty(4),))


def test_a_replacement_of_another_shape_is_declined_and_leaves_the_graph():
    rule = TracedRule(
        name="wrong",
        search=unfused,
        replace=lambda x: fused(x).sum(0),
        example_inputs=(torch.empty(4, 8),),
    )
    (site,) = report_of(unfused, torch.randn(4, 8), rule=rule).sites
    assert site.status == "illegal"
    assert site.reason == "the replacement has shape (8,) and strides (1,), the graph (4, 8) and (8, 1)"


def test_a_replacement_that_raises_is_declined_and_leaves_the_graph():
    def broken(x):
        fused(x)
        raise OSError("no such file")

    rule = TracedRule(name="broken", search=unfused, replace=broken, example_inputs=(torch.empty(4, 8),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusion_passes.manager.log.warning", lambda *_, **__: None)
        (site,) = report_of(unfused, torch.randn(4, 8), rule=rule).sites
    assert site.reason == "the rule failed: OSError: no such file"


def test_the_subclass_of_the_docs():
    class OnlyLarge(TracedRule):
        def profitability(self, m):
            rows = m.output.meta["val"].shape[0]
            m.require(rows >= 1024, f"{rows} rows: below 1024 the unfused kernel was as fast")

    rule = OnlyLarge(name="large", search=unfused, replace=fused, example_inputs=(torch.empty(4, 8),))
    (site,) = report_of(unfused, torch.randn(4, 8), rule=rule).sites
    assert (site.status, site.reason) == ("unprofitable", "4 rows: below 1024 the unfused kernel was as fast")
    torch.compiler.reset()  # else the rows become dynamic, and what is not provable for every size declines
    assert report_of(unfused, torch.randn(1024, 8), rule=rule).count() == 1


def test_a_write_between_the_preparation_of_an_input_and_its_use_is_declined():
    """The replacement reads the scale itself where the graph had read it before: an in-place change lies between."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fusion_passes.rewrite import check_side_effects
    from fusion_passes.rule import DeclinedError, Match

    def graph_of(x, scale):
        inverse = torch.reciprocal(scale)
        scale.mul_(8)
        return torch.relu(x) * inverse

    graph = make_fx(graph_of)(torch.randn(4), torch.tensor(2.0)).graph
    x, scale = graph.find_nodes(op="placeholder")
    relu, product = (n for n in graph.nodes if "relu" in n.name or n.name == "mul")
    match = Match(output=product, nodes=frozenset({relu, product}), inputs=(x, scale))
    with pytest.raises(DeclinedError, match=r"mul_ \(aten.mul_.Tensor\) writes to an input between reciprocal and mul"):
        check_side_effects(match)
