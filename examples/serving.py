"""Continuous batching for `generate.py`: what goes into the next step, which pages it gets, and how the step runs.

`Scheduler` and `Pages` are plain Python. `Runner` makes a batch into tensors that lie at fixed addresses, and replays a
CUDA graph for it on a GPU.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion_passes.models.paged_llama import PagedLlama
from fusion_passes.nn import AttentionMetadata


class Pages:
    """Hands out pages of the cache."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))

    def take(self, count: int) -> list[int] | None:
        """So many pages, or None if there are not enough."""
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Make them free again, and the list empty."""
        self.free += reversed(pages)
        pages.clear()


@dataclass(eq=False)
class Request:
    """A prompt and what has become of it."""

    prompt: list[int]
    new_tokens: int
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the cache
    preemptions: int = 0
    finished: bool = False

    @property
    def length(self) -> int:
        """Tokens that are known so far."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Of prompt and output together."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - split) : max(0, stop - split)]


@dataclass
class Work:
    """The next `count` tokens of a request."""

    request: Request
    count: int

    @property
    def completes(self) -> bool:
        """Whether a new token comes out, since all that are known are in the cache then."""
        return self.request.cached + self.count == self.request.length


class Scheduler:
    """First come, first served, within `max_seqs` requests and `budget` tokens a step.

    A running request gets one token a step once its prompt is in the cache, and until then as much of the prompt as the
    budget has left (chunked prefill), so steps with prompts and single tokens side by side are the rule. If there is no
    page for a token, the latest of the running requests gives its pages back and starts over later, with what it has
    said as a part of its prompt (preemption). A new request waits until there are pages for all that it knows.
    """

    def __init__(
        self, pages: int, page_size: int, *, max_seqs: int, budget: int, context: int, stop: Sequence[int] = ()
    ) -> None:
        if budget < max_seqs:
            raise ValueError(f"a budget of {budget} tokens a step does not serve {max_seqs} requests")
        self.pages, self.page_size = Pages(pages), page_size
        self.max_seqs, self.budget, self.context, self.stop = max_seqs, budget, context, frozenset(stop)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never be served."""
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise ValueError if a request could never be served."""
        if not request.prompt or request.new_tokens < 1:
            raise ValueError("a request needs a prompt of at least one token, and new tokens to be asked for")
        most = len(request.prompt) + request.new_tokens
        if most > self.context:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.new_tokens} new ones exceed the context of "
                f"{self.context}: shorten the prompt or ask for less"
            )
        if (needed := self._pages_for(most)) > self.pages.count:
            raise ValueError(
                f"a request of {most} tokens needs {needed} pages of {self.page_size}, the cache has "
                f"{self.pages.count}: give it more pages"
            )

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running)

    def next_step(self) -> list[Work]:
        """What to compute now, its pages taken. Empty only if nothing is left."""
        budget, batch = self.budget, []
        for request in list(self.running):
            if request not in self.running:  # preempted by one that came earlier
                continue
            count = min(budget, request.length - request.cached)
            if count and self._grow(request, request.cached + count):
                batch.append(Work(request, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            taken = self.pages.take(self._pages_for(request.length))
            if taken is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.pages = taken
            batch.append(Work(request, min(budget, request.length)))
            budget -= batch[-1].count
        return batch

    def finish_step(self, batch: Sequence[Work], tokens: Sequence[int]) -> None:
        """tokens: what the model says next for each entry of the batch; without meaning where it completes nothing."""
        for work, token in zip(batch, tokens, strict=True):
            request, completes = work.request, work.completes
            request.cached += work.count
            if not completes:
                continue
            request.output.append(token)
            if len(request.output) == request.new_tokens or token in self.stop:
                request.finished = True
                self.running.remove(request)
                self.pages.give_back(request.pages)

    def _grow(self, request: Request, length: int) -> bool:
        """Pages for so many tokens, from the latest requests if need be; False if that is the request itself."""
        while True:
            taken = self.pages.take(max(0, self._pages_for(length) - len(request.pages)))
            if taken is not None:
                request.pages += taken
                return True
            latest = self.running.pop()
            self.pages.give_back(latest.pages)
            latest.cached = 0
            latest.preemptions += 1
            self.waiting.appendleft(latest)
            if latest is request:
                return False

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class Runner:
    """Runs the batches of a scheduler through a model: greedy, one step at a time.

    Steps are padded to a few sizes: of requests where each has one new token, of tokens otherwise. On a GPU each size
    is a CUDA graph. All read the same buffers, which a step overwrites, so a step costs one copy of the batch to the
    device and one of the new tokens back.
    """

    def __init__(
        self, model: PagedLlama, *, max_seqs: int, budget: int, context: int, page_size: int, cuda_graphs: bool
    ) -> None:
        self.model, self.page_size, self.cuda_graphs = model, page_size, cuda_graphs
        self.max_seqs = max(2, max_seqs)  # a size of 1 would be compiled by itself
        self.decode_sizes = sorted({min(2**i, self.max_seqs) for i in range(1, self.max_seqs.bit_length() + 1)})
        self.mixed_sizes = sorted({min(64 * 2**i, budget) for i in range(budget.bit_length())})
        self.device = model.embedding.weight.device
        columns = -(-context // page_size)
        tokens = max(budget, self.max_seqs)
        # One buffer for all, so that one copy brings a step to the device.
        shapes = {
            "slot_mapping": (torch.int64, (tokens,)),
            "tokens": (torch.int64, (tokens,)),
            "positions": (torch.int64, (tokens,)),
            "rows": (torch.int64, (self.max_seqs,)),
            "query_start": (torch.int32, (self.max_seqs + 1,)),
            "seq_lens": (torch.int32, (self.max_seqs,)),
            "block_table": (torch.int32, (self.max_seqs, columns)),
        }
        self.host = torch.zeros(
            sum(_bytes(*x) for x in shapes.values()), dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        self.buffer = self.host.to(self.device)
        self.on_host, self.on_device = (dict(_split(x, shapes)) for x in (self.host, self.buffer))
        self.graphs: dict[tuple[int, int, bool], Callable[[], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if cuda_graphs else None  # one runs at a time: they share memory

    def sizes(self) -> list[tuple[int, int, bool]]:
        """Of padded steps: requests, tokens, and whether each request has one token."""
        mixed = [(self.max_seqs, tokens, False) for tokens in self.mixed_sizes]
        return [(seqs, seqs, True) for seqs in self.decode_sizes] + mixed

    def warm_up(self, size: tuple[int, int, bool]) -> None:
        """Compile and capture a size, with a batch of padding alone."""
        self._fill([], size)
        self._run(size).cpu()

    def run(self, batch: Sequence[Work]) -> list[int]:
        """The next token of each request of the batch."""
        size = self.padded(batch)
        self._fill(batch, size)
        return self._run(size)[: len(batch)].tolist()

    def padded(self, batch: Sequence[Work]) -> tuple[int, int, bool]:
        """The size that a batch is padded to."""
        tokens = sum(work.count for work in batch)
        if tokens == len(batch):
            seqs = next(size for size in self.decode_sizes if size >= len(batch))
            return seqs, seqs, True
        return self.max_seqs, next(size for size in self.mixed_sizes if size >= tokens), False

    def _fill(self, batch: Sequence[Work], size: tuple[int, int, bool]) -> None:
        """`AttentionMetadata.from_lengths` and the model's other inputs, in lists: quicker for a few numbers."""
        seqs, tokens, _ = size
        ids, positions, slots, rows, lengths, starts = [], [], [], [], [], [0]
        for index, work in enumerate(batch):
            request, new = work.request, range(work.request.cached, work.request.cached + work.count)
            ids += request.tokens(new.start, new.stop)
            positions += new
            slots += [request.pages[i // self.page_size] * self.page_size + i % self.page_size for i in new]
            rows.append(len(ids) - 1)
            starts.append(len(ids))
            lengths.append(new.stop)
            self.on_host["block_table"][index, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        for name, values, padding, length in (
            ("tokens", ids, 0, tokens),
            ("positions", positions, 0, tokens),
            ("slot_mapping", slots, -1, tokens),
            ("rows", rows, 0, seqs),
            ("query_start", starts, len(ids), seqs + 1),
            ("seq_lens", lengths, 0, seqs),
        ):
            self.on_host[name][:length] = torch.tensor(values + [padding] * (length - len(values)))
        self.buffer.copy_(self.host, non_blocking=True)

    @torch.no_grad()
    def _run(self, size: tuple[int, int, bool]) -> Tensor:
        if size not in self.graphs:
            step = functools.partial(self._step, size)
            self.graphs[size] = _captured(step, self.pool) if self.cuda_graphs else step
        return self.graphs[size]()

    def _step(self, size: tuple[int, int, bool]) -> Tensor:
        seqs, tokens, one_each = size
        x = self.on_device
        metadata = AttentionMetadata(
            query_start=x["query_start"][: seqs + 1],
            seq_lens=x["seq_lens"][:seqs],
            block_table=x["block_table"][:seqs],
            slot_mapping=x["slot_mapping"][:tokens],
            max_query_len=1 if one_each else None,
            page_size=self.page_size,
        )
        logits = self.model(x["tokens"][:tokens], x["positions"][:tokens], metadata, x["rows"][:seqs])
        return logits.argmax(-1)


def _split(buffer: Tensor, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, (dtype, shape) in shapes.items():
        elements = torch.Size(shape).numel()
        yield name, buffer[start : start + elements * dtype.itemsize].view(dtype).view(shape)
        start += _bytes(dtype, shape)


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Room for a tensor, with what comes after it aligned for any kernel."""
    return -(-dtype.itemsize * torch.Size(shape).numel() // 256) * 256


def _captured(step: Callable[[], Tensor], pool: object) -> Callable[[], Tensor]:
    """The step as a CUDA graph, which returns the same tensor at each call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles, and lets kernels and libraries allocate what they keep
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
