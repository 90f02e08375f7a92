"""Exact speculation across problems, on top of continuous batching; and what is kept of it.

Simulated: Qwen2.5-Math-1.5B with a 1.5B PRM on an RTX 4090, 16 problems at a time, beam search of
width 4, 128 + 1,600 tokens, lognormal steps of 80 tokens, scores that children inherit. KV is nine
tenths of the card less both models' weights, half for each. Foresight: `SelectSPEC` (FlashTTS's, by
the step before; SPEX's selection before rewards arrive), `by scores` (steps are scored as they
end: ours), `oracle` (knows what is opened of this round), and the ceiling, who knows the whole
tree: every step begins as soon as the one above it has ended and there is a slot. All of them
decode in at most `--max-batch` rows. The verifier never sees what is ahead (decoupled thesis, Alg.
4), but where it says `scored ahead`: with slack, as FlashTTS's and this engine's do.

`--what kept`: the share of tokens decoded ahead that selection opens, against width, depth and
problems in flight.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from beamwright.protocols import Prospect
from beamwright.search.prospects import by_scores, can_go_on
from beamwright.tree import Node, RecordedTree
from beamwright_lab.common import finish, say, table
from beamwright_lab.decoupled.throughput import Machine, Setting
from beamwright_lab.flashtts.speculation import bins, oracle
from beamwright_lab.simulator import (
    Foresight,
    ManyResult,
    Script,
    Simulation,
    SyntheticSearch,
    grow,
    simulate_many,
)
from beamwright_lab.simulator.replay import Foresee, foresee_by_scores

MODEL, VERIFIER, CARD = "qwen2.5-math-1.5b", "skywork-prm-1.5b", "rtx-4090"
WIDTH, PROMPT_TOKENS, GENERATE_TOKENS, STEP_TOKENS, PROBLEMS = 4, 128, 1600, 80, 16
GAINED = (
    "sigma", "n", "foresight", "seconds", "speed-up", "of ceiling", "rows", "verifier busy",
    "speculated", "kept",
)  # fmt: skip
KEPT = ("foresight", "in flight", "width", "first third", "second", "last", "all", "speed-up")


def knows_all(script: Script) -> Foresee:
    """What is opened, below steps decoded ahead as well."""
    known = oracle(script)

    def foresee(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
        return [*known(beams, (), width), *known(ahead, (), width)]

    return foresee


def deeper(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """SelectSPEC, and behind it children of what is complete of its own, the better bins first."""
    found = bins(beams, ahead, width)
    bin_of = {prospect.node: prospect.potential for prospect in found}
    second = [node for node in ahead if node.parent in bin_of and can_go_on(node)]
    return [*found, *(Prospect(n, width, potential=-1 / bin_of[n.parent]) for n in second)]


def scores_deeper(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """By scores; children of children of what would be kept; then all others."""
    found = by_scores(beams, width)
    known = {prospect.node for prospect in found}
    kept = {prospect.node for prospect in found if prospect.potential > 1}
    rest = [Prospect(n, width, potential=-2) for n in beams if can_go_on(n) and n not in known]
    second = [
        Prospect(n, width, potential=0.5 if n.parent in kept else -3) for n in ahead if can_go_on(n)
    ]
    return sorted([*found, *rest, *second], key=lambda prospect: -prospect.potential)


FORESIGHTS: dict[str, Foresee] = {
    "SelectSPEC": bins,
    "SelectSPEC, deeper": deeper,
    "by scores": foresee_by_scores,
    "by scores, together": foresee_by_scores,
    "by scores, deeper, together": scores_deeper,
    "by scores, together, scored ahead": foresee_by_scores,
    "by scores, deeper, together, scored ahead": scores_deeper,
}
NAMES = ("ceiling", "oracle", *FORESIGHTS)


def searches(n: int, sigma: float, width: int = WIDTH, count: int = PROBLEMS) -> list[RecordedTree]:
    made = SyntheticSearch(
        n, width, PROMPT_TOKENS, GENERATE_TOKENS, STEP_TOKENS, sigma, survival="score"
    )
    return [grow(replace(made, seed=i), i) for i in range(count)]


def ahead(off: Sequence[Simulation], name: str, width: int = WIDTH) -> list[Simulation]:
    """The same searches with children decoded ahead."""
    found = []
    for case in off:
        script = Script(case.tree)
        say_of = {**FORESIGHTS, "oracle": oracle(script), "ceiling": knows_all(script)}[name]
        foresight = Foresight(say_of, width, foresees_by_score=name.startswith("by scores"))
        explore = "decoupled" if "together" in name else case.schedule.explore
        verify_ahead = "slack" if name.endswith("scored ahead") else "never"
        update = {"explore": explore, "verify_ahead": verify_ahead}
        schedule = case.schedule.model_copy(update=update)
        changed = replace(case, schedule=schedule, foresees=foresight)
        found.append(replace(changed, speculation="exact"))
    return found


def gained(
    sigmas: Sequence[float], beams: Sequence[int], names: Sequence[str], max_batch: int | None
) -> list[dict[str, Any]]:
    """A row per search and foresight."""
    machine, rows = Machine.of(CARD, MODEL, VERIFIER), []
    for sigma in sigmas:
        for n in beams:
            off = machine.cases(searches(n, sigma), Setting(), max_batch=max_batch)
            runs = {"off": off}
            for name in names:
                runs[name] = ahead(off, name)
            first_s = best_s = 0.0
            for name, cases in runs.items():
                result = simulate_many(cases, PROBLEMS)
                first_s = first_s or result.time_s
                best_s = result.time_s if name == "ceiling" else best_s
                rows.append(
                    {
                        "sigma": sigma,
                        "n": n,
                        "foresight": name,
                        "seconds": round(result.time_s, 1),
                        "speed-up": round(first_s / result.time_s, 2),
                        "of ceiling": round(best_s / result.time_s, 2) if best_s else None,
                        "rows": round(result.mean_rows, 1),
                        "verifier busy": round(result.verify_share, 2),
                        "speculated": result.speculated_tokens,
                        "kept": None if result.kept_share is None else round(result.kept_share, 2),
                    }
                )
                say("  ", *rows[-1].values())
    return rows


def kept(sigma: float, n: int, widths: Sequence[int], count: int) -> list[dict[str, Any]]:
    """A row per foresight, width and problems in flight; depths by thirds of the deepest tree."""
    machine, rows = Machine.of(CARD, MODEL, VERIFIER), []
    for width in widths:
        off = machine.cases(searches(n, sigma, width, count), Setting(), max_batch=512)
        for in_flight in (1, count):
            plain = simulate_many(off, in_flight)
            for name in ("SelectSPEC", "by scores"):
                result = simulate_many(ahead(off, name, width), in_flight)
                shares = by_thirds(result)
                rows.append(
                    {
                        "foresight": name,
                        "in flight": in_flight,
                        "width": width,
                        **dict(zip(("first third", "second", "last"), shares, strict=True)),
                        "all": round(result.kept_share or 0.0, 2),
                        "speed-up": round(plain.time_s / result.time_s, 2),
                    }
                )
                say("  ", *rows[-1].values())
    return rows


def by_thirds(result: ManyResult) -> list[float | None]:
    """What is kept of what was decoded ahead at these depths."""
    deepest = max(run.tree.rounds for run in result.runs) + 1
    taken, dropped = [0, 0, 0], [0, 0, 0]
    for run in result.runs:
        for node in run.tree.nodes():
            usage = node.usage
            taken[min(2, 3 * node.depth // deepest)] += usage["speculated_kept"]
            # A child that is dropped leaves its tokens to its parent.
            below = min(2, 3 * (node.depth + 1) // deepest)
            dropped[below] += usage["speculated"] - usage["speculated_kept"]
    pairs = zip(taken, dropped, strict=True)
    return [round(yes / (yes + no), 2) if yes + no else None for yes, no in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--what", nargs="+", default=["gained", "kept"])
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.9])
    parser.add_argument("--n", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--foresights", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--max-batch", type=int, default=256)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if "gained" in args.what:
        found["gained"] = gained(args.sigma, args.n, args.foresights, args.max_batch)
        say(table(found["gained"], GAINED))
    if "kept" in args.what:
        found["kept"] = kept(args.sigma[-1], 16, (2, 4, 8), 8)
        say(table(found["kept"], KEPT))
    finish("decoupled_speculation", found)


if __name__ == "__main__":
    main()
