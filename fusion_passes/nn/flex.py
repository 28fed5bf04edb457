"""Attention over a paged bf16 or fp16 cache by FlexAttention, which reads the pages where they lie.

The queries are cut into blocks of one sequence each, and a block is an entry of FlexAttention's batch; key and value
are one entry, the whole cache, of which a block reads the pages of its sequence: a BlockMask made from the block table,
on the device, without a question to it. Its shape depends on the shapes of the batch alone, so nothing in the metadata
makes torch compile again. In place of torch's experimental PagedAttention, whose mask has a row of all the cache's
pages for each block, and a cache of its own.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

QUERY_BLOCK = 128
"""Queries in a block, where a sequence may have more: FlexAttention's own block of queries."""
KEY_BLOCK = 128
"""Keys in a block at most: of a larger page only the parts that a query sees are read."""
KEY_TILE = 64
"""Keys that the kernel takes at a time, where a page has as many."""


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None = None,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    max_query_len: int | None = None,
) -> Tensor:
    """``ops.paged_attention`` for a cache of query's dtype in layout "NHD". Compiled, also outside of torch.compile.

    page_size: the cache's, as a number that does not become a symbol.

    A NaN in a value that a query does not see, but that shares a block of keys with one that it sees, makes the output
    NaN: FlexAttention multiplies it by 0.
    """
    options = page_size, scale, window, softcap
    if torch.compiler.is_compiling():
        compute = _with(*options)
    else:
        compute = _compiled(*options, (*query.shape[1:], *key_cache.shape[1:]))
    return compute(
        query, key_cache, value_cache, block_table, query_start, seq_lens, sinks, max_query_len=max_query_len
    )


def _with(page_size: int, scale: float, window: int | None, softcap: float) -> Callable[..., Tensor]:
    return functools.partial(_attention, page_size=page_size, scale=scale, window=window, softcap=softcap)


@functools.cache
def _compiled(
    page_size: int, scale: float, window: int | None, softcap: float, shape: tuple[int, ...]
) -> Callable[..., Tensor]:
    # One for each: a number or a size that differs between calls would become a symbol, which FlexAttention does not
    # take.
    del shape
    return torch.compile(_with(page_size, scale, window, softcap), fullgraph=True)


def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    *,
    page_size: int,
    scale: float,
    window: int | None,
    softcap: float,
    max_query_len: int | None,
) -> Tensor:
    # Imports Inductor, which takes a second.
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    tokens, heads, _ = query.shape
    seqs = seq_lens.shape[0]
    pages, kv_heads = key_cache.shape[:2]
    if tokens == 0 or seqs == 0 or pages == 0:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)

    # Blocks of queries: one for each sequence if all of it fits, else as many as the tokens can need.
    start, counts = query_start.long(), query_start.diff().long()
    if max_query_len is not None and max_query_len <= QUERY_BLOCK:
        rows, blocks = max(max_query_len, 1), seqs
        of_seq = torch.ones_like(counts)
    else:
        rows, blocks = QUERY_BLOCK, (tokens + QUERY_BLOCK - 1) // QUERY_BLOCK + seqs
        of_seq = (counts + rows - 1) // rows
    last_block = of_seq.cumsum(0)
    first_block = last_block - of_seq
    block = torch.arange(blocks, device=query.device)
    seq = _count_below(last_block, block)
    used = seq < seqs
    seq = seq.clamp_max(seqs - 1)
    row = (block - first_block[seq]) * rows  # of its sequence, of the block's first token
    in_block = torch.where(used, (counts[seq] - row).clamp(0, rows), 0)
    position = seq_lens.long()[seq] - counts[seq] + row
    token = (start[seq] + row)[:, None] + torch.arange(rows, device=query.device)
    by_block = query[token.clamp(0, tokens - 1)].transpose(1, 2)  # [blocks, heads, rows, head_dim]

    # Blocks of keys: pages, or parts of them.
    keys = math.gcd(page_size, KEY_BLOCK)  # a power of two
    bits = keys.bit_length() - 1
    parts = page_size // keys
    total = pages * parts
    part = torch.arange(parts, device=query.device)
    table = (block_table.long().clamp(0, pages - 1)[:, :, None] * parts + part).flatten(1)
    columns = table.shape[1]
    column = torch.arange(columns, device=query.device)
    filled = column * keys < seq_lens[:, None]
    # Where in its sequence each block of the cache stands; what belongs to none goes to a column that nobody reads.
    place = torch.full((seqs, total + 1), -1, dtype=torch.int32, device=query.device)
    place = place.scatter(1, torch.where(filled, table, total), column.int().expand(seqs, columns))
    first = torch.zeros_like(position) if window is None else (position - window + 1).clamp_min(0) // keys
    end = (position + in_block + keys - 1) // keys
    taken = torch.where(in_block > 0, (end - first).clamp(0, columns), 0)
    indices = table[seq].gather(1, (first[:, None] + column).clamp_max(columns - 1))

    seq, position, place = map(_in_memory, (seq, position, place))

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del head
        at, where = position[batch] + q, place[seq[batch], kv >> bits]
        key = (where << bits) + (kv & (keys - 1))
        seen = (where >= 0) & (key <= at)
        return seen if window is None else seen & (key > at - window)

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del batch, head, q, kv
        return softcap * torch.tanh(score / softcap)

    # The kernel counts with the strides of the two dimensions of size 1, which Inductor would set to 0.
    mask = BlockMask.from_kv_blocks(
        taken.int().as_strided((blocks, 1, 1), (1, 1, 1)),
        indices.int().as_strided((blocks, 1, 1, columns), (columns, columns, columns, 1)),
        BLOCK_SIZE=(QUERY_BLOCK, keys),
        mask_mod=visible,
        seq_lengths=(rows, pages * page_size),
        compute_q_blocks=False,
    )
    out, aux = flex_attention(
        by_block,
        _as_one_sequence(key_cache),
        _as_one_sequence(value_cache),
        capped if softcap > 0.0 else None,
        mask,
        scale,
        enable_gqa=heads != kv_heads,
        kernel_options={"BLOCK_N": math.gcd(keys, KEY_TILE)},
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is not None:
        assert aux.lse is not None
        out = out * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None]

    token = torch.arange(tokens, device=query.device)
    of = _count_below(start[1:], token)
    used = of < seqs
    of = of.clamp_max(seqs - 1)
    used = used & (seq_lens > 0)[of]
    row = token - start[of]
    block = (first_block[of] + row // rows).clamp(0, blocks - 1)
    return out.transpose(1, 2)[block, row % rows].masked_fill(~used[:, None, None], 0.0).to(query.dtype)


def _count_below(ends: Tensor, x: Tensor) -> Tensor:
    """How many of ends are not above each x. Inductor (torch 2.11) takes no view in searchsorted."""
    return (ends <= x[:, None]).sum(1)


def _in_memory(x: Tensor) -> Tensor:
    """x itself, which Inductor computes into a buffer of its own. Without it Inductor (torch 2.11) computes what a mask
    reads inside of the mask, from buffers whose layout is not settled yet, and fails."""
    return x.as_strided(x.shape, x.stride())


def _as_one_sequence(cache: Tensor) -> Tensor:
    """[pages, kv_heads, page_size, head_dim] in layout "NHD" as [1, kv_heads, slots, head_dim], without a copy."""
    return cache.transpose(1, 2).view(-1, cache.shape[1], cache.shape[3]).transpose(0, 1)[None]
