"""The split-KV decode kernel against the fp32 reference. On a card if there is one, else interpreted.

Every cache is full of NaN where no token is, every output memory before it is written.
"""

import math

import pytest
import torch

from fusion_passes import reference
from fusion_passes.kernels.paged_decode import Plan, launch, plan
from fusion_passes.ops.paged_attention import PagedAttentionArguments
from fusion_passes.quant import FP8_DTYPES, QuantSpec, choose_scale, codes, quantize
from tests.kernels import hopper
from tests.kernels.paged import by_kernels

# Infinities and NaN are numbers here; NumPy, in the interpreter, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {"q_scale": 0.017, "k_scale": 0.013, "v_scale": 0.0071}
OUTPUT_SCALE = 0.0043
# (new tokens, all tokens)
ONE = ((1, 37), (1, 1), (0, 0), (1, 64), (1, 65), (0, 9), (1, 0))
FEW = ((3, 37), (1, 1), (0, 0), (4, 4), (2, 65), (4, 63))


def poisoned(*shape, dtype):
    return torch.full((*shape, dtype.itemsize), 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype).squeeze(-1)


class Problem:
    """Sequences in a shuffled cache of NaN, a strided query, and two tokens more than the sequences have."""

    def __init__(self, lengths, heads=4, kv_heads=2, head_dim=32, page_size=16, cache=E4M3, query=BF16, layout="HND"):
        columns = max(1, max(-(-n // page_size) for _, n in lengths) + 1)
        pages = len(lengths) * columns
        shape = (pages, kv_heads, page_size, head_dim)
        order = shape if layout == "HND" else (pages, page_size, kv_heads, head_dim)
        self.key, self.value = (
            poisoned(*order, dtype=cache).transpose(1, 2) if layout == "NHD" else poisoned(*order, dtype=cache)
            for _ in range(2)
        )
        self.table = torch.randperm(pages, device=DEVICE).int().view(len(lengths), columns)
        for s, (_, n) in enumerate(lengths):
            at = torch.arange(n, device=DEVICE)
            page, slot = self.table[s, at // page_size].long(), at % page_size
            for half, offset, name in ((self.key, 0.0, "k_scale"), (self.value, 0.3, "v_scale")):
                x = torch.randn(n, kv_heads, head_dim, device=DEVICE) + offset
                x = quantize(x, SCALES[name], cache) if cache in FP8_DTYPES else x.to(cache)
                reference.bits(half)[page, :, slot] = reference.bits(x)
        counts = torch.tensor([q for q, _ in lengths])
        self.total = int(counts.sum())
        self.start = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(DEVICE)
        self.lengths = torch.tensor([n for _, n in lengths], dtype=torch.int32, device=DEVICE)
        packed = torch.randn(self.total + 2, heads + 3, head_dim, device=DEVICE)
        packed[self.total :] = torch.nan
        x = packed[:, 1 : heads + 1]
        self.query = (
            quantize(packed, SCALES["q_scale"], query)[:, 1 : heads + 1] if query in FP8_DTYPES else x.to(query)
        )
        scales = {n: torch.tensor(x, device=DEVICE) for n, x in SCALES.items()}
        self.scales = {"k_scale": None, "v_scale": None} | ({} if cache not in FP8_DTYPES else scales)
        self.scales["q_scale"] = scales["q_scale"] if query in FP8_DTYPES else None

    def run(
        self,
        dtype=BF16,
        *,
        group_size=None,
        splits=None,
        scale=0.31,
        max_query_len=None,
        config=None,
        least=None,
        **options,
    ):
        """The output (and its scales), and the fp32 reference."""
        rest = {"prob_scale": None, "sinks": None, **self.scales, **options}
        logic = {"scale": scale, "window": rest.pop("window", None), "softcap": rest.pop("softcap", 0.0)}
        batch = (self.query, self.key, self.value, self.table, self.start, self.lengths)
        want = reference.paged_attention(*batch, output_scale=None, **rest, **logic, dtype=torch.float32)
        output_scale = torch.tensor([OUTPUT_SCALE], device=DEVICE) if dtype in FP8_DTYPES and not group_size else None
        tokens, heads, head_dim = self.query.shape
        out = poisoned(tokens, heads, head_dim, dtype=dtype)
        scales = poisoned(tokens, heads, head_dim // group_size, dtype=torch.float32) if group_size else None
        most = max_query_len or max(int(self.start.diff().max()), 1)
        if splits is not None:
            rows = most * heads // self.key.shape[1]
            block_m = 16 if rows <= 16 else 32
            config = Plan(block_m, math.ceil(rows / block_m), 64, splits)
        bound = {} if least is None else {"smallest_scale": least}
        launch(
            out, scales, *batch, output_scale=output_scale, **rest, **logic, **bound, max_query_len=most, config=config
        )
        return (out, scales, want) if group_size else (out, want)


def check(out, want, divisor=OUTPUT_SCALE, share=0.03):
    """What the rounding of probabilities and shares to fp16 allows. share: of FP8 codes that may differ at all."""
    assert not want.isnan().any()
    assert (out.float()[want.abs().amax((1, 2)) == 0] == 0).all()
    slack = want.abs().max() * (2**-8 if out.dtype is BF16 else 2**-11)
    if out.dtype in FP8_DTYPES:
        low, middle, high = (codes(quantize(x, divisor, out.dtype)) for x in (want - slack, want, want + slack))
        got = codes(out)
        assert ((got >= low - 1) & (got <= high + 1)).all()
        assert (got != middle).float().mean() <= share
    else:
        eps = torch.finfo(out.dtype).eps
        assert (out.float() - want).norm() <= eps * want.norm()
        assert ((out.float() - want).abs() <= eps * want.abs() + slack).all()


CASES = {
    "one token, bf16": (ONE, {}, {}),
    "one token, FP8 throughout": (ONE, {"query": E4M3}, {"dtype": E4M3}),
    "fp16 query, e5m2 output": (ONE, {"query": FP16}, {"dtype": E5M2}),
    "e5m2 cache": (FEW, {"cache": E5M2, "query": E4M3}, {"dtype": E4M3}),
    "bf16 cache": (FEW, {"cache": BF16}, {}),
    "bf16 cache, FP8 query": (ONE, {"cache": BF16, "query": E4M3}, {"dtype": E4M3}),
    "fp16 cache": (FEW, {"cache": FP16, "query": FP16}, {"dtype": FP16}),
    "NHD": (FEW, {"layout": "NHD"}, {"dtype": E4M3}),
    "page 64": (FEW, {"page_size": 64}, {}),
    "page 256": (ONE, {"page_size": 256}, {}),
    "page 48": (FEW, {"page_size": 48, "layout": "NHD"}, {}),
    "group of 5": (FEW, {"heads": 5, "kv_heads": 1}, {"dtype": E4M3}),
    "MHA": (ONE, {"heads": 3, "kv_heads": 3, "head_dim": 64}, {}),
    "32 rows": (((8, 70), (2, 2), (5, 9)), {"heads": 4, "kv_heads": 1}, {}),
    "window": (FEW, {}, {"window": 7, "dtype": E4M3}),
    "window, one token": (ONE, {"query": E4M3, "page_size": 64}, {"window": 30}),
    "softcap": (FEW, {}, {"softcap": 0.9}),
    "softcap, FP8 query": (ONE, {"query": E4M3}, {"softcap": 0.9}),
    "sinks": (FEW, {}, {"sinks": (0.5, -3.0, -math.inf, 2.0)}),
    "all": (
        FEW,
        {"layout": "NHD", "query": E4M3},
        {"window": 19, "softcap": 2.0, "sinks": (0.5, -1.0, 3.0, 0.0), "dtype": E4M3},
    ),
    "negative scale": (ONE, {}, {"scale": -0.31}),
    "scale 0": (FEW, {"query": E4M3}, {"scale": 0.0}),
    "nothing to do": (((0, 0), (0, 3)), {}, {"dtype": E4M3}),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_against_reference(case, splits):
    lengths, shape, options = CASES[case]
    if "sinks" in options:
        options = options | {"sinks": torch.tensor(options["sinks"], device=DEVICE)}
    check(*Problem(lengths, **shape).run(splits=splits, **options))


def test_padding_is_written_once_and_is_zero():
    problem = Problem(((1, 20), (0, 0)))
    out, _ = problem.run(splits=2)
    assert (out[1:].view(torch.int16) == 0).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("query", [BF16, FP16])
def test_query_is_quantized_inside(query, splits):
    problem = Problem(FEW, query=query)
    scale = torch.tensor(SCALES["q_scale"], device=DEVICE)
    inside, want = problem.run(splits=splits, q_scale=scale)
    check(inside, want)
    problem.query = quantize(problem.query, scale)
    outside, _ = problem.run(splits=splits, q_scale=scale)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("splits", [1, 3])
def test_probabilities_as_codes(splits):
    """They are relative to the largest logit so far, not of all keys, so that some are rounded to other codes."""
    problem = Problem(ONE, query=E4M3)
    exact, _ = problem.run(splits=splits)
    rounded, want = problem.run(splits=splits, prob_scale=torch.tensor(0.0029, device=DEVICE))
    assert (rounded.float() - want).norm() < 0.03 * want.norm()
    assert not torch.equal(rounded, exact)
    saturated, _ = problem.run(splits=splits, prob_scale=torch.tensor(1e-4, device=DEVICE))
    assert (saturated.float() - want).norm() > 0.2 * want.norm()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("group_size", "dtype"), [(32, E4M3), (16, E5M2)])
def test_scales_per_group(group_size, dtype, splits):
    out, scales, want = Problem(FEW, query=E4M3).run(dtype, group_size=group_size, splits=splits)
    spec = QuantSpec(dtype, "group", group_size, static=False)
    torch.testing.assert_close(scales, choose_scale(want, spec), rtol=2e-3, atol=0)
    check(out, want, choose_scale(want, spec))


@pytest.mark.parametrize("query", [BF16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_lower_bound_of_scales_per_group(splits, query):
    """Half of the groups are below it.  Without one, padding has the scale 0 and NaN for codes."""
    problem, spec = Problem(FEW, query=query), QuantSpec(E4M3, "group", 32, static=False)
    _, scales, want = problem.run(E4M3, group_size=32, splits=splits)
    least = scales.median().item()
    out, scales, _ = problem.run(E4M3, group_size=32, splits=splits, least=least)
    torch.testing.assert_close(scales, choose_scale(want, spec, least), rtol=2e-3, atol=0)
    assert (scales == least).float().mean() >= 0.5
    check(out, want, choose_scale(want, spec, least))
    problem.value[:, 0] = 0.0
    out, scales, want = problem.run(E4M3, group_size=32, splits=splits, least=0.0)
    exact = choose_scale(want, spec, 0.0)
    assert torch.equal(scales == 0.0, exact == 0.0)
    assert 0.0 < (scales == 0.0).float().mean() < 1.0
    assert torch.equal(out.isnan(), (exact == 0.0).repeat_interleave(32, -1))


@pytest.mark.parametrize("mixed", [False, True])
def test_longer_sequences_are_left_alone(mixed):
    problem = Problem(((9, 40), (2, 33), (1, 70)), heads=8, kv_heads=1)
    config = plan(3, 1, 2 * 8, 128, 16, 4, mixed)
    out, want = problem.run(max_query_len=2, config=config)
    check(out[9:], want[9:])
    assert (out[:9].view(torch.int16) == 0x7F7F).all()


@pytest.mark.parametrize(("mixed", "rows"), [(True, 16), (False, 64)])
def test_row_blocks(mixed, rows):
    """16 tokens of 4 heads: four blocks of 16 rows where most sequences have one token, else one of 64."""
    config = plan(3, 1, 64, 128, 64, 4, mixed)
    assert config.block_m == rows
    assert config.block_m * config.row_blocks == 64
    problem = Problem(((16, 40), (2, 33), (1, 70)), heads=4, kv_heads=1, page_size=64, head_dim=128)
    check(*problem.run(config=config))


@pytest.mark.parametrize("max_query_len", [None, 20])
def test_long_and_short_sequences_in_one_batch(max_query_len):
    """By two kernels, each token by one of them: more than 16 new tokens, 16, fewer, none, and padding."""
    problem = Problem(((20, 30), (1, 37), (0, 0), (17, 17), (16, 40)))
    batch = (problem.query, problem.key, problem.value, problem.table, problem.start, problem.lengths)
    options = {**problem.scales, "scale": 0.31, "window": 25}
    out = by_kernels(PagedAttentionArguments(*batch, **options, max_query_len=max_query_len))
    check(out, reference.paged_attention(*batch, **options, dtype=torch.float32))


def test_table_outside_the_cache():
    """Entries that nothing uses may be anything; a page too far out is read as the nearest, not beyond the memory."""
    problem = Problem(((1, 30), (1, 17)))
    problem.table[0, 2:] = 1 << 30
    problem.table[1, 2:] = -7
    check(*problem.run(splits=2))


def test_pages_left_of_the_window_may_be_gone():
    problem = Problem(((2, 170), (1, 100)))
    want = problem.run(window=12)[1]
    problem.table[:, :4] = -1
    out, _ = problem.run(window=12, splits=2)
    check(out, want)


def test_plan():
    """One wave of programs, eight if one is not enough; two tiles or more for each."""
    assert plan(32, 8, 4, 4096, 64, 132) == Plan(16, 1, 128, 1, 3)
    assert plan(8, 8, 4, 16384, 64, 132) == Plan(16, 1, 64, 8, 4)
    assert plan(1, 8, 4, 25088, 64, 132) == Plan(16, 1, 64, 49, 3)
    assert plan(1, 8, 4, 100, 64, 132).splits == 1
    assert plan(64, 8, 4, 16384, 64, 132).splits == 7
    assert plan(40, 8, 4, 16384, 64, 132, itemsize=2) == Plan(16, 1, 64, 7, 2)
    assert plan(48, 8, 4, 4096, 64, 132) == Plan(16, 1, 64, 1, 4)
    assert plan(1000, 8, 4, 16384, 64, 132).splits == 1
    assert plan(8, 8, 4, 16384, 64, 132, head_dim=256) == Plan(16, 1, 64, 4, 2)
    assert plan(8, 8, 4, 16384, 64, 132, itemsize=2) == Plan(16, 1, 64, 4, 2)
    assert plan(8, 8, 64, 16384, 64, 132) == Plan(64, 1, 64, 4, 2)
    for seqs in (1, 3, 16, 33):
        p = plan(seqs, 8, 4, 1 << 17, 16, 132)
        assert p.block_n == 128
        assert seqs * 8 * p.splits <= p.programs * 132


COMPILE = """
from fusion_passes.kernels.paged_decode import _combine, _split, plan
from tests.kernels.hopper import build, resources

scales = [name + "_scale_ptr" for name in ("q", "k", "v", "prob", "output")]
common = dict.fromkeys(scales + ["lse_ptr"], "*fp32")
common |= dict.fromkeys(("start_ptr", "length_ptr", "table_ptr"), "*i32") | {"out_ptr": "*fp8e4nv", "part_ptr": "*fp16"}
common |= dict.fromkeys(("scale", "softcap"), "fp32")
shape = dict(KV_HEADS=8, GROUP=4, GROUP_SIZE=0, SMALLEST_SCALE=0.0, EARLY=True, out_scales_ptr=None, sinks_ptr=None)
for head_dim, dtype, seqs, tokens, page in (
    (128, "fp8e4nv", 8, 1, 64), (128, "fp8e4nv", 32, 1, 64), (128, "fp8e4nv", 8, 4, 16), (128, "fp8e4nv", 8, 8, 64),
    (128, "fp8e4nv", 8, 16, 64), (64, "fp8e4nv", 8, 1, 64), (256, "fp8e4nv", 8, 1, 64), (128, "bf16", 8, 1, 64),
    (256, "bf16", 8, 1, 64),
):
    wide = dtype == "bf16"
    p = plan(seqs, 8, 4 * tokens, 1 << 15, page, 132, head_dim=head_dim, itemsize=2 if wide else 1)
    single = dict(part_ptr=None, lse_ptr=None) if p.splits == 1 else {}
    unscaled = dict.fromkeys(["prob_scale_ptr"] + (["q_scale_ptr", "k_scale_ptr", "v_scale_ptr"] if wide else []))
    fixed = shape | single | unscaled | dict(
        HEAD_DIM=head_dim, PAGE=page, BLOCK_M=p.block_m, BLOCK_N=p.block_n, ONE_TOKEN=tokens == 1, WINDOW=False,
        SOFTCAP=False, SINGLE=p.splits == 1, PTX=True,
    )
    pointers = common | {"q_ptr": "*" + dtype, "k_ptr": "*" + dtype, "v_ptr": "*bf16" if wide else "*i16"}
    if wide:
        pointers["part_ptr"] = "*fp32"
    options = dict(num_warps=p.num_warps, num_stages=p.num_stages, maxnreg=p.most_registers)
    print(p.num_warps, p.programs, *resources(build(_split, fixed, pointers, **options)))
print(1, 1, *resources(build(_combine, shape | dict(HEAD_DIM=128, BLOCK_S=8, BLOCK_D=128), common, num_warps=1)))
"""


def test_what_a_plan_counts_on_fits_on_a_hopper_processor():
    """Compiled, with what the interpreter takes and the compiler does not: registers and shared memory of so many
    programs, next to nothing spilled."""
    lines = hopper.run(COMPILE)
    assert len(lines) == 10
    for line in lines:
        warps, programs, registers, stack, shared = map(int, line)
        assert stack <= 32  # bytes of a thread; Triton 3.7 needs 24 once, 3.6 none
        assert programs * warps * 32 * (-(-registers // 8) * 8) <= 65536
        assert programs * (shared + 1024) <= 228 * 1024
        assert programs * warps * 32 <= 2048


def full_size(tokens=1, **shape):
    """Sequences whose lengths lie around a tile's edge, with so many new tokens each, fewer where they are shorter."""
    lengths = [(min(tokens, n), n) for n in (0, 1, 63, 64, 65, 777, 1500, 4097)]
    return Problem(lengths, **{"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64} | shape)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (8, 1), (40, 8)], ids=str)
def test_numbers_of_splits(heads, tokens):
    for query, dtype in ((BF16, E4M3), (E4M3, BF16)):
        problem = full_size(tokens, heads=heads[0], kv_heads=heads[1], query=query)
        for splits in (None, 1, 2, 7, 33):
            check(*problem.run(dtype, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [16, 32, 48, 128, 256, 4224])
def test_pages(page_size, layout):
    problem = full_size(page_size=page_size, layout=layout, query=E4M3)
    for splits in (None, 1, 7):
        check(*problem.run(E4M3, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 256])
def test_head_dims(head_dim, tokens):
    problem = full_size(tokens, head_dim=head_dim)
    for splits in (None, 1, 7):
        check(*problem.run(E4M3, splits=splits))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "query", "dtype"),
    [
        (BF16, BF16, BF16),
        (BF16, E4M3, E4M3),
        (FP16, FP16, FP16),
        (E5M2, BF16, BF16),
        (E5M2, E5M2, E5M2),
        (E4M3, FP16, FP16),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_dtypes(cache, query, dtype, tokens):
    problem = full_size(tokens, cache=cache, query=query)
    for splits in (None, 1, 7):
        check(*problem.run(dtype, splits=splits))


OPTIONS = {
    "window": {"window": 100},
    "window of a tile": {"window": 64},
    "window 1": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 1000, "softcap": 3.0, "sinks": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, tokens):
    options = dict(OPTIONS[case])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2, 6, 32, device=DEVICE, dtype=BF16)
    problem = full_size(tokens, query=E4M3)
    for splits in (None, 1, 7):
        check(*problem.run(E4M3, splits=splits, **options))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "group_size"), [(128, 128), (128, 64), (256, 128), (64, 16)])
def test_groups_at_full_size(head_dim, group_size):
    problem = full_size(head_dim=head_dim, query=E4M3)
    spec = QuantSpec(E4M3, "group", group_size, static=False)
    for splits in (None, 1, 7):
        out, scales, want = problem.run(E4M3, group_size=group_size, splits=splits)
        torch.testing.assert_close(scales, choose_scale(want, spec), rtol=2e-3, atol=0)
        check(out, want, choose_scale(want, spec))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 7])
def test_one_graph_serves_other_lengths_and_scales(splits):
    problem = full_size(3, query=E4M3)
    lengths, start = problem.lengths.clone(), problem.start.clone()
    problem.lengths.copy_(lengths // 2)
    problem.start.zero_()
    problem.scales = {n: None if x is None else x * 3 for n, x in problem.scales.items()}
    out = poisoned(*problem.query.shape, dtype=BF16)
    batch = (problem.query, problem.key, problem.value, problem.table, problem.start, problem.lengths)
    s, rows = problem.scales, 3 * 4
    call = lambda: launch(  # noqa: E731
        *(out, None, *batch, s["q_scale"], s["k_scale"], s["v_scale"], None, None, None),
        scale=0.31, window=None, softcap=0.0, max_query_len=3, config=Plan(16, math.ceil(rows / 16), 64, splits),
    )  # fmt: skip
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    problem.lengths.copy_(lengths)
    problem.start.copy_(start)
    for x in s.values():
        x /= 3
    for _ in range(2):
        out.view(torch.uint8).fill_(0x7F)
        graph.replay()
        check(out, reference.paged_attention(*batch, **s, scale=0.31, dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 7])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_waits_for_what_comes_before_it(by_kernel, splits):
    """It is launched early; here what comes before is the write of its cache, by a kernel or by a copy without one."""
    problem = full_size(query=E4M3)
    batch = (problem.query, problem.key, problem.value, problem.table, problem.start, problem.lengths)
    s = problem.scales
    want = reference.paged_attention(*batch, **s, scale=0.31, dtype=torch.float32)
    caches = [reference.bits(x) for x in (problem.key, problem.value)]
    right, inverse = [x.clone() for x in caches], [~x for x in caches]
    out = poisoned(*problem.query.shape, dtype=BF16)

    def call():
        for cache, copy, other in zip(caches, right, inverse, strict=True):
            torch.bitwise_not(other, out=cache) if by_kernel else cache.copy_(copy)
        launch(
            *(out, None, *batch, s["q_scale"], s["k_scale"], s["v_scale"], None, None, None),
            scale=0.31, window=None, softcap=0.0, max_query_len=1, config=Plan(16, 1, 64, splits),
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for run in (graph.replay, call) * 3:
        for cache, other in zip(caches, inverse, strict=True):
            cache.copy_(other)
        out.view(torch.uint8).fill_(0x7F)
        run()
        check(out, want)


@pytest.mark.gpu
def test_cache_of_more_than_two_to_the_31_elements():
    """The last pages, and a page that alone is that large."""
    problem = Problem(((1, 200), (4, 130)), heads=8, kv_heads=8, head_dim=128, page_size=64)
    pages = 2**31 // (8 * 64 * 128) + 5
    for name in ("key", "value"):
        small = getattr(problem, name)
        large = torch.empty(pages, *small.shape[1:], dtype=torch.uint8, device=DEVICE).view(E4M3)
        reference.bits(large)[-len(small) :] = reference.bits(small)
        setattr(problem, name, large)
    problem.table += pages - len(small)
    for splits in (1, 2):
        check(*problem.run(splits=splits))
    problem = Problem(((1, 200),), heads=8, kv_heads=8, head_dim=128, page_size=2**21 + 2**20)
    check(*problem.run(splits=3))


@pytest.mark.gpu
def test_metadata_never_compiles_again():
    from fusion_passes.kernels import paged_decode

    problem = full_size(query=E4M3)
    problem.run(E4M3, splits=2)
    compiled = [
        kernel.device_caches[torch.cuda.current_device()][0] for kernel in (paged_decode._split, paged_decode._combine)
    ]
    before = [len(cache) for cache in compiled]
    for seqs in (1, 2, 5, 8):
        for columns in (1, 16, 66):
            part = full_size(query=E4M3)
            part.table = part.table[8 - seqs :, :columns]
            part.lengths = part.lengths[8 - seqs :].clamp(max=columns * 64)
            part.start = torch.arange(seqs + 1, dtype=torch.int32, device=DEVICE)
            part.query = reference.bits(part.query)[torch.arange(seqs, device=DEVICE) % 7].view(E4M3)
            check(*part.run(E4M3, splits=2))
    assert [len(cache) for cache in compiled] == before


def test_strided_tensors():
    """What says something of each head or sequence is read by its strides, or copied."""
    problem = Problem(((20, 30), (1, 37), (3, 40)))
    sinks = torch.randn(4, 3, device=DEVICE)[:, 0]
    options = {**problem.scales, "scale": 0.31, "sinks": sinks}
    batch = (problem.query, problem.key, problem.value, problem.table, problem.start, problem.lengths)
    want = reference.paged_attention(*batch, **options, dtype=torch.float32)
    wide = [torch.stack([x, torch.full_like(x, 7)], -1)[..., 0] for x in batch[3:]]
    check(by_kernels(PagedAttentionArguments(*batch[:3], *wide, **options)), want)
