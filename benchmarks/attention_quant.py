"""Attention with FP8 output against the best stock SDPA backend followed by Inductor's quantization kernel.

    python benchmarks/attention_quant.py --suite target --record benchmarks/results
    python benchmarks/attention_quant.py --level kernel --suite spread --record fusion_passes/measured

The first compares what a user gets: both sides through `torch.compile`, the fused one with the pass, whose matches are
recorded.  The second compares the kernels alone over many shapes; its record is what the fusion's profitability reads,
so running it on another card makes the fusion profitable there, where it is.

Both sides run inside CUDA graphs, so that launches cost neither of them anything, and take turns, so that both see the
same clocks. Inputs are random and not rotated: what fits the L2 stays there, for both sides.
"""

import argparse
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._inductor.config
import torch.nn.functional as F
from common import microseconds, needs_a_card, why_declined, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.ops.attention_quant import AttentionKernel, AttentionQuantArguments, choose

# Inductor's caches do not know which SDPA backend a graph was compiled under.
torch._inductor.config.force_disable_caches = True

RECORDS = {
    "attention_quant-compile-target": (
        ("attention_quant", "attention_quant_sm90"),
        "--level compile --suite target",
        "benchmarks/results",
    ),
    "attention_quant-compile-spread": (
        ("attention_quant", "attention_quant_sm90"),
        "--level compile --suite spread",
        "benchmarks/results",
    ),
    "attention_quant-kernel-target": (
        ("attention_quant", "attention_quant_sm90"),
        "--level kernel --suite target",
        "fusion_passes/measured",
    ),
    "attention_quant-kernel-spread": (
        ("attention_quant", "attention_quant_sm90"),
        "--level kernel --suite spread",
        "fusion_passes/measured",
    ),
}
"""By the name of a record: the kernels that it measures, the options that make it, and its folder."""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    q_len: int | None = None  # the length if None
    mask: bool = False  # bool, [batch, 1, 1, length]

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.length}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"
        kind = "causal" if self.causal else "mask" if self.mask else "full"
        return f"{sizes}, {kind}" + (f", {self.q_len} queries" if self.q_len else "")


