"""Simulate the cache study of the thesis on decoupled exploration (chapters 5 to 8).

A 1B generator and an 8B reward model share one card. Problems are in flight together; beam search
has width 4 and at most 40 steps. The split is the generator's share of the card, weights and
activations included (vLLM's `gpu_memory_utilization`). Evicted KV is recomputed, as in vLLM, or
with `--evict host` loaded from host memory.

The results have five tables:

- split: hit rates, thrashing and throughput by split and eviction order (Figures 5.2, 6.1, 6.2)
- crowd: the same by problems in flight
- batches: tokens per request and per forward pass (7.1, 7.3)
- sizes: throughput by batch size (7.2), from the cost model alone
- hybrid: decode steps with a prompt in the same pass (8.1), from the cost model alone
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from beamwright.errors import CapacityError
from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.solution import CacheStats
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator.bench import Bench, Simulation
from beamwright_lab.simulator.costs import RooflineCosts, Work
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.verifier import VerifierCase
from beamwright_lab.simulator.victims import Victims

GIB = 2**30
GENERATOR, VERIFIER = "llama-3.2-1b", "rlhflow-prm-8b"
# Problems in flight by default, per card.
CARDS = {"rtx-4090": 16, "a100-80gb": 64}
SPLITS = {
    "rtx-4090": (0.125, 0.14, 0.16, 0.18, 0.20, 0.22, 0.24, 0.26, 0.28, 0.29),
    "a100-80gb": (0.05, 0.06, 0.08, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7),
}
VICTIMS: tuple[Victims, ...] = ("lru", "tree", "cost")
USABLE = 0.95  # share of the card's memory, as in the thesis
N, WIDTH, MOST_DEPTH = 16, 4, 40
PROMPT, STEP, SPREAD, SHORTEST, LONGEST = 200, 40, 0.6, 200, 900
SCHEDULED_TOKENS = 2048  # most tokens of a pass: vLLM's default of max_num_batched_tokens
BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PATH = 600  # tokens of a path in the middle of a search
SHARING = 4  # candidates that extend one path
CROWDS = (1, 4, 8, 16, 32, 48)
CROWDED = "rtx-4090", 0.2
SPLIT_COLUMNS = (
    "card", "in flight", "victims", "split", "KV, GiB", "verifier's", "tok/s", "verify", "hits",
    "verifier hits", "thrash", "verifier thrash",
)  # fmt: skip


# --- searches --------------------------------------------------------------------------------


def searches(num_problems: int) -> list[RecordedTree]:
    """Generate trees of different path lengths, none deeper than the thesis allows."""
    found: list[RecordedTree] = []
    seed = 0
    while len(found) < num_problems:
        length = Random(seed).randint(SHORTEST, LONGEST)
        search = SyntheticSearch(
            N, WIDTH, PROMPT, length, STEP, step_sigma=SPREAD, survival="score", seed=seed
        )
        tree = replace(grow(search), problem_id=seed)
        seed += 1
        if tree.rounds <= MOST_DEPTH:
            found.append(tree)
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes of KV memory of each model."""

    generator: int
    verifier: int

    @classmethod
    def of(cls, card: HardwareProfile, split: float) -> Memory:
        """Divide a card's memory.

        split: the generator's share, its weights and activations included.
        """
        total = card.device_memory_bytes
        own, other = (
            model.weights + model.activations(N * WIDTH)
            for model in (ModelBytes(NAMED_SHAPES[name], 2) for name in (GENERATOR, VERIFIER))
        )
        return cls(int(split * total) - own, int((USABLE - split) * total) - other)


@dataclass(frozen=True)
class CountedCosts(RooflineCosts):
    """Roofline costs that count forward passes by their number of tokens."""

    passes: Counter[int] = field(default_factory=Counter, kw_only=True)

    def _passes(self, num_rows: int, reads: Sequence[int], *how: Any) -> Work:
        self.passes[num_rows] += len(reads)
        return super()._passes(num_rows, reads, *how)


@dataclass(frozen=True)
class CacheRun:
    """Measurements of one simulated run.

    verify_share: share of the time in which the verifier computes.
    passes: forward passes of both models, counted by tokens per pass.
    """

    tok_s: float
    verify_share: float
    generator: CacheStats
    verifier: CacheStats
    passes: tuple[Counter[int], Counter[int]]

    @property
    def is_calm(self) -> bool:
        """True if no KV left the device."""
        return self.generator.evicted_blocks == self.verifier.evicted_blocks == 0


