"""The key of a user's rule: another one after a change to anything that the rule reaches, the same one after none.

`CHANGES` are rules with one number in them, wherever it may stand.  Three processes read them all: one compiles the
modules, one with other hashes of text takes them as they were compiled, one finds another number, in another folder.
No graph is compiled here; `test_cache.py` does that.
"""

import enum
import functools
import importlib.util
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusion_passes
from fusion_passes import PassConfig, PostGradPassManager, Rule, TracedRule
from fusion_passes.compiler import cache_key
from fusion_passes.compiler.cache_key import code, origin, reach

ROOT = Path(__file__).parents[1]
START = """
import functools, os, torch, torch.nn.functional as F, fusion_passes
def search(x, y):
    return torch.sigmoid(x) * y
X = torch.empty(4, 4)
def rule(replace, kind=fusion_passes.TracedRule, **fields):
    return kind(name="mine", search=search, replace=replace, example_inputs=(X, X), **fields)
"""
REPLACE = "def replace(x, y):\n    return search(x, y) * "
RULE = "RULE = rule(replace)"

# What changes: the lines of the rule's module, and other modules.  NUMBER is 2.0 or 7.0.
CHANGES: dict[str, tuple[str, dict[str, str]]] = {
    "the replacement": (f"{REPLACE} NUMBER\n{RULE}", {}),
    "a global": (f"FACTOR = NUMBER\n{REPLACE} FACTOR\n{RULE}", {}),
    "a computed global": (f"FACTORS = [n * NUMBER for n in range(3)]\n{REPLACE} FACTORS[-1]\n{RULE}", {}),
    "a global of a helper": (f"FACTOR = NUMBER\ndef f(): return FACTOR\n{REPLACE} f()\n{RULE}", {}),
    "a helper of another module": (
        f"from NAME_a import f\n{REPLACE} f()\n{RULE}",
        {"a": "def f(): return NUMBER"},
    ),
    "an attribute of another module": (
        f"import NAME_a\n{REPLACE} NAME_a.f()\n{RULE}",
        {"a": "def f(): return NUMBER"},
    ),
    "a helper's helper, two modules away": (
        f"from NAME_a import f\n{REPLACE} f()\n{RULE}",
        {"a": "import NAME_b\ndef f(): return NAME_b.g()", "b": "def g(): return NUMBER"},
    ),
    "a lazily imported module": (
        "def replace(x, y):\n    import NAME_a as lazy\n    return search(x, y) * lazy.FACTOR\n" + RULE,
        {"a": "FACTOR = NUMBER"},
    ),
    "a name imported lazily, in a nested function": (
        "def replace(x, y):\n    from NAME_a import f\n    g = lambda: f()\n    return search(x, y) * g()\n" + RULE,
        {"a": "def f(): return NUMBER"},
    ),
    "a module imported by its name": (
        "import importlib\ndef replace(x, y):\n"
        f"    return search(x, y) * importlib.import_module('NAME_a').f()\nimport NAME_a\n{RULE}",
        {"a": "def f(): return NUMBER"},
    ),
    "what a module is asked for by name": (
        f"import NAME_a\nNAME = '_'.join(('f', 'g'))\n{REPLACE} getattr(NAME_a, NAME)()\n{RULE}",
        {"a": "def f_g(): return NUMBER"},
    ),
    "a module handed on": (
        f"import NAME_a\ndef use(module): return module.f()\n{REPLACE} use(NAME_a)\n{RULE}",
        {"a": "def f(): return NUMBER"},
    ),
    "a default": (f"def f(n=NUMBER): return n\n{REPLACE} f()\n{RULE}", {}),
    "a keyword's default": (f"def f(*, n=NUMBER): return n\n{REPLACE} f()\n{RULE}", {}),
    "an attribute of a function": (f"def f(): return f.n\nf.n = NUMBER\n{REPLACE} f()\n{RULE}", {}),
    "a partial": (f"f = functools.partial(max, NUMBER)\n{REPLACE} f(1.0)\n{RULE}", {}),
    "a lambda in a closure": (
        "def make(f): return lambda x, y: search(x, y) * f()\nRULE = rule(make(lambda: NUMBER))",
        {},
    ),
    "a cached function": (f"@functools.lru_cache\ndef f(): return NUMBER\n{REPLACE} f()\n{RULE}", {}),
    "a decorated function": (f"@torch.no_grad()\ndef f(): return NUMBER\n{REPLACE} f()\n{RULE}", {}),
    "a bound method": (
        f"class C:\n    def __init__(self, n): self.n = n\n    def f(self): return self.n\nf = C(NUMBER).f\n"
        f"{REPLACE} f()\n{RULE}",
        {},
    ),
    "a callable object of slots": (
        "class C:\n    __slots__ = ('n',)\n    def __call__(self): return self.n\n"
        f"f = C()\nf.n = NUMBER\n{REPLACE} f()\n{RULE}",
        {},
    ),
    "a method of an object": (f"class C:\n    def f(self): return NUMBER\nc = C()\n{REPLACE} c.f()\n{RULE}", {}),
    "an object that prints the same": (
        "class C:\n    def __init__(self, n): self.n = n\n    def __repr__(self): return 'C'\n"
        "def make(c): return lambda x, y: search(x, y) * c.n\nRULE = rule(make(C(NUMBER)))",
        {},
    ),
    "a property": (
        f"class C:\n    @property\n    def n(self): return NUMBER\nc = C()\n{REPLACE} c.n\n{RULE}",
        {},
    ),
    "a tensor in a closure": (
        "def make(t): return lambda x, y: search(x, y) * float(t)\nRULE = rule(make(torch.tensor(NUMBER)))",
        {},
    ),
    "an array in a closure": (
        "import numpy\ndef make(t): return lambda x, y: search(x, y) * float(t[1])\n"
        "RULE = rule(make(numpy.array([1.0, NUMBER])))",
        {},
    ),
    "a parameter of a module": (
        f"m = torch.nn.Linear(1, 1).requires_grad_(False)\nm.weight.fill_(NUMBER)\nm.bias.fill_(1)\n"
        f"{REPLACE} m.weight.item()\n{RULE}",
        {},
    ),
    "a computed class attribute": (
        f"class C:\n    n = [NUMBER][0]\n    def __init__(self): self.other = 1\n{REPLACE} C.n\n{RULE}",
        {},
    ),
    "a base class of another module": (
        f"from NAME_a import Base\nclass C(Base): pass\n{REPLACE} C().f()\n{RULE}",
        {"a": "class Base:\n    def f(self): return NUMBER"},
    ),
    "a metaclass": (
        "class M(type):\n    def __len__(cls): return int(NUMBER)\nclass C(metaclass=M): pass\n"
        f"{REPLACE} len(C)\n{RULE}",
        {},
    ),
    "legality": (
        f"class Mine(fusion_passes.TracedRule):\n    def legality(self, m):\n        m.require(NUMBER > 3, 'no')\n"
        f"{REPLACE} 2\nRULE = rule(replace, Mine)",
        {},
    ),
    "a helper of profitability": (
        "from NAME_a import f\nclass Mine(fusion_passes.TracedRule):\n"
        f"    def profitability(self, m):\n        m.require(f() > 3, 'no')\n{REPLACE} 2\nRULE = rule(replace, Mine)",
        {"a": "def f(): return NUMBER"},
    ),
    "a field of a subclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        f"class Mine(fusion_passes.TracedRule):\n    limit: float = 1.0\n{REPLACE} 2\n"
        "RULE = rule(replace, Mine, limit=NUMBER)",
        {},
    ),
    "a rule over idioms": (
        "class Mine(fusion_passes.Rule):\n    name = 'mine'\n    summary = ''\n"
        "    def pattern(self, idioms): return iter(())\n    def replacement(self, m, call): return NUMBER\n"
        "RULE = Mine()",
        {},
    ),
    "the body of an op": (
        "@torch.library.custom_op('NAME::f', mutates_args=())\n"
        "def f(x: torch.Tensor) -> torch.Tensor: return x * NUMBER\nf.register_fake(torch.empty_like)\n"
        "def replace(x, y): return torch.ops.NAME.f(search(x, y))\n" + RULE,
        {},
    ),
    "a helper of an op, called as a function": (
        "from NAME_a import g\n@torch.library.custom_op('NAME::f', mutates_args=())\n"
        "def f(x: torch.Tensor) -> torch.Tensor: return x * g()\nf.register_fake(torch.empty_like)\n"
        "def replace(x, y): return f(search(x, y))\n" + RULE,
        {"a": "def g(): return NUMBER"},
    ),
    "an op's kernel for one device": (
        "@torch.library.custom_op('NAME::f', mutates_args=())\n"
        "def f(x: torch.Tensor) -> torch.Tensor: return x * 3\nf.register_fake(torch.empty_like)\n"
        "@f.register_kernel('cuda')\ndef _(x): return x * NUMBER\n"
        "def replace(x, y): return torch.ops.NAME.f.default(search(x, y))\n" + RULE,
        {},
    ),
    "an op's fake implementation": (
        "LIBRARY = torch.library.Library('NAME', 'DEF')\nLIBRARY.define('f(Tensor x) -> Tensor')\n"
        "@torch.library.register_fake('NAME::f')\ndef _(x): return x.new_empty(4, 4 + 0 * int(NUMBER))\n"
        "def replace(x, y): return torch.ops.NAME.f(search(x, y))\n" + RULE,
        {},
    ),
    "an op's schema": (
        "LIBRARY = torch.library.Library('NAME', 'DEF')\nLIBRARY.define('f(Tensor x, float y=NUMBER) -> Tensor')\n"
        "torch.library.register_fake('NAME::f', lambda x, y=0.0: torch.empty_like(x))\n"
        "def replace(x, y): return torch.ops.NAME.f(search(x, y))\n" + RULE,
        {},
    ),
    "a file that the replacement reads": (
        f"from pathlib import Path\n{REPLACE} float(Path(__file__).with_name('NAME_a.txt').read_text())\n{RULE}",
        {"a.txt": "NUMBER"},
    ),
    "a variable of the environment": (f"{REPLACE} float(os.environ['FACTOR'])\n{RULE}", {}),
    "a variable of the environment that a condition asks for": (
        "class Mine(fusion_passes.TracedRule):\n    def legality(self, m):\n"
        f"        m.require(os.getenv('FACTOR', '0') > '3', 'no')\n{REPLACE} 2\nRULE = rule(replace, Mine)",
        {},
    ),
}
if importlib.util.find_spec("triton"):
    CHANGES["a Triton kernel"] = (
        "import triton, triton.language as tl\n@triton.jit\ndef kernel(x, y, n: tl.constexpr):\n"
        "    i = tl.arange(0, n)\n    tl.store(y + i, tl.load(x + i) * NUMBER)\n"
        "@torch.library.custom_op('NAME::f', mutates_args=())\ndef f(x: torch.Tensor) -> torch.Tensor:\n"
        "    y = torch.empty_like(x)\n    kernel[(1,)](x, y, 16)\n    return y\nf.register_fake(torch.empty_like)\n"
        "def replace(x, y): return torch.ops.NAME.f(search(x, y))\n" + RULE,
        {},
    )

