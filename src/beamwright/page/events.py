"""A tree as JSON: what the page is told of a search, that begins, decides rounds, and ends.

A run is the list of its events: what a live search appends to, what a saved one is read into, and
what the page exports. A step is sent whole once, and later with its lineage and what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from beamwright.io import finite
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
        return tree.changed(self._change)

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
