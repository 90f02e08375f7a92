"""Counters behind all statistics: tokens, bytes, seconds and events of an engine.

The running batch, the clock of a run, a remote server, the verifier and the KV of each model have
one `Counters` object each, and each event is counted once. The statistics of a search are the
difference between two copies of the counters. This module imports no other package of Beamwright.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import add, sub
from typing import Any, NamedTuple, Self

PHASES = ("decode", "verify", "both", "schedule", "stall")


@dataclass
class Counters:
    """Counts since this object was created, in tokens, bytes, seconds or events.

    The first fields divide all time of the engine's loop into phases; each instant counts once.
    """

    decode_s: float = 0.0  # decoding alone
    verify_s: float = 0.0  # scoring alone
    both_s: float = 0.0  # decoding and scoring at the same time
    schedule_s: float = 0.0  # planning and selection
    stall_s: float = 0.0  # waiting for transfers

    groups: int = 0  # times that the running batch was filled from empty
    iterations: int = 0  # iterations of at most 16 tokens
    steps: int = 0  # forward passes in these iterations
    admitted: int = 0  # rows admitted; a preempted row counts again
    row_tokens: int = 0  # tokens of real rows, speculative rows included
    slot_tokens: int = 0  # tokens of all computed rows, padding included
    preempted: int = 0  # rows that left the batch in the middle of their step
    parking_plans: int = 0  # plans with parking, which has no barriers (`protocols.Parking`)
    speculative_rows: int = 0  # rows of children that selection had not opened yet

    verifier_calls: int = 0  # calls of the verifier
    scored_steps: int = 0  # steps scored in these calls
    scored_tokens: int = 0  # tokens of these steps

    transfer_wait_s: float = 0.0  # time that computation waited for transfers
    cancelled_transfers: int = 0  # queued copies dropped because their KV was no longer needed
    recomputed_tokens: int = 0  # tokens whose KV was computed again
    needed_tokens: int = 0  # tokens on the paths of admitted rows, and prefilled tokens
    prefilled_tokens: int = 0  # needed tokens that were new
    loaded_tokens: int = 0  # needed tokens that had left the device and were loaded from the host
    dropped_tokens: int = 0  # needed tokens that had left the device and were computed again
    evicted_blocks: int = 0  # blocks that left the device
    # Evicted blocks that were needed again, and loaded. Together with `recomputed_blocks` they are
    # the thrashing counted in the thesis on decoupled exploration (docs/papers/decoupled.md).
    loaded_blocks: int = 0
    recomputed_blocks: int = 0  # evicted blocks that were needed again, and computed again

    h2d_bytes: int = 0  # bytes from host to device over the link
    d2h_bytes: int = 0  # bytes from device to host over the link
    weight_bytes: int = 0  # bytes of offloaded weights copied to the device
    moves: int = 0  # times that KV budget moved from one model to the other
    moved_bytes: int = 0  # bytes of budget that moved

    requests: int = 0  # requests to a remote server, answered or failed, retries included
    retries: int = 0  # requests that repeated a failed one
    prompt_tokens: int = 0  # prompt tokens, as the server reports them
    cached_tokens: int = 0  # prompt tokens in the server's cache, as the server reports them
    untold_prompts: int = 0  # replies without a count of prompt tokens
    untold_cached: int = 0  # replies without a count of cached tokens

    sparse_tokens: int = 0  # tokens decoded with a selection of the visible tokens
    visible_tokens: int = 0  # tokens visible to each of `sparse_tokens`, summed
    selected_tokens: int = 0  # tokens that each of `sparse_tokens` attended to, summed
    # Share of a head's attention on tokens that were not selected, or an upper bound of the share,
    # summed over `sparse_heads`. Both counters stay 0 if a method's scores do not tell the share.
    left_out: float = 0.0
    sparse_heads: int = 0  # layers times heads times tokens, as far as `left_out` is known
    corrections: int = 0  # heads whose predicted query was too far from the real one
    rank_takes: int = 0  # selections that a layer took from the thread that ranks tokens
    rank_late: int = 0  # selections that a layer had to wait for
    rank_waited_s: float = 0.0  # time that layers waited for selections
    rank_s: float = 0.0  # time that the ranking thread worked
    rank_link_s: float = 0.0  # part of `rank_s` that was spent on transfers

    def __add__(self, other: Counters) -> Counters:
        return self._combined(add, other)

    def __sub__(self, other: Counters) -> Counters:
        return self._combined(sub, other)

    def copy(self) -> Counters:
        """Return a copy of the counts at this moment."""
        return replace(self)

    def _combined(self, combine: Callable[[Any, Any], Any], other: Counters) -> Counters:
        names = [each.name for each in fields(self)]
        return Counters(**{n: combine(getattr(self, n), getattr(other, n)) for n in names})

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase that took any time, by phase."""
        taken = {phase: getattr(self, f"{phase}_s") for phase in PHASES}
        return {phase: seconds for phase, seconds in taken.items() if seconds}

    @property
    def reused_tokens(self) -> int:
        """Needed tokens whose KV had stayed on the device since it was last written or needed."""
        missed = self.prefilled_tokens + self.loaded_tokens + self.dropped_tokens
        return self.needed_tokens - missed


