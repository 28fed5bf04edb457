"""What FP8 and the fusions cost in accuracy: a small language model, trained here, on text that it has not seen.

    python benchmarks/accuracy.py --record benchmarks/results --write-docs      two minutes on an H200
    python benchmarks/accuracy.py --quick                                       a tiny one, also on a CPU

Bytes of the standard library's sources and of the documents of the installed packages are the text; nothing is
downloaded. The model is `fusion_passes.models.llama`, trained in bf16; the same weights are then read into the decoder
on the paged cache. Text goes through it as a server would send it: in chunks of different sizes, in single tokens, and
in batches in which some sequences do one and some the other. Every logit that is scored comes from such a step.

The standard errors are bootstrapped over documents: all scores of a document are drawn together. Differences between
configurations are paired, on the same draws, and have a much smaller error than the figures themselves. Computations
that round differently have different figures on any text, so the difference of fused and unfused has a second error:
how much the figures move if the same model is rounded a little differently, seen by moving its scales. Exit status 1
if it is more than `LIMIT` times both errors together, or nothing was fused, so that there was nothing to compare.
"""

import argparse
import copy
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

import fusion_passes
from fusion_passes import PassConfig, Report
from fusion_passes.models.checkpoint import CALIBRATION_LENGTH, settle_scales
from fusion_passes.models.llama import Config, Llama
from fusion_passes.models.paged_llama import PagedLlama, load_hugging_face
from fusion_passes.nn import AttentionMetadata, FP8Linear, process_weights_after_loading

DOCS = Path(__file__).parents[1] / "docs" / "accuracy.md"
SEPARATOR = b"\0"
"""Between documents of the training text."""
LARGEST = 1 << 17
"""Bytes taken of a document, so that a few long ones do not make up the corpus."""
HELD_OUT = 0.2
"""Share of the families that is held out."""
LINE = 24
"""Characters of a line from which on it counts as text that can be repeated."""
REPEATED = 0.2
"""A document is left out if more of its lines than this are in the training text too."""
LIMIT = 3.0
"""Errors of the difference within which fused and unfused agree."""
MOVES = 4
"""How often the figures are taken with other scales."""
MOVE = 2**-7
"""By how much the scales become larger at most: a step of bf16, since a fusion leaves out a rounding to bf16."""


@dataclass(frozen=True)
class Document:
    path: str  # "lib/json/decoder.py", "packages/numpy/LICENSE.txt"
    family: str
    text: bytes


def family(path: str) -> str:
    """What a file of the standard library belongs to: `_pydecimal.py`, `decimal.py` and `test/test_decimal.py` are one.

    A package is one family, with its tests.
    """
    parts = path.split("/")
    while len(parts) > 1 and parts[0] in ("test", "tests"):
        parts = parts[1:]
    name = re.sub(r"^(test_|_py(?=_?[a-z])|_)+|(_tests?|\d|_)+$", "", parts[0].split(".")[0].lower())
    return name or parts[0]


def corpus() -> list[Document]:
    """The standard library's sources, and readmes and licences of the installed packages, ordered by path."""
    documents = {}
    library = Path(sysconfig.get_path("stdlib"))
    for file in library.rglob("*.py"):
        path = file.relative_to(library).as_posix()
        if not {"site-packages", "dist-packages"} & {*path.split("/")}:
            documents[f"lib/{path}"] = (family(path), file)
    for package in importlib.metadata.distributions():
        name = (package.metadata["Name"] or "").lower()
        for entry in package.files or () if name else ():
            inside = entry.as_posix().partition(".dist-info/")[2]
            if re.match(r"METADATA$|(licenses/|.*LICEN|COPYING|NOTICE|AUTHORS)", inside, re.IGNORECASE):
                documents[f"packages/{name}/{inside}"] = (f"package {name}", Path(str(entry.locate())))
    found = []
    for path, (group, file) in sorted(documents.items()):
        try:
            text = file.read_bytes()[:LARGEST]
            text.decode(errors="strict" if len(text) < LARGEST else "ignore")
        except (OSError, UnicodeDecodeError):  # listed and gone, or a test of other encodings
            continue
        if text.strip():
            found.append(Document(path, group, text))
    return found


