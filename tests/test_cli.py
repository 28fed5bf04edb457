"""`python -m fusion_passes`: output, exit status, and errors that say what to do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from fusion_passes import __main__ as command_line
from fusion_passes.__main__ import main
from fusion_passes.fusions.attention_quant import AttentionQuant
from fusion_passes.fusions.builtin import FUSIONS
from fusion_passes.ops import support
from fusion_passes.ops.declare import OPS
from fusion_passes.tools import doctor as machine
from fusion_passes.tools.table import table

ROOT = Path(__file__).parents[1]
BUILD = """
import torch
from tests.models.attention_fp8_static_quant import AttentionFp8StaticQuantPatternModel

def build():
    model = AttentionFp8StaticQuantPatternModel(2, 1, 64)
    return model, model.example_inputs(1, 32), {}
"""
SMALL = "import torch\ndef build():\n    return torch.neg, (torch.ones(2),), {}\n"
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is there without a GPU")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes the user's file into the current directory; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # what main() adds to sys.path is taken out again

    def write(text, name="user_model.py"):
        (tmp_path / name).write_text(text)
        return name

    yield write
    sys.modules.pop("user_model", None)


def refused(capsys, *argv):
    """What the command says where it cannot do its work."""
    assert main(["explain", *argv]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    assert err.startswith("fusion_passes: ")
    return err.removeprefix("fusion_passes: ")


@cpu_only
def test_explain_without_a_gpu_ignores_profitability_and_says_so(file, capsys, tmp_path):
    assert main(["explain", file(BUILD), "--debug", "graphs"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("No GPU: no fused op is faster than stock torch.compile here")
    assert 'this run rewrites with profitability="ignore"' in " ".join(out.split())
    assert re.search("attention_quant +fused at 1 of 1 place", out)
    assert "compiling with the passes …" in err
    assert "graphs before and after: graphs" in err
    assert len(list((tmp_path / "graphs").iterdir())) == 1


@cpu_only
def test_explain_follows_an_explicit_choice_and_a_required_fusion_decides_the_status(file, capsys):
    name = file(BUILD + "\nCONFIG = {'profitability': 'measured'}\n")
    assert main(["explain", name, "--config", "attention_quant=required", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["unmet"] == ["attention_quant"]
    assert "No GPU" not in err
    assert "fusion_passes: required, and applied nowhere: attention_quant" in err


def test_explain_sets_switches(file, capsys):
    assert (
        main(
            [
                "explain",
                file(SMALL),
                "--config",
                "level=O1",
                "--config",
                "attention_quant=off",
                "--profitability=ignore",
            ]
        )
        == 0
    )
    assert re.search("attention_quant +switched off", capsys.readouterr().out)


def test_file_missing(capsys):
    assert refused(capsys, "absent.py").startswith("there is no file absent.py: give the path of a Python file")


def test_file_does_not_import(file, capsys):
    name = file("import torch\n\nheads = int(torch.ones(0).numel())\nwidth = 64 // heads\n")
    assert_expected_inline(
        refused(capsys, name),
        """\
user_model.py cannot be imported
  at user_model.py:4: width = 64 // heads
  ZeroDivisionError: integer division or modulo by zero
  (--traceback shows the whole traceback)
