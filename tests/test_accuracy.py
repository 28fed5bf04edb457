"""The accuracy benchmark: how text is split, how steps are made, what is counted, and when it fails."""

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch

from fusion_passes.models.llama import Config, Llama
from fusion_passes.models.paged_llama import PagedLlama, load_hugging_face, randomize

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "accuracy.py"
spec = importlib.util.spec_from_file_location("accuracy", SCRIPT)
accuracy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(accuracy)
Document = accuracy.Document


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("decimal.py", "decimal"),
        ("_pydecimal.py", "decimal"),
        ("test/test_decimal.py", "decimal"),
        ("json/decoder.py", "json"),
        ("test/test_json/test_decode.py", "json"),
        ("_py_abc.py", "abc"),
        ("lib2to3/tests/test_fixers.py", "lib2to"),
        ("encodings/cp1252.py", "encodings"),
        ("test/support/testcase.py", "support"),
        ("test/__init__.py", "init"),
        ("this.py", "this"),
        ("doctest.py", "doctest"),
        ("__future__.py", "future"),
    ],
)
def test_family(path, family):
    assert accuracy.family(path) == family


def documents(count, lines=40):
    return [
        Document(
            f"{i}/{j}",
            f"family {i}",
            "\n".join(f"document {i}.{j} has its own line {k}" for k in range(lines)).encode(),
        )
        for i in range(count)
        for j in range(2)
    ]


def test_split_keeps_families_together_and_is_the_same_for_any_order():
    all_documents = documents(50)
    train, held_out, dropped = accuracy.split(all_documents, 0.3)
    assert not {d.family for d in train} & {d.family for d in held_out}
    assert sorted(train + held_out, key=all_documents.index) == all_documents
    assert dropped == 0
    assert 5 < len(held_out) / 2 < 25
    again = accuracy.split(all_documents[::-1], 0.3)
    assert (again[0][::-1], again[1][::-1]) == (train, held_out)


def test_split_drops_what_the_training_text_has():
    train, held_out, _ = accuracy.split(documents(50), 0.3)
    known, new = train[0].text.splitlines(), held_out[0].text.splitlines()

    def dropped(lines):
        copy = dataclasses.replace(held_out[0], path="copy", text=b"\n".join(lines))
        _, kept, count = accuracy.split([*train, copy], 0.3)
        return count == 1 and not kept

    assert dropped(known)
    assert dropped([line + b"  " for line in known])
    assert dropped(known[:11] + new[:29])
    assert not dropped(known[:7] + new[:33])
    assert dropped([b"too", b"short"])  # to say anything


def test_the_corpus_of_this_environment():
    corpus = accuracy.corpus()
    by_path = {document.path: document for document in corpus}
    assert [*by_path] == sorted(by_path)
    assert by_path["lib/json/decoder.py"].text == Path(json.decoder.__file__).read_bytes()
    assert any(path.startswith("packages/torch/") for path in by_path)
    assert not any("site-packages" in path for path in by_path)
    assert max(len(document.text) for document in corpus) == accuracy.LARGEST
    train, held_out, _ = accuracy.split(corpus)
    assert not {d.family for d in train} & {d.family for d in held_out}
    assert 0.05 < sum(len(d.text) for d in held_out) / sum(len(d.text) for d in corpus) < 0.4


def test_blocks_take_the_families_in_turns():
    texts = [("a", "x", 250), ("b", "x", 90), ("c", "y", 170), ("d", "z", 40), ("e", "z", 7)]
    held_out = [Document(path, family, bytes(range(size))) for path, family, size in texts]
    chosen = accuracy.blocks(held_out, 64, 5)
    # x and y have a second block, z does not: of d there is only one, and e is too short.
    assert len(chosen) == 5
    assert sorted({block.document for block in chosen}) == list(range(len({block.document for block in chosen})))
    firsts = sorted(block.tokens[0].item() for block in chosen)
    assert firsts[:3] == [0, 0, 0]
    for block in chosen:
        assert len(block.tokens) <= 65
        assert block.tokens.diff().eq(1).all()
    everything = accuracy.blocks(held_out, 64, 1000)
    assert [len(b.tokens) - 1 for b in everything if b.document == 0] == [64, 64, 64, 57]
    again = accuracy.blocks(held_out[::-1], 64, 1000)
    assert [(b.document, b.tokens.tolist()) for b in again] == [(b.document, b.tokens.tolist()) for b in everything]


def test_stretches_are_spread():
    text = bytes(range(100))
    assert accuracy.stretches(text, 4, 10) == b"".join(text[i : i + 10] for i in (0, 22, 45, 67))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 1024])
def test_chunks(row, tokens):
    parts = accuracy.chunks(tokens, row)
    assert sum(parts) == tokens
    assert min(parts) > 0
    if tokens == 1024:
        long = [i for i, part in enumerate(parts) if part > 1]
        assert long == ([0, 1, 2], [0, 33])[row]
        assert parts.count(1) == 64


