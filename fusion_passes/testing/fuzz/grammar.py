"""Programs: idioms and their near misses among views, extra users, unrelated ops, and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from fusion_passes.testing.fuzz import cached, dense, quantization, writes
from fusion_passes.testing.fuzz.builder import Builder
from fusion_passes.testing.fuzz.program import Program

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def pure_programs(draw: Draw) -> Program:
    """Programs whose faults show in the graph: nothing is written, but for a KV cache, whose new values are returned
    too."""
    kind = draw(st.sampled_from(("attention", "attention", "attention", "cache", "cache", "quantization")))
    dynamic = kind != "cache" and draw(st.integers(0, 13)) == 13
    b = Builder(draw, n=draw(st.sampled_from((5, 8))) if dynamic else Program.n, writes=False, dynamic=dynamic)
    b.note("program", kind)
    if dynamic:
        b.note("sizes", "dynamic")
    if kind == "cache":
        cached.step(b)
    elif kind == "attention":
        _attention_and_codes(b)
    else:
        _codes_alone(b)
    surroundings(b)
    return b.finish()


@st.composite
def writing_programs(draw: Draw) -> Program:
    """Programs that write to an input or to what they have made: an op of the user's, in place, a KV cache."""
    b = Builder(draw, n=Program.n, writes=True, dynamic=False)
    kind = b.choose("state", "state", "cache", "attention", "attention", "layer")
    b.note("program", f"writes, {kind}")
    writes.watch(b)
    if kind == "state":
        writes.states(b)
    elif kind == "cache":
        cached.step(b)
    elif kind == "layer":
        writes.layer(b)
    else:
        _attention_and_codes(b)
    writes.finish(b)
    if b.one_in(4):
        surroundings(b)
    return replace(b.finish(), in_place_writes=b.choose(True, True, True, False))


def programs() -> st.SearchStrategy[Program]:
    """Both kinds; one in eight writes."""
    return st.integers(0, 7).flatmap(lambda i: writing_programs() if i == 7 else pure_programs())


def _attention_and_codes(b: Builder) -> None:
    out = _views(b, dense.attention(b))
    codes = quantization.quantized(b, out)
    _behind(b, codes)


RARE_BETWEEN = (
    *("flipped", "narrow", "last token", "first of the batch", "unbind", "part of heads", "stride 0", "strided"),
    *("fp32", "bf16", "relu", "residual", "swapped", "opaque"),
)


def _views(b: Builder, out: str) -> str:
    """What stands between [batch, heads, queries, head_dim] and the quantization."""
    heads, size = b.tensor(out).shape[1], b.tensor(out).shape[3]
    batch, length = b.size(out, 0), b.size(out, 2)
    ways = {
        "flat": f"{out}.transpose(1, 2).flatten(2)",
        "reshape": f"{out}.transpose(1, 2).reshape({batch}, {length}, {heads * size})",
        "contiguous": f"{out}.transpose(1, 2).contiguous().view({batch}, {length}, -1)",
        "tokens": f"{out}.permute(0, 2, 1, 3).reshape(-1, {heads * size})",
        "as it is": out,
        "transpose": f"{out}.transpose(1, 2)",
        "heads first": f"{out}.reshape({batch}, -1)",
        "unsqueeze": f"{out}.transpose(1, 2).flatten(2).unsqueeze(0)",
        "flipped": f"{out}.transpose(1, 2).flatten(2).flip(1)",
        "narrow": f"{out}.transpose(1, 2).flatten(2).narrow(1, 0, 1)",
        "last token": f"{out}[:, :, -1].flatten(1)",
        "first of the batch": f"{out}[0]",
        "unbind": f"{out}.unbind(0)[0]",
        "part of heads": f"{out}.chunk(2, 1)[0]",
        "stride 0": f"{out}[None].expand(2, -1, -1, -1, -1)",
        "strided": f"{out}[..., ::2]",
        "clone": f"{out}.clone()",
        "fp32": f"{out}.transpose(1, 2).flatten(2).float()",
        "bf16": f"{out}.transpose(1, 2).flatten(2).to(torch.bfloat16)",
        "relu": f"{out}.transpose(1, 2).flatten(2).relu()",
        "residual": f"{out}.transpose(1, 2).flatten(2) + 1.0",
        "swapped": f"{out}.transpose(-1, -2)",
        "opaque": f"custom.blend({out}, {out})",
    }
    name, _ = b.pick("between", ways, RARE_BETWEEN)
    return out if ways[name] == out else b.let(ways[name])


