"""The operator's contract: schema, fake, strides, errors, which kernel takes what. Its numbers: tests/kernels."""

import functools
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusion_passes import reference
from fusion_passes.ops.attention_quant import KERNELS, AttentionQuantArguments, attention_quant, choose, why_unsupported
from fusion_passes.quant import max_value

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OP = torch.ops.fusion_passes.attention_quant.default
HOPPER, PORTABLE = KERNELS


def packed(batch=2, length=9, heads=8, kv_heads=2, head_dim=64, device="cpu", dtype=torch.bfloat16):
    """Query, key and value as views of one projection."""
    x = torch.randn(batch, length, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    return [part.transpose(1, 2) for part in x.split([heads, kv_heads, kv_heads], 2)]


def same(a, b):
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"layout": "bhsd", "scale": 0.2},
        {"output_scale_inverse": True, "output_scale_factor": 3.0},
        {"dtype": torch.float8_e5m2},
    ],
    ids=str,
)
def test_opcheck(device, options):
    scale = torch.tensor([0.02], device=device)
    options = {"dtype": torch.float8_e4m3fn} | options
    torch.library.opcheck(OP, (*packed(device=device), None, scale), options)
    torch.library.opcheck(OP, (*packed(1, 1, device=device), None, scale), options)
    if not options.get("is_causal"):
        mask = torch.rand(2, 1, 1, 9, device=device) > 0.3
        torch.library.opcheck(OP, (*packed(device=device), mask, None), options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(2, 9), (1, 1), (0, 9), (3, 0)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layout(layout, sizes, device):
    out = attention_quant(*packed(*sizes, device=device), layout=layout, output_scale_factor=0.01)
    batch, length = sizes
    assert out.shape == (batch, 8, length, 64)
    order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    assert out.permute(order).is_contiguous()


def test_cpu_is_the_reference():
    q, k, v = packed()
    scale = torch.tensor([0.02])
    out = attention_quant(q, k, v, None, scale, is_causal=True, output_scale_factor=0.5)
    want = reference.attention_quant(q, k, v, None, scale, is_causal=True, output_scale_factor=0.5)
    assert torch.equal(out.view(torch.uint8), want.contiguous().view(torch.uint8))


def test_scale_is_read_on_each_call():
    q, k, v = packed()
    scale = torch.tensor([0.02])
    run = torch.compile(lambda: OP(q, k, v, None, scale, dtype=torch.float8_e4m3fn).float(), backend="eager")
    before = run()
    scale.mul_(2)
    assert not torch.equal(before, run())
    assert torch.equal(run(), attention_quant(q, k, v, None, scale).float())


ERRORS = {
    "add a batch dim": lambda q, k, v: dict(query=q[0]),
    "one floating-point dtype": lambda q, k, v: dict(key=k.float()),
    "on one device": lambda q, k, v: dict(key=k.to("meta")),
    "key and value must have one shape": lambda q, k, v: dict(value=v[:, :, :-1]),
    "share batch and head_dim": lambda q, k, v: dict(key=k[:1], value=v[:1]),
    "multiple of the key heads": lambda q, k, v: dict(query=q[:, :7]),
    "dtype must be one of": lambda q, k, v: dict(dtype=torch.float16),
    "layout must be": lambda q, k, v: dict(layout="sbhd"),
    "exclude each other": lambda q, k, v: dict(attn_mask=torch.ones(9, 9, dtype=torch.bool), is_causal=True),
    "attn_mask must be bool": lambda q, k, v: dict(attn_mask=torch.ones(9, 9, dtype=torch.int32)),
    "does not broadcast": lambda q, k, v: dict(attn_mask=torch.ones(9, 8, dtype=torch.bool)),
    "must be float32": lambda q, k, v: dict(output_scale=torch.ones(1, dtype=torch.bfloat16)),
    "one element": lambda q, k, v: dict(output_scale=torch.ones(8)),
    "move it there once": lambda q, k, v: dict(output_scale=torch.ones(1, device="meta")),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("fake", [False, True])
def test_errors_say_what_to_do(message, fake):
    q, k, v = packed()
    arguments = dict(query=q, key=k, value=v, attn_mask=None, output_scale=None) | ERRORS[message](q, k, v)
    arguments = {"dtype": torch.float8_e4m3fn} | arguments
    positional = [arguments.pop(name) for name in ("query", "key", "value", "attn_mask", "output_scale")]
    if not fake:
        options = {"is_causal": False, "layout": "bshd"} | arguments
        with pytest.raises((ValueError, TypeError), match=message):
            AttentionQuantArguments(*positional, **options).validate()
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises((ValueError, TypeError), match=message):
            OP(*(x if x is None else mode.from_tensor(x) for x in positional), **arguments)


def test_strided_inputs_are_not_copied():
    def model(x, keep):
        q, k, v = (part.transpose(1, 2) for part in x.split([8, 2, 2], 2))
        mask = keep[:, None, None, :].expand(x.shape[0], 8, x.shape[1], x.shape[1])
        out = OP(q, k, v, mask, None, dtype=torch.float8_e4m3fn)
        return out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)

    x, keep = torch.randn(2, 9, 12, 64, dtype=torch.bfloat16), torch.rand(2, 9) > 0.3
    out, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), x, keep)
    assert same(out, model(x, keep))
    assert "empty_strided" not in code.split("def call")[1].split("def benchmark")[0]