def split(documents: Sequence[Document], share: float = HELD_OUT) -> tuple[list[Document], list[Document], int]:
    """Training documents, held-out ones, and the number of held-out ones that were dropped.

    A file goes where the hash of its family sends it, so that no module is on one side and its tests or its Python
    version on the other. Copies that have another name (licences, vendored modules) are found by their lines: a
    held-out document is dropped if more than `REPEATED` of its distinct lines of at least `LINE` characters are in the
    training text.
    """
    train = [document for document in documents if _fraction(document.family) >= share]
    seen = {line for document in train for line in _lines(document.text)}
    others = [document for document in documents if _fraction(document.family) < share]
    held_out = [document for document in others if _repeated(document.text, seen) <= REPEATED]
    return train, held_out, len(others) - len(held_out)


def _fraction(name: str) -> float:
    """A number in [0, 1) that only the name decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def _lines(text: bytes) -> set[bytes]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LINE}


def _repeated(text: bytes, seen: set[bytes]) -> float:
    """Share of the lines that were seen; 1 for a text that has no line to judge it by."""
    lines = _lines(text)
    return len(lines & seen) / len(lines) if lines else 1.0


@dataclass(frozen=True)
class Setup:
    """Sizes of a run. lengths are in tokens, which are bytes."""

    config: Config
    context: int
    batch: int  # sequences in a training step
    steps: int
    rate: float  # the largest learning rate
    blocks: int  # of held-out text, each at most context long
    sequences: int  # in a batch of the evaluation
    page_size: int
    calibration: int  # stretches of training text that the scales are chosen on
    text: int | None = None  # bytes of training text, all if None


SETUPS = {
    "full": Setup(
        Config(512, 1536, layers=8, heads=8, kv_heads=2, head_dim=64, context=1024),
        **dict(context=1024, batch=64, steps=600, rate=1e-3, blocks=512, sequences=128, page_size=64, calibration=128),
    ),
    "quick": Setup(
        Config(64, 128, layers=2, heads=2, kv_heads=1, head_dim=64, context=128),
        **dict(context=128, batch=8, steps=300, rate=1e-2, blocks=96, sequences=8, page_size=16, calibration=8),
        text=1 << 19,
    ),
}


def train(setup: Setup, text: bytes, device: torch.device, *, log: Callable[[str], None] = print) -> Llama:
    """An fp32 model, trained in bf16 (fp32 on a CPU) with AdamW and a cosine schedule on random stretches of text."""
    torch.manual_seed(0)
    model = Llama(setup.config).to(device)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # as GPT-2: what adds to the residual stream starts smaller
            deep = name.endswith(("o.weight", "down.weight"))
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * setup.config.layers) if deep else 0.02)
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, setup.steps))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(0)
    stretch = torch.arange(setup.context + 1, device=device)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    if cuda:  # for the few steps on a CPU compiling costs more than it saves
        for block in model.blocks:
            block.compile(dynamic=False)  # all have one graph
    begin = time.perf_counter()
    for step in range(setup.steps):
        start = torch.randint(len(text) - setup.context, (setup.batch, 1), generator=generator).to(device)
        value = loss(data[start + stretch].long())
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, setup.steps // 10) == 0 or step == setup.steps - 1:
            log(f"step {step:5d} of {setup.steps}, loss {value.item():.3f}, {time.perf_counter() - begin:.0f} s")
    trained = Llama(setup.config).to(device).eval().requires_grad_(False)  # that is not compiled
    trained.load_state_dict(model.state_dict())
    return trained


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first twentieth, then half a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@dataclass(frozen=True)
class Block:
    """Consecutive bytes of a held-out document; the first is only read, each later one is also predicted."""

    document: int
    tokens: Tensor  # int64


def blocks(documents: Sequence[Document], length: int, count: int) -> list[Block]:
    """At most `count` blocks of at most length + 1 bytes, the same number from each family as long as it has any.

    Of a document the first bytes come first. Documents are numbered from 0, those without a block left out.
    """
    ranked = []
    families: Counter[str] = Counter()
    order = sorted(documents, key=lambda document: _fraction(document.path))
    for first in range(0, LARGEST, length):
        for document in order:
            tokens = document.text[first : first + length + 1]
            if len(tokens) > length // 8:
                ranked.append((families[document.family], len(ranked), document.path, tokens))
                families[document.family] += 1
    chosen = sorted(ranked)[:count]
    numbers = {path: number for number, path in enumerate(sorted({path for _, _, path, _ in chosen}))}
    return [Block(numbers[path], torch.tensor(list(tokens))) for _, _, path, tokens in chosen]


def training_text(documents: Sequence[Document], size: int | None) -> bytes:
    """Of all documents, in an order that has nothing to do with their names, cut to size."""
    order = sorted(documents, key=lambda document: _fraction(document.path))
    return SEPARATOR.join(document.text for document in order)[:size]


def stretches(text: bytes, count: int, length: int = CALIBRATION_LENGTH) -> bytes:
    """So many pieces of the text, evenly spaced, one after the other."""
    last = len(text) - length
    return b"".join(text[index * last // count :][:length] for index in range(count))


def chunks(tokens: int, row: int) -> list[int]:
    """How many tokens of a sequence each step takes, in two manners, so that the steps of a batch are mixed.

    Even rows: three long chunks, then single tokens. Odd rows: one long chunk, single tokens, a long chunk, single
    tokens. A sixteenth of the tokens are single ones.
    """
    single = tokens // 16
    if row % 2 == 0:
        long = tokens - single
        parts = [long // 3, long // 3, long - 2 * (long // 3), *[1] * single]
    else:
        half = (tokens - single) // 2
        parts = [half, *[1] * (single // 2), tokens - single - half, *[1] * (single - single // 2)]
    return [part for part in parts if part]


@dataclass
class Scores:
    """Sums over the predicted bytes of each document, fp64 [documents]; documents that none was taken from are 0."""

    loss: Tensor  # cross entropy, nats
    hits: Tensor  # bytes that were the likeliest
    count: Tensor

    @classmethod
    def zeros(cls, documents: int, device: torch.device | None = None) -> "Scores":
        return cls(*(torch.zeros(documents, dtype=torch.float64, device=device) for _ in range(3)))

    def add(self, logits: Tensor, targets: Tensor, documents: Tensor) -> None:
        """logits [tokens, vocab], targets and documents int64 [tokens]; nothing waits for the device."""
        loss = F.cross_entropy(logits.float(), targets, reduction="none").double()
        hits = (logits.argmax(-1) == targets).double()
        for sums, values in ((self.loss, loss), (self.hits, hits), (self.count, torch.ones_like(loss))):
            sums.index_add_(0, documents, values)

    def on_host(self) -> "Scores":
        """Raises ValueError if a loss is not finite."""
        if not self.loss.isfinite().all():
            raise ValueError("the model's loss is not finite")
        return Scores(self.loss.cpu(), self.hits.cpu(), self.count.cpu())

    def figures(self, weights: Tensor) -> Tensor:
        """Perplexity and accuracy, [..., 2], if document i occurs weights[..., i] times."""
        count = weights @ self.count
        return torch.stack([(weights @ self.loss / count).exp(), weights @ self.hits / count], -1)


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float  # standard error

    def text(self, digits: int, factor: float = 1.0, sign: str = "") -> str:
        return f"{self.value * factor:{sign}.{digits}f} ± {self.error * factor:.{digits}f}"


def bootstrap(figures: Callable[[Tensor], Tensor], documents: int, draws: int = 2000) -> list[Estimate]:
    """`figures` of the documents as they are, each with its standard error: the deviation over draws of documents.

    figures: weights fp64 [..., documents] to [..., figures]. The draws are the same in each call.
    """
    drawn = torch.randint(documents, (draws, documents), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(draws, documents, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
    errors = figures(weights).std(0)
    values = figures(torch.ones(documents, dtype=torch.float64))
    return [Estimate(*pair) for pair in zip(values.tolist(), errors.tolist(), strict=True)]


@torch.no_grad()
def score_dense(model: Llama, blocks: Sequence[Block], documents: int) -> Scores:
    """Without a cache: each block in one pass."""
    device = model.embedding.weight.device
    scores = Scores.zeros(documents, device)
    for block in blocks:
        tokens = block.tokens.to(device)
        of = torch.full((len(tokens) - 1,), block.document, device=device)
        scores.add(model(tokens[None, :-1])[0], tokens[1:], of)
    return scores.on_host()


@torch.no_grad()
def score_paged(model: PagedLlama, blocks: Sequence[Block], documents: int, sequences: int) -> Scores:
    """Through the cache, `sequences` blocks at a time, in the steps that `chunks` says.

    The pages of a sequence lie scattered. Steps are padded as for CUDA graphs, to at least a token for each sequence.
    """
    device, page_size = model.embedding.weight.device, model.block_size
    pages = max(-(-(len(block.tokens) - 1) // page_size) for block in blocks)
    generator = torch.Generator().manual_seed(0)
    model.allocate_cache(sequences * pages)
    scores = Scores.zeros(documents, device)
    for first in range(0, len(blocks), sequences):
        table = torch.randperm(sequences * pages, generator=generator).int().view(sequences, pages).to(device)
        batch = blocks[first : first + sequences]
        plans = [chunks(len(block.tokens) - 1, row) for row, block in enumerate(batch)]
        done = [0] * len(batch)
        for step in range(max(map(len, plans))):
            rows = [row for row, plan in enumerate(plans) if step < len(plan)]
            counts = [plans[row][step] for row in rows]
            spans = [(row, done[row], done[row] + count) for row, count in zip(rows, counts, strict=True)]
            tokens = max(sequences, sum(counts))
            idle = [row for row in range(sequences) if row not in rows]
            metadata = AttentionMetadata.from_lengths(
                counts,
                [stop for _, _, stop in spans],
                table[[*rows, *idle]],
                page_size,
                tokens=tokens,
                max_query_len=1 if max(counts) == 1 else None,
            )
            read = torch.cat([batch[row].tokens[start:stop] for row, start, stop in spans])
            predicted = torch.cat([batch[row].tokens[start + 1 : stop + 1] for row, start, stop in spans])
            positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
            of = torch.tensor([batch[row].document for row, _, _ in spans]).repeat_interleave(torch.tensor(counts))
            padding = (0, tokens - len(read))
            logits = model(F.pad(read, padding).to(device), F.pad(positions, padding).to(device), metadata)
            scores.add(logits[: len(read)], predicted.to(device), of.to(device))
            for row, _, stop in spans:
                done[row] = stop
    return scores.on_host()


_NAMES = (
    (r"^embedding\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^blocks\.", "model.layers."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.mlp\.(gate|up|down)\.", r".mlp.\1_proj."),
)


def hugging_face_names(model: Llama) -> dict[str, Tensor]:
    """The weights by their names in a checkpoint, which is what PagedLlama loads."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        for pattern, theirs in _NAMES:
            name = re.sub(pattern, theirs, name)
        tensors[name] = tensor
    return tensors


