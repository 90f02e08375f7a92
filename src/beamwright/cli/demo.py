"""`beamwright demo`: solves one problem by search and by a majority vote of the same model.

The search finds the right answer, and the vote does not.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from beamwright.cli.live import StatusLine
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import pause_gc_for_import, print_json
from beamwright.cli.solve import print_solution, progress_callback
from beamwright.config import Settings

PROBLEM = (
    "Tim starts with 101 books. In July Tim gives away 13 books. In August Tim wins 58 books. "
    "Later in September Tim drops 5 books. In October Tim drops 26 books. "
    "In November Tim sells 2 books. How many books does Tim have now?"
)
ANSWER = "113"


@with_settings(only=("device", "dtype"), recipe=False)
def demo(
    invocation: Invocation, seed: int = option(1, "Seed of every random draw.", "N", min=0)
) -> None:
    """Solve one problem by live search, and by a majority vote of 16 samples of the same model."""
    # With float32 the search finds the right answer and the vote does not. In bfloat16, a GPU's
    # default, the outcome may differ.
    settings = Settings.build(n=16, width=4, seed=seed, **{"dtype": "float32", **invocation.given})
    console = Console() if sys.stdout.isatty() and not invocation.as_json else None
    status = StatusLine()
    with progress_callback(console, PROBLEM, status, as_lines=False) as on_round:
        with pause_gc_for_import("beamwright.solver.solver"):
            from beamwright.solver.solver import Solver

        with Solver(settings, progress=status) as solver:
            found = solver.solve(PROBLEM, on_round=on_round)
            vote = solver.solve(PROBLEM, search="majority")
    if invocation.as_json:
        solved = {"search": found.to_json(), "vote": vote.to_json()}
        print_json({"problem": PROBLEM, "right": ANSWER, **solved})
        return
    if console is not None:
        print_solution(found, console, None, as_json=False)
        typer.echo()
    typer.echo(
        f"The search says {_judged(found.answer)}; "
        f"a majority vote of {settings.search.n} samples of the same model says "
        f"{_judged(vote.answer)}."
    )


def _judged(answer: str | None) -> str:
    return f"{answer or 'no answer'}, which is {'right' if answer == ANSWER else 'wrong'}"
