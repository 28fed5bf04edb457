"""The example of docs/writing-a-fusion.md: a rule outside the package, in under 40 lines, that fuses in a real
model."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.nn import quantize_
from fusion_passes.quant import codes, dtype_name, quantize
from fusion_passes.testing import capture, print_graph, run

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "silu_mul_quant.py"


def load():
    spec = importlib.util.spec_from_file_location("silu_mul_quant_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_out_of_tree_rule_fuses_a_feed_forward_layer(dtype):
    """Made for bf16 and three dimensions, it finds fp16 and two."""
    example, report = load(), Report()
    up, gate = (torch.randn(16, 32).to(dtype) / 4 for _ in range(2))
    x, scale = torch.randn(5, 32).to(dtype), torch.tensor(0.02)

    def feed_forward(x):
        g, u = F.linear(x, gate), F.linear(x, up)
        return quantize(F.silu(g) * u, scale)

    config = PassConfig(extra_fusions=(example.RULE,))
    with torch.no_grad():
        fused = fusion_passes.compile(feed_forward, config, report=report, fullgraph=True)(x)
        unfused = feed_forward(x)
    (site,) = report.sites
    assert (site.rule, site.status) == ("silu_mul_quant", "fused")
    name = dtype_name(dtype)
    assert site.what == f"gate {name} [5, 16], up {name} [5, 16], scale float32 []"
    steps = (codes(fused) - codes(unfused)).abs()
    assert steps.max() <= 1
    assert (steps == 0).float().mean() > 0.5, "16 bits round between the ops of the unfused graph, the op does not"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_it_fuses_every_layer_of_a_hugging_face_model(dtype):
    """Unmodified, with the library's own linear layers: the gate's output on its way to the last one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).to(dtype).eval()
    quantize_(model, {name: 0.02 for name, _ in model.named_modules() if name.endswith("_proj")})
    tokens = torch.randint(0, 64, (2, 5))
    (graph,) = capture(model, tokens, use_cache=False)
    (before,), report = run(graph), Report()
    PostGradPassManager(PassConfig(extra_fusions=(load().RULE,)), report)(graph)
    assert report.count(rule="silu_mul_quant") == 2, report
    text = print_graph(graph)
    assert text.count("= examples.silu_mul_quant.default") == 2
    assert "aten.exp.default" not in text
    torch.testing.assert_close(run(graph)[0], before, rtol=0.1, atol=0.1 * before.abs().max().item())


def test_it_is_under_40_lines_and_the_docs_show_it():
    source = FILE.read_text()
    assert len(source.splitlines()) < 40
    shown = (ROOT / "docs" / "writing-a-fusion.md").read_text()
    body = source.split('"""\n', 1)[1].strip()
    assert body in shown, "docs/writing-a-fusion.md must show the example as it is"


SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "writing-a-fusion.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if "import " in s], ids=lambda s: s.split("\n")[0])
def test_the_docs_import_what_exists_and_is_used(snippet):
    tree = ast.parse(snippet)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            assert {alias.name for alias in node.names} <= used, ast.unparse(node)


def test_the_docs_name_what_belongs_to_a_fusion():
    """Paths of the guide to a fusion inside the library, which a rename would leave behind."""
    package = ROOT / "fusion_passes"
    guide = (ROOT / "docs" / "writing-a-fusion.md").read_text().split("## A fusion inside the library")[1]
    for pattern in ("fusions/<name>.py", "measured/<name>.py", "ops/<name>.py", "kernels/<name>.py"):
        assert f"`{pattern}`" in guide
    for rule in FUSIONS:
        assert (package / "fusions" / f"{rule.name}.py").exists()
        assert (package / "measured" / f"{rule.name}.py").exists()
        assert (ROOT / "tests" / "fusions" / f"{rule.name}_cases.py").exists()
