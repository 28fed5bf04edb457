"""The fuzzer: a thousand programs of it, and bugs planted that it must find."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import strategies as st

from fusion_passes import idioms
from fusion_passes.testing import fuzz
from fusion_passes.testing.fuzz import campaign, code, hunt, mutants, oracle
from fusion_passes.testing.fuzz.program import Program

SEED = 20_261_130
PURE_RUNS, PURE = 12, 79
WRITING_RUNS, WRITING = 2, 26
FOUND_WITHIN = 2000
QUICK = {"the factor of a scale is dropped", "the scales of key and value are swapped", "cos and sin are swapped"}


@pytest.fixture(autouse=True)
def _torch_may_warn():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


def told(outcome):
    return "\n\n".join(f"{finding.fault}\n{finding.program.test()}" for finding in outcome.findings)


@pytest.mark.parametrize("run", range(PURE_RUNS))
def test_programs_that_write_nothing(run):
    outcome = campaign.run(SEED + run, PURE, fuzz.pure_programs())
    assert not outcome.findings, told(outcome)
    assert outcome.fusing > PURE // 10, "programs that fuse nothing find nothing"


@pytest.mark.parametrize("run", range(WRITING_RUNS))
def test_programs_that_write(run):
    outcome = campaign.run(SEED + run, WRITING, fuzz.writing_programs())
    assert not outcome.findings, told(outcome)


def test_there_are_a_thousand_programs():
    assert PURE_RUNS * PURE + WRITING_RUNS * WRITING == 1000


@pytest.fixture(scope="module")
def drawn():
    return hunt.Drawn(SEED + 1)


@pytest.mark.parametrize("mutant", [m for m in mutants.MUTANTS if m.name in QUICK], ids=lambda m: m.name)
def test_some_planted_bugs_are_found(mutant, drawn):
    assert drawn.until_found(mutant, 200) is not None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_every_planted_bug_is_found(mutant, drawn):
    assert drawn.until_found(mutant, FOUND_WITHIN) is not None


def test_there_are_at_least_twenty_planted_bugs():
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 20


def test_a_bug_is_taken_out_again(monkeypatch):
    before = idioms.quantize._read
    for mutant in mutants.MUTANTS:
        with mutant.planted():
            pass
    assert idioms.quantize._read is before


def test_the_same_seed_draws_the_same_programs():
    assert fuzz.draw(3, 40) == fuzz.draw(3, 40) != fuzz.draw(4, 40)


def test_a_finding_shrinks_to_what_it_needs():
    def has_a_mask(program):
        if "attn_mask" in program.source:
            raise fuzz.Fault("a mask", "there is one")

    runs = ((seed, campaign.drawn_by(seed, fuzz.pure_programs())) for seed in range(100))
    program, seed, at = next((p, seed, at) for seed, run in runs for at, p in enumerate(run) if "attn_mask" in p.source)
    found = campaign.Finding(program, fuzz.Fault("a mask", "there is one"), seed, at)
    short = campaign.shrink(found, fuzz.pure_programs(), checked=has_a_mask)
    assert "attn_mask" in short.program.source
    assert len(short.program.source.splitlines()) <= min(len(program.source.splitlines()), 9)


def test_a_program_prints_as_a_test_that_runs(tmp_path):
    for i, program in enumerate(fuzz.draw(6, 12, fuzz.pure_programs())):
        if program.backend != "cpu":
            continue
        scope = {}
        exec(compile(program.test("test_it"), f"test_{i}.py", "exec"), scope)
        assert scope["program"](*scope["inputs"]()) is not None
        scope["test_it"]()


def a_program(*steps, inputs=(("x", "torch.randn(3, 4)"),), results=("y",), **options):
    return Program(inputs=inputs, steps=steps, results=results, **options)


def test_writes_are_compared_in_generated_code():
    program = a_program("y = x * 2", "custom.bump_(x)", "y = y.relu()", writes=True, in_place_writes=False)
    assert code.check_program(program) == {}


def test_values_near_the_ideal_ones():
    ideal = torch.linspace(-300.0, 300.0, 64)
    stock = ideal.to(torch.float8_e4m3fn)
    one_step = (stock.view(torch.uint8) + (torch.arange(64) == 7)).view(torch.float8_e4m3fn)
    oracle.check_near("x", stock, stock, stock.float(), 2.0**-20)
    oracle.check_near("x", stock, one_step, ideal, 2.0**-20)
    with pytest.raises(fuzz.Fault, match="too far from fp32"):
        oracle.check_near("x", stock, (stock.float() * 1.3).to(stock.dtype), ideal, 2.0**-20)
    all_one_step = (stock.view(torch.uint8) + 1).view(torch.float8_e4m3fn)
    with pytest.raises(fuzz.Fault, match="further from fp32 than stock"):
        oracle.check_near("x", stock, all_one_step, stock.float(), 2.0**-20)
    with pytest.raises(fuzz.Fault, match="another NaN"):
        oracle.check_near("x", stock, torch.where(ideal > 0, torch.nan, ideal).to(stock.dtype), ideal, 2.0**-20)


def test_forms_and_aliases():
    x = torch.randn(3, 4)
    oracle.check_form("x", x, x.clone())
    with pytest.raises(fuzz.Fault, match="other strides"):
        oracle.check_form("x", x, x.t().contiguous().t())
    with pytest.raises(fuzz.Fault, match="another form"):
        oracle.check_form("x", x, x.double())
    with pytest.raises(fuzz.Fault, match="other aliasing"):
        oracle.check_aliases(([x.clone()], [x]), ([x], [x]))
    with pytest.raises(fuzz.Fault, match="another value"):
        oracle.check_same_bits("x", x, x + 1)


def test_importing_the_package_does_not_import_hypothesis():
    script = "import sys, fusion_passes, fusion_passes.testing; print('hypothesis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    script = "import sys; sys.modules['hypothesis'] = None; import fusion_passes.testing.fuzz"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'fusion_passes[test]'" in done.stderr


def test_the_command_keeps_what_it_did(tmp_path):
    command = [sys.executable, "-m", "fusion_passes.testing.fuzz", "--programs", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "0 programs, 0 findings" in done.stdout
    assert (tmp_path / "summary-0.json").exists()


def test_integers_are_drawn_by_hypothesis():
    assert isinstance(fuzz.programs(), st.SearchStrategy)