@dataclass(frozen=True)
class Variant:
    """A line of the table."""

    fp8_linear: bool = False
    kv_cache_dtype: str = "auto"
    passes: PassConfig | None = None  # eager if None


EAGER = "FP8, FP8 cache, eager"
UNFUSED, FUSED = "FP8, FP8 cache, compiled, unfused", "FP8, FP8 cache, compiled, all passes"
VARIANTS = {
    "bf16, bf16 cache, eager": Variant(),
    "bf16, FP8 cache, eager": Variant(False, "fp8_e4m3"),
    EAGER: Variant(True, "fp8_e4m3"),
    UNFUSED: Variant(True, "fp8_e4m3", PassConfig(level="O0")),
    FUSED: Variant(True, "fp8_e4m3", PassConfig(profitability="ignore")),
}
FIGURES = ("perplexity", "accuracy")
DENSE = "bf16, no cache, eager"


class Models:
    """Decoders with the weights of a trained model; scales are chosen once, on training text."""

    def __init__(self, trained: Llama, page_size: int, calibration: Tensor) -> None:
        self.tensors, self.config, self.page_size = hugging_face_names(trained), trained.config, page_size
        self.device = calibration.device
        self.calibrated = self._load("fp8_e4m3")
        settle_scales(self.calibrated, calibration, [set() for _ in range(trained.config.layers)])

    def make(self, variant: Variant) -> PagedLlama:
        if variant.fp8_linear:
            return self.calibrated
        model = self._load(variant.kv_cache_dtype)
        if variant.kv_cache_dtype != "auto":
            for ours, theirs in zip(model.attention_layers, self.calibrated.attention_layers, strict=True):
                ours.set_scales(q_scale=theirs._q_scale, k_scale=theirs._k_scale, v_scale=theirs._v_scale)
        process_weights_after_loading(model)
        return model

    def _load(self, kv_cache_dtype: str) -> PagedLlama:
        options = dict(kv_cache_dtype=kv_cache_dtype, block_size=self.page_size, device=self.device)
        model = PagedLlama(self.config, **options).eval().requires_grad_(False)
        load_hugging_face(model, self.tensors)
        return model


