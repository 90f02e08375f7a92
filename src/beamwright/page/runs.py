"""Runs in files: the page of a search (`--tree`), and whatever `beamwright view` opens.

A page is one file that loads nothing from anywhere: the live page's own, with the run in it. Text
of a model reaches it as data only, never as markup. What can be read: runs that a page exported,
pages, checkpoints, and folders of an evaluation.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from beamwright.errors import InputError
from beamwright.io import describe_fault, read_file, write_whole
from beamwright.page.events import RUN_FORMAT, RUN_VERSION, Event, PageTree, dotted, end, saved_run
from beamwright.tree import Node, SearchTree

_PARTS = Path(__file__).parent / "web"
# Each may name what those before it export; `saved.js` stands for `api.js`.
_SCRIPTS = (
    "common", "layout", "tree", "details", "rounds", "saved", "run", "pane", "controls", "export",
    "main",
)  # fmt: skip
_MODULE_WORDS = re.compile(r"^(?:import .*\n|export )", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_PAGE_DATA = re.compile(rb'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_NAME = re.compile(r"[^\w.-]+")


# --- pages -----------------------------------------------------------------------------------


def page_part(name: str) -> str:
    """The text of a file of the page."""
    return (_PARTS / name).read_text(encoding="ascii")


def filled_page(head: str, scripts: str, *, title: str, problem: str = "", answer: str = "") -> str:
    """The page as markup. head, scripts: markup; the others are text."""
    texts = {"title": title, "problem": problem, "answer": answer}
    parts = {name: html.escape(text) for name, text in texts.items()}
    parts |= {"head": head, "scripts": scripts}
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], page_part("index.html"))


def write_tree_page(tree: SearchTree, chosen: Node | None, path: Path, title: str) -> None:
    """Write the page of a tree. chosen: the final candidate that was chosen, if any.

    Raises:
        InputError: if the file cannot be written.
    """
    write_whole(path, tree_page(tree, chosen, path.stem, title))


def tree_page(tree: SearchTree, chosen: Node | None, name: str, title: str) -> str:
    """The page of a tree, in ASCII. name: what the run is called. See `write_tree_page`."""
    problem = tree.root.problem_text
    answer = None if chosen is None else chosen.answer
    events = saved_run(
        name,
        _about(problem, {}),
        PageTree().changes(tree),
        answer=answer,
        chosen=None if chosen is None else dotted(chosen),
        reason_fewer=tree.reason_fewer,
    )
    run = {"format": RUN_FORMAT, "version": RUN_VERSION, "events": events}
    # No `<` inside a script element, so neither `</script>` nor `<!--`.
    data = json.dumps(run, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = "\n".join(_MODULE_WORDS.sub("", page_part(f"{name}.js")) for name in _SCRIPTS)
    page = filled_page(
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{page_part('page.css')}</style>",
        f'<script type="application/json" id="data">{data}</script>\n'
        f'<script>\n"use strict";\n{script}</script>',
        title=title,
        problem=problem,
        answer=answer or "",
    )
    # ASCII throughout: a model's text may hold what UTF-8 cannot.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _about(problem: str, search: Mapping[str, Any]) -> dict[str, Any]:
    same = {name: search.get(name) for name in ("model", "n", "width", "seed")}
    return {"problem": problem, "method": search.get("search"), **same}


# --- what is read ----------------------------------------------------------------------------


def read_runs(path: Path) -> list[list[Event]]:
    """The runs in a file, or in the trees of an evaluation's folder; ids are names of files.

    Raises:
        InputError: if there is none, or a file is damaged; names it.
    """
    if not path.is_dir():
        return [_read_file(path)]
    pages = sorted(page for folder in path.rglob("trees") for page in folder.glob("*.html"))
    if not pages:
        raise InputError(f"{path}: holds no trees (eval --out DIR --trees K writes some)")
    return [_read_file(page) for page in pages]


def with_unique_ids(runs: Sequence[list[Event]]) -> list[list[Event]]:
    """The same, with a number behind the id of each that has another's."""
    seen: set[str] = set()
    for run in runs:
        first = run[0]
        assert first["event"] == "begin"
        name = _NAME.sub("-", first["id"]).strip(".") or "run"
        ids = (name, *(f"{name}-{number}" for number in range(2, len(runs) + 2)))
        first["id"] = next(free for free in ids if free not in seen)
        seen.add(first["id"])
    return list(runs)


def _read_file(path: Path) -> list[Event]:
    content = read_file(path)
    page = _PAGE_DATA.search(content)
    try:
        saved = json.loads(content if page is None else page[1])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: neither a saved run nor a tree page") from error
    kind = saved.get("format") if isinstance(saved, dict) else None
    if kind == RUN_FORMAT:
        return _of_run(path, saved, named=page is None)
    if page is not None:
        raise InputError(f"{path}: not a page that --tree wrote, or a damaged or older one")
    if kind == "beamwright checkpoint":
        from beamwright.saved.checkpoint import ENDED, read_checkpoint  # noqa: PLC0415 (loads torch)

        read, ended = read_checkpoint(path), saved.get(ENDED)  # as `CheckpointWriter.end` was told
        ended = ended if isinstance(ended, dict) else {}  # nothing where the search may go on
        known = {name: ended.get(name) for name in ("answer", "chosen", "reason_fewer")}
        about = _about(read.tree.root.problem_text, read.settings)
        steps = PageTree().changes(read.tree)
        run = saved_run(path.stem, about, steps, elapsed_s=read.elapsed_s, **known)
        return _checked(path, run)
    raise InputError(f"{path}: neither a saved run nor a tree page")


def _of_run(path: Path, saved: Mapping[str, Any], *, named: bool) -> list[Event]:
    """named: its own id is shown, else the file's name."""
    version = saved.get("version")
    if version != RUN_VERSION:
        raise InputError(f"{path}: a run of version {version!r}; this program reads {RUN_VERSION}")
    events = _checked(path, saved.get("events"))
    begins = [number for number, event in enumerate(events) if event["event"] == "begin"]
    if begins != [0] or events[0]["event"] != "begin":
        raise InputError(f"{path}: the run does not begin with its beginning")
    if not named:
        events[0]["id"] = path.stem
    if events[-1]["event"] != "end":  # exported while it grew
        events.append(end("saved"))
    return events


def _checked(path: Path, events: Any) -> list[Event]:
    try:
        return TypeAdapter(list[Event]).validate_python(events)
    except ValidationError as error:
        raise InputError(f"{path}: a damaged run: {describe_fault(error)}") from error
