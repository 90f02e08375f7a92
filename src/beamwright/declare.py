"""Declare verifiers, and load plugins; also the base of all decorators that declare parts.

```python
@verifier("short-steps", meaning="the shorter a step, the better")
def short_steps(problem, steps):
    return 1 / (1 + len(steps[-1]))
```

A plugin file runs only if the user names it (`--plugin FILE.py`, `Solver(plugins=[...])`). A recipe
or a checkpoint cannot load one. Installed packages declare themselves in the entry point group
`beamwright.plugins`. This module imports no torch, because plugins are loaded before it is known
whether anything will be computed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import decode_source
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from beamwright.config import describe_invalid, section_fields
from beamwright.errors import BeamwrightError, InputError, error_line
from beamwright.io import installed_entry_points
from beamwright.registry import PLUGIN_MODULE, Table, TableEntry, flag_of, unknown_option
from beamwright.sections import ExtensibleSection

R = TypeVar("R", bound=TableEntry)
M = TypeVar("M", bound=Callable[..., Any])

# A name contains no ":", "/" or ",", because these separate a name from the text after it.
_NAME = re.compile(r"\w[\w.-]*")


def declaration(
    table: Table[R], row: type[R], name: str, meaning: str, **facts: Any
) -> Callable[[M], M]:
    """Return a decorator that declares a class or function: adds it to `table` under `name`.

    row: the class of the table's rows.
    meaning: one line that describes the part to users.
    facts: further fields of the row.

    Raises:
        InputError: if the name is not valid, if the name or an option already has another meaning,
            or if the class lacks a method.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{table.flag} {name!r}: use only letters, digits, '-', '_' and '.'")

    def declare(make: M) -> M:
        for method in () if table.calls and not isinstance(make, type) else table.needs:
            if not hasattr(make, method):
                raise InputError(f"{table.flag} {name}: {make.__qualname__} has no method {method}")
        declared = row(name, meaning, make, **facts, source=_source_of(make))
        for fields in section_fields().values():
            for option in declared.options.keys() & fields:
                raise InputError(f"{declared.place}: {flag_of(option)} is a setting; rename it")
        table.add(declared)
        return make

    return declare


_BUILT_IN = (
    "bundled none logprob min-logprob entropy deepconf deepconf-bottom deepconf-tail family judge "
    "likelihood probe hf random"
)
VERIFIERS: Table[TableEntry] = Table(
    "model", "--verifier", "score", calls=True, taken=_BUILT_IN.split()
)
# Decorator that declares a verifier: a function `(problem, steps) -> float | None`, or a class with
# `score`. The class is made without arguments, or is a `Section` whose fields are its options.
verifier = partial(declaration, VERIFIERS, TableEntry)


def declared_values(
    table: Table[Any],
    rows: Sequence[TableEntry],
    settings: ExtensibleSection,
    named: str | None = None,
) -> list[dict[str, Any]]:
    """Return for each row the values of its own options, taken from the section `settings`.

    rows: the declared parts in use, such as the strategy and the answer format.
    named: the name to show in an error message, if it is not the name of a row.

    Raises:
        InputError: for an option that none of the rows has.
    """
    given = settings.model_extra or {}
    for name in given:
        if any(name in row.options for row in rows):
            continue
        owners = ", ".join(row.name for row in table.owners(name))
        chosen = named or ", ".join(row.name for row in rows)
        if owners:
            where = f"{table.flag} {chosen}. It belongs to {owners}."
            raise InputError(f"{flag_of(name)} is not an option of {where}")
        known = dict.fromkeys([*type(settings).model_fields, *(o for r in rows for o in r.options)])
        raise InputError(unknown_option(f"{table.section}.{name}", name, known))
    return [{name: given[name] for name in row.options if name in given} for row in rows]


def make_declared(
    table: Table[Any], make: Callable[..., Any], given: dict[str, Any], **shared: Any
) -> Any:
    """Instantiate a declared class with its options; return a declared function as it is.

    given: the values of the class's own options.
    shared: arguments that every class of the table takes.

    Raises:
        InputError: for a value that the class cannot use.
    """
    if not isinstance(make, type):
        return make
    try:
        return make(**shared, **given)
    except ValidationError as error:
        raise InputError(describe_invalid(error, f"{table.section}.")) from error
    except BeamwrightError:
        raise
    except Exception as error:  # a user's class may raise anything
        raise InputError(f"{table.flag}: {make.__qualname__} raised {error_line(error)}") from error


def _source_of(make: Callable[..., Any]) -> str | None:
    """Return the text of the plugin file that declares `make`, to detect changes of its code.

    None for a built-in part, and for a part declared in `__main__`, a program that does more than
    declare.
    """
    if make.__module__ == "__main__" or make.__module__.startswith("beamwright."):
        return None
    file = getattr(sys.modules.get(make.__module__), "__file__", None)
    try:
        return None if file is None else decode_source(Path(file).read_bytes())
    # the module has no source file, for example inside an archive
    except (OSError, SyntaxError, UnicodeError):
        return None


# --- plugins ---------------------------------------------------------------------------------

ENTRY_POINT_GROUP = "beamwright.plugins"


def load_plugin(file: str | os.PathLike[str]) -> None:
    """Import a plugin file, which registers the parts that it declares.

    Raises:
        InputError: if it is not a Python file, or fails.
    """
    path = Path(file)
    name = f"{PLUGIN_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if not path.is_file() or path.suffix != ".py" or spec is None or spec.loader is None:
        raise InputError(f"--plugin {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BeamwrightError as error:
        raise InputError(f"--plugin {path}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything, `sys.exit()` included
        del sys.modules[name]
        raise InputError(f"--plugin {path}: the file raised {error_line(error)}") from error


def load_plugins(files: Iterable[str | os.PathLike[str]] = ()) -> list[str]:
    """Load installed plugins and then `files`; return an error line per failed installed plugin.

    Raises:
        InputError: if one of the files fails, see `load_plugin`.
    """
    failed = []
    for point in sorted(
        installed_entry_points(ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)
    ):
        try:
            point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken package must not stop the others
            failed.append(f"plugin {point.name} ({point.value}) failed: {error_line(error)}")
    for file in files:
        load_plugin(file)
    return failed