@dataclass(frozen=True)
class Row:
    """What was measured of a variant. fused: how often each fusion was applied, None if no passes ran."""

    name: str
    scores: Scores
    backend: str = ""
    fused: dict[str, int] | None = None
    graphs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """rows: the trained model without a cache, then `VARIANTS`. moved: `EAGER` with other scales."""

    rows: list[Row]
    moved: list[Scores]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def difference(self, row: Row) -> list[Estimate]:
        """Perplexity and accuracy less those of the compiled model that is not fused, paired."""
        other = self[UNFUSED].scores
        return bootstrap(lambda w: row.scores.figures(w) - other.figures(w), len(other.count))

    @property
    def rounding(self) -> list[float]:
        """By how much perplexity and accuracy change with the moved scales: root mean square."""
        eager = self[EAGER].scores
        once = torch.ones_like(eager.count)
        changes = torch.stack([scores.figures(once) - eager.figures(once) for scores in self.moved])
        return changes.square().mean(0).sqrt().tolist()

    def problems(self) -> list[str]:
        """Why it cannot be said that fused and unfused agree; empty if it can."""
        fused, unfused = self[FUSED], self[UNFUSED]
        found = []
        if not fused.fused:
            found.append("nothing was fused, so there was nothing to compare")
        if unfused.fused:
            found.append(f"the unfused model has fusions: {unfused.fused}")
        for what, estimate, rounding in zip(FIGURES, self.difference(fused), self.rounding, strict=True):
            error = math.hypot(estimate.error, rounding)
            if abs(estimate.value) > LIMIT * error:
                found.append(f"{what} changes by {estimate.value:+.3g} with the fusions, its error is {error:.3g}")
        return found


