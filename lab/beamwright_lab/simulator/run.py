"""Simulate one search under one schedule on a virtual clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from beamwright.counters import Progress
from beamwright.engine.timeline import Timeline
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError
from beamwright.plan.workload import BLOCK_TOKENS, dm_lower_bound_bytes
from beamwright.protocols import Direction
from beamwright.solver.solution import CacheStats
from beamwright_lab.simulator.bench import Bench, Simulation, phase_seconds, state_blocks
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.residency import cache_stats
from beamwright_lab.simulator.scripted_rows import Moments
from beamwright_lab.studies.clairvoyant import traffic_bound


@dataclass(frozen=True)
class SimulationResult:
    """Measurements of one search under one schedule.

    time_s, decode_s, verify_s, stall_s, both_s: see `Seconds`. io_share: stall_s / time_s.
    dm_lower_bound_bytes: generator KV that must cross the link under any schedule, from the tree
        and the budget alone.
    load_bound_bytes, store_bound_bytes: tighter bounds per direction, in whole blocks, for a
        schedule that knows the whole tree in advance.
    blind_store_bound_bytes: the same for a schedule that keeps candidates until they are scored
        (`studies.clairvoyant`; none of the three holds for layer-wise offloading).
    h2d_state_bytes, d2h_state_bytes: recurrent states, included in h2d_bytes and d2h_bytes.
    cancelled: transfers that pruning made unnecessary.
    speculated_tokens, kept_tokens: speculative tokens, and those of selected steps.
    goodput_tok_s: FlashTTS's precise goodput: mean tokens of a finished path over the mean time
        until it is scored.
    device_peak_bytes, host_peak_bytes: most memory for the generator's KV.
    verifier_peak_bytes: most device memory for the verifier's KV.
    generator_cache, verifier_cache: KV cache hits; None with layer-wise streaming, or without this
        model.
    split_moves, split_moved_bytes: moves of device memory between the models' budgets.
    """

    time_s: float
    decode_s: float
    verify_s: float
    stall_s: float
    io_share: float
    h2d_bytes: int
    d2h_bytes: int
    groups: int
    dm_lower_bound_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    verifier_peak_bytes: int
    recomputed_tokens: int
    cancelled: int
    load_bound_bytes: int
    store_bound_bytes: int
    blind_store_bound_bytes: int
    split_moves: int
    split_moved_bytes: int
    speculated_tokens: int = 0
    kept_tokens: int = 0
    goodput_tok_s: float = 0.0
    both_s: float = 0.0
    generator_cache: CacheStats | None = None
    verifier_cache: CacheStats | None = None
    h2d_state_bytes: int = 0
    d2h_state_bytes: int = 0


def simulate(
    case: Simulation,
    clock: VirtualClock | None = None,
    timeline: Timeline | None = None,
    moments: Moments | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Simulate the search.

    clock: must stand at 0.
    timeline: records when work ran; it must read the same clock.
    moments: records KV in use, see `scripted_rows`; not with layer-wise offloading.
    progress: is told about rounds and tokens.

    Raises:
        CapacityError: if the search does not fit under this schedule.
    """
    bench = Bench([case], clock, timeline, moments, progress)
    (run,) = bench.run(1)
    return _result(bench, run)


def simulate_if_fits(case: Simulation, progress: Progress | None = None) -> SimulationResult | None:
    """Simulate the search; return None if it does not fit under this schedule."""
    try:
        return simulate(case, progress=progress)
    except CapacityError:
        return None


def _result(bench: Bench, run: TreeRun) -> SimulationResult:
    moved, spent = bench.moving, phase_seconds(bench)
    most_bytes = bench.case.kv_budget_bytes if moved is None else moved.most_generator_bytes
    residency = bench.residency
    host = residency.host if residency is not None else None
    block_bytes = BLOCK_TOKENS * bench.case.model.kv_bytes_per_token
    (script,) = bench.scripts
    lives = script.lives(BLOCK_TOKENS, state_blocks(bench.case.model))
    bound = traffic_bound(lives, most_bytes // block_bytes)
    usage: Counter[str] = Counter()
    for node in run.tree.nodes():
        usage.update(node.usage)
    model, begun = bench.case.model, script.num_parents()
    needed = (
        tokens * model.kv_bytes_per_token + begun[level] * model.state_bytes
        for level, tokens in enumerate(run.round_tokens)
    )
    return SimulationResult(
        time_s=spent.time_s,
        decode_s=spent.decode_s,
        verify_s=spent.verify_s,
        both_s=spent.both_s,
        stall_s=spent.stall_s,
        io_share=spent.stall_s / spent.time_s if spent.time_s else 0.0,
        h2d_bytes=bench.link.bytes_moved[Direction.H2D],
        d2h_bytes=bench.link.bytes_moved[Direction.D2H],
        groups=bench.phase_timer.counts.groups,
        dm_lower_bound_bytes=dm_lower_bound_bytes(needed, most_bytes),
        device_peak_bytes=bench.budget.peak_bytes,
        host_peak_bytes=host.ledger.budget.peak_bytes if host is not None else 0,
        verifier_peak_bytes=sum(each.device.budget.peak_bytes for each in bench.scorers),
        recomputed_tokens=residency.counts.recomputed_tokens if residency is not None else 0,
        cancelled=residency.counts.cancelled_transfers if residency is not None else 0,
        load_bound_bytes=bound.loads * block_bytes,
        store_bound_bytes=bound.stores * block_bytes,
        blind_store_bound_bytes=bound.blind_stores * block_bytes,
        split_moves=0 if moved is None else moved.counts.moves,
        split_moved_bytes=0 if moved is None else moved.counts.moved_bytes,
        speculated_tokens=usage["speculated"],
        kept_tokens=usage["speculated_kept"],
        goodput_tok_s=run.goodput_tok_s(run.tree.finished()) or 0.0,
        generator_cache=cache_stats([] if residency is None else [residency]),
        verifier_cache=cache_stats(bench.scorers),
        h2d_state_bytes=bench.link.state_bytes[Direction.H2D],
        d2h_state_bytes=bench.link.state_bytes[Direction.D2H],
    )
