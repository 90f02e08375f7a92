"""Counters: what was done, and what it took, counted once; all statistics are differences of two.

The clock of a run, the running batch, a generator elsewhere, the verifier and every model's KV add
to one of these each. Knows fields, `+` and `-`; no room of the package. What a solution, a metric
or a gauge says is a view of the difference between two moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import add, sub
from typing import Any, NamedTuple, Self

PHASES = ("decode", "verify", "both", "schedule", "stall")


@dataclass
class Counters:
    """Counts since somebody began to count.

    Phases of the loop, every instant counted once: decode_s, verify_s, schedule_s; both_s: decoding
    beside scoring; stall_s: waiting for transfers.

    The running batch. groups: how often it was filled from empty. iterations: of at most 16 tokens;
    steps: forward passes in them. admitted: rows that joined, again after a preemption. row_tokens:
    tokens of real rows, speculative ones included; slot_tokens: of all rows that were computed,
    padding included. preempted: rows that had to leave in the middle of their step. parking_plans:
    whose rows park instead of waiting behind barriers.
    speculative_rows: that were begun before selection had opened their nodes.

    The verifier. verifier_calls: its passes; scored_steps: in them; scored_tokens: of these steps.

    KV of a model. transfer_wait_s: of whoever computes. recomputed_tokens: written again.
    needed_tokens: of whole paths of rows that joined, and of what was prefilled; of these
    prefilled_tokens were new, and loaded_tokens and dropped_tokens had left the device since they
    were needed last: they came back over the link, or were computed again. evicted_blocks: left the
    device whole; of these needed again: loaded_blocks, recomputed_blocks: the thrashing that the
    decoupled-exploration thesis counts (Algorithm 1).

    The link, and memory that went from one model to the other: h2d_bytes, d2h_bytes; moves,
    moved_bytes.

    A generator elsewhere. requests: that were answered, or failed; retries: of them, repeated ones.
    prompt_tokens, cached_tokens: as the server says; of so many replies it has not said it:
    untold_prompts, untold_cached.

    Sparse decoding. sparse_tokens: of rows that selected; visible_tokens, selected_tokens: that
    these saw, and attended to. left_out: of the attention of so many `sparse_heads` (layers, heads
    and tokens), what was not selected, or at most; none where the scores do not say. corrections:
    heads whose predicted query was too far off. Of a rank beside the decoder: rank_takes:
    selections that a layer took; rank_late: of them, those it waited for, rank_waited_s in all.
    rank_s: of the rank's own work; rank_link_s: of it, on the link.
    """

    decode_s: float = 0.0
    verify_s: float = 0.0
    both_s: float = 0.0
    schedule_s: float = 0.0
    stall_s: float = 0.0

    groups: int = 0
    iterations: int = 0
    steps: int = 0
    admitted: int = 0
    row_tokens: int = 0
    slot_tokens: int = 0
    preempted: int = 0
    parking_plans: int = 0
    speculative_rows: int = 0

    verifier_calls: int = 0
    scored_steps: int = 0
    scored_tokens: int = 0

    transfer_wait_s: float = 0.0
    cancelled_transfers: int = 0
    recomputed_tokens: int = 0
    needed_tokens: int = 0
    prefilled_tokens: int = 0
    loaded_tokens: int = 0
    dropped_tokens: int = 0
    evicted_blocks: int = 0
    loaded_blocks: int = 0
    recomputed_blocks: int = 0

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    moves: int = 0
    moved_bytes: int = 0

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    untold_prompts: int = 0
    untold_cached: int = 0

    sparse_tokens: int = 0
    visible_tokens: int = 0
    selected_tokens: int = 0
    left_out: float = 0.0
    sparse_heads: int = 0
    corrections: int = 0
    rank_takes: int = 0
    rank_late: int = 0
    rank_waited_s: float = 0.0
    rank_s: float = 0.0
    rank_link_s: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return self._combined(add, other)

    def __sub__(self, other: Counters) -> Counters:
        return self._combined(sub, other)

    def copy(self) -> Counters:
        """The counts at this moment."""
        return replace(self)

    def _combined(self, combine: Callable[[Any, Any], Any], other: Counters) -> Counters:
        names = [each.name for each in fields(self)]
        return Counters(**{n: combine(getattr(self, n), getattr(other, n)) for n in names})

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase that there was any of."""
        taken = {phase: getattr(self, f"{phase}_s") for phase in PHASES}
        return {phase: seconds for phase, seconds in taken.items() if seconds}

    @property
    def reused_tokens(self) -> int:
        """Of those needed, on the device ever since they were written or needed last."""
        missed = self.prefilled_tokens + self.loaded_tokens + self.dropped_tokens
        return self.needed_tokens - missed


def figure(counter: str, *, per: str | None = None, unless: str | None = None) -> Any:
    """A field of a `CounterView` that is a counter of another name.

    per: the counter that it is divided by; None of nothing. unless: None where this counter has
    counted.
    """
    return field(metadata={"counter": counter, "per": per, "unless": unless})


@dataclass(frozen=True)
class CounterView:
    """Figures for people and JSON, of what was counted between two moments.

    A field is the counter of its name, or what `figure` says, or known from elsewhere.
    """

    @classmethod
    def of(cls, counted: Counters, **own: Any) -> Self:
        """The view of these counts. own: fields that are no counters."""
        for each in fields(cls):
            if each.name in own:
                continue
            counter, per, unless = map(each.metadata.get, ("counter", "per", "unless"))
            value = getattr(counted, counter or each.name)
            if per is not None:
                value = share_of(value, getattr(counted, per))
            own[each.name] = None if unless and getattr(counted, unless) else value
        return cls(**own)


def share_of(total: float, num: int) -> float | None:
    """A mean or a share; None of nothing."""
    return total / num if num else None


class Level(NamedTuple):
    """Bytes of KV on one tier at one moment, and the most that there may be."""

    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class Usage:
    """What an engine holds at one moment, and has counted so far; any thread may read it.

    It is read while the engine works, so numbers may be of slightly different moments.
    levels: by model ("generator", "verifier") and tier ("device", "host"), where it has any.
    counters: of the "engine" itself, and of each model's KV.
    """

    levels: Mapping[tuple[str, str], Level]
    counters: Mapping[str, Counters]

    def __add__(self, other: Usage) -> Usage:
        """Of two engines of one kind."""
        levels, counters = dict(self.levels), dict(self.counters)
        for key, level in other.levels.items():
            mine = levels.get(key, Level(0, 0))
            levels[key] = Level(
                mine.used_bytes + level.used_bytes, mine.budget_bytes + level.budget_bytes
            )
        for name, counted in other.counters.items():
            counters[name] = counters.get(name, Counters()) + counted
        return Usage(levels, counters)

    def over(self) -> Usage:
        """What stays of an engine that is gone: its counts."""
        return Usage({}, self.counters)

    @property
    def engine(self) -> Counters:
        """What the running batch, the clock and the link have counted."""
        return self.counters["engine"]

    @property
    def has_link(self) -> bool:
        """True if KV is on two tiers."""
        return any(tier == "host" for _, tier in self.levels)


class Progress:
    """Hears of phases and tokens. This one does nothing; a subclass shows them.

    Called between iterations, from the thread that works. Policies neither see nor steer it.
    """

    def doing(self, what: str) -> None:
        """A phase begins: "loading the verifier bundled", "round 3: decoding 16 beams"."""

    def wrote(self, num_tokens: int) -> None:
        """So many tokens were decoded, of all beams together."""

    def ended(self) -> None:
        """What was begun is over: loading, or a call's searches."""
