"""The grammar of writes: by ops of the user's and in place, before, between and after what reads the tensor."""

from __future__ import annotations

from torch import Tensor

from fusion_passes.testing.fuzz.builder import Builder

BLOCK = 16


def watch(b: Builder) -> None:
    """From now on, a write or a read that is used later may come before any line."""
    b.before_step = lambda: _perhaps(b)


def _perhaps(b: Builder) -> None:
    if b.one_in(8):
        write(b)
    elif b.one_in(8):
        pending_read(b)


def _writable(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize > 1 and x.numel() > 1 and 0 not in x.stride()


def write(b: Builder) -> None:
    """Write to an input, or to a view of one."""
    names = [name for name, _ in b.inputs]
    names = [name for name in names if isinstance(b.env[name], Tensor) and _writable(b.env[name])]
    if not names:
        return
    name = b.choose(*reversed(names))
    x = b.tensor(name)
    same = [other for other in names if other != name and b.tensor(other).shape == x.shape]
    ways = {
        "bump": f"custom.bump_({name})",
        "add": f"{name}.add_(1.0)",
        "mul": f"{name}.mul_(0.5)",
        "zero": f"{name}.zero_()",
        "item": f"{name}[0] = 1.5",
        "row": f"{name}[-1].add_(2.0)",
        "view": f"{name}.transpose(0, -1).add_(1.0)",
        "bump a part": f"custom.bump_({name}[:1])",
        "bump a view": f"custom.bump_({name}.transpose(0, -1))",
        "copy of itself": f"{name}.copy_({name}.flip(0))",
        "flat": f"{name}.view(-1)[::2].add_(1.0)",
        "masked": f"{name}.masked_fill_({name} > 0, 3.0)",
    }
    if same:
        ways["exchange"] = f"custom.exchange_({name}, {b.choose(*same)})"
        ways["copy"] = f"{name}.copy_({b.choose(*same)})"
    if not x.is_contiguous():
        del ways["flat"]
    if any(b.tensor(written).storage_offset() for written in (name, *same)):
        # Stock counts the offset of an input that an op writes to twice, torch 2.11 to 2.13: it writes to a view of it,
        # and in 2.11 to a copy of it, somewhere else (docs/torch-storage-offsets.md).
        ways = {kind: text for kind, text in ways.items() if "custom." not in text}
    kind = b.choose(*ways, *["bump"] * 4 * ("bump" in ways))
    b.note("write to an input", kind)
    b.do(ways[kind])


def pending_read(b: Builder) -> None:
    """A value that is computed now; what it is used for comes at the end."""
    names = b.variables(lambda x: x.is_floating_point() and x.dtype.itemsize > 1 and x.numel() > 1)
    if not names:
        return
    name = b.choose(*reversed(names))
    _, text = b.feature(
        "read",
        times=f"{name} * 2",
        view=f"{name}[:1] + 1",
        compare=f"({name} > 0).float()",
        sum=f"{name}.float().sum()",
    )
    b.let(text, "old")


def states(b: Builder) -> None:
    """Tensors that are read and written, without an idiom."""
    shape = b.choose("(3, 4)", "(6,)", "(2, 3, 4)")
    for _ in range(b.choose(1, 2, 3)):
        _, text = b.feature(
            "state",
            fp32=f"torch.randn({shape})",
            bf16=f"torch.randn({shape}, dtype=torch.bfloat16)",
            view=f"torch.randn(2, *{shape})[1]",
            transposed=f"torch.randn({shape}).transpose(0, -1).contiguous().transpose(0, -1)",
        )
        b.input(text, "state")
    for _ in range(b.choose(2, 3, 4, 6, 8)):
        kind = b.choose("read", "write", "use")
        if kind == "write":
            write(b)
        elif kind == "read":
            pending_read(b)
        else:
            use(b)


def use(b: Builder) -> None:
    """Compute with what was read before."""
    names = b.variables(lambda x: x.is_floating_point() and x.dtype.itemsize > 1)
    name = b.choose(*reversed(names))
    same = [other for other in names if b.tensor(other).shape == b.tensor(name).shape]
    _, text = b.feature(
        "use",
        relu=f"{name}.relu()",
        double=f"{name} + {name}",
        sum=f"{name}.float().sum(-1)",
        with_another=f"{name} + {b.choose(*same)}",
        opaque=f"custom.blend({name}, {name})",
        flipped=f"{name}.flip(0)",
    )
    b.let(text, "used")


def layer(b: Builder) -> None:
    """`nn.Attention`: the cache is a buffer of the module, the metadata an argument."""
    heads, kv_heads, size, dtype = 4, b.choose(2, 1), 16, b.choose("torch.float32", "torch.bfloat16")
    fp8 = b.choose("'fp8_e4m3'", "'auto'")
    attention = b.input(
        f"layers.attention({heads}, {kv_heads}, {size}, 6, {BLOCK}, {dtype}, kv_cache_dtype={fp8})", "layer"
    )
    new, lengths, table = b.choose(
        ("[3, 1]", "[3, 10]", "[[0, 1], [2, 3]]"),
        ("[1, 1]", "[20, 5]", "[[4, 1], [2, 0]]"),
        ("[4, 0]", "[18, 0]", "[[5, 3], [0, 0]]"),
    )
    metadata = b.input(f"layers.metadata({new}, {lengths}, {table}, {BLOCK})", "metadata")
    tokens = sum(int(x) for x in new.strip("[]").split(","))
    x = b.input(f"torch.randn({tokens}, {heads}, {size}, dtype={dtype})")
    for _ in range(b.choose(1, 2)):
        k, v = b.let(f"{x}[:, :{kv_heads}] * 1.5"), b.let(f"{x}[:, {-kv_heads}:] * 0.5")
        x = b.let(f"{attention}({x}, {k}, {v}, {metadata}).view({tokens}, {heads}, {size})")
    b.note("layer", fp8)
    if b.choose(True, False):
        scale = b.input("torch.tensor(0.02)", "scale")
        x = b.let(f"({x}.flatten(1).float() / {scale}).clamp(-448.0, 448.0).to(E4M3)", "codes")
    b.returns(x)


def finish(b: Builder) -> None:
    """At the end, what was read is used; and inputs are returned, whole or in part, or not at all."""
    if b.choose(True, False):
        write(b)
    b.before_step = lambda: None
    for name in [name for name in b.variables() if name.startswith(("old", "used"))]:
        if b.choose(True, True, False):
            b.returns(b.let(b.choose(f"{name}.relu()", f"{name} * 3", f"{name}.sum()"), "late"))
    for name, _ in b.inputs:
        if isinstance(b.env[name], Tensor) and b.one_in(5):
            b.returns(b.choose(name, f"{name}[0]", f"{name} * 2") if b.tensor(name).ndim else name)
    if not b.results:
        b.returns("torch.zeros(1)")
