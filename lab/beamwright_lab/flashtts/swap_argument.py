"""Does the proof of FlashTTS's Appendix A.2 hold? Every order of every small tree.

Leaves of a tree are CoTs, inner nodes their shared steps; no inner node but the root has a single
child. P(a, b) is the size of what two CoTs share, so each inner node v counts once for every
consecutive pair below it: Score = sum over v of size(v) * pairs(v), and pairs(v) is at most
leaves(v) - 1, which it is if and only if the leaves below v follow each other. Orders of the best
score are therefore the depth-first ones, whatever the (positive) sizes. The counts below check
that, and each step of the printed argument:

    A = P(c[i-1], c[j]) - P(c[i-1], c[i])      B = P(c[j], c[i+1]) - P(c[i], c[i+1])
    C = P(c[j-1], c[i]) - P(c[j-1], c[j])      D = P(c[i], c[j+1]) - P(c[j], c[j+1])

Greedy schedules are all that the invariant allows: any first CoT, any choice among equals.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, pairwise, permutations
from typing import Any

from beamwright.protocols import KVDemand
from beamwright.schedule.forest import Forest
from beamwright.schedule.prefix_order import cut, node_forest, trie
from beamwright_lab.common import finish, say, table
from beamwright_lab.studies.prefix_order import eviction_cost

Shape = tuple[Any, ...]  # a node as its children; () is a leaf
Order = tuple[int, ...]
Matrix = list[list[int]]

TERMS = ("A", "B", "C", "D")
PROOF_COLUMNS = (
    "P", "leaves", "trees", "best orders", "greedy schedules", "optimal", "depth-first",
    "all depth-first greedy", "swaps", "A > 0", "B > 0", "C > 0", "D > 0", "delta > 0",
)  # fmt: skip
BATCH_COLUMNS = (
    "sizes", "leaves", "trees x capacities", "by", "some depth-first best", "all depth-first best",
    "worst depth-first / best",
)  # fmt: skip


# --- trees -----------------------------------------------------------------------------------


@cache
def shapes(num_leaves: int) -> tuple[Shape, ...]:
    """Every rooted tree with so many leaves, in which a node has no or at least two children."""
    if num_leaves == 1:
        return ((),)
    return tuple(forests(num_leaves, num_leaves - 1))


def forests(num_leaves: int, largest: int) -> Iterator[Shape]:
    """Every multiset of trees with so many leaves in all, of at most `largest` each."""
    if num_leaves == 0:
        yield ()
        return
    for size in range(min(num_leaves, largest), 0, -1):
        for count in range(1, num_leaves // size + 1):
            for rest in forests(num_leaves - count * size, size - 1):
                for chosen in _multisets(shapes(size), count):
                    yield (*chosen, *rest)


def _multisets(items: Sequence[Shape], count: int) -> Iterator[Shape]:
    if count == 0:
        yield ()
        return
    for place, item in enumerate(items):
        for rest in _multisets(items[place:], count - 1):
            yield (item, *rest)


def demand_of(shape: Shape, sizes: random.Random | None = None) -> KVDemand:
    """Nodes of size 1, or of 1 to 9; every leaf is a node of its own."""
    parent: list[int | None] = []
    leaf: list[int | None] = []

    def add(node: Shape, above: int | None) -> None:
        number = len(parent)
        parent.append(above)
        if not node:
            leaf.append(number)
        for child in node:
            add(child, number)

    add(shape, None)
    numbers = [sizes.randint(1, 9) if sizes else 1 for _ in parent]
    return KVDemand(parent, numbers, [0] * len(parent), leaf, [0] * len(leaf), 1)


def shared(forest: Forest) -> Matrix:
    """P(a, b) in the forest's unit."""
    beams = range(len(forest))
    return [[forest.common_bytes(min(a, b), max(a, b)) for b in beams] for a in beams]


def depth_first(demand: KVDemand) -> frozenset[Order]:
    """Orders in which the leaves below every node follow each other."""
    num_leaves = len(demand.leaf)
    below: list[list[int]] = [[] for _ in demand.parent]
    for number in range(num_leaves):
        for node in trie(demand, [number]):
            below[node].append(number)
    inner = [leaves for leaves in below if 1 < len(leaves) < num_leaves]

    def together(order: Order) -> bool:
        place = {leaf: k for k, leaf in enumerate(order)}
        spans = ([place[leaf] for leaf in leaves] for leaves in inner)
        return all(max(span) - min(span) < len(span) for span in spans)

    return frozenset(filter(together, permutations(range(num_leaves))))


def written(shape: Shape) -> str:
    """Brackets around siblings, leaves by their number."""
    numbers = iter(range(1, 100))

    def text(node: Shape) -> str:
        return f"({' '.join(map(text, node))})" if node else f"c{next(numbers)}"

    return text(shape)


