"""Locality: each group runs to the end of its step before the next (LBS paper, section 4).

Knows the view's demand and the planners; no tier, no transfer. Works without a demand too.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.protocols import KVDemand, Parking, Plan, ScheduleView
from beamwright.schedule.algorithm_one import beam_sets
from beamwright.schedule.declare import Schedule, batches, schedule
from beamwright.schedule.forest import Forest
from beamwright.schedule.parking import parking_of, parking_pays
from beamwright.schedule.ranges import plan_ranges

_EAGER_ABOVE = 1.5  # times what the device holds


@schedule("auto", meaning="the faster of locality and layerwise, by the cost model")
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
