"""Whatever int32 values describe a batch, the kernels of paged attention write nothing outside of their output.

A read far outside of a tensor ends the process in the interpreter, and is an illegal memory access on a card.
"""

import functools
import random

import pytest
import torch

from fusion_passes.kernels import paged_decode, paged_prefill

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FIRST, LAST = -(2**31), 2**31 - 1
HARD = (FIRST, FIRST + 1, FIRST + 5, -(2**30), -70, -3, -1, 0, 1, 2, 5, 7, 9, 40, 2**29, 2**30 - 3, LAST - 4, LAST)
POISON = 0x55
TOKENS, HEADS, HEAD_DIM = 7, 4, 64 if GPU else 16
CONFIGS = {
    "decode": functools.partial(paged_decode.launch, max_query_len=5, config=paged_decode.Plan(32, 1, 32, 1)),
    "decode, split": functools.partial(paged_decode.launch, max_query_len=5, config=paged_decode.Plan(32, 1, 32, 3)),
    "prefill": functools.partial(paged_prefill.launch_portable, config=(16, 16, 4, 1)),
    "hopper": paged_prefill.launch,
}


class Guarded:
    """Contiguous memory with poisoned memory before and behind it."""

    def __init__(self, *shape, dtype):
        self.size = torch.Size(shape).numel() * dtype.itemsize
        self.memory = torch.full((3 * self.size,), POISON, dtype=torch.uint8, device=DEVICE)
        self.inside = self.memory[self.size : 2 * self.size].view(dtype).view(shape)

    def is_whole(self):
        return bool((self.memory[: self.size] == POISON).all() and (self.memory[2 * self.size :] == POISON).all())


def batches():
    """query_start, seq_lens and block_table: some that once went wrong, and random ones."""
    yield [-5, -2, 3], [20, 2], [[3, 1], [2, 0]]  # rows of queries in front of the output
    yield [FIRST, FIRST + 1, FIRST + 2], [20, 2], [[3, 1], [2, 0]]
    yield [0, 2, FIRST], [20, 20], [[3, 1], [2, 0]]  # padding from below the output on
    yield [0, 5, 7], [FIRST, FIRST + 3], [[3, 1], [2, 0]]  # differences that overflow
    yield [LAST, FIRST, FIRST + 3], [9, 9], [[3, 1], [2, 0]]
    pick = random.Random(0)
    for _ in range(200 if GPU else 3):
        starts, lengths = ([pick.choice(HARD) for _ in range(n)] for n in (3, 2))
        for i in range(2):  # mostly few queries, whatever they start at
            if pick.random() < 0.7:
                starts[i + 1] = (starts[i] + pick.randint(1, 6) + 2**31) % 2**32 - 2**31
        yield starts, lengths, [[pick.choice(HARD) for _ in range(2)] for _ in range(2)]


@pytest.mark.parametrize("name", [*CONFIGS][:3] + [pytest.param("hopper", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [None, 3])
def test_nothing_outside_is_written(name, window):
    codes = torch.float8_e4m3fn
    query = torch.randn(TOKENS, HEADS, HEAD_DIM, device=DEVICE).to(codes)
    key, value = (torch.randn(4, 2, 16, HEAD_DIM, device=DEVICE).to(codes) for _ in range(2))
    scales = [torch.tensor(x, device=DEVICE) for x in (0.017, 0.013, 0.0071)]
    for batch in batches():
        start, lengths, table = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in batch)
        out = Guarded(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        CONFIGS[name](
            *(out.inside, None, query, key, value, table, start, lengths, *scales, None, None, None),
            scale=0.2,
            window=window,
            softcap=0.0,
        )
        assert out.is_whole(), batch
