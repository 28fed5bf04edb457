"""rope_quant_kv_write: the op's contract, and what it computes, against plain torch steps."""

import pytest
import torch

from fusion_passes import reference
from fusion_passes.nn import PagedKVCache
from fusion_passes.ops import kv_cache_write, rope_quant_kv_write
from fusion_passes.quant import quantize

OP = torch.ops.fusion_passes.rope_quant_kv_write.default
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Q_SCALE, K_SCALE, V_SCALE = 0.041, 0.37, 2.9
NAMES = [
    "query",
    "key",
    "value",
    "cos",
    "sin",
    "positions",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "q_scale",
    "k_scale",
    "v_scale",
]


def inputs(tokens=7, dtype=BF16, cache=E4M3, rows=None, width=8, device="cpu", layout="HND"):
    """Query, key and value as slices of one projection; cos and sin as the halves of a table."""
    packed = torch.randn(tokens, 8, 16, device=device).to(dtype)
    q, k, v = packed.split([4, 2, 2], 1)
    cos, sin = torch.randn(rows or tokens, 2 * width, device=device).split(width, -1)
    positions = None if rows is None else torch.arange(tokens, device=device) * 5 % rows
    halves = PagedKVCache(3, 16, 2, 16, cache, layout=layout, device=device)
    slots = torch.randperm(48, device=device)[:tokens]
    slots[1::3] = -1
    scales = (torch.full((1,), x, device=device) for x in (Q_SCALE, K_SCALE, V_SCALE))
    if cache == BF16:
        scales = (torch.tensor(Q_SCALE, device=device), None, None)
    return dict(zip(NAMES, (q, k, v, cos, sin, positions, halves.key, halves.value, slots, *scales), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rotary_dim", "interleaved"), [(16, False), (16, True), (8, False)])
@pytest.mark.parametrize("rows", [None, 11])
def test_against_plain_steps(rows, rotary_dim, interleaved, device):
    """By complex numbers, which know nothing of halves and signs."""
    given = inputs(rows=rows, width=rotary_dim // 2, dtype=FP32, device=device)
    written = given | {"key_cache": given["key_cache"].clone(), "value_cache": given["value_cache"].clone()}
    cos, sin = (given[name] if rows is None else given[name][given["positions"]] for name in ("cos", "sin"))
    turn = torch.complex(cos, sin)[:, None]

    def rotate(x):
        pairs = x[..., :rotary_dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        turned = torch.view_as_real(torch.complex(first, second) * turn)
        turned = turned if interleaved else turned.transpose(-1, -2)
        return torch.cat((turned.flatten(-2), x[..., rotary_dim:]), -1)

    out = rope_quant_kv_write(**written, rotary_dim=rotary_dim, interleaved=interleaved)
    kv_cache_write(rotate(given["key"]), *(given[name] for name in ("value", "key_cache", "value_cache")),
                   *(given[name] for name in ("slot_mapping", "k_scale", "v_scale")))  # fmt: skip
    same = out.view(torch.uint8) == quantize(rotate(given["query"]), Q_SCALE, E4M3).view(torch.uint8)
    assert same.float().mean() > 0.99
    for name in ("key_cache", "value_cache"):
        assert (written[name].view(torch.uint8) == given[name].view(torch.uint8)).float().mean() > 0.99
        assert (written[name].float() != 0).any()


def test_one_rounding():
    """From bf16 inputs the codes are those of fp32 arithmetic, not of a result rounded to bf16 before."""
    given = inputs(tokens=48)
    out = rope_quant_kv_write(**given, rotary_dim=16)
    x, cos, sin = (given[name].float() for name in ("query", "cos", "sin"))
    exact = reference.rope(x, cos[:, None], sin[:, None], rotary_dim=16)
    assert torch.equal(out.float(), quantize(exact, Q_SCALE, E4M3).float())
    assert not torch.equal(out.float(), quantize(exact.bfloat16(), Q_SCALE, E4M3).float())


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, E4M3), ({"dtype": E5M2}, E5M2), ({"dtype": BF16, "q_scale": None}, BF16), ({"q_scale": None}, BF16)],
)
def test_dtype_of_the_query(options, dtype):
    given = inputs() | {key: options[key] for key in options if key in NAMES}
    out = rope_quant_kv_write(**given, rotary_dim=16, dtype=options.get("dtype"))
    assert out.dtype == dtype
    assert out.is_contiguous()


def test_factor_and_inverse_of_the_scale():
    given = inputs(dtype=FP32)
    bare = rope_quant_kv_write(**given | {"q_scale": None}, rotary_dim=16)
    divided = rope_quant_kv_write(**given, rotary_dim=16, q_scale_factor=4.0)
    times = rope_quant_kv_write(**given, rotary_dim=16, q_scale_factor=4.0, q_scale_inverse=True)
    assert torch.equal(divided.float(), quantize(bare, 4.0 * Q_SCALE, E4M3).float())
    assert torch.equal(times.float(), quantize(bare * (4.0 * torch.tensor(Q_SCALE)), 1.0, E4M3).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cache", "rows", "layout"), [(E4M3, 11, "HND"), (BF16, None, "NHD")])
def test_opcheck(cache, rows, layout, device):
    given = inputs(cache=cache, rows=rows, device=device, layout=layout)
    # test_schema compares arguments by torch.allclose, which FP8 does not have (torch 2.13).
    some = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    options = {"rotary_dim": 16} | ({} if cache == E4M3 else {"dtype": BF16})
    if cache == BF16:
        given["q_scale"] = None
    torch.library.opcheck(OP, (), given | options, test_utils=some if cache == E4M3 else "ALL")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(7, 4, 8).bfloat16()}, ValueError, r"query must be \[7, heads, 16\]"),
        ({"query": torch.zeros(7, 4, 16)}, TypeError, "query and key must have one dtype"),
        ({"rotary_dim": 7}, ValueError, "rotary_dim must be even"),
        ({"rotary_dim": 18}, ValueError, "to the head size, 16, got 18"),
        ({"cos": torch.zeros(7, 5)}, ValueError, r"cos must be \[rows, 16\] or \[rows, 8\]"),
        ({"sin": torch.zeros(7, 8).half()}, TypeError, "cos and sin must have one dtype"),
        ({"sin": torch.zeros(7, 16)}, ValueError, "must be alike"),
        ({"cos": torch.zeros(6, 8), "sin": torch.zeros(6, 8)}, ValueError, "a row for each of the 7 tokens"),
        ({"positions": torch.zeros(7)}, TypeError, "positions must be int32 or int64"),
        ({"positions": torch.zeros(6, dtype=torch.int64)}, ValueError, r"positions must be \[7\]"),
        ({"positions": torch.full((7,), 7)}, IndexError, "positions are from 7 to 7, cos and sin have 7 rows"),
        ({"slot_mapping": torch.full((7,), 48)}, IndexError, "names slot 48"),
        ({"q_scale": torch.ones(2)}, ValueError, "q_scale must hold one element"),
        ({"q_scale": torch.ones((), device="meta")}, ValueError, "q_scale is on meta"),
        ({"dtype": BF16}, ValueError, "leave the scale out"),
        ({"dtype": torch.int8, "q_scale": None}, TypeError, "not as torch.int8"),
        ({"k_scale": torch.ones(2)}, ValueError, "k_scale must hold one element"),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        rope_quant_kv_write(**{"rotary_dim": 16} | inputs() | change)


