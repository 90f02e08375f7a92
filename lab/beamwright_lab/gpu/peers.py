"""Stage: n paths from one prompt by others beside ours: one random shape, the same lengths.

Ours first, then cheap rows before dear ones. Rows of an earlier call are kept, also one after which
the device did nothing more. Seconds of the whole call, its prefill included; the first call of each
is not counted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from beamwright_lab.gpu import llama_side, transformers_side
from beamwright_lab.gpu.context import Context, is_fatal
from beamwright_lab.gpu.roofline import Steps, plain_paths
from beamwright_lab.gpu.sides import SMOKE, USUAL, Case, Side, timed

# Each gives its sides for a context and a case.
OTHERS = (transformers_side.sides, llama_side.sides)
_OURS_S = 5.0


def run(context: Context) -> dict[str, Any]:
    """See the module."""
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
    """Sides and their n, in the order in which they are run."""
    ours = Side("beamwright", partial(_ours, context, case), _OURS_S)
    others = [side for sides in OTHERS for side in sides(context, case)]
    every = [ours, *sorted(others, key=lambda side: side.cost_s)]
    return [(side, n) for side in every for n in side.counts or case.counts]


def _ours(context: Context, case: Case, n: int) -> dict[str, Any]:
    steps = Steps(prompt=case.prompt, step_tokens=case.tokens, rounds=1)
    with plain_paths(context, steps, case.model, n) as solver:
        return timed(context, lambda: solver.synthetic(case.prompt), n * case.tokens)
