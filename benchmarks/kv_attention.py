"""Attention with a KV cache: decode, prefill and mixed batches, and the write to the cache.

    python benchmarks/kv_attention.py --sections decode prefill --record benchmarks/results
    python benchmarks/kv_attention.py --sections rope_write quantization --record fusion_passes/measured
    python benchmarks/kv_attention.py --sections decode --quick

Each section is a module in `benchmarks/kv`, whose docstring says what it compares with what.  `decode` and `prefill`
measure ops, and are kept in `benchmarks/results`; `rope_write` and `quantization` measure fusions, whose profitability
reads them from `fusion_passes/measured`.  A record is written after each row; it says "complete" once it has all.
"""

import argparse
import importlib
from pathlib import Path

import torch
import torch._inductor.config
from common import needs_a_card, write

RECORDS = {
    "kv_attention-rope_write": (
        ("rope_quant_kv_write", "quantize"),
        "--sections rope_write",
        "fusion_passes/measured",
    ),
    "kv_attention-quantization": (
        ("paged_decode", "paged_prefill", "paged_prefill_sm90", "quantize"),
        "--sections quantization",
        "fusion_passes/measured",
    ),
    "kv_attention-decode": (("paged_decode",), "--sections decode", "benchmarks/results"),
    "kv_attention-prefill": (
        ("paged_decode", "paged_prefill", "paged_prefill_sm90"),
        "--sections prefill",
        "benchmarks/results",
    ),
}
"""By the name of a record: the kernels that it measures, the options that make it, and its folder."""
SECTIONS = ("decode", "prefill", "rope_write", "quantization")

# A graph from a cache would not say which fusions it has.
torch._inductor.config.force_disable_caches = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="only the cases with a target")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write DIR/kv_attention-<section>.json")
    arguments = parser.parse_args()
    needs_a_card(parser)
    torch.manual_seed(0)
    for section in arguments.sections:
        run(section, arguments.quick, arguments.record)


def run(section: str, quick: bool, record: Path | None) -> None:
    """One section, recorded after each row, so that what was measured is not lost with what was not."""
    rows: list[dict[str, object]] = []

    def keep(*, complete: bool) -> None:
        if record is not None:
            figures = {"section": section, "quick": quick, "complete": complete, "rows": rows}
            write(record / f"kv_attention-{section}.json", figures)

    for row in importlib.import_module(f"kv.{section}").run(quick):
        rows.append(row)
        keep(complete=False)
    keep(complete=True)


if __name__ == "__main__":
    main()
