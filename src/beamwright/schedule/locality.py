"""The locality schedule: each group runs to the end of its step before the next group starts.

This is section 4 of the LBS paper. The module uses the KV demand of a round and the planners, and
knows no tiers and no transfers. If the demand is unknown, the schedule runs plain batches.

A round runs in one of two ways, whichever is estimated to be faster:

- in groups. Each group reserves the blocks for its whole step and runs alone. On average, half of
  the reserved memory is unused.
- with parking. Rows reserve KV one block at a time. When blocks run out, a row is preempted and its
  KV moves to the host. The device is always full, but the KV of preempted rows crosses the link,
  and the last passes of a round have few rows.

The constants of the estimate come from simulated searches (docs/log/2026-11.md#parking).
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand, Parking, Plan, ScheduleView
from beamwright.schedule.algorithm_one import make_beam_sets
from beamwright.schedule.declare import Schedule, batched_plan, schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.ranges import plan_ranges

_EAGER_ABOVE = 1.5  # above this multiple of the capacity, a round writes KV back early


@schedule("auto", meaning="locality, or in-gpu if all KV stays on the host")
@schedule("locality", meaning="groups in turn, each decoded to the end of its step")
class LocalitySchedule(Schedule):
    """Schedule with groups of beams whose KV fits the device, or with parking of rows.

    The beams of a group are in depth-first order, so neighbours share prefixes. The schedule reads
    the settings batching, planner, balance, inter_beam, max_batch and write_back.
    """

    def plan(self, view: ScheduleView) -> Plan:
        demand = view.demand
        if demand is None:
            return batched_plan(view, self.settings.max_batch)
        forest = Forest(demand)
        groups = self.make_groups(view, demand, forest)
        need_bytes = forest.needed_bytes(0, len(forest))
        write_back = needs_write_back(demand, need_bytes)
        parking = self._decide_parking(view, forest, groups) if write_back else None
        return Plan(
            tuple(tuple(view.beams[beam] for beam in group) for group in groups),
            write_back=write_back,
            eager=self._is_eager(need_bytes, demand, parking),
            parking=parking,
        )

    def _decide_parking(
        self, view: ScheduleView, forest: Forest, groups: Sequence[Sequence[int]]
    ) -> Parking | None:
        """Return the parking parameters, or None if the groups run with barriers.

        With `--batching auto`, parking is chosen if it is faster or if step lengths are unknown.
        Parking is never chosen if every beam has its own copy of its path.
        """
        batching = self.settings.batching
        if batching == "grouped" or forest.copy_per_beam:
            return None
        parking = choose_parking(view, forest)
        required = batching == "continuous" or not view.fixed_lengths
        return parking if required or is_parking_faster(view, forest, groups, parking) else None

    def _is_eager(self, need_bytes: int, demand: KVDemand, parking: Parking | None) -> bool:
        """Return True if KV is written back while it is decoded, not only before eviction.

        If the device is much too small, most KV has to leave it anyway, and writing back early
        avoids stalls. With parking, KV must be on the host when its row is preempted. With a copy
        per beam, KV is written back early as in the LBS paper.
        """
        tight = need_bytes > _EAGER_ABOVE * demand.capacity_bytes
        auto = tight or demand.copy_per_beam or parking is not None
        return {"eager": True, "lazy": False, "auto": auto}[self.settings.write_back]

    def make_groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        """Return groups of beam numbers in running order; one group if all KV fits."""
        settings, max_batch = self.settings, view.limit(self.settings.max_batch)
        num_beams = len(forest)
        fits = forest.needed_bytes(0, num_beams) <= demand.capacity_bytes
        if fits and num_beams <= (max_batch or num_beams):
            return [range(num_beams)] if num_beams else []
        if settings.planner == "ranges" and settings.inter_beam:
            return plan_ranges(forest, balance=settings.balance, max_batch=max_batch)
        sets = make_beam_sets(
            forest,
            balance=settings.balance,
            max_batch=max_batch,
            arrival=None if settings.inter_beam else round_robin(view),
        )
        return [sorted(group) for group in sets]


def needs_write_back(demand: KVDemand, need_bytes: int) -> bool:
    """Return True if this round does not fit the device as one group, or the next one may not.

    The next round is expected to need as many more bytes as this round did.
    """
    previous = demand.previous_need_bytes
    growth = 0 if previous is None else max(0, need_bytes - previous)
    return need_bytes + growth > demand.capacity_bytes


def round_robin(view: ScheduleView) -> list[int]:
    """Return beam numbers with siblings far apart: first all first children, then all second ones.

    This is the order of a search without inter-beam locality.
    """
    return sorted(range(len(view.beams)), key=lambda beam: (view.beams[beam].lineage[-1], beam))


# --- parking -------------------------------------------------------------------------------------

# `Parking.level_from` begins when the remaining beams need at most this multiple of the capacity.
_LEVEL_FROM = 2.5
_FEWEST_ROWS = 64  # a pass with fewer rows takes longer than a roofline model predicts
# Factor on the estimated passes: a prefix occupies the device even if only some of its rows run.
_EXTRA_PASSES = 1.2
# A wave is a part of the beams that run together. If a wave needs more than this multiple of the
# capacity, rows are preempted whatever the limit on rows is, so no limit is set.
_WAVE = 1.25
# Extra passes with few rows at the end of a round, as a fraction of the passes of a step.
_DRAIN = 0.25
_RELOADED_SHARE = 0.4  # bytes loaded again, as a fraction of the bytes that do not fit the device


def choose_parking(view: ScheduleView, forest: Forest) -> Parking:
    """Choose the parking parameters for the beams of `view`.

    Above some number of rows, a pass is limited by arithmetic, so the beams run in waves (parts
    that run together) of even size. If step lengths are unknown, the number of rows is not limited:
    all steps start early, because the longest step decides when the round ends.
    """
    num_beams, most_rows, costs = len(forest), None, view.costs or PassCosts()
    spare_s = costs.row_s - costs.state_s  # a row's time without reading its state
    if spare_s > 0 and view.fixed_lengths:
        read_s = costs.weights_s + costs.byte_s * forest.capacity_bytes / 2
        waves = max(1, round(num_beams / max(_FEWEST_ROWS, read_s / spare_s)))
        if forest.needed_bytes(0, num_beams) <= _WAVE * waves * forest.capacity_bytes:
            most_rows = -(-num_beams // waves)
    limit = _LEVEL_FROM * forest.capacity_bytes
    fitting = (
        start for start in range(num_beams) if forest.needed_bytes(start, num_beams) <= limit
    )
    return Parking(most_rows, num_beams - next(fitting, num_beams))


def is_parking_faster(
    view: ScheduleView, forest: Forest, groups: Sequence[Sequence[object]], parking: Parking
) -> bool:
    """Return True if parking is estimated to be faster than running `groups` one by one.

    The passes with parking are estimated as KV bytes times passes, summed over rows, divided by the
    capacity.
    """
    if not forest.capacity_bytes:
        return False  # no row fits the device, so parking cannot help
    num_beams, capacity, costs = len(forest), forest.capacity_bytes, view.costs or PassCosts()
    need = forest.needed_bytes(0, num_beams)
    grouped_s = view.step_tokens * sum(costs.seconds(len(group)) for group in groups)
    full_steps = (need - sum(forest.growth_bytes) / 2) / capacity  # steps with a full device
    waves = max(
        1.0, num_beams / (parking.most_rows or num_beams), _EXTRA_PASSES * full_steps + _DRAIN
    )
    passes_s = view.step_tokens * waves * costs.seconds(num_beams / waves)
    loads_s = _RELOADED_SHARE * max(0, need - capacity) / costs.link_bandwidth
    return passes_s + loads_s < grouped_s