def evaluate(
    trained: Llama,
    setup: Setup,
    calibration: Tensor,
    blocks: Sequence[Block],
    documents: int,
    log: Callable[[str], None],
) -> Result:
    models = Models(trained, setup.page_size, calibration)
    dense = copy.deepcopy(trained).bfloat16()
    rows = [Row(DENSE, score_dense(dense, blocks, documents))]
    for name, variant in VARIANTS.items():
        begin = time.perf_counter()
        torch.compiler.reset()
        model, report = models.make(variant), Report()
        model.compile_layers(lambda part: part)
        if variant.passes is not None:
            model.compile_layers(
                functools.partial(
                    fusion_passes.compile, config=variant.passes, report=report, dynamic=True, fullgraph=True
                )
            )
        scores = score_paged(model, blocks, documents, setup.sequences)
        fused = None if variant.passes is None else dict(Counter(s.rule for s in report.sites if s.status == "fused"))
        backend = model.attention_layers[0].backend.name
        rows.append(Row(name, scores, backend, fused, len(report.graphs), time.perf_counter() - begin))
        log(f"{name}: {rows[-1].seconds:.0f} s, fused {fused}")
    moved = [
        score_paged(with_moved_scales(models.calibrated, seed), blocks, documents, setup.sequences)
        for seed in range(MOVES)
    ]
    return Result(rows, moved)


def with_moved_scales(model: PagedLlama, seed: int) -> PagedLlama:
    """A copy that runs eagerly, in which all scales of inputs, query, key and value are up to `MOVE` larger."""
    model = copy.deepcopy(model)
    model.compile_layers(lambda part: part)
    generator = torch.Generator().manual_seed(seed)

    def factor() -> float:
        return 1.0 + MOVE * torch.rand((), generator=generator).item()

    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.input_scale.mul_(factor())
    for attention in model.attention_layers:
        scales = {"q_scale": attention._q_scale, "k_scale": attention._k_scale, "v_scale": attention._v_scale}
        attention.set_scales(**{name: scale * factor() for name, scale in scales.items()})
    return model


