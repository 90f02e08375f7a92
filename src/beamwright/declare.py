"""How a part is declared by name, and the two kinds that need no room: verifiers and stops.

```python
@verifier("short-steps", meaning="the shorter a step, the better")
def short_steps(problem, steps):
    return 1 / (1 + len(steps[-1]))


@stop("late", meaning="ends with the fifth round")
def late(tree):
    return "it was late" if tree.rounds >= 5 else None
```

Imports no torch, so that a plugin is read before it is known whether anything will be computed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import decode_source
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from beamwright.config import Settings, describe_invalid
from beamwright.errors import BeamwrightError, InputError
from beamwright.registry import Table, TableRow, did_you_mean, flag_of
from beamwright.sections import OpenSection, StopSettings

R = TypeVar("R", bound=TableRow)
M = TypeVar("M", bound=Callable[..., Any])

_NAME = re.compile(r"\w[\w.-]*")  # none of ":", "/" and ",", which part names from what follows

VERIFIERS: Table[TableRow] = Table(
    "model",
    "--verifier",
    taken=(
        *("bundled", "none", "logprob", "min-logprob", "entropy"),
        *("deepconf", "deepconf-bottom", "deepconf-tail"),
        *("family", "judge", "likelihood", "hf", "random"),
    ),
)
STOPS: Table[TableRow] = Table("stop", "--stop")


def verifier(name: str, *, meaning: str) -> Callable[[M], M]:
    """Declare a verifier: a function `(problem, steps) -> float | None`, or a class with `score`.

    Such a class is made without arguments, or is a `config.Section` whose fields are its options.

    Raises:
        InputError: if the name is taken, or the class has no method `score`.
    """
    return _declare_callable(VERIFIERS, name, meaning, method="score")


def stop(name: str, *, meaning: str) -> Callable[[M], M]:
    """Declare a stop: a function `(tree) -> str | None`, or a class whose instances are called so.

    Such a class is made without arguments, or is a `config.Section` whose fields are its options.

    Raises:
        InputError: if the name is taken, or the class has no method `__call__`.
    """
    return _declare_callable(STOPS, name, meaning, method="__call__")


def make_stops(settings: StopSettings) -> tuple[Callable[[Any], str | None], ...]:
    """The declared stops that `--stop` names, in its order.

    Raises:
        InputError: for an unknown name, an option of another stop, or a value that it cannot use.
    """
    rows = [STOPS.find(name) for name in settings.stop or ()]
    given = declared_values(STOPS, rows, settings)
    return tuple(made(STOPS, row.make, own) for row, own in zip(rows, given, strict=True))


def _declare_callable(
    table: Table[TableRow], name: str, meaning: str, method: str
) -> Callable[[M], M]:
    take = declaration(table, TableRow, name, meaning)

    def declare(make: M) -> M:
        if isinstance(make, type) and not any(method in vars(base) for base in make.__mro__):
            raise InputError(f"{table.flag} {name}: {make.__qualname__} has no method {method}")
        return take(make)

    return declare


# --- shared by all kinds ---------------------------------------------------------------------


def declaration(
    table: Table[R], row: type[R], name: str, meaning: str, **facts: Any
) -> Callable[[M], M]:
    """A decorator that takes what it decorates into a table. facts: of the row.

    Raises:
        InputError: if the name cannot be one, or it or an option of it means something else.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{table.flag} {name!r}: a name is of letters, digits, '-', '_' and '.'")

    def declare(make: M) -> M:
        declared = row(name, meaning, make, **facts, source=_source_of(make))
        _check_free(declared.options, declared.place)
        table.add(declared)
        return make

    return declare


def declared_values(
    table: Table[Any], rows: Sequence[TableRow], settings: OpenSection, named: str | None = None
) -> list[dict[str, Any]]:
    """The options that a section holds for each of these rows, which are what it names.

    named: what it names, where that is no row.

    Raises:
        InputError: for an option that none of the rows has.
    """
    given = settings.model_extra or {}
    for name in given:
        if any(name in row.options for row in rows):
            continue
        owners = [each.name for each in table.owners(name)]
        if owners:
            chosen = named or ", ".join(row.name for row in rows) or "(not given)"
            goes_with = f"it goes with {', '.join(owners)}"
            raise InputError(f"{flag_of(name)} is no option of {table.flag} {chosen}; {goes_with}")
        known = dict.fromkeys([*type(settings).model_fields, *(o for r in rows for o in r.options)])
        hint = did_you_mean(name, known).rstrip()
        unknown = f"unknown option {f'{table.section}.{name}'!r}"
        raise InputError(unknown + (f": {hint}" if hint else ""))
    return [{name: given[name] for name in row.options if name in given} for row in rows]


def made(table: Table[Any], make: Callable[..., Any], given: dict[str, Any], **shared: Any) -> Any:
    """What a declaration makes: a function is itself, of a class an instance with these options.

    shared: what every one of its kind is given.

    Raises:
        InputError: for a value that it cannot use.
    """
    if not isinstance(make, type):
        return make
    try:
        return make(**shared, **given)
    except ValidationError as error:
        raise InputError(describe_invalid(error, f"{table.section}.")) from error
    except BeamwrightError:
        raise
    except Exception as error:  # whatever a user's class raises
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{table.flag}: {make.__qualname__} raised {line}") from error


def _check_free(names: Iterable[str], where: str) -> None:
    """Raises InputError if a declaration at `where` takes a name that the settings have."""
    sections = [info.annotation for info in Settings.model_fields.values()]
    owners = {name for section in sections for name in section.model_fields}  # type: ignore[union-attr]
    for name in names:
        if name in owners:
            raise InputError(f"{where}: {flag_of(name)} is a setting of its own")


def _source_of(make: Callable[..., Any]) -> str | None:
    """The file of a plugin's declaration as it is now; None of a built-in one, or where the file
    is a program that does more than declare."""
    if make.__module__ == "__main__" or make.__module__.startswith("beamwright."):
        return None
    file = getattr(sys.modules.get(make.__module__), "__file__", None)
    try:
        return None if file is None else decode_source(Path(file).read_bytes())
    except (OSError, SyntaxError, UnicodeError):  # there is no text, as in an archive
        return None
