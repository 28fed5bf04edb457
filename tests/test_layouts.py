"""What a rule puts into a graph gets the layout that it was judged by, and for that nothing is copied that stock's
Inductor would not copy for the same op in the user's own code."""

import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import Match, PassConfig, PostGradPassManager, Report, Rule, testing
from fusion_passes.graph.read import value
from fusion_passes.quant import quantize
from tests.fusions.accuracy import check
from tests.fusions.cases import first_of_each, op_of
from tests.generated_code import allocations, triton_code

CALLED: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
_library = torch.library.Library("fusion_passes_layouts", "FRAGMENT")
_library.define("sine(Tensor x) -> Tensor")  # without a tag, as most custom ops are


def _sine(x):
    CALLED.append((tuple(x.shape), x.stride()))
    return x.sin()


_library.impl("sine", _sine, "CompositeExplicitAutograd")
torch.library.register_fake("fusion_passes_layouts::sine", torch.empty_like, lib=_library)
sine = torch.ops.fusion_passes_layouts.sine.default


@dataclass(frozen=True)
class Sines(Rule[Match]):
    """Every sine becomes a call of an op that Inductor does not look into."""

    name = "sines"
    summary = "aten.sin as an opaque op"

    def pattern(self, idioms):
        for node in idioms.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            yield Match(node, frozenset({node}), (node.args[0],))

    def replacement(self, m, call):
        JUDGED.append((tuple(value(m.inputs[0]).shape), value(m.inputs[0]).stride()))
        return call(sine, m.inputs[0])


JUDGED: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
SINES = PassConfig(profitability="ignore", extra_fusions=(Sines(),))

LAYOUTS = {
    "transposed, contiguous, scaled": lambda x: x.transpose(-1, -2).contiguous() * 0.5,
    "transposed, scaled": lambda x: x.transpose(-1, -2) * 0.5,
    "scaled, transposed": lambda x: (x * 0.5).transpose(-1, -2),
    "expanded": lambda x: (x[:, :1] * 0.5).expand(-1, 4, -1, -1),
    "an expanded input": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "stride 0 in the last dimension": lambda x: (x[..., :1] * 0.5).expand(-1, -1, -1, 6),
    "sliced with an odd offset": lambda x: (x * 0.5)[..., 1:-1],
    "an input sliced with an odd offset": lambda x: x[..., 1:-1],
    "every second": lambda x: (x * 0.5)[..., ::2],
    "flipped": lambda x: x.permute(2, 0, 1, 3).flip(0),
    "overlapping windows": lambda x: (x * 0.5).unfold(-1, 8, 4),
    "channels last": lambda x: (x * 0.5).to(memory_format=torch.channels_last),
    "one with odd strides": lambda x: (x * 0.5)[:1, :1].transpose(0, 2),
    "a reduction with one row, transposed": lambda x: x.sum(1, keepdim=True).transpose(-1, -2),
    "concatenated, transposed": lambda x: torch.cat([x * 0.5, x], 1).transpose(1, 2),
    "rolled": lambda x: x.transpose(1, 2).roll(1, 0),
    "padded and cut": lambda x: F.pad(x * 0.5, (0, 3))[..., :-2],
    "also returned": lambda x: (x * 0.5).cos().transpose(1, 3),
    "nothing": lambda x: (x * 0.5)[:, :0].transpose(-1, -2),
    "a scalar": lambda x: x.mean(),
}


@pytest.fixture(autouse=True)
def _forget():
    CALLED.clear()
    JUDGED.clear()


def every_layout(x):
    return [torch.sin(layout(x)) for layout in LAYOUTS.values()]


@torch.no_grad()
def test_an_op_is_called_with_the_strides_it_was_judged_by():
    x = torch.randn(2, 4, 16, 64)
    outputs = fusion_passes.compile(every_layout, SINES)(x)
    assert len(CALLED) == len(LAYOUTS)
    assert sorted(CALLED) == sorted(JUDGED)  # Inductor may call them in another order
    for output, expected in zip(outputs, every_layout(x), strict=True):
        torch.testing.assert_close(output, expected)
        assert output.stride() == expected.stride()


