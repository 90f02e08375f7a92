"""What decoding ahead of selection gives, with LookAhead Verification and without: simulated.

FlashTTS's three pairs as `flashtts.figures` has them; `--verify-ahead slack` (4.1.3) is `+L`, the
default is without it. docs/papers/flashtts.md has the gains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from beamwright_lab.common import finish, say, table
from beamwright_lab.flashtts.baseline import Workload, baseline_of
from beamwright_lab.flashtts.figures import compare, seeds_of, tree_of
from beamwright_lab.flashtts.split import PAIRS

BASELINE, WITHOUT = "baseline", "P+M"
AHEAD = ("P+M+S", "P+M+S+L", "auto", "auto+L")


def verified_ahead(beams: Sequence[int]) -> list[dict[str, Any]]:
    """Goodput over the baseline's, means over seeds."""
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


def quoted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Least and most that decoding ahead gains, by setting."""
    gains = {name: [row[name] / row[WITHOUT] for row in rows] for name in AHEAD}
    return {
        "n": [min(row["n"] for row in rows), max(row["n"] for row in rows)],
        "gains": {name: [round(min(g), 3), round(max(g), 3)] for name, g in gains.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[8, 16, 64, 256])
    args = parser.parse_args()
    rows = verified_ahead(args.n)
    say(table(rows, ("pair", "n", WITHOUT, *AHEAD)))
    finish("flashtts_speculation", {"verified_ahead": rows, "quoted": quoted(rows)})


if __name__ == "__main__":
    main()
