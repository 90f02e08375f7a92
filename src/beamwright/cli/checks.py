"""What `doctor` measures: this machine, and what quantised weights change.

Imports the rooms that import torch; `doctor` imports it once its options are right.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import transformers

from beamwright.attention import BACKENDS, make_attention, triton_version
from beamwright.config import ModelSettings, SearchSettings, Settings
from beamwright.evaluate import RunOptions, load_problems, run
from beamwright.evaluate.problems import bundled_samples
from beamwright.hardware import measure_profile, write_profile
from beamwright.models import load_model
from beamwright.models.drift import measure_drift
from beamwright.runtime import selftest
from beamwright.runtime.threads import SMALL_PARAMETERS, threads_for
from beamwright.solver.solver import Solver
from beamwright.verify.drift import measure_score_drift

_DRIFT_SAMPLES = 8
_ACCURACY_SEARCH = SearchSettings(n=4, width=2)


def check_weights(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """What quantised weights change: the models' outputs, and answers to bundled problems.

    num_problems: of bundled:dev, each searched with and without quantised weights; 0: none.
    """
    samples = bundled_samples(_DRIFT_SAMPLES)
    report: dict[str, Any] = {}
    if settings.weights != "auto":
        decoder = load_model(settings.model, settings).decoder
        backend = make_attention(settings.attention, decoder.device, decoder.dtype)
        report["exact"] = selftest.batches_are_exact(decoder, backend)
        del decoder
        report["drift"] = measure_drift(settings, samples)
    if settings.verifier_weights != "auto":
        report["verifier_drift"] = measure_score_drift(settings, samples)
    if num_problems and not settings.model.startswith("random:"):
        report["accuracy"] = _accuracy_change(settings, num_problems)
    return report


def _accuracy_change(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """Beam search on the first problems of bundled:dev, without and with quantised weights."""
    problem_set = load_problems("bundled:dev", num_problems)
    plain = settings.model_copy(update={"weights": "auto", "verifier_weights": "auto"})
    results, answers = [], []
    for each in (plain, settings):
        found: dict[str, str | None] = {}

        def keep(record: Any, done: int, total: int, found: dict[str, Any] = found) -> None:
            found[record.unique_id] = record.answer

        run_settings = Settings(model=each, search=_ACCURACY_SEARCH)
        with Solver(run_settings) as solver:
            results.append(
                run(problem_set, solver.solve_many, run_settings, RunOptions(on_record=keep))
            )
        answers.append(found)
    before, after = answers
    return {
        "problems": len(before),
        "n": _ACCURACY_SEARCH.n,
        "unquantised": results[0]["accuracy"],
        "quantised": results[1]["accuracy"],
        "same_answers": sum(before[name] == after[name] for name in before),
    }


def inspect_machine() -> dict[str, Any]:
    """Versions, threads and the exactness self-test of this machine."""
    small, large = threads_for(SMALL_PARAMETERS), threads_for(SMALL_PARAMETERS + 1)
    with small.in_use():
        checks = selftest.run_selftest()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "torch": torch.__version__,
        "triton": triton_version(),
        "attention": make_attention("auto", device).name,
        "transformers": transformers.__version__,
        "threads": large.count,
        "threads_for_small_models": small.count,
        "threads_for_small_models_why": small.why,
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "exact": all(checks[name] for name in BACKENDS),  # on a GPU: line by line
        "selftest": checks,
        "hint": _exactness_hint(checks),
    }


def _exactness_hint(checks: dict[str, bool]) -> str | None:
    """What to do where the CPU's default attention depends on the batch (docs/architecture.md)."""
    if checks["tree"] or not checks["dense"]:
        return None
    return "--attention tree is not exact on this CPU; --attention dense is, and reads more KV"


def probe_machine() -> dict[str, Any]:
    """Measure this machine, keep the profile for `--gpu measured`, and return it."""
    profile = measure_profile()
    file = write_profile(profile)
    return {"profile": asdict(profile), "profile_file": str(file)}