# No change of what is computed: the same keys.  Here NUMBER stands where it does not matter.
SAME: dict[str, tuple[str, dict[str, str]]] = {
    "a comment": (f"# NUMBER\n{REPLACE} 2  # NUMBER\n{RULE}", {}),
    "a global that nothing reads": (f"OTHER = NUMBER\n{REPLACE} 2\n{RULE}", {}),
    "another function of the helpers' module": (
        f"import NAME_a\n{REPLACE} NAME_a.f()\n{RULE}",
        {"a": "def f(): return 2\ndef g(): return NUMBER"},
    ),
    "sets of text, classes, enumerations, paths": (
        "import dataclasses, enum, logging, pathlib, re, threading\n"
        "class E(enum.Enum):\n    A = 'a'\n    B = 'b'\n"
        "@dataclasses.dataclass(frozen=True)\nclass D:\n    names: frozenset\n    kind: E = E.A\n"
        "D1, LOG, LOCK = D(frozenset({'a', 'b', 'c', 'd', 'e'})), logging.getLogger(__name__), threading.Lock()\n"
        "P, R, T = pathlib.Path('a/b'), re.compile('a+'), {torch.float32: torch.device('cpu')}\n"
        "def f(x):\n    if x in {'p', 'q', 'r', 's', 't'}: LOG.info('hm')\n    with LOCK: return len(D1.names)\n"
        f"{REPLACE} f(hash(P) and R.pattern and T and 'p')\n{RULE}",
        {},
    ),
}

