"""The locality schedule: each group runs to the end of its step before the next group starts.

This is section 4 of the LBS paper. The module uses the KV demand of a round and the planners, and
knows no tiers and no transfers. Without a demand it falls back to plain batches.

A round runs either in groups with barriers or with parking, whichever is estimated to be cheaper.
A group reserves the memory for everything that it will write, and on average half of that memory
is unused. With parking, nothing is reserved: a row is preempted (parked on the host) when blocks
run out. The device is then always full. The number of passes is estimated as the sum over rows of
KV bytes times passes, divided by the device's capacity. Parking costs transfers over the link, and
passes with few rows at the end of a round. The constants come from simulated searches
(docs/log/2026-11.md#parking).
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand, Parking, Plan, ScheduleView
from beamwright.schedule.algorithm_one import beam_sets
from beamwright.schedule.declare import Schedule, batches, schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.ranges import plan_ranges

_EAGER_ABOVE = 1.5  # a round that needs more than this multiple of the capacity writes back early


@schedule("auto", meaning="locality, and in-gpu where all KV has its home on the host")
@schedule("locality", meaning="group by group, each to the end of its step")
class LocalitySchedule(Schedule):
    """Groups of beams with KV that fits the device; or parking, which preempts rows on demand.

    The beams of a group are in depth-first order. The schedule reads the settings batching,
    planner, balance, inter_beam, max_batch and write_back.
    """

    def plan(self, view: ScheduleView) -> Plan:
        demand = view.demand
        if demand is None:
            return batches(view, self.settings.max_batch)
        forest = Forest(demand)
        groups = self.groups(view, demand, forest)
        need_bytes = forest.need(0, len(forest))
        write_back = outgrows(demand, need_bytes)
        parking = self._parking(view, forest, groups) if write_back else None
        return Plan(
            tuple(tuple(view.beams[beam] for beam in group) for group in groups),
            write_back=write_back,
            eager=self._eager(need_bytes, demand, parking),
            parking=parking,
        )

    def _parking(
        self, view: ScheduleView, forest: Forest, groups: Sequence[Sequence[int]]
    ) -> Parking | None:
        """Return the parking parameters, or None if the groups run with barriers.

        With `--batching auto`, rows park if that is cheaper or if step lengths are unknown. They
        never park if every beam has its own copy of its path.
        """
        batching = self.settings.batching
        if batching == "grouped" or forest.copy_per_beam:
            return None
        parking = choose_parking(view, forest)
        asked = batching == "continuous" or not view.exact
        return parking if asked or parking_pays(view, forest, groups, parking) else None

    def _eager(self, need_bytes: int, demand: KVDemand, parking: Parking | None) -> bool:
        """Return True if KV is written back while it is decoded, not only before eviction.

        If the device is much too small, most KV has to leave it anyway, and writing back early
        avoids stalls. A parked row leaves the device at once. With a copy per beam, the layout of
        the LBS paper, KV is written back early as in the paper.
        """
        tight = need_bytes > _EAGER_ABOVE * demand.capacity_bytes
        auto = tight or demand.copy_per_beam or parking is not None
        return {"eager": True, "lazy": False, "auto": auto}[self.settings.write_back]

    def groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        """Return groups of beam numbers; the beams of `demand` are in depth-first order."""
        settings, max_batch = self.settings, view.limit(self.settings.max_batch)
        num_beams = len(forest)
        fits = forest.need(0, num_beams) <= demand.capacity_bytes
        if fits and num_beams <= (max_batch or num_beams):
            return [range(num_beams)] if num_beams else []
        if settings.planner == "ranges" and settings.inter_beam:
            return plan_ranges(forest, balance=settings.balance, max_batch=max_batch)
        sets = beam_sets(
            forest,
            balance=settings.balance,
            max_batch=max_batch,
            arrival=None if settings.inter_beam else round_robin(view),
        )
        return [sorted(group) for group in sets]


def outgrows(demand: KVDemand, need_bytes: int) -> bool:
    """Return True if this round does not fit in one group, or if the next round probably does not.

    The next round is expected to grow by as much as this round did.
    """
    previous = demand.previous_need_bytes
    growth = 0 if previous is None else max(0, need_bytes - previous)
    return need_bytes + growth > demand.capacity_bytes


def round_robin(view: ScheduleView) -> list[int]:
    """Return beam numbers in the order of child ordinals, which separates siblings.

    This is the order in which each kept node gets one child in turn.
    """
    return sorted(range(len(view.beams)), key=lambda beam: (view.beams[beam].lineage[-1], beam))


# --- parking -------------------------------------------------------------------------------------

# Start to even out the rows once the remaining beams need at most this multiple of the capacity.
_LEVEL_FROM = 2.5
_FEWEST_ROWS = 64  # a pass with fewer rows takes longer than a roofline model predicts
# Passes, relative to a device that is always full: a prefix stays on the device even while only
# some of its rows run.
_EXTRA_PASSES = 1.2
# The number of rows is limited only if a wave needs at most this multiple of the capacity: larger
# waves park rows at any limit.
_WAVE = 1.25
_DRAIN = 0.25  # passes with few rows at the end of a round, as a fraction of a step
_RELOADED_SHARE = 0.4  # bytes loaded again, as a fraction of the bytes that do not fit the device


def choose_parking(view: ScheduleView, forest: Forest) -> Parking:
    """Choose the parking parameters for the beams of `view`.

    Beyond some number of rows, arithmetic makes a pass slower, so the beams run in waves of even
    size. If step lengths are unknown, the number of rows is not limited: all steps start as early
    as possible, because the longest step decides when the round ends.
    """
    num_beams, most_rows, costs = len(forest), None, view.costs or PassCosts()
    spare_s = costs.row_s - costs.state_s  # arithmetic of a row, minus reading its state
    if spare_s > 0 and view.exact:
        read_s = costs.weights_s + costs.byte_s * forest.capacity_bytes / 2
        waves = max(1, round(num_beams / max(_FEWEST_ROWS, read_s / spare_s)))
        if forest.need(0, num_beams) <= _WAVE * waves * forest.capacity_bytes:
            most_rows = -(-num_beams // waves)
    held = _LEVEL_FROM * forest.capacity_bytes
    fitting = (start for start in range(num_beams) if forest.need(start, num_beams) <= held)
    return Parking(most_rows, num_beams - next(fitting, num_beams))


def parking_pays(
    view: ScheduleView, forest: Forest, groups: Sequence[Sequence[object]], parking: Parking
) -> bool:
    """Return True if parking is estimated to be faster than running `groups` one by one."""
    if not forest.capacity_bytes:
        return False  # no row fits the device, so parking cannot help
    num_beams, capacity, costs = len(forest), forest.capacity_bytes, view.costs or PassCosts()
    need = forest.need(0, num_beams)
    grouped_s = view.step_tokens * sum(costs.seconds(len(group)) for group in groups)
    full_steps = (need - sum(forest.growth_bytes) / 2) / capacity  # steps with a full device
    waves = max(
        1.0, num_beams / (parking.most_rows or num_beams), _EXTRA_PASSES * full_steps + _DRAIN
    )
    passes_s = view.step_tokens * waves * costs.seconds(num_beams / waves)
    loads_s = _RELOADED_SHARE * max(0, need - capacity) / costs.link_bandwidth
    return passes_s + loads_s < grouped_s
