"""Kernels compiled for Hopper without a card: what the compiler refuses and the interpreter takes, registers, memory.

Triton either interprets or compiles in a process, so the compiler runs in one of its own.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str) -> list[list[str]]:
    """The words of each line that a script prints, in a process that does not interpret."""
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def build(kernel, fixed, types, **options):
    """A kernel with these constants, everything else of the given type, i32 by default, and divisible by 16 where the
    kernel is specialised on that."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    given = {p.name: "constexpr" if p.name in fixed else types.get(p.name, "i32") for p in kernel.params}
    whole = [p for p in kernel.params if given[p.name] not in ("constexpr", "fp32") and not p.do_not_specialize]
    attributes = {(p.num,): [["tt.divisibility", 16]] for p in whole}
    source = compiler.ASTSource(kernel, given, fixed, attributes)
    return compiler.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(made):
    """Registers of a thread, bytes of its stack, bytes of shared memory of a program."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        use = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", use)[1]) for name in ("REG", "STACK"))
    return registers, stack, made.metadata.shared