PROGRAM = """
import importlib, json, logging, sys
import fusion_passes
from fusion_passes.compiler.cache_key import reach
keys = {}
for name in json.loads(sys.argv[1]):
    rule = importlib.import_module(name).RULE
    manager = fusion_passes.PostGradPassManager(fusion_passes.PassConfig(extra_fusions=(rule,)))
    keys[name] = [manager.uuid(), manager.uuid(), reach.digest(rule)]
print(json.dumps(keys))
"""


def keys_of(folder: Path, number: str, seed: str) -> dict[str, list[str | None]]:
    """The key of every case, asked for twice, and the digest of what the rule reaches; in a process of its own."""
    folder.mkdir(exist_ok=True)
    cases = {f"case_{i}": case for i, case in enumerate([*CHANGES.values(), *SAME.values()])}
    for name, (text, others) in cases.items():
        for file, content in {"": START + text, **others}.items():
            path = folder / (f"{name}_{file}" if file else name)
            path = path if path.suffix else path.with_suffix(".py")
            if not path.exists():
                path.write_text(content.replace("NUMBER", number).replace("NAME", name))
    (folder / "program.py").write_text(PROGRAM)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "FACTOR": number, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "program.py", json.dumps(list(cases))],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    keys = json.loads(done.stdout.splitlines()[-1])
    return dict(zip([*CHANGES, *SAME], keys.values(), strict=True))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    return (
        keys_of(folder / "first", "2.0", "1"),
        keys_of(folder / "first", "2.0", "2"),
        keys_of(folder / "changed", "7.0", "1"),
    )


