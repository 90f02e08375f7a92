"""FlashTTS's asymmetric memory (section 4.3): splits of KV memory for its three model pairs.

First T_tot of four strategies on a 24 GB card: the paper's search, half and half, equally many
tokens, and taking turns. Then simulated searches with fixed and moving splits. With `--real`, also
searches of the bundled models on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from beamwright import Solver
from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.fits import with_mark_tokens
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright.plan.workload import Workload, tree_steps
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.solver.memory import ModelBytes
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.run import simulate_if_fits
from beamwright_lab.simulator.split import (
    Split,
    SplitCase,
    Stage,
    alternating_split,
    best_split,
    fixed_split,
    tree_case,
)
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.verifier import VerifierCase

GIB = 2**30
PAIRS = {
    "1.5B+1.5B": ("qwen2.5-math-1.5b", "qwen2.5-math-1.5b"),
    "1.5B+7B": ("qwen2.5-math-1.5b", "math-shepherd-7b"),
    "7B+1.5B": ("qwen2.5-math-7b", "qwen2.5-math-1.5b"),
}
SHARES_OF_MEMORY = (0.9, 0.4)
PROMPT, GENERATE, STEP, WIDTH = 128, 1024, 64, 4
NEEDS = (1.05, 0.5, 0.25)
FIXED = (0.1, 0.3, 0.5, 0.7, 0.9)
MOVING = ("roofline", "offload", "auto")
PLAN_COLUMNS = (
    "pair", "memory", "n", "KV, GiB", "requests", "generator's share", "B_dec", "B_pre",
    "search, s", "half and half, s", "equal tokens, s", "in turn, s", "faster", "ms a call",
)  # fmt: skip
RUN_COLUMNS = (
    "pair", "KV of the need", "KV, GiB", "half and half", "equal tokens", "best fixed share",
    "roofline", "offload", "auto",
)  # fmt: skip


def costs_of(pair: str) -> tuple[ModelCosts, ModelCosts]:
    generator, verifier = (ModelCosts.of(NAMED_SHAPES[name], 2) for name in PAIRS[pair])
    return generator, verifier


def kv_bytes(pair: str, share: float, num_beams: int, card: HardwareProfile) -> int:
    """Return the KV memory left by both models' weights and activations, as FlashTTS counts it.

    share: share of the card's memory to use.
    """
    models = [ModelBytes(NAMED_SHAPES[name], 2) for name in PAIRS[pair]]
    fixed = sum(each.weights for each in models)
    activations = max(each.activations(num_beams) for each in models)
    return int(share * card.device_memory_bytes) - fixed - activations


def workload_of(num_beams: int) -> Workload:
    return Workload(num_beams, WIDTH, PROMPT, GENERATE, STEP)


def split_cases(
    pair: str, num_beams: int, card: HardwareProfile
) -> Iterator[tuple[str, SplitCase]]:
    """Yield two cases: whole paths without sharing, as in the paper, and a tree's largest round."""
    generator, verifier = costs_of(pair)
    work = workload_of(num_beams)
    seen = with_mark_tokens(work)
    whole = seen.prompt_tokens + seen.generate_tokens
    yield (
        "whole paths",
        SplitCase(
            num_beams,
            Stage(Roofline(verifier, card), whole, 0, whole),
            Stage(Roofline(generator, card), GENERATE, PROMPT, PROMPT + GENERATE),
        ),
    )
    step = max(tree_steps(work), key=lambda each: each.union_tokens + num_beams * each.num_tokens)
    union = step.union_tokens
    case = tree_case(
        num_beams, step.path_tokens, step.num_tokens, (generator, union),
        (verifier, union + step.num_nodes), card,
    )  # fmt: skip
    yield "a round of a tree", case


def call_ms(case: SplitCase, memory_bytes: int) -> float:
    """Return the median milliseconds of 50 calls of `best_split`."""
    found = []
    for _ in range(50):
        before = time.perf_counter()
        best_split(case, memory_bytes)
        found.append(time.perf_counter() - before)
    return statistics.median(found) * 1e3


def format_seconds(split: Split | None) -> str:
    return "does not fit" if split is None else f"{split.total_s:.2f}"


def plan_rows(beams: Sequence[int], card: HardwareProfile) -> Iterator[dict[str, Any]]:
    for pair in PAIRS:
        generator, verifier = costs_of(pair)
        own = generator.kv_bytes_per_token
        equal = own / (own + verifier.kv_bytes_per_token)
        for share in SHARES_OF_MEMORY:
            for num_beams in beams:
                row = {"pair": pair, "memory": f"{share:.0%}", "n": num_beams}
                memory = kv_bytes(pair, share, num_beams, card)
                if memory <= 0:
                    yield row | {"requests": "the weights do not fit"}
                    break
                for name, case in split_cases(pair, num_beams, card):
                    best, turns = best_split(case, memory), alternating_split(case, memory)
                    assert best is not None
                    fixed = {
                        label: fixed_split(case, int(part * memory), memory - int(part * memory))
                        for label, part in (("half and half", 0.5), ("equal tokens", equal))
                    }
                    yield row | {
                        "KV, GiB": f"{memory / GIB:.2f}",
                        "requests": name,
                        "generator's share": f"{best.generator_bytes / memory:.2f}",
                        "B_dec": best.decode_batch,
                        "B_pre": best.prefill_batch,
                        "search, s": format_seconds(best),
                        **{f"{label}, s": format_seconds(each) for label, each in fixed.items()},
                        "in turn, s": format_seconds(turns),
                        "faster": "in turn" if turns.total_s < best.total_s else "parts",
                        "ms a call": f"{call_ms(case, memory):.3f}",
                    }