""",
    )


def test_file_with_a_syntax_error(file, capsys):
    told = refused(capsys, file("def build(:\n"))
    assert "user_model.py:1: def build(:" in told
    assert "SyntaxError: " in told


def test_file_that_exits(file, capsys):
    assert "SystemExit: 3" in refused(capsys, file("raise SystemExit(3)\n"))


def test_traceback_on_demand(file, capsys):
    assert main(["explain", file("1 / 0\n"), "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_file_imports_its_neighbours(file, capsys):
    file("from_neighbour = 1\n", "neighbour.py")
    assert "does not define a function build()" in refused(capsys, file("from neighbour import from_neighbour\n"))


def test_no_build(file, capsys):
    told = refused(capsys, file("build = 3\n"))
    assert told.startswith("user_model.py does not define a function build(); it must return what to compile:")
    assert "return model, (x,), {}" in told


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("None", "a NoneType"),
        ("(len, [1])", "a tuple of 2"),
        ("(len, 3, {})", "(builtin_function_or_method, int, dict)"),
        ("(3, (), {})", "(int, tuple, dict)"),
    ],
)
def test_build_returns_the_wrong_thing(file, capsys, returned, found):
    told = refused(capsys, file(f"def build():\n    return {returned}\n"))
    assert "must return (model, args, kwargs), a callable, a tuple and a dict" in told
    assert f"it returned {found}:" in told


def test_build_fails(file, capsys):
    told = refused(capsys, file("def build():\n    raise KeyError('size')\n"))
    assert "build() of user_model.py failed\n  at user_model.py:2: raise KeyError('size')\n  KeyError: 'size'" in told


def test_model_fails(file, capsys):
    name = file(SMALL.replace("torch.neg", "model") + "def model(x):\n    return x + torch.ones(3)\n")
    assert main(["explain", name]) == 2
    err = capsys.readouterr().err
    assert "the model of user_model.py failed\n  while running with no compiler" in err
    assert "at user_model.py:5: return x + torch.ones(3)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--config", "atention_quant=on"],
            "unknown setting of PassConfig 'atention_quant' (did you mean 'attention_quant'?)",
        ),
        (["--config", "level=O9"], "level='O9': must be one of O0, O1, O2"),
        (["--config", "level"], "--config level: write KEY=VALUE, e.g. level=O1"),
        (["--config", "extra_fusions=mine"], "--config extra_fusions: rules are Python objects; set them in CONFIG"),
    ],
)
def test_wrong_settings(file, capsys, arguments, told):
    assert refused(capsys, file(SMALL), *arguments).startswith(told)


def test_a_folder_for_graphs_that_cannot_be_made(file, capsys):
    told = refused(capsys, file(SMALL), "--debug", file("", "taken"))
    assert told.startswith("the folder for graphs, taken, cannot be made")
    assert "give another one" in told


def test_checks_that_are_neither_on_nor_off(file, capsys, monkeypatch):
    monkeypatch.setenv("FUSION_PASSES_CHECK", "yes")
    assert refused(capsys, file(SMALL)).startswith("FUSION_PASSES_CHECK='yes': must be 1")


def test_wrong_settings_in_the_file_and_the_environment(file, capsys, monkeypatch):
    assert refused(capsys, file(SMALL + "CONFIG = {'lvl': 1}\n")).startswith("unknown setting of PassConfig 'lvl'")
    assert refused(capsys, file(SMALL + "CONFIG = 3\n", "other.py")).startswith("CONFIG is a int: make it a PassConfig")
    monkeypatch.setenv("FUSION_PASSES_LEVL", "O1")
    assert refused(capsys, file(SMALL)).startswith("unknown environment variable 'FUSION_PASSES_LEVL'")


def test_torch_too_old(file, capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert refused(capsys, file(SMALL)).startswith(
        "fusion_passes needs torch 2.11 or newer, this is 2.10.1+cpu: pip install"
    )
    assert main(["doctor"]) == 1
    assert "do: pip install 'torch>=2.11'" in capsys.readouterr().out


def test_a_reader_that_stops_reading_is_no_failure():
    code = (
        "import os, subprocess, sys; reader, writer = os.pipe(); os.close(reader); "
        "sys.exit(subprocess.run([sys.executable, '-m', 'fusion_passes', 'list'], stdout=writer).returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_names_every_fusion(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(rule.name in out for rule in FUSIONS)


def test_list(capsys, monkeypatch):
    kernels = [
        ("the first kernel", "compute capability 9.0, Triton 3.6 to below 3.7; no mask tensor", ""),
        ("the second kernel", "compute capability 8.9 or later", "not usable: no NVIDIA GPU is visible"),
    ]
    monkeypatch.setattr(machine, "kernels", lambda rule: kernels)
    monkeypatch.setattr(command_line, "FUSIONS", [rule for rule in FUSIONS if rule.name == "attention_quant"])
    assert main(["list"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
fusion           environment variable           level  usable  what it does
attention_quant  FUSION_PASSES_ATTENTION_QUANT  O2     yes     attention + FP8 output quantization: the attention kernel
                                                                 writes FP8

fusion           usable  kernel and what it needs
attention_quant  yes     the first kernel: compute capability 9.0, Triton 3.6 to below 3.7; no mask tensor
attention_quant  no      the second kernel: compute capability 8.9 or later
                         not usable: no NVIDIA GPU is visible

Each fusion is a setting of PassConfig: on, off or required; left alone it follows the level (O0, O1, O2; the default is
  O2). On a CPU the fused ops run as plain torch, which is not faster: by default nothing is fused there.
""",
    )


def test_kernels_say_what_they_need_and_why_they_are_not_usable():
    rows = {name: (needs, why) for name, needs, why in machine.kernels(AttentionQuant())}
    needs, why = rows["the portable attention kernel"]
    assert needs.startswith("compute capability 8.9 or later, Triton 3.")
    assert "bfloat16/float16, head size " in needs
    if not torch.cuda.is_available():
        assert why == "not usable: no NVIDIA GPU is visible"


