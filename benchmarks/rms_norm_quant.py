"""RMSNorm and FP8 quantization: what Inductor makes of them, against the same program with `rms_norm_quant`.

    python benchmarks/rms_norm_quant.py --sizes 4096 --record fusion_passes/measured
    python benchmarks/rms_norm_quant.py --quick

A program normalises rows as Llama does and quantizes them by a given scale ("tensor"), by one for each row ("token") or
by one for 128 neighbours ("group of 128"): in plain torch, which Inductor fuses with the norm, or in an op that it does
not look into ("opaque").  With "sum" in front a residual is added before the norm, and returned: Inductor takes the sum
into its kernel, the fused op does not.

Both sides are compiled by Inductor with its caches off, in one process, and run in CUDA graphs in turn.  `matches`
counts what was fused.  A size takes about two minutes.  A record is written after each row, one file for each size; it
says "complete" once it has all.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch._inductor.config
from common import microseconds, needs_a_card, write
from torch import Tensor

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.ops.quantize_dynamic import quantize_fp8_dynamic
from fusion_passes.quant import QuantSpec, choose_scale, quantize

RECORDS = {
    "rms_norm_quant-2048": (("rms_norm_quant", "quantize"), "--sizes 2048", "fusion_passes/measured"),
    "rms_norm_quant-4096": (("rms_norm_quant", "quantize"), "--sizes 4096", "fusion_passes/measured"),
    "rms_norm_quant-8192": (("rms_norm_quant", "quantize"), "--sizes 8192", "fusion_passes/measured"),
}
"""By the name of a record: the kernels that it measures, the options that make it, and its folder."""
SIZES = (2048, 4096, 8192)
ROWS = (1, 8, 64, 256, 1024, 4096, 16384)
QUICK = (1, 64, 4096)
LARGE = 512
"""Rows from which on a program is compiled anew: Inductor chooses by the first size that it sees."""

E4M3 = torch.float8_e4m3fn
TOKEN = QuantSpec(E4M3, "token", static=False)
GROUP = QuantSpec(E4M3, "group", 128, static=False)
STOCK, OURS = PassConfig(level="O0"), PassConfig(profitability="ignore")
# A graph from a cache would not say which fusions it has.
torch._inductor.config.force_disable_caches = True
# All programs are one function to Dynamo, with other cells.
torch._dynamo.config.recompile_limit = 256


def dynamic(spec: QuantSpec) -> Callable[..., tuple[Tensor, ...]]:
    def run(y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        scales = choose_scale(y, spec)
        return quantize(y, scales, E4M3), scales

    return run


QUANTIZATIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "tensor": lambda y, scale: (quantize(y, scale, E4M3),),
    "tensor, opaque": lambda y, scale: (quantize_fp8(y, scale, E4M3),),
    "token": dynamic(TOKEN),
    "group of 128": dynamic(GROUP),
    "group of 128, opaque": lambda y, scale: quantize_fp8_dynamic(y, GROUP),
}


def program(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """A norm and the quantization of this kind, "sum, " in front or not."""
    quantize = QUANTIZATIONS[kind.removeprefix("sum, ")]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * y.to(x.dtype)

    def alone(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return quantize(norm(x, weight), scale)

    def after_a_sum(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        x = x + residual
        return x, *quantize(norm(x, weight), scale)

    return after_a_sum if kind.startswith("sum, ") else alone


KINDS = tuple(f"{before}{kind}" for before in ("", "sum, ") for kind in QUANTIZATIONS)


class Compiled:
    """Every program twice, with the passes and without."""

    def __init__(self) -> None:
        self.reports = {kind: Report() for kind in KINDS}
        self.sides = {
            "stock": {kind: fusion_passes.compile(program(kind), STOCK, fullgraph=True) for kind in KINDS},
            "passes": {
                kind: fusion_passes.compile(program(kind), OURS, report=report, fullgraph=True)
                for kind, report in self.reports.items()
            },
        }

    @torch.no_grad()
    def row(self, rows: int, size: int) -> dict[str, object]:
        """ratio: the program as it is over the same with the passes."""
        x, residual = torch.randn(2, rows, size, device="cuda").bfloat16().unbind()
        weight, scale = torch.randn(size, device="cuda").bfloat16(), torch.tensor(0.02, device="cuda")
        for tensor in (x, residual):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        functions = {}
        for side, programs in self.sides.items():
            for kind, compiled in programs.items():
                compiled(x, residual, weight, scale)
                functions[f"{kind}, {side}"] = lambda run=compiled: run(x, residual, weight, scale)
        times = microseconds(functions, milliseconds=20.0)
        return {
            "shape": {"rows": rows, "size": size, "dtype": str(x.dtype)},
            "microseconds": {name: round(time, 2) for name, time in times.items()},
            "matches": {
                kind: f"{r.count(rule='rms_norm_quant')} in {len(r.graphs)} graphs" for kind, r in self.reports.items()
            },
            "ratio": {kind: round(times[f"{kind}, stock"] / times[f"{kind}, passes"], 3) for kind in KINDS},
        }


def run(size: int, quick: bool) -> Iterator[dict[str, object]]:
    """The rows of the record of one size."""
    compiled: dict[bool, Compiled] = {}
    for rows in QUICK if quick else ROWS:
        if (large := rows >= LARGE) not in compiled:
            compiled[large] = Compiled()
        row = compiled[large].row(rows, size)
        print(f"{rows:6d} rows of {size:5d} {row['ratio']} {row['matches']} {row['microseconds']}", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES), help="of a row")
    parser.add_argument("--quick", action="store_true", help=f"rows of 4096, {', '.join(map(str, QUICK))} of them")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write DIR/rms_norm_quant-<size>.json")
    arguments = parser.parse_args()
    needs_a_card(parser)
    torch.manual_seed(0)
    for size in [4096] if arguments.quick else arguments.sizes:
        rows: list[dict[str, object]] = []
        for row in run(size, arguments.quick):
            rows.append(row)
            if arguments.record is not None:
                complete = not arguments.quick and len(rows) == len(ROWS)
                figures = {"quick": arguments.quick, "complete": complete, "rows": rows}
                write(arguments.record / f"rms_norm_quant-{size}.json", figures)


if __name__ == "__main__":
    main()
