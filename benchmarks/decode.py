"""Time per output token of a Llama-3.1-8B-shaped decoder, FP8 weights and FP8 KV cache, with and without the passes.

    python benchmarks/decode.py --record benchmarks/results

All layers, random weights, one new token for each sequence, the whole step in one CUDA graph.  Variants:

    opaque    the query's quantization is one kernel in an opaque op, the keys' and values' another with the cache's
              write; no passes: what serving engines do
    exposed   the query is quantized in plain torch, as nn.Attention does, so that Inductor fuses it with RoPE
    measured  and the passes, where a committed measurement says that they are faster
    ignore    and the passes, wherever they are legal

They share weights and caches and are replayed in turn, so ratios are of the same clocks.  A layer is compiled once a
variant and batch, with Inductor's caches off.  Weights are far larger than the L2, so nothing is warm between steps.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import torch
import torch._dynamo.config
import torch._inductor.config
from torch import Tensor

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.models.llama import PRESETS
from fusion_passes.models.paged_llama import PagedLlama, randomize
from fusion_passes.nn import Attention, AttentionMetadata
from fusion_passes.ops.quantize import quantize_fp8

torch._inductor.config.force_disable_caches = True

RECORDS = {"decode": (("paged_decode", "rope_quant_kv_write", "quantize"), "", "benchmarks/results")}
"""By the name of a record: the kernels that it measures, the options that make it, and its folder."""
torch._dynamo.config.recompile_limit = 1000  # every variant and batch compiles the same functions

PAGE = 64
BASELINE = "opaque"
VARIANTS: dict[str, tuple[bool, PassConfig]] = {  # whether the query's quantization is opaque, and the passes
    "opaque": (True, PassConfig(level="O0")),
    "exposed": (False, PassConfig(level="O0")),
    "measured": (False, PassConfig()),
    "ignore": (False, PassConfig(profitability="ignore")),
}


class Switched(Attention):
    """Attention whose query is quantized in an opaque op if `opaque` says so."""

    opaque = False

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.opaque:
            query = quantize_fp8(query, self._q_scale, self.cache_dtype)
        return super().forward(query, *args, **kwargs)


def build(preset: str, batch: int, context: int, device: str) -> PagedLlama:
    """Random weights, and a cache for so many sequences with random codes in it."""
    config = dataclasses.replace(PRESETS[preset], context=context)
    model = PagedLlama(config, fp8=True, block_size=PAGE, attention=Switched, device=device)
    model.eval().requires_grad_(False)
    randomize(model)
    model.allocate_cache(batch * -(-context // PAGE))
    for layer in model.attention_layers:
        for cache in (layer.kv_cache.key, layer.kv_cache.value):
            cache.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)  # magnitudes below 2, no NaN
    return model


def batch_of(model: PagedLlama, batch: int, context: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Tokens, positions and metadata of a step that makes each of the sequences `context` tokens long."""
    device = model.embedding.weight.device
    pages = model.attention_layers[0].kv_cache.pages
    columns = -(-context // PAGE)
    table = torch.randperm(pages, device=device)[: batch * columns].int().view(batch, columns)
    metadata = AttentionMetadata.from_lengths([1] * batch, [context] * batch, table, PAGE, max_query_len=1)
    if columns > 1:
        torch._dynamo.mark_dynamic(metadata.block_table, 1)  # one graph for every context
    tokens = torch.randint(model.config.vocab, (batch,), device=device)
    return tokens, torch.full((batch,), context - 1, device=device), metadata


# The same compiled function for every variant: no pass has anything to do there.
compile_end = functools.cache(functools.partial(torch.compile, fullgraph=True))


def prepare(model: PagedLlama, variant: str, report: Report) -> None:
    """Make the model a variant of itself; what is called next is compiled."""
    opaque, config = VARIANTS[variant]
    for layer in model.attention_layers:
        layer.opaque = opaque
    model.compile_layers(
        lambda layer: fusion_passes.compile(layer, config, report=report, fullgraph=True), ends=compile_end
    )


def sites(report: Report) -> list[str]:
    """What became of every place in a layer that a rule looked at."""
    return [f"{site.rule}: {site.status}" + (f": {site.reason}" if site.reason else "") for site in report.sites]


def milliseconds(graphs: dict[str, torch.cuda.CUDAGraph], seconds: float) -> dict[str, float]:
    """Median time of a replay of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[BASELINE]) < 12:
        for name, graph in graphs.items():
            times[name].append(common.replay(graph) / 1e3)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def kernels(graph: torch.cuda.CUDAGraph, layers: int) -> list[dict[str, object]]:
    """The kernels of a replay: calls and microseconds of one layer, or of the step where not every layer has one."""
    repeats = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
    calls: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.device_time:
            calls[event.name].append(event.device_time)
    rows = []
    for name, times in calls.items():
        count = len(times) // repeats
        per_layer = count >= layers
        rows.append(
            {
                "kernel": name[:100],
                "calls": round(count / layers, 2) if per_layer else count,
                "of": "layer" if per_layer else "step",
                "microseconds": round(sum(times) / repeats / (layers if per_layer else 1), 2),
            }
        )
    return sorted(rows, key=lambda row: (row["of"], -row["microseconds"]))


@torch.no_grad()
def measure(
    model: PagedLlama, batch: int, contexts: Sequence[int], variants: Sequence[str], seconds: float, profile: bool
) -> list[dict[str, object]]:
    """One row for each context."""
    batches = {context: batch_of(model, batch, context) for context in contexts}
    graphs: dict[int, dict[str, torch.cuda.CUDAGraph]] = {context: {} for context in contexts}
    matches, compile_seconds = {}, {}
    for variant in variants:
        report, start = Report(), time.monotonic()
        prepare(model, variant, report)
        for context, arguments in batches.items():
            graphs[context][variant] = common.capture([lambda arguments=arguments: model(*arguments)], 1)
        compile_seconds[variant] = round(time.monotonic() - start, 1)
        matches[variant] = sites(report)
    rows = []
    for context in contexts:
        times = milliseconds(graphs[context], seconds)
        base = times[BASELINE]
        row: dict[str, object] = {
            "batch": batch,
            "context": context,
            "milliseconds": {name: round(value, 4) for name, value in times.items()},
            "ratio": {name: round(base / value, 4) for name, value in times.items() if name != BASELINE},
            "matches_per_layer": matches,
            "compile_seconds": compile_seconds,
        }
        if profile:
            row["kernels"] = {name: kernels(graph, model.config.layers) for name, graph in graphs[context].items()}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=[*PRESETS], default="8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 25_000])
    parser.add_argument("--variants", choices=[*VARIANTS], nargs="+", default=[*VARIANTS])
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring, for each batch and context")
    parser.add_argument("--profile", action="store_true", help="list the kernels too")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the figures as JSON into DIR")
    arguments = parser.parse_args()
    common.needs_a_card(parser)
    if BASELINE not in arguments.variants:
        parser.error(f"ratios are to {BASELINE!r}: name it among the variants")
    torch.manual_seed(0)
    started = time.monotonic()
    model = build(arguments.preset, max(arguments.batches), max(arguments.contexts), "cuda")
    backend = model.attention_layers[0].backend.name
    print(f"{arguments.preset}, attention by {backend}, built in {time.monotonic() - started:.1f} s", flush=True)
    rows: list[dict[str, object]] = []
    for batch in arguments.batches:
        for row in measure(model, batch, arguments.contexts, arguments.variants, arguments.seconds, arguments.profile):
            rows.append(row)
            shown = {name: value for name, value in row.items() if name != "kernels"}
            print(f"{time.monotonic() - started:6.1f} s  {shown}", flush=True)
            if arguments.record:  # after each, so that what was measured is not lost with what was not
                figures = {"model": arguments.preset, "backend": backend, "page_size": PAGE, "rows": rows}
                common.write(arguments.record / "decode.json", figures)


if __name__ == "__main__":
    main()
