"""Simulate vLLM's cache thrashing: Figures 5.3 and 6.2 of the thesis on decoupled exploration.

Two vLLM instances share a card's memory as in `decoupled.cache`. In every turn, the steps of all
problems in flight are decoded, then scored. New problems join as others end (4.3.3). Unlike in this
engine, prompts are chunked and mixed into decode passes.

    python -m beamwright_lab.decoupled.blocks --problems 16 --splits 0.2 0.29
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright_lab.common import finish, say, table
from beamwright_lab.decoupled.cache import (
    CARDS,
    GENERATOR,
    SCHEDULED_TOKENS,
    SPLITS,
    VERIFIER,
    Memory,
    searches,
)
from beamwright_lab.flashtts.baseline import scoring_request
from beamwright_lab.rivals.blocks import PrefixBlocks
from beamwright_lab.rivals.requests import Iteration, StepRequest, requests_by_round
from beamwright_lab.rivals.vllm import VllmEngine
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.engines import EngineMeter, EngineRun
from beamwright_lab.simulator.recorded import RecordedTree

BLOCK_TOKENS = 16


class SeenBlocks(PrefixBlocks):
    """A block pool that counts thrashing (Alg. 1): blocks computed again after they left the cache.

    The printed `CacheBlocks` only grows, so nothing would ever count. Here it is what is cached.

    processed: blocks that were hit or filled.
    thrash: those of them that had been evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.processed = self.thrash = 0
        self._seen: set[int] = set()

    def hold(self, blocks: Iterable[int]) -> None:
        found = list(blocks)
        self.processed += len(found)
        super().hold(found)

    def store(self, block: int, key: int) -> None:
        if self._keys[block] != key:
            self.processed += 1
            self.thrash += key in self._seen and not self._cached.get(key)
            self._seen.add(key)
        super().store(block, key)


class WatchedEngine(VllmEngine):
    """vLLM with the thesis's counters.

    held: blocks that requests hold, at each scheduling step.
    """

    pool: SeenBlocks

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, block_tokens=BLOCK_TOKENS, max_batched_tokens=SCHEDULED_TOKENS)
        self.pool, self.held = SeenBlocks(num_blocks), list[int]()

    def schedule(self) -> Iteration:
        iteration = super().schedule()
        self.held.append(self.pool.num_held)
        return iteration


class Instance:
    """A vLLM instance with its own clock. Attention reads KV row by row."""

    def __init__(self, name: str, card: HardwareProfile, num_bytes: int) -> None:
        model = ModelCosts.of(NAMED_SHAPES[name], 2)
        self.meter = EngineMeter(RooflineCosts.of(model, card, Layout.TREE), reads_once=False)
        num_blocks = num_bytes // (BLOCK_TOKENS * model.kv_bytes_per_token)
        self.engine = WatchedEngine(num_blocks)
        self.run = EngineRun(self.engine, [self.meter])

    def facts(self) -> dict[str, Any]:
        pool, held = self.engine.pool, sorted(self.engine.held)
        return {
            "blocks": pool.num_blocks,
            "held": round(sum(held) / len(held)),
            "held, p90": held[len(held) * 9 // 10],
            "held, most": held[-1],
            "turns": len(held),
            "thrash": round(pool.thrash / pool.processed, 4),
            "preempted": self.engine.preemptions,
        }


@dataclass
class _Problem:
    """A search in flight: the requests of its remaining rounds, with the problem id in paths."""

    rounds: Iterator[list[StepRequest]]

    @classmethod
    def of(cls, tree: RecordedTree) -> _Problem:
        def own(request: StepRequest) -> StepRequest:
            path = tuple((tree.problem_id, *node) for node in request.path)
            return replace(request, path=path, node=(tree.problem_id, *request.node))

        rounds = requests_by_round(tree.prompt_tokens, tree.nodes)
        return cls(iter([[own(request) for request in each] for each in rounds]))


def run(
    trees: Sequence[RecordedTree], card: HardwareProfile, memory: Memory, in_flight: int
) -> tuple[Instance, Instance]:
    """Run all searches, `in_flight` at a time; return generator and verifier."""
    generator = Instance(GENERATOR, card, memory.generator)
    verifier = Instance(VERIFIER, card, memory.verifier)
    waiting, live = [_Problem.of(tree) for tree in trees], list[_Problem]()
    while waiting or live:
        live, waiting = live + waiting[: in_flight - len(live)], waiting[in_flight - len(live) :]
        rounds = {id(each): next(each.rounds, None) for each in live}
        live = [each for each in live if rounds[id(each)] is not None]
        steps = [request for each in live for request in rounds[id(each)] or ()]
        if steps:
            generator.run.run_round(steps)
            verifier.run.run_round([scoring_request(request) for request in steps])
    return generator, verifier


def rows(
    trees: Sequence[RecordedTree], card: str, splits: Sequence[float], in_flight: int | None = None
) -> list[dict[str, Any]]:
    """Return throughput (Figure 5.2), blocks (5.3) and thrashing (6.2), a row per split."""
    found, tokens = [], sum(node.tokens for tree in trees for node in tree.nodes)
    for split in splits:
        profile = find_profile(card)
        models = run(trees, profile, Memory.of(profile, split), in_flight or CARDS[card])
        row: dict[str, Any] = {"card": card, "split": split}
        row["tok/s"] = round(tokens / sum(model.meter.now_s for model in models), 1)
        for name, model in zip(("", "verifier "), models, strict=True):
            row |= {f"{name}{key}": value for key, value in model.facts().items()}
        found.append(row)
        say("  ", row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--card", choices=CARDS, default="rtx-4090")
    parser.add_argument("--splits", nargs="+", type=float, help="the generator's share of the card")
    parser.add_argument("--in-flight", type=int, help="problems at a time (default: by card)")
    args = parser.parse_args()
    splits = args.splits or SPLITS[args.card]
    found = rows(searches(args.problems), args.card, splits, args.in_flight)
    say(table(found, [*found[0]]))
    finish("decoupled_blocks", {"problems": args.problems, "vllm": found})


if __name__ == "__main__":
    main()
