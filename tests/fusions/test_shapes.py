"""Dynamic sizes: compiled once and run with many, with the graphs and guards of the stock compiler."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusion_passes import PostGradPassManager, Report
from fusion_passes.ops.attention_quant import KERNELS, AttentionQuantArguments, why_unsupported
from fusion_passes.testing import capture_traced, print_graph
from tests.fusions.accuracy import check, check_layout
from tests.fusions.cases import FIRST, each, first_of_each, varied
from tests.fusions.without_code import FUSE, STOCK, WithoutCode, shape_env_of

# Primes, powers of two, multiples of no block; 4, 8 and 64 are also the number of heads, its double, the head size.
SIZES = (7, 2, 3, 4, 5, 6, 8, 11, 13, 17, 19, 23, 31, 32, 33, 64, 65, 67, 97, 127)


def marked(case, tokens):
    inputs = case.inputs(tokens, "cpu")
    for i, dimension in case.dynamic:
        torch._dynamo.mark_dynamic(inputs[i], dimension)
    return inputs


@each(lambda case: case.fuses and case.dynamic and (case in FIRST or case.strided))
@torch.no_grad()
def test_one_graph_for_twenty_sizes(rule, case):
    one_graph_for_twenty_sizes(rule, case)


@pytest.mark.slow
@each(lambda case: case.fuses and case.dynamic and not (case in FIRST or case.strided))
@torch.no_grad()
def test_one_graph_for_twenty_sizes_in_every_spelling(rule, case):
    one_graph_for_twenty_sizes(rule, case)


def one_graph_for_twenty_sizes(rule, case):
    run = WithoutCode(case.fn)
    for tokens in SIZES:
        inputs = marked(case, tokens) if tokens == SIZES[0] else case.inputs(tokens, "cpu")
        outputs = run(*inputs)
        if tokens in (2, 4, 33, 64):
            check(outputs, case.fn(*inputs), case.reference(*inputs))
    assert len(run.after) == 1, f"compiled {len(run.after)} graphs"
    assert run.report.count(rule=rule) == 1
    assert run.new_guards == [[]]


@each(lambda case: case.all_symbolic and case in FIRST)
@torch.no_grad()
def test_one_token_and_dynamic_true_compile_as_often_as_stock(rule, case):
    """Size 1 is a graph of its own in stock torch.compile too."""
    ours, stock = WithoutCode(case.fn, dynamic=True), WithoutCode(case.fn, STOCK, dynamic=True)
    for tokens in (7, 1, 13):
        inputs = case.inputs(tokens, "cpu")
        check(ours(*inputs), stock(*inputs), case.reference(*inputs))
    assert ours.before == stock.before
    assert ours.fused == len(ours.after)
    assert not any(ours.new_guards)


@first_of_each
@torch.no_grad()
def test_static_sizes_that_become_dynamic(rule, case):
    """As by default: the first size is static, the second makes the dimension dynamic."""
    ours, stock = WithoutCode(case.fn), WithoutCode(case.fn, STOCK)
    for tokens in (7, 9, 64):
        inputs = case.inputs(tokens, "cpu")
        check(ours(*inputs), stock(*inputs), case.reference(*inputs))
    assert ours.before == stock.before
    assert len(ours.after) == 2
    assert ours.fused == 2


@each(lambda case: not case.fuses and case.cuda)
@torch.no_grad()
def test_a_refusal_adds_no_guard(rule, case):
    """Conditions on symbolic sizes are asked without deciding them."""
    inputs = case.inputs(7, "cpu")
    marks = [(x, dim) for x in inputs for dim, size in enumerate(x.shape) if size > 1]
    graph = capture_traced(case.fn, *inputs, mark_dynamic=marks)
    env, before, report = shape_env_of(graph), print_graph(graph), Report()
    guards = list(env.guards)
    PostGradPassManager(FUSE, report)(graph)
    assert report.count() == 0
    assert print_graph(graph) == before
    assert env.guards == guards


@torch.no_grad()
def test_a_new_guard_would_be_seen():
    """The check itself: a pass that decides on a symbolic size."""
    run = WithoutCode(lambda x: x.sin(), dynamic=True)

    def decide(graph):
        (x,) = (n.meta["val"] for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor))
        assert bool(x.shape[0] * 3 > 10)

    run.manager = decide
    run(torch.randn(7, 5))
    assert len(run.new_guards[0]) == 1
    x = torch.randn(7, 5)
    graph = capture_traced(torch.sin, x, mark_dynamic=[(x, 0)])
    env = shape_env_of(graph)
    guards = len(env.guards)
    decide(graph)
    assert len(env.guards) == guards + 1


@first_of_each
@torch.no_grad()
def test_a_graph_with_every_size_symbolic_in_one_input_and_static_in_another(rule, case):
    """Only the first of the sizes that vary together is marked: the compiler finds the others equal, or static."""
    (i, dimension), *_ = case.dynamic
    ours, stock = WithoutCode(case.fn), WithoutCode(case.fn, STOCK)
    for run in (ours, stock):
        inputs = case.inputs(7, "cpu")
        torch._dynamo.maybe_mark_dynamic(inputs[i], dimension)
        run(*inputs)
    assert ours.before == stock.before
    assert ours.fused == 1
    assert not any(ours.new_guards)


@varied
@torch.no_grad()
def test_no_tokens(rule, case):
    inputs = case.inputs(0, "cpu")
    outputs, stock = WithoutCode(case.fn)(*inputs), WithoutCode(case.fn, STOCK)(*inputs)
    for x, y in zip(*map(torch.utils._pytree.tree_leaves, (outputs, stock)), strict=True):
        check_layout(x, y)
        assert x.numel() == 0


def test_the_limits_of_kernels_add_no_guard():
    """Asked of every size as a symbol: what is not known is refused."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims = [DimDynamic.DYNAMIC] * 4
    context = StatelessSymbolicContext(dynamic_sizes=dims)
    q, k, v = (mode.from_tensor(torch.empty(2, 4, n, 64), symbolic_context=context) for n in (7, 9, 9))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    before = len(mode.shape_env.guards)
    for kernel in KERNELS:
        assert "has no head size" in kernel.unsupported(AttentionQuantArguments(q, k, v), (9, 0))
    assert "has no head size" in why_unsupported(AttentionQuantArguments(q, k, v), (9, 0))
    assert len(mode.shape_env.guards) == before