def _behind(b: Builder, codes: str) -> None:
    """Views behind codes, and who reads them."""
    b.returns(codes) if b.one_in(4) else None
    ndim, dtype = b.tensor(codes).ndim, b.tensor(codes).dtype
    ways = {
        "nothing": codes,
        "view": f"{codes}.unsqueeze(0)",
        "transpose": f"{codes}.transpose(0, {ndim - 1})",
        "flatten": f"{codes}.flatten()",
        "contiguous": f"{codes}.transpose(0, {ndim - 1}).contiguous()",
        "values": f"{codes}.float() * 0.5",
        "clone": f"{codes}.clone()",
        "select": f"{codes}[0]",
        "product": f"{codes}.float().flatten(0, -2) @ {codes}.float().flatten(0, -2).transpose(0, 1)",
        # As codes again at the end: 0x87 and 0x06 are far apart as numbers, and neighbours of zero as codes.
        "bytes": f"{codes}.view(torch.uint8).flatten().view({dtype})",
    }
    name = b.choose("nothing", *ways) if b.one_in(3) else "nothing"
    if name == "bytes" and dtype.itemsize != 1:
        name = "nothing"
    b.note("behind", name)
    b.returns(codes if ways[name] == codes else b.let(ways[name]))


def _codes_alone(b: Builder) -> None:
    """A quantization of something else than an attention."""
    dtype = b.feature("dtype", **dense.DTYPES)[1]
    rows = "n" if b.is_dynamic else "6"
    x = b.input(f"torch.randn({rows}, 32, dtype={dtype}) * 3")
    if b.choose(True, False):
        x = b.let(b.choose(f"F.silu({x})", f"{x}.relu()", f"{x} @ {x}.t() @ {x}", f"F.layer_norm({x}, (32,))"))
    _behind(b, quantization.quantized(b, x))


def surroundings(b: Builder) -> None:
    """Extra users of what is there, and ops that have nothing to do with it."""
    while b.one_in(3):
        names = b.variables(lambda x: x.is_floating_point() and x.dtype.itemsize > 1 and x.numel() > 0)
        name = names[len(names) - 1 - b.draw(st.integers(0, len(names) - 1))]
        kind, text = b.feature(
            "extra user",
            returned=name,
            sum=f"{name}.float().sum()",
            double=f"{name} * 2",
            view=f"{name}.flatten()",
            size=f"torch.ones({name}.shape[0])",
            opaque=f"custom.blend({name}, {name})",
            both=f"({name} * 2, {name}.abs())[1]",
        )
        if kind == "size" and b.backend != "cpu":
            continue
        b.returns(text if text == name else b.let(text, "extra"))
    while b.one_in(4):
        x = b.input("torch.randn(4, 6)", "u")
        _, text = b.feature(
            "unrelated",
            pointwise=f"{x}.sin() + 1.0",
            softmax=f"torch.softmax({x}, 0)",
            product=f"{x} @ {x}.t()",
            norm=f"F.layer_norm({x}, (6,))",
            sort=f"{x}.sort(-1)[0]",
            scan=f"{x}.cumsum(0)",
            opaque=f"custom.blend({x}, {x})",
            views=f"{x}.chunk(2, 0)[1].t()",
        )
        b.returns(b.let(text, "u"))