def table(result: Result) -> str:
    """Markdown. Differences are to the row that is compiled and not fused, with their own errors."""
    lines = [
        "| weights, cache, how | fused | perplexity of a byte | right, % | perplexity − unfused | right − unfused |",
        "|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        perplexity, accuracy = bootstrap(row.scores.figures, len(row.scores.count))
        fused = "–" if row.fused is None else "**nothing**" if not row.fused and row.name == FUSED else "off"
        if row.fused:
            fused = ", ".join(f"{name} × {count}" for name, count in sorted(row.fused.items()))
        deltas = ["", ""]
        if row.name != UNFUSED:
            delta = result.difference(row)
            deltas = [delta[0].text(5, sign="+"), delta[1].text(4, 100.0, "+")]
        lines.append(
            f"| {row.name} | {fused} | {perplexity.text(4)} | {accuracy.text(2, 100.0)} | {' | '.join(deltas)} |"
        )
    return "\n".join(lines)


def record(result: Result, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    entries = []
    for row in result.rows:
        entry = {"name": row.name, "backend": row.backend, "fused": row.fused, "graphs": row.graphs}
        entry["seconds"] = round(row.seconds, 1)
        for name, estimate in zip(FIGURES, bootstrap(row.scores.figures, len(row.scores.count)), strict=True):
            entry[name] = asdict(estimate)
        entry["less_unfused"] = dict(zip(FIGURES, map(asdict, result.difference(row)), strict=True))
        entries.append(entry)
    rounding = dict(zip(FIGURES, result.rounding, strict=True))
    return {**about, "rows": entries, "rounding": rounding, "problems": result.problems()}


BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"


def between_markers(page: str, text: str) -> str:
    """The page with text in place of what is between the markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with {END} after it")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and little text")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of the training, to see whether all of it runs")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write the figures as JSON into DIR")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/accuracy.md")
    options = parser.parse_args(argv)
    name = "quick" if options.quick else "full"
    setup, device = SETUPS[name], torch.device(options.device)
    if options.steps:
        setup = dataclasses.replace(setup, steps=options.steps)

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    training, held_out, dropped = split(corpus())
    text = training_text(training, setup.text)
    chosen = blocks(held_out, setup.context, setup.blocks)
    documents = 1 + max(block.document for block in chosen)
    log(f"{len(training)} documents to train on, {len(held_out)} held out, {dropped} dropped as repetitions")
    begin = time.perf_counter()
    trained = train(setup, text, device, log=log)
    seconds = time.perf_counter() - begin
    calibration = torch.tensor(list(stretches(text, setup.calibration)), device=device)
    # Code from a cache may not say what was fused.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        result = evaluate(trained, setup, calibration, chosen, documents, log)
    about = versions(device) | {
        "setup": name,
        **asdict(setup),
        "seed": 0,
        "parameters": sum(parameter.numel() for parameter in trained.parameters()),
        "training_documents": len(training),
        "training_bytes": len(text),
        "training_sha256": hashlib.sha256(text).hexdigest(),
        "training_seconds": round(seconds, 1),
        "held_out_documents": len(held_out),
        "dropped_documents": dropped,
        "scored_documents": documents,
        "scored_bytes": int(result.rows[0].scores.count.sum()),
        "scored_sha256": hashlib.sha256(SEPARATOR.join(bytes(block.tokens.tolist()) for block in chosen)).hexdigest(),
        "limit": LIMIT,
    }
    page = f"{summary(about)}\n\n{table(result)}\n\n{verdict(result)}"
    print(page)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        path = options.record / f"accuracy-{name}.json"
        path.write_text(json.dumps(record(result, about), indent=1) + "\n")
    if options.write_docs:
        DOCS.write_text(between_markers(DOCS.read_text(), page))
    return 1 if result.problems() else 0


def verdict(result: Result) -> str:
    """Whether fused and unfused agree, and against which errors."""
    found = result.problems()
    perplexity, accuracy = result.rounding
    return (
        f"Scales that are up to {MOVE:.1%} larger change the perplexity by {perplexity:.5f} and what is right by "
        f"{accuracy * 100:.4f} points (root mean square of {len(result.moved)} draws). Against that and the errors "
        f"above, fused and unfused {'do not agree: ' + '; '.join(found) if found else 'agree'}."
    )


def summary(about: Mapping[str, Any]) -> str:
    """A sentence on what the table is of."""
    return (
        f"{about['parameters'] / 1e6:.1f} million parameters, trained for {about['steps']} steps on "
        f"{about['training_bytes'] / 1e6:.1f} MB in {about['training_documents']} files; "
        f"{about['scored_bytes']} held-out bytes of {about['scored_documents']} files. {about['card']}, torch "
        f"{about['torch']}, Triton {about['triton']}, Python {about['python']}, {about['date']}."
    )


def versions(device: torch.device) -> dict[str, Any]:
    return {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
