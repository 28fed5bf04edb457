"""Attention with a KV cache: decode, prefill and mixed batches, and the write to the cache.

    python benchmarks/kv_attention.py --record benchmarks/results
    python benchmarks/kv_attention.py --sections decode --quick

Each section is a module in `benchmarks/kv`, whose docstring says what it compares with what.
"""

import argparse
import importlib
from pathlib import Path

import torch
import torch._inductor.config
from common import write

SECTIONS = ("decode", "prefill", "rope_write", "quantisation")

# A graph from a cache would not say which fusions it has.
torch._inductor.config.force_disable_caches = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="only the cases with a target")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write DIR/kv_attention-<section>.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for section in arguments.sections:
        rows = importlib.import_module(f"kv.{section}").run(arguments.quick)
        if arguments.record:
            write(arguments.record / f"kv_attention-{section}.json", {"section": section, "rows": rows})


if __name__ == "__main__":
    main()
