"""What may import what, what the package needs to be imported, and what that costs."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fusion_passes"

# A module imports from its own group and from those above it.
LAYERS = (
    ("quant", "reference", "symbolic", "custom_ops"),
    ("kernels",),  # reached by name, from ops
    ("ops",),
    ("nn",),
    ("models",),
    ("graph", "rule", "config", "report", "rewrite", "views", "measured", "effects", "in_place"),
    ("idioms",),
    ("fusions",),
    ("inductor", "cache_key", "compiled", "tracing", "search", "matcher", "debug", "manager", "switch", "registration"),
    ("table", "comparison", "places", "trial", "explanation", "machine", "testing", "__main__"),
)
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
LAYER = {name: depth for depth, group in enumerate(LAYERS) for name in group}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or in a function; not for type checkers alone."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from a import b` may mean the module a.b; naming both does no harm.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for module in imports(path):
        assert not within(module, "triton") or layer == "kernels", f"only kernels/ imports triton, not {path.name}"
        if within(module, "torch._inductor"):
            assert layer in ("inductor", "tracing", "testing"), f"{layer} imports {module}; ask `inductor` for it"
        if within(module, "fusion_passes") and layer != "__init__":
            assert layer in LAYER, f"{layer} is new: give it a place in LAYERS"
            target = (module.split(".") + [""])[1]
            assert LAYER.get(target, 0) <= LAYER[layer], f"{layer} imports {target}, which is built on it"


def test_the_design_names_every_layer():
    layers = DESIGN.read_text().split("## Layers")[1]
    assert [name for name in LAYER if not re.search(rf"\b{name}\b", layers)] == []


def test_checker_sees_imports(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hidden\nelse:\n    import shown\n"
        "def f():\n    import triton.language as tl\n    from torch._inductor import config\n"
    )
    assert {*imports(file)} == {"typing.TYPE_CHECKING", "shown", "triton.language", "torch._inductor.config"}


def python(code: str, *, check: bool = True) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def test_without_triton_and_cuda():
    out = python(
        """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import torch
before = {m for m in sys.modules if m.startswith("torch._inductor")}
import fusion_passes, fusion_passes.nn, fusion_passes.models.llama, fusion_passes.quant, fusion_passes.ops
assert not torch.cuda.is_initialized()
print(sorted({m for m in sys.modules if m.startswith("torch._inductor")} - before))
q = torch.randn(1, 2, 3, 16)
print(fusion_passes.ops.attention_quant(q, q, q, None, torch.tensor(0.5), dtype=torch.float8_e4m3fn).shape)
"""
    )
    assert out.splitlines() == ["[]", "torch.Size([1, 2, 3, 16])"]


def test_import_time():
    # CPU time, and the best of several, because the machine may be busy.
    code = """
import time, torch
start = time.process_time()
import fusion_passes
print(time.process_time() - start)
"""
    best = 1.0
    for _ in range(5):
        best = min(best, float(python(code)))
        if best < 0.1:
            break
    assert best < 0.1, f"import fusion_passes takes {best * 1e3:.0f} ms beyond torch"
