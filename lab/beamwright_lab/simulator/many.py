"""Simulate concurrent searches: throughput, and how busy generator and verifier are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from beamwright.engine.timeline import Timeline
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.protocols import Direction
from beamwright_lab.simulator.bench import Bench, Seconds, Simulation, phase_seconds
from beamwright_lab.simulator.clock import VirtualClock


@dataclass(frozen=True)
class ManyResult:
    """Measurements of concurrent searches.

    runs: the searches, in the order of the cases.
    tokens: tokens of all steps, without discarded speculative ones.
    passes: forward passes of the generator; mean_rows: rows per pass, speculative ones included.
    steps_per_call: mean batch of the verifier's calls; 0 without a verifier.
    speculated_tokens, kept_tokens: speculative tokens, and those of selected steps.
    mean_s: mean time from a search's admission to its end.
    begun_s: latest admission.
    device_peak_bytes: most device memory for the generator's KV.
    """

    runs: tuple[TreeRun, ...]
    seconds: Seconds
    tokens: int
    passes: int
    mean_rows: float
    steps_per_call: float
    speculated_tokens: int
    kept_tokens: int
    mean_s: float
    begun_s: float
    h2d_bytes: int
    d2h_bytes: int
    device_peak_bytes: int

    @property
    def time_s(self) -> float:
        """Seconds from the first admission to the end of the last search."""
        return self.seconds.time_s

    @property
    def tok_s(self) -> float:
        return self.tokens / self.time_s

    @property
    def problems_per_minute(self) -> float:
        return 60 * len(self.runs) / self.time_s

    @property
    def decode_share(self) -> float:
        """Share of the time in which the generator computes."""
        return (self.seconds.decode_s + self.seconds.both_s) / self.time_s

    @property
    def verify_share(self) -> float:
        """Share of the time in which the verifier computes."""
        return (self.seconds.verify_s + self.seconds.both_s) / self.time_s

    @property
    def kept_share(self) -> float | None:
        """Share of speculative tokens that was kept; None without speculative tokens."""
        return self.kept_tokens / self.speculated_tokens if self.speculated_tokens else None


def simulate_many(
    cases: Sequence[Simulation],
    in_flight: int | None = None,
    clock: VirtualClock | None = None,
    timeline: Timeline | None = None,
) -> ManyResult:
    """Simulate searches on one machine, admitted by `engine.admission`.

    cases: they may differ in tree and foresight only; every tree has its own problem id.
    in_flight: most searches at a time; None: as many as the generator has work for.

    Raises:
        InputError: if cases differ in anything else, or two trees have one problem id.
        CapacityError: if a search does not fit alone.
    """
    first = cases[0]
    if any(replace(each, tree=first.tree, foresees=first.foresees) != first for each in cases):
        raise InputError("searches simulated together may differ only in tree and foresight")
    bench = Bench(cases, clock, timeline)
    return _result(bench, bench.run(in_flight))


def _result(bench: Bench, runs: Sequence[TreeRun]) -> ManyResult:
    seconds = phase_seconds(bench)
    counts = None if bench.batch is None else bench.batch.counts
    nodes = [node for run in runs for node in run.tree.nodes()]
    calls = sum(each.num_calls for each in bench.verifiers)
    scored = sum(each.num_steps for each in bench.verifiers)
    return ManyResult(
        runs=tuple(runs),
        seconds=seconds,
        tokens=sum(len(node.token_ids) for node in nodes if node.parent is not None),
        passes=0 if counts is None else counts.steps,
        mean_rows=0.0 if counts is None else counts.row_tokens / max(1, counts.steps),
        steps_per_call=scored / max(1, calls),
        speculated_tokens=sum(node.usage["speculated"] for node in nodes),
        kept_tokens=sum(node.usage["speculated_kept"] for node in nodes),
        mean_s=sum(run.ended_s for run in runs) / len(runs),
        begun_s=max(run.started_s or 0.0 for run in runs),
        h2d_bytes=bench.link.bytes_moved[Direction.H2D],
        d2h_bytes=bench.link.bytes_moved[Direction.D2H],
        device_peak_bytes=bench.budget.peak_bytes,
    )
