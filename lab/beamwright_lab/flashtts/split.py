"""FlashTTS's asymmetric memory (section 4.3): splits of KV memory for its three model pairs.

T_tot of four strategies on a 24 GB card: the paper's search, half and half, equally many tokens,
and taking turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.fits import with_mark_tokens
from beamwright.plan.machines import HardwareProfile, find_profile
from beamwright.plan.workload import Workload, tree_steps
from beamwright.solver.model_bytes import ModelBytes
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator.split import (
    Split,
    SplitCase,
    Stage,
    alternating_split,
    best_split,
    fixed_split,
    tree_case,
)

GIB = 2**30
PAIRS = {
    "1.5B+1.5B": ("qwen2.5-math-1.5b", "qwen2.5-math-1.5b"),
    "1.5B+7B": ("qwen2.5-math-1.5b", "math-shepherd-7b"),
    "7B+1.5B": ("qwen2.5-math-7b", "qwen2.5-math-1.5b"),
}
SHARES_OF_MEMORY = (0.9, 0.4)
PROMPT, GENERATE, STEP, WIDTH = 128, 1024, 64, 4
PLAN_COLUMNS = (
    "pair", "memory", "n", "KV, GiB", "requests", "generator's share", "B_dec", "B_pre",
    "search, s", "half and half, s", "equal tokens, s", "in turn, s", "faster",
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
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beams", type=int, nargs="+", default=[64, 512], help="paths of a search")
    given = parser.parse_args()
    plans = list(plan_rows(given.beams, find_profile("rtx-4090")))
    say(table(plans, PLAN_COLUMNS))
    finish("flashtts_split", {"plans": plans})


if __name__ == "__main__":
    main()
