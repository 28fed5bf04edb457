"""The fuzzer: a thousand programs of it, and bugs planted that it must find."""

import math
import re
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import strategies as st

from fusion_passes import idioms, ops
from fusion_passes.fusions.rule import Level
from fusion_passes.idioms import attention_mask
from fusion_passes.testing import fuzz
from fusion_passes.testing.fuzz import campaign, code, graphs, hunt, ideal, mutants, oracle
from fusion_passes.testing.fuzz.program import Program

SEED = 20_261_130
PURE_RUNS, PURE = 8, 122
WRITING_RUNS, WRITING = 1, 24
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


def of_seeds(stock, fused):
    """Results for `check_all_near`: stock's and the fused error for each seed, of values between 1 and 2."""

    def results(seeds):
        for seed in seeds:
            ideal = torch.linspace(1.0, 2.0, 100)
            yield [oracle.Near("x", ideal + stock(seed), ideal + fused(seed), ideal, 2.0**-20)]

    return results


def test_what_is_far_by_chance_is_judged_by_other_inputs():
    quiet, jumps = (lambda seed: torch.full((100,), 1e-4)), (lambda seed: torch.eye(100)[seed] * (seed % 8 == 0))
    oracle.check_all_near(of_seeds(quiet, lambda seed: jumps(seed) * (seed == 0)))
    oracle.check_all_near(of_seeds(jumps, lambda seed: jumps(seed + 4)))
    with pytest.raises(fuzz.Fault, match="too far from fp32: x of 32 seeds: 4 of 3200 values"):
        oracle.check_all_near(of_seeds(quiet, jumps))
    with pytest.raises(fuzz.Fault, match="further from fp32 than stock: x of 32 seeds"):
        oracle.check_all_near(of_seeds(quiet, lambda seed: torch.full((100,), 1.4e-4)))


def test_a_fault_that_no_inputs_excuse_is_one_at_once():
    with pytest.raises(fuzz.Fault, match="another NaN: x: 1 of 100"):
        oracle.check_all_near(
            of_seeds(lambda seed: 0.0, lambda seed: torch.where(torch.arange(100) == 0, torch.nan, 0.0))
        )