# --- whole searches, simulated ---------------------------------------------------------------


def run_rows(num_beams: int, seed: int, card: HardwareProfile) -> Iterator[dict[str, Any]]:
    tree = grow(
        SyntheticSearch(
            num_beams=num_beams,
            width=WIDTH,
            prompt_tokens=PROMPT,
            generate_tokens=GENERATE,
            step_tokens=STEP,
            step_sigma=0.5,
            survival="score",
            seed=seed,
        )
    )
    longest = max(node.tokens for node in tree.nodes)
    step = StepSettings(max_step_tokens=longest, max_tokens=GENERATE)
    work = workload_of(num_beams)
    union = max(step.union_tokens + num_beams * step.num_tokens for step in tree_steps(work))
    for pair in PAIRS:
        generator, verifier = costs_of(pair)
        per_token = generator.kv_bytes_per_token + verifier.kv_bytes_per_token
        equal = generator.kv_bytes_per_token / per_token

        def run(memory: int, part: float, split: str | None, pair: str = pair) -> Any:
            generator, verifier = costs_of(pair)
            own = int(memory * part)
            costs = RooflineCosts.of(verifier, card, Layout.TREE)
            found = simulate_if_fits(
                Simulation(
                    tree,
                    generator,
                    RooflineCosts.of(generator, card, Layout.TREE),
                    kv_budget_bytes=own,
                    schedule=ScheduleSettings(schedule="locality"),
                    step=step,
                    context=4096,
                    verifier=VerifierCase(verifier, costs, memory - own),
                    split=split,
                    hardware=card,
                )
            )
            return None if found is None else asdict(found)

        for need in NEEDS:
            memory = int(need * 1.1 * union * per_token)  # 1.1: a random search exceeds the mean
            say(f"{pair}: {need} of the KV that it needs")
            fixed = {part: run(memory, part, None) for part in FIXED}
            fitting = {part: each for part, each in fixed.items() if each is not None}
            best = min(fitting, key=lambda part: fitting[part]["time_s"])
            results = {
                "half and half": fixed[0.5],
                "equal tokens": run(memory, equal, None),
                "best fixed share": fixed[best],
                **{split: run(memory, equal, split) for split in MOVING},
            }
            shown = {name: _describe(each) for name, each in results.items()}
            shown["best fixed share"] = f"{best}: {shown['best fixed share']}"
            yield {
                "pair": pair,
                "KV of the need": need,
                "KV, GiB": f"{memory / GIB:.2f}",
                **shown,
                "results": results,
            }


def _describe(found: dict[str, Any] | None) -> str:
    if found is None:
        return "does not fit"
    loaded = found["h2d_bytes"] / GIB
    moves = f", {found['split_moves']} moves" if found["split_moves"] else ""
    return f"{found['time_s']:.1f} s, {loaded:.1f} GiB loaded{moves}"


# --- here ------------------------------------------------------------------------------------

PROBLEM = (
    "A shop sells pens for 3 dollars and books for 12 dollars. Ann buys 4 pens and 2 books, and "
    "pays with a 50 dollar note. How many dollars does she get back?"
)


def real_rows(num_beams: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the bundled models with three splits, and check that all trees are equal."""
    options = {"n": num_beams, "width": WIDTH, "max_rounds": 10, "schedule": "locality"}
    with Solver(**options, kv_memory="256MiB", split=0.5) as solver:
        parts = solver._machinery
        expected = solver.solve(PROBLEM)
        peaks = [model.store.device_peak_bytes for model in parts.tree_models]
        equal = parts.plan.tokens_part
    for need in (1.1, 0.5):
        memory = int(need * sum(peaks))
        splits = {"half and half": 0.5, "equal tokens": equal, "auto": "auto"}
        solvers = {
            name: Solver(**options, kv_memory=memory, split=split) for name, split in splits.items()
        }
        found: dict[str, list[Any]] = {name: [] for name in solvers}
        for _ in range(rounds):
            for name, solver in solvers.items():
                found[name].append(solver.solve(PROBLEM))
        for name, each in found.items():
            solvers[name].close()
            assert {solution.tree_hash for solution in each} == {expected.tree_hash}
            times = [solution.time.total_s for solution in each]
            yield {
                "KV of the need": need,
                "KV, KiB": memory // 1024,
                "split": name,
                "s, least": f"{min(times):.3f}",
                "s, median": f"{statistics.median(times):.3f}",
                "KiB loaded": each[0].kv.h2d_bytes // 1024,
                "KiB stored": each[0].kv.d2h_bytes // 1024,
                "moves": each[0].memory.moves,
            }


REAL_COLUMNS = (
    "KV of the need", "KV, KiB", "split", "s, least", "s, median", "KiB loaded", "KiB stored",
    "moves",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beams", type=int, nargs="+", default=[64, 512], help="n of the plans")
    parser.add_argument("--simulated-beams", type=int, default=64, help="n of simulated searches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="also measure the bundled models")
    parser.add_argument("--rounds", type=int, default=7, help="repeats with --real")
    given = parser.parse_args()
    card = find_profile("rtx-4090")
    plans = list(plan_rows(given.beams, card))
    say(table(plans, PLAN_COLUMNS))
    runs = list(run_rows(given.simulated_beams, given.seed, card))
    say(table(runs, RUN_COLUMNS))
    real = list(real_rows(32, given.rounds)) if given.real else []
    if real:
        say(table(real, REAL_COLUMNS))
    finish("flashtts_split", {"plans": plans, "simulated": runs, "real": real})


if __name__ == "__main__":
    main()
