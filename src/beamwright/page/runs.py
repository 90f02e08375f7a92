"""Convert search trees to JSON events for the page, and read and write runs in files.

A run is the list of events of one search: its beginning, each decided round, and its end. A live
search appends events, a saved run is read from a file, and the page can export both. A step is sent
as a whole once, and later as its lineage with the changed values. A page in a file (`--tree`) is
the live page with the run inside, and loads nothing over the network. A model's text is embedded as
data, never as markup.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from beamwright.errors import InputError
from beamwright.io import describe_validation_error, nonfinite_as_null, read_file, write_atomically
from beamwright.tree import Node, NodeState, SearchTree

RUN_FORMAT, RUN_VERSION = "beamwright run", 1  # format of a run in a file


class StepEvent(TypedDict):
    """A step, or the values of a step that have changed.

    lineage: child numbers from the prompt, joined by dots; "" is the prompt itself.
    text: the text of this step alone; None if it was not recorded.
    tokens: number of tokens of this step.
    answer, vote: for a final candidate, its answer, and a text that is the same for equal answers.
    ahead: number of tokens of this step that were decoded before selection opened the step.
    thought: True if the step is part of a thought.
    sources: for a prompt of an aggregation, the lineages of the answers that it contains.
    kv: where the step's KV is: "device", "host" or "both"; None if nowhere or unknown.
    """

    lineage: str
    round: NotRequired[int]
    text: NotRequired[str | None]
    tokens: NotRequired[int]
    score: NotRequired[float | None]
    step_score: NotRequired[float | None]
    state: NotRequired[Literal["open", "candidate", "kept", "finished", "pruned"]]
    stop: NotRequired[str | None]
    notes: NotRequired[dict[str, str]]
    answer: NotRequired[str | None]
    vote: NotRequired[str | None]
    ahead: NotRequired[int]
    thought: NotRequired[bool]
    sources: NotRequired[list[str]]
    kv: NotRequired[str | None]


class Begin(TypedDict):
    """First event: a search begins, or waits to begin.

    started: seconds since 1970. A value is None if it is unknown, as in a saved run.
    """

    event: Literal["begin"]
    id: str
    started: float | None
    problem: str
    model: str | None
    method: str | None
    n: int | None
    width: int | None
    seed: int | None


class RoundEvent(TypedDict):
    """Event: a round is decided.

    tokens: number of tokens of the whole tree so far.
    elapsed_s: seconds since the search began; None if unknown.
    """

    event: Literal["round"]
    round: int
    nodes: list[StepEvent]
    tokens: int
    elapsed_s: float | None


EndState = Literal["done", "failed", "cancelled", "saved"]


class End(TypedDict):
    """Last event: a search is over.

    chosen: the lineage of the candidate whose answer was chosen.
    stats: the solution's statistics, such as `tokens` and `time`.
    warnings: reasons to doubt the answer, if any are known.
    """

    event: Literal["end"]
    state: EndState
    nodes: list[StepEvent]
    answer: str | None
    chosen: str | None
    reason_fewer: str | None
    warnings: NotRequired[list[str]]
    error: str | None
    elapsed_s: float | None
    stats: dict[str, Any]


Event = Begin | RoundEvent | End


def begin_event(run_id: str, about: Mapping[str, Any], started: float | None = None) -> Begin:
    """Return the first event of a run.

    about: problem, model, method, n, width and seed.
    """
    return {"event": "begin", "id": run_id, "started": started, **about}  # type: ignore[typeddict-item]


def end_event(state: EndState, **known: Any) -> End:
    """Return the last event of a run.

    known: values of the event; other values are None or empty.
    """
    blank: End = {
        "event": "end", "state": state, "nodes": [], "answer": None, "chosen": None,
        "reason_fewer": None, "error": None, "elapsed_s": None, "stats": {},
    }  # fmt: skip
    return {**blank, **known}  # type: ignore[typeddict-item]


# --- from a tree -----------------------------------------------------------------------------


class PageChanges:
    """Finds what has changed in a tree since the last event for the page.

    Call its methods in the thread that extends the tree.

    places: returns where the KV of a node is; None if this is unknown.
    """

    def __init__(self, places: Callable[[Node], str | None] | None = None) -> None:
        self._places = places
        self._known: dict[Node, tuple[Any, ...]] = {}
        self._kv: dict[Node, str | None] = {}
        self.num_tokens = 0

    def changes(self, tree: SearchTree) -> list[StepEvent]:
        """Return new nodes and changed values of other nodes, parents first.

        Pruned branches that cannot change any more are skipped.
        """
        return tree.collect_changes(self._change)

    def last_changes(self, tree: SearchTree) -> list[StepEvent]:
        """Return the last changes of an ended search, whose KV is freed."""
        self._places = None
        self._kv.clear()
        return self.changes(tree)

    def _change(self, node: Node) -> StepEvent | None:
        """Return the values of `node` that have changed since the last call; None if none have."""
        now = (node.state, node.score, node.step_score, node.stop, len(node.token_ids))
        before = self._known.get(node)
        if now == before and node.state is NodeState.PRUNED and self._kv.get(node) is None:
            return None  # a pruned node, as most nodes of a large tree: skip the comparison
        kv = None if self._places is None else self._places(node)
        moved = self._kv.get(node) != kv
        if now == before and not moved:
            return None
        step: StepEvent = {"lineage": dotted_lineage(node)}
        if now != before:
            self._known[node] = now
            step.update(_selection_values(node))
            if before is None or before[-1] != now[-1]:
                text = node.step_text if node.turn is None else node.turn.text
                step["round"], step["tokens"], step["text"] = node.round, now[-1], text
                if node.thought:
                    step["thought"] = True
                if node.turn is not None and node.turn.sources:
                    step["sources"] = [".".join(map(str, each)) for each in node.turn.sources]
                if node.usage["speculated_kept"]:
                    step["ahead"] = node.usage["speculated_kept"]
            self.num_tokens += len(node.token_ids) - (0 if before is None else before[-1])
        if moved:
            step["kv"] = self._kv[node] = kv
        return step


def dotted_lineage(node: Node) -> str:
    """Return the node's lineage joined by dots, without the problem's id."""
    return ".".join(map(str, node.lineage[1:]))


def _selection_values(node: Node) -> StepEvent:
    """Return the values of a node that scoring and selection change."""
    step: StepEvent = {
        "lineage": dotted_lineage(node),
        "state": node.state.value,
        "stop": None if node.stop is None else node.stop.value,
        "score": nonfinite_as_null(node.score),
        "step_score": nonfinite_as_null(node.step_score),
    }
    if node.notes:
        step["notes"] = dict(node.notes)
    if node.state is NodeState.FINISHED:
        step["answer"], step["vote"] = node.answer, node.vote
    return step


def saved_run(
    run_id: str,
    about: Mapping[str, Any],
    steps: Sequence[StepEvent],
    *,
    elapsed_s: float | None = None,
    **known: Any,
) -> list[Event]:
    """Return a whole run, made from the final state of its steps.

    A saved tree tells in which round a step was opened, but not when it was scored or pruned. Each
    round therefore shows the final state of its steps.

    known: values of the last event.
    """

    def shown_in(step: StepEvent) -> int:
        return max(1, step.get("round", 0))  # the prompt is shown with round 1

    events: list[Event] = [begin_event(run_id, about)]
    num_tokens, ordered = 0, sorted(steps, key=shown_in)
    for number, group in groupby(ordered, key=shown_in):
        nodes = list(group)
        num_tokens += sum(step.get("tokens", 0) for step in nodes if step["lineage"])
        when_s = elapsed_s if nodes[-1] is ordered[-1] else None
        events.append({
            "event": "round", "round": number, "nodes": nodes, "tokens": num_tokens,
            "elapsed_s": when_s,
        })  # fmt: skip
    return [*events, end_event("saved", elapsed_s=elapsed_s, **known)]


_PARTS = Path(__file__).parent / "web"
# A script may use the exports of the scripts before it. `saved.js` replaces `api.js` in a file.
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
    """Return the text of the file `name` of the page, such as a script."""
    return (_PARTS / name).read_text(encoding="ascii")


def fill_page(head: str, scripts: str, *, title: str, problem: str = "", answer: str = "") -> str:
    """Return the page's HTML template with its placeholders filled.

    head, scripts: markup.
    title, problem, answer: plain texts, which are escaped.
    """
    texts = {"title": title, "problem": problem, "answer": answer}
    parts = {name: html.escape(text) for name, text in texts.items()}
    parts |= {"head": head, "scripts": scripts}
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], page_part("index.html"))


def write_tree_page(tree: SearchTree, chosen: Node | None, path: Path, title: str) -> None:
    """Write the page of a tree to a file.

    chosen: the final candidate that was chosen; None if there is none.

    Raises:
        InputError: if the file cannot be written.
    """
    write_atomically(path, tree_page(tree, chosen, path.stem, title))


def tree_page(tree: SearchTree, chosen: Node | None, name: str, title: str) -> str:
    """Return the page of a tree as ASCII text.

    chosen: the final candidate that was chosen; None if there is none.
    name: the name of the run.
    """
    problem = tree.root.problem_text
    answer = None if chosen is None else chosen.answer
    events = saved_run(
        name,
        _about(problem, {}),
        PageChanges().changes(tree),
        answer=answer,
        chosen=None if chosen is None else dotted_lineage(chosen),
        reason_fewer=tree.reason_fewer,
    )
    run = {"format": RUN_FORMAT, "version": RUN_VERSION, "events": events}
    # Escape `<`, so that the data contains neither `</script>` nor `<!--`, which would end the
    # script.
    data = json.dumps(run, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = "\n".join(_MODULE_WORDS.sub("", page_part(f"{name}.js")) for name in _SCRIPTS)
    page = fill_page(
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{page_part('page.css')}</style>",
        f'<script type="application/json" id="data">{data}</script>\n'
        f'<script>\n"use strict";\n{script}</script>',
        title=title,
        problem=problem,
        answer=answer or "",
    )
    # The page is ASCII, because a model's text may contain what UTF-8 cannot encode.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _about(problem: str, search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's first event. search: settings of the search, by option."""
    same = {name: search.get(name) for name in ("model", "n", "width", "seed")}
    return {"problem": problem, "method": search.get("search"), **same}