def test_dynamic_sizes_make_one_graph():
    graphs = torch._dynamo.testing.CompileCounter()

    @functools.partial(torch.compile, backend=graphs, dynamic=True, fullgraph=True)
    def model(q, k, v):
        return OP(q, k, v, None, None, is_causal=True, dtype=torch.float8_e4m3fn).transpose(1, 2)

    for batch, length in [(3, 9), (2, 5), (7, 64), (5, 31)]:
        q, k, v = packed(batch, length)
        assert torch.equal(model(q, k, v).float(), attention_quant(q, k, v, is_causal=True).transpose(1, 2).float())
    assert graphs.frame_count == 1


def fake_cuda(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.bfloat16):
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    return [torch.empty(batch, *s, head_dim, dtype=dtype, device="cuda").transpose(1, 2) for s in shapes]


def test_choice_of_kernel(monkeypatch):
    module = sys.modules["fusion_passes.ops.support"]
    monkeypatch.setattr(module, "triton_version", lambda: (3, 6))
    with FakeTensorMode():
        q, k, v = fake_cuda(2, 8, 2, 64, 64, 128)
        mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
        assert choose(AttentionQuantArguments(q, k, v), (9, 0)) is HOPPER
        assert choose(AttentionQuantArguments(q, k, v), (10, 0)) is PORTABLE
        assert choose(AttentionQuantArguments(q, k, v, mask), (9, 0)) is PORTABLE
        assert choose(AttentionQuantArguments(*fake_cuda(2, 8, 2, 1, 64, 128)), (9, 0)) is PORTABLE
        assert choose(AttentionQuantArguments(q, k, v, scale=-1.0), (9, 0)) is PORTABLE
        one_head = fake_cuda(2, 8, 1, 64, 64, 128)[1]
        assert choose(AttentionQuantArguments(q, one_head, one_head), (9, 0)) is HOPPER
        assert choose(AttentionQuantArguments(q, one_head.expand(2, 2, 64, 128), v), (9, 0)) is HOPPER
        assert choose(AttentionQuantArguments(*fake_cuda(2, 3, 1, 64, 64, 68)[:1], k, v), (9, 0)) is None
        assert choose(AttentionQuantArguments(*fake_cuda(2, 8, 8, 64, 64, 96)), (9, 0)) is PORTABLE
        assert choose(AttentionQuantArguments(q, k, v), (8, 0)) is None
        assert "8.9 or later, found 8.0" in why_unsupported(AttentionQuantArguments(q, k, v), (8, 0))
        assert "head size 72" in why_unsupported(AttentionQuantArguments(*fake_cuda(2, 8, 8, 64, 64, 72)), (9, 0))
        assert "not float32" in why_unsupported(
            AttentionQuantArguments(*fake_cuda(2, 8, 8, 64, 64, 64, torch.float32)), (9, 0)
        )
        last = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="cuda").transpose(2, 3)
        assert "stride 64 in its last dimension" in why_unsupported(AttentionQuantArguments(last, k, v), (9, 0))
        monkeypatch.setattr(module, "triton_version", lambda: (3, 9))
        assert choose(AttentionQuantArguments(q, k, v), (9, 0)) is PORTABLE
        assert "found 3.9" in HOPPER.unsupported(AttentionQuantArguments(q, k, v), (9, 0))
    assert why_unsupported(AttentionQuantArguments(*packed())) is None  # the reference, on the CPU