TARGET = [
    Shape(1, 8192, 32, 8, 128),
    Shape(4, 2048, 40, 8, 128),
    Shape(1, 2048, 32, 8, 128),
    Shape(1, 16384, 64, 8, 128),
    Shape(8, 512, 32, 8, 128),
    Shape(2, 4096, 32, 32, 64, causal=False),
]
SPREAD = [
    # Self-attention at about the same number of tokens for every length, and short sequences alone.
    *(
        Shape(max(1, 8192 // length), length, 16, 4, head_dim, causal)
        for head_dim, lengths in (
            (128, (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
            (64, (128, 512, 2048, 8192, 32768)),
            (256, (128, 512, 2048, 8192, 32768)),
        )
        for length in lengths
        for causal in (True, False)
    ),
    *(Shape(1, length, 16, 4, 128) for length in (128, 512, 2048)),
    Shape(1, 128, 16, 4, 64),
    # What only the portable kernel takes.
    *(
        Shape(max(1, 8192 // length), length, 16, 4, head_dim, False, mask=True)
        for head_dim in (64, 128)
        for length in (128, 512, 2048)
    ),
    *(
        Shape(max(1, 8192 // length), length, 16, 4, head_dim)
        for head_dim in (80, 96, 192)
        for length in (128, 512, 2048)
    ),
    Shape(32, 128, 12, 12, 64, False, mask=True),
    Shape(32, 1024, 32, 8, 128, False, q_len=1),
    Shape(4, 2048, 16, 4, 128, False, q_len=256),
]
TUNE = [
    Shape(batch, length, 16, 4, head_dim)
    for head_dim in (64, 96, 128, 192, 256)
    for batch, length in ((16, 256), (4, 1024), (1, 8192))
]
SUITES = {"target": TARGET, "spread": SPREAD}


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    q_len = shape.q_len or shape.length
    q = torch.randn(shape.batch, q_len, shape.heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(
        2, shape.batch, shape.length, shape.kv_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16
    ).unbind()
    mask = None
    if shape.mask:
        mask = torch.ones(shape.batch, 1, 1, shape.length, device="cuda", dtype=torch.bool)
        mask[..., shape.length * 3 // 4 :] = False
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, torch.tensor([0.005], device="cuda")


def quantize(out: Tensor, scale: Tensor) -> Tensor:
    return (out.transpose(1, 2).float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def contenders(shape: Shape, backends: Sequence[str] = tuple(BACKENDS)) -> dict[str, Callable[[], object]]:
    """Stock attention and quantization for each backend, and the kernel that the op would run."""
    q, k, v, mask, scale = inputs(shape)
    torch.compiler.reset()
    compiled = torch.compile(quantize)

    def stock(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )
        return compiled(out, scale)

    def fused(kernel: AttentionKernel) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), dtype=torch.float8_e4m3fn).transpose(1, 2)
        importlib.import_module(kernel.module).launch(
            out, q, k, v, mask, scale, is_causal=shape.causal, scale=shape.head_dim**-0.5,
            output_scale_factor=1.0, output_scale_inverse=False,
        )  # fmt: skip
        return out

    functions: dict[str, Callable[[], object]] = {
        name: lambda backend=BACKENDS[name]: stock(backend) for name in backends
    }
    if (kernel := choose(AttentionQuantArguments(q, k, v, mask, is_causal=shape.causal))) is not None:
        functions[kernel.name] = lambda: fused(kernel)
    return functions


def compiled_contenders(
    shape: Shape, backends: Sequence[str], declined: dict[str, str]
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """The whole function through stock `torch.compile` under each backend, and with the pass; matches of each.

    declined: takes the backends that do not run this, with the reason."""
    q, k, v, mask, scale = inputs(shape)

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
        )
        return quantize(out, scale)

    def compiled(backend: str, config: PassConfig, report: Report) -> Callable[[], object]:
        torch.compiler.reset()
        function = fusion_passes.compile(layer, config, report=report, dynamic=False)
        with sdpa_kernel(BACKENDS[backend]), torch.no_grad():
            function(q, k, v, mask, scale)

        def call() -> object:
            with sdpa_kernel(BACKENDS[backend]), torch.no_grad():
                return function(q, k, v, mask, scale)

        return call

    functions: dict[str, Callable[[], object]] = {}
    matches = {}
    candidates = [(name, name, PassConfig(level="O0")) for name in backends]
    candidates.append(("fused", backends[0], PassConfig(profitability="ignore")))
    for name, backend, config in candidates:
        report = Report()
        try:
            functions[name] = compiled(backend, config, report)
        except RuntimeError as error:
            if (why := why_declined(error)) is None:
                raise
            declined[name] = why
            continue
        matches[name] = report.count(rule="attention_quant")
    return functions, matches


def measure(shape: Shape, level: str, backends: Sequence[str]) -> dict[str, object]:
    row: dict[str, object] = {"shape": asdict(shape)}
    declined: dict[str, str] = {}
    if level == "compile":
        functions, row["matches"] = compiled_contenders(shape, backends, declined)
    else:
        functions = contenders(shape, backends)
    times = microseconds(functions, declined=declined)
    stock = {name: time for name, time in times.items() if name in BACKENDS}
    ours = {name: time for name, time in times.items() if name not in BACKENDS}
    best = min(stock, key=stock.__getitem__) if stock else None
    row |= {
        "microseconds": {name: round(time, 2) for name, time in times.items()},
        "best_stock": best,
        "ratio": {name: round(stock[best] / time, 3) for name, time in ours.items()} if best else {},
        "declined": declined,
    }
    return row


def tune(shape: Shape) -> None:
    """Print the times of some configurations of the portable kernel, best first, for the tables in its module."""
    from fusion_passes.kernels.attention_quant import launch

    q, k, v, mask, scale = inputs(shape)
    out = torch.empty_like(q.transpose(1, 2), dtype=torch.float8_e4m3fn).transpose(1, 2)
    options = {"is_causal": shape.causal, "scale": 0.1, "output_scale_factor": 1.0, "output_scale_inverse": False}
    functions = {
        str(config): lambda config=config: launch(out, q, k, v, mask, scale, **options, config=config)
        for config in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
        if config[:3] != (64, 128, 8)
    }
    times = sorted(microseconds(functions, 10.0, declined={}).items(), key=lambda item: item[1])
    print(shape, " ".join(f"{name} {time:.1f}" for name, time in times[:6]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=["compile", "kernel"], default="compile", help="what to compare")
    parser.add_argument("--suite", choices=[*SUITES, "tune"], default="target")
    parser.add_argument(
        "--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS], help="stock, to compare with"
    )
    parser.add_argument("--start", type=int, default=0, help="first shape to tune")
    parser.add_argument("--step", type=int, default=1, help="tune every so many shapes: compile in several processes")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the figures as JSON into DIR")
    arguments = parser.parse_args()
    needs_a_card(parser)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # SDPA says at length why each backend declined
    if arguments.suite == "tune":
        for shape in TUNE[arguments.start :: arguments.step]:
            tune(shape)
        return
    rows = []
    for shape in SUITES[arguments.suite]:
        row = measure(shape, arguments.level, arguments.backends)
        rows.append(row)
        if arguments.record:  # after each, so that what was measured is not lost with what was not
            record(arguments, rows)
        print(
            f"{shape!s:58s} stock {row['best_stock']} {row['microseconds']} ratio {row['ratio']}"
            + (f" matches {row['matches']}" if "matches" in row else ""),
            flush=True,
        )
    first = [next(iter(row["ratio"].values())) for row in rows if row["ratio"]]  # type: ignore[attr-defined]
    print(f"geometric mean {math.prod(first) ** (1 / len(first)):.3f}, worst {min(first):.3f}")


def record(arguments: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    path = arguments.record / f"attention_quant-{arguments.level}-{arguments.suite}.json"
    write(path, {"level": arguments.level, "suite": arguments.suite, "rows": rows})


if __name__ == "__main__":
    main()
