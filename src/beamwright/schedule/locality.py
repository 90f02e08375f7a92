"""Locality: each group runs to the end of its step before the next (LBS paper, section 4).

Knows the view's demand and the planners; no tier, no transfer. Works without a demand too.

Groups behind barriers, or rows that park: the cheaper of the two for a round's beams. A group keeps
free what all of it will write, so half of that lies idle while it is written. Rows that park fill
the device: a round then takes about as many passes as its bytes in use, summed over passes, make
devices full. It costs bytes on the link, and passes that are not full when few are left. The
factors are from simulated searches (docs/log/2026-11.md#parking).
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand, Parking, Plan, ScheduleView
from beamwright.schedule.algorithm_one import beam_sets
from beamwright.schedule.declare import Schedule, batches, schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.ranges import plan_ranges

_EAGER_ABOVE = 1.5  # times what the device holds


@schedule("auto", meaning="locality, and in-gpu where all KV has its home on the host")
@schedule("locality", meaning="group by group, each to the end of its step")
class LocalitySchedule(Schedule):
    """Groups that fit the device, beams in depth-first order inside each; or rows that park.

    Of the settings it reads batching, planner, balance, inter_beam, max_batch and write_back.
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
        """By itself where it is cheaper, or lengths are not known; with a copy per beam never."""
        batching = self.settings.batching
        if batching == "grouped" or forest.copy_per_beam:
            return None
        parking = parking_of(view, forest)
        asked = batching == "continuous" or not view.exact
        return parking if asked or parking_pays(view, forest, groups, parking) else None

    def _eager(self, need_bytes: int, demand: KVDemand, parking: Parking | None) -> bool:
        """Most KV leaves the device anyway where little fits; writing it early costs no stall.

        A row that parks leaves at once. A copy per beam is the LBS paper's layout, and writing back
        at once its way.
        """
        tight = need_bytes > _EAGER_ABOVE * demand.capacity_bytes
        auto = tight or demand.copy_per_beam or parking is not None
        return {"eager": True, "lazy": False, "auto": auto}[self.settings.write_back]

    def groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        """Beam numbers in groups; the demand's beams are in depth-first order."""
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
    """True if this round does not fit in one group, or the next is not expected to.

    The next round is expected to grow by as much as this one did.
    """
    previous = demand.previous_need_bytes
    growth = 0 if previous is None else max(0, need_bytes - previous)
    return need_bytes + growth > demand.capacity_bytes


def round_robin(view: ScheduleView) -> list[int]:
    """Beam numbers in the order in which survivors are replicated in turn: siblings apart."""
    return sorted(range(len(view.beams)), key=lambda beam: (view.beams[beam].lineage[-1], beam))


# --- rows that park ------------------------------------------------------------------------------

_LEVEL_FROM = 2.5  # times what the device holds
_FEWEST_ROWS = 64  # below it a pass costs more than a roofline says
_MORE_AREA = 1.2  # than full devices would need: prefixes that are there for some of their rows
_WAVE = 1.25  # of the device: more than that parks, however few run together
_DRAIN = 0.25  # of a step, in passes with few rows
_LOADED_AGAIN = 0.4  # of what does not fit


def parking_of(view: ScheduleView, forest: Forest) -> Parking:
    """How the view's beams park.

    A pass with more rows than arithmetic has room for takes longer; then waves are made even. Steps
    whose length nobody knows begin as early as they can: the longest of them ends last.
    """
    num_beams, most_rows, costs = len(forest), None, view.costs or PassCosts()
    spare_s = costs.row_s - costs.state_s  # what a row's arithmetic takes beyond reading its state
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
    """True if parking is expected to take less time than these groups one after the other."""
    if not forest.capacity_bytes:
        return False  # nothing fits, whoever waits where
    num_beams, capacity, costs = len(forest), forest.capacity_bytes, view.costs or PassCosts()
    need = forest.need(0, num_beams)
    grouped_s = view.step_tokens * sum(costs.seconds(len(group)) for group in groups)
    area = (need - sum(forest.growth_bytes) / 2) / capacity  # in steps
    waves = max(1.0, num_beams / (parking.most_rows or num_beams), _MORE_AREA * area + _DRAIN)
    passes_s = view.step_tokens * waves * costs.seconds(num_beams / waves)
    loads_s = _LOADED_AGAIN * max(0, need - capacity) / costs.link_bandwidth
    return passes_s + loads_s < grouped_s
