"""Mutation, aliasing, other uses: what the graph does beside the fusion stays done, in its order, with no copy more."""

import copy
import re

import torch
from torch._inductor.utils import get_code
from torch.fx import GraphModule

import fusion_passes
from fusion_passes import PostGradPassManager, Report
from fusion_passes.quant import FP8_DTYPES
from fusion_passes.testing import capture, print_graph
from tests.fusions.accuracy import check
from tests.fusions.cases import FIRST, each, first_of_each, op_of, varied
from tests.fusions.without_code import FUSE, STOCK, WithoutCode

_library = torch.library.Library("fusion_passes_effects", "FRAGMENT")


def _define(schema, cpu, fake):
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, cpu, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusion_passes_effects::{name}", fake, lib=_library)
    return getattr(torch.ops.fusion_passes_effects, name)


LOG: list[float] = []
count_up = _define(
    "count_up(Tensor(a!) counter) -> ()", lambda counter: (counter.add_(1), None)[1], lambda counter: None
)
write_and_return = _define(
    "write_and_return(Tensor x, Tensor(a!) out, Tensor? result=None) -> Tensor",
    lambda x, out, result=None: (out.copy_(x), x * 2.0)[1],
    lambda x, out, result=None: torch.empty_like(x),
)
log_mean = _define("log_mean(Tensor x) -> ()", lambda x: LOG.append(float(x.float().mean())), lambda x: None)
own_quantize = _define(
    "own_quantize(Tensor result, Tensor out_scale, *, Tensor? out=None) -> Tensor",
    lambda result, out_scale, out=None: (result.float() / out_scale).clamp(-448, 448).to(torch.float8_e4m3fn),
    lambda result, out_scale, out=None: torch.empty_like(result, dtype=torch.float8_e4m3fn),
)
torch.fx.node.has_side_effect(log_mean.default)


def results(fn, inputs, config):
    """The outputs, the inputs after the call, and what was compiled."""
    inputs = torch.utils._pytree.tree_map(torch.clone, inputs)
    run = WithoutCode(fn, config)
    with torch.no_grad():
        return run(*inputs), inputs, run


def check_same_as_stock(fn, inputs, exact, places=1):
    """Fused, right, and every input written as the stock graph writes it."""
    outputs, written, run = results(fn, inputs, FUSE)
    stock, stock_written, _ = results(fn, inputs, STOCK)
    assert run.fused == places, run.report
    for x, y in zip(*(torch.utils._pytree.tree_leaves(w) for w in (written, stock_written)), strict=True):
        assert torch.equal(x, y)
    check(outputs, stock, exact)
    return outputs


@varied
def test_an_unknown_mutable_op_beside_it(rule, case):
    inputs, counter, out = case.inputs(7, "cpu"), torch.zeros(3), torch.zeros(2, 3)

    def fn(inputs, counter, out):
        count_up(counter)
        codes = case.fn(*inputs)
        doubled = write_and_return(counter.expand(2, 3), out)
        count_up(counter)
        return codes, doubled + counter

    check_same_as_stock(fn, (inputs, counter, out), (case.reference(*inputs), torch.full((2, 3), 4.0)))


@first_of_each
def test_two_places_with_an_in_place_op_on_another_tensor_between(rule, case):
    inputs, counter = case.inputs(7, "cpu"), torch.zeros(3)

    def fn(inputs, counter):
        first = case.fn(*inputs)
        counter.mul_(2).add_(1)
        count_up(counter)
        return first, case.fn(*inputs)

    exact = case.reference(*inputs)
    check_same_as_stock(fn, (inputs, counter), (exact, exact), places=2)


@varied
def test_an_input_that_is_changed_in_place_between_the_places(rule, case):
    """The second place reads the new value, the first the old one."""
    inputs = case.inputs(7, "cpu")
    floating = next(i for i, x in enumerate(inputs) if is_high_precision(x) and 0 not in x.stride())

    def fn(*inputs):
        first = case.fn(*inputs)
        inputs[floating].mul_(-0.5)
        return first, case.fn(*inputs)

    changed = [x * -0.5 if i == floating else x for i, x in enumerate(inputs)]
    check_same_as_stock(fn, inputs, (case.reference(*inputs), case.reference(*changed)), places=2)


@each(lambda case: case.fuses and case.output_scale and (case in FIRST or case.strided))
def test_a_write_to_an_input_inside_the_match_is_declined(rule, case):
    """In a graph that is not functional: an op that writes, anywhere between the nodes that are fused."""
    with torch.no_grad():
        (graph,) = capture(case.fn, *case.inputs(7, "cpu"))
    placeholders = [n.name for n in graph.find_nodes(op="placeholder")]
    for name in placeholders:
        module = GraphModule(graph.owning_module, copy.deepcopy(graph))
        written = next(n for n in module.graph.nodes if n.name == name)
        (last,) = (n for n in module.graph.nodes if n.op == "call_function" and is_fp8(n))
        with module.graph.inserting_before(last):
            module.graph.call_function(torch.ops.aten.mul_.Scalar, (written, 2.0)).meta["val"] = written.meta["val"]
        before, report = print_graph(module.graph), Report()
        PostGradPassManager(FUSE, report)(module.graph)
        assert report.count() == 0
        assert "writes to an input between" in "\n".join(report.declined(rule))
        assert print_graph(module.graph) == before


@each(lambda case: case.scales and (case in FIRST or case.strided))
def test_a_scale_that_an_unknown_op_changes_between_the_places(rule, case):
    inputs = case.inputs(7, "cpu")

    def fn(*inputs):
        first = case.fn(*inputs)
        for i in case.scales:
            count_up(inputs[i])
        return first, case.fn(*inputs)

    changed = list(inputs)
    for i in case.scales:
        changed[i] = changed[i] + 1
    check_same_as_stock(fn, inputs, (case.reference(*inputs), case.reference(*changed)), places=2)


