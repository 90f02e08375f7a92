"""FlashTTS's prefix-aware order on the last iteration of a search: evictions, KV, time per plan.

Trees are made up by the real strategy (lognormal steps; who survives is chance, or scores that
children inherit) or recorded (`solve --record-tree`). Bytes are whole blocks of a node's tokens
for the paper's 1.5B+7B pair, the verifier with a mark per step. No model runs.

Orders: `greedy` as printed and `siblings` as implemented begin with a queue in which survivors are
replicated in turn, parents in their old order; `greedy, mixed`: as printed, from the queues of
`random`, which is the mean of five seeds and the paper's baseline; `by score`: siblings together,
parents best first; `in turn`: that queue itself; `worst` is the least P at every choice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beamwright.models.named_shapes import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.protocols import KVDemand, ScheduleView
from beamwright.registry import restored
from beamwright.saved.recorded import read_recorded
from beamwright.schedule import schedule
from beamwright.schedule.forest import Forest, loaded_bytes
from beamwright.schedule.prefix_order import (
    PREFIX_ORDERS,
    PrefixOrder,
    PrefixSchedule,
    cut,
    nearest,
    node_forest,
    ordered,
    siblings_together,
    trie,
)
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import RecordedNode, RecordedTree
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator import RooflineCosts, Simulation, SyntheticSearch, simulate
from beamwright_lab.simulator import grow as grow_tree
from beamwright_lab.studies.prefix_order import eviction_cost

GENERATOR, VERIFIER = "qwen2.5-math-1.5b", "math-shepherd-7b"
SIDES = {"generator": (GENERATOR, 0), "verifier": (VERIFIER, 1)}  # tokens added to every step
PROMPT_TOKENS = 128
RANDOM_SEEDS = 5
MIB = 2**20
COST_COLUMNS = (
    "tree", "n", "KV", "order", "batches", "cost, nodes", "cost, MiB", "loaded / union",
    "kept / union",
)  # fmt: skip
TIME_COLUMNS = ("tree", "n", "order", "ms min", "ms median", "cut, ms")


@dataclass(frozen=True)
class Case:
    """The last iteration of a search. beams: its candidates in lineage order."""

    name: str
    tree: RecordedTree
    beams: tuple[RecordedNode, ...]

    @classmethod
    def of(cls, name: str, tree: RecordedTree, num_rounds: int | None, least: int) -> Case:
        """The iteration `num_rounds`; None: the last one in which at least `least` paths grow."""
        rounds = [num_rounds] if num_rounds else range(tree.rounds, 0, -1)
        for number in rounds:
            beams = tuple(sorted(_opened(tree, number), key=lambda node: node.lineage))
            if len(beams) >= least:
                return cls(name, tree, beams)
        raise SystemExit(f"{name}: no iteration has {least} paths")

    def demand(self, side: str = "generator") -> KVDemand:
        """What the beams read and write; no limit."""
        model, added = SIDES[side]
        block = BLOCK_TOKENS * _costs(model).kv_bytes_per_token
        steps = {node.lineage: node.tokens + added for node in self.tree.nodes}
        numbers: dict[tuple[int, ...], int] = {(): 0}
        parent: list[int | None] = [None]
        sizes = [_blocks(self.tree.prompt_tokens) * block]
        for beam in self.beams:
            for depth in range(1, len(beam.lineage)):
                above = beam.lineage[:depth]
                if above not in numbers:
                    numbers[above] = len(parent)
                    parent.append(numbers[above[:-1]])
                    sizes.append(_blocks(steps[above]) * block)
        growth = [_blocks(steps[beam.lineage]) * block for beam in self.beams]
        leaf = [numbers[beam.lineage[:-1]] for beam in self.beams]
        return KVDemand(parent, sizes, [0] * len(parent), leaf, growth, 2**62)

    def by_score(self) -> list[int]:
        """Beam numbers, the best parent's first."""
        scores = {node.lineage: node.score or 0.0 for node in self.tree.nodes}
        parents = [scores.get(beam.lineage[:-1], 0.0) for beam in self.beams]
        return sorted(range(len(parents)), key=lambda beam: -parents[beam])

    def in_turn(self) -> list[int]:
        """Beam numbers with siblings apart: first children, second children..."""
        return sorted(range(len(self.beams)), key=lambda beam: self.beams[beam].lineage[-1])

    def orders(self, forest: Forest) -> dict[str, list[Callable[[], list[int]]]]:
        """What makes each order; several where the figure is a mean."""
        queue = self.in_turn()

        def made(name: PrefixOrder, seed: int = 0) -> Callable[[], list[int]]:
            return lambda: ordered(name, forest, queue, seed)

        found = {name: [made(name)] for name in PREFIX_ORDERS}
        random = [made("random", seed) for seed in range(RANDOM_SEEDS)]
        own = {
            "greedy, mixed": [lambda each=each: nearest(forest, each()) for each in random],  # type: ignore[misc]
            "by score": [lambda: siblings_together(forest, self.by_score())],
            "in turn": [lambda: queue],
        }
        return {**found, **own, "random": random}  # type: ignore[dict-item]