# --- single-CoT batches: the proof ------------------------------------------------------------


def greedy_schedules(common: Matrix) -> Iterator[Order]:
    """Every schedule that the invariant allows."""

    def extend(order: Order, left: frozenset[int]) -> Iterator[Order]:
        if not left:
            yield order
            return
        best = max((common[order[-1]][c] for c in left), default=0) if order else 0
        for c in sorted(left):
            if not order or common[order[-1]][c] == best:
                yield from extend((*order, c), left - {c})

    return extend((), frozenset(range(len(common))))


def score(common: Matrix, order: Order) -> int:
    return sum(common[a][b] for a, b in pairwise(order))


def terms(common: Matrix, order: Order, i: int, j: int) -> tuple[int, int, int, int]:
    """A to D of swapping places i < j - 1; a term whose neighbour does not exist is 0."""
    swapped, kept = order[j], order[i]
    before, after = order[i - 1] if i else None, order[j + 1] if j + 1 < len(order) else None
    first, last = order[i + 1], order[j - 1]
    return (
        0 if before is None else common[before][swapped] - common[before][kept],
        common[swapped][first] - common[kept][first],
        common[last][kept] - common[last][swapped],
        0 if after is None else common[kept][after] - common[swapped][after],
    )


@dataclass
class Proof:
    """Counts over trees, greedy schedules and their swaps."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, common: Matrix, tree: str, depth_first: frozenset[Order] | None) -> None:
        """depth_first: orders of the tree; None where there is no tree to have any."""
        self.counts["trees"] += 1
        scores = Counter(score(common, order) for order in permutations(range(len(common))))
        best = max(scores)
        self.counts["best orders"] += scores[best]
        schedules = set(greedy_schedules(common))
        if depth_first is not None:
            self.counts["depth-first"] += len(schedules & depth_first)
            self.counts["all depth-first greedy"] += depth_first <= schedules
        for order in sorted(schedules):
            self.counts["greedy schedules"] += 1
            self.counts["optimal"] += score(common, order) == best
            for i, j in combinations(range(len(order)), 2):
                if j > i + 1:
                    self._swap(common, tree, order, i, j)

    def _swap(self, common: Matrix, tree: str, order: Order, i: int, j: int) -> None:
        found = terms(common, order, i, j)
        self.counts["swaps"] += 1
        named = {**dict(zip(TERMS, found, strict=True)), "delta": sum(found)}
        for name, value in named.items():
            if value > 0:
                self.counts[f"{name} > 0"] += 1
                said = " ".join(f"c{c + 1}" for c in order)
                example = {"tree": tree, "schedule": said, "i": i + 1, "j": j + 1, **named}
                self.examples.setdefault(name, example)

    def row(self, unit: str, leaves: int) -> dict[str, Any]:
        return {**{name: self.counts[name] for name in PROOF_COLUMNS}, "P": unit, "leaves": leaves}


def prove(most_leaves: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by unit and number of leaves, and the smallest counterexample of each term."""
    rows, examples = [], {}
    for unit in ("nodes", "tokens"):
        sizes = random.Random(seed)
        for leaves in range(3, most_leaves + 1):
            proof = Proof()
            for shape in shapes(leaves):
                demand = demand_of(shape, sizes)
                forest = node_forest(demand) if unit == "nodes" else Forest(demand)
                proof.add(shared(forest), written(shape), depth_first(demand))
            rows.append(proof.row(unit, leaves))
            say(f"  {rows[-1]}")
            if unit == "nodes":
                examples = {**proof.examples, **examples}
    return rows, examples


def without_trees(most_leaves: int, num_drawn: int, seed: int) -> list[dict[str, Any]]:
    """The argument uses only the invariant; here P is any symmetric matrix of 0 to 3."""
    rng, rows = random.Random(seed), []
    for leaves in range(3, most_leaves + 1):
        proof = Proof()
        for _ in range(num_drawn):
            common = [[0] * leaves for _ in range(leaves)]
            for a, b in combinations(range(leaves), 2):
                common[a][b] = common[b][a] = rng.randint(0, 3)
            proof.add(common, "", None)
        row = proof.row("any", leaves)
        row["depth-first"] = row["all depth-first greedy"] = None
        rows.append(row)
        say(f"  {row}")
    return rows


# --- batches of several CoTs ------------------------------------------------------------------


def capacities(demand: KVDemand) -> Iterable[int]:
    """From the largest path to one less than everything."""
    forest = Forest(demand)
    return range(max(forest.path_bytes), forest.need(0, len(forest)))


