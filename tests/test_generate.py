"""The generating example: its scheduler, its loop over a model, and the whole thing on random weights."""

import dataclasses
import importlib.util
import random
from pathlib import Path

import pytest
import torch

from fusion_passes.models.llama import PRESETS
from fusion_passes.models.paged_llama import PagedLlama, randomize
from fusion_passes.nn import AttentionMetadata

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = 4


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)  # generate imports serving from beside it
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return load("generate")


@pytest.fixture(scope="module")
def serving():
    return load("serving")


def check(scheduler, batch):
    """What must hold while a batch runs."""
    running = scheduler.running
    held = [page for request in running for page in request.pages]
    assert sorted(held + scheduler.pages.free) == list(range(scheduler.pages.count))  # each page once
    assert all(not request.pages and not request.cached for request in scheduler.waiting)
    assert len(running) <= scheduler.max_seqs
    assert sum(work.count for work in batch) <= scheduler.budget
    assert len({id(work.request) for work in batch}) == len(batch)
    for work in batch:
        assert work.request in running
        assert 1 <= work.count <= work.request.length - work.request.cached
        assert work.request.cached + work.count <= len(work.request.pages) * scheduler.page_size
    # Who has had a token and is running gets the next one in every step.
    served = [work.request for work in batch]
    assert all(request in served for request in running if request.cached == request.length - 1)


def next_token(tokens):
    return hash(tuple(tokens)) % 50


@pytest.mark.parametrize("seed", range(60))
def test_random_loads_finish_as_if_alone(serving, seed):
    rng = random.Random(seed)
    pages, max_seqs = rng.randint(6, 30), rng.randint(1, 6)
    scheduler = serving.Scheduler(
        pages, PAGE, max_seqs=max_seqs, budget=rng.randint(max_seqs, 24), context=pages * PAGE, stop=[7]
    )
    requests = []
    for _ in range(12):
        length = rng.randint(1, pages * PAGE - 1)
        new = rng.randint(1, pages * PAGE - length)
        requests.append(serving.Request([rng.randrange(50) for _ in range(length)], new))
    pending = list(requests)
    for _ in range(5000):
        if pending and (rng.random() < 0.3 or not scheduler.busy):
            scheduler.add(pending.pop(0))
        if not pending and not scheduler.busy:
            break
        batch = scheduler.next_step()
        assert batch
        check(scheduler, batch)
        known = [work.request.tokens(0, work.request.cached + work.count) for work in batch]
        scheduler.finish_step(batch, [next_token(tokens) for tokens in known])
    for request in requests:
        expected = []
        while len(expected) < request.new_tokens and expected[-1:] != [7]:
            expected.append(next_token(request.prompt + expected))
        assert request.finished
        assert request.output == expected
    assert sorted(scheduler.pages.free) == list(range(pages))


def test_random_loads_preempt_and_chunk(serving):
    """The loads above would be no test of preemption if there were none."""
    scheduler = serving.Scheduler(4, PAGE, max_seqs=2, budget=3, context=16)
    first, second = serving.Request([1] * 5, 8), serving.Request([2] * 5, 8)
    scheduler.add(first)
    scheduler.add(second)
    chunks = []
    while scheduler.busy:
        batch = scheduler.next_step()
        chunks.append([(work.request is first, work.count) for work in batch])
        scheduler.finish_step(batch, [3] * len(batch))
    assert chunks[:4] == [[(True, 3)], [(True, 2), (False, 1)], [(True, 1), (False, 2)], [(True, 1), (False, 2)]]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert first.output == second.output == [3] * 8


@pytest.mark.parametrize(
    ("prompt", "new", "sentence"),
    [
        (0, 1, "at least one token"),
        (3, 0, "at least one token"),
        (40, 30, "exceed the context of 64"),
        (20, 13, "needs 9 pages of 4, the cache has 8"),
    ],
)
def test_requests_that_can_never_be_served(serving, prompt, new, sentence):
    scheduler = serving.Scheduler(8, PAGE, max_seqs=2, budget=8, context=64)
    with pytest.raises(ValueError, match=sentence):
        scheduler.add(serving.Request([1] * prompt, new))
    assert not scheduler.busy


def test_budget_must_serve_all(serving):
    with pytest.raises(ValueError, match="a budget of 3 tokens a step does not serve 4 requests"):
        serving.Scheduler(8, PAGE, max_seqs=4, budget=3, context=64)


def test_batches_of_a_model_are_greedy_generation(serving):
    """fp32 throughout, so that the order of sums does not decide between two tokens."""
    config = dataclasses.replace(PRESETS["tiny"], hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)
    config = dataclasses.replace(config, context=64)
    model = PagedLlama(config, kv_cache_dtype="auto", dtype=torch.float32, block_size=PAGE).eval()
    prompts = [torch.randint(256, (length,)).tolist() for length in (1, 11, 22, 6)]

    model.allocate_cache(16)
    table = torch.arange(16, dtype=torch.int32)[None]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(8):
            metadata = AttentionMetadata.from_lengths([len(tokens)], [len(tokens)], table, PAGE)
            with torch.no_grad():
                logits = model(torch.tensor(tokens), torch.arange(len(tokens)), metadata)
            tokens.append(logits[-1].argmax().item())
        expected.append(tokens[len(prompt) :])

    pages = 8  # too few for all of them
    model.allocate_cache(pages)
    scheduler = serving.Scheduler(pages, PAGE, max_seqs=3, budget=16, context=52)
    runner = serving.Runner(model, max_seqs=3, budget=16, context=52, page_size=PAGE, cuda_graphs=False)
    for size in runner.sizes():
        runner.warm_up(size)
    requests = [serving.Request(prompt, 8) for prompt in prompts]
    kinds = set()
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        batch = scheduler.next_step()
        kinds.add(runner.padded(batch))
        scheduler.finish_step(batch, runner.run(batch))
    assert [request.output for request in requests] == expected
    assert any(request.preemptions for request in requests)
    assert {kind[2] for kind in kinds} == {True, False}


