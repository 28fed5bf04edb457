"""The kernels for sequences with many new tokens against the fp32 reference. Without a card they are interpreted.

Every cache is full of NaN where no token is, every output memory before it is written, and the table names pages that
do not exist where no page is used.
"""

import math

import pytest
import torch

from fusion_passes import reference
from fusion_passes.kernels import paged_prefill
from fusion_passes.quant import FP8_DTYPES, QuantSpec, choose_scale, codes, max_value, quantize

# Infinities and NaN are numbers here; NumPy, in the interpreter, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {"q_scale": 0.017, "k_scale": 0.013, "v_scale": 0.0071}
HEAD_DIM = 128 if GPU else 32
SMALL = (32, 32, 4, 2)  # tiles for the interpreter, where a block of 128 rows would be all of a test
# (new tokens, all tokens)
MIXED = ((3, 3), (0, 0), (7, 40), (1, 17), (33, 33), (20, 64), (0, 9), (17, 65))


def poisoned(*shape, dtype):
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8, device=DEVICE).view(dtype).squeeze(-1)


class Problem:
    """Sequences in a shuffled cache of NaN, a strided query, and two tokens more than the sequences have."""

    def __init__(
        self, lengths, heads=4, kv_heads=2, head_dim=HEAD_DIM, page_size=16, cache=E4M3, query=E4M3, layout="HND"
    ):
        columns = max(1, max(-(-n // page_size) for _, n in lengths)) + 1
        pages = len(lengths) * columns
        shape = (pages, kv_heads, page_size, head_dim)
        order = shape if layout == "HND" else (pages, page_size, kv_heads, head_dim)
        self.key, self.value = (poisoned(*order, dtype=cache) for _ in range(2))
        if layout == "NHD":
            self.key, self.value = self.key.transpose(1, 2), self.value.transpose(1, 2)
        self.table = torch.randperm(pages, device=DEVICE).int().view(len(lengths), columns)
        self.fill(lengths)
        for s, (_, n) in enumerate(lengths):
            self.table[s, -(-n // page_size) :] = (-5, 2**30)[s % 2]
        packed = torch.randn(int(self.start[-1]) + 2, heads + 3, head_dim, device=DEVICE)
        packed[-2:] = torch.nan
        if query in FP8_DTYPES:
            packed = quantize(packed, SCALES["q_scale"], query)
        self.query = packed.to(query)[:, 1 : heads + 1]
        scales = {name: torch.tensor(x, device=DEVICE) for name, x in SCALES.items()}
        self.scales = scales if cache in FP8_DTYPES else dict.fromkeys(scales)
        self.scales["q_scale"] = scales["q_scale"] if query in FP8_DTYPES else None

    def fill(self, lengths):
        """The caches and lengths of a batch."""
        _, heads, page_size, head_dim = self.key.shape
        for s, (_, n) in enumerate(lengths):
            at = torch.arange(n, device=DEVICE)
            page, slot = self.table[s, at // page_size].long(), at % page_size
            for half, offset, name in ((self.key, 0.0, "k_scale"), (self.value, 0.3, "v_scale")):
                x = torch.randn(n, heads, head_dim, device=DEVICE) + offset
                x = quantize(x, SCALES[name], half.dtype) if half.dtype in FP8_DTYPES else x.to(half.dtype)
                reference.bits(half)[page, :, slot] = reference.bits(x)
        self.start = torch.tensor([0, *(q for q, _ in lengths)], device=DEVICE).cumsum(0).int()
        self.lengths = torch.tensor([n for _, n in lengths], dtype=torch.int32, device=DEVICE)

    @property
    def batch(self):
        return self.query, self.key, self.value, self.table, self.start, self.lengths

    def run(self, kernel, dtype=BF16, *, group_size=None, longer_than=0, scale=None, least=None, **options):
        """The output (and its scales), and the fp32 reference."""
        rest = {"prob_scale": None, "sinks": None, **self.scales, **options}
        logic = {
            "scale": self.query.shape[2] ** -0.5 if scale is None else scale,
            "window": rest.pop("window", None),
            "softcap": rest.pop("softcap", 0.0),
        }
        want = reference.paged_attention(*self.batch, output_scale=None, **rest, **logic, dtype=torch.float32)
        self.output_scale = None
        if dtype in FP8_DTYPES and not group_size:
            self.output_scale = (want.abs().max() / max_value(dtype)).clamp_min(1e-6).reshape(1)
        tokens, heads, head_dim = self.query.shape
        out = poisoned(tokens, heads, head_dim, dtype=dtype)
        scales = poisoned(tokens, heads * head_dim // group_size, dtype=torch.float32) if group_size else None
        arguments = {"output_scale": self.output_scale, **rest, **logic, "longer_than": longer_than}
        arguments |= {} if least is None else {"smallest_scale": least}
        launch(kernel, out, scales, *self.batch, **arguments)
        return (out, scales, want) if group_size else (out, want)


def launch(kernel, *tensors, **arguments):
    if kernel == "portable":
        paged_prefill.launch_portable(*tensors, **arguments, config=None if GPU else SMALL)
        return
    out_scales, query, key, value = tensors[1:5]
    group_size = None if out_scales is None else query[0].numel() // out_scales.shape[1]
    why = paged_prefill.why_portable(
        query, key, value, arguments["q_scale"], scale=arguments["scale"], group_size=group_size
    )
    if why is not None:
        pytest.skip(why)
    paged_prefill.launch(*tensors, **arguments)


def check(out, want, divisor=None, slack=2**-8, share=0.05, used=-2):
    """slack: of the largest output, what the rounding of the probabilities allows. share: of FP8 codes that may differ.

    Tokens behind the used ones are left as they are, NaN; all that the reference makes 0 is 0.
    """
    assert out[used:].float().isnan().all()
    out, want = out[:used], want[:used]
    assert not want.isnan().any()
    assert (out.float()[want.abs().amax((1, 2)) == 0] == 0).all()
    slack = want.abs().max() * slack if want.numel() else 0.0
    if out.dtype in FP8_DTYPES:
        low, middle, high = (codes(quantize(x, divisor, out.dtype)) for x in (want - slack, want, want + slack))
        got = codes(out)
        assert ((got >= low - 1) & (got <= high + 1)).all()
        assert (got != middle).float().mean() <= share
    else:
        assert ((out.float() - want).abs() <= torch.finfo(out.dtype).eps * want.abs() + slack).all()
        assert (out.float() - want).norm() <= 2 * 2**-8 * want.norm()


kernels = pytest.mark.parametrize("kernel", ["portable", pytest.param("hopper", marks=pytest.mark.gpu)])
CASES = {
    "FP8 throughout": (MIXED, {}, {"dtype": E4M3}),
    "NHD": (MIXED, {"layout": "NHD"}, {"dtype": E4M3}),
    "page 64": (MIXED, {"page_size": 64}, {}),
    "page 256": (MIXED, {"page_size": 256, "layout": "NHD"}, {}),
    "page 48": (MIXED, {"page_size": 48}, {}),
    "static cache": (((20, 150), (33, 33)), {"page_size": 384}, {}),
    "e5m2": (MIXED, {"cache": E5M2, "query": E5M2}, {"dtype": E5M2}),
    "e4m3 query, e5m2 cache": (MIXED, {"cache": E5M2}, {}),
    "bf16 query": (MIXED, {"query": BF16}, {"dtype": E4M3}),
    "fp16 query": (MIXED, {"query": FP16}, {"dtype": FP16}),
    "bf16 cache": (MIXED, {"query": BF16, "cache": BF16}, {"dtype": E4M3}),
    "bf16 cache, FP8 query": (MIXED, {"cache": BF16}, {}),
    "fp16 cache": (MIXED, {"query": FP16, "cache": FP16}, {"dtype": FP16}),
    "group of 5": (MIXED, {"heads": 5, "kv_heads": 1}, {"dtype": E4M3}),
    "group of 8": (MIXED, {"heads": 8, "kv_heads": 1}, {"dtype": E4M3}),
    "MHA": (MIXED, {"heads": 3, "kv_heads": 3}, {"dtype": E4M3}),
    "head of 64": (MIXED, {"head_dim": 64}, {"dtype": E4M3}),
    "head of 64, bf16": (MIXED, {"head_dim": 64, "query": BF16, "cache": BF16}, {}),
    "window": (MIXED, {}, {"window": 19, "dtype": E4M3}),
    "window of 1": (MIXED, {}, {"window": 1}),
    "softcap": (MIXED, {}, {"softcap": 0.9}),
    "sinks": (MIXED, {}, {"sinks": (0.5, -3.0, -math.inf, 2.0), "dtype": E4M3}),
    "all": (
        MIXED,
        {"layout": "NHD", "query": BF16, "cache": BF16},
        {"window": 19, "softcap": 2.0, "sinks": (0.5, -1.0, 3.0, 0.0), "dtype": E4M3},
    ),
    "negative scale": (MIXED, {}, {"scale": -0.1}),
    "scale 0": (MIXED, {}, {"scale": 0.0}),
    "an empty sequence with queries": (((5, 0), (4, 4), (40, 0)), {}, {"dtype": E4M3}),
}


@kernels
@pytest.mark.parametrize("case", CASES)
def test_against_reference(case, kernel):
    lengths, shape, options = CASES[case]
    if "sinks" in options:
        options = options | {"sinks": torch.tensor(options["sinks"], device=DEVICE)}
    problem = Problem(lengths, **shape)
    check(*problem.run(kernel, **options), divisor=problem.output_scale)


@kernels
def test_query_quantized_inside(kernel):
    problem = Problem(MIXED, query=BF16)
    problem.scales["q_scale"] = torch.tensor(SCALES["q_scale"], device=DEVICE)
    out, want = problem.run(kernel)
    check(out, want)
    without = reference.paged_attention(*problem.batch, **problem.scales | {"q_scale": None}, scale=HEAD_DIM**-0.5)
    assert (want - without).norm() > 2 * (out.float() - want)[:-2].norm()
    problem.query = quantize(problem.query, problem.scales["q_scale"])
    outside, _ = problem.run(kernel)
    assert torch.equal(out[:-2], outside[:-2])


@kernels
def test_rounded_probabilities(kernel):
    prob_scale = torch.tensor([1 / 300], device=DEVICE)
    problem = Problem(((40, 70), (33, 33)))
    out, want = problem.run(kernel, prob_scale=prob_scale)
    check(out, want, slack=2**-5)  # the running maximum is not the last one, so p is rounded elsewhere
    plain, _ = problem.run(kernel)
    assert not torch.equal(out[:-2], plain[:-2])


@kernels
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_scale_for_each_group(groups, dtype, kernel):
    group_size = HEAD_DIM // groups
    problem = Problem(MIXED)
    out, scales, want = problem.run(kernel, dtype, group_size=group_size)
    exact = choose_scale(want, QuantSpec(dtype, "group", group_size, static=False)).flatten(1)
    assert scales[-2:].isnan().all()
    torch.testing.assert_close(scales[:-2], exact[:-2], rtol=2**-7, atol=0.0)
    values = out.float() * scales.view(*out.shape[:2], -1).repeat_interleave(group_size, -1)
    assert (values - want)[:-2].norm() <= (0.04 if dtype is E4M3 else 0.08) * want[:-2].norm()


@kernels
@pytest.mark.parametrize("query", [BF16, torch.float16])
def test_a_lower_bound_of_the_scales(query, kernel):
    """Half of the heads are below it; with 0 heads of zeros have NaN for codes."""
    problem, spec = Problem(MIXED, query=query, cache=query), QuantSpec(E4M3, "group", HEAD_DIM, static=False)
    _, scales, want = problem.run(kernel, E4M3, group_size=HEAD_DIM)
    least = scales[:-2].median().item()
    _, scales, _ = problem.run(kernel, E4M3, group_size=HEAD_DIM, least=least)
    exact = choose_scale(want, spec, least).flatten(1)
    torch.testing.assert_close(scales[:-2], exact[:-2], rtol=2**-7, atol=0.0)
    assert (scales[:-2] == least).float().mean() >= 0.5
    problem.value[:, 0] = 0.0
    out, scales, want = problem.run(kernel, E4M3, group_size=HEAD_DIM, least=0.0)
    zeros = (want == 0.0).all(-1)[:-2]
    assert 0.0 < zeros.float().mean() < 1.0
    assert torch.equal(scales[:-2] == 0.0, zeros)
    assert torch.equal(out[:-2].isnan(), zeros[..., None].expand_as(out[:-2]))


@kernels
def test_shorter_sequences_are_left_alone(kernel):
    problem = Problem(MIXED)
    out, want = problem.run(kernel, longer_than=16)
    whole, _ = problem.run(kernel)
    served = torch.cat([torch.full((q,), q > 16) for q, _ in MIXED] + [torch.zeros(2, dtype=torch.bool)]).to(DEVICE)
    assert out[~served].float().isnan().all()
    assert torch.equal(out[served], whole[served])
    assert not want.isnan().any()


@kernels
@pytest.mark.parametrize("name", SCALES)
def test_each_scale_is_applied_once(name, kernel):
    """A scale times 4 and its tensor or the logits' scale divided by 4 cancel, up to nothing: a power of two."""
    problem = Problem(MIXED)
    out, _ = problem.run(kernel, scale=0.04)
    problem.scales[name] = problem.scales[name] * 4
    again, _ = problem.run(kernel, scale=0.04 if name == "v_scale" else 0.01)
    factor = 4 if name == "v_scale" else 1
    assert torch.equal(again[:-2], out[:-2] * factor)


@kernels
def test_nan_stays_in_its_row(kernel):
    problem = Problem(((24, 40), (20, 20)))
    reference.bits(problem.query)[5, 1, 3] = 0xFF
    problem_out, want = problem.run(kernel)
    expected = torch.zeros(problem_out.shape, dtype=torch.bool, device=DEVICE)
    expected[5, 1] = expected[-2:] = True
    assert torch.equal(problem_out.float().isnan(), expected)
    assert torch.equal(want.isnan()[:-2], expected[:-2])


@kernels
def test_lengths_beyond_the_tokens_write_nothing_there(kernel):
    problem = Problem(((40, 40),))
    problem.query = problem.query[:34]
    memory = poisoned(42, *problem.query.shape[1:], dtype=BF16)
    scales = {**problem.scales, "prob_scale": None, "output_scale": None, "sinks": None}
    launch(kernel, memory[:34], None, *problem.batch, **scales, scale=0.1, window=None, softcap=0.0)
    assert memory[34:].isnan().all()
    assert not memory[:34].isnan().any()


@kernels
def test_nothing_to_do(kernel):
    problem = Problem(((0, 0), (0, 3)))
    out, _ = problem.run(kernel)
    assert out.isnan().all()


LONG = {
    "many lengths": (((300, 300), (1, 2000), (129, 1000), (0, 0), (128, 128), (257, 513), (64, 4096), (333, 400)), {}),
    "one": (((1500, 1500),), {}),
    "behind a long prefix": (((200, 9000), (65, 130)), {"page_size": 64}),
    "256 sequences": (tuple((i % 37, 3 * i % 211 + i % 37) for i in range(256)), {}),
    "533 sequences": (tuple((i % 23, 2 * i % 97 + i % 23) for i in range(533)), {"kv_heads": 1, "heads": 4}),
}


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("cache", [E4M3, BF16])
@pytest.mark.parametrize("case", LONG)
def test_long(case, cache, kernel):
    lengths, shape = LONG[case]
    problem = Problem(lengths, **{"page_size": 16, "heads": 8} | shape, cache=cache, query=cache)
    check(*problem.run(kernel, E4M3), divisor=problem.output_scale)


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("heads", [(64, 8), (40, 8), (32, 8), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cache", [E4M3, FP16])
def test_head_shapes(head_dim, heads, cache, kernel):
    problem = Problem(((70, 70), (1, 130), (200, 333)), *heads, head_dim, 32, cache, cache)
    check(*problem.run(kernel, E4M3), divisor=problem.output_scale)


@pytest.mark.gpu
@kernels
def test_graph_replayed_with_other_lengths(kernel):
    first, second = ((129, 700), (300, 300), (0, 0)), ((1, 90), (17, 641), (411, 650))
    problem = Problem(first, heads=8, page_size=64)
    problem.table = torch.randperm(len(problem.key), device=DEVICE).int().view(3, -1)
    problem.query = problem.query.contiguous()
    out = poisoned(*problem.query.shape, dtype=E4M3)
    scales = {**problem.scales, "prob_scale": None, "output_scale": torch.tensor([0.004], device=DEVICE)}
    options = {"sinks": None, "scale": 0.1, "window": None, "softcap": 0.0}

    def call():
        launch(kernel, out, None, *problem.batch, **scales, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    start, lengths = problem.start, problem.lengths
    for batch in (second, first, second):
        problem.fill(batch)
        start.copy_(problem.start)
        lengths.copy_(problem.lengths)
        reference.bits(out).fill_(0xFF)
        graph.replay()
        want = reference.paged_attention(
            *problem.batch, **scales | {"output_scale": None}, **options, dtype=torch.float32
        )
        check(out, want, scales["output_scale"], used=int(start[-1]))


@pytest.mark.gpu
@kernels
def test_a_cache_of_more_than_two_to_the_31_elements(kernel):
    page_size, heads, head_dim = 128, 8, 128
    pages = 2**31 // (page_size * heads * head_dim) + 3
    shape = (pages, heads, page_size, head_dim)
    problem = Problem(((130, 300), (70, 70)), heads=8, kv_heads=heads, head_dim=head_dim, page_size=page_size)
    table = problem.table.clone()
    problem.table.copy_(torch.arange(pages - table.numel(), pages, device=DEVICE).view(table.shape))
    for name in ("key", "value"):
        large = torch.empty(shape, dtype=E4M3, device=DEVICE)
        used = table.flatten().clamp(0, len(getattr(problem, name)) - 1).long()
        reference.bits(large)[problem.table.flatten().long()] = reference.bits(getattr(problem, name))[used]
        setattr(problem, name, large)
    check(*problem.run(kernel, E4M3), divisor=problem.output_scale)


@pytest.mark.gpu
def test_lengths_make_no_other_kernel():
    def compiled():
        return sum(len(cache[0]) for cache in paged_prefill._paged_prefill.device_caches.values())

    Problem(((20, 64),)).run("portable")
    before = compiled()
    for lengths in (((1, 1),), ((16, 16), (32, 640)), tuple((i, 2 * i) for i in range(17))):
        Problem(lengths).run("portable", longer_than=len(lengths) - 1)
    assert compiled() == before