def batches(most_leaves: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Depth-first orders against all orders, by three measures; the first tree that each loses."""
    rows, examples = [], {}
    for unequal in (False, True):
        rng = random.Random(seed) if unequal else None
        for leaves in range(3, most_leaves + 1):
            found: dict[str, Counter[str]] = {}
            worst: dict[str, float] = {}
            for shape in shapes(leaves):
                demand = demand_of(shape, rng)
                good = depth_first(demand)
                limits = list(capacities(demand))
                if rng is not None:
                    limits = sorted(rng.sample(limits, min(3, len(limits))))
                for capacity in limits:
                    for by, measured in _measure(replace(demand, capacity_bytes=capacity)).items():
                        best = min(measured.values())
                        inside = [measured[order] for order in good]
                        counts = found.setdefault(by, Counter())
                        counts["cases"] += 1
                        counts["some"] += min(inside) == best
                        counts["all"] += max(inside) == best
                        if best:
                            worst[by] = max(worst.get(by, 1.0), max(inside) / best)
                        if min(inside) > best:
                            order = min(measured, key=lambda each: (measured[each], each))
                            examples.setdefault(by + (", unequal sizes" if unequal else ""), {
                                "tree": written(shape), "sizes": demand.segment_bytes,
                                "capacity": capacity, "depth-first": min(inside), "best": best,
                                "order": " ".join(f"c{c + 1}" for c in order),
                            })  # fmt: skip
            for by, counts in found.items():
                rows.append({
                    "sizes": "1 to 9" if unequal else "1", "leaves": leaves, "by": by,
                    "trees x capacities": counts["cases"],
                    "some depth-first best": counts["some"],
                    "all depth-first best": counts["all"],
                    "worst depth-first / best": round(worst.get(by, 1.0), 2),
                })  # fmt: skip
                say(f"  {rows[-1]}")
    return rows, examples


def _measure(demand: KVDemand) -> dict[str, dict[Order, int]]:
    """Of every order: the paper's cost, the same with the last Trie (what is loaded), batches."""
    found: dict[str, dict[Order, int]] = {"cost": {}, "loaded": {}, "batches": {}}
    size = demand.segment_bytes
    for order in permutations(range(len(demand.leaf))):
        groups = cut(demand, order)
        cost = eviction_cost(demand, groups, in_bytes=True)
        found["cost"][order] = cost
        found["loaded"][order] = cost + sum(size[node] for node in trie(demand, groups[-1]))
        found["batches"][order] = len(groups)
    return found


def whole_trie(most_leaves: int) -> list[dict[str, Any]]:
    """T_{k+1} = argmax P(T_k, c): what the next CoT shares with the batch that is being filled."""
    rows = []
    for leaves in range(3, most_leaves + 1):
        counts: Counter[str] = Counter()
        for shape in shapes(leaves):
            plain = demand_of(shape)
            good, union = depth_first(plain), len(plain.parent)
            for capacity in capacities(plain):
                demand = replace(plain, capacity_bytes=capacity)
                for order in _trie_greedy(demand):
                    groups = cut(demand, order)
                    loaded = eviction_cost(demand, groups) + len(trie(demand, groups[-1]))
                    counts["schedules"] += 1
                    counts["not depth-first"] += order not in good
                    counts["loads a node again"] += loaded > union
        rows.append({"leaves": leaves, **counts})
        say(f"  {rows[-1]}")
    return rows


def _trie_greedy(demand: KVDemand) -> Iterator[Order]:
    """Every schedule that this rule allows."""

    def extend(order: Order, left: frozenset[int]) -> Iterator[Order]:
        if not left:
            yield order
            return
        held = trie(demand, cut(demand, order)[-1]) if order else set()
        common = {c: len(held & trie(demand, [c])) for c in left}
        best = max(common.values())
        for c in sorted(left):
            if common[c] == best:
                yield from extend((*order, c), left - {c})

    return extend((), frozenset(range(len(demand.leaf))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=7, help="of the largest trees")
    parser.add_argument("--batch-leaves", type=int, default=6, help="with several CoTs a batch")
    parser.add_argument("--trie-leaves", type=int, default=6, help="with P(T_k, c)")
    parser.add_argument("--drawn", type=int, default=1000, help="matrices that are no tree's")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    proof, examples = prove(args.leaves, args.seed)
    no_trees = without_trees(5, args.drawn, args.seed)
    several, lost = batches(args.batch_leaves, args.seed)
    tries = whole_trie(args.trie_leaves)
    say(table([*proof, *no_trees], PROOF_COLUMNS))
    for name, example in examples.items():
        say(f"{name} > 0: {example}")
    say(table(several, BATCH_COLUMNS))
    for name, example in lost.items():
        say(f"no depth-first order is best by {name}: {example}")
    say(table(tries, ("leaves", "schedules", "not depth-first", "loads a node again")))
    result = {"proof": proof, "any": no_trees, "examples": examples}
    finish("swap_argument", {**result, "batches": several, "lost": lost, "tries": tries})


if __name__ == "__main__":
    main()
