"""How long does planning take, and how much must cross the link: ranges against Algorithm 1.

Synthetic trees, no model. `families`: independent subtrees that keep one survivor each, so little
is shared and the tree is large; `beam`: the survivors are the best of all. Both planners see the
same tree for several rounds; what is resident carries over, each with its own. Bytes come from the
exact replay; the lower bound of a round is what it needs and the device does not hold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from beamwright.protocols import KVDemand, ScheduleView
from beamwright.schedule import make_schedule
from beamwright.schedule.forest import Forest, replay
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node
from beamwright_lab.common import finish, say, table

_KIB = 1024
_PROMPT_BYTES = 16 * 1536 * _KIB
_COLUMNS = ("tree", "beams", "segments", "layout", "capacity", "planner")
_FIGURES = ("ms min", "ms median", "ms max", "groups", "loaded / union", "loaded / bound")


@dataclass(eq=False)
class Step:
    """A node of the synthetic tree; `held` names the sides whose device has it."""

    parent: Step | None
    num_bytes: int
    family: int
    score: float = 0.0
    children: list[Step] = field(default_factory=list)
    held: set[str] = field(default_factory=set)


class Grown:
    """A synthetic tree, round by round."""

    def __init__(self, kind: str, num_beams: int, width: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind, self.num_beams, self.width = kind, num_beams, width
        self.root = Step(None, _PROMPT_BYTES, 0)
        num_survivors = num_beams // width
        self.survivors = [Step(self.root, 0, family) for family in range(num_survivors)]
        self.root.children = list(self.survivors)
        for step in self.survivors:
            step.num_bytes = self.step_bytes()

    def step_bytes(self) -> int:
        return self.rng.randint(1, 8) * 1536 * _KIB

    def expand(self) -> list[Step]:
        """Children of all survivors: the beams of the round, their bytes not yet written."""
        for step in self.survivors:
            step.children = [Step(step, self.step_bytes(), step.family) for _ in range(self.width)]
        return [step for step in self.walk() if step.parent and not step.children]

    def select(self, beams: Sequence[Step]) -> None:
        """Keep the best: one per family, or the best of all; drop what nobody needs."""
        for beam in beams:
            assert beam.parent is not None
            beam.score = 0.7 * beam.parent.score + self.rng.gauss(0, 1)
        ranked = sorted(beams, key=lambda beam: -beam.score)
        if self.kind == "families":
            best: dict[int, Step] = {}
            for beam in ranked:
                best.setdefault(beam.family, beam)
            ranked = list(best.values())
        self.survivors = ranked[: self.num_beams // self.width]
        alive: set[Step] = set()
        for survivor in self.survivors:
            step: Step | None = survivor
            while step is not None and step not in alive:
                alive.add(step)
                step = step.parent
        for step in alive:
            step.children = [child for child in step.children if child in alive]
        self.survivors = [step for step in self.walk() if not step.children]

    def walk(self) -> list[Step]:
        found, stack = [], [self.root]
        while stack:
            step = stack.pop()
            found.append(step)
            stack.extend(reversed(step.children))
        return found


def demand_of(
    steps: Sequence[Step], beams: Sequence[Step], side: str, capacity: int, copies: bool
) -> KVDemand:
    numbers = {step: number for number, step in enumerate(steps)}
    return KVDemand(
        parent=[None if step.parent is None else numbers[step.parent] for step in steps],
        segment_bytes=[step.num_bytes for step in steps],
        resident=[int(side in step.held) for step in steps],
        leaf=[numbers[beam.parent] for beam in beams if beam.parent is not None],
        growth_bytes=[beam.num_bytes for beam in beams],
        capacity_bytes=capacity,
        copy_per_beam=copies,
    )


@dataclass
class Side:
    """One planner over the rounds."""

    name: str
    settings: ScheduleSettings
    seconds: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    loaded: int = 0
    bound: int = 0
    union: int = 0

    def run(self, demand: KVDemand, steps: Sequence[Step], beams: Sequence[Step]) -> None:
        view = ScheduleView(tuple(Node((0, i), None, 0) for i in range(len(beams))), demand)
        schedule = make_schedule(self.settings)
        for _ in range(3):
            start = time.perf_counter()
            plan = schedule.plan(view)
            self.seconds.append(time.perf_counter() - start)
        numbers = {node: number for number, node in enumerate(view.beams)}
        outcome = replay(demand, [[numbers[node] for node in group] for group in plan.groups])
        held = sum(b for b, r in zip(demand.segment_bytes, demand.resident, strict=True) if r)
        self.groups.append(len(plan.groups))
        self.loaded += outcome.loaded_bytes
        self.union += sum(demand.segment_bytes)
        self.bound += sum(demand.segment_bytes) - held
        for items, flags in ((steps, outcome.resident), (beams, outcome.grown_resident)):
            for step, resident in zip(items, flags, strict=True):
                (step.held.add if resident else step.held.discard)(self.name)

    def row(self) -> dict[str, Any]:
        return {
            "planner": self.name,
            "ms min": round(1e3 * min(self.seconds), 2),
            "ms median": round(1e3 * statistics.median(self.seconds), 2),
            "ms max": round(1e3 * max(self.seconds), 2),
            "groups": round(statistics.mean(self.groups), 1),
            "loaded / union": round(self.loaded / self.union, 3),
            "loaded / bound": round(self.loaded / self.bound, 3),
            "loaded_gib": round(self.loaded / 2**30, 1),
        }


def measure(
    grow: Callable[[], Grown], warm_rounds: int, rounds: int, share: float, copies: bool
) -> list[dict[str, Any]]:
    """Both planners over the same rounds of one tree; capacity is a share of the first's need."""
    tree = grow()
    for _ in range(warm_rounds):
        tree.select(tree.expand())
    sides = [Side(name, ScheduleSettings(planner=name)) for name in ("ranges", "greedy")]
    capacity, num_segments = 0, 0
    for _ in range(rounds):
        beams = tree.expand()
        open_beams = set(beams)
        steps = [step for step in tree.walk() if step not in open_beams]
        if not capacity:
            demand = demand_of(steps, beams, "", 1, copies)
            capacity = int(share * Forest(demand).need(0, len(beams)))
            num_segments = len(steps)
        for side in sides:
            side.run(demand_of(steps, beams, side.name, capacity, copies), steps, beams)
        tree.select(beams)
    return [
        {
            "beams": len(beams),
            "segments": num_segments,
            "layout": "copy" if copies else "tree",
            "capacity": f"{share:.0%}",
            **side.row(),
        }
        for side in sides
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beams", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--segments", type=int, default=10_000, help="of the `families` tree")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.25, 0.5])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    rows: list[dict[str, Any]] = []
    for num_beams in args.beams:
        depth = args.segments // (num_beams // args.width)
        for kind, warm_rounds in (("families", depth - 2), ("beam", 60)):
            for copies in (False, True):
                for share in args.shares:
                    found = measure(
                        lambda kind=kind, beams=num_beams: Grown(  # type: ignore[misc]
                            kind, beams, args.width, args.seed
                        ),
                        warm_rounds,
                        args.rounds,
                        share,
                        copies,
                    )
                    rows += [{"tree": kind, **row} for row in found]
    say(table(rows, [*_COLUMNS, *_FIGURES]))
    finish("planner", {"rounds": args.rounds, "width": args.width, "rows": rows})


if __name__ == "__main__":
    main()
