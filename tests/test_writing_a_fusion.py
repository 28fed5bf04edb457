"""The example of docs/writing-a-fusion.md: a rule outside the package, in under 40 lines, that fuses in a real
model."""

import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.quant import codes

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "silu_mul_quant.py"


def load():
    spec = importlib.util.spec_from_file_location("silu_mul_quant_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_out_of_tree_rule_fuses_a_feed_forward_layer():
    example, report = load(), Report()
    up, gate = (torch.randn(16, 32, dtype=torch.bfloat16) / 4 for _ in range(2))
    x, scale = torch.randn(5, 32, dtype=torch.bfloat16), torch.tensor(0.02)

    def feed_forward(x):
        g, u = F.linear(x, gate), F.linear(x, up)
        return (F.silu(g) * u / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    config = PassConfig(extra_fusions=(example.RULE,))
    with torch.no_grad():
        fused = fusion_passes.compile(feed_forward, config, report=report, fullgraph=True)(x)
        unfused = feed_forward(x)
    (site,) = report.sites
    assert (site.rule, site.status) == ("silu_mul_quant", "fused")
    assert site.what == "gate bfloat16 [5, 16], up bfloat16 [5, 16], scale float32 []"
    steps = (codes(fused) - codes(unfused)).abs()
    assert steps.max() <= 1
    assert (steps == 0).float().mean() > 0.5, "bf16 rounds between the ops of the unfused graph, the op does not"


def test_it_is_under_40_lines_and_the_docs_show_it():
    source = FILE.read_text()
    assert len(source.splitlines()) < 40
    shown = (ROOT / "docs" / "writing-a-fusion.md").read_text()
    body = source.split('"""\n', 1)[1].strip()
    assert body in shown, "docs/writing-a-fusion.md must show the example as it is"
