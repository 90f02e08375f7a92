"""This machine: versions, threads, whether a row's bits follow its batch here, and its speed."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from beamwright.attention import BACKENDS, make_attention, triton_version
from beamwright.engine import selftest
from beamwright.engine.concurrency import SMALL_PARAMETERS, threads_for
from beamwright.plan.machines import write_profile
from beamwright.plan.probe import measure_profile


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
        "transformers": version("transformers"),
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
