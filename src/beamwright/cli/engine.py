"""The one place where the command line reaches the rooms that import torch.

Imports happen inside the functions, so that `--help` and usage errors need not wait for them.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.config import MemorySettings, ModelSettings, SearchSettings, Settings

if TYPE_CHECKING:
    from beamwright.cost import Storage
    from beamwright.models import ModelShape
    from beamwright.progress import Progress
    from beamwright.runtime.timeline import Timeline
    from beamwright.solver.memory import MemoryPlan, ModelBytes
    from beamwright.solver.solution import Solution
    from beamwright.solver.solver import Solver
    from beamwright.tree import SearchTree

_DRIFT_SAMPLES = 8
_ACCURACY_SEARCH = SearchSettings(n=4, width=2)


def make_solver(
    settings: Settings, timeline: Timeline | None = None, progress: Progress | None = None
) -> Solver:
    """The engine with its models loaded."""
    from beamwright.solver.solver import Solver  # noqa: PLC0415

    return Solver(settings, timeline=timeline, progress=progress)


def resumed_settings(file: Path, given: Settings) -> Settings:
    """The given settings, and what they leave open from the checkpoint.

    Raises:
        InputError: if the file is no whole checkpoint, or of other settings.
    """
    from beamwright.saved.resumed import resumed_settings as resumed  # noqa: PLC0415

    return resumed(file, given)


def make_timeline() -> Timeline:
    """A timeline that is switched on."""
    from beamwright.runtime.timeline import Timeline  # noqa: PLC0415

    return Timeline()


def write_views(
    tree: SearchTree,
    solution: Solution | None,
    timeline: Timeline | None = None,
    *,
    trace: Path | None = None,
    page: Path | None = None,
    recording: Path | None = None,
) -> None:
    """Write the files that were asked for: of the timeline, of the tree, and its shape alone."""
    from beamwright import report  # noqa: PLC0415
    from beamwright.runtime.timeline import NullTimeline  # noqa: PLC0415
    from beamwright.saved.recorded import write_recorded  # noqa: PLC0415

    title = tree.root.problem_text or "synthetic prompt"
    found = timeline or NullTimeline()
    if trace is not None:
        report.write_trace(found, trace, title)
    if page is not None:
        chosen = None if solution is None else tree.node(solution.lineage)
        shown = report.ShownTree(tree, chosen)
        report.write_tree_page([shown], found, page, title)
    if recording is not None:
        write_recorded(tree, recording)


def inspect_model(settings: ModelSettings) -> dict[str, Any]:
    """Architecture, parameters and KV bytes per token of a checkpoint."""
    from beamwright.models import inspect_model as inspect  # noqa: PLC0415

    return inspect(settings)


def check_parity(settings: ModelSettings) -> dict[str, float]:
    """Largest absolute logit differences to `transformers`, by way of computing them."""
    from beamwright.models.parity import check_parity as check  # noqa: PLC0415

    return check(settings)


def show_verifier(settings: ModelSettings) -> dict[str, Any]:
    """How `--verifier` reads a sample problem, token by token."""
    from beamwright.verify.show import show_verifier as show  # noqa: PLC0415

    return show(settings)


def check_weights(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """What quantised weights change: the models' outputs, and answers to bundled problems.

    num_problems: of bundled:dev, each searched with and without quantised weights; 0: none.
    """
    from beamwright.attention import make_attention  # noqa: PLC0415
    from beamwright.evaluate.problems import bundled_samples  # noqa: PLC0415
    from beamwright.models import load_model  # noqa: PLC0415
    from beamwright.models.drift import measure_drift  # noqa: PLC0415
    from beamwright.runtime.selftest import batches_are_exact  # noqa: PLC0415
    from beamwright.verify.drift import measure_score_drift  # noqa: PLC0415

    samples = bundled_samples(_DRIFT_SAMPLES)
    report: dict[str, Any] = {}
    if settings.weights != "auto":
        decoder = load_model(settings.model, settings).decoder
        backend = make_attention(settings.attention, decoder.device, decoder.dtype)
        report["exact"] = batches_are_exact(decoder, backend)
        del decoder
        report["drift"] = measure_drift(settings, samples)
    if settings.verifier_weights != "auto":
        report["verifier_drift"] = measure_score_drift(settings, samples)
    if num_problems and not settings.model.startswith("random:"):
        report["accuracy"] = _accuracy_change(settings, num_problems)
    return report


def _accuracy_change(settings: ModelSettings, num_problems: int) -> dict[str, Any]:
    """Beam search on the first problems of bundled:dev, without and with quantised weights."""
    from beamwright.evaluate import RunOptions, load_problems, run  # noqa: PLC0415

    problem_set = load_problems("bundled:dev", num_problems)
    plain = settings.model_copy(update={"weights": "auto", "verifier_weights": "auto"})
    results, answers = [], []
    for each in (plain, settings):
        found: dict[str, str | None] = {}

        def keep(record: Any, done: int, total: int, found: dict[str, Any] = found) -> None:
            found[record.unique_id] = record.answer

        run_settings = Settings(model=each, search=_ACCURACY_SEARCH)
        with make_solver(run_settings) as solver:
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
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from beamwright.attention import (  # noqa: PLC0415
        BACKENDS,
        make_attention,
        triton_version,
    )
    from beamwright.runtime.selftest import run_selftest  # noqa: PLC0415
    from beamwright.runtime.threads import SMALL_PARAMETERS, threads_for  # noqa: PLC0415

    small, large = threads_for(SMALL_PARAMETERS), threads_for(SMALL_PARAMETERS + 1)
    with small.in_use():
        checks = run_selftest()
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


def find_verifier_shape(settings: ModelSettings) -> ModelShape | None:
    """The shape that `--verifier` means, as `find_shape`; None where it has no weights.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the verifier would.
    """
    from beamwright.verify.make import known_verifiers, named_checkpoint  # noqa: PLC0415

    name = settings.scorer
    place = named_checkpoint(name)
    if place is None:
        return None
    model = settings.model_copy(update={"model": place})
    return find_shape(model, "verifier", name, known_verifiers(name))


def find_shape(
    settings: ModelSettings, role: str = "generator", written: str | None = None, known: str = ""
) -> ModelShape:
    """The shape that `--model` means; the name of a known model will do. Reads no weights.

    role: "generator" or "verifier", the bundled folder that `bundled` stands for.
    written, known: of the option, for an error's words (`resolve_folder`).

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the model would.
    """
    from beamwright.models.load import read_shape, resolve_folder  # noqa: PLC0415
    from beamwright.models.named_shapes import (  # noqa: PLC0415
        NAMED_SHAPES,
        named_shape,
        shape_from_text,
    )

    spec = settings.model
    shape = None if Path(spec).is_dir() else named_shape(spec)
    if shape is None and spec.startswith("random:"):
        shape = shape_from_text(spec.removeprefix("random:"))
    if shape is None:
        shapes = "" if "/" in (written or spec) else f"shapes: {', '.join(NAMED_SHAPES)}"
        hint = "; ".join(filter(None, (known, shapes)))
        return read_shape(resolve_folder(spec, role, written, hint), settings.context)
    if settings.context is None:
        return shape
    return replace(shape, context=min(shape.context, settings.context))


def model_bytes(shape: ModelShape, element_bytes: int, storage: Storage) -> ModelBytes:
    """Sizes of a model in memory, as the memory plan counts them."""
    from beamwright.solver.memory import ModelBytes  # noqa: PLC0415

    return ModelBytes(shape, element_bytes, storage)


def split_memory(
    settings: MemorySettings, generator: ModelBytes, verifier: ModelBytes | None, num_rows: int
) -> MemoryPlan:
    """The memory plan of `solve`.

    Raises:
        InputError: if weights and activations leave nothing for KV.
    """
    from beamwright.solver.memory import plan_memory  # noqa: PLC0415

    return plan_memory(settings, generator, verifier, num_rows)


def memory_needed(
    models: tuple[ModelBytes, ModelBytes | None],
    kv_bytes: tuple[int, int],
    num_rows: int,
    *,
    has_copies: bool,
) -> int:
    """The number from which the memory plan gives each model so many bytes of KV."""
    from beamwright.solver.memory import memory_needed as needed  # noqa: PLC0415

    return needed(models, kv_bytes, num_rows, has_copies=has_copies)


def cuda_device() -> tuple[str, int] | None:
    """Name and memory of this machine's first CUDA device; None without one."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return str(found.name), int(found.total_memory)


def probe_machine() -> dict[str, Any]:
    """Measure this machine, keep the profile for `--gpu measured`, and return it."""
    from beamwright.hardware import measure_profile, write_profile  # noqa: PLC0415

    profile = measure_profile()
    file = write_profile(profile)
    return {"profile": asdict(profile), "profile_file": str(file)}
