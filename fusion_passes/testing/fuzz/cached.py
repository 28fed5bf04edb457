"""The grammar of a KV cache: RoPE, the write of keys and values, paged attention over the cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from fusion_passes.testing.fuzz import quantization
from fusion_passes.testing.fuzz.builder import Builder
from fusion_passes.testing.fuzz.dense import DTYPES

PAGES, PAGE = 5, 4
SEQUENCES: tuple[tuple[list[int], list[int]], ...] = (
    ([3, 2], [3, 7]),
    ([1, 1, 1], [4, 1, 6]),
    ([5], [5]),
    ([1], [9]),
    ([4, 0, 1], [4, 0, 8]),
)
"""New tokens, and all tokens, of each sequence."""


@dataclass
class Cache:
    """A batch of sequences on pages, and the cache: names of inputs."""

    tokens: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    fp8: bool
    key: str
    value: str
    slots: str
    batch: str
    k_scale: str
    v_scale: str


def cache(b: Builder) -> Cache:
    """The inputs of a batch."""
    dtype = b.feature("dtype", **DTYPES)[1]
    kv_heads, group, head_dim = b.choose(2, 1), b.choose(2, 1, 4), b.choose(16, 8, 32)
    fp8 = b.feature("cache", fp8=True, high_precision=False)[1]
    new, lengths = b.choose(*SEQUENCES)
    tokens, columns = sum(new), max(-(-length // PAGE) for length in lengths)
    cached = "E4M3" if fp8 else dtype
    shape = f"({PAGES}, {kv_heads}, {PAGE}, {head_dim})"
    layout = b.choose("contiguous", "heads last", "one tensor", "overlapping slots")
    b.note("cache", layout)
    if layout == "heads last":
        text = f"torch.randn({PAGES}, {PAGE}, {kv_heads}, {head_dim}).to({cached}).transpose(1, 2)"
        key, value = b.input(text, "key_cache"), b.input(text, "value_cache")
    elif layout == "one tensor":
        both = b.input(f"torch.randn(2, *{shape}).to({cached})", "caches")
        key, value = b.let(f"{both}[0]", "key_cache"), b.let(f"{both}[1]", "value_cache")
    else:
        key, value = (b.input(f"torch.randn({shape}).to({cached})", name) for name in ("key_cache", "value_cache"))
    slots = f"torch.randperm({PAGES * PAGE})[:{tokens}]"
    if layout == "overlapping slots":
        slots = f"torch.tensor({[*range(tokens - 1), -1]})"  # the last token is not written
    slot = b.input(slots + b.choose("", ".int()"), "slots")
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    batch = (
        b.input(f"torch.stack([torch.randperm({PAGES})[:{columns}] for _ in range({len(new)})]).int()", "table"),
        b.input(f"torch.tensor({starts}, dtype=torch.int32)", "starts"),
        b.input(f"torch.tensor({lengths}, dtype=torch.int32)", "lengths"),
    )
    scales = [b.input(f"torch.tensor({x})", "scale") if fp8 else "None" for x in ("0.017", "0.0071")]
    return Cache(
        str(tokens), kv_heads * group, kv_heads, head_dim, dtype, fp8, key, value, slot, ", ".join(batch), *scales
    )


def step(b: Builder) -> None:
    """RoPE, a write, attention over the cache, quantization: each may be missing, or be nearly that."""
    b.backend = "cpu"
    c = cache(b)
    q, k, v = projections(b, c)
    kind = b.choose("all", "all", "write", "attention")
    b.note("step", kind)
    if kind != "attention" and b.choose(True, True, True, False):
        q, k = rotated(b, c, q, k)
    q_scale = "None"
    codes = False
    if c.fp8 and b.choose(True, False):
        codes = True
        q = quantization.static(b, q, "E4M3") if b.choose(True, False) else opaque_query(b, q)
        if not str(b.tensor(q).dtype).startswith("torch.float8_e4m3fn"):
            codes = False
        q_scale = b.input("torch.tensor(0.02)", "scale")
    elif c.fp8 and b.choose(False, True):
        q_scale = b.input("torch.tensor(0.031)", "scale")
        b.note("query", "quantized by the attention")
    if kind != "attention":
        write(b, c, k, v)
    if kind == "write":
        b.returns(q)
    else:
        attend(b, c, q, q_scale, codes)
    b.returns(c.key)
    b.returns(c.value)


def opaque_query(b: Builder, q: str) -> str:
    """The query's codes by an op."""
    by = b.input("torch.tensor(0.02)", "scale")
    b.note("query", "quantized by an op")
    return b.let(f"ops.quantize_fp8({q}, {by})", "codes")


