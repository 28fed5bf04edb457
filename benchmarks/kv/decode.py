"""Decode attention over a paged FP8 cache, as the op of the library, against a copy that is timed in the same run.

Bytes are those of the keys and values that some query sees. The cache is larger than the L2, or several caches are read
in turn. Query and output are FP8, the scales live tensors, the block table shuffled.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from common import copy, microseconds
from torch import Tensor

from fusion_passes.ops import paged_attention

E4M3 = torch.float8_e4m3fn
COLD_BYTES = 300_000_000
"""Data that the contenders go round, so that none of it is in the L2 when it is read again."""
FA3_RATIO = 1.35
"""How many times as fast as the recorded FlashAttention-3 to be."""


@dataclass(frozen=True)
class Case:
    """lengths: keys of each sequence, with the new tokens. columns: of the block table, just enough if None."""

    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    tokens: int = 1
    page_size: int = 64
    layout: str = "HND"
    cache: torch.dtype = E4M3
    head_dim: int = 128
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    group_size: int | None = None
    columns: int | None = None
    fa3: float | None = None
    """Microseconds of FlashAttention-3 with FP8 query and cache and bf16 output, as measured once on the same kind of
    card (torch 2.11, page 64, one data set); it is not installed here, so this is a recorded figure."""
    of_copy: float | None = None
    """The part of the copy's bandwidth to reach."""

    def __str__(self) -> str:
        alike = len(set(self.lengths)) == 1
        keys = f"{len(self.lengths)} x {self.lengths[0]}" if alike else f"{len(self.lengths)} ragged"
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        names = (
            "tokens",
            "page_size",
            "layout",
            "cache",
            "head_dim",
            "window",
            "softcap",
            "sinks",
            "group_size",
            "columns",
        )
        rest = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != plain[name]]
        return ", ".join([keys, f"{self.heads}/{self.kv_heads} heads", *rest])

    @property
    def bytes(self) -> int:
        seen = [n if self.window is None else min(n, self.window + self.tokens - 1) for n in self.lengths]
        return 2 * sum(seen) * self.kv_heads * self.head_dim * self.cache.itemsize


def ragged() -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return {
        "uniform": tuple(torch.randint(1, 8193, (32,), generator=generator).tolist()),
        "one long": (65536,) + (1024,) * 7,
        "powers": tuple(256 << int(i) for i in torch.randint(0, 7, (64,), generator=generator)),
    }


MAIN = (
    Case((4096,) * 32, fa3=96.0, of_copy=0.93),
    Case((16384,) * 8, fa3=93.0, of_copy=0.92),
    Case((25088,), fa3=28.0, of_copy=0.60),
    Case((32768,), heads=64, fa3=34.0, of_copy=0.60),
    Case((1024,), fa3=11.0),
)
OTHERS = (
    *(dataclasses.replace(MAIN[0], tokens=n, fa3=None, of_copy=None) for n in (2, 4, 8, 16)),
    *(dataclasses.replace(MAIN[3], tokens=n, fa3=None, of_copy=None) for n in (2, 4, 8, 16)),
    *(Case(lengths) for lengths in ragged().values()),
    Case((4096,) * 64),
    Case((2048,) * 128),
    Case((16384,) * 32, window=4096),
    Case((4096,) * 32, softcap=30.0),
    Case((4096,) * 32, sinks=True),
    Case((4096,) * 32, window=4096, softcap=30.0, sinks=True),
    Case((4096,) * 32, group_size=128),
    Case((4096,) * 32, columns=2048),
    Case((4096,) * 32, layout="NHD"),
    Case((4096,) * 32, page_size=16),
    Case((4096,) * 32, cache=torch.bfloat16),
    Case((4096,) * 32, cache=torch.float8_e5m2),
    Case((8192,) * 64, heads=8, kv_heads=1),
    Case((131072,), heads=8, kv_heads=1),
    Case((4096,) * 32, heads=16, kv_heads=8, head_dim=64),
    Case((4096,) * 32, heads=16, kv_heads=4, head_dim=256),
)