def test_perplexity_of_known_distributions():
    scores = accuracy.Scores.zeros(2)
    # Document 0: uniform over four of eight tokens. Document 1: certain, once right and once wrong by ln 50.
    uniform = torch.tensor([0.0] * 4 + [-math.inf] * 4)
    scores.add(uniform.expand(3, 8), torch.tensor([0, 1, 3]), torch.tensor([0, 0, 0]))
    p = torch.tensor([0.5, 0.02, *[0.08] * 6]).log()
    scores.add(p.expand(2, 8), torch.tensor([0, 1]), torch.tensor([1, 1]))
    weights = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 1]]).double()
    expected = [4.0, math.sqrt(2 * 50), (4**3 * 100) ** (1 / 5), (4**6 * 100) ** (1 / 8)]
    torch.testing.assert_close(scores.figures(weights)[:, 0].tolist(), expected, rtol=1e-6, atol=0.0)
    assert scores.figures(weights)[:, 1].tolist() == [1 / 3, 1 / 2, 2 / 5, 3 / 8]
    assert scores.on_host().loss.tolist() == scores.loss.tolist()
    scores.add(uniform[None], torch.tensor([5]), torch.tensor([0]))
    with pytest.raises(ValueError, match="not finite"):
        scores.on_host()


def test_bootstrap_of_a_mean():
    x = torch.randn(400, dtype=torch.float64) * 3.0 + 7.0
    mean, twice = accuracy.bootstrap(lambda w: torch.stack([w @ x / w.sum(-1), 2 * (w @ x) / w.sum(-1)], -1), 400)
    assert mean.value == pytest.approx(x.mean().item())
    assert mean.error == pytest.approx(x.std().item() / 20.0, rel=0.08)
    assert (twice.value, twice.error) == pytest.approx((2 * mean.value, 2 * mean.error))


def row(name, loss, fused=None, count=100.0, hits=40.0):
    loss = torch.as_tensor(loss, dtype=torch.float64)
    full = torch.full_like(loss, count)
    return accuracy.Row(name, accuracy.Scores(loss * full, full * hits / 100.0, full), "triton", fused, 2)


def result(shift, noise, fused, rounding=0.0):
    base = torch.rand(60) + 1.0
    rows = [
        row(accuracy.EAGER, base),
        row(accuracy.UNFUSED, base, {}),
        row(accuracy.FUSED, base + shift + noise * torch.randn(60), fused),
    ]
    return accuracy.Result(rows, [row("", base + x).scores for x in (-rounding, rounding)])


def test_differences_are_paired():
    found = result(0.001, 0.0001, {"attention_quant": 2})
    fused = found[accuracy.FUSED]
    (single, _), (paired, _) = accuracy.bootstrap(fused.scores.figures, 60), found.difference(fused)
    assert paired.error < single.error / 100
    assert paired.value == pytest.approx(0.001 * single.value, rel=0.1)


def test_rounding_is_the_deviation_of_moved_scales():
    found = result(0.0, 0.0, {}, rounding=0.01)
    perplexity = found[accuracy.EAGER].scores.figures(torch.ones(60).double())[0].item()
    assert found.rounding == pytest.approx([0.01 * perplexity, 0.0], rel=0.01)


@pytest.mark.parametrize(
    ("shift", "rounding", "fused", "message"),
    [
        (0.0, 0.0, {"attention_quant": 2}, None),
        (0.001, 0.0, {"attention_quant": 2}, r"perplexity changes by \+0.00"),
        (-0.001, 0.0, {"attention_quant": 2}, "perplexity changes by -0.00"),
        (0.001, 0.0006, {"attention_quant": 2}, None),
        (0.001, 0.0002, {"attention_quant": 2}, r"perplexity changes by \+0.00"),
        (0.0, 0.0, {}, "nothing was fused"),
    ],
)
def test_when_fused_and_unfused_agree(shift, rounding, fused, message):
    found = result(shift, 0.001, fused, rounding)
    problems = found.problems()
    assert bool(problems) == bool(message)
    if message:
        assert re.search(message, problems[0])
        assert problems[0] in accuracy.verdict(found)


def test_accuracy_must_agree_too():
    found = result(0.0, 0.001, {"attention_quant": 2})
    found[accuracy.FUSED].scores.hits[:30] += 1.0
    assert "accuracy changes" in found.problems()[0]


def test_table_says_where_nothing_was_fused():
    lines = accuracy.table(result(0.0, 0.001, {})).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["–", "off", "**nothing**"]
    lines = accuracy.table(result(0.0, 0.001, {"b": 2, "a": 1})).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["–", "off", "a × 1, b × 2"]
    assert {line.count("|") for line in lines} == {7}


