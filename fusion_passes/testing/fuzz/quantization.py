"""The grammar of FP8 quantization: static, dynamic per group or token, opaque; scales in every form; near misses."""

from __future__ import annotations

from fusion_passes.testing.fuzz.builder import Builder

LIMITS = {"E4M3": "448.0", "E5M2": "57344.0", "torch.float8_e4m3fnuz": "240.0"}


def quantized(b: Builder, x: str) -> str:
    """FP8 codes of x, or what is nearly that; a variable."""
    ways = {"static": static, "opaque": opaque, "group": group, "token": token, "near miss": near_miss}
    return b.pick("quantization", ways, ("group", "token", "near miss"))[1](b, x)


def scale(b: Builder) -> tuple[str, bool]:
    """A static scale: (text, whether it multiplies)."""
    kinds = {
        "0-d": ("torch.tensor(0.02)", "{}", False),
        "one element": ("torch.tensor([0.03])", "{}", False),
        "number": ("", "0.025", False),
        "times a number": ("torch.tensor(0.01)", "({} * 2.0)", False),
        "over a number": ("torch.tensor(0.09)", "({} / 3.0)", False),
        "number over it": ("torch.tensor(20.0)", "(0.5 / {})", False),
        "reciprocal": ("torch.tensor(0.02)", "{}.reciprocal()", True),
        "one over": ("torch.tensor(0.02)", "(1 / {})", True),
        "inverse": ("torch.tensor(40.0)", "{}", True),
        "inverse number": ("", "32.0", True),
        "inverse with a factor": ("torch.tensor(20.0)", "({} * 2.5)", True),
        "pow": ("torch.tensor(0.02)", "{}.pow(-1.0)", True),
        "1 x 1": ("torch.tensor([[0.02]])", "{}", False),
        "reshaped": ("torch.tensor(0.02)", "{}.reshape(1, 1)", False),
        "first of several": ("torch.tensor([0.02, 0.7, 0.1])", "{}[0]", False),
        "last by flip": ("torch.tensor([0.9, 0.7, 0.02])", "{}.flip(0)[0]", False),
        "second by unbind": ("torch.tensor([0.9, 0.02])", "{}.unbind(0)[1]", False),
        "first by unbind": ("torch.tensor([0.02])", "{}.unbind(0)[0]", False),
        "second by chunk": ("torch.tensor([0.9, 0.02])", "{}.chunk(2)[1]", False),
        "narrowed": ("torch.tensor([0.9, 0.02, 0.5])", "{}.narrow(0, 1, 1)", False),
        "stride 0": ("torch.tensor(0.02)", "{}.expand(1)", False),
        "largest": ("torch.tensor([0.02, 0.015])", "{}.max()", False),
        "product of two": ("torch.tensor([0.2, 0.1])", "({0}[0] * {0}[1])", False),
        "half precision": ("torch.tensor(0.02, dtype=torch.bfloat16)", "{}", False),
        "cast": ("torch.tensor(0.02, dtype=torch.float16)", "{}.float()", False),
        "double": ("torch.tensor(0.02, dtype=torch.float64)", "{}", False),
        "negative": ("torch.tensor(-0.02)", "{}", False),
        "tiny": ("torch.tensor(1e-40)", "{}", False),
        "clamped": ("torch.tensor(0.001)", "{}.clamp(min=0.02)", False),
    }
    _, (made, text, multiplies) = b.pick("scale of the codes", kinds, RARE_SCALES)
    return (text.format(b.input(made, "scale")) if made else text), multiplies


RARE_SCALES = ("half precision", "cast", "double", "negative", "tiny", "clamped", "largest", "product of two")


