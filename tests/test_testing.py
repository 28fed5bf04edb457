"""The tools for tests, tested."""

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fusion_passes.idioms.page import spellings_page
from fusion_passes.testing import EXPANSIONS, capture, capture_cuda, print_graph, run, same_codes

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def quantize(x, scale):
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4M3)


def test_capture_runs_without_code_generation():
    x, scale = torch.randn(3, 8), torch.tensor(0.5)
    (graph,) = capture(quantize, x, scale)
    assert same_codes(run(graph)[0], quantize(x, scale), max_steps=0) == 0
    y = torch.randn(3, 8)
    assert same_codes(run(graph, y, scale)[0], quantize(y, scale), max_steps=0) == 0


def test_capture_leaves_nothing_behind():
    before = inductor_config.post_grad_custom_post_pass, inductor_config.fx_graph_cache
    capture(lambda x: x + 1, torch.ones(2))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
        capture(lambda x: x @ torch.ones(7), torch.ones(2))
    assert (inductor_config.post_grad_custom_post_pass, inductor_config.fx_graph_cache) == before
    torch.manual_seed(0)
    torch.testing.assert_close(
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2)), torch.full((2,), 2.0)
    )


def test_capture_after_a_graph_break_and_in_training():
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    assert len(capture(broken, torch.ones(2))) == 2
    x = torch.ones(2, requires_grad=True)
    forward, *_ = capture(lambda x: (x * x).sin(), x)
    assert len(run(forward)) > 1  # what the backward needs


def test_capture_with_dynamic_sizes():
    x = torch.randn(4, 8)
    (graph,) = capture(lambda x: x.float() * 2, x, mark_dynamic=[(x, 0)])
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.nodes)
    torch.testing.assert_close(run(graph)[0], x * 2)


def test_capture_takes_keyword_arguments_and_modules():
    module = nn.Linear(4, 4)
    with torch.no_grad():
        (graph,) = capture(module, input=torch.ones(2, 4))
        torch.testing.assert_close(run(graph)[0], module(torch.ones(2, 4)))


def test_a_captured_graph_is_a_copy_that_can_be_rewritten():
    (graph,) = capture(lambda x: x.relu() + 1, torch.ones(2))
    (relu,) = (node for node in graph.nodes if "relu" in node.name)
    relu.target = torch.ops.aten.neg.default
    torch.testing.assert_close(run(graph)[0], torch.zeros(2))


@pytest.mark.parametrize("backend", EXPANSIONS)
def test_capture_cuda(backend):
    q = torch.randn(1, 2, 5, 20, dtype=BF16)

    def attention(q):
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x.transpose(1, 2).contiguous()[:, -1, None, ..., 2:]

    graph = capture_cuda(attention, q, backend=backend)
    assert {node.meta["val"].device.type for node in graph.find_nodes(op="placeholder")} == {"cuda"}
    assert (f"_scaled_dot_product_{backend}_attention" in print_graph(graph)) == (backend != "math")
    torch.testing.assert_close(run(graph)[0], attention(q), atol=1e-2, rtol=1e-2)


def test_capture_cuda_of_a_module_and_a_tree_of_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, inputs, flag, bias=None):
            x = self.linear(inputs["x"]) + torch.arange(4, device=inputs["x"].device)
            return {"out": quantize(x + bias if flag else x, self.scale)}

    model, x, bias = Model(), torch.randn(3, 4), torch.ones(4)
    graph = capture_cuda(model, {"x": x}, True, bias=bias)
    assert len(graph.find_nodes(op="placeholder")) == 5
    with torch.no_grad():
        assert same_codes(run(graph)[0], model({"x": x}, True, bias=bias)["out"], max_steps=1) == 0
    assert not isinstance(model.linear.weight, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_capture_cuda_with_dynamic_sizes(backend):
    q = torch.randn(2, 4, 5, 16, dtype=BF16)

    def attention(q):
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    graph = capture_cuda(attention, q, backend=backend, mark_dynamic=[(q, 0), (q, 2)])
    (placeholder,) = graph.find_nodes(op="placeholder")
    assert [type(size) for size in placeholder.meta["val"].shape] == [torch.SymInt, int, torch.SymInt, int]
    for batch, length in ((2, 5), (3, 9)):
        q = torch.randn(batch, 4, length, 16, dtype=BF16)
        torch.testing.assert_close(run(graph, q)[0], attention(q), atol=1e-2, rtol=1e-2)


def test_capture_cuda_says_what_it_cannot_do():
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match="backend must be one of cudnn, flash, efficient, math, got 'cuda'"):
        capture_cuda(F.scaled_dot_product_attention, q, q, q, backend="cuda")
    with pytest.raises(ValueError, match="takes no mask"):
        capture_cuda(F.scaled_dot_product_attention, q, q, q, torch.ones(5, 5) > 0, backend="flash")
    with pytest.raises(ValueError, match="dropout"):
        capture_cuda(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), q)


def test_print_graph():
    (graph,) = capture(quantize, torch.randn(3, 8, dtype=BF16), torch.tensor(0.5))
    assert_expected_inline(
        print_graph(graph),
        """\
arg0_1: bf16[3, 8]
arg1_1: f32[]
convert_element_type: f32[3, 8] = prims.convert_element_type.default(arg0_1, f32)
div: f32[3, 8] = aten.div.Tensor(convert_element_type, arg1_1)
clamp_min: f32[3, 8] = aten.clamp_min.default(div, -448.0)
clamp_max: f32[3, 8] = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type_1: f8e4m3fn[3, 8] = prims.convert_element_type.default(clamp_max, f8e4m3fn)
return [convert_element_type_1]""",
    )


def test_same_codes():
    a = torch.tensor([1.0, 1.125, -2.0, 448.0]).to(E4M3)
    b = torch.tensor([1.0, 1.0, -2.0, 448.0]).to(E4M3)
    assert same_codes(a, a, max_steps=0) == 0
    assert same_codes(a, b) == 0.25
    with pytest.raises(
        AssertionError, match=r"1 of 4 codes differ by more than 0 steps; the worst is 1\.125 where 1 was"
    ):
        same_codes(a, b, max_steps=0)
    with pytest.raises(AssertionError, match="is not"):
        same_codes(a, b.float())
    with pytest.raises(AssertionError, match="differ by more than 1"):
        same_codes(a, torch.tensor([1.0, 1.125, -2.0, float("nan")]).to(E4M3))


def test_page_of_spellings_is_up_to_date(request):
    page = request.config.rootpath / "docs" / "spellings.md"
    command = "python -m fusion_passes.idioms.page > docs/spellings.md"
    assert page.read_text() == spellings_page(), f"out of date: {command}"
