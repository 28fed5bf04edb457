"""Regions: what is run computes what the graph computes, and nothing passes for what it is not."""

import itertools
import random

import pytest
import torch

from fusion_passes.graph.region import MAX_WEIGHT, NotLinear, Region, Term, numbers, run
from fusion_passes.testing import INPUTS, capture
from fusion_passes.testing import run as run_graph

TOKENS, HEADS, SIZE = 3, 2, 8

pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")


def inputs(*tables):
    return torch.randn(TOKENS, HEADS, SIZE), *(torch.randn(*shape) for shape in tables)


def linear(fn, *args):
    """The region from the first result up to the first input, which is x."""
    (graph,) = capture(fn, *args)
    return region(graph).program(input_of(graph, args[0])), graph


def region(graph):
    root = graph.output_node().args[0][0]
    return Region(root, root.meta["val"].ndim - 1)


def input_of(graph, tensor):
    """Inductor may have put the inputs into another order."""
    (node,) = (node for node, given in values_of(graph).items() if given is tensor)
    return node


def values_of(graph):
    return dict(zip((n for n in graph.nodes if n.op == "placeholder"), graph.owning_module.meta[INPUTS], strict=True))


def lanes(fn, *args):
    """What it is made of; None where that is not told."""
    try:
        return run(linear(fn, *args)[0].program)
    except NotLinear:
        return None


def halves(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def pairs(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, -a * -sin + b * cos), -1).flatten(-2)


def complex_numbers(x, turns):
    by = torch.view_as_complex(turns.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by).flatten(-2)


def thrice(x, table):
    return torch.cat((x[..., 5:], x[..., :1].expand(-1, -1, 5) * 3, x[..., ::3] * table[..., 1:7:2]), -1)


def four_terms(x, table):
    return x * table - 2 * torch.cat((x[..., 2:], x[..., :2]), -1) + torch.cat(x.chunk(2, -1)[::-1], -1)