def static(b: Builder, x: str, dtype: str = "") -> str:
    """Codes by one scale."""
    dtype = dtype or b.pick("codes", {name: name for name in LIMITS}, ("torch.float8_e4m3fnuz",))[0]
    limit = LIMITS[dtype]
    by, multiplies = scale(b)
    if not by.isidentifier() and "(" not in by and b.choose(False, True):
        by = b.let(by, "s")
    if b.choose(False, True):
        x = b.let(f"{x}.float()")
    if b.one_in(8):
        x = b.let(b.choose(f"{x}.unsqueeze(0)", f"{x}.flatten()", f"{x}.contiguous()"))
    y = b.let(f"{x} * {by}" if multiplies and b.choose(True, False) else f"{by} * {x}" if multiplies else f"{x} / {by}")
    if b.one_in(8):
        y = b.let(b.choose(f"{y}.contiguous()", f"{y}.unsqueeze(-1)", f"{y}.to(torch.bfloat16)", f"{y} * 2.0"))
    bounds = {
        "both": f"{y}.clamp(-{limit}, {limit})",
        "max before min": f"{y}.clamp_max({limit}).clamp_min(-{limit})",
        "min before max": f"{y}.clamp_min(-{limit}).clamp_max({limit})",
        "minimum and maximum": f"torch.maximum(torch.minimum({y}, torch.full((), {limit}, device={y}.device)), "
        f"torch.full((), -{limit}, device={y}.device))",
        "hardtanh": f"F.hardtanh({y}, -{limit}, {limit})",
        "smaller": f"{y}.clamp(-20.0, 20.0)",
        "240": f"{y}.clamp(-240.0, 240.0)",
        "positive": f"{y}.clamp(0.0, {limit})",
        "above": f"{y}.clamp(max={limit})",
        "below": f"{y}.clamp(min=-{limit})",
        "not the same": f"{y}.clamp(-{limit}, 10.0)",
        "by finfo": f"{y}.clamp(torch.finfo({dtype}).min, torch.finfo({dtype}).max)",
        "none": y,
        "integers": f"{y}.round().clamp(-{limit}, {limit})",
        "integers after": f"{y}.clamp(-{limit}, {limit}).round()",
        "without NaN": f"{y}.nan_to_num(0.0).clamp(-{limit}, {limit})",
        "rounded to bf16": f"{y}.clamp(-{limit}, {limit}).to(torch.bfloat16)",
        "rounded to fp16": f"{y}.clamp(-{limit}, {limit}).to(torch.float16)",
        "relu": f"{y}.relu().clamp(-{limit}, {limit})",
        "tensor bounds": f"{y}.clamp(*torch.tensor([-{limit}, {limit}], device={y}.device).unbind())",
    }
    usual = (
        "both",
        "max before min",
        "min before max",
        "minimum and maximum",
        "hardtanh",
        "by finfo",
        "rounded to bf16",
    )
    name, _ = b.pick("clamp", bounds, [name for name in bounds if name not in usual])
    y = y if name == "none" else b.let(bounds[name])
    return b.let(f"{y}.to({dtype})", "codes")


def opaque(b: Builder, x: str) -> str:
    """Codes by an op that the passes know by name."""
    by = b.input(b.choose("torch.tensor(0.02)", "torch.tensor([0.02])"), "scale")
    _, text = b.feature(
        "opaque",
        quantize_fp8=f"ops.quantize_fp8({x}, {by})",
        quantize_fp8_e5m2=f"ops.quantize_fp8({x}, {by}, E5M2)",
        by_a_reciprocal=f"ops.quantize_fp8({x}, {by}.reciprocal() * 0.0004)",
        dynamic=f"ops.quantize_fp8_dynamic({x}, quant.QuantSpec(E4M3, static=False))[0]",
        dynamic_token=f"ops.quantize_fp8_dynamic({x}, quant.QuantSpec(E4M3, 'token', static=False))[0]",
    )
    return b.let(text, "codes")


