"""Costs fitted to a real machine: which seconds make simulated iterations take what real ones took.

A calibration run is a real search with a timeline; simulating the same tree counts what each of
its iterations did, and least squares gives every kind of work its seconds. On a CPU operator
dispatch rules, which no roofline knows. Knows counts and seconds; the runs come from above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from beamwright.engine.timeline import Timeline
from beamwright.errors import InputError
from beamwright.plan.costs import Layout
from beamwright.protocols import Direction
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import Work
from beamwright_lab.simulator.run import simulate

Array = np.ndarray[Any, np.dtype[np.float64]]

# What seconds are fitted for, in this order.
KINDS = (
    "groups",
    "group_rows",
    "group_tokens_read",
    "token_steps",
    "token_rows",
    "token_tokens_read",
    "prefills",
    "prefill_tokens",
    "prefill_tokens_read",
    "copied_bytes",
)
_SWEEPS = 20_000


@dataclass(frozen=True)
class LinkCosts:
    """Seconds of a transfer: bytes over bandwidth (bytes/s, both ways), and a fixed part."""

    bandwidth: float
    fixed_s: float = 0.0

    def transfer(self, num_bytes: int) -> float:
        """Seconds of one transfer."""
        return self.fixed_s + num_bytes / self.bandwidth


@dataclass(frozen=True)
class FittedCosts:
    """`DeviceCosts` of a fit. seconds: of one unit of each of `KINDS`."""

    layout: Layout
    seconds: tuple[float, ...]
    link: LinkCosts

    def open_group(self, num_rows: int, read_tokens: int) -> float:
        return self._sum(_group(num_rows, read_tokens))

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        del seen_tokens
        return Work.alone(self._sum(_tokens(num_rows, read_tokens, grow, count)))

    def prefill(self, num_tokens: int, read_tokens: int, seen_tokens: int) -> Work:
        del seen_tokens
        return Work.alone(self._sum(_prefill(num_tokens, read_tokens)))

    def copy(self, num_bytes: int) -> float:
        return self._sum({"copied_bytes": num_bytes})

    def transfer(self, num_bytes: int, num_pieces: int, direction: Direction) -> float:
        del num_pieces, direction
        return self.link.transfer(num_bytes)

    def _sum(self, counts: dict[str, float]) -> float:
        return sum(self.seconds[KINDS.index(kind)] * count for kind, count in counts.items())


@dataclass(frozen=True)
class Measured:
    """A real search: what was run, and the seconds of each iteration in order.

    `case.costs` is only asked for its layout.
    """

    case: Simulation
    iteration_s: tuple[float, ...]


def fit_costs(runs: Sequence[Measured], link: LinkCosts) -> FittedCosts:
    """Seconds per unit of work, none of them negative, that explain the runs best.

    Relative errors are squared, so that short iterations count as much as long ones.

    Raises:
        InputError: if there are no runs, if their layouts differ, or if a run was simulated in
            another number of iterations than were measured.
    """
    layouts = {run.case.costs.layout for run in runs}
    if len(layouts) != 1:
        raise InputError("calibration needs runs of exactly one layout")
    (layout,) = layouts
    counts: list[Array] = []
    for run in runs:
        found = count_work(run.case)
        if len(found) != len(run.iteration_s):
            raise InputError(
                f"{len(run.iteration_s)} iterations were measured, {len(found)} simulated"
            )
        counts += [each / took_s for each, took_s in zip(found, run.iteration_s, strict=True)]
    solved = _non_negative_least_squares(np.array(counts), np.ones(len(counts)))
    return FittedCosts(layout, tuple(float(value) for value in solved), link)


def count_work(case: Simulation) -> list[Array]:
    """What each iteration does, in units of `KINDS`."""
    counter = _Counter(case.costs.layout)
    per_iteration = _PerIteration(counter)
    simulate(replace(case, costs=counter), timeline=per_iteration)
    return per_iteration.iterations


# --- counting --------------------------------------------------------------------------------


def _group(num_rows: int, read_tokens: int) -> dict[str, float]:
    return {"groups": 1, "group_rows": num_rows, "group_tokens_read": read_tokens}


def _tokens(num_rows: int, read_tokens: int, grow: int, count: int) -> dict[str, float]:
    read = count * read_tokens + grow * count * (count - 1) / 2
    return {"token_steps": count, "token_rows": count * num_rows, "token_tokens_read": read}


def _prefill(num_tokens: int, read_tokens: int) -> dict[str, float]:
    return {"prefills": 1, "prefill_tokens": num_tokens, "prefill_tokens_read": read_tokens}


class _Counter:
    """A device that takes no time and counts what it does."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.counts: Array = np.zeros(len(KINDS))

    def open_group(self, num_rows: int, read_tokens: int) -> float:
        return self._count(_group(num_rows, read_tokens))

    def tokens(
        self, num_rows: int, read_tokens: int, seen_tokens: int, grow: int, count: int
    ) -> Work:
        del seen_tokens
        return Work.alone(self._count(_tokens(num_rows, read_tokens, grow, count)))

    def prefill(self, num_tokens: int, read_tokens: int, seen_tokens: int) -> Work:
        del seen_tokens
        return Work.alone(self._count(_prefill(num_tokens, read_tokens)))

    def copy(self, num_bytes: int) -> float:
        return self._count({"copied_bytes": num_bytes})

    def transfer(self, num_bytes: int, num_pieces: int, direction: Direction) -> float:
        del num_bytes, num_pieces, direction
        return 0.0

    def _count(self, counts: dict[str, float]) -> float:
        for kind, count in counts.items():
            self.counts[KINDS.index(kind)] += count
        return 0.0


class _PerIteration(Timeline):
    """Notes what was counted during each iteration's span."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__(VirtualClock())
        self._counter = counter
        self.iterations: list[Array] = []

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[dict[str, Any]]:
        before = self._counter.counts.copy()
        with super().span(name, track, **args) as facts:
            yield facts
        if name == "decode":
            self.iterations.append(self._counter.counts - before)


def iteration_seconds(timeline: Timeline) -> tuple[float, ...]:
    """The seconds of each iteration of a real search that a timeline has seen."""
    return tuple(span.end_s - span.start_s for span in timeline.spans if span.name == "decode")


# --- fitting ---------------------------------------------------------------------------------


def _non_negative_least_squares(rows: Array, wanted: Array) -> Array:
    """The x >= 0 with the smallest |rows x - wanted|, by coordinate descent."""
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = rows / scale
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    solved: Array = np.zeros(rows.shape[1])
    for _ in range(_SWEEPS):
        before = solved.copy()
        for i in range(len(solved)):
            if gram[i, i] > 0:
                solved[i] = max(0.0, solved[i] + (target[i] - gram[i] @ solved) / gram[i, i])
        if np.abs(solved - before).max() < 1e-12:
            break
    unscaled: Array = solved / scale
    return unscaled