HALF = (TOKENS, 1, SIZE // 2)


@pytest.mark.parametrize(
    ("fn", "tables"),
    [
        (halves, (HALF, HALF)),
        (halves, ((SIZE // 2,), (HEADS, 1))),
        (pairs, (HALF, (1, 1, SIZE // 2))),
        (complex_numbers, ((TOKENS, 1, SIZE),)),
        (thrice, ((TOKENS, 1, SIZE),)),
        (four_terms, ((TOKENS, HEADS, SIZE),)),
        (lambda x: x.view(TOKENS, HEADS, 2, 2, 2)[..., 1, :, :].flatten(2), ()),
    ],
)
def test_the_terms_give_the_result(fn, tables):
    """Put together again from what was told, with other numbers than those that told it."""
    args = inputs(*tables)
    found, graph = linear(fn, *args)
    told = run(found.program)
    (want,) = run_graph(graph)
    got = put_together(told, found.tables, args[0], values_of(graph))
    torch.testing.assert_close(got, want.flatten(2))


def put_together(lanes, tables, x, values):
    """The result [tokens, heads, …] from its terms."""
    rows = [values[table].flatten(-inner) for table, inner in tables]
    zero = torch.zeros(x.shape[:-1])
    return torch.stack(
        [
            sum(
                (
                    term.coefficient
                    * x[..., term.lane]
                    * (1.0 if term.table is None else rows[term.table][..., term.column])
                    for term in terms
                ),
                zero,
            )
            for terms in lanes
        ],
        -1,
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, t: x * x,
        lambda x, t: x * t * t,
        lambda x, t: x * t + t,
        lambda x, t: x * t + 1.0,
        lambda x, t: x * 0.5,
        lambda x, t: torch.add(x, x * t, alpha=2),
        lambda x, t: x[..., :4] * t[..., 1:5] + x[..., :4] * t[..., :4],
        lambda x, t: x[..., :4] * t[..., 1:5] - x[..., :4] * t[..., :4],
        lambda x, t: x * t - x,
        lambda x, t: x + x + x + x + x,
        lambda x, t: x.to(torch.float8_e4m3fn).float() * t,
        lambda x, t: x.transpose(0, 1).reshape(TOKENS, HEADS, SIZE) * t,
        lambda x, t: x.exp() * t,
    ],
)
def test_what_is_not_told(fn):
    assert lanes(fn, *inputs((TOKENS, 1, SIZE))) is None


def test_one_table_cannot_be_broadcast_in_two_ways():
    """The same numbers, for each half and for all."""

    def fn(x, table):
        by_half = (x.unflatten(-1, (2, -1)) * table).flatten(-2)
        return by_half + x * torch.cat((table, table), -1)

    assert lanes(fn, *inputs((1, 1, 1, SIZE // 2))) is None


def test_no_few_columns_pass_for_another():
    """All sums of up to four of eight columns: what equals a multiple of one column is that multiple.  Without the
    random numbers, which only confirm it."""
    powers = numbers(8)[:-1]
    sums = [c for c in itertools.product(range(-MAX_WEIGHT, MAX_WEIGHT + 1), repeat=8) if 0 < sum(map(abs, c)) <= 4]
    made = torch.tensor(sums).double() @ powers.T
    for column in range(8):
        held = powers[:, column]
        equal = (made == made[:, :1] * held).all(1) & (made[:, 0] != 0)
        told = {sums[i] for i in equal.nonzero()[:, 0].tolist()}
        wanted = {tuple(c * (i == column) for i in range(8)) for c in range(-4, 5) if c}
        assert told == wanted
    assert not (made == 0).all(1).any()


@pytest.mark.parametrize("count", [2, 513, 6800])
def test_the_numbers_are_whole_and_exact(count):
    held = numbers(count)
    assert held.dtype is torch.float64
    assert [int(x) for x in held[:-1, -1].tolist()] == [count**power for power in range(MAX_WEIGHT + 1)]
    assert bool((MAX_WEIGHT * held < 2**53).all())
    assert len(set(held[-1].tolist())) == count


def test_too_many_columns_are_not_told():
    x = torch.randn(TOKENS, 1, 2)
    assert lanes(lambda x, t: x * t[..., :2], x, torch.randn(TOKENS, 1, 6000)) is not None
    assert lanes(lambda x, t: x * t[..., :2], x, torch.randn(TOKENS, 1, 7000)) is None


def test_equal_layers_are_run_once():
    def fn(x, *tables):
        for cos, sin in zip(tables[::2], tables[1::2], strict=True):
            x = halves(x.exp(), cos, sin)
        return x

    args = inputs(*[HALF] * 16)
    (graph,) = capture(fn, *args)
    run.cache_clear()
    for node in graph.nodes:
        if node.target is torch.ops.aten.cat.default:
            run(Region(node, 2).program(next(x for x in ancestors(node) if "exp" in x.name)).program)
    assert run.cache_info().misses == 1
    assert run.cache_info().hits == 7
    assert run.cache_info().maxsize is not None


def ancestors(node):
    seen, work = [], [node]
    while work:
        node = work.pop()
        if node not in seen:
            seen.append(node)
            work += node.all_input_nodes if "exp" not in node.name else []
    return seen


def test_another_part_of_x_is_another_program():
    args = inputs((TOKENS, 1, 4))
    assert lanes(lambda x, t: x[..., :4] * t, *args)[0] == (Term(0, 1, 0, 0),)
    assert lanes(lambda x, t: x[..., 1:5] * t, *args)[0] == (Term(1, 1, 0, 0),)
    assert lanes(lambda x, t: x[..., :4] * -t, *args)[0] == (Term(0, -1, 0, 0),)
    assert lanes(lambda x, t: x[..., :4] * t * -3, *args)[0] == (Term(0, -3, 0, 0),)


def test_a_user_s_defaults_do_not_count():
    (found, _) = linear(halves, *inputs(HALF, HALF))
    run.cache_clear()
    want = run(found.program)
    run.cache_clear()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert run(found.program) == want
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_long_chain_is_not_followed():
    def fn(x, t):
        for _ in range(40):
            x = (-x).contiguous() * t
        return x

    args = inputs((TOKENS, 1, SIZE))
    (graph,) = capture(fn, *args)
    with pytest.raises(NotLinear):
        region(graph).program(input_of(graph, args[0]))


def random_program(seed):
    """Steps drawn at random, on parts of x and of two tables."""
    chosen = random.Random(seed)
    numbers = [chosen.random() for _ in range(99)]

    def program(x, *tables):
        left = list(numbers)

        def draw(count):
            return int(left.pop() * count)

        def part(y):
            size = y.shape[-1]
            kind = draw(8)
            if kind == 0:
                return y[..., : size // 2]
            if kind == 1:
                return y[..., 1::2]
            if kind == 2:
                return torch.cat(y.chunk(2, -1)[::-1], -1)
            if kind == 3:
                return y.unflatten(-1, (2, -1)).unbind(-2)[draw(2)]
            if kind == 4:
                return torch.stack((y, -y), -1).flatten(-2)
            if kind == 5:
                return y.unflatten(-1, (-1, 2)).repeat(1, 1, 1, 2).flatten(-2)
            return -y if kind == 6 else y * (draw(3) + 1)

        def parts(y):
            for _ in range(draw(3)):
                y = part(y) if y.shape[-1] > 1 else y
            return y

        def fit(y, size):
            return torch.cat([y] * -(-size // y.shape[-1]), -1)[..., :size]

        def product():
            y, t = parts(x), parts(tables[draw(2)])
            return y if draw(5) == 0 else y * fit(t, y.shape[-1])

        made = product()
        for _ in range(1 + draw(3)):
            other, how = product(), draw(3)
            if how == 0:
                made = torch.cat((made, other), -1)
            else:
                other = fit(other, made.shape[-1])
                made = made + other if how == 1 else made - other
        return parts(made)

    return program


def test_random_programs():
    """What is told of any of them is what it computes."""
    draws = [random_program(seed) for seed in range(60)]
    tensors = inputs((TOKENS, 1, SIZE), (TOKENS, 1, SIZE))
    (graph,) = capture(lambda x, *tables: [draw(x, *tables) for draw in draws], *tensors)
    roots, (tables, computed) = graph.output_node().args[0], ([], [])
    for root in roots:
        try:
            found = Region(root, 2).program(input_of(graph, tensors[0]))
        except NotLinear:
            continue
        if (terms := run(found.program)) is not None:
            computed.append((root, terms, found.tables))
            tables += [table for table, _ in found.tables]
    nodes = [*tables, *(root for root, *_ in computed)]
    graph.output_node().args = (tuple(nodes),)
    values = dict(zip(nodes, run_graph(graph), strict=True))
    for root, terms, its_tables in computed:
        torch.testing.assert_close(put_together(terms, its_tables, tensors[0], values), values[root])
    assert len(computed) >= 20
