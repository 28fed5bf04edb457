"""Compile time of the passes: what they take of a decoder with 4, 16 and 64 layers, a layer.

    python benchmarks/pass_time.py [--layers 4 16 64] [--model llama paged_llama]

No card: the post-grad graphs are captured on the CPU, without generated code, and every fusion is applied that is
legal.  Time is that of the process, the best of some runs, each on a copy of the graph.
"""

import argparse
import copy
import dataclasses
import time

import torch
from torch.fx import Graph, GraphModule

from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.models.llama import PRESETS, Llama, to_fp8
from fusion_passes.models.paged_llama import PagedLlama, randomize
from fusion_passes.nn import AttentionMetadata
from fusion_passes.testing import capture

CONFIG = PassConfig(profitability="ignore")


def llama(layers: int) -> Graph:
    """Prefill without a cache: attention and the quantization of its output."""
    model = Llama(dataclasses.replace(PRESETS["tiny"], layers=layers)).bfloat16().eval()
    tokens = torch.arange(24)[None]
    return _captured(to_fp8(model, tokens), tokens)


def paged_llama(layers: int) -> Graph:
    """With a paged FP8 cache: RoPE, quantization and the write to the cache, attention over it."""
    model = PagedLlama(dataclasses.replace(PRESETS["tiny"], layers=layers, context=64), fp8=True, block_size=16).eval()
    randomize(model)
    model.allocate_cache(pages=4)
    metadata = AttentionMetadata.from_lengths(
        [1, 1], [20, 31], torch.arange(4).reshape(2, 2).int(), 16, max_query_len=1
    )
    return _captured(model, torch.tensor([1, 2]), torch.tensor([19, 30]), metadata)


MODELS = {"llama": llama, "paged_llama": paged_llama}


@torch.no_grad()
def _captured(model: torch.nn.Module, *args: object) -> Graph:
    (graph,) = capture(model, *args)
    return graph


def best(graph: Graph, runs: int) -> tuple[float, Report]:
    """Seconds of the passes on this graph, and what they did."""
    taken = float("inf")
    for _ in range(runs):
        fresh = GraphModule(graph.owning_module, copy.deepcopy(graph)).graph
        report = Report()
        manager = PostGradPassManager(CONFIG, report)
        start = time.process_time()
        manager(fresh)
        taken = min(taken, time.process_time() - start)
    return taken, report


def main() -> None:
    """Print a line for each model and number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(f"{'model':12} {'layers':>6} {'nodes':>6} {'fused':>6} {'ms':>8} {'ms a layer':>10}  stages")
    for name in options.model:
        for layers in options.layers:
            graph = MODELS[name](layers)
            seconds, report = best(graph, options.runs)
            (done,) = report.graphs
            stages = ", ".join(f"{stage} {taken * 1e3:.1f}" for stage, taken in done.seconds.items())
            print(
                f"{name:12} {layers:6} {len(graph.nodes):6} {report.count():6} {seconds * 1e3:8.1f} "
                f"{seconds * 1e3 / layers:10.2f}  {stages}",
                flush=True,
            )


if __name__ == "__main__":
    main()
