"""How far the scores of every verifier family are from its published recipe, in one table.

Every family has a tiny random checkpoint with a stand-in tokenizer. A small branching tree is
scored step by step with the KV on the tree, and beside it every path is encoded from scratch with
plain `transformers`, as the family's authors do. Both are in `tests/prm_goldens.py`, which the test
suite runs, too. What this cannot say: anything about the published weights and tokenizers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from common import finish, say, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from prm_goldens import GOLDENS, differences

_COLUMNS = ("family", "scores", "max difference")
_TOLERANCE = 1e-4


def measure(family: str) -> dict[str, Any]:
    found = differences(family)
    say(f"{family}: {len(found)} scores")
    return {"family": family, "scores": len(found), "max difference": max(found)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--family", nargs="+", choices=[*GOLDENS], default=[*GOLDENS])
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    rows = [measure(family) for family in args.family]
    if not args.json:
        shown = [{**row, "max difference": f"{row['max difference']:.1e}"} for row in rows]
        print(table(shown, _COLUMNS))
    ok = all(row["max difference"] <= _TOLERANCE for row in rows)
    finish("verifier_goldens", {"rows": rows, "tolerance": _TOLERANCE, "ok": ok})
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
