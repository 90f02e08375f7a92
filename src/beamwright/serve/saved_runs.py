"""Saved runs as the page's events: what it exported, checkpoints, recordings, tree pages.

A tree that was saved says in which round a step was opened, not when each verdict about it fell:
its rounds show every step as it ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from beamwright.errors import InputError
from beamwright.files import read_regular
from beamwright.search.answers import extract_answer, normalise_answer
from beamwright.serve.events import (
    RUN_FORMAT,
    RUN_VERSION,
    About,
    Event,
    RoundEvent,
    StepEvent,
    begin,
    end,
)
from beamwright.serve.shown import PageTree

if TYPE_CHECKING:
    from beamwright.saved.checkpoint import Checkpoint
    from beamwright.tree import RecordedTree

_PAGE_DATA = re.compile(rb'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_NAME = re.compile(r"[^\w.-]+")


def read_runs(path: Path) -> list[list[Event]]:
    """The runs in a file, or in the trees of an evaluation's folder; ids are names of files.

    Raises:
        InputError: if there is none, or a file is damaged; names it.
    """
    if not path.is_dir():
        return list(_read_file(path))
    pages = sorted(page for folder in path.rglob("trees") for page in folder.glob("*.html"))
    if not pages:
        raise InputError(f"{path}: holds no trees (eval --out DIR --trees K writes some)")
    return [run for page in pages for run in _read_file(page)]


def with_unique_ids(runs: Sequence[list[Event]]) -> list[list[Event]]:
    """The same, with a number behind the id of each that has another's."""
    seen: set[str] = set()
    for run in runs:
        first = run[0]
        assert first["event"] == "begin"
        name = _NAME.sub("-", first["id"]).strip(".") or "run"
        ids = (name, *(f"{name}-{number}" for number in range(2, len(runs) + 2)))
        first["id"] = next(each for each in ids if each not in seen)
        seen.add(first["id"])
    return list(runs)


def _read_file(path: Path) -> Iterator[list[Event]]:
    try:
        content = read_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    page = _PAGE_DATA.search(content)
    try:
        found = json.loads(content if page is None else page[1])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: neither a saved run nor a tree page") from error
    kind = found.get("format") if isinstance(found, dict) else None
    if page is not None:
        yield from _of_page(path, found)
    elif kind == RUN_FORMAT:
        yield _exported(path, found)
    elif kind == "beamwright checkpoint":
        from beamwright.saved.checkpoint import ENDED, read_checkpoint  # noqa: PLC0415 (loads torch)

        yield _of_checkpoint(path, read_checkpoint(path), found.get(ENDED))
    elif isinstance(found, dict) and "prompt_tokens" in found:
        from beamwright.saved.recorded import read_recorded  # noqa: PLC0415

        yield _of_recording(path, read_recorded(path))
    else:
        raise InputError(f"{path}: neither a saved run nor a tree page")


def _about(problem: str, search: Mapping[str, Any] | None = None) -> About:
    found = search or {}
    return {
        "problem": problem,
        "model": found.get("model"),
        "method": found.get("search"),
        "n": found.get("n"),
        "width": found.get("width"),
        "seed": found.get("seed"),
    }


def _in_rounds(steps: Sequence[StepEvent], elapsed_s: float | None = None) -> list[RoundEvent]:
    """A round per round; the prompt comes with the first."""
    rounds: list[RoundEvent] = []
    num_tokens = 0
    for number, group in groupby(sorted(steps, key=_round), key=_round):
        nodes = list(group)
        num_tokens += sum(step.get("tokens", 0) for step in nodes if step["lineage"])
        rounds.append(
            {
                "event": "round",
                "round": number,
                "nodes": nodes,
                "tokens": num_tokens,
                "elapsed_s": None,
            }
        )
    if rounds:
        rounds[-1]["elapsed_s"] = elapsed_s
    return rounds


def _round(step: StepEvent) -> int:
    return max(1, step.get("round", 0))


# --- of each kind ----------------------------------------------------------------------------


def _exported(path: Path, content: Mapping[str, Any]) -> list[Event]:
    if content.get("version") != RUN_VERSION:
        version = content.get("version")
        raise InputError(f"{path}: a run of version {version!r}; this program reads {RUN_VERSION}")
    events = _checked(path, content.get("events"))
    if [i for i, each in enumerate(events) if each["event"] == "begin"] != [0]:
        raise InputError(f"{path}: the run does not begin with its beginning")
    if events[-1]["event"] != "end":  # exported while it grew
        events.append(end("saved"))
    return events


def _checked(path: Path, events: Any) -> list[Event]:
    try:
        return TypeAdapter(list[Event]).validate_python(events)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise InputError(f"{path}: a damaged run: {place:.80}: {fault['msg']}") from error


def _of_checkpoint(path: Path, saved: Checkpoint, ended: Any) -> list[Event]:
    """ended: as `CheckpointWriter.end` was told; None where the search may go on."""
    steps = PageTree().changes(saved.tree)
    about = _about(saved.tree.root.problem_text, saved.settings)
    rounds = _in_rounds(steps, saved.elapsed_s)
    given = ended if isinstance(ended, dict) else {}
    known = {name: given.get(name) for name in ("answer", "chosen", "reason_fewer")}
    last = _checked(path, [end("saved", elapsed_s=saved.elapsed_s, **known)])
    return [begin(path.stem, about), *rounds, *last]


def _of_recording(path: Path, saved: RecordedTree) -> list[Event]:
    steps: list[StepEvent] = [
        {"lineage": "", "round": 0, "state": "kept", "tokens": saved.prompt_tokens}
    ]
    for node in saved.nodes:
        steps.append(
            {
                "lineage": ".".join(map(str, node.lineage)),
                "round": node.round,
                "text": None,
                "tokens": node.tokens,
                "score": node.score,
                "step_score": None,
                "state": node.state.value,
                "stop": node.stop.value,
            }
        )
    about = _about(f"{saved.problem_id} (recorded without its text)")
    return [begin(path.stem, about), *_in_rounds(steps), end("saved")]


def _of_page(path: Path, data: Any) -> Iterator[list[Event]]:
    try:
        for tree in data["trees"]:
            steps, texts = [], list[str]()
            id_length = len(tree["nodes"][0]["lineage"]) + 1
            for node in tree["nodes"]:
                is_prompt = node["parent"] is None
                texts.append("" if is_prompt else texts[node["parent"]] + node["text"])
                steps.append(_of_page_node(node, node["lineage"][id_length:], texts[-1]))
            chosen = None if tree["chosen"] is None else steps[tree["chosen"]]["lineage"]
            known = {"answer": tree["answer"], "reason_fewer": tree["reason_fewer"]}
            events: list[Event] = [
                begin(path.stem, _about(tree["problem"])),
                *_in_rounds(steps),
                end("saved", chosen=chosen, **known),
            ]
            yield _checked(path, events)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{path}: not a page that --tree wrote, or a damaged one") from error


def _of_page_node(node: Mapping[str, Any], lineage: str, text: str) -> StepEvent:
    same = ("round", "text", "tokens", "score", "step_score", "state", "stop")
    step: dict[str, Any] = {name: node[name] for name in same}
    step["lineage"], step["notes"] = lineage, node.get("notes", {})
    if node["state"] == "finished":
        step["answer"] = extract_answer(text)
        step["vote"] = normalise_answer(step["answer"]) if step["answer"] else None
    return step  # type: ignore[return-value]
