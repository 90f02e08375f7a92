"""MkDocs hooks: generate the reference pages, and turn links into the repository into site links.

`mkdocs.yml` names this file. The reference comes from the product itself: commands and options from
the command line, settings from `sections.py`, HTTP from the server's OpenAPI, JSON keys from a
search with the bundled pair. The pages are generated at each build and not stored.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import render

from beamwright import Solver
from beamwright.cli.app import make_app
from beamwright.config import Settings
from beamwright.io import installed_entry_points
from beamwright.registry import entries_for_flag, flag_of, option_extra
from beamwright.search import STRATEGIES
from beamwright.serve.body import NEUTRAL
from beamwright_lab.common import table

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/beamwright/beamwright"
# Files of the repository that are also pages of the site.
SHOWN = {
    "CHANGELOG.md": "develop/changelog.md",
    "CONTRIBUTING.md": "develop/contributing.md",
    "SECURITY.md": "develop/security.md",
    "recipes/README.md": "guides/recipes.md",
}

PROBLEM = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


# --- hooks of mkdocs ----------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the pages that are files of the repository (MkDocs hook)."""
    from mkdocs.structure.files import File

    for source, page in SHOWN.items():
        if (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=move_links(text, source, page)))
    for name, make in GENERATED.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links into the repository, and exclude the log from search (MkDocs hook)."""
    del config, files
    path = page.file.src_uri
    if path.startswith("log/"):
        page.meta["search"] = {"exclude": True}
    if path in SHOWN.values() or path.startswith("reference/"):
        return markdown
    return move_links(markdown, f"docs/{path}", path)


def move_links(text: str, source: str, page: str) -> str:
    """Return the text of the file `source` for the page `page`, with its links adjusted.

    A link leads to a page of the site if there is one, else to the file on GitHub.
    """
    home = (ROOT / source).parent

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        file = (home / target).resolve()
        if not file.is_relative_to(ROOT) or not file.exists():
            return match[0]
        place = str(file.relative_to(ROOT))
        shown = SHOWN.get(place) or place.removeprefix("docs/")
        if place == "README.md":
            shown = "index.md"
        elif shown == place:  # not a page of the site
            return f"{REPOSITORY}/{'tree' if file.is_dir() else 'blob'}/main/{place}{anchor}"
        return posixpath.relpath(shown, posixpath.dirname(page) or ".") + anchor

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


# --- the reference ------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the page of all commands with all options, as in `--help-all`."""
    parts = [
        "# Command line",
        "Every command takes `--json` and then prints one JSON object on standard output. "
        "Exit codes: 0 for success, 2 for bad usage or input, 1 for another failure. Sizes read "
        "as `7GiB`, `512MiB`, `4GB`.",
    ]
    group: Any = typer.main.get_command(make_app())
    with group.make_context("beamwright", [], resilient_parsing=True) as parent:
        others = {point.name for point in installed_entry_points("beamwright.commands")}
        for name in group.list_commands(parent):
            if name not in others:
                _, command, _ = group.resolve_command(parent, [name])
                parts += _command(name, command)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    words = " ".join(map(_called, arguments))
    yield f"## {name}"
    yield (command.help or "").strip()
    yield f"```text\nbeamwright {name} {words} [OPTIONS]\n```".replace("  ", " ")
    if arguments:
        yield _table(
            ("argument", "meaning"),
            [(f"`{_called(param)}`", _help(param)) for param in arguments],
        )
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if param.param_type_name == "option" and param.name != "help":
            panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(
                param
            )
    for panel, params in sorted(panels.items(), key=lambda pair: pair[0] != "Options"):
        yield f"**{panel}**"
        yield _table(("option", "meaning"), [_option(param) for param in params])


def _option(param: Any) -> tuple[str, str]:
    flags = " ".join(f"`{flag}`" for flag in (*param.opts, *param.secondary_opts))
    value = "" if param.is_flag or not param.metavar else f" `{param.metavar}`"
    return flags + value, _help(param)


