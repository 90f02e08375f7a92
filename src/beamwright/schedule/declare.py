"""How a schedule is declared: one class with its options and `plan`, under one decorator.

```python
@schedule("one-by-one", meaning="every beam alone")
class OneByOne(Schedule):
    def plan(self, view):
        return Plan(tuple((beam,) for beam in view.beams))
```

`in-gpu` is here: all KV resident, all beams in one group, or in groups of a largest batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from beamwright.declare import declaration, declared_values, made
from beamwright.protocols import Plan, ScheduleView
from beamwright.registry import Table, TableRow
from beamwright.sections import ScheduleSettings, Section


class Schedule(Section):
    """A schedule: fields are its options, `settings` is what every schedule is given.

    name: of its (first) declaration.
    """

    shared: ClassVar[frozenset[str]] = frozenset({"settings"})
    name: ClassVar[str] = ""
    settings: ScheduleSettings = ScheduleSettings()

    def plan(self, view: ScheduleView) -> Plan:
        """The groups in their order; see `protocols.SchedulePolicy`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScheduleRow(TableRow):
    """A schedule by name.

    resident: all KV stays on the device, without a host tier; else it comes as groups need it.
    kv_method: gives another way to keep and read it, an `attention.protocols.KVMethod`.
    fixed: settings that it leaves no choice about. idle: options that do nothing under it.
    """

    make: type[Schedule]
    resident: bool = False
    kv_method: Callable[[], Any] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    def settled(self, settings: ScheduleSettings) -> ScheduleSettings:
        """Under this schedule's name, with what it leaves no choice about."""
        return settings.model_copy(update={"schedule": self.name, **self.fixed})

    def policy(self, settings: ScheduleSettings) -> Schedule:
        """The schedule with the options that the settings give it.

        Raises:
            InputError: for an option of another schedule, or a value that this one cannot use.
        """
        (given,) = declared_values(SCHEDULES, [self], settings)
        policy: Schedule = made(SCHEDULES, self.make, given, settings=settings)
        return policy


SCHEDULES: Table[ScheduleRow] = Table("schedule", "--schedule", "plan", of_lab=("layerwise",))

S = TypeVar("S", bound=type[Schedule])


def schedule(name: str, *, meaning: str, **facts: Any) -> Callable[[S], S]:
    """Declare a schedule. facts: of `ScheduleRow`. One class may have several.

    Raises:
        InputError: if the name is taken.
    """
    take = declaration(SCHEDULES, ScheduleRow, name, meaning, **facts)

    def declare(policy: S) -> S:
        if "name" not in vars(policy):
            policy.name = name
        return take(policy)

    return declare


def batches(view: ScheduleView, max_batch: int | None) -> Plan:
    """Contiguous ranges of the depth-first order, at most `max_batch` beams each."""
    size = view.limit(max_batch) or max(1, len(view.beams))
    beams = view.beams
    return Plan(tuple(beams[i : i + size] for i in range(0, len(beams), size)))


GROUPING = ("planner", "balance")
"""Options that the locality schedule alone reads."""

_MOVING = ("inter_beam", "prefetch", "reuse", "evict", "link_bandwidth", "host_memory")


@schedule("in-gpu", meaning="all KV on the device", resident=True, idle=(*GROUPING, *_MOVING))
class InGpuSchedule(Schedule):
    """Of the settings it reads max_batch."""

    def plan(self, view: ScheduleView) -> Plan:
        return batches(view, self.settings.max_batch)