def _opened(tree: RecordedTree, number: int) -> list[RecordedNode]:
    return [node for node in tree.nodes if node.round == number]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _costs(model: str) -> ModelCosts:
    return ModelCosts.of(shape_from_text(model), 2)


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for num_beams in args.n:
        for survival in ("random", "score"):
            search = SyntheticSearch(
                num_beams, args.width, PROMPT_TOKENS, 4 * args.iterations * args.step, args.step,
                step_sigma=args.sigma, survival=survival, seed=args.seed,
            )  # fmt: skip
            tree = grow_tree(search)
            found.append(Case.of(f"{survival} survives", tree, args.iterations, num_beams // 2))
    for file in args.recorded_tree:
        tree = read_recorded(file)
        most = max(len(_opened(tree, number)) for number in range(1, tree.rounds + 1))
        found.append(Case.of(f"recorded, {file.stem}", tree, None, most // 2))
    return found


# --- (a) evictions ---------------------------------------------------------------------------


def evictions(case: Case, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Cost and loads of each order under each capacity, a share of what all beams need at the end.

    loaded: each batch loads what the batch before it has not. kept: what is used next stays while
    there is room (`schedule.traffic`), as in an engine. Both count the nodes of the first batch.
    """
    rows, plain = [], case.demand()
    union = sum(plain.segment_bytes)
    total = Forest(plain).need(0, len(case.beams))
    for share in shares:
        demand = replace(plain, capacity_bytes=int(share * total))
        for name, makers in case.orders(node_forest(demand)).items():
            figures = [_evicted(demand, make()) for make in makers]
            mean = {key: statistics.mean(each[key] for each in figures) for key in figures[0]}
            rows.append({
                "tree": case.name, "n": len(case.beams), "KV": f"{share:.0%}", "order": name,
                "batches": round(mean["batches"], 1),
                "cost, nodes": round(mean["nodes"], 1),
                "cost, MiB": round(mean["bytes"] / MIB),
                "loaded / union": round(mean["loaded"] / union, 2),
                "kept / union": round(mean["kept"] / union, 2),
            })  # fmt: skip
    return rows


def _evicted(demand: KVDemand, order: Sequence[int]) -> dict[str, int]:
    groups = cut(demand, order)
    cost = eviction_cost(demand, groups, in_bytes=True)
    last = sum(demand.segment_bytes[node] for node in trie(demand, groups[-1]))
    return {
        "batches": len(groups),
        "nodes": eviction_cost(demand, groups),
        "bytes": cost,
        "loaded": cost + last,
        "kept": loaded_bytes(demand, groups),
    }


# --- (b) KV against batch size ----------------------------------------------------------------


def kv_sizes(case: Case, side: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """MiB of batches of so many beams, the mean over the order: at the start of the iteration, when
    siblings are still duplicates, and at its end."""
    demand = case.demand(side)
    rows = []
    for name, makers in case.orders(node_forest(demand)).items():
        orders = [make() for make in makers]
        row: dict[str, Any] = {"tree": case.name, "KV of": side, "order": name}
        for size in sizes:
            start, growth = [], []
            for order in orders:
                for first in range(0, len(order) - size + 1, size):
                    group = order[first : first + size]
                    nodes = trie(demand, group)
                    start.append(sum(demand.segment_bytes[node] for node in nodes))
                    growth.append(sum(demand.growth_bytes[beam] for beam in group))
            begin, end = statistics.mean(start), statistics.mean(start) + statistics.mean(growth)
            row[str(size)] = f"{begin / MIB:,.0f} / {end / MIB:,.0f}"
        rows.append(row)
    return rows


def batches_at(case: Case, side: str, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Beams of a mean batch in a budget, growth counted, a share of what all beams need."""
    plain = case.demand(side)
    total = Forest(plain).need(0, len(case.beams))
    rows = []
    for name, makers in case.orders(node_forest(plain)).items():
        row: dict[str, Any] = {"tree": case.name, "KV of": side, "order": name}
        for share in shares:
            demand = replace(plain, capacity_bytes=int(share * total))
            counts = [len(cut(demand, make())) for make in makers]
            row[f"{share:.0%}"] = round(len(case.beams) / statistics.mean(counts), 1)
        rows.append(row)
    return rows


# --- (c) time per plan, and (d) whole searches ------------------------------------------------


def plan_times(case: Case, share: float, repeats: int = 7) -> list[dict[str, Any]]:
    """Milliseconds of ordering and of cutting; both count against a plan."""
    plain = case.demand()
    total = Forest(plain).need(0, len(case.beams))
    demand = replace(plain, capacity_bytes=int(share * total))
    rows = []
    for name in PREFIX_ORDERS:
        ordering, cutting = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            order = ordered(name, node_forest(demand), case.in_turn())
            between = time.perf_counter()
            cut(demand, order)
            ordering.append(between - start)
            cutting.append(time.perf_counter() - between)
        rows.append({
            "tree": case.name, "n": len(case.beams), "order": name,
            "ms min": round(1e3 * min(ordering), 2),
            "ms median": round(1e3 * statistics.median(ordering), 2),
            "cut, ms": round(1e3 * min(cutting), 2),
        })  # fmt: skip
    return rows


class Turning(PrefixSchedule):
    """Every second iteration runs from the other end, where the one before it has left its KV."""

    def groups(
        self, view: ScheduleView, demand: KVDemand, forest: Forest
    ) -> Sequence[Sequence[int]]:
        order = range(len(forest))
        turned = len(view.beams) > 0 and len(view.beams[0].lineage) % 2 == 1
        return cut(demand, order[::-1] if turned else order, view.limit(self.settings.max_batch))


def searches(num_beams: int, args: argparse.Namespace, share: float) -> list[dict[str, Any]]:
    """Simulated: bytes over the link of whole searches, where KV is kept between iterations."""
    with restored():
        schedule("turning", meaning="depth-first, from alternate ends")(Turning)
        return _searches(num_beams, args, share)


def _searches(num_beams: int, args: argparse.Namespace, share: float) -> list[dict[str, Any]]:
    rows = []
    model = _costs(GENERATOR)
    costs = RooflineCosts.of(model, find_profile("rtx-4090"), Layout.TREE)
    for survival in ("random", "score"):
        tree = grow_tree(
            SyntheticSearch(
                num_beams, args.width, PROMPT_TOKENS, args.iterations * args.step, args.step,
                survival=survival, seed=args.seed,
            )
        )  # fmt: skip
        step = StepSettings(
            step_tokens=args.step, max_step_tokens=args.step, max_tokens=args.iterations * args.step
        )

        def run(
            kv_bytes: int, tree: RecordedTree = tree, step: StepSettings = step, **options: Any
        ):  # type: ignore[no-untyped-def]
            settings = ScheduleSettings.model_validate(options)
            return simulate(Simulation(tree, model, costs, kv_bytes, settings, step))

        peak = run(2**40, schedule="in-gpu").device_peak_bytes
        chosen: list[dict[str, Any]] = [{"schedule": "prefix", "order": o} for o in PREFIX_ORDERS]
        for options in [{"schedule": "locality"}, {"schedule": "turning"}, *chosen]:
            found = run(int(share * peak), **options, batching="grouped")
            rows.append({
                "tree": f"{survival} survives", "n": num_beams, "KV": f"{share:.0%}",
                "order": options.get("order", options["schedule"]), "groups": found.groups,
                "to the device, MiB": round(found.h2d_bytes / MIB),
                "to the host, MiB": round(found.d2h_bytes / MIB),
                "seconds": round(found.time_s, 2),
            })  # fmt: skip
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--step", type=int, default=64, help="mean tokens of a step")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of its length")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    parser.add_argument("--searches", type=int, default=64, help="n of whole searches; 0: none")
    parser.add_argument("--recorded-tree", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    found = cases(args)
    cost = [row for case in found for row in evictions(case, args.shares)]
    say(table(cost, COST_COLUMNS))
    most = max(args.n)
    large = [case for case in found if len(case.beams) > most // 2]
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512) if size <= most]
    kv = [row for case in large for side in SIDES for row in kv_sizes(case, side, sizes)]
    say(table(kv, ["tree", "KV of", "order", *map(str, sizes)]))
    fit = [row for case in large for side in SIDES for row in batches_at(case, side, args.shares)]
    say(table(fit, ["tree", "KV of", "order", *(f"{share:.0%}" for share in args.shares)]))
    times = [row for case in found for row in plan_times(case, args.shares[-1])]
    say(table(times, TIME_COLUMNS))
    whole: list[dict[str, Any]] = []
    if args.searches:
        whole = [row for share in args.shares[:2] for row in searches(args.searches, args, share)]
        say(table(whole, list(whole[0])))
    result = {"evictions": cost, "kv": kv, "batches": fit, "plans": times, "searches": whole}
    finish("order", {"step": args.step, "sigma": args.sigma, **result})


if __name__ == "__main__":
    main()