def counter_field(counter: str, *, per: str | None = None, unless: str | None = None) -> Any:
    """Declare a field of a `CounterView` that is computed from a counter with another name.

    per: name of a counter to divide by; None: no division.
    unless: name of a counter; the field is None if that counter is not 0.
    """
    return field(metadata={"counter": counter, "per": per, "unless": unless})


@dataclass(frozen=True)
class CounterView:
    """Base class of statistics for people and JSON, computed from a difference of counters.

    Each field is the counter of the same name, what `counter_field` declares, or an argument of
    `of`.
    """

    @classmethod
    def of(cls, counted: Counters, **own: Any) -> Self:
        """Build the statistics from counts.

        own: values of the fields that are not counters.
        """
        for each in fields(cls):
            if each.name in own:
                continue
            counter, per, unless = map(each.metadata.get, ("counter", "per", "unless"))
            value = getattr(counted, counter or each.name)
            if per is not None:
                value = ratio_or_none(value, getattr(counted, per))
            own[each.name] = None if unless and getattr(counted, unless) else value
        return cls(**own)


def ratio_or_none(total: float, num: int) -> float | None:
    """Return `total` / `num`, such as a mean or a share; None if `num` is 0."""
    return total / num if num else None


class TierUsage(NamedTuple):
    """Bytes of KV on one tier at one moment, and the tier's budget."""

    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class Usage:
    """Snapshot of an engine for metrics: KV memory in use, and counts so far.

    The engine works meanwhile, so the numbers may belong to slightly different moments.

    levels: KV memory by (model, tier): "generator" or "verifier", and "device" or "host".
    counters: counts by owner: the "engine" itself, and each model's KV.
    """

    levels: Mapping[tuple[str, str], TierUsage]
    counters: Mapping[str, Counters]

    def __add__(self, other: Usage) -> Usage:
        """Return the summed usage of two engines with the same models."""
        levels, counters = dict(self.levels), dict(self.counters)
        for key, level in other.levels.items():
            mine = levels.get(key, TierUsage(0, 0))
            levels[key] = TierUsage(
                mine.used_bytes + level.used_bytes, mine.budget_bytes + level.budget_bytes
            )
        for name, counted in other.counters.items():
            counters[name] = counters.get(name, Counters()) + counted
        return Usage(levels, counters)

    def without_memory(self) -> Usage:
        """Return the counts without the KV memory, for an engine that has stopped."""
        return Usage({}, self.counters)

    @property
    def engine(self) -> Counters:
        """Counts of the engine itself: the running batch, the clock and the link."""
        return self.counters["engine"]

    @property
    def has_link(self) -> bool:
        """True if the engine offloads KV to host memory, so that transfers are counted."""
        return any(tier == "host" for _, tier in self.levels)


class Progress:
    """Receiver of progress messages of an engine. This base class ignores them.

    Subclasses show the progress. The engine calls the methods between iterations, in its own
    thread.
    """

    def doing(self, what: str) -> None:
        """Called when a phase begins. what: the phase, such as "round 3: decoding 16 beams"."""

    def wrote(self, num_tokens: int) -> None:
        """Called with the number of tokens just decoded, summed over all beams."""

    def ended(self) -> None:
        """Called when loading ends, or when the searches of a call end."""
