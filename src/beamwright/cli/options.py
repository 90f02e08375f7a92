"""Command-line options of all commands, made from the fields of `Settings` (`with_settings`).

An option's name, type, default and help text come from the field. An option's value None always
means "not given", so that a recipe's value holds unless the user overrides it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import beamwright.schedule  # noqa: F401 (the import declares options)
from beamwright.cli.output import exit_on_error
from beamwright.config import Settings, removed_options, section_fields
from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.registry import (
    TableEntry,
    did_you_mean,
    entries_for_flag,
    entries_with_option,
    flag_of,
    option_extra,
)
from beamwright.search import STRATEGIES

if TYPE_CHECKING:
    from beamwright.cluster.serving import Cluster

_PANELS = {
    "model": "Models",
    "sampling": "Sampling",
    "step": "Steps",
    "search": "Search",
    "stop": "Stopping early (the best candidate so far is the answer)",
    "memory": "Memory",
    "schedule": "Schedule (only --speculation truncate changes the tree)",
    "sparse": "Sparse decoding (changes the tree)",
}
# Names of the settings that `--help` shows; `--help-all` shows all settings.
_COMMON = frozenset((
    "model", "verifier", "device", "weights", "temperature", "max_tokens", "stop_strings",
    "thinking",
    "search", "n", "width", "seed", "deadline", "memory", "kv_memory",
))  # fmt: skip
_ONE_BY_ONE = "stop_strings"  # setting that is a list: its option is given once per item
_ESCAPED = ("delimiter", "stop_strings", "close_message")
# Options by name, each as its type and the value that `option` returns.
_Typed = Mapping[str, tuple[Any, Any]]


def option(
    default: Any, help_text: str, metavar: str | None = None, flag: str | None = None, **more: Any
) -> Any:
    """Return an option of a command, to be used as the default value of a parameter.

    Such options are the command's own, in addition to the settings.
    flag: the option's flag, if not derived from the parameter's name.
    more: further arguments of `typer.Option`.
    """
    flags = [] if flag is None else [flag]
    return typer.Option(default, *flags, help=help_text, metavar=metavar, **more)


JSON = option(False, "Print exactly one JSON object on standard output.", flag="--json")
DEBUG = option(False, "Show the traceback of an error.", flag="--debug")
_RAY = "Ray cluster that runs the engines: local (processes on this machine), auto, or its address."
_REPLICAS = (
    "Number of engines (default: auto, one per GPU or per --replica-cores cores). Without --ray "
    "they run on this machine."
)
_ENGINES: _Typed = {
    "ray": (str | None, option(None, _RAY, "ADDRESS")),
    "replicas": (str | None, option(None, _REPLICAS, "N")),
    "replica_cores": (
        int | None,
        option(None, "CPU cores per engine (default: 1).", "N", min=1),
    ),
}
_RECIPE: _Typed = {"recipe": (Path | None, option(None, "YAML file of settings.", "FILE"))}
_PLUGIN = "Python file to run; it declares a strategy, schedule or verifier."
_SHARED: _Typed = {
    "plugin": (list[Path] | None, option(None, _PLUGIN, "FILE.py")),  # loaded by `app`
    "as_json": (bool, JSON),
    # Declared for the help only: `app` replaces --help-all by --help before parsing.
    "help_all": (bool, option(False, "Show every option and exit.", flag="--help-all")),
    "debug": (bool, DEBUG),
}


@dataclass(frozen=True)
class Invocation:
    """The common options of a command line: the first argument of every command with settings.

    given: the settings that the user gave as options, by name.
    as_json: True to print exactly one JSON object.
    cluster: place and number of engines (--ray, --replicas); None to run one in this process.
    """

    settings: Settings
    given: dict[str, Any]
    as_json: bool
    cluster: Cluster | None = None


def with_settings(
    only: Collection[str] | None = None,
    recipe: bool = True,
    under: Collection[str] = (),
    cluster: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with options for settings, --recipe, --json, --debug and --plugin.

    only: names of the settings that the command takes; None for all.
    recipe: True if the command takes --recipe.
    under: names of settings that the command does not take, but whose declared values have options
        that it takes (for `search`, the options of the strategies).
    cluster: True if the command takes --ray, --replicas and --replica-cores.

    The decorated function calls the command with an `Invocation` and the command's own parameters.
    `exit_on_error` turns exceptions into error lines.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command).parameters.values()
        engines, shared = _ENGINES if cluster else {}, {**(_RECIPE if recipe else {}), **_SHARED}

        def wrapper(**values: Any) -> None:
            mine = {each.name: values.pop(each.name) for each in own}
            asked = {name: values.pop(name) for name in {**engines, **shared}}
            with exit_on_error(asked["debug"]):
                given = {name: value for name, value in values.items() if value not in (None, [])}
                for name in given.keys() & _ESCAPED:
                    given[name] = _unescape(given[name])
                settings = Settings.build(asked.get("recipe"), **given)
                if settings.search.search == "list":
                    _print_strategies()
                    return
                command(Invocation(settings, given, asked["as_json"], _find_cluster(asked)), **mine)

        def declare(everything: bool = True) -> None:
            """Give the command its options, with those that plugins have declared so far.

            everything: True if the help shows all options; False for the common ones.
            """
            hints = get_type_hints(command)
            mine = {each.name: (hints[each.name], each.default) for each in own}
            known = _settings_options(only, everything, under)
            parameters = [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
                )
                for options in (mine, engines, known, shared)
                for name, (kind, default) in options.items()
            ]
            names = [each.name for each in parameters]
            for name in names:
                if names.count(name) > 1:  # a plugin has declared an option that exists already
                    owners = ", ".join(row.place for row in entries_with_option(name))
                    raise InputError(
                        f"{owners}: {flag_of(name)} is a command-line option already; rename it"
                    )
            wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            wrapper.__annotations__ = {each.name: each.annotation for each in parameters}

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.declare_options = declare  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _settings_options(
    only: Collection[str] | None, everything: bool, under: Collection[str]
) -> _Typed:
    """Return the options of settings, and the options of the declared values of each setting.

    For example, each strategy, a declared value of `search`, may have options of its own.
    only, under: the same as of `with_settings`. everything: True if the help shows all options;
    options that plugins declare are always shown.
    """
    options: dict[str, tuple[Any, Any]] = {}
    for section, fields in section_fields().items():
        for name, field in fields.items():
            taken = not option_extra(field, "recipe_only") if only is None else name in only
            if taken:
                words = escape((field.description or "") + _choices(field) + _declared(name))
                words += _shown(field.default)
                hidden = not (everything or name in _COMMON)
                options[name] = _of_field(name, field, words, _PANELS[section], hidden)
            for row in entries_for_flag(flag_of(name)) if taken or name in under else ():
                for own in row.options:
                    rows = entries_with_option(own)
                    hidden = not (everything or any(each.is_plugin for each in rows))
                    first, words = _declared_field(own, rows)
                    panel = f"Options of one {flag_of(name)}"
                    options[own] = _of_field(own, first, words, panel, hidden)
    return options


def _of_field(
    name: str, field: FieldInfo, help_text: str, panel: str, hidden: bool
) -> tuple[Any, Any]:
    """Return the type and the option of a field: a setting, or a declared option."""
    flag, metavar = flag_of(name), option_extra(field, "metavar")
    # If the field has a parser, pass the option's value to this parser as a string.
    parsed = any(isinstance(each, BeforeValidator) for each in field.metadata)
    kind = str if parsed else _plain_type(field.annotation)
    # A boolean has two flags, so that the command line can override a recipe in both directions.
    flag = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
    metavar = metavar or ("CHOICE" if _choices(field) else None)
    made = option(None, help_text, metavar, flag, rich_help_panel=panel, hidden=hidden)
    return (list[str] if name == _ONE_BY_ONE else kind) | None, made


def _declared_field(name: str, rows: Sequence[TableEntry]) -> tuple[FieldInfo, str]:
    """Return the field of an option that one or several rows declare, and its help text.

    Rows are strategies or other declarations. The help text has each meaning after the names of its
    rows, such as `dynamic, particles: Temperature ...`.

    Raises:
        InputError: if two rows declare the option with different types.
    """
    first, owners = rows[0].options[name], dict[str, list[str]]()
    for row in rows:
        if _plain_type(row.options[name].annotation) != _plain_type(first.annotation):
            places = f"{rows[0].place} and {row.place}"
            raise InputError(f"{places} declare {flag_of(name)} with different types; rename one")
        owners.setdefault(row.options[name].description or "", []).append(row.name)
    defaults = {row.name: row.options[name].default for row in rows}
    default: Any = first.default
    if len(set(map(repr, defaults.values()))) > 1:
        default = ", ".join(f"{owner} {value}" for owner, value in defaults.items())
    words = " ".join(f"{', '.join(names)}: {text}" for text, names in owners.items())
    return first, words + _shown(default) + _choices(first)


def _plain_type(annotation: Any) -> Any:
    """Return the type without None: int for `int | None`. A Literal is kept for its choices."""
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    if annotation in (bool, int, float, str) or get_origin(annotation) is Literal:
        return annotation
    raise TypeError(f"no command-line form for {annotation!r}")


def _choices(field: FieldInfo) -> str:
    """Return a sentence with a field's choices for the help text; "" if it takes other values.

    Typer's own column of choices would leave no space for the help text.
    """
    kinds = (field.annotation, *get_args(field.annotation))
    names = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return f" One of {', '.join(names)}." if names and {int, float}.isdisjoint(kinds) else ""


def _declared(name: str) -> str:
    """Return a help sentence with the declared values of the setting `name`; "" if it has none.

    Strategies are left out, since `--search list` shows them.
    """
    names = [] if name == "search" else [row.name for row in entries_for_flag(flag_of(name))]
    # "Or one", because a verifier may also be built in, and those are not declared.
    return f" {'Or one' if name == 'verifier' else 'One'} of {', '.join(names)}." if names else ""


def _shown(default: Any) -> str:
    """Return a setting's default as rich markup for its help text."""
    if default is None or default is False or default in ((), {}):
        return ""
    text = repr(default) if isinstance(default, str) and "\n" in default else str(default)
    return rf" [dim]\[default: {text}][/dim]"


