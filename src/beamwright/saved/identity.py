"""Who a user's own function or object is, so that a checkpoint goes on with the same one.

Knows code and plain values; two that compute the same in other words are different.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from beamwright.config import Settings
from beamwright.declare import VERIFIERS
from beamwright.search import strategy_row
from beamwright.search.answers import ANSWERS

CODE = {"search_code": "search", "verifier_code": "verifier", "answers_code": "answers"}
"""What holds the code of what an option names, and the option."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_DIGITS = 12


def identity_of(owner: Any, source: str | None = None) -> str:
    """`module.name@digest` of a function, a class or an object.

    The digest is of the code, of defaults and closures, and of what an object says in `identity`;
    where it has none, of its plain values (numbers, texts, tuples of them). One that counts or
    remembers needs an `identity`. Attributes that are not plain are not looked into.

    source: of the file that it is part of, all of whose code then counts; comments do not.
    """
    named = owner if isinstance(owner, FunctionType | type) else type(owner)
    digest = hashlib.sha256()
    for part in _parts(owner):
        digest.update(part.encode() + b"\0")
    if source is not None:
        digest.update(ast.dump(ast.parse(source)).encode())
    return f"{named.__module__}.{named.__qualname__}@{digest.hexdigest()[:_DIGITS]}"


def plugin_code(settings: Settings) -> dict[str, str]:
    """Whose code decides the tree of these settings (`identity_of`), of what plugins declare.

    Raises:
        InputError: for an unknown strategy.
    """
    search = settings.search
    rows = strategy_row(search), VERIFIERS.get(settings.model.scorer), ANSWERS.get(search.answers)
    return {
        name: identity_of(row.make, row.source)
        for name, row in zip(CODE, rows, strict=True)
        if row is not None and row.is_plugin
    }


def _parts(owner: Any) -> Iterator[str]:
    if isinstance(owner, FunctionType):
        yield from _function(owner)
        return
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__[:-1]:
        for name, value in sorted(vars(base).items()):
            found = getattr(value, "fget", getattr(value, "__func__", value))
            if isinstance(found, FunctionType):
                yield name
                yield from _function(found)
    said = getattr(owner, "identity", None)
    if isinstance(said, str):
        yield said
    elif not isinstance(owner, type):
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            yield f"{name}={_plain(value)}"


def _function(function: FunctionType) -> Iterator[str]:
    yield from _code(function.__code__)
    yield _plain(function.__defaults__)
    yield _plain(tuple(sorted((function.__kwdefaults__ or {}).items())))
    for cell in function.__closure__ or ():
        yield _plain(cell.cell_contents)


def _code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _plain(constant)


def _plain(value: Any) -> str:
    """A value in words that are the same in every process; its kind where there are none."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, FunctionType):
        return "|".join(_code(value.__code__))
    return type(value).__qualname__