def projections(b: Builder, c: Cache) -> tuple[str, str, str]:
    """query, key and value: [tokens, heads, head_dim]."""
    way = b.choose("inputs", "one tensor", "by heads", "scaled", "last rows", "stride 0")
    b.note("projections", way)
    sizes = (c.heads, c.kv_heads, c.kv_heads)
    if way == "one tensor":
        x = b.input(f"torch.randn({c.tokens}, {sum(sizes) * c.head_dim}, dtype={c.dtype})")
        parts = b.let(f"{x}.split({[h * c.head_dim for h in sizes]}, -1)", "parts")
        q, k, v = (b.let(f"{parts}[{i}].view(-1, {h}, {c.head_dim})") for i, h in enumerate(sizes))
    elif way == "by heads":
        x = b.input(f"torch.randn({c.tokens}, {sum(sizes)}, {c.head_dim}, dtype={c.dtype})")
        bounds = [0, c.heads, c.heads + c.kv_heads, sum(sizes)]
        q, k, v = (b.let(f"{x}[:, {first}:{last}]") for first, last in itertools.pairwise(bounds))
    elif way == "last rows":
        q, k, v = (
            b.let(f"{b.input(f'torch.randn({c.tokens} + 2, {h}, {c.head_dim}, dtype={c.dtype})')}[2:]") for h in sizes
        )
    elif way == "stride 0":
        q = b.input(f"torch.randn({c.tokens}, {c.heads}, {c.head_dim}, dtype={c.dtype})")
        k, v = (
            b.let(
                f"{b.input(f'torch.randn({c.tokens}, 1, {c.head_dim}, dtype={c.dtype})')}.expand(-1, {c.kv_heads}, -1)"
            )
            for _ in range(2)
        )
    else:
        q, k, v = (b.input(f"torch.randn({c.tokens}, {h}, {c.head_dim}, dtype={c.dtype})") for h in sizes)
    if way == "scaled":
        q, k, v = b.let(f"{q} * 1.5"), b.let(f"{k} * 0.5"), b.let(f"{v} + 1.0")
    return q, k, v


