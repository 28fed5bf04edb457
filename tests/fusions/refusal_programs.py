"""For each error of an op, and each reason why its kernel does not take a call, a call that shows it.

Each changes one thing of a call that is taken (`TAKEN`).
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch

from fusion_passes.ops import kv_cache
from fusion_passes.ops.attention_quant import AttentionQuantArguments
from fusion_passes.ops.kv_cache_write import KVCacheWriteArguments
from fusion_passes.ops.paged_attention import (
    PagedAttentionArguments,
    PagedAttentionGroupQuantArguments,
    why_unsupported,
)
from fusion_passes.ops.quantize import QuantizeArguments, why_no_kernel
from fusion_passes.ops.rms_norm_quant import RMSNormGroupQuantArguments, RMSNormQuantArguments
from fusion_passes.ops.rope_quant_kv_write import RopeQuantKVWriteArguments

BF16, F32, F64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
TOKENS, HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE = 3, 4, 2, 64, 4, 16


def empty(*shape, dtype=BF16, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


def scale(device="cpu"):
    return torch.ones((), device=device)


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def cache(dtype=BF16, head_dim=HEAD_DIM):
    return torch.zeros(PAGES, KV_HEADS, PAGE, head_dim).to(dtype)


CACHES = {"key_cache": cache(), "value_cache": cache()}
FP8_CACHES = {"key_cache": cache(E4M3), "value_cache": cache(E4M3)}
BATCH = {
    "query": empty(TOKENS, HEADS, HEAD_DIM), **CACHES, "block_table": ints(0, 1, 2, 3).view(2, 2),
    "query_start": ints(0, 1, TOKENS), "seq_lens": ints(5, 20), "scale": 0.1,
}  # fmt: skip
NEW = {"key": empty(TOKENS, KV_HEADS, HEAD_DIM), "value": empty(TOKENS, KV_HEADS, HEAD_DIM)}
SLOTS = {"slot_mapping": ints(0, 1, 2)}
TABLES = {"cos": empty(8, HEAD_DIM), "sin": empty(8, HEAD_DIM), "positions": ints(0, 1, 2)}
TAKEN = {
    "attention": (AttentionQuantArguments, dict.fromkeys(("query", "key", "value"), empty(2, 4, 8, 64))),
    "write": (KVCacheWriteArguments, {**NEW, **CACHES, **SLOTS}),
    "paged": (PagedAttentionArguments, BATCH),
    "groups": (PagedAttentionGroupQuantArguments, BATCH | {"dtype": E4M3, "group_size": 32}),
    "quantize": (QuantizeArguments, {"x": empty(2, 8), "scale": scale()}),
    "norm": (RMSNormQuantArguments, {"x": empty(2, 8), "weight": empty(8), "scale": scale(), "eps": 1e-5}),
    "group norm": (RMSNormGroupQuantArguments, {"x": empty(2, 8), "eps": 1e-5, "group_size": 4}),
    "rope": (RopeQuantKVWriteArguments,
             {"query": empty(TOKENS, HEADS, HEAD_DIM), **NEW, **TABLES, **CACHES, **SLOTS, "rotary_dim": HEAD_DIM}),
}  # fmt: skip
"""Arguments of each op, and a call that means something."""


def call(op, **changed):
    """The arguments, checked as a call checks them."""
    made, given = TAKEN[op]
    arguments = made(**given | changed)
    if op == "attention":
        arguments.validate()
    if hasattr(arguments, "check_values"):
        arguments.check_values()
    return arguments


def refused(op, **changed):
    try:
        call(op, **changed)
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    return ""


def gathered(capability=(9, 0), op="paged", **changed):
    """Why the kernels do not take an attention over a cache."""
    with mock.patch("fusion_passes.ops.support.triton_version", return_value=(3, 6)):
        return str(why_unsupported(call(op, **changed), capability))


def by_name_only():
    """`implementation="triton"` where there is no GPU."""
    module = sys.modules["fusion_passes.ops.paged_attention"]
    try:
        module._cuda(call("paged", implementation="triton"))
    except NotImplementedError as error:
        return str(error)
    return ""


def environment():
    try:
        kv_cache.checks_wanted({"FUSION_PASSES_CHECK": "yes"})
    except ValueError as error:
        return str(error)
    return ""


def norm_kernel(size):
    arguments = call("norm", x=empty(2, size), weight=None)
    return str(arguments.run(E4M3, lambda *_: None))


def odd_rows():
    """Rows of a cache that begin 2 bytes behind a multiple of 16."""
    shifted = torch.zeros(1 + cache().numel(), dtype=BF16)[1:].view(cache().shape)
    return gathered(key_cache=shifted)


def many_sequences():
    arguments = SimpleNamespace(**BATCH, out_dtype=BF16)
    arguments.block_table = empty(65536, 1, dtype=torch.int32, device="meta")
    with mock.patch("fusion_passes.ops.support.triton_version", return_value=(3, 6)):
        return str(why_unsupported(arguments, (9, 0)))


META = "meta"
Shown = tuple[str, Callable[[], str]]
ATTENTION: tuple[Shown, ...] = (
    ("query, key and value must be [batch, heads, length, head_dim], got [4, 8, 64], [2, 4, 8, 64] and [2, 4, 8, 64]: "
     "add a batch dim", lambda: refused("attention", query=empty(4, 8, 64))),
    ("query, key and value must have one floating-point dtype, got torch.float32, torch.bfloat16 and torch.bfloat16",
     lambda: refused("attention", query=empty(2, 4, 8, 64, dtype=F32))),
    ("query, key and value must be on one device, got meta, cpu and cpu",
     lambda: refused("attention", query=empty(2, 4, 8, 64, device=META))),
    ("key and value must have one shape, got [2, 4, 9, 64] and [2, 4, 8, 64]",
     lambda: refused("attention", key=empty(2, 4, 9, 64))),
    ("query and key must share batch and head_dim, got [1, 4, 8, 64] and [2, 4, 8, 64]: expand the batch, and pad or "
     "project the heads, before the call", lambda: refused("attention", query=empty(1, 4, 8, 64))),
    ("the number of query heads, 6, must be a multiple of the key heads, 4",
     lambda: refused("attention", query=empty(2, 6, 8, 64))),
    ("dtype must be one of (torch.float8_e4m3fn, torch.float8_e5m2), got torch.int8",
     lambda: refused("attention", dtype=torch.int8)),
    ("layout must be 'bshd' or 'bhsd', got 'sbhd'", lambda: refused("attention", layout="sbhd")),
    ("attn_mask and is_causal exclude each other: fold the causal part into the mask",
     lambda: refused("attention", attn_mask=empty(8, 8), is_causal=True)),
    ("attn_mask must be bool or floating point on cpu, got torch.int64 on cpu",
     lambda: refused("attention", attn_mask=empty(8, 8, dtype=torch.int64))),
    ("attn_mask of shape [7, 8] does not broadcast to [2, 4, 8, 8]",
     lambda: refused("attention", attn_mask=empty(7, 8))),
    ("output_scale must be float32, got torch.float64: convert it with .float()",
     lambda: refused("attention", output_scale=scale().double())),
    ("output_scale must hold one element (per-tensor quantization), got shape [2]",
     lambda: refused("attention", output_scale=torch.ones(2))),
    ("output_scale is on meta, query on cpu: move it there once, for instance by making it a buffer of the module",
     lambda: refused("attention", output_scale=scale(META))),
)  # fmt: skip
WRITE: tuple[Shown, ...] = (
    ("FUSION_PASSES_CHECK='yes': must be 1 (check the values of indices on a GPU) or 0 (do not)", environment),
    ("key_cache and value_cache must be [pages, kv_heads, page_size, head_dim], both alike, got [4, 2, 16, 32] and "
     "[4, 2, 16, 64]", lambda: refused("write", key_cache=cache(head_dim=32))),
    ("key_cache and value_cache must have one dtype, FP8 or bfloat16, float16, float32, got torch.float32 and "
     "torch.bfloat16", lambda: refused("write", key_cache=cache(F32))),
    ("the last dimension of key_cache must be contiguous, got strides [2048, 1024, 1, 16]",
     lambda: refused("write", key_cache=empty(PAGES, KV_HEADS, HEAD_DIM, PAGE).mT)),
    ("key is on meta, the rest on cpu: make it on cpu",
     lambda: refused("write", key=empty(TOKENS, KV_HEADS, HEAD_DIM, device=META))),
    ("k_scale is on meta, the rest on cpu: move it there once, for instance by making it a buffer of the module",
     lambda: refused("write", **FP8_CACHES, k_scale=scale(META))),
    ("k_scale must be float32, got torch.float64: convert it with .float()",
     lambda: refused("write", **FP8_CACHES, k_scale=scale().double())),
    ("v_scale must hold one element (per-tensor quantization), got [2]",
     lambda: refused("write", **FP8_CACHES, v_scale=torch.ones(2))),
    ("slot_mapping names slot 64, the cache has 64: that is on page 4 of a cache with 4. If the slots were made from a "
     "block table, it names that page", lambda: refused("write", slot_mapping=ints(0, 1, 64))),
    ("value must be [tokens, 2, 64] for this cache, got [3, 4, 64]",
     lambda: refused("write", value=empty(TOKENS, HEADS, HEAD_DIM))),
    ("key and value must have one dtype, got torch.bfloat16 and torch.float32",
     lambda: refused("write", value=empty(TOKENS, KV_HEADS, HEAD_DIM, dtype=F32))),
    ("slot_mapping must be int32 or int64, got torch.float32", lambda: refused("write", slot_mapping=torch.ones(3))),
    ("slot_mapping must have an entry for each token, got [2] for keys [3, 2, 64] and values [3, 2, 64]",
     lambda: refused("write", slot_mapping=ints(0, 1))),
    ("k_scale and v_scale quantize torch.bfloat16 keys for an FP8 cache; this cache is torch.bfloat16: leave them out",
     lambda: refused("write", k_scale=scale())),
    ("a cache of torch.float32 does not take keys of torch.bfloat16",
     lambda: refused("write", key_cache=cache(F32), value_cache=cache(F32))),
)  # fmt: skip
PAGED: tuple[Shown, ...] = (
    ("query_start must rise from 0 to at most the 3 tokens of query, got [0, 2, 4]",
     lambda: refused("paged", query_start=ints(0, 2, 4))),
    ("seq_lens counts the cached and the new tokens, so that no sequence is shorter than its queries, got lengths "
     "[5, 1] for [1, 2] queries", lambda: refused("paged", seq_lens=ints(5, 1))),
    ("max_query_len is 1, but the sequences have [1, 2] queries", lambda: refused("paged", max_query_len=1)),
    ("block_table is too short: 2 pages of 16 tokens hold 32, seq_lens asks for 40",
     lambda: refused("paged", seq_lens=ints(5, 40))),
    ("block_table[1, 0] is 7, the cache has 4 pages, and sequence 1 of length 20 uses that entry",
     lambda: refused("paged", block_table=ints(0, 1, 7, 3).view(2, 2))),
    ("query must be [tokens, heads, 64] for this cache, got [3, 256]", lambda: refused("paged", query=empty(3, 256))),
    ("the number of query heads, 3, must be a multiple of the key heads, 2",
     lambda: refused("paged", query=empty(3, 3, 64))),
    ("seq_lens must be int32, got torch.int64: convert it with .int()",
     lambda: refused("paged", seq_lens=ints(5, 20, dtype=torch.int64))),
    ("block_table must have 2 dimensions, got [4]", lambda: refused("paged", block_table=ints(0, 1, 2, 3))),
    ("seq_lens has 1 sequences; block_table needs as many rows and query_start one element more, got [2, 2] and [3]",
     lambda: refused("paged", seq_lens=ints(5))),
    ("implementation must be one of ('auto', 'triton', 'gather'), got 'cuda'",
     lambda: refused("paged", implementation="cuda")),
    ("query must be FP8, bfloat16, float16 or float32, got torch.float64",
     lambda: refused("paged", query=empty(3, 4, 64, dtype=F64))),
    ("query is torch.float32, the cache torch.bfloat16: one dtype, or an FP8 cache",
     lambda: refused("paged", query=empty(3, 4, 64, dtype=F32))),
    ("k_scale, v_scale and prob_scale belong to an FP8 cache, this one is torch.bfloat16",
     lambda: refused("paged", prob_scale=scale())),
    ("q_scale with a query that is not FP8 asks to quantize it like the cache, which is not FP8",
     lambda: refused("paged", q_scale=scale())),
    ("window counts the keys that a query sees, its own among them: 1 or more, got 0",
     lambda: refused("paged", window=0)),
    ("softcap must be positive, or 0 for none, got -1.0", lambda: refused("paged", softcap=-1.0)),
    ("sinks must be one logit for each of 4 heads, got [3]", lambda: refused("paged", sinks=empty(3))),
    ("sinks must be bfloat16, float16 or float32, got torch.float64",
     lambda: refused("paged", sinks=empty(4, dtype=F64))),
    ("dtype says what to return; it can only be left out if query is not FP8",
     lambda: refused("paged", query=empty(3, 4, 64, dtype=E4M3), **FP8_CACHES)),
    ("dtype must be FP8, bfloat16, float16 or float32, got torch.float64", lambda: refused("paged", dtype=F64)),
    ("output_scale belongs to FP8 output, not to torch.bfloat16", lambda: refused("paged", output_scale=scale())),
    ("dtype must be FP8 for scales per group, got torch.bfloat16", lambda: refused("groups", dtype=BF16)),
    ("group_size must divide head_dim, 64, got 48", lambda: refused("groups", group_size=48)),
    ("the Triton kernels do not support this call: they need an NVIDIA GPU and Triton; implementation='auto' does",
     by_name_only),
    ("they need an NVIDIA GPU and Triton", lambda: gathered(capability=None)),
    ("they need compute capability 8.0, and 8.9 for FP8, this is 8.6",
     lambda: gathered((8, 6), **FP8_CACHES, k_scale=scale())),
    ("query is torch.float32, they have bfloat16, float16, float8_e4m3fn and float8_e5m2",
     lambda: gathered(query=empty(3, 4, 64, dtype=F32), key_cache=cache(F32), value_cache=cache(F32))),
    ("head_dim is 48, they have 16, 32, 64, 128, 256",
     lambda: gathered(query=empty(3, 4, 48), key_cache=cache(head_dim=48), value_cache=cache(head_dim=48))),
    ("65536 sequences, they have up to 65535", many_sequences),
    ("the rows of the cache must start at multiples of 16 bytes", odd_rows),
)  # fmt: skip
ROPE: tuple[Shown, ...] = (
    ("query must be [3, heads, 64] like the keys, got [2, 4, 64]", lambda: refused("rope", query=empty(2, 4, 64))),
    ("query and key must have one dtype, bfloat16, float16 or float32, got torch.float32 and torch.bfloat16",
     lambda: refused("rope", query=empty(3, 4, 64, dtype=F32))),
    ("rotary_dim must be even and from 2 to the head size, 64, got 63", lambda: refused("rope", rotary_dim=63)),
    ("sin must be [rows, 64] or [rows, 32], got [8, 16]", lambda: refused("rope", sin=empty(8, 16))),
    ("cos and sin must have one dtype, bfloat16, float16 or float32, got torch.bfloat16 and torch.float32",
     lambda: refused("rope", sin=empty(8, 64, dtype=F32))),
    ("cos and sin must be alike, got [8, 64] and [9, 64]", lambda: refused("rope", sin=empty(9, 64))),
    ("without positions cos and sin have a row for each of the 3 tokens, got 8",
     lambda: refused("rope", positions=None)),
    ("positions must be int32 or int64, got torch.float32", lambda: refused("rope", positions=torch.ones(3))),
    ("positions must be [3], one for each token, got [2]", lambda: refused("rope", positions=ints(0, 1))),
    ("the query leaves as FP8, bfloat16, float16 or float32, not as torch.int8",
     lambda: refused("rope", dtype=torch.int8)),
    ("q_scale quantizes the query, but it leaves as torch.bfloat16: leave the scale out",
     lambda: refused("rope", q_scale=scale())),
    ("positions are from 0 to 9, cos and sin have 8 rows", lambda: refused("rope", positions=ints(0, 1, 9))),
)  # fmt: skip
QUANTIZE: tuple[Shown, ...] = (
    ("dtype must be one of …, got torch.int8", lambda: refused("quantize", dtype=torch.int8)),
    ("scale must be one float32 element, got torch.float32 of shape [2]",
     lambda: refused("quantize", scale=torch.ones(2))),
    ("scale is on meta, x on cpu: make the scale a buffer of the module",
     lambda: refused("quantize", scale=scale(META))),
    ("the kernel has no float64 to float8_e4m3fn", lambda: str(why_no_kernel(empty(2, 8, dtype=F64), E4M3))),
    ("x must be bfloat16, float16 or float32, got torch.int8",
     lambda: refused("norm", x=empty(2, 8, dtype=torch.int8))),
    ("x must have a dimension to normalise, got a scalar", lambda: refused("norm", x=empty())),
    ("weight must have a number for each of the 8 elements of a row, got [7]",
     lambda: refused("norm", weight=empty(7))),
    ("weight must be floating point on cpu, got torch.int64 on cpu",
     lambda: refused("norm", weight=empty(8, dtype=torch.int64))),
    ("the kernel has rows of up to 32768, not of 32769", lambda: norm_kernel(32769)),
    ("group_size must divide the 8 elements of a row, got 3", lambda: refused("group norm", group_size=3)),
)  # fmt: skip
REFUSED: tuple[Shown, ...] = ATTENTION + WRITE + PAGED + ROPE + QUANTIZE
