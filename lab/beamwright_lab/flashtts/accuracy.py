"""What speculation does to answers (FlashTTS's Figure 14), and R of `truncate` (Figure 16 right).

Beam search with the bundled pair on bundled:test, every problem under every setting in turn: `off`,
`exact`, `auto`, and `truncate` with steps that begin with a share R ~ N(`--shares`, 0.1) of what a
sibling has. The trees of `exact` and `auto` have to be those of `off`: where one differs, the exit
code is 1. Those of `truncate` differ, and its answers with them.

    python -m beamwright_lab.flashtts.accuracy --problems 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from beamwright import Solution, Solver
from beamwright.engine import tree_run
from beamwright.evaluate import AnswerChecker, Problem, Record, load_problems, summarise
from beamwright.evaluate.results import make_record
from beamwright.sections import Speculation
from beamwright_lab.common import finish, say, table

COLUMNS = (
    "speculation", "R", "equal trees", "Top-1", "95 % interval", "majority", "weighted", "pass@N",
    "gained, lost", "speculated", "kept", "goodput, tok/s", "seconds",
)  # fmt: skip
EXACT: tuple[Speculation, ...] = ("off", "exact", "auto")
PAPER_SHARE = 0.85


@dataclass(frozen=True)
class Setting:
    """One way to speculate. share: R's mean, of `truncate` alone."""

    speculation: Speculation
    share: float | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """R is no option: nothing but a comparison with the paper's figure asks for another."""
        if self.share is None:
            yield
            return
        drawn = partial(tree_run.truncation, mean=self.share)
        with patch.object(tree_run, "truncation", drawn):
            yield


@dataclass
class Found:
    """What one setting made of the problems, in their order."""

    records: list[Record] = field(default_factory=list)
    speculated: int = 0
    kept: int = 0

    def add(self, problem: Problem, solution: Solution, checker: AnswerChecker) -> None:
        """Judge a solution."""
        self.records.append(make_record(problem, solution.to_json(), checker))
        self.speculated += solution.speculation.tokens
        self.kept += solution.speculation.kept


def solve(
    settings: Sequence[Setting], problems: Sequence[Problem], options: Mapping[str, Any]
) -> dict[Setting, Found]:
    """Every problem under every setting, in turns."""
    found = {setting: Found() for setting in settings}
    with ExitStack() as stack:
        checker = stack.enter_context(AnswerChecker())
        solvers = {
            setting: stack.enter_context(Solver(speculation=setting.speculation, **options))
            for setting in settings
        }
        for number, problem in enumerate(problems, 1):
            for setting, solver in solvers.items():
                with setting.in_force():
                    solution = solver.solve(problem.problem, problem_id=problem.unique_id)
                found[setting].add(problem, solution, checker)
            if number % 20 == 0 or number == len(problems):
                say(f"  {number}/{len(problems)}")
    return found


def rows_of(found: Mapping[Setting, Found], n: int) -> list[dict[str, Any]]:
    """A row per setting, against the first one."""
    first = next(iter(found.values())).records
    return [_row(setting, each, first, n) for setting, each in found.items()]


def _row(setting: Setting, found: Found, first: Sequence[Record], n: int) -> dict[str, Any]:
    records = found.records
    summary = summarise(records, n)
    pairs = list(zip(records, first, strict=True))
    equal = sum(this.tree_hash == other.tree_hash for this, other in pairs)
    gained = sum(bool(this.correct) > bool(other.correct) for this, other in pairs)
    lost = sum(bool(this.correct) < bool(other.correct) for this, other in pairs)
    low, high = summary["accuracy_interval"]
    return {
        "speculation": setting.speculation,
        "R": setting.share,
        "equal trees": f"{equal} of {len(records)}",
        "Top-1": round(summary["accuracy"], 3),
        "95 % interval": f"{low:.3f}-{high:.3f}",
        "majority": round(summary["by_choice"]["majority"], 3),
        "weighted": round(summary["by_choice"]["weighted"], 3),
        "pass@N": round(summary["pass_at"][str(n)]["value"], 3),
        "gained, lost": f"{gained}, {lost}",
        "speculated": found.speculated,
        "kept": round(found.kept / found.speculated, 2) if found.speculated else None,
        "goodput, tok/s": round(summary["goodput_tok_s"], 1),
        "seconds": round(summary["time"]["total_s"], 1),
    }


def changed_trees(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that must not change a tree and have changed one."""
    whole = rows[0]["equal trees"]
    return [
        row["speculation"]
        for row in rows
        if row["speculation"] in EXACT and row["equal trees"] != whole
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--exact", nargs="*", default=list(EXACT[1:]), choices=EXACT[1:])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.7, PAPER_SHARE, 1.0])
    args = parser.parse_args()
    settings = [Setting(mode) for mode in ("off", *args.exact)]
    settings += [Setting("truncate", share) for share in args.shares]
    problems = load_problems("bundled:test", args.problems).problems
    found = solve(settings, problems, {"search": "beam", "n": args.n, "width": args.width})
    rows = rows_of(found, args.n)
    say(table(rows, COLUMNS))
    finish("flashtts_accuracy", {"problems": len(problems), "n": args.n, "rows": rows})
    changed = changed_trees(rows)
    if changed:
        say(f"trees differ from those of off: {', '.join(changed)}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
