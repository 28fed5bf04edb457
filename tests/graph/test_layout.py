"""Layouts: into the normal form and back, and which dimension counts heads."""

import itertools

import pytest
import torch
from torch.fx import Graph
from torch.fx.node import map_arg

from fusion_passes.graph.layout import Layout, Table, copied_into, found_or_added, head_dimension, lookups
from fusion_passes.testing import capture

HEADS, SIZE = 3, 8


class Program:
    """A graph whose nodes have real tensors for values."""

    def __init__(self):
        self.graph = Graph()

    def node(self, tensor):
        node = self.graph.placeholder("x")
        node.meta["val"] = tensor
        return node

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*given, **named)
        return node


@pytest.mark.parametrize(
    ("shape", "head", "order"),
    [
        ((2, HEADS, 5, SIZE), 1, (0, 2, 1, 3)),
        ((2, 5, HEADS, SIZE), 2, (0, 1, 2, 3)),
        ((HEADS, 10, SIZE), 0, (1, 0, 2)),
        ((10, HEADS, SIZE), 1, (0, 1, 2)),
    ],
)
def test_into_the_normal_form_and_back(shape, head, order):
    program, x = Program(), torch.randn(shape)
    layout = Layout(program.node(x), head)
    assert (layout.heads, layout.head_dim, layout.count) == (HEADS, SIZE, 10)
    normal = layout.token_major(program.call)
    assert torch.equal(normal.meta["val"], x.permute(order).reshape(10, HEADS, SIZE))
    assert torch.equal(layout.restored(normal, program.call).meta["val"], x)
    like = layout.like(x)
    assert like.shape == x.shape
    assert like.permute(order).is_contiguous()


def path_of(fn, *shape, dynamic=True):
    """The graph's only input and the nodes that lead from it to the result."""
    x = torch.randn(*shape)
    (graph,) = capture(fn, x, mark_dynamic=[(x, 0)] if dynamic else [])
    nodes = list(graph.nodes)
    path = [node for node in nodes if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor)]
    (x_node,) = (node for node in nodes if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor))
    return x_node, path


@pytest.mark.parametrize(
    ("fn", "shape", "head", "leads"),
    [
        (lambda x: x.transpose(1, 2).reshape(-1, HEADS, SIZE), (2, HEADS, 5, SIZE), 1, True),
        (lambda x: x.reshape(-1, HEADS, SIZE), (2, HEADS, 5, SIZE), 1, False),
        (lambda x: x.permute(2, 0, 1, 3).reshape(-1, HEADS, SIZE), (2, HEADS, 5, SIZE), 1, False),
        (lambda x: x.flatten(0, 1), (2, 5, HEADS, SIZE), 2, True),
        (lambda x: x.flatten(0, 1), (2, HEADS, HEADS, SIZE), 2, True),
        (lambda x: x.flatten(0, 1), (2, HEADS, HEADS, SIZE), 1, False),
        (lambda x: x.transpose(0, 1), (HEADS, 10, SIZE), 0, True),
    ],
)
def test_where_views_lead(fn, shape, head, leads):
    x, path = path_of(fn, *shape)
    assert Layout(x, head).leads_to(path, path[-1].meta["val"]) == leads


@pytest.mark.parametrize(
    ("rows", "head"), [((2, 1, 5), 1), ((1, 1, 5), 1), ((1, 5), 1), ((2, HEADS, 5), None), ((2, HEADS, 1), 2)]
)
def test_heads_are_where_tables_have_one_row(rows, head):
    x, path = path_of(lambda x: x.transpose(1, 2).reshape(-1, HEADS, SIZE), 2, HEADS, 5, SIZE, dynamic=False)
    table = Table(Program().node(torch.randn(*rows, SIZE)), 0, SIZE)
    assert head_dimension(x, (table,), path, path[-1].meta["val"]) == head


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_copied_into_an_order_of_the_dimensions(order):
    program, x = Program(), torch.randn(4, HEADS, SIZE)
    wanted = torch.empty([x.shape[d] for d in order]).permute([order.index(d) for d in range(3)])
    copied = copied_into(wanted, program.node(x), program.call).meta["val"]
    assert copied.stride() == wanted.stride()
    assert torch.equal(copied, x)


def test_what_is_there_is_found():
    program = Program()
    x = program.node(torch.randn(4, 4))
    first = program.call(torch.ops.aten.t.default, x)
    last = program.call(torch.ops.aten.neg.default, first)
    call = found_or_added(program.call, last)
    assert call(torch.ops.aten.t.default, x) is first
    assert call(torch.ops.aten.t.default, first) is not first
    assert call(torch.ops.aten.neg.default, first) is not last  # not before itself


def halves(table, positions):
    return table[positions][:, None].chunk(2, -1)


def own_positions(table, positions):
    cos, sin = table.chunk(2, -1)
    return cos[positions][:, None], sin[positions + 1][:, None]


def reversed_rows(table, positions):
    return table[positions].flip(0)[:, None].chunk(2, -1)


@pytest.mark.parametrize(("fn", "starts"), [(halves, [0, SIZE // 2]), (own_positions, []), (reversed_rows, [])])
def test_lookups(fn, starts):
    """Of both tables at the same positions, and with the rows as they were looked up."""

    def program(x, table, positions):
        cos, sin = fn(table, positions)
        return x * cos, x * sin

    x, table, positions = torch.randn(6, HEADS, SIZE // 2), torch.randn(64, SIZE), torch.randperm(64)[:6]
    (graph,) = capture(program, x, table, positions)
    products = [node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    sources = [next(n for n in node.all_input_nodes if n.meta["val"].shape[1] == 1) for node in products]
    (x_node,) = (n for n in products[0].all_input_nodes if n.meta["val"].shape[1] == HEADS)
    tables = [Table(source, 0, SIZE // 2) for source in sources]
    found = lookups(Layout(x_node, 1), *tables)
    assert [at.start for at in found] == starts
    assert all(at.table.meta["val"].shape == table.shape for at in found)
