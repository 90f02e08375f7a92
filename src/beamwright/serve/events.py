"""What the page is told of a search: it begins, rounds of changed steps, it ends. Data only.

A run is the list of its events: what a live search appends to, what a saved one is read into, and
what the page exports. A step is sent whole once, and later with its lineage and what has changed.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

RUN_FORMAT, RUN_VERSION = "beamwright run", 1  # of an exported run


class StepEvent(TypedDict):
    """A step, or what has changed of it.

    lineage: dotted child ordinals from the prompt, whose own is "". tokens: of this step; text: of
    it alone, None where it was not recorded. answer, vote: what a final candidate states, and one
    spelling for equal answers. ahead: of its tokens, those decoded before selection opened it.
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
    kv: NotRequired[str | None]


class About(TypedDict):
    """What a search is of; None for what is not known of a saved one."""

    problem: str
    model: str | None
    method: str | None
    n: int | None
    width: int | None
    seed: int | None


class Begin(About):
    """A search begins, or waits for its turn. started: seconds since 1970."""

    event: Literal["begin"]
    id: str
    started: float | None


class RoundEvent(TypedDict):
    """A round is decided. tokens: of the whole tree; elapsed_s: None where it is not known."""

    event: Literal["round"]
    round: int
    nodes: list[StepEvent]
    tokens: int
    elapsed_s: float | None


class End(TypedDict):
    """A search is over. chosen: the lineage of its answer's candidate; stats: figures by kind;
    warnings: what makes the answer doubtful, where that is known."""

    event: Literal["end"]
    state: Literal["done", "failed", "cancelled", "saved"]
    nodes: list[StepEvent]
    answer: str | None
    chosen: str | None
    reason_fewer: str | None
    warnings: NotRequired[list[str]]
    error: str | None
    elapsed_s: float | None
    stats: dict[str, Any]


Event = Begin | RoundEvent | End


def begin(run_id: str, about: About, *, started: float | None = None) -> Begin:
    """The first event of a run."""
    return {"event": "begin", "id": run_id, "started": started, **about}


def end(state: Literal["done", "failed", "cancelled", "saved"], **known: Any) -> End:
    """The last event of a run: what is known of its end."""
    blank: End = {
        "event": "end", "state": state, "nodes": [], "answer": None, "chosen": None,
        "reason_fewer": None, "error": None, "elapsed_s": None, "stats": {},
    }  # fmt: skip
    return {**blank, **known}  # type: ignore[typeddict-item]
