"""KV caches and what a step of a model knows about its batch: layout, allocation, metadata.

A static cache, one stretch of memory for each sequence, is a paged one in which every sequence has one page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusion_passes.nn.loading import Settled, SettledAfterLoading, restore

Layout = Literal["HND", "NHD"]
STATIC_PAGE_MULTIPLE = 128
"""Keys that a kernel takes at a time: a page of a static cache is a multiple."""


@dataclass(frozen=True)
class AttentionMetadata:
    """A batch, as tensors on the device: one compiled graph and one CUDA graph serve every step.

    query_start: int32 [seqs + 1], from 0: the new tokens of sequence s are query_start[s] to query_start[s + 1] - 1.
    seq_lens: int32 [seqs], cached and new tokens together; 0 for a sequence that only pads the batch.
    block_table: int32 [seqs, max_pages], the pages of each sequence.
    slot_mapping: int64 or int32 [tokens], where the key and value of each new token go, ``page * page_size + offset``;
    negative for a token that only pads the batch.
    max_query_len: no sequence has more new tokens; part of the compiled graph, so give 1 for batches that only decode
    and leave out the rest.
    page_size: of the cache that slot_mapping is for, so that ``Attention`` can tell another one; None: it trusts you.

    Registered as a pytree of its tensors.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int | None = None
    page_size: int | None = None

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        page_size: int,
        *,
        tokens: int | None = None,
        max_query_len: int | None = None,
    ) -> "AttentionMetadata":
        """The metadata of a batch whose lengths the host knows, on block_table's device. Reads
        block_table, so on a GPU the host waits for it.

        query_lens: new tokens of each sequence. seq_lens: with them. Sequences that block_table has beyond these pad
        the batch, and so do tokens beyond the sum of query_lens. page_size: the cache's.

        Raises TypeError if block_table is no int32 tensor, ValueError if there are more sequences or tokens than room,
        or the lengths contradict each other.
        """
        _validate_table(block_table)
        if page_size < 1:
            raise ValueError(f"page_size must be positive, the cache's, got {page_size}")
        seqs, total = block_table.shape[0], sum(query_lens)
        tokens = total if tokens is None else tokens
        if len(query_lens) != len(seq_lens) or len(seq_lens) > seqs or total > tokens:
            raise ValueError(
                f"{len(query_lens)} query_lens with {total} tokens and {len(seq_lens)} seq_lens do not fit "
                f"{seqs} rows of block_table and {tokens} tokens"
            )
        if any(not 0 <= q <= n <= block_table.shape[1] * page_size for q, n in zip(query_lens, seq_lens, strict=True)):
            raise ValueError(
                f"each sequence needs 0 <= query_len <= seq_len <= {block_table.shape[1]} pages x {page_size}, "
                f"got {list(query_lens)} and {list(seq_lens)}"
            )
        if max_query_len is not None and max(query_lens, default=0) > max_query_len:
            raise ValueError(f"max_query_len is {max_query_len}, got query_lens {list(query_lens)}")
        padding = [0] * (seqs - len(seq_lens))
        query, length = (torch.tensor([*x, *padding], dtype=torch.int64, device="cpu") for x in (query_lens, seq_lens))
        start = torch.cat([query.new_zeros(1), query.cumsum(0)])
        # Not by repeat_interleave, which wakes all threads of a CPU for a few numbers: milliseconds on a busy one.
        seq = torch.tensor(
            [s for s, count in enumerate(query_lens) for _ in range(count)], dtype=torch.int64, device="cpu"
        )
        position = torch.arange(total, device="cpu") - start[seq] + (length - query)[seq]
        page = block_table.cpu()[seq, position // page_size].long()
        slots = query.new_full((tokens,), -1)
        slots[:total] = page * page_size + position % page_size
        device = block_table.device
        return cls(
            query_start=start.int().to(device),
            seq_lens=length.int().to(device),
            block_table=block_table,
            slot_mapping=slots.to(device),
            max_query_len=max_query_len,
            page_size=page_size,
        )

    @property
    def is_token(self) -> Tensor:
        """bool [tokens]: false for what only pads the batch."""
        token = torch.arange(self.slot_mapping.shape[0], device=self.slot_mapping.device)
        return token < self.query_start[-1]


def _validate_table(block_table: object) -> None:
    if not isinstance(block_table, Tensor):
        raise TypeError(
            f"block_table must be a tensor, int32 [seqs, max_pages], got {type(block_table).__name__}: "
            "make one with torch.tensor(..., dtype=torch.int32, device=...)"
        )
    if block_table.dtype is not torch.int32:
        raise TypeError(f"block_table must be int32, got {block_table.dtype}: convert it with .int()")
    if block_table.ndim != 2:
        raise ValueError(f"block_table must be [seqs, max_pages], got {list(block_table.shape)}")


_CONSTANTS = ("max_query_len", "page_size")
_TENSORS = tuple(field.name for field in fields(AttentionMetadata) if field.name not in _CONSTANTS)


def _flatten(metadata: AttentionMetadata) -> tuple[list[Tensor], tuple[Any, ...]]:
    return [getattr(metadata, name) for name in _TENSORS], tuple(getattr(metadata, name) for name in _CONSTANTS)


def _flatten_with_keys(metadata: AttentionMetadata) -> tuple[list[tuple[Any, Tensor]], tuple[Any, ...]]:
    tensors, constants = _flatten(metadata)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(_TENSORS, tensors, strict=True)], constants


