"""Bytes over the link, real runs: best-of-n against layer-wise, beam search against the bound.

    python -m beamwright_lab.tiers.bytes [--beams 64] [--generate 896] [--search best-of-n|beam]

best-of-n (nothing but the prompt is shared, a copy per beam): `locality` with device KV of 11 % of
the sum of copies, as in the LBS paper's 7 of 64 GiB, for steps of 32, 64 and 128. beam (`tree`
layout): budgets of 50, 25 and 15 % of the peak, raised to the least that works where below it.
Both searches together take over an hour on two cores. Bytes do not depend on how busy the machine
is; seconds do, and are not reported.
"""

from __future__ import annotations

import argparse
from typing import Any

from beamwright import Solver
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.solver.solution import Solution
from beamwright_lab.common import finish, say

PROMPT = 128
LAYERS, HIDDEN = 32, 128
SHAPE = (
    f"random:llama,layers={LAYERS},hidden={HIDDEN},heads=4,kv_heads=4,"
    "intermediate=256,vocab=512,context=4096"
)
TOKEN_BYTES = 2 * LAYERS * HIDDEN * 4


def run(args: argparse.Namespace, **options: Any) -> Solution:
    """One search from a synthetic prompt."""
    settings = {
        "model": SHAPE,
        "verifier": "logprob",
        "n": args.beams,
        "max_rounds": 1 + args.generate // 32,
        "max_tokens": args.generate,
        "ignore_eos": True,
        "search": args.search,
        **options,
    }
    with Solver(**settings) as solver:
        return solver.synthetic(PROMPT)


def best_of_n(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Shares of the layer-wise baseline's bytes, and of N * KV(start of step)."""
    beams, budget = args.beams, int(0.11 * args.beams * (PROMPT + args.generate) * TOKEN_BYTES)
    common = {"attention": "dense", "width": 1, "kv_memory": budget}
    baseline = run(args, schedule="layerwise", step_tokens=32, **common).kv.h2d_bytes
    say(f"layer-wise: {baseline / 2**20:,.0f} MiB to the device")
    variants: dict[str, dict[str, Any]] = {
        "no reuse": {"inter_beam": False, "reuse": False, "prefetch": False},
        "reuse": {"inter_beam": False},
        "reuse, inter-beam": {},
    }
    found = []
    for step in (32, 64, 128):
        starts = range(PROMPT, PROMPT + args.generate, step)
        whole = sum(
            beams * s * TOKEN_BYTES for s in starts if beams * (s + step) * TOKEN_BYTES > budget
        )
        for name, options in variants.items():
            kv = run(args, schedule="locality", step_tokens=step, **common, **options).kv
            row = {
                "step": step,
                "variant": name,
                "h2d_bytes": kv.h2d_bytes,
                "of_layerwise": kv.h2d_bytes / baseline,
                "of_kv_at_start": kv.h2d_bytes / whole,
                "groups": kv.groups,
            }
            say(
                f"steps of {step:3}, {name:18} {kv.h2d_bytes / 2**20:8,.0f} MiB, "
                f"{row['of_layerwise']:.2%} of layer-wise, "
                f"{row['of_kv_at_start']:.3f} of N*KV(start)"
            )
            found.append(row)
    return found


def beam(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Loaded bytes against the lower bound, per budget."""
    found = []
    steps = args.generate // 32
    least = (PROMPT // BLOCK_TOKENS + steps * 32 // BLOCK_TOKENS + 1) * BLOCK_TOKENS * TOKEN_BYTES
    for width in (2, 4):
        common = {"width": width, "step_tokens": 32, "attention": "tree"}
        whole = run(args, schedule="in-gpu", **common)
        for share in (0.5, 0.25, 0.15):
            budget = max(int(share * whole.kv.device_peak_bytes), least)
            tight = run(args, schedule="locality", kv_memory=budget, **common)
            bound = tight.kv.dm_lower_bound_bytes
            row = {
                "width": width,
                "share": share,
                "raised_to_least": budget == least,
                "budget_bytes": budget,
                "h2d_bytes": tight.kv.h2d_bytes,
                "dm_lower_bound_bytes": bound,
                "ratio": tight.kv.h2d_bytes / bound if bound else None,
                "same_tree": tight.tree_hash == whole.tree_hash,
            }
            say(row)
            found.append(row)
    return found


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beams", type=int, default=64)
    parser.add_argument("--generate", type=int, default=896)
    parser.add_argument("--search", choices=("best-of-n", "beam"), default="best-of-n")
    args = parser.parse_args()
    rows = best_of_n(args) if args.search == "best-of-n" else beam(args)
    finish(f"tier_bytes_{args.search}", {"settings": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
