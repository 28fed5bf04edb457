"""When idioms are read: each kind when a rule asks for it, on the graph as it is then, in time that grows linearly."""

import dataclasses
import sys
from collections import Counter

import pytest
import torch

import fusion_passes.idioms
from fusion_passes import PassConfig, PostGradPassManager, Report
from fusion_passes.graph.rewrite import Insertion
from fusion_passes.idioms import Idioms, recognize
from fusion_passes.idioms.quantize import Quantize
from fusion_passes.idioms.reading import read_all
from fusion_passes.idioms.rope import Rope
from fusion_passes.models.llama import PRESETS
from fusion_passes.models.paged_llama import PagedLlama
from fusion_passes.nn import AttentionMetadata
from fusion_passes.testing import capture_traced, print_graph
from fusion_passes.testing.fuzz import campaign
from tests.fusions.cases import FIRST, each
from tests.fusions.without_code import FUSE, WithoutCode


def decoder(layers):
    """The graph of a decoder with a paged FP8 cache, in which two rules apply in each layer."""
    config = dataclasses.replace(PRESETS["tiny"], layers=layers, context=64)
    model = PagedLlama(config, fp8=True, block_size=16).eval()
    model.allocate_cache(pages=4)
    table = torch.arange(4).reshape(2, 2).int()
    metadata = AttentionMetadata.from_lengths([1, 1], [20, 31], table, 16, max_query_len=1)
    return capture_traced(model, torch.tensor([1, 2]), torch.tensor([19, 30]), metadata)


@pytest.fixture
def read(monkeypatch):
    """The kinds that were read, in order."""
    kinds = []
    for kind, reader in fusion_passes.idioms.READERS.items():
        monkeypatch.setitem(
            fusion_passes.idioms.READERS, kind, lambda idioms, k=kind, r=reader: kinds.append(k) or r(idioms)
        )
    return kinds


def test_after_a_rule_only_what_the_next_ones_ask_for_is_read(read):
    report = Report()
    PostGradPassManager(PassConfig(profitability="ignore", rms_norm_quant="off"), report)(decoder(1))
    assert report.count(rule="rope_quant_kv_write") == report.count(rule="attention_quant") == 1
    first, again = read[: len(fusion_passes.idioms.READERS)], read[len(fusion_passes.idioms.READERS) :]
    assert {*first} == {*fusion_passes.idioms.READERS}
    assert sorted(kind.__name__ for kind in again) == ["Attention", "GroupQuantize", "PagedAttention", "Quantize"]


def test_without_a_rule_that_applies_nothing_is_read_again(read):
    PostGradPassManager(PassConfig(), Report())(decoder(1))
    assert len(read) == len(fusion_passes.idioms.READERS)


def test_without_rules_nothing_is_read(read):
    PostGradPassManager(PassConfig(level="O0"), Report())(decoder(1))
    assert read == []


def test_what_is_read_on_demand_is_what_is_read_at_once():
    graph = decoder(2)
    all_read, on_demand = recognize(graph), Idioms(graph, fusion_passes.idioms.READERS)
    for kind in reversed(fusion_passes.idioms.READERS):
        found = list(on_demand.of(kind))
        assert [idiom.output for idiom in found] == [idiom.output for idiom in all_read.of(kind)]
        assert all(on_demand.at(idiom.output, kind) is idiom for idiom in found)
    assert [idiom.output for idiom in on_demand] == [idiom.output for idiom in all_read]
    assert len(list(on_demand.of(Rope))) == 4


@pytest.fixture
def watched(monkeypatch):
    """Idioms are read in no other state of the graph than that in which they were made; counts the kinds."""
    states, checked = {}, []
    create, items = Idioms.__init__, Idioms.items

    def created(self, graph, readers):
        create(self, graph, readers)
        states[self] = print_graph(graph)

    def read(self, kind):
        if kind not in self._items:
            assert print_graph(self.graph) == states[self], f"{kind.__name__} is read in a graph that has changed"
            checked.append(kind)
        return items(self, kind)

    monkeypatch.setattr(Idioms, "__init__", created)
    monkeypatch.setattr(Idioms, "items", read)
    return checked


@each(lambda case: case in FIRST)
@torch.no_grad()
def test_the_graph_does_not_change_between_two_questions(rule, case, watched):
    run = WithoutCode(case.fn)
    run(*case.inputs(7, "cpu"))
    assert run.report.count(rule=rule) == 1
    assert watched


def test_nor_does_it_in_programs_of_the_fuzzer(watched):
    programs = [program for program in campaign.draw(3, 30) if not program.writes]
    assert sum((campaign.check(program) for program in programs), start=Counter()).total()
    assert len(watched) > len(programs) * len(fusion_passes.idioms.READERS), "some kinds were read again"


def test_the_watch_notices_a_change(watched):
    graph = decoder(1)
    idioms = Idioms(graph, fusion_passes.idioms.READERS)
    (node, *_) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    Insertion(graph, [node], {}).call(torch.ops.aten.neg.default, node.all_input_nodes[0])
    with pytest.raises(AssertionError, match="that has changed"):
        idioms.items(Quantize)


def calls_of(graph):
    """How many Python functions the passes call."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    manager = PostGradPassManager(FUSE, Report())
    sys.setprofile(profile)
    try:
        manager(graph)
    finally:
        sys.setprofile(None)
    return count


def test_work_grows_linearly_with_the_layers():
    """Counted, so that a busy machine does not matter."""
    calls_of(decoder(1))  # imports, caches
    few, many = (calls_of(decoder(layers)) for layers in (4, 16))
    assert many < 4.2 * few, (few, many)


def test_a_fault_of_a_reader_is_logged_with_its_traceback(caplog):
    def broken(node):
        raise KeyError(node.name)

    graph = decoder(1)
    with caplog.at_level("WARNING", "fusion_passes"):
        found = list(read_all(graph, "attention", broken))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [(item.node, item.reason) for item in found] == [(n, f"could not be read: '{n.name}'") for n in calls]
    assert f"the reader of attention failed at {calls[0].name}" in caplog.text
    assert "in broken" in caplog.text, "where it failed"
