"""Text from a Llama with FP8 weights and an FP8 paged KV cache, served with continuous batching.

    python examples/generate.py                   random weights: tiny on a CPU, Llama-3.1-8B's shape on a GPU
    python examples/generate.py --model FOLDER    a folder in Hugging Face's layout
    python examples/generate.py --model FOLDER --prompt "Once upon a time" --new-tokens 200
    python examples/generate.py --passes off      stock torch.compile, to compare with

Requests arrive over time, so steps mix prompts with single tokens (docs/generate.md). `serving.py` beside this file has
the scheduler and the loop over CUDA graphs, `fusion_passes.models` the model and its loading.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from serving import Request, Runner, Scheduler

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.models.checkpoint import Checkpoint, config_from_hugging_face, load_folder
from fusion_passes.models.llama import PRESETS
from fusion_passes.models.paged_llama import PagedLlama, randomize

TEXT = Path(__file__).with_name("calibration_text.txt")


class Bytes:
    """A tokenizer for models that have none: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")


class Tokenizer:
    """tokenizer.json of a folder, through the `tokenizers` package."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FromFile

        self.inner = FromFile.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self.inner.decode(list(tokens))


def tokenizer_of(folder: Path | None) -> Bytes | Tokenizer:
    if folder is None:
        return Bytes()
    if not (path := folder / "tokenizer.json").exists():
        print(f"{path} does not exist: the model gets bytes as tokens, which a trained model does not understand")
        return Bytes()
    try:
        return Tokenizer(path)
    except ImportError:
        print("the package tokenizers is not installed (pip install tokenizers): the model gets bytes as tokens")
        return Bytes()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", type=Path, metavar="FOLDER", help="config.json and safetensors")
    weights.add_argument("--random", choices=[*PRESETS], help="random weights of this shape")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="excerpts of a text as prompts, if there is no --prompt"
    )
    parser.add_argument("--new-tokens", type=int, metavar="N", help="for each request")
    parser.add_argument("--arrive-every", type=int, default=2, metavar="STEPS", help="steps between two arrivals")
    parser.add_argument("--batch", type=int, metavar="N", help="most requests in a step")
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="most tokens in a step")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="longest prompt and output together")
    parser.add_argument("--pages", type=int, metavar="N", help="of the cache; room for all requests if left out")
    parser.add_argument("--page-size", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--kv-cache-dtype", choices=["fp8_e4m3", "fp8_e5m2", "auto"], default="fp8_e4m3")
    parser.add_argument("--passes", choices=["on", "off"], default="on")
    parser.add_argument("--profitability", choices=["measured", "ignore"], default="measured", help="of the passes")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor CUDA graphs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    small = options.device == "cpu"
    if options.model is None and options.random is None:
        options.random = "tiny" if small else "8b"
    for name, on_cpu, on_gpu in (
        ("requests", 6, 32), ("new_tokens", 24, 128), ("batch", 4, 16), ("budget", 64, 512), ("context", 256, 2048),
    ):  # fmt: skip
        if getattr(options, name) is None:
            setattr(options, name, on_cpu if small else on_gpu)
    for name in ("requests", "new_tokens", "batch", "budget", "context", "pages", "page_size", "arrive_every"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA card, and torch sees none here: leave it out to run on the CPU")
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model {options.model} is not a folder")
    if options.budget < options.batch:
        parser.error(
            f"--budget {options.budget} is less than --batch {options.batch}: each request needs a token a step"
        )
    return options


def check_vocabulary(folder: Path, tokenizer: Bytes | Tokenizer, tokens: Iterable[int], vocab: int) -> None:
    """Raise ValueError where the model has no embedding for a token."""
    if isinstance(tokenizer, Bytes) and vocab < 256:
        raise ValueError(
            f"bytes as tokens need a vocabulary of 256, the model in {folder} has {vocab}: it needs its tokenizer.json "
            "there, and the package tokenizers"
        )
    if (highest := max(tokens, default=0)) >= vocab:
        raise ValueError(
            f"{folder / 'tokenizer.json'} gives token {highest}, the model's vocabulary is {vocab}: "
            "it is the tokenizer of another model"
        )


def load(options: argparse.Namespace, tokenizer: Bytes | Tokenizer) -> tuple[PagedLlama, list[int]]:
    """The model, and the tokens that end an output."""
    made: dict[str, Any] = dict(kv_cache_dtype=options.kv_cache_dtype, block_size=options.page_size)
    made["device"] = options.device
    if options.model is None:
        model = PagedLlama(PRESETS[options.random], fp8=True, **made).eval().requires_grad_(False)
        randomize(model)
        return model, []
    checkpoint = Checkpoint(options.model)
    stop = checkpoint.config.get("eos_token_id")  # a number, a list or nothing
    calibration = tokenizer.encode(TEXT.read_text())
    given = [token for text in options.prompt or [] for token in tokenizer.encode(text)]
    vocab = config_from_hugging_face(checkpoint.config).vocab
    check_vocabulary(options.model, tokenizer, calibration + given, vocab)
    model = load_folder(checkpoint, torch.tensor(calibration), tell=print, **made)
    return model, stop if isinstance(stop, list) else [] if stop is None else [stop]


def prompts(options: argparse.Namespace, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Those that were given, or excerpts of different lengths."""
    if options.prompt:
        return [encode(text) for text in options.prompt]
    tokens = encode(TEXT.read_text())
    longest = max(1, min(options.context - options.new_tokens, len(tokens)))
    lengths = [1 + (i * 37 + 20) * longest // 97 % longest for i in range(options.requests)]
    starts = [i * 211 % max(1, len(tokens) - longest + 1) for i in range(options.requests)]
    return [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Progress:
    """A bar by tqdm if it is installed, else a line now and then."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done, self.shown = total, what, 0, time.monotonic()
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(total=total, desc=what, unit="tok", disable=None)

    def add(self, count: int) -> None:
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        elif time.monotonic() - self.shown > 2.0:
            self.shown = time.monotonic()
            print(f"{self.what}: {self.done} of {self.total} tokens", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def serve(
    scheduler: Scheduler, runner: Runner, requests: list[Request], arrive_every: int
) -> Iterator[tuple[bool, int, int, float]]:
    """Run until all are finished. Yields for each step: only single tokens?, tokens in, tokens out, seconds."""
    pending, step = list(requests), 0
    while pending or scheduler.busy:
        while pending and (step >= arrive_every * (len(requests) - len(pending)) or not scheduler.busy):
            scheduler.add(pending.pop(0))
        start = time.perf_counter()
        batch = scheduler.next_step()
        only_decode = runner.padded(batch)[2]
        tokens, out = sum(work.count for work in batch), sum(work.completes for work in batch)
        scheduler.finish_step(batch, runner.run(batch))
        step += 1
        yield only_decode, tokens, out, time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    tokenizer = tokenizer_of(options.model)
    started = time.perf_counter()
    model, stop = load(options, tokenizer)
    context = min(options.context, model.config.context)
    requests = [Request(prompt, options.new_tokens) for prompt in prompts(options, tokenizer.encode)]
    pages = -(-context // options.page_size) * options.batch if options.pages is None else options.pages
    scheduler = Scheduler(
        pages, options.page_size, max_seqs=options.batch, budget=options.budget, context=context, stop=stop
    )
    for request in requests:
        scheduler.check(request)
    model.allocate_cache(pages)
    report = Report()
    if not options.eager:
        config = PassConfig(profitability=options.profitability) if options.passes == "on" else PassConfig(level="O0")
        model.compile_layers(
            lambda part: fusion_passes.compile(part, config, report=report, dynamic=True, fullgraph=True)
        )
    attention = model.attention_layers[0]
    print(
        f"{model.config.layers} layers of {model.config.hidden}, cache of {pages} pages of {options.page_size} tokens "
        f"in {attention.cache_dtype}, attention by {attention.backend.name}, "
        f"{time.perf_counter() - started:.1f} s to load"
    )
    runner = Runner(
        model,
        max_seqs=options.batch,
        budget=options.budget,
        context=context,
        page_size=options.page_size,
        cuda_graphs=options.device == "cuda" and not options.eager,
    )
    started = time.perf_counter()
    for size in runner.sizes():
        runner.warm_up(size)
    done = "run once" if options.eager else "compiled"
    print(f"{len(runner.sizes())} sizes of steps {done} in {time.perf_counter() - started:.1f} s")

    progress = Progress(sum(len(r.prompt) + r.new_tokens for r in requests), "generating")
    steps = []
    for step in serve(scheduler, runner, requests, options.arrive_every):
        steps.append(step)
        progress.add(step[1])
    progress.close()

    for request in requests[:4]:
        print(f"{tokenizer.decode(request.prompt[-40:])!r} -> {tokenizer.decode(request.output[:40])!r}")
    seconds, out = sum(step[3] for step in steps), sum(step[2] for step in steps)
    print(
        f"{out} tokens for {len(requests)} request{'s' * (len(requests) > 1)} in {seconds:.2f} s "
        f"and {len(steps)} steps: {out / seconds:.1f} "
        f"tokens/s; {sum(r.preemptions for r in requests)} preemptions"
    )
    for name, kind in (("single tokens only", True), ("with prompts", False)):
        times = sorted(step[3] for step in steps if step[0] == kind)
        if times:
            print(f"  {len(times)} steps {name}: median {times[len(times) // 2] * 1e3:.2f} ms")
    if not options.eager and options.passes == "on":
        print(report)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"generate.py: {error}")
