"""Simulate the gain of speculation, with and without LookAhead Verification (FlashTTS, 4.1.3).

For the three model pairs of `flashtts.figures`; `+L` is `--verify-ahead slack`. Then for other
assumptions about searches. docs/papers/flashtts.md quotes the gains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

from beamwright_lab.common import finish, say, table
from beamwright_lab.flashtts.baseline import Workload, baseline_of
from beamwright_lab.flashtts.figures import VARIANTS, compare, seeds_of, simulate_ours, tree_of
from beamwright_lab.flashtts.split import PAIRS

BASELINE, WITHOUT = "baseline", "P+M"
AHEAD = ("P+M+S", "P+M+S+L", "auto", "auto+L")
SPREADS, SHARES = (0.2, 0.5, 0.9), (0.3, 0.6, 0.9)


def verified_ahead(beams: Sequence[int]) -> list[dict[str, Any]]:
    """Return goodput over the baseline's for each pair and n, means over seeds."""
    work, rows = Workload(), []
    for n in beams:
        for pair in PAIRS:
            found = [
                compare(baseline_of(pair, tree_of(work, n, seed), n), work, (WITHOUT, *AHEAD))
                for seed in seeds_of(n)
            ]
            row: dict[str, Any] = {"pair": pair, "n": n}
            for name in (WITHOUT, *AHEAD):
                ratios = [each[name].goodput / each[BASELINE].goodput for each in found]
                row[name] = round(fmean(ratios), 3)
            rows.append(row)
            say("  ", *row.values())
    return rows


def sensitivity(pair: str = "1.5B+7B", n: int = 16) -> list[dict[str, Any]]:
    """Return the goodput gain of speculation under different assumptions about searches.

    These are the spread of step lengths, and the weight of the parent's score.
    """
    rows = []
    for sigma, inherited in product(SPREADS, SHARES):
        work = Workload(step_sigma=sigma, inherited=inherited)
        cases = [baseline_of(pair, tree_of(work, n, seed), n) for seed in seeds_of(n)]
        ran = {
            name: [found for case in cases if (found := simulate_ours(case, VARIANTS[name], work))]
            for name in (WITHOUT, *AHEAD)
        }
        goodput = {name: fmean(each.goodput_tok_s for each in ran[name]) for name in ran}
        row: dict[str, Any] = {"spread": sigma, "inherited": inherited}
        row |= {name: round(goodput[name] / goodput[WITHOUT], 3) for name in AHEAD}
        rows.append(row)
        say("  ", *row.values())
    return rows


def quoted(rows: Sequence[dict[str, Any]], grid: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the least and the largest gain of each setting, as quoted in docs/papers."""
    gains = {name: [row[name] / row[WITHOUT] for row in rows] for name in AHEAD}
    return {
        "n": [min(row["n"] for row in rows), max(row["n"] for row in rows)],
        "gains": {name: [round(min(g), 3), round(max(g), 3)] for name, g in gains.items()},
        "sensitivity": list(grid),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[8, 16, 64, 256], help="paths")
    args = parser.parse_args()
    rows = verified_ahead(args.n)
    say(table(rows, ("pair", "n", WITHOUT, *AHEAD)))
    grid = sensitivity()
    say(table(grid, list(grid[0])))
    result = {"verified_ahead": rows, "sensitivity": grid, "quoted": quoted(rows, grid)}
    finish("flashtts_speculation", result)


if __name__ == "__main__":
    main()
