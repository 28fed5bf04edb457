"""TracedRule: a fusion as two functions, that finds what computes the same and nothing else."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import fusion_passes
from fusion_passes import PassConfig, PostGradPassManager, Report, TracedRule
from fusion_passes.quant import quantize
from fusion_passes.testing import capture, run
from tests.traced_rules import fused, relu_squared_rule, unfused


@torch.no_grad()
def report_of(fn, *inputs, rule=None):
    report = Report()
    config = PassConfig(extra_fusions=(rule or relu_squared_rule(),))
    out = fusion_passes.compile(fn, config, report=report, fullgraph=True)(*inputs)
    torch.testing.assert_close(out, fn(*inputs))
    return report


def captured(fn, *inputs, rule, **options):
    """The report, without generated code; what the graph computes must be as before."""
    with torch.no_grad():
        (graph,) = capture(fn, *inputs, **options)
    before, report = run(graph), Report()
    PostGradPassManager(PassConfig(extra_fusions=(rule,)), report)(graph)
    torch.testing.assert_close(run(graph), before)
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
    """The replacement would ignore the factor."""
    rule = TracedRule(
        name="add",
        search=lambda x, y: (x + y).relu().exp(),
        replace=lambda x, y: torch.sub(x, -y).relu().exp(),
        example_inputs=(torch.empty(4), torch.empty(4)),
    )
    inputs = torch.randn(4), torch.randn(4)
    report = captured(lambda x, y: torch.add(x, y, alpha=3).relu().exp(), *inputs, rule=rule)
    assert report.count() == 0
    assert "add: aten.add.Tensor has alpha=3, search 1" in report.why_not("add")
    assert captured(lambda x, y: torch.add(x, y, alpha=1).relu().exp(), *inputs, rule=rule).count() == 1


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


def writes(x):
    x.relu_()
    return x + 1


CLOSED_OVER = torch.ones(8)


@pytest.mark.parametrize(
    ("search", "inputs", "message"),
    [
        (lambda x, y: F.relu(x), 2, r"search ignores \['y'\]"),
        (
            lambda x: (x + 1, x + 2),
            1,
            "search returns 2 tensors: return the one tensor .* write a Rule with side_outputs",
        ),
        (lambda x: [x + 1], 1, "search returns 1 tensors: return the one tensor"),
        (lambda x: (x + 1, None), 1, "search returns a tuple with NoneType: return the one tensor"),
        (lambda x: None, 1, "search returns nothing: return the one tensor that the rule is about"),
        (lambda x: 2.5, 1, "search returns 2.5, a float: return the one tensor"),
        (lambda x: x.no_such_method(), 1, "search cannot be traced on the example inputs: AttributeError"),
        (lambda x: x, 1, "search returns its parameter x: it must compute something"),
        (lambda x, y: x + y, 1, "got 1 example inputs"),
        (lambda *tensors: tensors[0], 1, r"search must name its parameters, without \* and \*\*"),
        (lambda x, *, y=1: x + y, 1, r"search must name its parameters, without \* and \*\*"),
        (writes, 1, "search writes to its parameter x, .*: write to a tensor that it makes"),
        (lambda x: (x * CLOSED_OVER).relu(), 1, "search uses a tensor that is no parameter: make one .* a parameter"),
        (lambda x: x * torch.tensor([2.0] * 8), 1, "write torch.full for one of numbers"),
    ],
)
def test_a_wrong_rule_fails_at_construction(search, inputs, message):
    with pytest.raises(ValueError, match=message):
        TracedRule(name="wrong", search=search, replace=search, example_inputs=(torch.empty(4, 8),) * inputs)


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda x: None, "replace returns nothing"),
        (lambda x: x, r"replace returns its parameter x: write clone\(\)"),
        (lambda x: x.view(8, 4).view(4, 8), r"replace returns a view of its parameter x: write clone\(\)"),
        (writes, "replace writes to its parameter x"),
        (lambda x: (x * CLOSED_OVER).relu(), "replace uses a tensor that is no parameter"),
        (
            lambda x: x.sum(0),
            r"search gives float32 \[4, 8\] on cpu, replace gives float32 \[8\] on cpu: they must give",
        ),
        (lambda x: x.half(), r"search gives float32 .* replace gives float16"),
    ],
)
def test_a_wrong_replacement_fails_at_construction(replace, message):
    with pytest.raises(ValueError, match=message):
        TracedRule(name="wrong", search=unfused, replace=replace, example_inputs=(torch.empty(4, 8),))


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (torch.empty(4), "example_inputs must be a tuple with one example for each parameter, got a Tensor"),
        ((None,), "the example of x must be a tensor or a finite number, got None"),
        ((math.inf,), "the example of x must be a tensor or a finite number, got inf"),
    ],
)
def test_wrong_examples_fail_at_construction(examples, message):
    with pytest.raises(ValueError, match=message):
        TracedRule(name="wrong", search=unfused, replace=fused, example_inputs=examples)


def test_parameters_must_agree():
    with pytest.raises(ValueError, match="must take the same parameters"):
        TracedRule(name="wrong", search=unfused, replace=lambda y: y, example_inputs=(torch.empty(4),))


def test_a_replacement_of_another_layout_is_declined_and_leaves_the_graph():
    rule = TracedRule(
        name="wrong",
        search=unfused,
        replace=lambda x: fused(x).t().contiguous().t(),
        example_inputs=(torch.empty(4, 8),),
    )
    report = captured(unfused, torch.randn(4, 8), rule=rule)
    (site,) = report.sites
    assert site.status == "illegal"
    assert site.reason == "the replacement has shape (4, 8) and strides (1, 4), the graph (4, 8) and (8, 1)"


def test_a_replacement_that_raises_is_declined_and_leaves_the_graph(monkeypatch):
    def broken(x):
        if x.shape[0] == 3:
            raise OSError("no such file")
        return fused(x)

    rule = TracedRule(name="broken", search=unfused, replace=broken, example_inputs=(torch.empty(4, 8),))
    monkeypatch.setattr("fusion_passes.compiler.manager.log.warning", lambda *_, **__: None)
    (site,) = captured(unfused, torch.randn(3, 8), rule=rule).sites
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

    from fusion_passes.compiler.inductor import may_inline
    from fusion_passes.graph.effects import Effects
    from fusion_passes.graph.match import DeclinedError, Match
    from fusion_passes.graph.rewrite import Insertion, check_order

    def graph_of(x, scale):
        inverse = torch.reciprocal(scale)
        scale.mul_(8)
        return torch.relu(x) * inverse

    graph = make_fx(graph_of)(torch.randn(4), torch.tensor(2.0)).graph
    x, scale = graph.find_nodes(op="placeholder")
    relu, product = (n for n in graph.nodes if "relu" in n.name or n.name == "mul")
    match = Match(output=product, nodes=frozenset({relu, product}), inputs=(x, scale))
    with pytest.raises(DeclinedError, match=r"mul_ \(aten.mul_.Tensor\) writes to an input between reciprocal and mul"):
        check_order(match, {product: x}, Insertion(graph, match.outputs, {}), Effects(graph, may_inline))


# what is the same, and what only looks so


def mean(x):
    return x.sum(-1) / x.shape[-1]


def mean_rule():
    return TracedRule(
        name="mean",
        search=lambda x: mean(x).exp(),
        replace=lambda x: x.mean(-1).exp(),
        example_inputs=(torch.empty(4, 8),),
    )


def test_a_number_that_search_makes_of_a_size_is_that_of_the_place():
    assert captured(lambda x: mean(x).exp(), torch.randn(3, 5), rule=mean_rule()).count() == 1
    assert captured(lambda x: (x.sum(-1) / 8).exp(), torch.randn(3, 8), rule=mean_rule()).count() == 1
    report = captured(lambda x: (x.sum(-1) / 8).exp(), torch.randn(3, 5), rule=mean_rule())  # no mean
    assert report.count() == 0
    assert "mean: aten.div.Tensor has other=8, search 5" in report.why_not("mean")


def test_a_dimension_is_that_of_the_place():
    """The last dimension of the examples has the number 1; of three, 1 is another."""
    assert captured(lambda x: mean(x).exp(), torch.randn(2, 3, 5), rule=mean_rule()).count() == 1
    report = captured(lambda x: (x.sum(1) / 5).exp(), torch.randn(2, 3, 5), rule=mean_rule())
    assert report.count() == 0


@pytest.mark.parametrize("search", [lambda x: mean(x).exp(), unfused, lambda x: x.chunk(2, -1)[0].relu() * 2.0])
def test_symbolic_sizes_are_found_without_a_guard(search):
    rule = TracedRule(name="any", search=search, replace=lambda x: search(x) + 0.0, example_inputs=(torch.empty(4, 8),))
    x = torch.randn(6, 10)
    with torch.no_grad():
        (graph,) = capture(search, x, mark_dynamic=[(x, 0)])
    env = graph.find_nodes(op="placeholder")[-1].meta["val"].fake_mode.shape_env
    guards, report = len(env.guards), Report()
    PostGradPassManager(PassConfig(extra_fusions=(rule,)), report)(graph)
    assert report.count() == 1, report
    assert len(env.guards) == guards


def test_a_decision_by_a_symbolic_size_is_declined():
    """It would add a guard to the user's graph."""

    def replace(x):
        return fused(x) if x.shape[0] > 5 else unfused(x)

    rule = TracedRule(name="large", search=unfused, replace=replace, example_inputs=(torch.empty(4, 8),))
    x = torch.randn(6, 8)
    (site,) = captured(unfused, x, rule=rule, mark_dynamic=[(x, 0)]).sites
    assert site.reason == "replace decides by a symbolic size what does not hold for every value of it"
    assert captured(unfused, x.clone(), rule=rule).count() == 1


