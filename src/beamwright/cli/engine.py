"""The one place where the command line reaches the rooms that import torch.

Imports happen inside the functions, so that `--help` and usage errors need not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.config import ModelSettings, Settings

if TYPE_CHECKING:
    from beamwright.cli.views import Views
    from beamwright.cost import Layout, ModelCosts
    from beamwright.cost.model import Hardware
    from beamwright.models import ModelShape
    from beamwright.runtime.simulation import ReplayTree, StepTree
    from beamwright.runtime.timeline import Timeline
    from beamwright.solution import Solution
    from beamwright.solver import Solver
    from beamwright.tree import SearchTree


def make_solver(settings: Settings, timeline: Timeline | None = None) -> Solver:
    """The engine with its models loaded."""
    from beamwright.solver import Solver  # noqa: PLC0415

    return Solver(settings, timeline=timeline)


def make_timeline() -> Timeline:
    """A timeline that is switched on."""
    from beamwright.runtime.timeline import Timeline  # noqa: PLC0415

    return Timeline()


def write_views(
    tree: SearchTree, solution: Solution | None, timeline: Timeline | None, views: Views
) -> None:
    """Write the files that `solve` was asked for."""
    from beamwright import report  # noqa: PLC0415
    from beamwright.runtime.timeline import NullTimeline  # noqa: PLC0415
    from beamwright.solution import final_nodes  # noqa: PLC0415

    title = tree.root.problem_text or "synthetic prompt"
    found = timeline or NullTimeline()
    if views.trace is not None:
        report.write_trace(found, views.trace, title)
    if views.tree is not None:
        nodes = [n for n in final_nodes(tree) if solution and n.text == solution.text]
        shown = report.ShownTree(tree, nodes[0] if nodes else None)
        report.write_tree_page([shown], found, views.tree, title)
    if views.record_tree is not None:
        report.write_recorded(tree, views.record_tree)


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

    from beamwright.attention import make_attention, triton_version  # noqa: PLC0415
    from beamwright.runtime.selftest import run_selftest  # noqa: PLC0415

    checks = run_selftest()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "torch": torch.__version__,
        "triton": triton_version(),
        "attention": make_attention("auto", device).name,
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


def grow_tree(facts: Mapping[str, Any]) -> StepTree:
    """The tree of a made-up search with these settings, named as `beamwright simulate` does.

    Raises:
        InputError: if they do not go together.
    """
    from beamwright.runtime.simulation import SyntheticSearch, grow  # noqa: PLC0415

    search = SyntheticSearch(
        num_beams=facts["n"],
        width=facts["width"],
        prompt_tokens=facts["prompt"],
        generate_tokens=facts["generate"],
        step_tokens=facts["step_tokens"],
        step_sigma=facts["step_spread"],
        search=facts["search"],
        survival=facts["survival"],
        seed=facts["seed"],
    )
    return grow(search)


def simulate_search(
    tree: ReplayTree,
    model: ModelCosts,
    hardware: Hardware,
    layout: Layout,
    **settings: Any,
) -> dict[str, Any] | None:
    """One search under one schedule; None if it does not fit. settings: of `Simulation`."""
    from beamwright.runtime.simulation import (  # noqa: PLC0415
        RooflineCosts,
        Simulation,
        simulate_if_fits,
    )

    costs = RooflineCosts.of(model, hardware, layout)
    result = simulate_if_fits(Simulation(tree, model, costs, **settings))
    return None if result is None else asdict(result)