@cpu_only
def test_no_fusion_is_usable_without_a_gpu(capsys):
    assert all(why for rule in FUSIONS for *_, why in machine.kernels(rule))
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for rule in FUSIONS:
        assert re.search(rf"^{rule.name} +FUSION_PASSES_\w+ +O\d +no ", out, re.MULTILINE), out
    for name in (
        "paged decode kernel",
        "Hopper paged prefill kernel",
        "portable paged prefill kernel",
        "RoPE and cache",
    ):
        assert f"the {name}" in out


@pytest.mark.parametrize(
    ("capability", "triton", "unusable"),
    [
        ((9, 0), (3, 6), set()),
        ((8, 9), (3, 6), {"the Hopper paged prefill kernel"}),
        ((9, 0), (3, 5), {"the Hopper paged prefill kernel"}),
        ((8, 6), (3, 6), None),
        ((9, 0), None, None),
    ],
)
def test_kernels_are_usable_where_their_ops_would_run_them(capability, triton, unusable, monkeypatch):
    """None: not one of them."""
    monkeypatch.setattr(support, "device_capability", lambda device: capability)
    monkeypatch.setattr(support, "triton_version", lambda: triton)
    monkeypatch.setattr(machine, "_why_no_module", lambda name: None)
    kernels = *OPS["paged_attention"], *OPS["rope_quant_kv_write"], machine.INDUCTORS
    reasons = {kernel.name: machine.why_unusable(kernel) for kernel in kernels}
    assert {name for name, why in reasons.items() if why} == ({*reasons} if unusable is None else unusable)
    write, paged = (sys.modules[f"fusion_passes.ops.{name}"] for name in ("kv_cache_write", "paged_attention"))
    cuda = torch.device("cuda")
    by_op = write.why_no_kernel(cuda, torch.bfloat16, torch.float8_e4m3fn)
    assert bool(by_op) == bool(reasons["the RoPE and cache kernel"])
    cache = torch.zeros(3, 1, 16, 64, dtype=torch.float8_e4m3fn)
    index = torch.zeros(2, dtype=torch.int32)
    scale = torch.tensor(0.5)
    batch = (torch.zeros(1, 1, 64), cache, cache, index[None], torch.tensor([0, 1]).int(), index[:1] + 1)
    call = paged.PagedAttentionArguments(
        batch[0].bfloat16(), *batch[1:], None, scale, scale, output_scale=scale, scale=0.1, dtype=torch.float8_e4m3fn
    )
    assert bool(paged.why_unsupported(call)) == bool(reasons["the paged decode kernel"])


@cpu_only
def test_doctor_without_a_gpu(capsys, monkeypatch):
    for variable in ("FUSION_PASSES_DEBUG", *machine.DISABLING):
        monkeypatch.delenv(variable, raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in ("ok +torch ", "note +device +CPU only", "ok +hook +post_grad_custom_post_pass takes a "):
        assert re.search(f"^{text}", out, re.MULTILINE), out
    for rule in FUSIONS:
        assert re.search(rf"^note +{rule.name} .*: not usable: no NVIDIA GPU is visible$", out, re.MULTILINE), out
    assert out.endswith("The passes can run here.\n")


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (
            "FUSION_PASSES_LEVEL",
            "fast",
            "level='fast': must be one of O0, O1, O2\n                         do: correct or unset it",
        ),
        ("CXX", "no-such-compiler", "do: install g++"),
        ("TORCHDYNAMO_DISABLE", "1", "do: unset TORCHDYNAMO_DISABLE"),
        ("TORCHINDUCTOR_CACHE_DIR", "/proc/cache", "do: set TORCHINDUCTOR_CACHE_DIR to a directory of yours"),
    ],
)
def test_doctor_finds_what_to_fix(capsys, monkeypatch, variable, value, told):
    monkeypatch.setenv(variable, value)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FIX " in out
    assert " ".join(told.split()) in " ".join(out.split())
    assert out.endswith("1 to fix\n")


def test_module_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "fusion_passes", "explain", "absent.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fusion_passes: there is no file absent.py")


def test_table():
    assert_expected_inline(
        table(["name", "text"], [["a", "short"], ["bc\nd", "a long text that is wrapped\nand a new line"]], width=30),
        """\
  name  text
  a     short
  bc    a long text that is
  d       wrapped
        and a new line""",
    )
