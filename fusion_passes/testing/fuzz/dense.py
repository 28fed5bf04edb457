"""The grammar of attention over dense keys: query, key and value, grouped heads, masks, each CUDA backend and the CPU,
spelled out or not; and near misses of all that."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_passes.testing.fuzz.builder import Builder

DTYPES = {"bf16": "torch.bfloat16", "fp32": "torch.float32", "fp16": "torch.float16"}


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention, as text."""

    batch: str
    heads: int
    kv_heads: int
    queries: str
    keys: str
    head_dim: int
    dtype: str

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads


def attention(b: Builder) -> str:
    """An attention's output: a variable [batch, heads, queries, head_dim]."""
    fused = b.feature("attention", sdpa=True, spelled_out=False)[1]
    if b.writing:
        b.backend = "cpu"
    elif b.is_dynamic:
        b.backend = b.choose("cpu", "flash", "efficient") if fused else "cpu"
    else:
        b.backend = b.choose("cpu", "cudnn", "flash", "efficient", "cpu", *["math"] * (not fused))
    b.note("backend", b.backend if fused else f"{b.backend}, spelled out")
    shape = _shape(b)
    q, k, v = _operands(b, shape)
    return _sdpa(b, shape, q, k, v) if fused else _spelled_out(b, shape, q, k, v)


