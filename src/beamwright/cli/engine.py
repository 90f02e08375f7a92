"""The one place where the command line reaches the rooms that import torch.

Imports happen inside the functions, so that `--help` and usage errors need not wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beamwright.config import ModelSettings, Settings

if TYPE_CHECKING:
    from beamwright.solver import Solver


def make_solver(settings: Settings) -> Solver:
    """The engine with its models loaded."""
    from beamwright.solver import Solver  # noqa: PLC0415

    return Solver(settings)


def inspect_model(settings: ModelSettings) -> dict[str, Any]:
    """Architecture, parameters and KV bytes per token of a checkpoint."""
    from beamwright.models import inspect_model as inspect  # noqa: PLC0415

    return inspect(settings)


def check_parity(settings: ModelSettings) -> dict[str, float]:
    """Largest absolute logit differences to `transformers`, by way of computing them."""
    from beamwright.models.parity import check_parity as check  # noqa: PLC0415

    return check(settings)


def inspect_machine() -> dict[str, Any]:
    """Versions, threads and the exactness self-test of this machine."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from beamwright.runtime.selftest import run_selftest  # noqa: PLC0415

    checks = run_selftest()
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "exact": all(checks.values()),
        "selftest": checks,
    }
