"""A tree as JSON: what the page is told of a search, and runs of it in files.

A run is the list of its events: a search begins, decides rounds, and ends. A live search appends to
it, a saved one is read into it, and the page exports it. A step is sent whole once, and later with
its lineage and what has changed. A page in a file (`--tree`) is the live page's own, with the run
in it; it loads nothing from anywhere. Text of a model reaches it as data only, never as markup.
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
from beamwright.io import describe_fault, finite, read_file, write_whole
from beamwright.tree import Node, NodeState, SearchTree

RUN_FORMAT, RUN_VERSION = "beamwright run", 1  # of a run in a file


class StepEvent(TypedDict):
    """A step, or what has changed of it.

    lineage: dotted child ordinals from the prompt, whose own is "". tokens: of this step; text: of
    it alone, None where it was not recorded. answer, vote: what a final candidate states, and one
    spelling for equal answers. ahead: of its tokens, those decoded before selection opened it.
    thought: it is of a thought.
    kv: where its KV is, "device", "host" or "both"; None where it has none, or nobody knows.
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
    kv: NotRequired[str | None]


class Begin(TypedDict):
    """A search begins, or waits for its turn. started: seconds since 1970. None for what is not
    known of a saved one."""

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
    """A round is decided. tokens: of the whole tree; elapsed_s: None where it is not known."""

    event: Literal["round"]
    round: int
    nodes: list[StepEvent]
    tokens: int
    elapsed_s: float | None


EndState = Literal["done", "failed", "cancelled", "saved"]


class End(TypedDict):
    """A search is over. chosen: the lineage of its answer's candidate; stats: figures by kind;
    warnings: what makes the answer doubtful, where that is known."""

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


def begin(run_id: str, about: Mapping[str, Any], started: float | None = None) -> Begin:
    """The first event of a run. about: problem, model, method, n, width and seed."""
    return {"event": "begin", "id": run_id, "started": started, **about}  # type: ignore[typeddict-item]


def end(state: EndState, **known: Any) -> End:
    """The last event of a run: what is known of its end."""
    blank: End = {
        "event": "end", "state": state, "nodes": [], "answer": None, "chosen": None,
        "reason_fewer": None, "error": None, "elapsed_s": None, "stats": {},
    }  # fmt: skip
    return {**blank, **known}  # type: ignore[typeddict-item]


# --- from a tree -----------------------------------------------------------------------------


class PageTree:
    """One tree as the page knows it. Looks at a tree only in the thread that grows it.

    places: where the KV of a node is; None where nobody knows.
    """

    def __init__(self, places: Callable[[Node], str | None] | None = None) -> None:
        self._places = places
        self._known: dict[Node, tuple[Any, ...]] = {}
        self._kv: dict[Node, str | None] = {}
        self.num_tokens = 0

    def changes(self, tree: SearchTree) -> list[StepEvent]:
        """New nodes and what has changed of others, parents first; looks past pruned branches."""
        return tree.collect_changes(self._change)

    def over(self, tree: SearchTree) -> list[StepEvent]:
        """What has changed last; that no step has KV any more goes without saying."""
        self._places = None
        self._kv.clear()
        return self.changes(tree)

    def _change(self, node: Node) -> StepEvent | None:
        now = (node.state, node.score, node.step_score, node.stop, len(node.token_ids))
        before = self._known.get(node)
        if now == before and node.state is NodeState.PRUNED and self._kv.get(node) is None:
            return None  # most of a large tree
        kv = None if self._places is None else self._places(node)
        moved = self._kv.get(node) != kv
        if now == before and not moved:
            return None
        step: StepEvent = {"lineage": dotted(node)}
        if now != before:
            self._known[node] = now
            step.update(_judged(node))
            if before is None or before[-1] != now[-1]:
                text = node.step_text if node.turn is None else node.turn.text
                step["round"], step["tokens"], step["text"] = node.round, now[-1], text
                if node.thought:
                    step["thought"] = True
                if node.usage["speculated_kept"]:
                    step["ahead"] = node.usage["speculated_kept"]
            self.num_tokens += len(node.token_ids) - (0 if before is None else before[-1])
        if moved:
            step["kv"] = self._kv[node] = kv
        return step


def dotted(node: Node) -> str:
    """Its lineage, without the problem's id."""
    return ".".join(map(str, node.lineage[1:]))


def _judged(node: Node) -> StepEvent:
    """What a verdict changes of a node."""
    step: StepEvent = {
        "lineage": dotted(node),
        "state": node.state.value,
        "stop": None if node.stop is None else node.stop.value,
        "score": finite(node.score),
        "step_score": finite(node.step_score),
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
    """A whole run of steps that are as they ended: a tree that was saved says in which round a step
    was opened, not when each verdict about it fell. known: of its end."""

    def shown_in(step: StepEvent) -> int:
        return max(1, step.get("round", 0))  # the prompt comes with the first

    events: list[Event] = [begin(run_id, about)]
    num_tokens, ordered = 0, sorted(steps, key=shown_in)
    for number, group in groupby(ordered, key=shown_in):
        nodes = list(group)
        num_tokens += sum(step.get("tokens", 0) for step in nodes if step["lineage"])
        when_s = elapsed_s if nodes[-1] is ordered[-1] else None
        events.append({
            "event": "round", "round": number, "nodes": nodes, "tokens": num_tokens,
            "elapsed_s": when_s,
        })  # fmt: skip
    return [*events, end("saved", elapsed_s=elapsed_s, **known)]


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