def test_a_value_that_is_computed_twice_is_the_same_value():
    """A graph without common subexpressions joined: each projection of a model has its own reshape."""

    def search(x, y):
        z = x.exp()
        return z * y + z

    rule = TracedRule(
        name="twice",
        search=search,
        replace=lambda x, y: x.exp() * (y + 1),
        example_inputs=(torch.empty(4), torch.empty(4)),
    )
    inputs = torch.randn(4), torch.randn(4)
    assert captured(lambda x, y: x.exp() * y + x.exp(), *inputs, rule=rule).count() == 1
    assert captured(lambda x, y: x.exp() * y + y.exp(), *inputs, rule=rule).count() == 0


@pytest.mark.parametrize("example", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_16_bits_stand_for_each_other_and_the_rest_for_itself(example, dtype):
    def search(x, scale):
        return quantize(F.silu(x) * x, scale)

    rule = TracedRule(
        name="quant",
        search=search,
        replace=lambda x, scale: quantize(x.sigmoid() * x * x, scale),
        example_inputs=(torch.empty(2, 8, dtype=example), torch.empty(())),
    )
    with torch.no_grad():
        (graph,) = capture(search, torch.randn(3, 8).to(dtype), torch.tensor(0.5))
    report = Report()
    PostGradPassManager(PassConfig(extra_fusions=(rule,)), report)(graph)
    same = dtype == example or {dtype, example} == {torch.bfloat16, torch.float16}
    assert report.count(rule="quant") == same
    if not same and torch.float64 not in (dtype, example):
        names = [str(d).removeprefix("torch.") for d in (dtype, example)]
        assert "x is {} here and {} in example_inputs: make a rule with such examples".format(*names) in str(report)


def test_a_place_of_another_dtype_is_told_only_where_a_rule_of_that_dtype_would_be_right():
    rule = relu_squared_rule()
    assert [site.reason for site in captured(unfused, torch.arange(4), rule=rule).sites] == [
        "x is int64 here and float32 in example_inputs: make a rule with such examples"
    ]
    assert captured(lambda x: F.relu(x) ** 3, torch.arange(4), rule=rule).sites == ()


# numbers


def norm(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def norm_rule(**options):
    return TracedRule(
        name="norm",
        search=norm,
        replace=lambda x, eps: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps),
        **{"example_inputs": (torch.empty(2, 8), 1e-5)} | options,
    )


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 2.0, 1, 0.0])
def test_a_number_is_that_of_the_graph(eps):
    """2.0 is the exponent's too, which is not it; `replace` gets the number, or its numbers would differ."""
    report = captured(lambda x: norm(x * 3, eps), torch.randn(5, 16), rule=norm_rule())
    assert [site.what for site in report.sites if site.status == "fused"] == [f"x float32 [5, 16], eps {eps!r}"]
    assert (
        captured(
            lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + eps), torch.ones(5, 16), rule=norm_rule()
        ).count()
        == 0
    )