def generated(serving, model, **options):
    """What a few requests get, with pages for not all of them at once."""
    model.allocate_cache(12)
    scheduler = serving.Scheduler(12, 16, max_seqs=5, budget=64, context=96)
    runner = serving.Runner(model, max_seqs=5, budget=64, context=96, page_size=16, **options)
    for size in runner.sizes():
        runner.warm_up(size)
    requests = [serving.Request([i * 31 % 256 for i in range(length)], 20) for length in (40, 7, 61, 1, 33, 70)]
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        batch = scheduler.next_step()
        scheduler.finish_step(batch, runner.run(batch))
    return [request.output for request in requests]


@pytest.mark.gpu
def test_cuda_graphs_say_what_the_model_says(serving):
    config = dataclasses.replace(PRESETS["tiny"], context=96)
    model = PagedLlama(config, fp8=True, block_size=16, device="cuda").eval()
    randomize(model)
    expected = generated(serving, model, cuda_graphs=False)
    assert generated(serving, model, cuda_graphs=True) == expected
    assert len({tuple(output) for output in expected}) == 6


def test_sizes_hold_every_batch(serving):
    model = PagedLlama(dataclasses.replace(PRESETS["tiny"], layers=1, context=16), block_size=16)
    for max_seqs, budget in ((1, 1), (2, 3), (5, 64), (16, 512), (7, 100)):
        runner = serving.Runner(model, max_seqs=max_seqs, budget=budget, context=16, page_size=16, cuda_graphs=False)
        request = serving.Request([1] * budget, 1)
        for seqs in range(1, max_seqs + 1):
            assert runner.padded([serving.Work(request, 1)] * seqs) in runner.sizes()
        for tokens in range(1, budget + 1):
            size = runner.padded([serving.Work(request, tokens)])
            assert size in runner.sizes()
            assert size[1] >= tokens


def test_generates_without_arguments(generate, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    generate.main(["--eager", "--requests", "3", "--new-tokens", "5"])
    out = capsys.readouterr().out
    assert "15 tokens for 3 requests" in out
    assert "sizes of steps run once in" in out
    assert "steps with prompts" in out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--prompt", "x" * 300], "exceed the context of 256"),
        (["--pages", "1", "--prompt", "x" * 100], "needs 2 pages of 64, the cache has 1"),
    ],
)
def test_errors_say_what_to_do(generate, argv, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ValueError, OSError), match=sentence):
        generate.main(["--eager", *argv])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "/nowhere"], "--model /nowhere is not a folder"),
        (["--pages", "0"], "--pages must be at least 1"),
        (["--budget", "2", "--batch", "3"], "each request needs a token a step"),
        (["--device", "cuda"], "--device cuda needs a CUDA card, and torch sees none here"),
    ],
)
def test_arguments_without_a_meaning(generate, argv, sentence, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        generate.arguments(argv)
    assert sentence in capsys.readouterr().err


def test_compiled_with_the_passes(generate, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    generate.main(["--requests", "2", "--new-tokens", "3", "--budget", "8", "--profitability", "ignore"])
    out = capsys.readouterr().out
    assert "6 tokens for 2 requests" in out
    assert "graph 0:" in out  # the report


@pytest.fixture
def saved(tmp_path):
    """A model and a tokenizer as transformers and tokenizers save them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, head_dim=64, eos_token_id=299, **sizes)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([(EXAMPLES / "calibration_text.txt").read_text()], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_generates_from_a_saved_model(generate, saved, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv = ["--eager", "--model", str(saved), "--prompt", "Four score and seven", "--new-tokens", "4"]
    generate.main(argv)
    out = capsys.readouterr().out
    assert "' Four score and seven' -> '" in out
    assert "4 tokens for 1 request in" in out
    assert "weights of 4 products quantized to FP8 at load; scales chosen on the calibration text: the input of" in out
    (saved / "tokenizer.json").unlink()
    generate.main(argv)
    out = capsys.readouterr().out
    assert "the model gets bytes as tokens" in out
    assert "'Four score and seven' -> '" in out
    settings = saved / "config.json"
    settings.write_text(settings.read_text().replace('"vocab_size": 300', '"vocab_size": 200'))
    with pytest.raises(ValueError, match=r"bytes as tokens need a vocabulary of 256, the model in .* has 200"):
        generate.main(argv)


def test_a_tokenizer_of_another_model_is_an_error(generate):
    with pytest.raises(ValueError, match="gives token 300, the model's vocabulary is 300: it is the tokenizer of"):
        generate.check_vocabulary(Path("model"), None, [2, 300], 300)
    generate.check_vocabulary(Path("model"), generate.Bytes(), [2, 255], 256)
