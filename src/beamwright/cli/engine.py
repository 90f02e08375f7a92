"""The one place where the command line reaches the rooms that import torch.

Imports happen inside the functions, so that `--help` and usage errors need not wait for them.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.config import ModelSettings, Settings

if TYPE_CHECKING:
    from beamwright.models import ModelShape
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


def find_shape(settings: ModelSettings) -> ModelShape:
    """The shape that `--model` means; a bare name of a shape will do. Reads no weights.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model would.
    """
    from beamwright.models.load import read_shape, resolve_folder  # noqa: PLC0415
    from beamwright.models.named_shapes import NAMED_SHAPES, shape_from_text  # noqa: PLC0415

    spec = settings.model
    bare = spec.lower() in NAMED_SHAPES and not Path(spec).is_dir()
    if not bare and not spec.startswith("random:"):
        return read_shape(resolve_folder(spec, "generator"), settings.context)
    shape = shape_from_text(spec.removeprefix("random:"))
    if settings.context is None:
        return shape
    return replace(shape, context=min(shape.context, settings.context))


def activation_bytes(shape: ModelShape, element_bytes: int, num_rows: int) -> int:
    """Working memory of a decode step, as the memory plan counts it."""
    from beamwright.memory import ModelBytes  # noqa: PLC0415

    return ModelBytes(shape, element_bytes).activations(num_rows)


def probe_machine() -> dict[str, Any]:
    """Measure this machine, keep the profile for `--gpu measured`, and return it."""
    from beamwright.hardware import measure_profile, write_profile  # noqa: PLC0415

    profile = measure_profile()
    file = write_profile(profile)
    return {"profile": asdict(profile), "profile_file": str(file)}
