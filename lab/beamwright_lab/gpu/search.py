"""Stages `search` and `search-7b`: whole searches under shrinking KV budgets, and a profile of one.

Runs the bundled pair, then a random generator with a 1.5B verifier that scores each step by its
likelihood; both checkpoints are written here. The same search with all the KV that it needs, half
and a quarter must grow the same tree if results do not depend on the batch (`exact`). Layer-wise
runs beside it with a deadline. The profile covers two rounds of 16 tokens: `trace.json.gz` for a
browser, and its summary by `trace.steps`.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

import beamwright_lab.baselines  # noqa: F401 (declared where the lab is on the path, not installed)
from beamwright import Solution, Solver
from beamwright_lab.gpu import trace
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.parity import Work, sizes_of, write_checkpoint

PROBLEM = "Lena has 81 pencils. In July Lena wins 26 pencils. How many pencils does Lena have?"
SMALL, _LARGE = "qwen2.5-1.5b", "qwen2.5-7b"
_SHARES = (1.0, 0.5, 0.25)
PLENTY = ("16GiB", "64MiB")  # ample KV: on a card, in a smoke run
LAST_S = 4.0
_LAYERWISE_S = 6.0  # deadline
_BUNDLED = ({"max_tokens": 256}, {"max_rounds": 2, "max_tokens": 40})  # full run, smoke run
_PROFILED = ({"step_tokens": 16, "max_rounds": 2}, {"step_tokens": 4, "max_rounds": 1})
_RANDOM = ({"step_tokens": 64, "max_rounds": 4}, {"step_tokens": 8, "max_rounds": 2})


def run(context: Context) -> dict[str, Any]:
    """Run the bundled pair, the random pair, the profile and the shrinking budgets."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(context, Path(folder), SMALL)
        work: Work = [
            ({"what": "bundled pair"}, partial(_search, context, **_BUNDLED[context.smoke])),
            ({"what": "random pair"}, lambda: _search(context, **pair.options)),
            ({"what": "profile"}, lambda: _profile(context, pair.options)),
            *pair.list_budgets(),
        ]
        return run_searches(context, work)


def run_large(context: Context) -> dict[str, Any]:
    """Run stage `search-7b`: a 7B generator under shrinking budgets."""
    with tempfile.TemporaryDirectory() as folder:
        return run_searches(context, Pair(context, Path(folder), _LARGE).list_budgets())


def run_searches(context: Context, work: Work) -> dict[str, Any]:
    """Run the searches; report failures, and trees that should be equal but differ."""
    data: dict[str, Any] = {"rows": [], "not_run": []}
    context.rows(data, "rows", work, LAST_S)
    wrong = [f"failed: {row['what']}" for row in data["rows"] if "error" in row]
    compared = [row for row in data["rows"] if row.get("kv_share") and row.get("exact")]
    wrong += [
        f"tree differs: {row['what']}"
        for row in compared
        if not row["cut"] and row["tree_hash"] != compared[0]["tree_hash"]
    ]
    return {**data, "error": "; ".join(wrong)} if wrong else data


class Pair:
    """A random generator and the 1.5B verifier, written on first use.

    wants_bytes: peak KV of the search with an ample budget; 0 until measured.
    """

    def __init__(self, context: Context, folder: Path, generator: str) -> None:
        self.context, self.generator, self._folder = context, generator, folder
        self.peak_bytes = 0

    @cached_property
    def options(self) -> dict[str, Any]:
        """Solver options for this pair."""
        verifier = _checkpoint(self.context, self._folder / "verifier", SMALL)
        path = verifier
        if self.generator != SMALL:
            path = _checkpoint(self.context, self._folder / "generator", self.generator)
        found = {"model": str(path), "verifier": f"likelihood:{verifier}", "ignore_eos": True}
        return {**found, **_RANDOM[self.context.smoke]}

    def list_budgets(self) -> Work:
        """List the search at each share of its peak KV, then layer-wise at half.

        At half, the verifier's KV still stays on the device.
        """
        model = {"generator": self.generator}
        work: Work = [
            (
                {"what": f"KV x {share}", **model, "schedule": "locality", "kv_share": share},
                partial(self._search_at, share, schedule="locality"),
            )
            for share in _SHARES
        ]
        share = _SHARES[1]
        streamed = {"what": f"KV x {share}", **model, "schedule": "layerwise", "kv_share": share}
        by_layer = {"schedule": "layerwise", "deadline": _LAYERWISE_S}
        return [*work, (streamed, partial(self._search_at, share, **by_layer))]

    def _search_at(self, share: float, **options: Any) -> dict[str, Any]:
        """Search at this share; the first call has ample KV and measures the peak."""
        plenty, wanted = PLENTY[self.context.smoke], self.peak_bytes
        kv_memory = plenty if not wanted else str(int(share * wanted))
        row = _search(self.context, **{**self.options, **options, "kv_memory": kv_memory})
        self.peak_bytes = wanted or row["kv_peak_bytes"]
        return row


def _checkpoint(context: Context, folder: Path, name: str) -> Path:
    if context.smoke:
        return write_checkpoint("qwen2", folder, vocab_size=4096)
    return write_checkpoint("qwen2", folder, context.device, "bfloat16", **sizes_of(name))


def solver_of(context: Context, **options: Any) -> Solver:
    n = 16 if context.smoke else 64
    return Solver(device=context.device, search="beam", n=n, width=4, **options)


def _search(context: Context, **options: Any) -> dict[str, Any]:
    """Search once after a warm-up; a search with a deadline has none."""
    with solver_of(context, **options) as solver:
        if "deadline" not in options:
            solver.solve(PROBLEM)
        return {**row_of(solver.solve(PROBLEM)), "exact": solver.exact}


def row_of(found: Solution) -> dict[str, Any]:
    time, kv = found.time, found.kv
    return {
        "n": found.settings.search.n,
        "tokens": found.tokens.generated,
        "verifier_tokens": found.tokens.verifier_prefilled,
        "s": round(time.total_s, 3),
        "decode_s": round(time.decode_s, 3),
        "verify_s": round(time.verify_s, 3),
        "stall_s": round(time.stall_s, 3),
        "tokens_per_s": round(found.tokens.generated / time.total_s, 1),
        "io_share": round(found.io_share, 4),
        "kv_budget_bytes": kv.device_budget_bytes,
        "kv_peak_bytes": kv.device_peak_bytes,
        "h2d_bytes": kv.h2d_bytes,
        "groups": kv.groups,
        "tree_hash": found.tree_hash,
        "cut": "--deadline" in (found.reason_fewer or ""),
        "warnings": list(found.warnings),
    }


def _profile(context: Context, options: dict[str, Any]) -> dict[str, Any]:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.on_gpu else [])]
    with solver_of(context, **{**options, **_PROFILED[context.smoke]}) as solver:
        solver.solve(PROBLEM)
        with profile(activities=kinds) as profiler:
            found = solver.solve(PROBLEM)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_bytes()
    (context.out / "trace.json.gz").write_bytes(gzip.compress(text, 6))
    return {**row_of(found), "step": trace.steps(json.loads(text)["traceEvents"])}