# --- what is read ----------------------------------------------------------------------------


def read_runs(path: Path) -> list[list[Event]]:
    """Return the runs in a file or in the `trees` folders of an evaluation; a run's id is the name
    of its file.

    Raises:
        InputError: if no file has a run, or if a file is damaged; the message names the file.
    """
    if not path.is_dir():
        return [_read_file(path)]
    pages = sorted(page for folder in path.rglob("trees") for page in folder.glob("*.html"))
    if not pages:
        raise InputError(f"{path}: holds no trees; write some with eval --out DIR --trees K")
    return [_read_file(page) for page in pages]


def with_unique_ids(runs: Sequence[list[Event]]) -> list[list[Event]]:
    """Return the same runs, with a number appended to each id that an earlier run has."""
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
    """Return the run in a tree page, an exported run or a checkpoint.

    Raises:
        InputError: if the file has another format or is damaged.
    """
    content = read_file(path)
    page = _PAGE_DATA.search(content)
    try:
        saved = json.loads(content if page is None else page[1])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: neither a saved run nor a tree page") from error
    kind = saved.get("format") if isinstance(saved, dict) else None
    if kind == RUN_FORMAT:
        return _exported_events(path, saved, named=page is None)
    if page is not None:
        raise InputError(f"{path}: not a page of --tree, or damaged or of an older version")
    if kind == "beamwright checkpoint":
        from beamwright.saved.checkpoint import ENDED, read_checkpoint  # noqa: PLC0415 (loads torch)

        # `CheckpointWriter.end` adds ENDED once the search has ended.
        read, ended = read_checkpoint(path), saved.get(ENDED)
        ended = ended if isinstance(ended, dict) else {}
        known = {name: ended.get(name) for name in ("answer", "chosen", "reason_fewer")}
        about = _about(read.tree.root.problem_text, read.settings)
        steps = PageChanges().changes(read.tree)
        run = saved_run(path.stem, about, steps, elapsed_s=read.elapsed_s, **known)
        return _validated_events(path, run)
    raise InputError(f"{path}: neither a saved run nor a tree page")


def _exported_events(path: Path, saved: Mapping[str, Any], *, named: bool) -> list[Event]:
    """Return the events of an exported run.

    named: True to keep the run's own id; otherwise the id is the file's name.
    """
    version = saved.get("version")
    if version != RUN_VERSION:
        raise InputError(f"{path}: a run of version {version!r}; this program reads {RUN_VERSION}")
    events = _validated_events(path, saved.get("events"))
    begins = [number for number, event in enumerate(events) if event["event"] == "begin"]
    if begins != [0] or events[0]["event"] != "begin":
        raise InputError(f"{path}: a damaged run: only its first event must be 'begin'")
    if not named:
        events[0]["id"] = path.stem
    if events[-1]["event"] != "end":  # the run was exported before its search ended
        events.append(end_event("saved"))
    return events


def _validated_events(path: Path, events: Any) -> list[Event]:
    """Validate the events of a file, and return them.

    Raises:
        InputError: if the data does not have the form of events.
    """
    try:
        return TypeAdapter(list[Event]).validate_python(events)
    except ValidationError as error:
        raise InputError(f"{path}: a damaged run: {describe_validation_error(error)}") from error
