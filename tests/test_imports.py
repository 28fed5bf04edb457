"""What may import what, what the package needs to be imported, and what that costs."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fusion_passes"

# A module imports from its own group and from those above it.  A package stands for its modules, unless they are named.
LAYERS = (
    ("quant", "reference", "custom_ops"),
    ("graph",),
    ("kernels",),  # reached by name, from ops
    ("ops",),
    ("nn",),
    ("models",),
    ("measured",),
    ("idioms",),
    ("fusions",),
    ("compiler.config", "compiler.report", "compiler.inductor", "compiler.in_place", "compiler.cache_key"),
    ("compiler.compiled", "compiler.debug", "compiler.fuse"),
    ("compiler.manager",),
    ("compiler.switch", "compiler.registration"),
    ("tools",),
    ("testing",),
    ("__main__",),
)
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
LAYER = {name: depth for depth, group in enumerate(LAYERS) for name in group}
PRIVATE = ("compiler.inductor", "fusions.traced.tracing", "testing")
"""What may know Inductor's private surface."""
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports: at the top, in a function, and for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from a import b` may mean the module a.b; naming both does no harm.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_of(path: Path) -> str:
    """The name below the package, such as "graph.read"; "" is the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def layer_of(module: str) -> int | None:
    """The layer of a module by its name below the package; None of what belongs to no layer: a package's __init__ whose
    modules have layers of their own, or the package itself."""
    names = [name for name in LAYER if within(module, name)]
    return LAYER[max(names, key=len)] if names else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    module = module_of(path)
    assert layer_of(module) is not None or path.name == "__init__.py", f"{module} has no place in LAYERS"
    for name in imports(path):
        assert not within(name, "triton") or within(module, "kernels"), f"only kernels/ imports triton, not {module}"
        if within(name, "torch._inductor"):
            assert any(within(module, private) for private in PRIVATE), (
                f"{module} imports {name}; ask compiler.inductor"
            )
        target = layer_of(name.removeprefix("fusion_passes.")) if within(name, "fusion_passes") else None
        if target is not None and module:
            assert layer_of(module) is not None, (
                f"{module} imports {name}; an __init__ above several layers imports none"
            )
            assert target <= layer_of(module), f"{module} imports {name}, which is built on it"


def test_no_cycles():
    files = {module_of(path): path for path in FILES}
    needs = {module: {file_of(name, files) for name in imports(path)} - {""} for module, path in files.items()}
    assert strongly_connected(needs) == []


def file_of(name: str, files: dict[str, Path]) -> str:
    """The module of the package that an import needs: `a.b` may be a module, or a name in `a`; "" for none."""
    module = name.removeprefix("fusion_passes.")
    return module if module in files else module.rpartition(".")[0] if module.rpartition(".")[0] in files else ""


def strongly_connected(needs: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that need each other."""
    reached = {module: closure(module, needs) for module in needs}
    groups = {frozenset(m for m in reached[module] if module in reached.get(m, ())) for module in needs}
    return sorted((set(group) for group in groups if group), key=sorted)


def closure(module: str, needs: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    work = [*needs[module]]
    while work:
        if (name := work.pop()) not in found:
            found.add(name)
            work += needs.get(name, ())
    return found


def test_cycles_are_found():
    assert strongly_connected({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


def test_the_design_names_every_layer():
    layers = DESIGN.read_text().split("## Layers")[1]
    assert [name for name in LAYER if not re.search(rf"\b{name.rpartition('.')[2]}\b", layers)] == []


def test_checker_sees_imports(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hidden\nelse:\n    import shown\n"
        "def f():\n    import triton.language as tl\n    from torch._inductor import config\n"
    )
    found = {"typing.TYPE_CHECKING", "hidden", "shown", "triton.language", "torch._inductor.config"}
    assert {*imports(file)} == found


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


@pytest.mark.timed
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
