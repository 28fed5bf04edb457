"""RoPE, FP8 quantization of query, key and value, and the KV cache's write: four ways, and a copy of as many bytes.

    plain     all in plain torch, with the write as an indexed assignment: Inductor's own fusion
    opaque    the query is quantized by an op, key and value by the op that writes the cache: one op after the other
    unfused   the query in plain torch, the write by its op; what the passes start from
    fused     the same program with the pass; `matches` says how often it applied
    copy      a kernel that reads and writes as many bytes as one call has to, half of them each

Small batches are in the L2, as they are behind a projection; large ones go round more memory than it holds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from common import microseconds
from torch import Tensor

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.nn import PagedKVCache
from fusion_passes.ops import kv_cache_write
from fusion_passes.ops.quantize import quantize_fp8
from fusion_passes.quant import quantize

E4M3 = torch.float8_e4m3fn
PAGE_SIZE = 64
COLD_BYTES = 160_000_000
"""What large batches go round."""
TARGET = 0.8
"""Of the copy's bandwidth, from 2048 tokens on."""


@dataclass(frozen=True)
class Shape:
    """quantized: whether the query leaves in FP8, or in bf16."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    quantized: bool = True

    @property
    def bytes(self) -> int:
        """Read and written by one call, but for scales and slots."""
        heads = self.heads + 2 * self.kv_heads
        written = heads + (0 if self.quantized else self.heads)
        return self.tokens * self.head_dim * (2 * heads + written + 2)

    def __str__(self) -> str:
        query = "" if self.quantized else ", query in bf16"
        return f"{self.tokens} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}{query}"


TOKENS = (1, 8, 64, 256, 2048, 8192)
MAIN = tuple(Shape(tokens) for tokens in TOKENS)
SPREAD = (1, 64, 2048, 32768)
OTHERS = (
    Shape(32768),
    *(Shape(tokens, quantized=False) for tokens in SPREAD),
    *(Shape(tokens, head_dim=64, quantized=quantized) for quantized in (True, False) for tokens in SPREAD),
    *(Shape(tokens, 16, 4, 256, quantized) for quantized in (True, False) for tokens in SPREAD),
    *(Shape(tokens, heads, kv_heads) for heads, kv_heads in ((64, 8), (8, 1)) for tokens in (1, 8192)),
)


class Inputs:
    """A packed projection, cos and sin, a cache, slots, and the scales of q, k and v."""

    def __init__(self, shape: Shape) -> None:
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        packed = torch.randn(shape.tokens, width, device="cuda").bfloat16()
        cos, sin = torch.randn(2, shape.tokens, shape.head_dim // 2, device="cuda").bfloat16()
        pages = max(64, 2 * shape.tokens // PAGE_SIZE)
        cache = PagedKVCache(pages, PAGE_SIZE, shape.kv_heads, shape.head_dim, E4M3, device="cuda")
        slots = torch.randperm(pages * PAGE_SIZE, device="cuda")[: shape.tokens]
        scales = (torch.tensor(x, device="cuda") for x in (0.034, 0.021, 0.013))
        self.tensors = (packed, cos, sin, cache.key, cache.value, slots, *scales)
        self.source = torch.zeros(shape.bytes // 8, dtype=torch.int32, device="cuda")
        self.target = torch.empty_like(self.source)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def keep(x: Tensor, scale: Tensor) -> Tensor:
    return x


def layer(shape: Shape, quantize_query: Callable[[Tensor, Tensor], Tensor], plain: bool) -> Callable[..., Tensor]:
    """The program. plain: quantization and write of key and value in plain torch too."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]

    def run(
        packed: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        q_scale: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
    ) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in packed.split(sizes, -1))
        k = rope(k, cos, sin)
        if plain:
            page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
            for x, cache, scale in ((k, key_cache, k_scale), (v, value_cache, v_scale)):
                cache[page, :, offset] = quantize(x, scale, E4M3)  # in place: Inductor copies no cache for this
        else:
            kv_cache_write(k, v, key_cache, value_cache, slots, k_scale, v_scale)
        return quantize_query(rope(q, cos, sin), q_scale)

    return run


def prepare(shape: Shape) -> tuple[dict[str, Sequence[Callable[[], object]]], dict[str, int]]:
    """All contenders, compiled, each for as many inputs as they go round; and their matches."""
    turns = [Inputs(shape) for _ in range(max(1, min(32, COLD_BYTES // shape.bytes)) if shape.tokens >= 2048 else 1)]
    in_torch = quantize if shape.quantized else keep
    by_op = (lambda x, scale: quantize_fp8(x, scale, E4M3)) if shape.quantized else keep
    stock, ours = PassConfig(level="O0"), PassConfig(profitability="ignore")
    programs = {
        "plain": (in_torch, True, stock),
        "opaque": (by_op, False, stock),
        "unfused": (in_torch, False, stock),
        "fused": (in_torch, False, ours),
    }
    functions: dict[str, Sequence[Callable[[], object]]] = {}
    matches = {}
    for name, (quantize_query, plain, config) in programs.items():
        report = Report()
        torch.compiler.reset()
        compiled = fusion_passes.compile(
            layer(shape, quantize_query, plain), config, report=report, dynamic=False, fullgraph=True
        )
        with torch.no_grad():
            compiled(*turns[0].tensors)
        matches[name] = report.count(rule="rope_quant_kv_write")
        functions[name] = [lambda turn=turn, compiled=compiled: compiled(*turn.tensors) for turn in turns]
    functions["copy"] = [lambda turn=turn: torch.bitwise_not(turn.source, out=turn.target) for turn in turns]
    return functions, matches


def row(shape: Shape, times: dict[str, float], matches: dict[str, int]) -> dict[str, object]:
    """ratio: the faster of plain and unfused over fused. of_copy: the part of the copy's bandwidth."""
    stock = min(times["plain"], times["unfused"])
    return {
        "shape": asdict(shape),
        "microseconds": {name: round(time, 2) for name, time in times.items()},
        "matches": matches,
        "ratio": {"fused": round(stock / times["fused"], 3)},
        "opaque_ratio": round(times["opaque"] / times["fused"], 3),
        "of_copy": round(times["copy"] / times["fused"], 3),
        "terabytes_per_second": round(shape.bytes / times["fused"] / 1e6, 3),
    }


def run(quick: bool) -> Iterator[dict[str, object]]:
    """The rows of the main shapes, and of others unless quick."""
    for shape in MAIN if quick else MAIN + OTHERS:
        functions, matches = prepare(shape)
        with torch.no_grad():
            found = row(shape, microseconds(functions), matches)
        print(f"{shape!s:44s} {found}", flush=True)
        yield found