@first_of_each
def test_an_op_for_its_side_effect_alone_survives(rule, case):
    inputs, x = case.inputs(7, "cpu"), torch.full((4,), 2.5)

    def fn(inputs, x):
        log_mean(x)
        codes = case.fn(*inputs)
        log_mean(x * 2.0)
        return codes

    LOG.clear()
    _, _, run = results(fn, (inputs, x), FUSE)
    assert run.fused == 1
    assert LOG == [2.5, 5.0]


@varied
@torch.no_grad()
def test_codes_that_are_used_several_times(rule, case):
    """By a view, by an op, and as an output: the fused op's output takes every use."""
    inputs = case.inputs(7, "cpu")

    def fn(*inputs):
        codes = first_output(case.fn(*inputs))
        return codes, codes.float().cos(), codes.flatten()

    run = WithoutCode(fn)
    codes, cosine, flat = run(*inputs)
    assert run.fused == 1
    assert torch.equal(cosine, codes.float().cos())
    assert torch.equal(flat.view(torch.uint8), codes.flatten().view(torch.uint8))


@first_of_each
@torch.no_grad()
def test_other_uses_of_the_inputs_do_not_matter(rule, case):
    inputs = case.inputs(7, "cpu")
    run = WithoutCode(lambda *inputs: (case.fn(*inputs), [x.float().sin() for x in inputs]))
    _, sines = run(*inputs)
    assert run.fused == 1
    assert all(torch.equal(sine, x.float().sin()) for sine, x in zip(sines, inputs, strict=True))


@first_of_each
@torch.no_grad()
def test_a_users_op_with_parameters_named_out_and_result_is_no_mutation(rule, case):
    """`out_scale` and `out` are names, not effects: the schema says what is written."""
    inputs, scale = case.inputs(7, "cpu"), torch.tensor(0.5)
    other = torch.randn(4)

    def fn(inputs, other, scale):
        before = own_quantize(other, scale, out=other)
        codes = case.fn(*inputs)
        return before, codes, own_quantize(inputs[0], scale)

    run = WithoutCode(fn)
    run(inputs, other, scale)
    assert run.fused == 1


@varied
@torch.no_grad()
def test_outputs_share_memory_only_as_in_the_stock_graph(rule, case):
    inputs = case.inputs(7, "cpu")
    fused_out, stock_out = WithoutCode(case.fn)(*inputs), WithoutCode(case.fn, STOCK)(*inputs)

    def shared(outputs):
        storages = [x.untyped_storage().data_ptr() for x in (*inputs, *torch.utils._pytree.tree_leaves(outputs))]
        return [[a == b for b in storages] for a in storages]

    assert shared(fused_out) == shared(stock_out)


def is_high_precision(x):
    return x.dtype.is_floating_point and x.dtype not in FP8_DTYPES


def is_fp8(node):
    """The node that makes FP8 codes of something else."""

    def holds(n):
        tensors = torch.utils._pytree.tree_leaves(n.meta.get("val"))
        return any(getattr(x, "dtype", None) in FP8_DTYPES for x in tensors)

    return holds(node) and not any(holds(n) for n in node.all_input_nodes)


def first_output(outputs):
    return torch.utils._pytree.tree_leaves(outputs)[0]


def code_of(compiled, inputs):
    with torch.no_grad():
        return "\n".join(get_code(compiled, *inputs))


def kernels(code):
    """Names of the kernels that the wrapper calls."""
    return re.findall(r"^\s+(?:cpp_fused_|triton_\w*fused_)\w+(?=\(|\.run)", code, re.MULTILINE)


CODE_CASES = (
    *("causal", "packed", "tokens x hidden", "contiguous", "codes made contiguous", "permuted", "halves"),
    *("paged: tokens x hidden", "groups: codes alone"),
)


@each(lambda case: case.fuses and case.name in CODE_CASES)
def test_fewer_kernels_and_no_copy_in_the_generated_code(rule, case):
    """The fused op writes the layout that is wanted: nothing is left to a kernel of Inductor's."""
    inputs = case.inputs(7, "cpu")
    ours = code_of(fusion_passes.compile(case.fn, FUSE), inputs)
    assert f"torch.ops.{op_of(rule, case)}" in ours
    assert kernels(ours) == []
    if case in FIRST:
        assert kernels(code_of(torch.compile(case.fn), inputs)), "the count of kernels cannot see one"


@first_of_each
@torch.no_grad()
def test_a_copy_that_a_consumer_needs_stays(rule, case):
    """Codes asked for in a layout that is not the op's: the graph's strides are kept."""
    inputs = case.inputs(7, "cpu")

    def fn(*inputs):
        return first_output(case.fn(*inputs)).transpose(-1, -2).contiguous()

    (graph,) = capture(fn, *inputs)
    stock = fn(*inputs)
    run = WithoutCode(fn)
    out = run(*inputs)
    assert run.fused == 1
    assert out.stride() == stock.stride()
    assert "contiguous_format" in print_graph(graph)
    check(out, stock, first_output(case.reference(*inputs)).transpose(-1, -2))


@varied
@torch.no_grad()
def test_only_dead_nodes_of_the_match_are_erased(rule, case):
    """A dead op of the user's own, and a random one, are not ours to remove."""
    inputs = case.inputs(7, "cpu")
    run = WithoutCode(lambda *inputs: (case.fn(*inputs), torch.rand(3)))
    _, random = run(*inputs)
    assert run.fused == 1
    assert len(random.unique()) == 3
