"""Bugs to be planted in rules and passes: what the fuzzer does not find of these, it does not find in new rules either.

Each changes what a reader reads, or takes a check away, as a slip in the code would.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Node

from fusion_passes.graph.functional import is_functionalized
from fusion_passes.graph.read import aten, calls, is_tensor, prims, value

PACKAGE = "fusion_passes."


@dataclass(frozen=True)
class Mutant:
    """plant: patches the library, in a stack that takes the patches back.  writes: only programs that write show it."""

    name: str
    plant: Callable[[ExitStack], None]
    writes: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Within it the bug is there."""
        with ExitStack() as stack:
            self.plant(stack)
            yield


def _set(stack: ExitStack, place: str, new: Any) -> None:
    """Replace `module.attribute` or `module.Class.attribute` of the package."""
    module, *names = place.split(":")
    owner: Any = importlib.import_module(PACKAGE + module)
    for name in names[:-1]:
        owner = getattr(owner, name)
    stack.enter_context(mock.patch.object(owner, names[-1], new))


def _old(place: str) -> Any:
    module, *names = place.split(":")
    owner: Any = importlib.import_module(PACKAGE + module)
    for name in names:
        owner = getattr(owner, name)
    return owner


def _reading(*places: str, **changes: Callable[[Any], Any]) -> Callable[[ExitStack], None]:
    """Readers that get attributes of an idiom wrong: name -> the value from the idiom that is right."""

    def wrong(right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        if found is None:
            return None
        return dataclasses.replace(found, **{name: change(found) for name, change in changes.items()})

    def plant(stack: ExitStack) -> None:
        for place in places:
            _set(stack, place, functools.partial(wrong, _old(place)))

    return plant


def _always(place: str, result: Any) -> Callable[[ExitStack], None]:
    return lambda stack: _set(stack, place, lambda *args, **kwargs: result)


def _everywhere(name: str, new: Any) -> Callable[[ExitStack], None]:
    """Replace a function in every module of the package that has it."""

    def plant(stack: ExitStack) -> None:
        found = False
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(PACKAGE) and "fuzz" not in module_name and callable(getattr(module, name, None)):
                stack.enter_context(mock.patch.object(module, name, new))
                found = True
        if not found:
            raise LookupError(f"no module of the package has {name}")

    return plant


def _all(*plants: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        for each in plants:
            each(stack)

    return plant


def _without_argument(name: str, instead: Any = None) -> Callable[[ExitStack], None]:
    """A fused paged attention that loses an argument of the graph's."""

    def plant(stack: ExitStack) -> None:
        right = _old("graph.functional:call_by_name")

        def wrong(call: Any, op: Any, arguments: Any) -> Any:
            return right(call, op, {**arguments, name: instead})

        _everywhere("call_by_name", wrong)(stack)

    return plant


def _reads_in_front(graph: Graph, effects: Any) -> list[Any]:
    """Reads in front of the write, as nodes: Inductor still computes them where they are used."""
    from fusion_passes.compiler.in_place import Reordered

    found = []
    for write in [node for node in graph.nodes if is_functionalized(node)]:
        bases = [node for node in write.all_input_nodes if is_tensor(node)]
        late = [user for base in bases for user in base.users if write < user and user.op == "call_function"]
        late = [user for user in late if not calls(user, aten.copy_.default)]
        behind = {write}
        for node in graph.nodes:
            if any(source in behind for source in node.all_input_nodes):
                behind.add(node)
        if late and not any(node in behind for node in late):
            for node in sorted(late):
                if all(source < write for source in node.all_input_nodes):
                    write.prepend(node)
            found.append(Reordered(write, tuple(late)))
    return found


def _repeated_in_any_order(stack: ExitStack) -> None:
    right = _old("idioms.attention_math:repeated_from")

    def wrong(node: Node) -> Node | None:
        found: Node | None = right(node)
        if found is not None or not calls(node, aten.reshape.default, aten.repeat.default):
            return found
        source = node
        for _ in range(6):
            source = source.all_input_nodes[0] if source.all_input_nodes else source
            if is_tensor(source) and value(source).ndim == 4 and value(source).shape[1] < value(node).shape[1]:
                return source
        return None

    for module in ("kv_heads", "attention_math"):
        _set(stack, f"idioms.{module}:repeated_from", wrong)


def _through_flips(stack: ExitStack) -> None:
    right = _old("idioms.attention_math:_keeps_matrices")
    _set(stack, "idioms.attention_math:_keeps_matrices", lambda node: right(node) or calls(node, prims.rev.default))


def _other_layout(stack: ExitStack) -> None:
    right = _old("fusions.dense_attention_quant:best_layout")
    other = {"bshd": "bhsd", "bhsd": "bshd"}
    _set(stack, "fusions.dense_attention_quant:best_layout", lambda *args: other[right(*args)])
    _set(stack, "graph.rewrite:same_layout", lambda a, b: True)


def _first_output_only(stack: ExitStack) -> None:
    right = _old("compiler.fuse:replacements")

    def wrong(m: Any, results: Any) -> Any:
        pairs = right(m, results)
        return {m.output: pairs[m.output]}

    _set(stack, "compiler.fuse:replacements", wrong)


def _negation_ignored(stack: ExitStack) -> None:
    right = _old("idioms.attention_mask:_positive")
    _set(stack, "idioms.attention_mask:_positive", lambda mask, negated: (right(mask, negated)[0], False))


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a check."""


def _with_guards(condition: Any) -> bool:
    return bool(condition)


def _without_permutes(stack: ExitStack) -> None:
    right = _old("fusions.dense_attention_quant:replay")

    def wrong(views: Any, node: Node, call: Any) -> Node:
        views = list(views)
        transposed = [view for view in views if calls(view, aten.permute.default)]
        if transposed and len({str(size) for size in value(transposed[0]).shape[1:3]}) == 1:
            views.remove(transposed[0])
        return right(views, node, call)

    _set(stack, "fusions.dense_attention_quant:replay", wrong)
    _set(stack, "graph.rewrite:same_layout", lambda a, b: True)


ATTENTION = ("idioms.attention:_read_fused", "idioms.attention_math:_read")
QUANTIZE = "idioms.quantize:_read"
ROPE = "idioms.rope:_read"
WRITE = "idioms.kv_cache:_read"
GROUPS = "idioms.group_quantize:_read"
E4M3 = torch.float8_e4m3fn

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "reads are moved in front of a write, not computed there",
        lambda s: _set(s, "compiler.manager:reads_before_writes", _reads_in_front),
        writes=True,
    ),
    Mutant("a write between is not seen", _everywhere("check_order", _does_nothing), writes=True),
    Mutant("no read is pending", _always("graph.effects:Effects:inlined", False), writes=True),
    Mutant("the factor of a scale is dropped", _reading(QUANTIZE, scale_factor=lambda q: 1.0)),
    Mutant("a scale that multiplies is read as one that divides", _reading(QUANTIZE, inverse=lambda q: False)),
    Mutant(
        "another reader of the output is ignored",
        _all(_everywhere("check_readers", _does_nothing), _always("fusions.attention_quant:outside_users", [])),
    ),
    Mutant(
        "the scales of key and value are swapped",
        _reading(WRITE, k_scale=lambda w: w.v_scale, v_scale=lambda w: w.k_scale),
    ),
    Mutant("the causal flag is lost", _reading(*ATTENTION, is_causal=lambda a: False)),
    Mutant("the mask is lost", _reading(*ATTENTION, attn_mask=lambda a: None, mask_kind=lambda a: None)),
    Mutant("the scale of the scores is lost", _reading(*ATTENTION, scale=lambda a: None)),
    Mutant(
        "query and key are exchanged",
        _reading(
            *ATTENTION,
            query=lambda a: a.key if value(a.key).shape == value(a.query).shape else a.query,
            key=lambda a: a.query if value(a.key).shape == value(a.query).shape else a.key,
        ),
    ),
    Mutant("value is read as key", _reading(*ATTENTION, key=lambda a: a.value)),
    Mutant("a transposition between is dropped", _without_permutes),
    Mutant("the codes have another layout", _other_layout),
    Mutant(
        "the bounds of the clamp are not read",
        _reading(
            QUANTIZE, clamp=lambda q: None if q.clamp is None else (-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
        ),
    ),
    Mutant("the rounding to whole numbers is not read", _reading(QUANTIZE, rounding=lambda q: "cast")),
    Mutant("groups are read twice as large", _reading(GROUPS, group_size=lambda q: 2 * q.group_size)),
    Mutant("the lower bound of group scales is not read", _reading(GROUPS, min_scale=lambda q: 0.01)),
    Mutant("cos and sin are swapped", _reading(ROPE, cos=lambda r: r.sin, sin=lambda r: r.cos)),
    Mutant("neighbours are read as halves", _reading(ROPE, interleaved=lambda r: False)),
    Mutant("the number of turned dimensions is lost", _reading(ROPE, rotary_dim=lambda r: value(r.x).shape[-1])),
    Mutant("a flip is read as a view", _through_flips),
    Mutant("the heads are repeated in any order", _repeated_in_any_order),
    Mutant(
        "another FP8 dtype",
        _all(_reading(QUANTIZE, dtype=lambda q: E4M3), _always("graph.rewrite:_check_replacement", None)),
    ),
    Mutant("only the first of several outputs is replaced", _first_output_only),
    Mutant("the softmax may be over any dimension", _always("idioms.attention_math:_Math:_last_dim", None)),
    Mutant(
        "a negated mask is read as the mask",
        _negation_ignored,
    ),
    Mutant("every constant mask is causal", _always("idioms.attention_mask:_constant_kind", "causal")),
    Mutant("the window is lost", _without_argument("window")),
    Mutant("the soft cap is lost", _without_argument("softcap", 0.0)),
    Mutant("the sinks are lost", _without_argument("sinks")),
    Mutant("the scale of the probabilities is lost", _without_argument("prob_scale")),
    Mutant("sizes are compared with a guard", _everywhere("known", _with_guards)),
)
"""At least twenty, of every rule and pass."""