@pytest.mark.parametrize("case", [*CHANGES, *SAME])
def test_the_same_rule_has_the_same_key_in_every_process(keys, case):
    first, again, _ = keys
    assert None not in first[case]
    assert first[case] == again[case]
    assert first[case][0] == first[case][1]


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_another_key(keys, case):
    first, _, changed = keys
    assert first[case][0] != changed[case][0]
    if case != "a file that the replacement reads":  # which only a trace sees
        assert first[case][2] != changed[case][2], "nothing but the trace has told"


@pytest.mark.parametrize("case", SAME)
def test_what_changes_nothing_keeps_the_key(keys, case):
    first, _, changed = keys
    assert first[case] == changed[case]


# Within one process


def search(x, y):
    return torch.sigmoid(x) * y


def rule(replace, **fields):
    inputs = (torch.empty(4, 4), torch.empty(4, 4))
    return TracedRule(name="mine", search=search, replace=replace, example_inputs=inputs, **fields)


def uuid(*rules):
    return PostGradPassManager(PassConfig(extra_fusions=rules)).uuid()


FACTOR = 2.0


def by_global(x, y):
    return search(x, y) * FACTOR


def test_a_global_that_changes_in_the_process(monkeypatch):
    mine = rule(by_global)
    first = uuid(mine)
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    second = uuid(mine)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert first == uuid(mine) != second


def test_a_pattern_that_was_made_before_its_global_changed(monkeypatch):
    """It looks for what the global was, which a rule with the new global does not."""

    def by_global_too(x, y):
        return search(x, y) * FACTOR

    def make():
        inputs = (torch.empty(4, 4), torch.empty(4, 4))
        return TracedRule(name="mine", search=by_global_too, replace=search, example_inputs=inputs)

    old = make()
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    assert uuid(old) != uuid(make())


