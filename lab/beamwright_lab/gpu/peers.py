"""Stage `peers`: n paths from one prompt, other engines beside ours; same shape and lengths.

Ours runs first, then cheap rows before expensive ones. Rows of an earlier run are kept, even one
that left the device unusable. Seconds are of the whole call with its prefill, after a warm-up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from beamwright_lab.gpu import llama_side, transformers_side
from beamwright_lab.gpu.context import Context, is_fatal
from beamwright_lab.gpu.roofline import Steps, plain_paths
from beamwright_lab.gpu.sides import SMOKE, USUAL, Case, Side, timed

# Functions that list an engine's sides for a context and a case.
OTHERS = (transformers_side.sides, llama_side.sides)
_OURS_S = 5.0


def run(context: Context) -> dict[str, Any]:
    """Measure every side and n that has no row yet; stop at a CUDA error."""
    case = SMOKE if context.smoke else USUAL
    data: dict[str, Any] = {"model": case.model, "prompt": case.prompt, "tokens": case.tokens}
    earlier = [row for row in context.earlier.get("rows", []) if "n" in row]
    kept = [row for row in earlier if "error" not in row or is_fatal(row)]
    data |= {"rows": kept, "not_run": []}
    known = {(row["side"], row["n"]) for row in kept}
    for side, n in rows_of(context, case):
        if (side.name, n) in known:
            continue
        what = {"side": side.name, "n": n, **({"said": side.said} if side.said else {})}
        num_rows = len(data["rows"])
        context.rows(data, "rows", [(what, partial(side.measure, n))], side.cost_s)
        for row in filter(is_fatal, data["rows"][num_rows:]):
            raise RuntimeError(f"{side.name}, {n}: {row['error']}")
    return data


def rows_of(context: Context, case: Case) -> list[tuple[Side, int]]:
    """List sides and n in the order in which they run."""
    ours = Side("beamwright", partial(_ours, context, case), _OURS_S)
    others = [side for sides in OTHERS for side in sides(context, case)]
    every = [ours, *sorted(others, key=lambda side: side.cost_s)]
    return [(side, n) for side in every for n in side.counts or case.counts]


def _ours(context: Context, case: Case, n: int) -> dict[str, Any]:
    steps = Steps(prompt=case.prompt, step_tokens=case.tokens, rounds=1)
    with plain_paths(context, steps, case.model, n) as solver:
        return timed(context, lambda: solver.synthetic(case.prompt), n * case.tokens)
