"""Programs in processes of their own, which begin without this package: forked from one that has imported torch.

Importing torch and Inductor is most of what a short program costs in a new process.  Here one process imports them,
and nothing else; each program runs in a fork of it, with its own folder, environment and modules.  What torch reads
from the environment when it is imported is as in the first process, and so is the seed of Python's hashes: a test that
is about these starts a process itself.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import json, os, runpy, sys, traceback
import torch, torch._inductor.compile_fx

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 0
        try:
            for stream, number in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(asked[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(asked["folder"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            sys.argv = asked["command"]
            paths = asked["environment"].get("PYTHONPATH")
            sys.path[:1] = [os.path.dirname(os.path.abspath(sys.argv[0])), *(paths.split(os.pathsep) if paths else ())]
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends when its input does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, cwd="/", env=environment
    )
    atexit.register(server.communicate)
    return server


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`python command…` in `folder`, as subprocess.run with its output captured.  command: a file and its arguments."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as written:
        streams = {name: str(Path(written) / name) for name in ("stdout", "stderr")}
        asked = {"command": command, "folder": str(folder), "environment": environment, **streams}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, *(Path(path).read_text() for path in streams.values()))
