"""Tables of what can be chosen by name: strategies, schedules, verifiers.

A declaration is one class (or function) under one decorator. Its row feeds settings, command line,
recipes, lists, checkpoints and the tests that run for all; there is no second place to write it
down. The tables are open: a plugin's declarations join the built-in ones when its file is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from beamwright.errors import InputError


def option(
    default: Any, help: str, *, metavar: str | None = None, recipe_only: bool = False, **limits: Any
) -> Any:
    """A field that is an option of its declaration: a setting, a flag, a key of recipes.

    help: for the command line. metavar: what its value is called there. recipe_only: a part of an
    ablation, which no command has unless it asks for it. limits: of `pydantic.Field`, such as ge,
    gt, le, lt, min_length, allow_inf_nan.
    """
    extra: JsonDict = dict(metavar=metavar, recipe_only=recipe_only)
    return Field(default, description=help, json_schema_extra=extra, **limits)


def extra_of(field: FieldInfo, key: str) -> Any:
    """What else `option` was told of it: None, or nothing, of a field that is none of it."""
    extra = field.json_schema_extra
    return extra.get(key) if isinstance(extra, dict) else None


@dataclass(frozen=True)
class TableRow:
    """What is declared of a choice.

    meaning: one line for people. make: the class or function that does it; fields of a model are
    the options, but for those that every one of its kind has (`shared`). source: of the file that
    declares it, if that is a plugin, as it was then.
    """

    name: str
    meaning: str
    make: Callable[..., Any]
    source: str | None = field(default=None, repr=False, kw_only=True)

    @property
    def options(self) -> dict[str, FieldInfo]:
        """Its own options by name."""
        shared: frozenset[str] = getattr(self.make, "shared", frozenset())
        fields: dict[str, FieldInfo] = getattr(self.make, "model_fields", {})
        return {name: info for name, info in fields.items() if name not in shared}

    @property
    def place(self) -> str:
        """Where it was declared."""
        name = getattr(self.make, "__qualname__", type(self.make).__qualname__)
        return f"{self.make.__module__}.{name}"

    @property
    def is_plugin(self) -> bool:
        """It is none of the built-in ones, so that its code may change between two runs."""
        return not self.make.__module__.startswith("beamwright.")


PLUGIN_MODULE = "beamwright_plugin_"  # begins the name of the module that a plugin's file becomes

R = TypeVar("R", bound=TableRow)

_TABLES: list[Table[Any]] = []


OF_LAB = "comes with the lab: pip install -e lab"


class Table(dict[str, R]):
    """Rows by name, open to plugins, who `add` theirs.

    section: of the settings, which holds the options. flag: the option that takes the name. needs:
    methods of what is declared here. calls: a function will do, too. taken: names that mean
    something else there. of_lab: names that the lab declares, where it is installed.
    """

    def __init__(
        self,
        section: str,
        flag: str,
        *needs: str,
        calls: bool = False,
        taken: Sequence[str] = (),
        of_lab: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.section, self.flag, self.taken, self.of_lab = section, flag, taken, of_lab
        self.needs, self.calls = needs, calls
        _TABLES.append(self)

    def add(self, row: R) -> None:
        """Take a declaration in; one that comes from the same place again replaces itself.

        Raises:
            InputError: if its name, or the name of one of its options, means something else.
        """
        if row.name in self.taken:
            raise InputError(f"{row.place}: {self.flag} {row.name} means something else already")
        known = self.get(row.name)
        if known is not None and known.place != row.place:
            twice = f"{known.place} and {row.place}"
            raise InputError(f"{self.flag} {row.name} is declared twice: {twice}")
        for name in row.options:
            owner = declared_options().get(name, self.section)
            if owner != self.section:
                where = f"is an option of the {owner} settings"
                raise InputError(f"{row.place}: {flag_of(name)} {where}")
        self[row.name] = row

    def find(self, name: str) -> R:
        """The row of this name.

        Raises:
            InputError: if there is none; says which there are, and which is meant.
        """
        if name in self:
            return self[name]
        if name in self.of_lab:
            raise InputError(f"{self.flag} {name}: {OF_LAB}")
        if not self:
            raise InputError(f"{self.flag} {name!r}: none is declared; a --plugin declares some")
        hint = did_you_mean(name, self)
        raise InputError(f"{self.flag} {name!r}: {hint}choose one of {', '.join(self)}")

    def owners(self, name: str) -> list[R]:
        """The rows that have an option of this name."""
        return [row for row in self.values() if name in row.options]


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    """`did you mean beam? `, or nothing if no known name is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def unknown(where: str, name: str, known: Mapping[str, Any]) -> str:
    """What is said of an option `name`, which is none. where: with its section, as it was given."""
    hint = did_you_mean(name, known).rstrip()
    return f"unknown option {where!r}" + (f": {hint}" if hint else "")


def flag_of(name: str) -> str:
    """`score_temperature` as `--score-temperature`."""
    return f"--{name.replace('_', '-')}"


def declared_options() -> dict[str, str]:
    """The section of the settings of every option that some row declares."""
    return {
        name: table.section for table in _TABLES for row in table.values() for name in row.options
    }


def rows_under(flag: str) -> list[TableRow]:
    """What can follow an option that takes names of declarations; nothing of another option."""
    return [row for table in _TABLES if table.flag == flag for row in table.values()]


def declared_rows(name: str) -> list[TableRow]:
    """All rows, of whatever table, that have an option of this name."""
    return [row for table in _TABLES for row in table.owners(name)]