def test_an_example_that_equals_another_number_of_search_is_told_from_it():
    rule = norm_rule(example_inputs=(torch.empty(2, 8), 2.0))
    assert captured(lambda x: norm(x, 1e-5), torch.randn(5, 16), rule=rule).count() == 1


def test_a_number_that_an_op_rounds_is_the_rounded_one():
    """`F.rms_norm` rounds its epsilon to fp32."""
    rule = TracedRule(
        name="rms",
        search=lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps),
        replace=lambda x, w, eps: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w,
        example_inputs=(torch.empty(4, 8), torch.empty(8), 1e-6),
    )
    layer = torch.nn.RMSNorm(16, eps=3e-5)
    (site,) = captured(layer, torch.randn(5, 16), rule=rule).sites
    assert site.status == "fused"
    assert float(site.what.split("eps ")[1]) == pytest.approx(3e-5, rel=1e-6)


def test_a_number_in_two_places_must_be_one():
    def search(x, low):
        return (x + low).exp() * low

    rule = TracedRule(
        name="two", search=search, replace=lambda x, low: low * (x + low).exp(), example_inputs=(torch.empty(4), 0.5)
    )
    assert captured(lambda x: (x + 3.0).exp() * 3.0, torch.randn(4), rule=rule).count() == 1
    assert captured(lambda x: (x + 3.0).exp() * 4.0, torch.randn(4), rule=rule).count() == 0


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, t, n: norm(x, t), "eps is a tensor here, arg2_1, and a number in example_inputs"),
        (lambda x, t, n: norm(x, n) + t, "eps is a symbolic size here, .* and a number in example_inputs"),
    ],
)
def test_what_is_no_number_is_declined(fn, reason):
    x = torch.randn(6, 8)
    report = captured(lambda x, t: fn(x, t, x.shape[0]), x, torch.tensor(1e-5), rule=norm_rule(), mark_dynamic=[(x, 0)])
    assert [site.status for site in report.sites] == ["illegal"]
    assert re.search(reason, report.sites[0].reason), report