def _unescape(text: str | list[str]) -> str | list[str]:
    r"""Replace the escapes `\n`, `\t` and `\\`, which users write in a shell, in a text or list."""
    if isinstance(text, list):
        return [str(_unescape(each)) for each in text]
    meanings = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meanings[match[1]], text)


def _print_strategies() -> None:
    """Print a table of all strategies with their options, for `--search list`."""
    table = Table("--search", "what it does", "options", "answer", box=None, header_style="bold")
    for name, row in STRATEGIES.items():
        shared = ["n", "width"] if row.reads_width else ["n"]
        options = map(flag_of, (*shared, *row.options))
        table.add_row(name, row.meaning, " ".join(options), row.choose)
    Console().print(table)


def suggest_flags(flag: str, offered: Collection[str]) -> str:
    """Return a hint with the options that are most similar to an unknown one; "" if none is.

    Options with the same words are preferred to options with similar letters.
    offered: the flags that the command has.
    """
    name = flag.lstrip("-").removeprefix("no-")
    if became := removed_options().get(name.replace("-", "_")):
        return became
    fields = {
        key.replace("_", "-"): (section, field)
        for section, known in section_fields().items()
        for key, field in known.items()
    }
    if name in fields and option_extra(fields[name][1], "recipe_only"):
        return f"Set it in a recipe: {fields[name][0]}: {{{name.replace('-', '_')}: ...}}"
    known = dict.fromkeys(flag.removeprefix("--") for flag in offered if flag.startswith("--"))
    if name in fields and name not in known:
        return "Only other commands have this option."
    also: dict[str, str] = read_yaml(Path(__file__).with_name("also.yaml"), "words")
    words = {key: [key, *also.get(key.replace("-", "_"), "").split()] for key in known}
    close = [key for key in known if name in words[key]]
    close = close or [key for key in known if set(name.split("-")) <= set(key.split("-"))]
    if not close:
        return did_you_mean(name, known).rstrip().replace("mean ", "mean --")
    return f"Did you mean {' or '.join(f'--{key}' for key in close)}?"


def number_or_auto(flag: str, text: str | None, least: int = 0) -> int | None:
    """Parse a number or "auto"; return None for "auto" or None. Raises InputError below `least`."""
    if text in (None, "auto"):
        return None
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{flag} {text}: expected auto or a number of at least {least}")
    return int(text)


def _find_cluster(asked: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster that --ray, --replicas and --replica-cores request.

    None means that one engine runs in this process.
    """
    if not any(asked.get(name) for name in _ENGINES):
        return None
    number = number_or_auto("--replicas", asked["replicas"])
    from beamwright.cluster.serving import Cluster

    address = None if asked["ray"] == "local" else asked["ray"]
    files = tuple(str(file.resolve()) for file in asked["plugin"] or ())
    return Cluster(address, number, asked["replica_cores"] or 1, files)