def _called(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _help(param: Any) -> str:
    return _plain(render(param.help or "").plain)


def settings_page() -> str:
    """Return the page of all settings by section."""
    parts = [
        "# Settings",
        "Each setting is a key of a recipe (`search: {n: 16}`), an option of `Solver` (`n=16`) and "
        "of the command line (`--n 16`). A setting that may differ by problem is also a field of "
        "the server's `search` object.",
    ]
    for section, info in Settings.model_fields.items():
        kind: Any = info.annotation
        parts += [f"## {section}", (kind.__doc__ or "").strip()]
        parts.append(_settings_table(kind.model_fields))
        for name in kind.model_fields:
            rows = STRATEGIES.values() if name == "search" else entries_for_flag(flag_of(name))
            for row in rows:
                if row.options:
                    parts += [f"### {name}: {row.name}", row.meaning, _settings_table(row.options)]
    return "\n\n".join(parts) + "\n"


def _settings_table(declared: Mapping[str, FieldInfo]) -> str:
    rows = [
        (f"`{name}`", f"`{_default(field)}`", _values(field), _plain(field.description))
        for name, field in declared.items()
    ]
    return _table(("setting", "default", "values", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else json.dumps(field.default, default=str)


def _values(field: FieldInfo) -> str:
    """Return the values of a setting: its choices, its type and bounds, or its name in the help."""
    kinds = (field.annotation, *get_args(field.annotation))
    for kind in kinds:
        if get_origin(kind) is Literal:
            return ", ".join(f"`{value}`" for value in get_args(kind))
    named = option_extra(field, "metavar")
    plain = [kind.__name__ for kind in kinds if kind in (bool, int, float, str)]
    bounds = [
        f"{sign} {getattr(limit, each):g}"
        for limit in field.metadata
        for each, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if hasattr(limit, each)
    ]
    return " ".join([f"`{named}`" if named else (plain or ["text"])[0], *bounds])


def json_page() -> str:
    """Return the page of the keys of `solve --json`, with the values of a small search."""
    with Solver(n=4, width=2) as solver:
        found = solver.solve(PROBLEM).to_json()
    rows = [(f"`{key}`", f"`{value}`") for key, value in _flat(found)]
    return "\n\n".join(
        (
            "# JSON",
            "What `solve --json` prints, key by key, with the values of one small search. A figure "
            "that does not apply is `null`. Counts are explained in the [Python reference]"
            "(python.md), whose objects these are.",
            _table(("key", "of one search"), rows),
        )
    )


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) down to plain values; of a list, only its first item."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        yield from _flat(value[0], f"{place}[]")
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
        yield place, text if len(text) <= 60 else f"{text[:57]}..."


def http_page() -> str:
    """Return the page of the server's routes, from its OpenAPI document."""
    document = openapi()
    parts = [
        "# HTTP",
        "The server's OpenAPI document is at `/openapi.json`, and a page to try it at `/docs`. "
        "A request may also hold a `search` object with [settings](settings.md) of its own.",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts += [f"## {method.upper()} {path}", (route.get("description") or "").strip()]
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            fields = body.get("schema", {}).get("properties", {})
            if read := {name: fields[name] for name in fields if name not in NEUTRAL}:
                parts.append(_table(("field", "type"), map(_field, read.items())))
                idle = ", ".join(f"`{name}`" for name in fields if name in NEUTRAL)
                parts.append(f"Accepted if their value changes nothing, else refused: {idle}.")
            if parameters := route.get("parameters"):
                named = [
                    (f"`{each['name']}`", each["in"], _kind(each["schema"])) for each in parameters
                ]
                parts.append(_table(("parameter", "in", "type"), named))
    return "\n\n".join(part for part in parts if part) + "\n"


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a server with the bundled pair."""
    from beamwright.serve.app import make_app as make_server
    from beamwright.serve.body import ServerLimits
    from beamwright.serve.queue import RequestQueue

    with Solver(n=4, width=2) as solver:
        found: dict[str, Any] = make_server(
            RequestQueue(solver, "bundled", ServerLimits())
        ).openapi()
    return found


def _field(item: tuple[str, Mapping[str, Any]]) -> tuple[str, str]:
    return f"`{item[0]}`", _kind(item[1])


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


_COUNTS = ("TreeStats", "TokenCounts", "KVStats", "MemoryStats", "CacheStats", "TimeStats")


def python_page() -> str:
    """Return the page of the public names, for mkdocstrings."""
    names = ("Solver", "Solution", "Candidate")
    parts = [
        "# Python",
        "The public names of `beamwright`; a guide is [here](../guides/python.md).",
    ]
    parts += [f"::: beamwright.{where}.{name}" for where, name in _public(names)]
    parts += [f"::: beamwright.solver.solution.{name}" for name in _COUNTS]
    return "\n\n".join(parts) + "\n"


def _public(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    import beamwright

    for name in names:
        yield getattr(beamwright, name).__module__.removeprefix("beamwright."), name


# --- markdown -----------------------------------------------------------------------------------


def _plain(text: str | None) -> str:
    """Return a help text as a table cell, with markdown characters escaped."""
    words = " ".join((text or "").split())
    return re.sub(r"([\\<>|*_{}])", r"\\\1", words)


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return table([dict(zip(heading, row, strict=True)) for row in rows], heading)


# Functions that make the reference pages, by page name.
GENERATED: Mapping[str, Callable[[], str]] = {
    "cli": cli_page,
    "settings": settings_page,
    "json": json_page,
    "http": http_page,
    "python": python_page,
}
