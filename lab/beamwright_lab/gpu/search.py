"""Stages: whole searches as people run them, with less and less KV, and a profile of one.

The bundled pair; then a random generator and a 1.5B verifier that reads every step (the likelihood
of the text), whose checkpoints are written here. The same search with all the KV that it wants,
half and a quarter of it has to grow the same tree (`--deterministic`, so that the batch does not
matter); layer-wise stands beside it, and is cut by a deadline. The profile is of one search of two
rounds of 16 tokens: `trace.json.gz` for a browser, and what `trace.steps` makes of it.
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
PLENTY = ("16GiB", "64MiB")  # of KV; on a card, and in a smoke run
LAST_S = 4.0
_LAYERWISE_S = 6.0  # its deadline
_BUNDLED = ({"max_tokens": 256}, {"max_rounds": 2, "max_tokens": 40})  # whole, and a smoke run
_PROFILED = ({"step_tokens": 16, "max_rounds": 2}, {"step_tokens": 4, "max_rounds": 1})
_RANDOM = ({"step_tokens": 64, "max_rounds": 4}, {"step_tokens": 8, "max_rounds": 2})


def run(context: Context) -> dict[str, Any]:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(context, Path(folder), SMALL)
        work: Work = [
            ({"what": "bundled pair"}, partial(_searched, context, **_BUNDLED[context.smoke])),
            ({"what": "random pair"}, lambda: _searched(context, **pair.options)),
            ({"what": "profile"}, lambda: _profiled(context, pair.options)),
            *pair.less_and_less(),
        ]
        return measured(context, work)


def run_large(context: Context) -> dict[str, Any]:
    """Stage: a 7B generator, with less and less KV."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(context, Pair(context, Path(folder), _LARGE).less_and_less())


def measured(context: Context, work: Work) -> dict[str, Any]:
    """A row for each search; an error where trees that have to be equal are not."""
    data: dict[str, Any] = {"rows": [], "not_run": []}
    context.rows(data, "rows", work, LAST_S)
    wrong = [f"failed: {row['what']}" for row in data["rows"] if "error" in row]
    compared = [row for row in data["rows"] if row.get("kv_share") and row.get("exact")]
    wrong += [
        f"another tree: {row['what']}"
        for row in compared
        if not row["cut"] and row["tree_hash"] != compared[0]["tree_hash"]
    ]
    return {**data, "error": "; ".join(wrong)} if wrong else data


class Pair:
    """A random generator of a shape and the 1.5B verifier, written when they are first used.

    wants_bytes: KV that the search holds at most, where nothing keeps it from that.
    """

    def __init__(self, context: Context, folder: Path, generator: str) -> None:
        self.context, self.generator, self._folder = context, generator, folder
        self.wants_bytes = 0

    @cached_property
    def options(self) -> dict[str, Any]:
        """Of the solver."""
        verifier = _checkpoint(self.context, self._folder / "verifier", SMALL)
        path = verifier
        if self.generator != SMALL:
            path = _checkpoint(self.context, self._folder / "generator", self.generator)
        found = {"model": str(path), "verifier": f"likelihood:{verifier}", "ignore_eos": True}
        return {**found, **_RANDOM[self.context.smoke]}

    def less_and_less(self) -> Work:
        """The same search at every share of the KV that it wants; layer-wise at half, for there
        the verifier's stays on the device."""
        model = {"generator": self.generator}
        work: Work = [
            (
                {"what": f"KV x {share}", **model, "schedule": "locality", "kv_share": share},
                partial(self._at, share, schedule="locality"),
            )
            for share in _SHARES
        ]
        share = _SHARES[1]
        streamed = {"what": f"KV x {share}", **model, "schedule": "layerwise", "kv_share": share}
        by_layer = {"schedule": "layerwise", "deadline": _LAYERWISE_S}
        return [*work, (streamed, partial(self._at, share, **by_layer))]

    def _at(self, share: float, **options: Any) -> dict[str, Any]:
        """The first of all finds out what it wants."""
        plenty, wanted = PLENTY[self.context.smoke], self.wants_bytes
        kv_memory = plenty if not wanted else str(int(share * wanted))
        row = _searched(self.context, **{**self.options, **options, "kv_memory": kv_memory})
        self.wants_bytes = wanted or row["kv_peak_bytes"]
        return row


def _checkpoint(context: Context, folder: Path, name: str) -> Path:
    if context.smoke:
        return write_checkpoint("qwen2", folder, vocab_size=4096)
    return write_checkpoint("qwen2", folder, context.device, "bfloat16", **sizes_of(name))


def solver_of(context: Context, **options: Any) -> Solver:
    n = 16 if context.smoke else 64
    return Solver(device=context.device, search="beam", n=n, width=4, **options)


def _searched(context: Context, **options: Any) -> dict[str, Any]:
    """One search that warms up, and one that counts; one alone that has a deadline."""
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


def _profiled(context: Context, options: dict[str, Any]) -> dict[str, Any]:
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
