"""How much of the batch is eager, and how much speculative: the measured mix against fixed ones.

Simulated: Qwen2.5-Math-1.5B with a 1.5B PRM on an RTX 4090, 24 problems of `decoupled.throughput`.
A fixed mix is a number of problems in flight (eager) with children decoded ahead in all free slots
(speculative) or in none; `auto` in flight is `runtime.admission`'s. The adaptive mix is the
setting `decoupled` with speculation `auto`: problems first, then what the measured hit rate, a
pass's cost, the rows in it and free KV say (`Payoff.pays_beside`). At all KV, and at 2 % of it.

    python -m beamwright_lab.decoupled.mix
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from beamwright.errors import CapacityError
from beamwright_lab.common import finish, say, table
from beamwright_lab.decoupled.speculation import CARD, MODEL, VERIFIER
from beamwright_lab.decoupled.throughput import Machine, Setting, row_of, trees
from beamwright_lab.simulator import Simulation, simulate_many

FIXED = MappingProxyType(
    {
        f"{in_flight or 'auto'}, {'speculative' if ahead == 'exact' else 'eager'}": Setting(
            in_flight, "continuous" if in_flight else "decoupled", ahead
        )
        for in_flight in (1, 4, 16, None)
        for ahead in ("off", "exact")
    }
)
ADAPTIVE = Setting(None, "decoupled", "auto")
COLUMNS = ("KV", "n", *FIXED, "adaptive", "best fixed / adaptive", "in flight", "kept")


def seconds(cases: list[Simulation], setting: Setting) -> tuple[float | None, dict[str, Any]]:
    """Of all problems; None where a search does not fit."""
    try:
        result = simulate_many(cases, setting.in_flight)
    except CapacityError as error:
        say("does not fit:", error)
        return None, {}
    return result.time_s, row_of(result, "", setting)


def less_kv(case: Simulation, share: float) -> Simulation:
    assert case.verifier is not None
    verifier = replace(case.verifier, kv_budget_bytes=int(share * case.verifier.kv_budget_bytes))
    return replace(case, kv_budget_bytes=int(share * case.kv_budget_bytes), verifier=verifier)


def mixes(n: int, share: float, count: int) -> dict[str, Any]:
    """One setting of the table: seconds under every mix."""
    machine, found = Machine.of(CARD, MODEL, VERIFIER), trees(count, n)

    def run(setting: Setting) -> tuple[float | None, dict[str, Any]]:
        return seconds([less_kv(case, share) for case in machine.cases(found, setting)], setting)

    row: dict[str, Any] = {"KV": f"{share:.0%}", "n": n}
    best_s = float("inf")
    for name, setting in FIXED.items():
        took_s, _ = run(setting)
        best_s = min(best_s, took_s or best_s)
        row[name] = None if took_s is None else round(took_s, 1)
        say("  ", row["KV"], n, name, row[name])
    took_s, facts = run(ADAPTIVE)
    row |= {"adaptive": took_s and round(took_s, 1), "in flight": facts.get("in flight")}
    row |= {"kept": facts.get("kept")}
    row["best fixed / adaptive"] = took_s and round(best_s / took_s, 3)
    say(*row.values())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--kv", type=float, nargs="+", default=[1.0, 0.02])
    parser.add_argument("--problems", type=int, default=24)
    args = parser.parse_args()
    rows = [mixes(n, share, args.problems) for share in args.kv for n in args.n]
    say(table(rows, COLUMNS))
    finish("decoupled_mix", {"rows": rows})


if __name__ == "__main__":
    main()
