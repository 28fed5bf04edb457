"""What the cases of attention with a KV cache are made of: a batch, a cache, the attention, all but the quantization.

Two sequences share the tokens of a call; each has some tokens in the cache from before.
"""

import torch

from fusion_passes import reference
from fusion_passes.ops import paged_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
PAGE, COLUMNS = 16, 40
BEFORE = (5, 17)
Q_SCALE, K_SCALE, V_SCALE, OUTPUT_SCALE = 0.043, 0.029, 0.017, 0.37
SOFTMAX_SCALE = 0.11


def random(*shape, device, dtype=torch.bfloat16):
    return (1.5 * torch.randn(shape, device=device)).to(dtype)


def batch(tokens, device):
    """block_table, query_start, seq_lens."""
    lengths = tokens - tokens // 2, tokens // 2
    table = torch.arange(2 * COLUMNS, dtype=torch.int32, device=device).view(2, COLUMNS).flip(1).contiguous()
    start = torch.tensor([0, lengths[0], tokens], dtype=torch.int32, device=device)
    total = torch.tensor([n + before for n, before in zip(lengths, BEFORE, strict=True)], dtype=torch.int32)
    return table, start, total.to(device)


def cache(device, dtype, layout="HND", scale=K_SCALE):
    """FP8 codes of random numbers, or the numbers."""
    shape = (2 * COLUMNS, KV_HEADS, PAGE, HEAD_DIM) if layout == "HND" else (2 * COLUMNS, PAGE, KV_HEADS, HEAD_DIM)
    x = random(*shape, device=device, dtype=torch.float32)
    x = (x / scale).clamp(-448.0, 448.0).to(dtype) if dtype in (E4M3, E5M2) else x.to(dtype)
    return x if layout == "HND" else x.transpose(1, 2)


def scalar(value, device, shape=()):
    return torch.full(shape, value, device=device)


def attend(query, key, value, table, start, lengths, q=None, k=None, v=None, output=None, **options):
    """Attention whose query has a scale only where it is FP8 or is quantized inside."""
    options = {"scale": SOFTMAX_SCALE, **options}
    sinks = options.pop("sinks", None)
    return paged_attention(query, key, value, table, start, lengths, q, k, v, None, output, sinks, **options)


def exact(query, key, value, table, start, lengths, q=None, k=None, v=None, **options):
    """The same in fp32."""
    options = {"scale": SOFTMAX_SCALE, **options, "dtype": torch.float32}
    options.pop("max_query_len", None)
    sinks = options.pop("sinks", None)
    return reference.paged_attention(*(query, key, value, table, start, lengths, q, k, v, None, None, sinks), **options)