def _shape(b: Builder) -> Shape:
    dtype = b.pick("dtype", DTYPES, () if b.backend == "cpu" else ("fp32",))[1]
    heads = b.pick("heads", {"4": 4, "2": 2, "1": 1}, ("1",))[1]
    group = b.choose(*[g for g in (1, 2, 4) if heads % g == 0])
    queries = b.pick("queries", {"5": "5", "8": "8", "4": "4", "16": "16", "1": "1"}, ("1",))[1]
    batch = b.pick("batch", {"2": "2", "1": "1"}, ("1",))[1]
    keys = b.choose(queries, queries, "7", "16")
    if b.is_dynamic:
        queries = keys = "n"
        batch = b.choose("2", "1", "n")
    sizes = (16, 32, 64, 8, 20) if b.backend == "cpu" else (64, 80, 128, 16, 60)  # the last two are unusual
    head_dim = b.pick("head size", {str(size): size for size in sizes}, [str(size) for size in sizes[-2:]])[1]
    return Shape(batch, heads, heads // group, queries, keys, head_dim, dtype)


def _operands(b: Builder, s: Shape) -> tuple[str, str, str]:
    """query, key and value, [batch, heads, length, head_dim] each, key and value with the KV heads."""
    if s.queries == s.keys and s.kv_heads == s.heads and b.one_in(4):
        b.note("operands", "parts of one tensor")
        return _parts(b, s)
    sizes = ((s.heads, s.queries), (s.kv_heads, s.keys), (s.kv_heads, s.keys))
    q, k, v = (_operand(b, s, heads, length) for heads, length in sizes)
    return q, k, v


def _parts(b: Builder, s: Shape) -> tuple[str, str, str]:
    size, length = s.head_dim, s.queries
    tokens_first = f"torch.randn({s.batch}, {length}, {3 * s.heads * size}, dtype={s.dtype})"
    how = b.choose("chunk", "split", "unbind", "select", "narrow")
    if how in ("chunk", "split"):
        x = b.input(tokens_first)
        split = "chunk(3, -1)" if how == "chunk" else f"split({s.heads * size}, -1)"
        parts = b.let(f"{x}.{split}", "parts")
        return tuple(  # type: ignore[return-value]
            b.let(f"{parts}[{i}].unflatten(-1, ({s.heads}, {size})).transpose(1, 2)") for i in range(3)
        )
    x = b.input(f"torch.randn(3, {s.batch}, {s.heads}, {length}, {size}, dtype={s.dtype})")
    if how == "unbind":
        parts = b.let(f"{x}.unbind(0)", "parts")
        return tuple(b.let(f"{parts}[{i}]") for i in range(3))  # type: ignore[return-value]
    text = f"{x}.select(0, {{}})" if how == "select" else f"{x}.narrow(0, {{}}, 1).squeeze(0)"
    return tuple(b.let(text.format(i)) for i in range(3))  # type: ignore[return-value]


def _operand(b: Builder, s: Shape, heads: int, length: str) -> str:
    batch, size, dtype = s.batch, s.head_dim, s.dtype
    plain = f"torch.randn({batch}, {heads}, {length}, {size}, dtype={dtype})"
    layouts = {
        "contiguous": plain,
        "tokens first": f"torch.randn({batch}, {length}, {heads}, {size}, dtype={dtype}).transpose(1, 2)",
        "padded": f"torch.randn({batch}, {heads}, {length}, {size + 3}, dtype={dtype})[..., :{size}]",
        "offset": f"torch.randn({batch}, {heads}, {size} + {length}, {size}, dtype={dtype})[:, :, {size}:]",
        "stride 0": f"torch.randn(1, {heads}, {length}, {size}, dtype={dtype}).expand({batch}, -1, -1, -1)",
        "head size strided": f"torch.randn({batch}, {heads}, {size}, {length}, dtype={dtype}).transpose(-1, -2)",
        "every other": f"torch.randn({batch}, {heads}, {length}, {2 * size}, dtype={dtype})[..., ::2]",
    }
    rare = () if b.backend == "cpu" else ("head size strided", "every other")
    text = b.pick("layout", layouts, rare)[1]
    ways = {
        "input": "",
        "scaled": "{} * 1.5",
        "flipped": "{}.flip(2)",
        "heads flipped": "{}.flip(1)",
        "transposed twice": "{}.transpose(-1, -2).contiguous().transpose(-1, -2)",
        "transposed and scaled": "({}.transpose(-1, -2) * 0.5).transpose(-1, -2)",
        "cast": "({}.float() + 0.1).to(" + dtype + ")",
        "clone": "{}.clone()",
        "opaque": "custom.blend({0}, {0})",
    }
    if b.backend == "cpu":
        ways["rolled"] = "{}.roll(1, 2)"
    _, made = b.pick("operand", ways)
    x = b.input(text)
    return x if not made else b.let(made.format(x))


def _repeated(b: Builder, s: Shape, k: str, v: str, *, fused: bool) -> tuple[str, str, str]:
    """key and value with as many heads as the query, and the option that says that they have fewer."""
    if s.group == 1:
        return k, v, ""
    r, sizes = s.group, (b.size(k, 0), b.size(k, 2))
    expanded = f"{{0}}[:, :, None].expand({sizes[0]}, {s.kv_heads}, {r}, {sizes[1]}, {s.head_dim})"
    ways = {
        "repeat_interleave": f"{{0}}.repeat_interleave({r}, 1)",
        "expand": f"{expanded}.reshape({sizes[0]}, {s.heads}, {sizes[1]}, {s.head_dim})",
        "repeat": f"{{0}}.repeat(1, {r}, 1, 1)",
        "index": f"{{0}}[:, torch.arange({s.heads}, device={{0}}.device) // {r}]",
        "index modulo": f"{{0}}[:, torch.arange({s.heads}, device={{0}}.device) % {s.kv_heads}]",
        "stack": f"torch.stack([{{0}}] * {r}, 2).flatten(1, 2)",
        "concatenation": f"torch.cat([{{0}}] * {r}, 1)",
        "expand the wrong way": f"{{0}}[:, None].expand({sizes[0]}, {r}, {s.kv_heads}, {sizes[1]}, {s.head_dim})"
        f".reshape({sizes[0]}, {s.heads}, {sizes[1]}, {s.head_dim})",
    }
    if s.kv_heads == 1:
        ways["broadcast"] = "{0}"
        ways["expand one head"] = f"{{0}}.expand(-1, {s.heads}, -1, -1)"
    names = [*["enable_gqa"] * (fused and b.backend != "efficient"), *ways]
    of_key, _ = b.pick("grouped heads", dict.fromkeys(names))
    if of_key == "enable_gqa":
        return k, v, ", enable_gqa=True"
    of_value = b.choose(*ways) if b.one_in(8) else of_key
    if of_value != of_key:
        b.note("grouped heads", "key and value differ")
    k, v = (x if ways[how] == "{0}" else b.let(ways[how].format(x)) for x, how in ((k, of_key), (v, of_value)))
    return k, v, ""


@dataclass(frozen=True)
class MaskText:
    """A mask as text, and what it is: "none", "causal", "bool" (True = attend) or "float" (added)."""

    kind: str
    text: str = ""


def _mask(b: Builder, s: Shape, q: str, k: str) -> MaskText:
    """Every query sees a key, but for the masks that say otherwise."""
    rows, columns, dtype = s.queries, s.keys, s.dtype
    length, keys = b.size(q, 2), b.size(k, 2)
    device = f"device={q}.device"
    ones = f"torch.ones({length}, {keys}, dtype=torch.bool, {device})"
    at, of = f"torch.arange({length}, {device})[:, None]", f"torch.arange({keys}, {device})"
    some = f"(torch.rand({rows}, {columns}) > 0.4) | (torch.arange({columns}) == 0)"
    kinds: dict[str, tuple[str, str, str]] = {  # name: kind, input, text of the input
        "none": ("none", "", ""),
        "causal": ("causal", "", ""),
        "bool": ("bool", some, "{}"),
        "float": ("float", f"torch.randn({rows}, {columns}, dtype={dtype})", "{}"),
        "lower triangle": ("bool", "", f"{ones}.tril()"),
        "bool of the batch": ("bool", f"({some})[None, None].expand({s.batch}, 1, -1, -1)", "{}"),
        "bool of keys": ("bool", f"((torch.rand({columns}) > 0.4) | (torch.arange({columns}) == 0))[None]", "{}"),
        "float of heads": ("float", f"torch.randn({s.batch}, {s.heads}, {rows}, {columns}, dtype={dtype})", "{}"),
        "float in fp32": ("float", f"torch.randn({rows}, {columns})", f"{{}}.to({dtype})"),
        "lower triangle by comparison": ("bool", "", f"{of} <= {at}"),
        "lower triangle, moved": ("bool", "", f"{ones}.tril(1)"),
        "not upper triangle": ("bool", "", f"~{ones}.triu(1)"),
        "the other triangle": ("bool", "", f"({of} >= {at}) | ({of} == 0)"),
        "window": ("bool", "", f"{ones}.tril().logical_and({ones}.triu(-2))"),
        "all": ("bool", "", ones),
        "computed bool": ("bool", f"torch.randn({rows}, {columns})", "({} > -0.5).logical_or(" + f"{of} == 0)"),
        "negated": ("bool", f"(torch.rand({rows}, {columns}) > 0.7) & (torch.arange({columns}) != 0)", "~{}"),
        "where": ("float", some, f"torch.where({{}}, 0.0, -inf).to({dtype})"),
        "infinite triangle": ("float", "", f"torch.full(({length}, {keys}), -inf, dtype={dtype}, {device}).triu(1)"),
        "large negative": ("float", some, f"(~{{}}).to({dtype}) * -1e4"),
        "flipped": ("float", f"torch.randn({rows}, {columns}, dtype={dtype})", "{}.flip(1)"),
        "stride 0": ("float", f"torch.randn({rows}, 1, dtype={dtype})", f"{{}}.expand({length}, {keys})"),
        "scaled": ("float", f"torch.randn({rows}, {columns}, dtype={dtype})", "{} * 2.0"),
        "causal and bool": ("bool", some, f"{{}}.logical_and({ones}.tril())"),
        "alibi": ("float", "", f"(({of} - {at}) * 0.25).to({dtype})[None, None]"),
        "empty rows": ("bool", f"torch.rand({rows}, {columns}) > 0.7", "{}"),
    }
    if rows == columns:
        kinds["transposed"] = ("float", f"torch.randn({rows}, {columns}, dtype={dtype})", "{}.t()")
    rare = [name for name in kinds if name not in ("none", "causal")] if b.choose(False, True, True) else ()
    _, (kind, made, text) = b.pick("mask", kinds, rare)
    if kind in ("none", "causal"):
        return MaskText(kind)
    given = text.format(b.input(made, "m")) if made else text
    return MaskText(kind, given if given.isidentifier() else b.let(given, "m"))


def _sdpa(b: Builder, s: Shape, q: str, k: str, v: str) -> str:
    k, v, grouped = _repeated(b, s, k, v, fused=True)
    mask = MaskText("none") if b.backend == "flash" else _mask(b, s, q, k)
    if b.backend == "flash" and b.choose("none", "causal") == "causal":
        mask = MaskText("causal")
        b.note("mask", "causal")
    given = {"none": "", "causal": ", is_causal=True"}.get(mask.kind, f", attn_mask={mask.text}")
    scale = b.feature("scale", default="", number=", scale=0.3", one=", scale=1.0", large=", scale=2.5")[1]
    name = "torch.nn.functional.scaled_dot_product_attention" if b.one_in(8) else "F.scaled_dot_product_attention"
    return b.let(f"{name}({q}, {k}, {v}{given}{scale}{grouped})")


def _spelled_out(b: Builder, s: Shape, q: str, k: str, v: str) -> str:
    k, v, _ = _repeated(b, s, k, v, fused=False)
    mask = _mask(b, s, q, k)
    d, wide = s.head_dim, s.dtype == "torch.float32"
    if not wide and b.one_in(3):
        q, k = b.let(f"{q}.float()"), b.let(f"{k}.float()")
        v = b.let(f"{v}.float()")
        b.note("attention", "in fp32")
        wide = True
    ways = {
        "matmul": f"{q} @ {k}.transpose(-1, -2) * {d**-0.5}",
        "divided": f"torch.matmul({q}, {k}.transpose(2, 3)) / math.sqrt({d})",
        "query scaled": f"({q} * 0.3) @ {k}.transpose(-1, -2)",
        "key scaled": f"{q} @ ({k} * 0.3).transpose(-1, -2)",
        "einsum": f"torch.einsum('bhqd,bhkd->bhqk', {q}, {k}) * 0.25",
        "not scaled": f"{q} @ {k}.transpose(-1, -2)",
        "permuted": f"({q} @ {k}.permute(0, 1, 3, 2)).mul(0.5)",
        "negative": f"{q} @ {k}.transpose(-1, -2) * -0.3",
        "through tanh": f"torch.tanh({q} @ {k}.transpose(-1, -2) * 0.1) * 4.0",
    }
    product = b.pick("scores", ways, ("negative", "through tanh"))[1]
    scores = b.let(product, "s")
    if mask.kind == "causal":
        keep = f"torch.ones({b.size(scores, 2)}, {b.size(scores, 3)}, dtype=torch.bool, device={q}.device).tril()"
        mask = MaskText("bool", b.let(keep, "m"))
    if mask.kind == "bool":
        ways = {
            "fill": f"{scores}.masked_fill(~{mask.text}, -inf)",
            "where": f"torch.where({mask.text}, {scores}, -inf)",
            "logical not": f"{scores}.masked_fill({mask.text}.logical_not(), -inf)",
            "other way round": f"torch.where(~{mask.text}, -inf, {scores})",
            "added": f"{scores} + torch.where({mask.text}, 0.0, -inf)",
            "finite": f"{scores}.masked_fill(~{mask.text}, -30.0)",
            "smallest": f"{scores}.masked_fill(~{mask.text}, torch.finfo({scores}.dtype).min)",
        }
        how = b.pick("masked", ways, ("finite", "smallest"))[1]
        scores = b.let(how, "s")
    elif mask.kind == "float":
        ways = {
            "plus": f"{scores} + {mask.text}",
            "from left": f"{mask.text} + {scores}",
            "alpha": f"torch.add({scores}, {mask.text}, alpha=2)",
            "minus": f"{scores} - {mask.text}",
            "scaled after": f"({scores} + {mask.text}) * 0.5",
        }
        how = b.pick("masked", ways, ("alpha", "minus", "scaled after"))[1]
        scores = b.let(how, "s")
    probs = _softmax(b, scores, "" if wide else s.dtype)
    out = b.let(f"{b.choose('torch.matmul({}, {})', '{} @ {}').format(probs, v)}")
    dtype = str(b.tensor(out).dtype)
    return out if dtype == s.dtype or b.choose(False, True) else b.let(f"{out}.to({s.dtype})")


USUAL_SOFTMAX = ("plain", "in fp32", "with a dtype", "by hand", "safe", "safe by any")


def _softmax(b: Builder, s: str, dtype: str) -> str:
    """The probabilities.  dtype: what fp32 goes back to; "" where the scores are fp32 already."""
    back = f".to({dtype})" * bool(dtype)
    shifted = f"({s} - {s}.amax(-1, keepdim=True)).exp()"
    ways = {
        "plain": f"torch.softmax({s}, -1)",
        "in fp32": f"torch.softmax({s}.float(), -1){back}",
        "with a dtype": f"F.softmax({s}, dim=-1, dtype=torch.float32){back}",
        "by hand": "",
        "safe": f"torch.where(({s} == -inf).all(-1, keepdim=True), 0.0, torch.softmax({s}, -1))",
        "safe by any": f"torch.where(~(~({s} == -inf)).any(-1, keepdim=True), 0.0, torch.softmax({s}, -1))",
        "of queries": f"torch.softmax({s}, -2)",
        "by index": f"torch.softmax({s}, 3)",
        "dropout of nothing": f"F.dropout(torch.softmax({s}, -1), 0.0)",
        "scaled": f"torch.softmax({s}, -1) * 0.5",
        "round trip": f"torch.softmax({s}, -1).to(torch.float16).to({s}.dtype)",
    }
    shape = b.tensor(s).shape
    if shape[-1] == shape[-2]:
        ways["safe without keepdim"] = f"torch.where(({s} == -inf).all(-1), 0.0, torch.softmax({s}, -1))"
        ways["safe by columns"] = f"torch.where(({s} == -inf).all(-2, keepdim=True), 0.0, torch.softmax({s}, -1))"
    if shape[-2] == shape[-1]:
        ways["sum of columns"] = f"{shifted} / {shifted}.sum(-2, keepdim=True)"
    name, _ = b.pick("softmax", ways, [name for name in ways if name not in USUAL_SOFTMAX])
    if name != "by hand":
        return b.let(ways[name], "p")
    exponential = b.let(shifted, "e")
    return b.let(f"{exponential} / {exponential}.sum(-1, keepdim=True)", "p")
