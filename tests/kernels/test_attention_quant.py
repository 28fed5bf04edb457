"""The attention kernels against the fp32 reference, code by code. On a card if there is one, else interpreted."""

import importlib

import pytest
import torch

from fusion_passes import reference
from fusion_passes.ops.attention_quant import KERNELS, AttentionQuantArguments
from fusion_passes.quant import codes, max_value, saturate

# Infinities and NaN are numbers here; NumPy, in the interpreter, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
HOPPER, PORTABLE = KERNELS
on_hopper = pytest.param(HOPPER, marks=pytest.mark.gpu, id="hopper")
kernels = pytest.mark.parametrize("kernel", [on_hopper, pytest.param(PORTABLE, id="portable")])


def qkv(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=BF16):
    """Random query, key and value as transposed views of [batch, length, heads, head_dim]."""
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    return [torch.randn(batch, *s, head_dim, device=DEVICE).to(dtype).transpose(1, 2) for s in shapes]


def run(kernel, q, k, v, mask=None, out_scale=None, *, dtype=E4M3, layout="bhsd", out=None, **options):
    """Launch a kernel, into memory full of NaN."""
    why = kernel.unsupported(AttentionQuantArguments(q, k, v, mask, dtype=dtype), None if q.is_cuda else (9, 0))
    if why is not None:
        pytest.skip(why)
    if out is None:
        batch, heads, length, head_dim = q.shape
        shape = (batch, heads, length, head_dim) if layout == "bhsd" else (batch, length, heads, head_dim)
        out = torch.full(shape, 0x7F, dtype=torch.uint8, device=q.device).view(dtype)
        out = out if layout == "bhsd" else out.transpose(1, 2)
    defaults = {
        "is_causal": False,
        "scale": q.shape[-1] ** -0.5,
        "output_scale_factor": 1.0,
        "output_scale_inverse": False,
    }
    launch = importlib.import_module(kernel.module).launch
    launch(out, q, k, v, mask, out_scale, **(defaults | options))
    return out


def check(out, q, k, v, mask=None, *, is_causal=False, scale=None, divisor=1.0, share=0.08):
    """Every code within one step of what the rounding of the probabilities to q's dtype allows; NaN where NaN is due.

    divisor: of the attention output before its quantization. share: of codes that may differ from the reference at all.
    """
    options = {"is_causal": is_causal, "scale": scale}
    want = reference.attention(q, k, v, mask, **options) / divisor
    rounding = torch.finfo(q.dtype).eps * reference.attention(q, k, v.abs(), mask, **options) / abs(divisor)
    rounding = rounding.where(rounding.isfinite(), 0.0)
    assert torch.equal(out.isnan(), want.isnan())
    number = ~want.isnan()
    got = codes(out)[number]
    assert (got >= codes(saturate(want - rounding, out.dtype))[number] - 1).all()
    assert (got <= codes(saturate(want + rounding, out.dtype))[number] + 1).all()
    different = (got != codes(saturate(want, out.dtype))[number]).float()
    assert different.numel() == 0 or different.mean() <= share


def full_range(v, dtype=E4M3):
    """An output scale that uses all codes: the output is a mean of values, so it cannot overflow."""
    largest = v.float().abs().max() if v.numel() else v.new_ones((), dtype=torch.float32)
    return (largest / max_value(dtype)).reshape(1)


def run_and_check(kernel, q, k, v, mask=None, *, dtype=E4M3, layout="bhsd", **options):
    out_scale = full_range(v, dtype)
    out = run(kernel, q, k, v, mask, out_scale, dtype=dtype, layout=layout, **options)
    check(out, q, k, v, mask, divisor=out_scale, **options)
    return out


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", PORTABLE.head_dims)
def test_head_dims(kernel, head_dim, is_causal):
    run_and_check(kernel, *qkv(2, 4, 2, 133, 133, head_dim), is_causal=is_causal)


@kernels
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("inputs", [BF16, FP16])
def test_dtypes(kernel, inputs, dtype):
    run_and_check(kernel, *qkv(1, 2, 1, 70, 70, 64, inputs), dtype=dtype, layout="bshd")


