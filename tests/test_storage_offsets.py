"""The fault of torch that docs/torch-storage-offsets.md describes is there, and the passes do not change it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_passes

PAGE = Path(__file__).parents[1] / "docs" / "torch-storage-offsets.md"
COMPILERS = ("torch.compile", "fusion_passes.compile")
COPIES_ARE_RIGHT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def programs(compiler):
    """The page's programs: one that writes inside of its base, one that writes past the end, one that is copied."""
    inside, past, copied = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    library = f"example_{compiler.split('.')[0]}"  # a process registers an op once
    return [code.replace("torch.compile", compiler).replace("example", library) for code in (inside, past, copied)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_part_of_an_input_and_a_copy_of_one(compiler):
    """Once torch has mended it, the page says since when."""
    inside, _, copied = programs(compiler)
    told = {"fusion_passes": fusion_passes}
    torch._dynamo.reset()
    exec(inside, told)
    assert told["eager"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert told["compiled"].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    exec(copied, told)
    right, shifted = [0.0, 2.0, 3.0, 4.0, 5.0, 5.0, 6.0, 7.0], [0.0, 3.0, 4.0, 5.0, 6.0, 5.0, 6.0, 7.0]
    assert told["copied"].tolist() == (right if COPIES_ARE_RIGHT else shifted)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_write_past_the_end(compiler):
    """In a process of its own, which may die of it before it can print."""
    inside, past, _ = programs(compiler)
    setup = inside.split("def f(x)")[0]
    script = f"import fusion_passes\n{setup}\n{past}\nprint('wrote', damaged[1].flatten().tolist(), flush=True)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "wrote" in done.stdout:
        assert f"wrote {[1.5] * 4 + [0.0] * 4}" in done.stdout, "eager torch adds 1 to these"
    else:
        assert done.returncode < 0, done.stderr
