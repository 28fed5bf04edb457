"""Prefill and mixed batches over a paged cache, against gathering the pages and the best that stock torch can do then.

The alternative is a function of three kinds of kernels in one CUDA graph: an Inductor kernel that gathers the pages of
all sequences into contiguous bf16 keys and values (and dequantizes them), SDPA, and Inductor's quantization of the
output. Of SDPA it takes the fastest form that can express the batch: cuDNN or flash with their causal mask; for a chunk
behind a context flash's mask that is aligned at the end, cuDNN with a bool mask, or cuDNN over the context and over the
chunk with the two results merged. The kernel under test reads FP8 queries, which the alternative needs in bf16; neither
pays for making them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import microseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_passes.ops import paged_attention

E4M3 = torch.float8_e4m3fn
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64  # Llama-3.1-8B
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Part:
    """Sequences of the same lengths: new tokens, and tokens in the cache before them."""

    seqs: int
    tokens: int
    context: int = 0

    def __str__(self) -> str:
        return f"{self.seqs} x {self.tokens}" + (f" on {self.context}" if self.context else "")


CASES: list[tuple[Part, ...]] = [
    (Part(1, 8192),),
    (Part(4, 2048),),
    (Part(8, 512),),
    (Part(1, 2048, 8192),),
    (Part(1, 512, 30208),),
    (Part(1, 2048), Part(31, 1, 4096)),
]


@dataclass(frozen=True)
class Batch:
    """What `ops.paged_attention` takes, on the device, and the same query in bf16."""

    parts: tuple[Part, ...]
    query: Tensor
    query_bf16: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]
    output_scale: Tensor

    def __call__(self, **options: object) -> Tensor:
        return paged_attention(
            self.query, self.key_cache, self.value_cache, self.block_table, self.query_start, self.seq_lens,
            *self.scales, None, self.output_scale, scale=SCALE, dtype=E4M3, **options,
        )  # fmt: skip


def batch(parts: tuple[Part, ...], cache_dtype: torch.dtype) -> Batch:
    fp8 = cache_dtype is E4M3
    query_lens = [part.tokens for part in parts for _ in range(part.seqs)]
    seq_lens = [part.tokens + part.context for part in parts for _ in range(part.seqs)]
    columns = -(-max(seq_lens) // PAGE)
    used = [-(-length // PAGE) for length in seq_lens]
    order = torch.randperm(sum(used), device="cuda").int()
    table = torch.zeros(len(seq_lens), columns, dtype=torch.int32, device="cuda")
    for row, pages in zip(table, order.split(used), strict=True):
        row[: len(pages)] = pages
    q_scale, k_scale, v_scale = (torch.tensor([x], device="cuda") for x in (0.021, 0.034, 0.0123))
    key, value = (
        torch.randn(sum(used), KV_HEADS, PAGE, HEAD_DIM, device="cuda").div_(scale if fp8 else 1.0).to(cache_dtype)
        for scale in (k_scale, v_scale)
    )
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM, device="cuda")
    return Batch(
        parts,
        (query / q_scale).to(E4M3) if fp8 else query.bfloat16(),
        query.bfloat16(),
        key,
        value,
        table,
        torch.tensor([0, *query_lens], device="cuda").cumsum(0).int(),
        torch.tensor(seq_lens, device="cuda").int(),
        (q_scale, k_scale, v_scale) if fp8 else (None, None, None),
        torch.tensor([0.005], device="cuda"),
    )


def gathered(cache: Tensor, table: Tensor, scale: Tensor | None) -> Tensor:
    """[seqs, kv_heads, keys, head_dim] in bf16."""
    if scale is None:
        return cache[table].transpose(1, 2).flatten(2, 3).contiguous()
    x = cache.view(torch.uint8)[table].view(cache.dtype).transpose(1, 2).flatten(2, 3)
    return (x.float() * scale).bfloat16().contiguous()


def quantized(out: Tensor, scale: Tensor) -> Tensor:
    return (out.float() / scale).clamp(-448.0, 448.0).to(E4M3)


def merged(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """The attention over two sets of keys from that over each, [seqs, heads, tokens, head_dim], and its log-sums."""
    weight = torch.sigmoid(a_lse - b_lse).view(*a.shape[:3], 1)
    return a.float() * weight + b.float() * (1.0 - weight)


def alternatives(batch: Batch) -> dict[str, Callable[[], object]]:
    """The forms of gather, SDPA and quantization that can express the batch. One for each form of the first part."""
    torch.compiler.reset()
    gather, quantize = torch.compile(gathered, dynamic=False), torch.compile(quantized, dynamic=False)
    merge = torch.compile(lambda *x: quantized(merged(*x[:-1]), x[-1]), dynamic=False)
    first_seq = first_token = 0
    slices = []
    for part in batch.parts:
        pages = -(-(part.tokens + part.context) // PAGE)
        table = batch.block_table[first_seq : first_seq + part.seqs, :pages].contiguous()
        count = part.seqs * part.tokens
        query = batch.query_bf16[first_token : first_token + count].view(part.seqs, part.tokens, HEADS, HEAD_DIM)
        slices.append((part, table, query.transpose(1, 2)))
        first_seq, first_token = first_seq + part.seqs, first_token + count

    def attend(form: str, part: Part, table: Tensor, query: Tensor) -> Tensor:
        length = part.tokens + part.context
        _, k_scale, v_scale = batch.scales
        key = gather(batch.key_cache, table, k_scale)[:, :, :length]
        value = gather(batch.value_cache, table, v_scale)[:, :, :length]
        if form == "flash":  # the op below SDPA: its causal mask is aligned at the end
            out = torch.ops.aten._flash_attention_forward(
                *(x.transpose(1, 2) for x in (query, key, value)), None, None, part.tokens, length, 0.0,
                part.tokens > 1, False, scale=SCALE,
            )[0]  # fmt: skip
            return quantize(out, batch.output_scale)
        if form == "cudnn, merged":
            whole = torch.ops.aten._scaled_dot_product_cudnn_attention
            old, new = slice(0, part.context), slice(part.context, length)
            a, b = (
                whole(query, key[:, :, part_], value[:, :, part_], None, True, 0.0, causal, False, scale=SCALE)[:2]
                for part_, causal in ((old, False), (new, True))
            )
            return merge(*a, *b, batch.output_scale)
        mask = None
        if form == "cudnn, mask":
            mask = torch.ones(part.tokens, length, dtype=torch.bool, device="cuda").tril(part.context)
        causal = mask is None and part.tokens > 1
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)
        return quantize(out.transpose(1, 2), batch.output_scale)

    chunk = batch.parts[0].context > 0
    forms = ("flash", "cudnn, mask", "cudnn, merged") if chunk else ("flash", "cudnn")

    def call(form: str) -> list[Tensor]:
        first, *others = slices
        return [attend(form, *first), *(attend("cudnn", *other) for other in others)]

    return {form: lambda form=form: call(form) for form in forms}


def measure(parts: tuple[Part, ...], cache_dtype: torch.dtype, milliseconds: float = 60.0) -> dict[str, object]:
    made = batch(parts, cache_dtype)
    declined: dict[str, str] = {}
    times = microseconds(alternatives(made) | {"paged": lambda: made()}, milliseconds, declined)
    ours = times.pop("paged")
    best = min(times, key=times.__getitem__)
    pairs = sum(p.seqs * (p.tokens * p.context + p.tokens * (p.tokens + 1) / 2) for p in parts)
    return {
        "batch": " + ".join(map(str, parts)),
        "cache": str(cache_dtype).removeprefix("torch."),
        "microseconds": {"paged": round(ours, 1)} | {name: round(time, 1) for name, time in times.items()},
        "best_stock": best,
        "ratio": round(times[best] / ours, 3),
        "tflops": round(4 * HEADS * HEAD_DIM * pairs / ours / 1e6, 1),
        "declined": declined,
    }


def run(quick: bool) -> Iterator[dict[str, object]]:
    """One row for each batch and cache dtype. quick: the FP8 cache alone."""
    for dtype in (E4M3, torch.bfloat16)[: 1 if quick else 2]:
        for parts in CASES:
            row = measure(parts, dtype)
            print(row, flush=True)
            yield row
