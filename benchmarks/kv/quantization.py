"""The quantizations around the attention, as they are in a graph and as the passes leave them.

    query    RoPE, then the query is quantized by an op ("opaque") or by the attention op itself ("inside"), then the
             attention; against the same program with `query_quant`, where Inductor fuses RoPE and quantization
    output   attention, then its output is quantized in plain torch, by one scale ("tensor") or by a scale for 128
             columns ("group"); against the same program with `attention_quant`

Up to 256 tokens each is a sequence's next one; more are sequences of 1024 new ones. `matches` counts what was fused.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from common import microseconds
from torch import Tensor

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.nn import AttentionMetadata
from fusion_passes.ops import paged_attention
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.quant import QuantSpec, choose_scale, quantize

E4M3 = torch.float8_e4m3fn
GROUPS = QuantSpec(E4M3, "group", 128, static=False)
PAGE_SIZE = 64
PROMPT = 1024
RULES = {"query": "query_quant", "output": "attention_quant"}
# All programs of a kind are one function to Dynamo, with other cells.
torch._dynamo.config.recompile_limit = 64

STOCK, OURS = PassConfig(level="O0"), PassConfig(profitability="ignore")


@dataclass(frozen=True)
class Shape:
    """context: cached keys of each sequence that decodes."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    fp8_cache: bool = True
    context: int = 128

    @property
    def decodes(self) -> bool:
        return self.tokens < PROMPT

    def __str__(self) -> str:
        cache = "FP8" if self.fp8_cache else "bf16"
        return f"{self.tokens} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}, {cache} cache"


TOKENS = (8, 64, 256, 1, 2048, 8192)
MAIN = tuple(Shape(tokens) for tokens in TOKENS)
OTHERS = (
    *(Shape(tokens, 64, 8) for tokens in TOKENS),
    *(Shape(tokens, 8, 1) for tokens in TOKENS),
    *(Shape(tokens, 16, 4, 256) for tokens in TOKENS),
    *(Shape(tokens, head_dim=64) for tokens in TOKENS),
    *(Shape(tokens, fp8_cache=False) for tokens in TOKENS),
)


