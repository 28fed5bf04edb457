"""Rotary embedding as models write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-x2, x1), -1) * sin


def _rotate_half_of_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, -1)
    turned = torch.cat((x2.neg(), x1), -1)
    return (turned * sin.repeat(1, 2)[:, None] + cos.repeat(1, 2)[:, None] * x.float()).to(x.dtype)


def _heads_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.transpose(0, 1)[None], torch.cat((cos, cos), -1)[None, None], torch.cat((sin, sin), -1)[None, None]
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos + torch.cat((-x2, x1), -1) * sin).squeeze(0).transpose(0, 1)


def _heads_first_with_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.transpose(0, 1), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos + torch.cat((-x2, x1), -1) * sin).transpose(0, 1)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def _halves_in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x1, x2 = x.float().split(x.shape[-1] // 2, -1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).to(x.dtype)


def _halves_of_sequences(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[None, :, None], sin[None, :, None]
    x1, x2 = x[None].chunk(2, -1)
    return torch.cat((x1 * cos + x2 * -sin, x2 * cos + x1 * sin), -1).flatten(0, 1)


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)


def _neighbours_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).reshape(x.shape).to(x.dtype)


def _neighbours_by_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns = torch.stack((cos, sin), -1)[:, None]
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    first = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    second = pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]
    return torch.stack((first, second), -1).flatten(-2).to(x.dtype)


def _complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns = torch.complex(cos.float(), sin.float())[:, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _rotate_every_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.repeat_interleave(2, -1)[:, None], sin.repeat_interleave(2, -1)[:, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def _first_dimensions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    x1, x2 = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-x2, x1), -1) * sin, passed), -1)


def _first_dimensions_in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x1, x2, passed = x.split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, passed), -1)


def _one_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, sin), -1)[:, None].to(x.dtype).chunk(2, -1)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rotate_half": _rotate_half,
    "rotate_half of chunks, in fp32": _rotate_half_of_chunks,
    "rotate_half, heads first": _heads_first,
    "rotate_half, heads first, tables without heads": _heads_first_with_rows,
    "halves": _halves,
    "halves in fp32": _halves_in_fp32,
    "halves in a dimension of sequences": _halves_of_sequences,
    "neighbours": _neighbours,
    "neighbours as pairs": _neighbours_of_pairs,
    "neighbours, turned by a table of pairs": _neighbours_by_pairs,
    "neighbours as complex numbers": _complex_numbers,
    "rotate_every_two": _rotate_every_two,
    "the first dimensions": _first_dimensions,
    "the first dimensions, in halves": _first_dimensions_in_halves,
    "one table of cos and sin": _one_table,
}
"""What is read as a `Rope`: (x [tokens, heads, head_dim], cos and sin [tokens, half of the turned dimensions])."""