def test_symbolic_sizes_add_no_guard():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        x = mode.from_tensor(
            torch.empty(3, 70, 8, 64, dtype=torch.bfloat16),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2 + [DimDynamic.STATIC] * 2),
        ).transpose(1, 2)
        assert PORTABLE.unsupported(AttentionQuantArguments(x, x, x), (9, 0)) is None
        assert choose(AttentionQuantArguments(x, x, x), (9, 0)) in KERNELS
        out = OP(x, x, x, None, None, dtype=torch.float8_e4m3fn)
        assert out.shape == x.shape
        assert out.stride() == x.stride()
    assert not shapes.guards


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5), (1, 9)])
def test_reference_is_scaled_dot_product_attention(lengths, is_causal):
    q, k, v = torch.randn(2, 4, lengths[0], 64), *torch.randn(2, 2, 2, lengths[1], 64).unbind()
    want = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        reference.attention(q, k, v, is_causal=is_causal), want(q, k, v, is_causal=is_causal, enable_gqa=True)
    )
    if is_causal:
        return
    mask = torch.rand(2, 1, *lengths) > 0.4
    mask[0, 0, 0] = False
    for m in (mask, torch.zeros(2, 1, *lengths).masked_fill(~mask, float("-inf")), torch.randn(lengths)):
        torch.testing.assert_close(
            reference.attention(q, k, v, m, scale=0.3), want(q, k, v, m, scale=0.3, enable_gqa=True)
        )


def test_import_needs_neither_triton_nor_sympy():
    code = "import sys, torch; old = set(sys.modules); import fusion_passes.ops; print(set(sys.modules) - old)"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "triton" not in new
    assert "sympy" not in new


@pytest.mark.gpu
def test_cuda_graph_follows_its_scale():
    q, k, v = packed(device="cuda", length=128)
    scale = torch.tensor([0.02], device="cuda")
    attention_quant(q, k, v, None, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_quant(q, k, v, None, scale)
    scale.fill_(0.1)
    graph.replay()
    assert same(out, attention_quant(q, k, v, None, scale))


@pytest.mark.gpu
def test_unaligned_addresses_run_on_the_portable_kernel():
    x = torch.randn(2 * 64 * 4 * 64 + 1, device="cuda").to(torch.bfloat16)[1:].view(2, 64, 4, 64).transpose(1, 2)
    out = attention_quant(x, x, x, is_causal=True, output_scale_factor=0.01)
    aligned = attention_quant(x.clone(), x.clone(), x.clone(), is_causal=True, output_scale_factor=0.01)
    assert (out.float() != aligned.float()).float().mean() < 0.08


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first graph of torch's own graph trees is
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(mode):
    q, k, v = packed(device="cuda", length=128)
    model = torch.compile(lambda q: OP(q * 2, k, v, None, None, dtype=torch.float8_e4m3fn), mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = model(q)
    assert same(out, attention_quant(q * 2, k, v))
    assert out.float().abs().max() <= max_value(torch.float8_e4m3fn)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_does_not_round_it(device):
    query, key, value = (x.float() for x in packed(device="cpu"))
    scale = torch.tensor([0.01])
    if device == "cuda":
        query, key, value, scale = (x.to(device, torch.bfloat16) for x in (query, key, value, scale))
        scale = scale.float()
    expected = attention_quant(query, key, value, output_scale=scale)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert same(attention_quant(query, key, value, output_scale=scale), expected)