def test_no_tokens():
    given = inputs(tokens=0)
    assert rope_quant_kv_write(**given, rotary_dim=16).shape == (0, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_scales_are_read_in_each_call(capture):
    given = inputs(device="cuda")
    out = rope_quant_kv_write(**given, rotary_dim=16)
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = rope_quant_kv_write(**given, rotary_dim=16)
    for scale in (0.3, 4.0):
        given["q_scale"].fill_(scale)
        given["k_scale"].fill_(3.0 * scale)
        if capture:
            graph.replay()
        else:
            out = rope_quant_kv_write(**given, rotary_dim=16)
        cpu = {name: x if x is None else x.cpu() for name, x in given.items()}
        want = rope_quant_kv_write(**cpu, rotary_dim=16)
        for a, b in ((out, want), (given["key_cache"], cpu["key_cache"])):
            assert (a.cpu().view(torch.uint8) == b.view(torch.uint8)).float().mean() > 0.99


@pytest.mark.gpu
def test_slots_are_checked_on_request(monkeypatch):
    given = inputs(device="cuda")
    given["slot_mapping"][0] = 48
    rope_quant_kv_write(**given, rotary_dim=16)
    monkeypatch.setenv("FUSION_PASSES_CHECK", "1")
    with pytest.raises(IndexError, match="names slot 48"):
        rope_quant_kv_write(**given, rotary_dim=16)
