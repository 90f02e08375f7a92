"""Fingerprint a user's function, class or object, to check that a search resumes with equal code.

The fingerprint covers bytecode and plain values. Two functions that compute the same in different
ways have different fingerprints.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from beamwright.config import Settings
from beamwright.declare import VERIFIERS
from beamwright.search import strategy_entry
from beamwright.search.answers import ANSWERS

# Keys of a saved file's code identities, with the option that each belongs to.
CODE_KEYS = {"search_code": "search", "verifier_code": "verifier", "answers_code": "answers"}
_PLAIN = (bool, int, float, str, bytes, type(None))
_DIGITS = 12


def identity_of(owner: Any, source: str | None = None) -> str:
    """Return the fingerprint `module.name@digest` of a function, a class or an object.

    The digest covers the code, defaults and closures. For an object it also covers its attribute
    `identity`, or else all attributes that are numbers, texts or tuples of them. Of other
    attributes only the type counts. An object whose attributes change during a search therefore
    needs an `identity`.

    source: the text of the file that defines `owner`. If given, all code of the file counts, but
        comments do not.
    """
    named = owner if isinstance(owner, FunctionType | type) else type(owner)
    digest = hashlib.sha256()
    for part in _digest_texts(owner):
        digest.update(part.encode() + b"\0")
    if source is not None:
        digest.update(ast.dump(ast.parse(source)).encode())
    return f"{named.__module__}.{named.__qualname__}@{digest.hexdigest()[:_DIGITS]}"


def plugin_fingerprints(settings: Settings) -> dict[str, str]:
    """Return the fingerprints of the plugins (strategy, verifier, answer format) in use.

    The keys are those of `CODE_KEYS`; the values come from `identity_of`. Built-in parts are left
    out.

    Raises:
        InputError: for an unknown strategy.
    """
    search = settings.search
    rows = (
        strategy_entry(search),
        VERIFIERS.get(settings.model.verifier_or_default),
        ANSWERS.get(search.answers),
    )
    return {
        name: identity_of(row.make, row.source)
        for name, row in zip(CODE_KEYS, rows, strict=True)
        if row is not None and row.is_plugin
    }


def _digest_texts(owner: Any) -> Iterator[str]:
    """Yield the texts that the digest of `owner` covers.

    The texts are the code of functions and methods, then `identity` or the plain attributes.
    """
    if isinstance(owner, FunctionType):
        yield from _function_texts(owner)
        return
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__[:-1]:
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "fget", getattr(value, "__func__", value))
            if isinstance(function, FunctionType):
                yield name
                yield from _function_texts(function)
    said = getattr(owner, "identity", None)
    if isinstance(said, str):
        yield said
    elif not isinstance(owner, type):
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            yield f"{name}={_value_text(value)}"


def _function_texts(function: FunctionType) -> Iterator[str]:
    """Yield the texts that a digest covers for a function: its code, defaults and closure."""
    yield from _code_texts(function.__code__)
    yield _value_text(function.__defaults__)
    yield _value_text(tuple(sorted((function.__kwdefaults__ or {}).items())))
    for cell in function.__closure__ or ():
        yield _value_text(cell.cell_contents)


def _code_texts(code: CodeType) -> Iterator[str]:
    """Yield the texts that a digest covers for a code object, nested code objects included."""
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_texts(constant)
        else:
            yield _value_text(constant)


def _value_text(value: Any) -> str:
    """Return a text of `value` that is the same in every process, or the name of its type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(_value_text, value)))}}}"
    if isinstance(value, FunctionType):
        return "|".join(_code_texts(value.__code__))
    return type(value).__qualname__