def run(
    trees: Sequence[RecordedTree],
    card: HardwareProfile,
    memory: Memory,
    in_flight: int,
    victims: Victims = "tree",
    **schedule: Any,
) -> CacheRun | None:
    """Simulate all searches, `in_flight` at a time; return None if one does not fit."""
    models = [ModelCosts.of(NAMED_SHAPES[name], 2) for name in (GENERATOR, VERIFIER)]
    costs = [CountedCosts(Roofline(model, card), Layout.TREE) for model in models]
    settings = ScheduleSettings(
        schedule="locality", batching="continuous", explore="continuous", **schedule
    )
    most = max(node.tokens for tree in trees for node in tree.nodes)
    cases = [
        Simulation(
            tree,
            models[0],
            costs[0],
            kv_budget_bytes=memory.generator,
            schedule=settings,
            step=StepSettings(max_step_tokens=most),
            verifier=VerifierCase(models[1], costs[1], memory.verifier),
            victims=victims,
        )
        for tree in trees
    ]
    bench = Bench(cases)
    try:
        bench.run(in_flight)
    except CapacityError:
        return None
    assert bench.residency is not None
    time_s = bench.clock.now_s
    return CacheRun(
        sum(node.tokens for tree in trees for node in tree.nodes) / time_s,
        bench.phase_timer.counts.verify_s / time_s,
        CacheStats.of(bench.residency.counts),
        CacheStats.of(bench.scorers[0].counts),
        (costs[0].passes, costs[1].passes),
    )


# --- figures ---------------------------------------------------------------------------------


def split_row(
    card: str, in_flight: int, victims: str, split: float, memory: Memory, found: CacheRun | None
) -> dict[str, Any]:
    """Return the table row of one run.

    Column "thrash" is the share of needed tokens that had been evicted.
    """
    row: dict[str, Any] = {
        "card": card,
        "in flight": in_flight,
        "victims": victims,
        "split": split,
        "KV, GiB": round(memory.generator / GIB, 2),
        "verifier's": round(memory.verifier / GIB, 2),
    }
    if found is None:
        return {**row, "tok/s": "does not fit"}
    row |= {"tok/s": round(found.tok_s, 1), "verify": round(found.verify_share, 3)}
    for name, each in (("", found.generator), ("verifier ", found.verifier)):
        had_left = each.loaded_tokens + each.recomputed_tokens
        row |= {
            f"{name}hits": round(each.hit_rate or 0.0, 4),
            f"{name}thrash": round(had_left / each.needed_tokens, 4),
        }
    return row


def batch_rows(
    card: str, trees: Sequence[RecordedTree], found: CacheRun
) -> Iterator[dict[str, Any]]:
    """Yield per model: the share of requests of one token, and how full its passes are."""
    steps = [node.tokens for tree in trees for node in tree.nodes]
    requests = (
        Counter({1: sum(steps), PROMPT: len(trees)}),
        Counter([*(tokens + 1 for tokens in steps), *[PROMPT] * len(trees)]),
    )
    for model, own, passes in zip((GENERATOR, VERIFIER), requests, found.passes, strict=True):
        total, count = passes.total(), sum(size * times for size, times in passes.items())
        yield {
            "card": card,
            "model": model,
            "requests of 1": round(own[1] / own.total(), 4),
            "of 2,048": round(count / total / SCHEDULED_TOKENS, 4),
        }


def size_rows(card: str) -> Iterator[dict[str, Any]]:
    """Yield each model's throughput by requests per batch, one token or one scored step each."""
    generator, verifier = rooflines(card)

    def rates(requests: int) -> tuple[float, float]:
        tokens = requests * (STEP + 1)
        return requests / decode_time(generator)(requests), tokens / score_time(verifier)(tokens)

    best = rates(max(BATCH_REQUESTS))
    for requests in BATCH_REQUESTS:
        own, other = rates(requests)
        yield {
            "card": card,
            "requests": requests,
            "generator, tok/s": round(own),
            "of its most": round(own / best[0], 3),
            "verifier, tok/s": round(other),
            "of the verifier's most": round(other / best[1], 3),
        }