@torch.no_grad()
def test_with_symbolic_sizes_too():
    names = "transposed, contiguous, scaled", "expanded", "every second", "rolled", "concatenated, transposed"
    layouts = [LAYOUTS[name] for name in names]
    report = Report()
    run = fusion_passes.compile(lambda x: [torch.sin(f(x)) for f in layouts], SINES, report=report, dynamic=True)
    for sizes in ((2, 4, 16, 64), (3, 6, 10, 32), (5, 8, 12, 20)):
        x = torch.randn(sizes)
        CALLED.clear()
        run(x)
        assert sorted(CALLED) == sorted((tuple(y.shape), y.stride()) for y in (f(x) for f in layouts))
    assert len(report.graphs) == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_copied_that_stock_would_not(name):
    """As many kernels, as much memory as where the user's code calls the op."""
    layout = LAYOUTS[name]
    x = torch.randn(2, 4, 16, 64)
    found = []
    for fn, config in (
        (lambda x: torch.sin(layout(x)), SINES),
        (lambda x: sine(layout(x)), PassConfig(level="O0")),
    ):
        torch.compiler.reset()
        code = triton_code(fn, x, config=config).split("def call")[1]
        assert "sine" in code
        found.append((len(re.findall(r"\.run\(", code)), allocations(code)))
    assert found[0] == found[1]


@first_of_each
@torch.no_grad()
def test_every_inserted_node_says_the_layout_of_its_arguments(rule, case):
    """An op that writes too, inside of the wrapper that makes it functional."""
    (graph,) = testing.capture(case.fn, *case.inputs(7, "cpu"))
    before = set(graph.nodes)
    PostGradPassManager(PassConfig(profitability="ignore"), Report())(graph)
    added = set(graph.nodes) - before
    assert any(op_of(rule, case).removeprefix("fusion_passes.") in str((node.target, node.args)) for node in added)
    for node in added:
        given = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        told, given = (torch.utils._pytree.tree_leaves(x) for x in (node.meta["eager_input_vals"], given))
        for x, y in zip(told, given, strict=True):
            assert x.stride() == y.stride() if isinstance(x, torch.Tensor) else x is y


OF_QUERIES = {
    "transposed, contiguous, scaled": lambda x: x.transpose(-1, -2).contiguous() * 0.5,
    "transposed, scaled": lambda x: x.transpose(-1, -2) * 0.5,
    "expanded": lambda x: (x[:, :1] * 0.5).expand(x.shape).transpose(-1, -2),
    "an expanded input": lambda x: x.transpose(-1, -2)[:, :1].expand(-1, x.shape[1], -1, -1),
    "stride 0 in the last dimension": lambda x: x.transpose(-1, -2)[..., :1].expand(-1, -1, -1, x.shape[2]),
    "sliced with an odd offset": lambda x: F.pad(x.transpose(-1, -2) * 0.5, (1, 2))[..., 1:-2],
    "flipped": lambda x: x.flip(0).transpose(-1, -2).contiguous().flip(2),
    "rolled": lambda x: x.permute(0, 3, 1, 2).roll(1, 0).transpose(1, 2),
}
"""Of [batch, heads, head size, length]; each makes [batch, heads, length, head size]."""
REFUSED_BY_TORCH_ON_CUDA = ("an expanded input", "stride 0 in the last dimension", "sliced with an odd offset")
"""torch's own attention raises there in eager mode: "query is not correctly aligned"."""
OF_DEVICE = {
    "cpu": [*OF_QUERIES.values()],
    "cuda": [lay_out for name, lay_out in OF_QUERIES.items() if name not in REFUSED_BY_TORCH_ON_CUDA],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("of", ["query", "all"])
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # torch computes in fp32 what its attention kernels do not take
@torch.no_grad()
def test_attention_with_any_layout_of_its_inputs(device, of):
    """All layouts in one program: fused, or told why not; and the codes are right."""

    def attend(x, key, value, s, *, dtype=torch.bfloat16):
        outputs = []
        for lay_out in OF_DEVICE[device]:
            others = lay_out if of == "all" else lambda x: x.transpose(-1, -2).contiguous()
            q, k, v = lay_out(x).to(dtype), others(key).to(dtype), others(value).to(dtype)
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            outputs.append(quantize(out, s) if dtype is torch.bfloat16 else out / s)
        return outputs

    tensors = [torch.randn(2, 4, 64, 32, device=device).to(torch.bfloat16) for _ in range(3)]
    scale = torch.tensor(0.02, device=device)
    report = Report()
    got = fusion_passes.compile(attend, PassConfig(profitability="ignore"), report=report)(*tensors, scale)
    assert len(report.graphs) == 1
    # On CUDA only where the last dimension is contiguous, since no kernel takes another.
    assert report.count() >= (3 if device == "cuda" else 7), str(report)
    exact = attend(*(x.float() for x in tensors), scale, dtype=torch.float32)
    check(got, attend(*tensors, scale), exact)