def group(b: Builder, x: str, size: int = 0) -> str:
    """Codes by scales of groups in the last dimension, which is made [tokens, hidden] first."""
    if b.tensor(x).ndim != 2:
        x = b.let(f"{x}.reshape(-1, {b.tensor(x).shape[-1]})")
    hidden = b.tensor(x).shape[-1]
    sizes = [g for g in (8, 16, 32, 4) if hidden % g == 0]
    if not sizes:
        return token(b, x)
    g = size or b.choose(*sizes)
    limit = "448.0"
    groups = b.choose(f"{x}.unflatten(-1, (-1, {g}))", f"{x}.reshape(-1, {hidden // g}, {g})")
    name, how = b.feature(
        "groups",
        repeated=f"quant.choose_scale({x}, quant.QuantSpec(E4M3, 'group', {g}, static=False))",
        divided="({0}.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-10)",
        times_reciprocal="({0}.abs().amax(-1, keepdim=True).float() * (1.0 / 448.0)).clamp(min=1e-10)",
        bound_of_magnitude="{0}.abs().float().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0",
        bound_in_the_dtype="{0}.abs().amax(-1, keepdim=True).clamp(min=2.0**-13).float() / 448.0",
        no_bound="{0}.float().abs().amax(-1, keepdim=True) / 448.0",
        upper_bound="({0}.float().abs().amax(-1, keepdim=True) / 448.0).clamp(1e-10, 0.001)",
        smaller_limit="({0}.float().abs().amax(-1, keepdim=True) / 240.0).clamp(min=1e-10)",
        powers_of_two="torch.exp2(torch.ceil(torch.log2(({0}.float().abs().amax(-1, keepdim=True) / 448.0)"
        ".clamp(min=1e-10))))",
        largest_not_magnitude="({0}.float().amax(-1, keepdim=True).clamp(min=1e-4)) / 448.0",
        opaque=f"ops.quantize_fp8_dynamic({x}, quant.QuantSpec(E4M3, 'group', {g}, static=False))",
    )
    if name == "opaque":
        both = b.let(how, "both")
        b.returns(f"{both}[1]")
        return b.let(f"{both}[0]", "codes")
    if name == "repeated":
        scales = b.let(how, "scales")
        codes = b.let(f"quant.quantize({x}, {scales}, E4M3)", "codes")
    else:
        of = b.let(groups)
        scales = b.let(how.format(of), "scales")
        divided = b.choose(f"{of} / {scales}", f"{of} * (1.0 / {scales})", f"{of} * {scales}.reciprocal()")
        clamped = b.choose(f"({divided}).clamp(-{limit}, {limit})", f"({divided})", f"({divided}).clamp(-100.0, 100.0)")
        codes = b.let(f"{clamped}.to(E4M3)", "codes")
        codes = b.let(b.choose(f"{codes}.flatten(-2)", f"{codes}.view({x}.shape)"), "codes")
        scales = b.let(f"{scales}.squeeze(-1)", "scales") if b.choose(True, False) else scales
    if b.choose(True, False):
        b.returns(scales)
    return codes


def token(b: Builder, x: str) -> str:
    """Codes by a scale for each row."""
    b.note("codes", "per token")
    scales = b.let(f"({x}.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-10)", "scales")
    return b.let(f"({x} / {scales}).clamp(-448.0, 448.0).to(E4M3)", "codes")


def near_miss(b: Builder, x: str) -> str:
    """What looks like a static quantization and is none."""
    hidden = b.tensor(x).shape[-1]
    _, text = b.feature(
        "near miss",
        per_channel=f"({x} / {{}}.expand({hidden})).clamp(-448.0, 448.0).to(E4M3)",
        per_tensor_dynamic=f"({x} / ({x}.abs().max() / 448.0)).clamp(-448.0, 448.0).to(E4M3)",
        int8=f"({x} / {{}}).round().clamp(-128, 127).to(torch.int8)",
        scaled_twice=f"({x} * 0.5 / {{}}).clamp(-448.0, 448.0).to(E4M3)",
        zero_point=f"({x} / {{}} + 1.0).clamp(-448.0, 448.0).to(E4M3)",
        scale_divided=f"({{}} / {x}).clamp(-448.0, 448.0).to(E4M3)",
        float_out=f"({x} / {{}}).clamp(-448.0, 448.0).float()",
        through_fp16=f"({x} / {{}}).to(torch.float16).clamp(-448.0, 448.0).to(E4M3)",
        e5m2_on_the_way=f"({x} / {{}}).clamp(-448.0, 448.0).to(E5M2).float().to(E4M3)",
        floor_division=f"torch.floor({x} / {{}}).clamp(-448.0, 448.0).to(E4M3)",
        rounded_division=f"torch.div({x}, {{}}, rounding_mode='trunc').clamp(-448.0, 448.0).to(E4M3)",
        cast_alone=f"{x}.to(E4M3)",
        absolute=f"({x}.abs() / {{}}).clamp(-448.0, 448.0).to(E4M3)",
    )
    return b.let(text.format(b.input("torch.tensor([0.02])", "scale")) if "{}" in text else text, "codes")