def test_a_tensor_and_a_container_that_are_written_to():
    factor, table = torch.tensor(2.0), {"a": [1, 2.0]}
    mine = rule(lambda x, y: search(x, y) * float(factor) * table["a"][1])
    seen = [uuid(mine)]
    factor.fill_(7.0)
    seen.append(uuid(mine))
    table["a"][1] = 7.0
    seen.append(uuid(mine))
    assert len({*seen}) == 3
    assert None not in seen


def test_a_method_that_is_set_later(monkeypatch):
    class Mine(TracedRule):
        pass

    mine = Mine(name="mine", search=search, replace=by_global, example_inputs=(torch.empty(4, 4), torch.empty(4, 4)))
    first = uuid(mine)
    monkeypatch.setattr(Mine, "legality", lambda self, m: m.require(False, "no"))
    assert uuid(mine) != first


def test_state_that_is_no_field():
    class Mine(TracedRule):
        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "limit", FACTOR)

    def make():
        inputs = (torch.empty(4, 4), torch.empty(4, 4))
        return Mine(name="mine", search=search, replace=by_global, example_inputs=inputs)

    first, second = make(), make()
    assert uuid(first) == uuid(second)
    object.__setattr__(second, "limit", 7.0)
    assert uuid(first) != uuid(second)


def test_the_order_of_rules_and_what_examples_are_is_in_the_key():
    one, other = rule(by_global), rule(lambda x, y: search(x, y))
    object.__setattr__(other, "name", "other")
    assert uuid(one, other) != uuid(other, one)
    half = TracedRule(
        name="mine", search=search, replace=by_global, example_inputs=tuple(torch.empty(2, 4, 4).bfloat16())
    )
    assert uuid(half) != uuid(one)
    ones = TracedRule(
        name="mine", search=search, replace=by_global, example_inputs=(torch.ones(4, 4), torch.zeros(4, 4))
    )
    assert uuid(ones) == uuid(one), "what is in an example is not looked at"


def test_a_kernel_s_counter_is_not_in_the_key():
    """The rule's op counts its calls: its state is that of a kernel, which compiled code calls by name."""
    from tests import traced_rules

    mine = traced_rules.relu_squared_rule()
    first = uuid(mine)
    traced_rules.CALLS.append(1)
    try:
        assert uuid(mine) == first
    finally:
        traced_rules.CALLS.pop()


def test_functions_typed_at_a_prompt():
    """They have no source, and need none."""

    def typed(body):
        namespace = {"search": search}
        exec(f"def replace(x, y): return search(x, y) * {body}", namespace)
        return uuid(rule(namespace["replace"]))

    assert None is not typed("2.0") == typed("2.0") != typed("7.0")


def test_tracing_once_for_each_state(monkeypatch):
    calls, original = [], TracedRule._cache_products
    monkeypatch.setattr(TracedRule, "_cache_products", lambda self: calls.append(1) or original(self))
    monkeypatch.setattr(cache_key, "_traced", {})
    mine = rule(by_global)
    assert uuid(mine) == uuid(mine)
    assert len(calls) == 1
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    uuid(mine)
    assert len(calls) == 2


def test_computed_once_and_kept_is_not_in_the_key():
    class Mine(TracedRule):
        @functools.cached_property
        def table(self):
            return object.__new__(type("Opaque", (), {}))

    inputs = (torch.empty(4, 4), torch.empty(4, 4))
    mine = Mine(name="mine", search=search, replace=by_global, example_inputs=inputs)
    first = uuid(mine)
    assert mine.table is not None
    assert uuid(mine) == first


# What cannot be keyed


@pytest.fixture
def told(monkeypatch, caplog):
    """The warnings, each without its beginning."""
    monkeypatch.setattr(cache_key, "_told", set())
    caplog.set_level(logging.WARNING, "fusion_passes")

    def texts():
        return [re.sub(r"^.*could become stale: ", "", record.getMessage()) for record in caplog.records]

    return texts