def random_cache(case: Case, pages: int) -> Tensor:
    """[pages, kv_heads, page_size, head_dim]."""
    shape = (pages, case.kv_heads, case.page_size, case.head_dim)
    if case.layout == "NHD":
        shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(case.cache)
    return x.transpose(1, 2) if case.layout == "NHD" else x


def calls(case: Case) -> list[Callable[[], object]]:
    """The op on as many data sets as a cold L2 takes."""
    seqs, longest = len(case.lengths), max(case.lengths)
    used = math.ceil(longest / case.page_size)
    pages = seqs * used
    fp8 = case.cache is not torch.bfloat16
    scales = [torch.tensor([x], device="cuda") if fp8 else None for x in (0.37, 0.29)]
    q_scale = torch.tensor([0.013], device="cuda")
    output_scale = None if case.group_size else torch.tensor([0.011], device="cuda")
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    start = torch.arange(seqs + 1, dtype=torch.int32, device="cuda") * case.tokens
    sinks = torch.randn(case.heads, device="cuda") if case.sinks else None
    options = {
        "scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap, "dtype": E4M3,
        "max_query_len": case.tokens, "implementation": "triton",
    }  # fmt: skip

    def one() -> Callable[[], object]:
        key, value = random_cache(case, pages), random_cache(case, pages)
        table = torch.zeros(seqs, case.columns or used, dtype=torch.int32, device="cuda")
        table[:, :used] = torch.randperm(pages, device="cuda").view(seqs, used)
        query = torch.randn(seqs * case.tokens, case.heads, case.head_dim, device="cuda").to(E4M3)
        batch = (query, key, value, table, start, lengths, q_scale, *scales, None)
        if case.group_size:
            return lambda: torch.ops.fusion_passes.paged_attention_group_quant(
                *batch, sinks, **options, group_size=case.group_size
            )
        return lambda: paged_attention(*batch, output_scale, sinks, **options)

    return [one() for _ in range(math.ceil(COLD_BYTES / case.bytes))]


def measure(case: Case, milliseconds: float = 40.0) -> dict[str, object]:
    torch.manual_seed(0)
    copying, moved = copy()
    times = microseconds({"op": calls(case), "copy": copying}, milliseconds)
    bandwidth, copied = case.bytes / times["op"] / 1e6, moved / times["copy"] / 1e6
    row: dict[str, object] = {
        "case": str(case),
        "microseconds": round(times["op"], 2),
        "terabytes_per_second": round(bandwidth, 3),
        "copy_terabytes_per_second": round(copied, 3),
        "of_copy": round(bandwidth / copied, 3),
    }
    if case.of_copy is not None:
        row["of_copy_target"] = case.of_copy
    if case.fa3 is not None:
        row |= {
            "recorded_fa3_microseconds": case.fa3,
            "ratio_to_recorded_fa3": round(case.fa3 / times["op"], 3),
            "ratio_to_recorded_fa3_target": FA3_RATIO,
        }
    if len(set(case.lengths)) > 1:
        row["lengths"] = case.lengths
    return row


def missed(row: dict[str, object]) -> list[str]:
    """What a row does not reach, in words."""
    return [
        f"{row['case']}: {name} {row[name]} of {row[f'{name}_target']}"
        for name in ("of_copy", "ratio_to_recorded_fa3")
        if f"{name}_target" in row and row[name] < row[f"{name}_target"]  # type: ignore[operator]
    ]


def run(quick: bool) -> Iterator[dict[str, object]]:
    """The rows of the cases with a target, and of others unless quick; then prints the targets that were missed."""
    failures = []
    for case in MAIN if quick else (*MAIN, *OTHERS):
        row = measure(case)
        failures += missed(row)
        print({name: x for name, x in row.items() if name != "lengths"}, flush=True)
        yield row
        torch.cuda.empty_cache()
    print(f"targets missed: {'; '.join(failures) or 'none'}", flush=True)
