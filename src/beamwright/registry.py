"""Registries of strategies, schedules, verifiers and other parts that users choose by name.

A part is declared by a decorator on one class or function, which adds a row to a table. Settings,
command line, recipes, lists, checkpoints and general tests read the row, so a part is described in
one place. Plugins add their parts to the same tables.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from pydantic import Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from beamwright.errors import InputError


def option(
    default: Any, help: str, *, metavar: str | None = None, recipe_only: bool = False, **limits: Any
) -> Any:
    """Declare a field of a section or of a declared class as an option that users can set.

    The field becomes a setting, a command-line flag and a key of recipes.

    help: the text that the command line shows.
    metavar: the name of the value on the command line.
    recipe_only: True for a setting for ablation studies. Recipes accept it, and a command only if
        that command asks for such settings.
    limits: arguments of `pydantic.Field`, such as ge, gt, le, lt, min_length or allow_inf_nan.
    """
    extra: JsonDict = dict(metavar=metavar, recipe_only=recipe_only)
    return Field(default, description=help, json_schema_extra=extra, **limits)


def option_extra(field: FieldInfo, key: str) -> Any:
    """Return the argument `key` ("metavar" or "recipe_only") with which `option` declared a field.

    None if `option` did not declare it.
    """
    extra = field.json_schema_extra
    return extra.get(key) if isinstance(extra, dict) else None


@dataclass(frozen=True)
class TableEntry:
    """One declared part, such as a strategy, in a table.

    meaning: one line that describes the part to users.
    make: the declared class or function. The fields of a pydantic model are its options, except
        fields that all classes of the table share (`shared`).
    source: the text of the plugin file when it was imported; None for a built-in part.
    """

    name: str
    meaning: str
    make: Callable[..., Any]
    source: str | None = field(default=None, repr=False, kw_only=True)

    @property
    def options(self) -> dict[str, FieldInfo]:
        """The part's own options, by name."""
        shared: frozenset[str] = getattr(self.make, "shared", frozenset())
        fields: dict[str, FieldInfo] = getattr(self.make, "model_fields", {})
        return {name: info for name, info in fields.items() if name not in shared}

    @property
    def place(self) -> str:
        """The module and the name of the declared class or function."""
        name = getattr(self.make, "__qualname__", type(self.make).__qualname__)
        return f"{self.make.__module__}.{name}"

    @property
    def is_plugin(self) -> bool:
        """True if the part is not built in, so its code may change between two runs."""
        return not self.make.__module__.startswith("beamwright.")


PLUGIN_MODULE = "beamwright_plugin_"  # prefix of the module name of a plugin file

R = TypeVar("R", bound=TableEntry)

_TABLES: list[Table[Any]] = []


LAB_HINT = "needs the lab. Run pip install -e lab"


class Table(dict[str, R]):
    """Registry of one kind of part: rows by name. Plugins add their own rows.

    section: the section of the settings that holds the options.
    flag: the command-line option that takes the name.
    needs: methods that a declared class must have.
    calls: True if a plain function can be declared, too.
    taken: names with a built-in meaning, which cannot be declared.
    lab_names: names that the lab (the package of experiments) declares if it is installed.
    """

    def __init__(
        self,
        section: str,
        flag: str,
        *needs: str,
        calls: bool = False,
        taken: Sequence[str] = (),
        lab_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.section, self.flag, self.taken, self.lab_names = section, flag, taken, lab_names
        self.needs, self.calls = needs, calls
        _TABLES.append(self)

    def add(self, row: R) -> None:
        """Add a row. It replaces a row of the same class, as when a plugin is loaded twice.

        Raises:
            InputError: if its name, or the name of an option, already has another meaning.
        """
        if row.name in self.taken:
            raise InputError(f"{row.place}: {self.flag} {row.name} is a built-in name; rename it")
        known = self.get(row.name)
        if known is not None and known.place != row.place:
            twice = f"{known.place} and {row.place}"
            raise InputError(f"{self.flag} {row.name} is declared twice: {twice}. Rename one.")
        for name in row.options:
            owner = declared_options().get(name, self.section)
            if owner != self.section:
                where = f"is an option of the {owner} settings; rename it"
                raise InputError(f"{row.place}: {flag_of(name)} {where}")
        self[row.name] = row

    def find(self, name: str) -> R:
        """Return the row with this name.

        Raises:
            InputError: if there is none; the message lists the names and suggests a similar one.
        """
        if name in self:
            return self[name]
        if name in self.lab_names:
            raise InputError(f"{self.flag} {name}: {LAB_HINT}")
        if not self:
            raise InputError(f"{self.flag} {name!r} is unknown. Load it with --plugin FILE.py.")
        hint = did_you_mean(name, self)
        raise InputError(f"{self.flag} {name!r} is unknown. {hint}Choose one of {', '.join(self)}")

    def owners(self, name: str) -> list[R]:
        """Return the rows that have an option with this name."""
        return [row for row in self.values() if name in row.options]


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    """Return `Did you mean beam? `, or an empty text if no known name is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}? " if close else ""


def unknown_option(where: str, name: str, known: Mapping[str, Any]) -> str:
    """Return the error message for an unknown option, with a suggestion if a known name is similar.

    where: the option with its section, in the user's spelling.
    """
    hint = did_you_mean(name, known).rstrip()
    return f"unknown option {where!r}" + (f". {hint}" if hint else "")


def flag_of(name: str) -> str:
    """Return `--score-temperature` for `score_temperature`."""
    return f"--{name.replace('_', '-')}"


def declared_options() -> dict[str, str]:
    """Return the settings section of every option that some row declares, by the option's name."""
    return {
        name: table.section for table in _TABLES for row in table.values() for name in row.options
    }


def entries_for_flag(flag: str) -> list[TableEntry]:
    """Return the rows that an option such as `--search` can name; empty for other options."""
    return [row for table in _TABLES if table.flag == flag for row in table.values()]


def entries_with_option(name: str) -> list[TableEntry]:
    """Return the rows of all tables that have an option with this name."""
    return [row for table in _TABLES for row in table.owners(name)]


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that the parts that they declare are registered.

    package, path: the package's `__name__` and `__path__`.
    """
    for module in pkgutil.iter_modules(path):
        import_module(f"{package}.{module.name}")