def rotated(b: Builder, c: Cache, q: str, k: str) -> tuple[str, str]:
    """query and key, turned."""
    dim = b.choose(c.head_dim, c.head_dim, c.head_dim // 2)
    half, tokens = dim // 2, c.tokens
    b.note("rope", "partial" if dim < c.head_dim else "whole")
    table_dtype = b.choose(c.dtype, "torch.float32")
    where = b.choose("rows", "table", "one table", "one table of rows")
    b.note("rope", where)
    if where == "rows":
        cos, sin = (b.input(f"torch.randn({tokens}, {half}, dtype={table_dtype})", name) for name in ("cos", "sin"))
    elif where == "table":
        at = b.input(f"torch.randint(0, 11, ({tokens},))", "at")
        cos, sin = (
            b.let(f"{b.input(f'torch.randn(11, {half}, dtype={table_dtype})', name)}[{at}]", name)
            for name in ("cos", "sin")
        )
    else:
        x = b.input(f"torch.randn({11 if where == 'one table' else tokens}, {dim}, dtype={table_dtype})", "table")
        if where == "one table":
            x = b.let(f"{x}[{b.input(f'torch.randint(0, 11, ({tokens},))', 'at')}]")
        parts = b.let(f"{x}.chunk(2, -1)", "parts")
        cos, sin = (b.let(f"{parts}[{i}]", name) for i, name in enumerate(("cos", "sin")))
    way = b.choose("halves", "rotate half", "neighbours", "complex", "halves in fp32", "neighbours as pairs")
    b.note("rope", way)
    faults = ("other way", "sin and cos swapped", "not alike", "other table", "last dimensions")
    fault, _ = b.pick("rope that is none", dict.fromkeys(("none", *faults)), faults)
    ways = [way, way]
    tables = [(cos, sin), (cos, sin)]
    if fault == "other way":
        sin = b.let(f"-{sin}")
        tables = [(cos, sin), (cos, sin)]
    elif fault == "sin and cos swapped":
        tables = [(cos, sin), (sin, cos)]
    elif fault == "not alike":
        ways = [way, b.choose("neighbours", "halves")]
    elif fault == "other table":
        tables = [(cos, sin), (b.let(f"{cos} * 0.5"), sin)]
    last = fault == "last dimensions" and dim < c.head_dim
    turned = [_turned(b, x, *of, dim, c, w, last) for x, of, w in zip((q, k), tables, ways, strict=True)]
    return turned[0], turned[1]


def _turned(b: Builder, x: str, cos: str, sin: str, dim: int, c: Cache, way: str, last: bool) -> str:
    wide = way in ("halves in fp32", "complex", "neighbours as pairs")
    given, rest = x, ""
    if dim < c.head_dim:
        given, rest = b.let(f"{x}[..., :{dim}]"), b.let(f"{x}[..., {dim}:]")
        if last:
            given, rest = b.let(f"{x}[..., {dim}:]"), b.let(f"{x}[..., :{dim}]")
    if wide:
        given = b.let(f"{given}.float()")
    dtype = "torch.float32" if wide else c.dtype
    cos, sin = b.let(f"{cos}[:, None].to({dtype})", "cos"), b.let(f"{sin}[:, None].to({dtype})", "sin")
    h = dim // 2
    if way in ("halves", "halves in fp32"):
        halves = b.let(f"{given}.chunk(2, -1)", "halves")
        one, two = f"{halves}[0]", f"{halves}[1]"
        out = b.let(f"torch.cat(({one} * {cos} - {two} * {sin}, {two} * {cos} + {one} * {sin}), -1)")
    elif way == "rotate half":
        turned = b.let(f"torch.cat((-{given}[..., {h}:], {given}[..., :{h}]), -1)")
        out = b.let(f"{given} * torch.cat(({cos}, {cos}), -1) + {turned} * torch.cat(({sin}, {sin}), -1)")
    elif way == "complex":
        pairs = b.let(f"torch.view_as_complex({given}.reshape(*{given}.shape[:-1], -1, 2))")
        out = b.let(f"torch.view_as_real({pairs} * torch.complex({cos}, {sin})).flatten(-2)")
    else:
        one, two = f"{given}[..., ::2]", f"{given}[..., 1::2]"
        if way == "neighbours as pairs":
            pairs = b.let(f"{given}.unflatten(-1, (-1, 2)).unbind(-1)", "pairs")
            one, two = f"{pairs}[0]", f"{pairs}[1]"
        out = b.let(f"torch.stack(({one} * {cos} - {two} * {sin}, {two} * {cos} + {one} * {sin}), -1).flatten(-2)")
    if wide:
        out = b.let(f"{out}.to({c.dtype})")
    if rest:
        out = b.let(f"torch.cat(({rest}, {out}), -1)" if last else f"torch.cat(({out}, {rest}), -1)")
    return out


def write(b: Builder, c: Cache, k: str, v: str) -> None:
    """The new keys and values go to their slots."""
    scales = f", {c.k_scale}, {c.v_scale}" if c.fp8 else ""
    way = b.choose("by the write", "by the write", "by the write", "before", "one of them") if c.fp8 else "none"
    b.note("write", f"quantized {way}")
    if way == "before":
        k, v = (b.let(f"({x} / {s}).clamp(-448.0, 448.0).to(E4M3)") for x, s in ((k, c.k_scale), (v, c.v_scale)))
        scales = ""
    elif way == "one of them":
        scales = f", {c.k_scale}"
    if b.one_in(8):
        k, v = v, k
        b.note("write", "key and value exchanged")
    b.do(f"ops.kv_cache_write({k}, {v}, {c.key}, {c.value}, {c.slots}{scales})")


def attend(b: Builder, c: Cache, q: str, q_scale: str, codes: bool) -> None:
    """Attention over the cache, and what becomes of its output."""
    options = [f"scale={b.choose('0.25', '0.1', '1.0')}"]
    options += b.choose([], [], ["window=3"], ["softcap=5.0"], ["max_query_len=5"])
    if codes:
        options.append(f"dtype={c.dtype}")
    prob = b.input("torch.tensor(0.004)", "scale") if c.fp8 and b.one_in(4) else "None"
    sinks = b.input(f"torch.randn({c.heads})", "sinks") if b.one_in(4) else "None"
    scales = f"{q_scale}, {c.k_scale}, {c.v_scale}, {prob}, None, {sinks}"
    out = b.let(f"ops.paged_attention({q}, {c.key}, {c.value}, {c.batch}, {scales}, {', '.join(options)})", "out")
    kinds = dict.fromkeys(("static", "group", "none", "opaque", "token", "near"))
    kind, _ = b.pick("paged attention", kinds, ("token", "near"))
    if kind == "none":
        b.returns(out)
        return
    if kind != "group" or b.choose(True, False):
        out = b.let(
            b.choose(f"{out}.flatten(1)", f"{out}.reshape({c.tokens}, -1)", f"{out}.view(1, {c.tokens}, -1)", out)
        )
    else:
        out = b.let(b.choose(f"{out}.transpose(0, 1).flatten(1)", f"{out}.transpose(1, 2).flatten(1)"))
    if kind == "group":
        b.returns(quantization.group(b, out))
    elif kind == "static":
        b.returns(quantization.static(b, out))
    elif kind == "opaque":
        b.returns(quantization.opaque(b, out))
    else:
        b.returns(quantization.token(b, out) if kind == "token" else quantization.near_miss(b, out))