def opaque(library, name, key):
    """An op whose Python kernel was registered by `Library.impl`."""
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, key)
    return getattr(getattr(torch.ops, library.ns), name)


def unkeyable(case):
    if case == "file":
        handle = open(os.devnull)  # noqa: SIM115  # closed by the caller
        return (lambda x, y: search(x, y) * len(handle.name)), "handle", "a TextIOWrapper has no state that can be read"
    if case == "eval":
        return (lambda x, y: search(x, y) * eval("FACTOR")), "", "calls eval"
    if case == "large tensor":
        table = torch.zeros(reach.MOST_BYTES // 4 + 1)
        return (lambda x, y: search(x, y) * float(table[0])), "table", "a tensor of float32 [4194305] has 16384 KiB"
    if case == "sparse tensor":
        table = torch.zeros(4, 4).to_sparse()
        return (lambda x, y: search(x, y) * table.sum().item()), "table", "is not dense"
    if case == "in a set":
        handles = {open(os.devnull)}  # noqa: SIM115
        return (lambda x, y: search(x, y) * len(handles)), "handles", "a TextIOWrapper has no state that can be read"
    if case == "computed import":
        import importlib as i

        return (lambda x, y: search(x, y) * i.import_module("ma" + str(x)[:0] + "th!").pi), "", "whose name is computed"
    raise AssertionError(case)


@pytest.mark.parametrize("case", ["file", "eval", "large tensor", "sparse tensor", "in a set", "computed import"])
def test_what_cannot_be_keyed_is_not_cached_and_says_so_once(told, case):
    replace, way, why = unkeyable(case)

    class Conditional(Rule):
        name = "conditional"
        summary = "the function is reached and never traced"

        def pattern(self, idioms):
            return iter(())

        def replacement(self, m, call):
            return replace(1, 2)

    mine = Conditional()
    assert uuid(mine) is None
    assert uuid(mine) is None
    (sentence,) = told()
    assert sentence.startswith("of the rule 'conditional', replacement.replace")
    assert way in sentence
    assert why in sentence
    assert sentence.rstrip(".").rsplit(". ", 1)[1].split()[0] in ("Replace", "Write", "Pass", "Keep"), "says what to do"
    for cell in replace.__closure__ or ():
        for item in cell.cell_contents if isinstance(cell.cell_contents, set) else [cell.cell_contents]:
            getattr(item, "close", lambda: None)()


def test_too_many_objects(told, monkeypatch):
    monkeypatch.setattr(reach, "MOST_OBJECTS", 30)
    rows = [[n] for n in range(40)]
    assert uuid(rule(lambda x, y: search(x, y) * len(rows))) is None
    assert "it reaches more than 30 objects" in told()[0]


@pytest.mark.parametrize(("key", "cached"), [("CPU", True), ("Meta", False), ("CompositeExplicitAutograd", False)])
def test_a_kernel_registered_by_library_impl(told, key, cached):
    """That of a device runs by its name, with its present source; one that gives a layout is baked into the code."""
    library = torch.library.Library(f"key_tests_{key}", "DEF")
    op = opaque(library, "f", key)
    if key == "CPU":
        torch.library.register_fake(f"key_tests_{key}::f", torch.empty_like, lib=library)
    assert (uuid(rule(lambda x, y: op(search(x, y)))) is not None) == cached
    assert bool(told()) != cached
    if not cached:
        assert f"key_tests_{key}.f.default has a Python kernel for {key}" in told()[0]
        assert "torch.library.register_fake" in told()[0]


def test_code_of_the_user_that_raises_while_it_is_read(told):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise OSError("no such thing")

    lazy = Lazy("lazy")
    assert uuid(rule(lambda x, y: search(x, y) * bool(lazy))) is None
    assert told() == ["reading the rules raised OSError: no such thing. Mend what raises it, in the rules' own code."]


def test_modules_in_a_closure(monkeypatch):
    import os as system

    import tests.traced_rules as other

    monkeypatch.setenv("FACTOR", "2.0")
    mine = rule(lambda x, y: search(x, y) * float(system.environ["FACTOR"]) * len(other.CALLS[:0] or [1]))
    seen = [uuid(mine), uuid(mine)]
    monkeypatch.setenv("FACTOR", "7.0")
    seen.append(uuid(mine))
    monkeypatch.setattr(other, "CALLS", [1])
    seen.append(uuid(mine))
    assert None not in seen
    assert seen[0] == seen[1]
    assert len({*seen}) == 3


def test_a_package_that_changed_after_its_import_is_not_keyed(told, monkeypatch):
    """What runs is what was imported; the files are newer, and a later process would run these."""
    cache_key._files.cache_clear()
    monkeypatch.setattr(fusion_passes, "IMPORTED_AT", 0.0)
    try:
        assert uuid() is None
        assert "was touched on disk after this process had imported the package" in told()[0]
        assert "Start the process again" in told()[0]
    finally:
        cache_key._files.cache_clear()


# Values


class Kind(enum.Enum):
    A = 1
    B = 2


@dataclass
class Settings:
    names: list[str] = field(default_factory=list)
    kind: Kind = Kind.A


class Words(dict):
    pass


DIFFERENT = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ((1, 2), [1, 2]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1, 2}, {1, 3}),
    (Kind.A, Kind.B),
    (Settings(["a"]), Settings(["b"])),
    (Settings(kind=Kind.A), Settings(kind=Kind.B)),
    (Words(a=1), Words(a=2)),
    (Words(a=1), {"a": 1}),
    (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
    (torch.float16, torch.bfloat16),
    (torch.finfo(torch.float16), torch.finfo(torch.bfloat16)),
    (torch.device("cpu"), torch.device("meta")),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(2), torch.tensor([0.0, -0.0])),
    (torch.zeros(2, 2).t(), torch.tensor([[0.0, 1.0], [0.0, 0.0]]).t()),
    (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
    (range(3), range(4)),
    (re.compile("a"), re.compile("a", re.I)),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    (F.silu, F.relu),
    (torch.ops.aten.add, torch.ops.aten.mul),
    (max, min),
    (bytearray(b"a"), bytearray(b"b")),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    (lambda: 1, lambda: 1.0),
    (lambda: {"a", "b"}, lambda: {"a", "c"}),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=[str(i) for i in range(len(DIFFERENT))])
