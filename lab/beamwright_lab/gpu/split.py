"""Stage `split`: verifiers and memory shared by a random 1.5B generator and 1.5B verifier.

Four trees at once, with one verifier and with two, while decoding goes on. Then one tree with half
of the KV that it needs: memory that moves between the two models, and fixed shares. The trees of a
comparison must be equal.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from beamwright.errors import BeamwrightError
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.parity import Work
from beamwright_lab.gpu.search import LAST_S, PLENTY, PROBLEM, SMALL, Pair, row_of, solver_of

_TREES = 4
_SHARES = {"KV that moves": 0.5, "fixed parts": 0.5}


def run(context: Context) -> dict[str, Any]:
    """Run both comparisons; report failures and trees that differ."""
    data: dict[str, Any] = {"rows": [], "not_run": []}
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(context, Path(folder), SMALL)
        work: Work = [
            (
                {"what": f"{_TREES} trees, verifiers: {n}", "compared": "trees"},
                partial(_solve_trees, pair, n),
            )
            for n in (1, 2)
        ]
        known: dict[str, float] = {}
        work += [
            ({"what": what, "compared": "KV"}, partial(_solve_tight, pair, known, what))
            for what in ("KV for all", *_SHARES)
        ]
        context.rows(data, "rows", work, LAST_S)
    found = {row["what"]: row for row in data["rows"] if row.get("exact")}
    first = {row["compared"]: row["tree_hash"] for row in reversed(found.values())}
    wrong = [f"failed: {row['what']}" for row in data["rows"] if "error" in row]
    wrong += [
        f"tree differs: {what}"
        for what, row in found.items()
        if row["tree_hash"] != first[row["compared"]]
    ]
    return {**data, "error": "; ".join(wrong)} if wrong else data


def _solve_trees(pair: Pair, verifiers: int) -> dict[str, Any]:
    smoke, problems = pair.context.smoke, [(number, PROBLEM) for number in range(_TREES)]
    options = {"kv_memory": PLENTY[smoke], "executor": "overlapped", "verifiers": verifiers}
    with solver_of(pair.context, **pair.options, **options) as solver:
        solver.solve_many(problems)
        began = time.perf_counter()
        outcomes = solver.solve_many(problems)
        spent_s, exact = time.perf_counter() - began, solver.exact
    found = []
    for each in outcomes:
        if isinstance(each, BeamwrightError):
            raise each
        found.append(each)
    tokens = sum(each.tokens.generated for each in found)
    hashes = " ".join(each.tree_hash for each in found)
    return {
        "n": found[0].settings.search.n,
        "tokens": tokens,
        "verifier_tokens": sum(each.tokens.verifier_prefilled for each in found),
        "s": round(spent_s, 3),
        "verify_s": round(max(each.time.verify_s for each in found), 3),
        "tokens_per_s": round(tokens / spent_s, 1),
        "tree_hash": hashlib.sha256(hashes.encode()).hexdigest(),
        "exact": exact,
    }


def _solve_tight(pair: Pair, known: dict[str, float], what: str) -> dict[str, Any]:
    """Solve one tree; keep the first call's peak KV and the latest split in `known`."""
    kv_bytes = int(_SHARES.get(what, 0) * known.get("wants", 0))
    options: dict[str, Any] = {
        "kv_memory": str(kv_bytes) if kv_bytes else PLENTY[pair.context.smoke]
    }
    if what == "fixed parts":
        options["split"] = known["split"]
    options |= {"schedule": "locality", "executor": "plain"}
    with solver_of(pair.context, **pair.options, **options) as solver:
        solver.solve(PROBLEM)
        stores = [model.store for model in solver._machinery.tree_models]
        before = sum(store.num_relocated for store in stores)
        found = solver.solve(PROBLEM)
        plan, exact = solver._machinery.plan, solver.exact
    known.setdefault("wants", found.kv.device_peak_bytes or 0)
    known["split"] = round(plan.generator_kv_bytes / plan.kv_bytes, 4)
    return {
        **row_of(found),
        "moves": found.memory.moves,
        "moved_bytes": found.memory.moved_bytes,
        "relocated_blocks": sum(store.num_relocated for store in stores) - before,
        "exact": exact,
    }
