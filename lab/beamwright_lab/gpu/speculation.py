"""Stage `speculation`: the bundled pair with speculation `off`, `exact` and `auto`, in turns.

With small models a step takes as long as its launches, so decoding in idle slots is free and
speculation should gain most. Trees are compared with those of `off`: they must be equal where
results do not depend on the batch (`exact`), as with `--deterministic`; elsewhere their number is
only reported. Every row has its own solvers, which solve all problems once as a warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from beamwright import Solution, Solver
from beamwright.evaluate.problems import Problem, load_problems
from beamwright.sections import Speculation
from beamwright_lab.common import interleave
from beamwright_lab.gpu.context import Context

MODES: tuple[Speculation, ...] = ("off", "exact", "auto")
_LEAST_S = 5.0


@dataclass(frozen=True)
class SpeculationCase:
    """What to measure. ways: pairs of n and `--deterministic`. kv_memory: of each solver."""

    ways: tuple[tuple[int, bool], ...] = ((64, False), (64, True), (16, False), (256, False))
    problems: int = 4
    rounds: int = 3
    kv_memory: str = "2GiB"
    max_tokens: int = 512


_SMOKE = SpeculationCase(((8, False), (8, True)), 1, 1, "32MiB", 64)


def run(context: Context) -> dict[str, Any]:
    """Measure all ways; report rows whose trees should equal those of `off`, but differ."""
    case = _SMOKE if context.smoke else SpeculationCase()
    data: dict[str, Any] = {"rows": [], "not_run": []}
    problems = load_problems("bundled:test", case.problems).problems
    ways = [{"n": n, "deterministic": deterministic} for n, deterministic in case.ways]
    work = [(way, partial(measure, context, case, problems, **way)) for way in ways]
    context.rows(data, "rows", work, _LEAST_S)
    wrong = describe_wrong_rows(data["rows"])
    return data if wrong is None else {**data, "error": wrong}


def measure(
    context: Context,
    case: SpeculationCase,
    problems: Sequence[Problem],
    n: int,
    *,
    deterministic: bool,
) -> dict[str, Any]:
    """Measure all modes as one row: seconds, trees equal to `off`, share of tokens kept."""
    found: dict[str, list[Solution]] = {}
    with ExitStack() as stack:
        solvers = {
            mode: stack.enter_context(
                Solver(
                    device=context.device,
                    search="beam",
                    n=n,
                    width=4,
                    max_tokens=case.max_tokens,
                    kv_memory=case.kv_memory,
                    schedule="in-gpu",
                    deterministic=deterministic,
                    speculation=mode,
                )
            )
            for mode in MODES
        }

        def solve(mode: str) -> None:
            found[mode] = [solvers[mode].solve(each.problem) for each in problems]

        for mode in MODES:
            solve(mode)
        timings = interleave({mode: partial(solve, mode) for mode in MODES}, case.rounds)
    row: dict[str, Any] = {"exact": all(each.exact for each in found["off"])}
    for mode in MODES:
        row[f"{mode}_s"] = round(timings[mode].min_s, 4)
        row[f"{mode}_median_s"] = round(timings[mode].median_s, 4)
        if mode != "off":
            row |= _compare_with_off(mode, found)
            row[f"{mode}_over_off"] = round(timings[mode].min_s / timings["off"].min_s, 3)
    return {**row, "problems": len(problems)}


def _compare_with_off(mode: str, found: Mapping[str, Sequence[Solution]]) -> dict[str, Any]:
    pairs = zip(found[mode], found["off"], strict=True)
    tokens = sum(each.speculation.tokens for each in found[mode])
    kept = sum(each.speculation.kept for each in found[mode])
    return {
        f"{mode}_equal": sum(one.tree_hash == other.tree_hash for one, other in pairs),
        f"{mode}_tokens": tokens,
        f"{mode}_kept": round(kept / tokens, 3) if tokens else None,
    }


def describe_wrong_rows(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Name exact rows whose trees differ; None if there are none."""
    wrong = [
        f"n = {row['n']}, {mode}"
        for row in rows
        if row.get("exact")
        for mode in MODES[1:]
        if row[f"{mode}_equal"] < row["problems"]
    ]
    return f"trees differ from those without speculation: {'; '.join(wrong)}" if wrong else None