def test_values_that_differ_have_different_digests(one, other):
    assert reach.digest(one) == reach.digest(one)
    assert reach.digest(one) != reach.digest(other)


def test_what_refers_to_itself():
    first, second = [], []
    first.append(first)
    second.append([second])
    assert reach.digest(first) == reach.digest(first)
    assert reach.digest(first) != reach.digest(second)

    def family(name):
        parent, child = types.SimpleNamespace(), Child()
        parent.children, child.parent, child.name = {child}, parent, name
        return parent

    assert reach.digest(family("a")) == reach.digest(family("a")) != reach.digest(family("b"))


class Child:
    pass


def test_an_installed_package_counts_by_its_version():
    assert origin.version("numpy.linalg").startswith("numpy ")
    assert origin.version("yaml").lower().startswith("pyyaml "), "by the package that brings it, whatever its name"
    assert origin.version("json.decoder") == origin.version("sys") == f"python {sys.version}"
    assert origin.version("torch.nn") == f"torch {torch.__version__}"
    assert origin.version(__name__) is None


def test_reading_a_code_object():
    def fn(x):
        import os.path as path
        from collections import OrderedDict as Ordered
        from collections import abc

        return [Ordered(path.join(x, y)) for y in F.silu(x).shape] + [abc.Sized, FACTOR]

    read = code.reads(fn.__code__)
    assert ("F", "silu") in read.globals
    assert ("FACTOR",) in read.globals
    told = {(what.module, what.name, chain) for what, chain in read.imported}
    assert told == {("os.path", "", ("join",)), ("collections", "OrderedDict", ()), ("collections", "abc", ("Sized",))}
