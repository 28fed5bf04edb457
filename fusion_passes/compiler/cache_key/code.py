"""What a code object does and what it reads from outside, by its bytecode: a digest, global names, imports.

Bytecode and not source text, since it is what runs: the file may have been edited since it was imported, and what was
typed at a prompt has none.  File names and line numbers are no part of it.
"""

from __future__ import annotations

import dis
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

Chain = tuple[str, ...]
"""A name and the attributes that are read from it: `helpers.fused` is ("helpers", "fused")."""


@dataclass(frozen=True, order=True)
class Import:
    """An import statement inside a function: `from module import name`, or `import module` where name is "".

    level: the number of dots of a relative import.  top: `import a.b` binds `a`, not `a.b`.
    """

    module: str
    name: str
    level: int
    top: bool


@dataclass(frozen=True)
class Reads:
    """Of a code object and of all that are defined in it.

    digest: of the instructions, constants and names.  globals: what is read of global and builtin names.
    closure: the same of the names of functions around it.  imported: what is read of modules that are imported in the
    body.  strings: the constants that are text.
    """

    digest: bytes
    globals: tuple[Chain, ...]
    closure: tuple[Chain, ...]
    imported: tuple[tuple[Import, Chain], ...]
    strings: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def reads(code: CodeType) -> Reads:
    """Read a code object.  A code object cannot change, so each is read once."""
    nest = list(_nest(code))
    instructions = [
        [i for i in dis.get_instructions(part) if i.opname not in ("CACHE", "EXTENDED_ARG")] for part in nest
    ]
    bound: dict[str, set[Import]] = {}
    for body in instructions:
        for name, what in _imports(body):
            bound.setdefault(name, set()).add(what)
    found: dict[str, set[Chain]] = {"global": set(), "local": set()}
    imported: set[tuple[Import, Chain]] = set()
    for body in instructions:
        for kind, chain in _chains(body):
            found[kind].add(chain)
            if kind == "local":
                imported.update((what, chain[1:]) for what in bound.get(chain[0], ()))
    closure = sorted(chain for chain in found["local"] if chain[0] in code.co_freevars)
    strings = sorted({c for part in nest for c in part.co_consts if isinstance(c, str)})
    return Reads(_digest(code), tuple(sorted(found["global"])), tuple(closure), tuple(sorted(imported)), tuple(strings))


def _nest(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nest(constant)


def _digest(code: CodeType) -> bytes:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    text = repr((counts, names, code.co_code, code.co_exceptiontable, [_constant(c) for c in code.co_consts]))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _constant(value: Any) -> object:
    """A constant with its type, since 1 == 1.0 == True; sets in an order that does not depend on hashes."""
    if isinstance(value, CodeType):
        return ("code", _digest(value))
    if isinstance(value, frozenset):
        return ("frozenset", sorted(repr(_constant(item)) for item in value))
    if isinstance(value, tuple):
        return ("tuple", [_constant(item) for item in value])
    return (type(value).__name__, repr(value))


def _imports(body: list[dis.Instruction]) -> Iterator[tuple[str, Import]]:
    """The names that import statements bind, and to what."""
    for i, instruction in enumerate(body):
        if instruction.opname != "IMPORT_NAME":
            continue
        module, level, names = str(instruction.argval), int(body[i - 2].argval or 0), body[i - 1].argval
        if names:
            for j in range(i + 1, len(body) - 1, 2):
                if body[j].opname != "IMPORT_FROM":
                    break
                yield str(body[j + 1].argval), Import(module, str(body[j].argval), level, top=False)
        else:  # `import a.b as c` reads b from a, `import a.b` does not
            j = next(j for j in range(i + 1, len(body)) if body[j].opname.startswith("STORE"))
            yield str(body[j].argval), Import(module, "", level, top=j == i + 1)


def _chains(body: list[dis.Instruction]) -> Iterator[tuple[str, Chain]]:
    """Every name that is loaded, with the attributes that are read from it at once."""
    for i, instruction in enumerate(body):
        opname = instruction.opname
        if opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            kind = "global"
        elif opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST")) or (
            opname.startswith("LOAD") and "DEREF" in opname
        ):
            kind = "local"
        else:
            continue
        # Some instructions load two names: the first is not read from, but handed on.
        *whole, last = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if opname.startswith("LOAD"):
            yield from ((kind, (str(name),)) for name in whole)
        attributes = []
        for following in body[i + 1 :]:
            if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            attributes.append(str(following.argval))
        yield kind, (str(last), *attributes)
        if opname == "LOAD_NAME":  # in the body of a class: a name of the function around it, too
            yield "local", (str(last), *attributes)
