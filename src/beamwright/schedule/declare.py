"""Declare a schedule: a class with options and a `plan` method, under the decorator `schedule`.

```python
@schedule("one-by-one", meaning="every beam alone")
class OneByOne(Schedule):
    def plan(self, view):
        return Plan(tuple((beam,) for beam in view.beams))
```

This module also declares `in-gpu`: all KV stays on the device, and all beams form one group, or
groups of at most `max_batch` beams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from beamwright.declare import declaration, declared_values, make_declared
from beamwright.protocols import Plan, ScheduleView
from beamwright.registry import Table, TableEntry
from beamwright.sections import ScheduleSettings, Section


class Schedule(Section):
    """Base class of schedules. The fields of a subclass are its options.

    settings: all schedule settings, such as `max_batch`; not an option of the subclass.
    """

    shared: ClassVar[frozenset[str]] = frozenset({"settings"})
    name: ClassVar[str] = ""  # the name of the first declaration
    settings: ScheduleSettings = ScheduleSettings()

    def plan(self, view: ScheduleView) -> Plan:
        """Divide the beams of a round into groups, and order the groups."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScheduleEntry(TableEntry):
    """A declared schedule: its name, its class, and facts that other packages need."""

    make: type[Schedule]
    # True: all KV stays on the device, and there is no host tier. False: KV is offloaded to the
    # host and loaded when a group needs it.
    resident: bool = False
    # Returns an `attention.protocols.KVMethod`, which replaces the usual way to store and read KV.
    kv_method: Callable[[], Any] | None = None
    # Values of settings that this schedule requires.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Options that have no effect under this schedule.
    unused_options: tuple[str, ...] = ()

    def with_fixed_settings(self, settings: ScheduleSettings) -> ScheduleSettings:
        """Return `settings` with this schedule's name and the values of `fixed`."""
        return settings.model_copy(update={"schedule": self.name, **self.fixed})

    def make_policy(self, settings: ScheduleSettings) -> Schedule:
        """Build the schedule with its options from `settings`.

        Raises:
            InputError: for an option of another schedule, or for an invalid value.
        """
        (given,) = declared_values(SCHEDULES, [self], settings)
        policy: Schedule = make_declared(SCHEDULES, self.make, given, settings=settings)
        return policy


SCHEDULES: Table[ScheduleEntry] = Table("schedule", "--schedule", "plan", lab_names=("layerwise",))

S = TypeVar("S", bound=type[Schedule])


def schedule(name: str, *, meaning: str, **facts: Any) -> Callable[[S], S]:
    """Return a decorator that declares a schedule class. One class may have several declarations.

    Args:
        name: the value of `--schedule`.
        meaning: the description of the schedule in lists and help texts.
        facts: fields of `ScheduleEntry`.

    Raises:
        InputError: if the name is taken.
    """
    register = declaration(SCHEDULES, ScheduleEntry, name, meaning, **facts)

    def declare(policy: S) -> S:
        if "name" not in vars(policy):
            policy.name = name
        return register(policy)

    return declare


def batched_plan(view: ScheduleView, max_batch: int | None) -> Plan:
    """Return a plan of groups of at most `max_batch` consecutive beams; None: one group."""
    size = view.limit(max_batch) or max(1, len(view.beams))
    beams = view.beams
    return Plan(tuple(beams[i : i + size] for i in range(0, len(beams), size)))


# Options that only the locality schedule reads.
GROUPING_OPTIONS = ("planner", "balance")

_TRANSFER_OPTIONS = ("inter_beam", "prefetch", "reuse", "evict", "link_bandwidth", "host_memory")


@schedule(
    "in-gpu",
    meaning="all KV stays on the device",
    resident=True,
    unused_options=(*GROUPING_OPTIONS, *_TRANSFER_OPTIONS),
)
class InGpuSchedule(Schedule):
    """All KV on the device, in one group or in batches. It reads only the setting `max_batch`."""

    def plan(self, view: ScheduleView) -> Plan:
        return batched_plan(view, self.settings.max_batch)