def test_a_float_does_not_stand_for_an_int():
    rule = TracedRule(
        name="shift",
        search=lambda x, n: (x + n).relu(),
        replace=lambda x, n: torch.clamp(x + n, min=0),
        example_inputs=(torch.empty(4), 2),
    )
    assert captured(lambda x: (x + 7).relu(), torch.randn(4), rule=rule).count() == 1
    (site,) = captured(lambda x: (x + 7.5).relu(), torch.randn(4), rule=rule).sites
    assert site.reason == "n is 7.5 here, and 2 in example_inputs: another type"


@pytest.mark.parametrize(
    ("search", "example", "message"),
    [
        (
            lambda x, n: x.clamp(-n, n),
            3.0,
            "search computes with n instead of handing it to an op as it is: close over",
        ),
        (lambda x, n: x * (n * 2), 3.0, r"or make what it computes \(6.0 for 3.0\) the parameter"),
        (lambda x, n: sum(x + i for i in range(n)), 3, "search computes with n instead"),
        (lambda x, n: x.relu().reshape(n, -1) * 2, 1, "search uses n as a size, which is not looked at: close over"),
        (lambda x, n: x + 1, 3.0, r"search ignores \['n'\]"),
    ],
)
def test_a_number_that_search_computes_with_fails_at_construction(search, example, message):
    with pytest.raises(ValueError, match=message):
        TracedRule(name="wrong", search=search, replace=search, example_inputs=(torch.empty(8, 4), example))


# replacements that make tensors


@torch.library.custom_op("fusion_passes_tests::relu_squared_out", mutates_args=("result",))
def relu_squared_out(result: torch.Tensor, x: torch.Tensor) -> None:
    result.copy_(F.relu(x) ** 2)


def out_of_place(x):
    result = torch.empty_like(x)
    torch.ops.fusion_passes_tests.relu_squared_out(result, x)
    return result


def part_of_a_larger_one(x):
    workspace = x.new_zeros((2, *x.shape))
    torch.ops.fusion_passes_tests.relu_squared_out(workspace[1], x)
    return workspace.sum(0)


def by_way_of_another(x):
    first, second = torch.empty_like(x), torch.empty_like(x)
    torch.ops.fusion_passes_tests.relu_squared_out(first, x)
    torch.ops.fusion_passes_tests.relu_squared_out(second, first.sqrt())
    return second


@pytest.mark.parametrize(
    "replace",
    [
        out_of_place,
        part_of_a_larger_one,
        by_way_of_another,
        lambda x: F.relu(x) ** 2 + torch.zeros((), device=x.device),
    ],
)
def test_a_replacement_may_make_tensors(replace):
    rule = TracedRule(name="made", search=unfused, replace=replace, example_inputs=(torch.empty(4, 8),))
    x = torch.randn(6, 16)
    for options in ({}, {"mark_dynamic": [(x, 0)]}):
        assert captured(lambda x: unfused(x * 2) + unfused(x), x, rule=rule, **options).count() == 2


@torch.no_grad()
def test_inductor_writes_in_place_to_what_a_replacement_makes():
    rule = TracedRule(name="made", search=unfused, replace=out_of_place, example_inputs=(torch.empty(4, 8),))
    report, x = Report(), torch.randn(6, 16)

    def fn(x):
        first = unfused(x * 2)
        return first, unfused(first + 1)

    out, (code,) = run_and_get_code(
        fusion_passes.compile(fn, PassConfig(extra_fusions=(rule,)), report=report, fullgraph=True), x
    )
    torch.testing.assert_close(out, fn(x))
    assert report.count() == 2
    assert code.count("torch.ops.fusion_passes_tests.relu_squared_out.default(") == 2
    assert len(re.findall(r"^ +cpp_fused_\w+\(", code, re.MULTILINE)) == 2, "x * 2 and first + 1, no copy"
