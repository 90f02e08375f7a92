"""Groups behind barriers, or rows that park: the cheaper of the two for a round's beams.

A group keeps free what all of it will write, so half of that lies idle while it is written. Rows
that park fill the device: a round then takes about as many passes as its bytes in use, summed over
passes, make devices full. It costs bytes on the link, and passes that are not full when few are
left. Knows the forest, the view's costs and counts; the factors are from simulated searches
(docs/log/2026-11-25-parking.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from beamwright.plan.machines import PassCosts
from beamwright.protocols import Parking, ScheduleView
from beamwright.schedule.forest import Forest

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