class Inputs:
    """A query, cos and sin, a cache, a batch, and scales."""

    def __init__(self, shape: Shape) -> None:
        seqs, new = (shape.tokens, 1) if shape.decodes else (shape.tokens // PROMPT, PROMPT)
        length = shape.context + 1 if shape.decodes else PROMPT
        columns = -(-length // PAGE_SIZE)
        table = torch.randperm(seqs * columns, device="cuda").int().view(seqs, columns)
        self.metadata = AttentionMetadata.from_lengths([new] * seqs, [length] * seqs, table, PAGE_SIZE)
        query = torch.randn(shape.tokens, shape.heads, shape.head_dim, device="cuda").bfloat16()
        cos, sin = torch.randn(2, shape.tokens, 1, shape.head_dim // 2, device="cuda").bfloat16()
        cache = (torch.randn(seqs * columns, shape.kv_heads, PAGE_SIZE, shape.head_dim, device="cuda") for _ in "kv")
        caches = ((x * 20).to(E4M3) if shape.fp8_cache else x.bfloat16() for x in cache)
        self.scales = [torch.tensor(x, device="cuda") for x in (0.034, 0.021, 0.013, 0.0023)]
        m = self.metadata
        self.batch = (*caches, m.block_table, m.query_start, m.seq_lens)
        self.query = (query, cos, sin, *self.batch, *self.scales)
        self.output = (query, *self.batch, *(self.scales[1:3] if shape.fp8_cache else (None, None)), self.scales[3])
        for x in (query, cos, sin, m.block_table, m.query_start, m.seq_lens):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        for x in self.batch[:2]:
            torch._dynamo.maybe_mark_dynamic(x, 0)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def query(opaque: bool, max_query_len: int | None) -> Callable[..., Tensor]:
    """RoPE and attention; the query is quantized by an op in between, or by the attention."""

    def run(x: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> Tensor:
        *batch, q_scale, k_scale, v_scale, _ = rest
        x = rope(x, cos, sin)
        x = quantize_fp8(x, q_scale) if opaque else x
        options = {"scale": 0.09, "dtype": torch.bfloat16, "max_query_len": max_query_len}
        return paged_attention(x, *batch, q_scale, k_scale, v_scale, **options)

    return run


def output(group: bool, max_query_len: int | None) -> Callable[..., object]:
    """Attention and the quantization of its output."""

    def run(x: Tensor, *rest: Tensor) -> object:
        *batch, k_scale, v_scale, out_scale = rest
        options = {"scale": 0.09, "max_query_len": max_query_len}
        out = paged_attention(x, *batch, None, k_scale, v_scale, **options).flatten(1)
        if not group:
            return quantize(out, out_scale)
        scales = choose_scale(out, GROUPS)
        return quantize(out, scales), scales

    return run


Programs = dict[str, tuple[Callable[..., object], str]]


class Compiled:
    """Each program twice, with the passes and without; compiled once for all sizes that it can be."""

    def __init__(self, programs: Programs) -> None:
        self.reports = {name: Report() for name in programs}
        self.inputs = {name: inputs for name, (_, inputs) in programs.items()}
        self.stock = {n: fusion_passes.compile(fn, STOCK, fullgraph=True) for n, (fn, _) in programs.items()}
        self.ours = {
            n: fusion_passes.compile(fn, OURS, report=self.reports[n], fullgraph=True)
            for n, (fn, _) in programs.items()
        }

    @torch.no_grad()
    def row(self, shape: Shape, kind: str) -> dict[str, object]:
        """ratio: the program as it is over the same with the passes."""
        inputs = Inputs(shape)
        functions = {}
        for name, given in self.inputs.items():
            tensors = getattr(inputs, given)
            for side, compiled in (("stock", self.stock[name]), ("passes", self.ours[name])):
                compiled(*tensors)
                functions[f"{name}, {side}"] = lambda compiled=compiled, tensors=tensors: compiled(*tensors)
        times = microseconds(functions)
        return {
            "kind": kind,
            "shape": asdict(shape),
            "microseconds": {name: round(time, 2) for name, time in times.items()},
            "matches": {n: f"{r.count(rule=RULES[kind])} in {len(r.graphs)} graphs" for n, r in self.reports.items()},
            "ratio": {name: round(times[f"{name}, stock"] / times[f"{name}, passes"], 3) for name in self.inputs},
        }


def programs(kind: str, shape: Shape) -> Programs:
    """By name, with the inputs that they take."""
    max_query_len = 1 if shape.decodes else None
    if kind == "query":
        return {name: (query(name == "opaque", max_query_len), "query") for name in ("opaque", "inside")}
    names = ("tensor", "group") if shape.head_dim % 128 == 0 else ("tensor",)
    return {name: (output(name == "group", max_query_len), "output") for name in names}


def measured(shapes: tuple[Shape, ...]) -> Iterator[dict[str, object]]:
    """Shapes that differ in the number of tokens alone share the compiled programs."""
    compiled: dict[tuple[object, ...], Compiled] = {}
    for kind, shape in itertools.product(("query", "output"), shapes):
        if kind == "query" and not shape.fp8_cache:
            continue
        key = (kind, shape.heads, shape.kv_heads, shape.head_dim, shape.fp8_cache, shape.decodes)
        if key not in compiled:
            compiled[key] = Compiled(programs(kind, shape))
        yield compiled[key].row(shape, kind)


def run(quick: bool) -> Iterator[dict[str, object]]:
    """The rows of the main shapes, and of others unless quick."""
    for row in measured(MAIN if quick else MAIN + OTHERS):
        shape = Shape(**row["shape"])  # type: ignore[arg-type]
        print(f"{row['kind']:6s} {shape!s:48s} {row['ratio']} {row['matches']} {row['microseconds']}", flush=True)
        yield row