def hybrid_rows(card: str) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of a decode step, alone and with a prompt in the same pass."""
    generator, _ = rooflines(card)
    step = decode_time(generator)
    for rows in (16, 64, 256):
        alone = step(rows)
        row: dict[str, Any] = {
            "card": card,
            "rows": rows,
            "alone, ms": round(1e3 * alone, 2),
        }
        for prompt in (PROMPT, 5 * PROMPT):
            read, seen = rows * PATH / SHARING, rows * PATH
            mixed = generator.decode_step_s(
                rows + prompt, read + prompt, seen + prompt * (prompt + 1) / 2
            )
            row[f"with {prompt}"] = round(1e3 * mixed, 2)
            row[f"times, {prompt}"] = round(mixed / alone, 2)
            row[f"apart, {prompt}"] = round(1e3 * (alone + generator.prefill_s(prompt)), 2)
        yield row


def rooflines(card: str) -> tuple[Roofline, Roofline]:
    profile = find_profile(card)
    generator, verifier = (
        Roofline(ModelCosts.of(NAMED_SHAPES[name], 2), profile) for name in (GENERATOR, VERIFIER)
    )
    return generator, verifier


def decode_time(roofline: Roofline) -> Callable[[int], float]:
    """Return a function from rows to the seconds of one token each; `SHARING` rows share a path."""
    return lambda rows: roofline.decode_step_s(rows, rows * PATH / SHARING + rows, rows * PATH)


def score_time(roofline: Roofline) -> Callable[[int], float]:
    """Return a function from tokens to the seconds to score them; `SHARING` steps share a path."""

    def seconds(tokens: int) -> float:
        read = max(1.0, tokens / STEP / SHARING) * PATH + tokens
        return roofline.decode_step_s(tokens, read, tokens * PATH)

    return seconds


# --- command line ----------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How well do tree searches use prefix caches?")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=[*CARDS])
    parser.add_argument("--in-flight", type=int, help="problems at a time (default: by card)")
    parser.add_argument("--splits", nargs="+", type=float, help="the generator's share of the card")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=[*VICTIMS])
    parser.add_argument("--crowds", nargs="*", type=int, default=CROWDS, help="further --in-flight")
    parser.add_argument("--evict", choices=("recompute", "host"), default="recompute")
    return parser.parse_args()


@dataclass
class Study:
    """A sequence of runs and their table rows.

    fastest: the run with the highest throughput, per card.
    calm: runs without eviction, whose results hold for every eviction order.
    """

    trees: Sequence[RecordedTree]
    evict: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    fastest: dict[str, CacheRun] = field(default_factory=dict)
    calm: dict[tuple[str, int, float], CacheRun] = field(default_factory=dict)

    def add(self, card: str, in_flight: int, victims: Victims, split: float) -> None:
        start, profile = time.perf_counter(), find_profile(card)
        memory, found = Memory.of(profile, split), self.calm.get((card, in_flight, split))
        if found is None and min(memory.generator, memory.verifier) > 0:
            found = run(self.trees, profile, memory, in_flight, victims, evict=self.evict)
        if found is not None and found.is_calm:
            self.calm[card, in_flight, split] = found
        self.rows.append(split_row(card, in_flight, victims, split, memory, found))
        say(f"  {self.rows[-1]} ({time.perf_counter() - start:.0f} s)")
        if found is not None:
            before = self.fastest.get(card, found)
            self.fastest[card] = max(before, found, key=lambda each: each.tok_s)


def main() -> None:
    args = parse_args()
    trees = searches(args.problems)
    steps = [node.tokens for tree in trees for node in tree.nodes]
    say(f"  {len(trees)} problems, {len(steps):,} steps, {sum(steps):,} tokens")
    study, crowd = Study(trees, args.evict), Study(trees, args.evict)
    for card in args.cards:
        for victims in args.victims:
            for split in args.splits or SPLITS[card]:
                study.add(card, args.in_flight or CARDS[card], victims, split)
    card, split = CROWDED
    for in_flight in args.crowds if card in args.cards else ():
        for victims in args.victims:
            crowd.add(card, in_flight, victims, split)
    result = {
        "problems": len(trees),
        "steps": len(steps),
        "evict": args.evict,
        "split": study.rows,
        "crowd": crowd.rows,
        "batches": [
            row for card, found in study.fastest.items() for row in batch_rows(card, trees, found)
        ],
        "sizes": [row for card in args.cards for row in size_rows(card)],
        "hybrid": [row for card in args.cards for row in hybrid_rows(card)],
    }
    say(table(study.rows, SPLIT_COLUMNS))
    say(table(crowd.rows, SPLIT_COLUMNS))
    for name in ("batches", "sizes", "hybrid"):
        if result[name]:
            say(table(result[name], [*result[name][0]]))
    finish("decoupled_cache", result)


if __name__ == "__main__":
    main()