def _unflatten(tensors: Any, constants: Any) -> AttentionMetadata:
    return AttentionMetadata(**dict(zip((*_TENSORS, *_CONSTANTS), (*tensors, *constants), strict=True)))


pytree.register_pytree_node(
    AttentionMetadata,
    _flatten,
    _unflatten,
    serialized_type_name="fusion_passes.nn.AttentionMetadata",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)


class PagedKVCache(nn.Module):
    """Keys and values of many sequences, in pages.

    ``key`` and ``value``: [pages, num_kv_heads, page_size, head_dim], zeros at first. In memory a page is
    [num_kv_heads, page_size, head_dim] for layout "HND" and [page_size, num_kv_heads, head_dim] for "NHD"; the shape is
    the same. They are buffers that state_dict leaves out: `.to(device)` moves them, `.to(dtype)` does not cast them,
    and CUDA graphs know that their address stays.
    """

    key: Tensor
    value: Tensor

    def __init__(
        self,
        pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        layout: Layout = "HND",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if min(pages, page_size, num_kv_heads, head_dim) < 1:
            raise ValueError(f"a cache of {pages} pages x {num_kv_heads} x {page_size} x {head_dim} holds nothing")
        if layout not in ("HND", "NHD"):
            raise ValueError(f"layout must be 'HND' or 'NHD', got {layout!r}")
        self.pages, self.page_size, self.layout = pages, page_size, layout
        inner = (num_kv_heads, page_size) if layout == "HND" else (page_size, num_kv_heads)
        for name in ("key", "value"):
            cache = torch.zeros(pages, *inner, head_dim, dtype=dtype, device=device)
            self.register_buffer(name, cache if layout == "HND" else cache.transpose(1, 2), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return self.key.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PagedKVCache":
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None:
                continue
            if new.dtype != old.dtype:  # FP8 counts as floating point, so Module.to(dtype) would cast the codes
                self._buffers[name] = old.to(new.device)
            elif old.is_meta and not new.is_meta:
                new.zero_()  # to_empty leaves whatever was there
        return self

    def extra_repr(self) -> str:
        return f"{list(self.key.shape)}, {self.dtype}, layout={self.layout}"


class StaticKVCache(PagedKVCache, SettledAfterLoading):
    """A contiguous stretch of max_len tokens for each of batch sequences: page s is sequence s's.

    ``block_table``: int32 [batch, 1], for the metadata. page_size is max_len, rounded up to a multiple of 128.
    """

    block_table: Tensor

    def __init__(
        self,
        batch: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        layout: Layout = "HND",
        device: torch.device | str | None = None,
    ) -> None:
        page_size = -(-max_len // STATIC_PAGE_MULTIPLE) * STATIC_PAGE_MULTIPLE
        super().__init__(batch, page_size, num_kv_heads, head_dim, dtype, layout=layout, device=device)
        self.max_len = max_len
        self.register_buffer("block_table", self._table().to(device or torch.get_default_device()), persistent=False)

    def process_weights_after_loading(self, name: str = "", *, device: torch.device | str | None = None) -> Settled:
        """Write the block table again, in place: zeros would put all sequences on one page. On meta: nothing."""
        if self.block_table.is_meta or not restore(self.block_table, self._table()):
            return Settled()
        return Settled(restored=(f"{name}.block_table" if name else "block_table",))

    def _table(self) -> Tensor:
        return torch.arange(self.pages, dtype=torch.int32, device="cpu")[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StaticKVCache":
        super()._apply(fn, recurse)
        if not self.block_table.is_meta:  # to_empty leaves whatever was there
            self.block_table.copy_(self._table())
        return self