def test_between_markers():
    page = f"before\n{accuracy.BEGIN}\nold\n{accuracy.END}\nafter\n"
    assert accuracy.between_markers(page, "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="begin"):
        accuracy.between_markers("no markers", "new")


def test_the_page_has_the_markers():
    accuracy.between_markers(accuracy.DOCS.read_text(), "")


CONFIG = Config(32, 48, layers=2, heads=2, kv_heads=1, head_dim=16, vocab=256, context=96)


@pytest.fixture
def trained():
    model = Llama(CONFIG).eval().requires_grad_(False)
    for block in model.blocks:  # so that attention matters
        block.attention.q.weight.mul_(8.0)
        block.attention.v.weight.mul_(8.0)
    model.head.weight.mul_(8.0)
    return model


def text_blocks():
    text = torch.randint(256, (400,))
    return [accuracy.Block(i % 3, text[40 * i :][:size]) for i, size in enumerate((97, 60, 34, 97, 81))]


def paged(trained):
    model = PagedLlama(CONFIG, kv_cache_dtype="auto", block_size=16, dtype=torch.float32).requires_grad_(False)
    load_hugging_face(model, accuracy.hugging_face_names(trained))
    return model


def test_steps_through_the_cache_score_what_one_pass_does(trained):
    blocks = text_blocks()
    dense, stepped = accuracy.score_dense(trained, blocks, 3), accuracy.score_paged(paged(trained), blocks, 3, 4)
    assert stepped.count.tolist() == [96 + 96, 59 + 80, 33]
    for expected, got in zip(dataclasses.astuple(dense), dataclasses.astuple(stepped), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=0.0)


def test_the_cache_is_read(trained, monkeypatch):
    blocks, forward = text_blocks(), PagedLlama.forward
    expected = accuracy.score_paged(paged(trained), blocks, 3, 4)

    def forgetful(model, *args):
        for layer in model.attention_layers:
            layer.kv_cache.value.zero_()
        return forward(model, *args)

    monkeypatch.setattr(PagedLlama, "forward", forgetful)
    forgot = accuracy.score_paged(paged(trained), blocks, 3, 4)
    assert ((forgot.loss - expected.loss).abs() > 0.01 * expected.loss).all()


def test_moved_scales():
    model = PagedLlama(CONFIG, fp8=True, dtype=torch.float32).requires_grad_(False)
    randomize(model)
    before = {name: scale.item() for name, scale in model.named_buffers() if name.endswith("_scale")}
    moved = accuracy.with_moved_scales(model, 1)
    factors = {name: moved.get_buffer(name).item() / value for name, value in before.items()}
    names = ("input_scale", "_q_scale", "_k_scale", "_v_scale")
    changed = [factor for name, factor in factors.items() if name.endswith(names)]
    assert len({*changed}) == len(changed) == 2 * 7
    assert all(1.0 <= factor <= 1.0 + accuracy.MOVE for factor in changed)
    assert all(factor == 1.0 for name, factor in factors.items() if not name.endswith(names))
    assert before == {name: model.get_buffer(name).item() for name in before}


def test_training_learns():
    text = b"abcdefgh" * 200
    setup = dataclasses.replace(
        accuracy.SETUPS["quick"], config=CONFIG, context=32, batch=4, steps=40, rate=1e-2, calibration=2
    )
    seen = []
    model = accuracy.train(setup, text, torch.device("cpu"), log=seen.append)
    assert len(seen) == 11
    scores = accuracy.score_dense(model, [accuracy.Block(0, torch.tensor(list(text[3:35])))], 1)
    assert scores.figures(torch.ones(1).double())[0] < 10.0


@pytest.mark.slow
def test_a_quick_run(tmp_path, monkeypatch, capsys):
    quick = dataclasses.replace(accuracy.SETUPS["quick"], steps=40, blocks=9)
    monkeypatch.setitem(accuracy.SETUPS, "quick", quick)
    page = tmp_path / "accuracy.md"
    page.write_text(f"{accuracy.BEGIN}\n{accuracy.END}\n")
    monkeypatch.setattr(accuracy, "DOCS", page)
    status = accuracy.main(["--quick", "--device", "cpu", "--record", str(tmp_path), "--write-docs"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "fused and unfused agree." in out
    recorded = json.loads((tmp_path / "accuracy-quick.json").read_text())
    assert recorded["problems"] == []
    rows = {row["name"]: row for row in recorded["rows"]}
    assert [*rows] == [accuracy.DENSE, *accuracy.VARIANTS]
    assert rows[accuracy.UNFUSED]["fused"] == {}
    assert rows[accuracy.FUSED]["fused"]["attention_quant"] == 2  # the graph of single tokens and the other
    assert all(10.0 < row["perplexity"]["value"] < 256.0 for row in rows.values())
    assert page.read_text().count("\n| ") == 1 + len(rows)
