"""Stage: whole searches as people run them, and a profile of two iterations.

The bundled pair, and a random pair of 1.5B shapes whose verifier reads every step (the likelihood
of the text): its checkpoint is written here, and both load it. The profile is of one search of two
rounds of 16 tokens: `trace.json.gz` for a browser, and the operations that took most.
"""

from __future__ import annotations

import gzip
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from beamwright import Solution, Solver
from beamwright.models.shape import shape_from_text
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.parity import write_checkpoint

_PROBLEM = "Lena has 81 pencils. In July Lena wins 26 pencils. How many pencils does Lena have?"
_TOP = 20
_BUNDLED = ({"max_tokens": 256}, {"max_rounds": 2, "max_tokens": 40})  # whole, and a smoke run
_PROFILED = ({"step_tokens": 16, "max_rounds": 2}, {"step_tokens": 4, "max_rounds": 1})
_RANDOM = ({"step_tokens": 64, "max_rounds": 6}, {"step_tokens": 4, "max_rounds": 2})


def run(context: Context) -> dict[str, Any]:
    """See the module."""
    data: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory() as folder:
        pair: dict[str, Any] = {"ignore_eos": True, **_RANDOM[context.smoke]}

        def large() -> dict[str, Any]:
            path = _checkpoint(context, Path(folder) / "pair")
            pair.update(model=str(path), verifier=f"likelihood:{path}")
            return _searched(context, **pair)

        context.rows(
            data,
            "rows",
            (
                ({"what": "bundled pair"}, partial(_searched, context, **_BUNDLED[context.smoke])),
                ({"what": "random pair"}, large),
                (
                    {"what": "profile"},
                    lambda: _profiled(context, {**pair, **_PROFILED[context.smoke]}),
                ),
            ),
        )
    failed = [row["what"] for row in data["rows"] if "error" in row]
    return {**data, "error": f"failed: {', '.join(failed)}"} if failed else data


def _checkpoint(context: Context, folder: Path) -> Path:
    if context.smoke:
        return write_checkpoint("qwen2", folder, vocab_size=4096)
    shape = shape_from_text("qwen2.5-1.5b")
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
    }
    return write_checkpoint("qwen2", folder, context.device, "bfloat16", **sizes)


def _solver(context: Context, **options: Any) -> Solver:
    n = 4 if context.smoke else 64
    return Solver(device=context.device, search="beam", n=n, width=4, **options)


def _searched(context: Context, **options: Any) -> dict[str, Any]:
    """One search that warms up, and one that counts."""
    with _solver(context, **options) as solver:
        solver.solve(_PROBLEM)
        return _row(solver.solve(_PROBLEM))


def _row(found: Solution) -> dict[str, Any]:
    time = found.time
    return {
        "n": found.settings.search.n,
        "tokens": found.tokens.generated,
        "verifier_tokens": found.tokens.verifier_prefilled,
        "s": round(time.total_s, 3),
        "decode_s": round(time.decode_s, 3),
        "verify_s": round(time.verify_s, 3),
        "tokens_per_s": round(found.tokens.generated / time.total_s, 1),
        "kv_budget_bytes": found.kv.device_budget_bytes,
        "warnings": list(found.warnings),
    }


def _profiled(context: Context, options: dict[str, Any]) -> dict[str, Any]:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.on_gpu else [])]
    with _solver(context, **options) as solver:
        solver.solve(_PROBLEM)
        with profile(activities=kinds) as profiler:
            found = solver.solve(_PROBLEM)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        (context.out / "trace.json.gz").write_bytes(gzip.compress(file.read_bytes(), 6))
    took = "self_device_time_total" if context.on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda each: -getattr(each, took))[:_TOP]
    top = [{"what": e.key[:80], "calls": e.count, "us": round(getattr(e, took))} for e in events]
    return {**_row(found), "top": top}