def test_other_inputs_are_those_of_another_seed():
    program = a_program("y = x * 2")
    assert torch.equal(program.make_inputs()[0], program.make_inputs(seed=0)[0])
    assert not torch.equal(program.make_inputs()[0], program.make_inputs(seed=1)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_ideal_values_are_not_rounded(dtype):
    x, scale = torch.randn(6, 8), torch.tensor(0.3)
    given = x.to(dtype)
    with ideal.InFP32() as mode:
        y = (given * scale).to(torch.bfloat16).sum(-1)
        codes = y.to(torch.float8_e4m3fn)
        split = (given * 3).chunk(2, -1)[1]
    assert torch.equal(y, (given * scale).to(torch.bfloat16).sum(-1))
    exact = (given.float() * scale).sum(-1)
    assert torch.equal(mode.of(y), exact)
    assert torch.equal(mode.of(codes).float(), exact.to(torch.float8_e4m3fn).float())
    assert torch.equal(mode.of(split), given.float()[:, 4:] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_ideal_values_are_written_where_the_values_are(dtype):
    given = torch.arange(6.0).to(dtype)
    with ideal.InFP32() as mode:
        wide, same, part = given.float(), given.to(dtype), given[2:]
        torch.ops.fusion_passes_fuzz.bump_(given)
        part.mul_(1.001)
    assert torch.equal(wide, torch.arange(6.0)) is (dtype is torch.bfloat16), "a cast that changes nothing is an alias"
    assert torch.equal(mode.of(wide), torch.arange(6.0)) is (dtype is torch.bfloat16)
    exact = torch.arange(1.0, 7.0) * torch.tensor([1.0, 1.0, *[1.001] * 4])
    for x in (given, same):
        assert torch.equal(mode.of(x), exact)
    assert torch.equal(mode.of(part), exact[2:])


def test_generated_code_is_measured_against_fp32():
    # Where stock computes in 16 bits as eager torch does, who rounds less is far from both of them.
    program = a_program(
        "y = F.scaled_dot_product_attention(x[0], x[1], x[2]).transpose(1, 2).flatten(2)",
        "y = ops.quantize_fp8(y, scale).float() * 0.5",
        inputs=(("x", "torch.randn(3, 2, 1, 5, 16, dtype=torch.bfloat16)"), ("scale", "torch.tensor(0.02)")),
        writes=True,
    )
    assert code.check_program(program)["attention_quant"] == 1


def test_no_input_with_an_offset_is_written_to_by_an_op():
    # Stock writes somewhere else then, past the end of the storage too.
    in_place = 0
    for program in fuzz.draw(2, 300, fuzz.writing_programs()):
        for name, x in zip(program.names, program.make_inputs(), strict=True):
            if isinstance(x, torch.Tensor) and x.storage_offset():
                in_place += f"\n    {name}.mul_(" in program.source
                assert not re.search(rf"custom\.\w+_\(.*\b{name}\b", program.source)
    assert in_place, "such an input is written to in place"


FLIP = "y = x.sum().flip(0).relu()"


def test_what_stock_alone_cannot_compile_is_no_finding(monkeypatch):
    def compiled(self, config, report):
        raise IndexError("list index out of range\nand more about it")

    programs = [a_program(FLIP, writes=True)] * 3
    monkeypatch.setattr(code._Comparison, "_compiled", compiled)
    found = code.check_together(programs)
    assert (found.faults, sorted(found.not_traced)) == ({}, [0, 1, 2])
    with pytest.raises(oracle.NotTraced, match="stock: IndexError: list index out of range"):
        code.check_program(programs[0])


def test_what_only_the_passes_break_is_a_finding(monkeypatch):
    def compiled(self, config, report):
        if config.level is Level.O0:
            return [], []
        raise IndexError("list index out of range")

    monkeypatch.setattr(code._Comparison, "_compiled", compiled)
    found = code.check_together([a_program(FLIP, writes=True)] * 2)
    assert (sorted(found.faults), found.not_traced) == ([0, 1], {})
    assert found.faults[0].kind == "does not run"


def test_why_programs_were_not_compared_is_counted(monkeypatch):
    found = code.Together(not_traced={at: oracle.NotTraced("stock: IndexError: out of range\nmore") for at in (0, 1)})
    monkeypatch.setattr(code, "check_together", lambda programs: found)
    outcome = campaign.run(3, 2, st.just(a_program(FLIP, writes=True)) | st.just(a_program("y = x", writes=True)))
    assert outcome.not_traced == {"stock: IndexError: out of range": 2}
    assert not outcome.findings


MASKED_FOR_CUDNN = a_program(
    "y = F.scaled_dot_product_attention(x[0], x[1], x[2], attn_mask=torch.where(mask, 0.0, -65536.0).to(x.dtype))",
    "y = ops.quantize_fp8(y.transpose(1, 2).flatten(2), scale)",
    inputs=(
        ("x", "torch.randn(3, 2, 4, 6, 64, dtype=torch.bfloat16)"),
        ("mask", "(torch.rand(6, 6) > 0.5) & (torch.arange(6) < 5)[:, None]"),
        ("scale", "torch.tensor(0.02)"),
    ),
    backend="cudnn",
)


def test_a_row_that_attends_to_nothing_in_old_cudnn(monkeypatch):
    # The mean of all values there, 0 where it is fused.
    monkeypatch.setattr(attention_mask, "OLD_CUDNN_MASKS", True)
    assert campaign.check(MASKED_FOR_CUDNN)["attention_quant"] == 1
    (lost,) = (mutant for mutant in mutants.MUTANTS if mutant.name == "the mask is lost")
    with lost.planted(), pytest.raises(fuzz.Fault):
        campaign.check(MASKED_FOR_CUDNN)


def test_bytes_of_codes_are_compared_as_codes():
    drawn = [p for p in fuzz.draw(2, 500, fuzz.pure_programs()) if "view(torch.uint8)" in p.source]
    assert drawn
    for program in drawn:
        assert not any(torch.uint8 is x.dtype for x in program.function(*program.make_inputs()))


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


def test_integers_are_drawn_by_hypothesis():
    assert isinstance(fuzz.programs(), st.SearchStrategy)


def test_an_attention_by_hand_of_one_head_counts_once(monkeypatch):
    """Inductor makes products of two matrices of its batches of one."""

    def program(q, k, v, scale):
        scores = q @ k.transpose(-1, -2) * 0.125
        mask = torch.ones(5, 16, dtype=torch.bool, device=q.device).tril()
        p = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
        return (ops.quantize_fp8((p @ v).transpose(1, 2), scale),)

    def inputs(n=8, seed=0):
        torch.manual_seed(seed)
        return (*(torch.randn(1, 1, m, 64, dtype=torch.bfloat16) for m in (5, 16, 16)), torch.tensor(0.02))

    assert fuzz.check_graph(program, inputs, backend="math")["attention_quant"] == 1
    monkeypatch.delitem(graphs.COSTS, "mm")
    with pytest.raises(fuzz.Fault, match="computed twice"):
        fuzz.check_graph(program, inputs, backend="math")