@pytest.mark.parametrize("lengths", [(1, 1), (1, 67), (7, 33), (33, 7), (70, 133), (133, 70), (5, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(lengths, is_causal):
    run_and_check(PORTABLE, *qkv(2, 4, 1, *lengths, 64), is_causal=is_causal)


MASKS = {
    "keys of a sequence": lambda b, h, q, k: torch.rand(b, 1, 1, k, device=DEVICE) > 0.4,
    "one for all": lambda b, h, q, k: torch.rand(q, k, device=DEVICE) > 0.4,
    "expanded": lambda b, h, q, k: (torch.rand(b, 1, q, k, device=DEVICE) > 0.4).expand(b, h, q, k),
    "transposed": lambda b, h, q, k: (torch.rand(b, h, k, q, device=DEVICE) > 0.4).transpose(2, 3),
    "added": lambda b, h, q, k: 3 * torch.randn(b, h, q, k, device=DEVICE),
    "added, bf16": lambda b, h, q, k: (3 * torch.randn(1, h, q, k, device=DEVICE)).to(BF16),
    "added, -inf": lambda b, h, q, k: torch.zeros(b, 1, q, k, device=DEVICE).bernoulli_(0.5).log(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    q, k, v = qkv(2, 4, 2, 37, 70, 64)
    run_and_check(PORTABLE, q, k, v, MASKS[name](2, 4, 37, 70))


@pytest.mark.parametrize("value", [False, float("-inf"), torch.finfo(torch.float32).min, torch.finfo(BF16).min])
def test_rows_that_see_nothing(value):
    """False and -inf give 0; the lowest finite number, which models use for -inf, gives the mean of all values."""
    q, k, v = qkv(1, 2, 2, 9, 70, 64)
    mask = torch.zeros(9, 70, device=DEVICE) if value is not False else torch.ones(9, 70, dtype=bool, device=DEVICE)
    mask[4] = value
    mask[5, :64] = value
    mask[6, 3:] = value
    out = run_and_check(PORTABLE, q, k, v, mask)
    assert (out[:, :, 4].float() == 0).all() == (value is False or value == float("-inf"))


@kernels
def test_saturation_and_special_values(kernel):
    q, k, v = qkv(1, 2, 1, 70, 70, 64)
    q[0, 1, 5, 3] = float("nan")
    v[0, 0, 0, 2:5] = torch.tensor([float("inf"), float("-inf"), float("nan")])  # key 0, which every row sees
    for dtype in (E4M3, E5M2):
        for is_causal in (False, True):
            tiny = torch.tensor([1e-6], device=DEVICE)
            out = run(kernel, q, k, v, None, tiny, dtype=dtype, is_causal=is_causal).float()
            check(out.to(dtype), q, k, v, is_causal=is_causal, divisor=tiny)
            assert out[0, 1, 5].isnan().all()
            assert (out[0, 0, :, 2] == max_value(dtype)).all()
            assert (out[0, 0, :, 3] == -max_value(dtype)).all()
            assert out[0, 0, :, 4].isnan().all()


@kernels
@pytest.mark.parametrize("scores", ["+inf", "-inf", "nan"])
def test_special_scores(kernel, scores):
    """A key that makes scores infinite: +inf gives NaN, -inf counts as masked, as in torch."""
    q, k, v = qkv(1, 2, 2, 70, 70, 64)
    q[..., 0] = 1.0
    k[0, 0, 69, 0] = float(scores)
    k[0, 1, 33, 0] = float(scores)
    run_and_check(kernel, q, k, v)


@kernels
def test_all_scores_minus_infinity(kernel):
    q, k, v = qkv(1, 1, 1, 70, 70, 64)
    q[..., 0], k[..., 0] = 1.0, float("-inf")
    out = run_and_check(kernel, q, k, v, is_causal=True)
    assert (out.float() == 0).all()


@kernels
def test_output_scales(kernel):
    q, k, v = qkv(1, 2, 1, 70, 70, 64)
    scale = torch.tensor(0.03, device=DEVICE)  # 0-d is one element too
    check(run(kernel, q, k, v, None, scale, output_scale_factor=0.5), q, k, v, divisor=scale * 0.5)
    check(run(kernel, q, k, v, None, None, output_scale_factor=0.02), q, k, v, divisor=0.02)
    inverse = run(kernel, q, k, v, None, scale, output_scale_factor=900.0, output_scale_inverse=True)
    check(inverse, q, k, v, divisor=1 / (scale * 900.0))
    inverse = run(kernel, q, k, v, None, None, output_scale_factor=40.0, output_scale_inverse=True)
    check(inverse, q, k, v, divisor=1 / 40)
    negative = run(kernel, q, k, v, None, -scale)
    assert torch.equal(negative.float(), -run(kernel, q, k, v, None, scale).float())


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.7])
def test_softmax_scales(scale):
    run_and_check(PORTABLE, *qkv(1, 2, 1, 40, 70, 64), scale=scale)


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
def test_strides(kernel, is_causal):
    packed = torch.randn(2, 70, 4 + 1 + 1, 64, device=DEVICE).to(BF16)
    q, k, v = (x.transpose(1, 2) for x in packed.split([4, 1, 1], 2))
    out = run_and_check(kernel, q, k, v, is_causal=is_causal)
    same = run(kernel, q.contiguous(), k.contiguous(), v.contiguous(), None, full_range(v), is_causal=is_causal)
    assert torch.equal(out.view(torch.uint8), same.view(torch.uint8))
    # k and v with strides of their own
    wide = torch.randn(2, 1, 140, 64, device=DEVICE).to(BF16)
    run_and_check(kernel, q, wide[:, :, ::2], v.contiguous(), is_causal=is_causal)


@kernels
def test_size_one_dimensions_with_odd_strides(kernel):
    q, k, v = qkv(1, 1, 1, 70, 70, 64)
    q, k, v = (x.as_strided(x.shape, (4609, 7, 64, 1)) for x in (q, k, v))
    run_and_check(kernel, q, k, v)
    q, k, v = (x[:, :, :1].as_strided((1, 1, 1, 64), (0, 3, 1, 1)) for x in (q, k, v))
    run_and_check(kernel, q, k, v, is_causal=True)


@kernels
def test_expanded_heads(kernel):
    """repeat_kv written as expand: heads with stride 0."""
    q, k, v = qkv(2, 4, 1, 33, 33, 64)
    run_and_check(kernel, q, k.expand(2, 4, 33, 64), v.expand(2, 4, 33, 64))


@kernels
def test_writes_only_its_output(kernel):
    q, k, v = qkv(1, 2, 1, 70, 70, 64)
    canvas = torch.full((1, 2 + 2, 70 + 26, 64), 0x55, dtype=torch.uint8, device=DEVICE)
    out = canvas.view(E4M3)[:, 1:3, 13:83]
    before = canvas.clone()
    run(kernel, q, k, v, None, full_range(v), out=out)
    check(out, q, k, v, divisor=full_range(v))
    canvas[:, 1:3, 13:83] = before[:, 1:3, 13:83] = 0
    assert torch.equal(canvas, before)


# On a card: real lengths.


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", PORTABLE.head_dims)
def test_real_lengths(kernel, head_dim, is_causal):
    for batch, heads, kv_heads, length in [
        (1, 8, 2, 1),
        (2, 8, 2, 7),
        (2, 8, 8, 256),
        (2, 40, 8, 533),
        (1, 12, 4, 1999),
    ]:
        q, k, v = qkv(batch, heads, kv_heads, length, length, head_dim)
        out = run_and_check(kernel, q, k, v, is_causal=is_causal, layout="bshd")
        for _ in range(3):
            again = run(kernel, q, k, v, None, full_range(v), is_causal=is_causal, layout="bshd")
            assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_moving_maximum(kernel, head_dim, is_causal):
    """The maximum of a row grows from block to block, or falls, by far more than one rescaling step."""
    q, k, v = qkv(1, 8, 2, 1024, 1024, head_dim)
    unit = head_dim**-0.5
    for ramp in (torch.linspace(400, 0, 1024, device=DEVICE), torch.linspace(0, 400, 1024, device=DEVICE)):
        steep_q, steep_k = (0.1 * q.float() + 4 * unit).to(BF16), (0.1 * k.float() + ramp[:, None] * unit).to(BF16)
        run_and_check(kernel, steep_q, steep_k, v, is_causal=is_causal)
    run_and_check(kernel, 20 * q, k, v, is_causal=is_causal)


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_lengths(kernel, head_dim):
    """No length hangs, or gives another result the second time."""
    for length in range(1, 300, 13):
        q, k, v = qkv(3, 6, 2, length, length, head_dim)
        for is_causal in (False, True):
            out = run_and_check(kernel, q, k, v, is_causal=is_causal)
            again = [run(kernel, q, k, v, None, full_range(v), is_causal=is_causal) for _ in range(20)]
            assert all(torch.equal(out.view(torch.uint8), x.view(torch.uint8)) for x in again)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_different_lengths(is_causal):
    for q_len, kv_len in [(1, 4097), (7, 1000), (256, 533), (533, 256), (1000, 1)]:
        run_and_check(PORTABLE, *qkv(2, 8, 2, q_len, kv_len, 128), is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", PORTABLE.head_dims)
def test_real_masks(head_dim):
    for q_len in (533, 1100):
        q, k, v = qkv(2, 8, 2, q_len, 700, head_dim)
        padding = torch.arange(700, device=DEVICE) < torch.tensor([700, 401], device=DEVICE)[:, None, None, None]
        run_and_check(PORTABLE, q, k, v, padding)
        run_and_check(PORTABLE, q, k, v, torch.randn(1, 8, q_len, 700, device=DEVICE).to(BF16))
        run_and_check(PORTABLE, q, k, v, torch.randn(2, 1, q_len, 700, device=DEVICE))


def needs_memory(gib):
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.gpu
@kernels
def test_more_than_two_to_the_31_elements(kernel):
    """Batches far apart, and an output that is itself that large."""
    needs_memory(16)
    batch, heads, length, head_dim = 2**31 // (8 * 64 * 128) + 3, 8, 64, 128
    q = torch.empty(batch, heads, length, head_dim, dtype=BF16, device=DEVICE)
    k, v = (torch.empty(batch, 1, length, head_dim, dtype=BF16, device=DEVICE) for _ in range(2))
    for x in (q, k, v):
        x[:] = torch.randn(x.shape[1:], device=DEVICE)
        x[-1] = torch.randn(x.shape[1:], device=DEVICE)
    out = run(kernel, q, k, v, None, full_range(v[-2:]), layout="bshd")
    check(out[-2:], q[-2:], k[-2:], v[-2:], divisor=full_range(v[-2:]))
    assert torch.equal(out[0].view(torch.uint8), out[-2].view(torch.uint8))


@pytest.mark.gpu
@kernels
def test_rows_far_apart(kernel):
    """Keys whose rows lie so far apart that one sequence spans more than 2**31 elements."""
    needs_memory(10)
    length, stride = 300, 2**23
    memory = torch.empty(length * stride, dtype=BF16, device=DEVICE)
    q, k, v = qkv(1, 2, 2, length, length, 128)
    k_far, v_far = (memory[i * 1024 :].as_strided(k.shape, (0, 128, stride, 1)) for i in range(2))
    k_far.copy_(k)
    v_far.copy_(v)
    run_and_check(kernel, q, k_far, v_far, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_short_tiles(head_dim, is_causal):
    """Several tiles of one key block for each program: what one tile still reads, the next must not overwrite."""
    q, k, v = qkv(7, 64, 8, 17, 17, head_dim)
    scale = torch.tensor(0.02, device=DEVICE)
    first = run(HOPPER, q, k, v, out_scale=scale, is_causal=is_causal)
    check(first, q, k, v, is_causal=is_causal, divisor=0.02)
    for _ in range(200):
        again = run(HOPPER, q, k, v, out_scale=scale, is_causal=is_causal)
        assert torch.equal(again.view(torch.uint8), first.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed):
    """Any combination of what the portable kernel takes."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    group, kv_heads, batch = pick(1, 2, 3, 5), pick(1, 2), pick(1, 2)
    q_len, kv_len = (pick(1, 2, 15, 16, 63, 64, 65, 100, 129) for _ in range(2))
    head_dim, dtype, out_dtype = pick(64, 80, 96, 128, 192, 256), pick(BF16, FP16), pick(E4M3, E5M2)
    q, k, v = qkv(batch, group * kv_heads, kv_heads, q_len, kv_len, head_dim, dtype)
    kind = pick("full", "causal", "bool", "float")
    mask = None
    if kind == "bool":
        mask = torch.rand(batch, 1, q_len, kv_len, device=DEVICE) < 0.7
    elif kind == "float":
        mask = torch.randn(q_len, kv_len, device=DEVICE)
    options = {"is_causal": kind == "causal", "scale": pick(None, 0.3)}
    divisor = pick(0.002, 0.02, 1.0)
    scale = torch.tensor(divisor, device=DEVICE)
    given = options | {"scale": options["scale"] or head_dim**-0.5}
    out = run(PORTABLE, q, k, v, mask, scale, dtype=out_dtype, layout=pick("bshd", "bhsd"), **given)
    check(out, q, k, v, mask, **options, divisor=divisor)
