"""`beamwright probe train`: train a verifier head on the generator's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import (
    add_row,
    figures_table,
    pause_gc_for_import,
    print_error_line,
    print_json,
    quiet_stdout,
)
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.evaluate.run import parse_records
from beamwright.io import check_writable, read_file, read_json_object
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright_lab.commands.probe_fit import FinishedPath

# Settings of a run on which hidden states depend.
_KEPT = ("model", "device", "dtype", "decoder", "attention", "context", "weights", "kv_dtype")
_OPTIONS = ("model", "device", "dtype", "weights", "memory", "seed")
_FIGURES = ("paths", "right", "auc", "auc_within_problem", "brier", "brier_of_the_mean", "ece")


@with_settings(only=_OPTIONS, recipe=False)
def probe(
    invocation: Invocation,
    action: Literal["train"] = typer.Argument(..., metavar="train", help="Train a head."),
    runs: list[Path] = typer.Argument(
        ..., metavar="RUN...", help="Folders of `eval --paths --out`, all of the same generator."
    ),
    out: Path = option(..., "File of the head, for --verifier probe:HEAD.", "HEAD"),
) -> None:
    """Train a head on the generator's hidden states, using right and wrong paths of runs."""
    del action
    check_writable(out, "--out ")
    settings = [_settings_of(run, invocation.given) for run in runs]
    for run, its_own in zip(runs, settings, strict=True):
        if its_own.model != settings[0].model:
            raise InputError(f"{run}: made by another generator than {runs[0]}")
    paths = [path for run in runs for path in _paths_of(run)]
    check_models(settings[0].model)
    with quiet_stdout():
        with pause_gc_for_import("beamwright.solver.solver"):
            from beamwright.solver.solver import Solver
        report = _train(Solver(settings[0]), paths, out)
    if invocation.as_json:
        print_json({"head": str(out), **report})
        return
    table = figures_table("on held-out problems", [name.replace("_", " ") for name in _FIGURES])
    for name in ("steps", "answers"):
        add_row(table, name, *(_shown(report[name][figure]) for figure in _FIGURES))
    Console().print(table)
    print_error_line(
        f"{out}: trained on {report['problems']['trained']} problems; --verifier probe:{out}"
    )


def _train(solver: Any, paths: Sequence[FinishedPath], out: Path) -> Mapping[str, Any]:
    from beamwright.verify.probe import ProbeHead
    from beamwright_lab.commands.probe_fit import fit, read_examples

    model, generator = solver.settings.model.model, solver.identities()["generator"]
    if generator is None:
        raise InputError(f"--model {model}: a head needs a generator with files")
    with solver, solver.threads.in_use():

        def heard(count: int) -> None:
            solver.progress.doing(f"hidden states of {count:,} paths, of at most {len(paths):,}")

        examples = read_examples(solver.generator, paths, heard)
        solver.progress.doing(f"fitting a head on {len(examples):,} paths")
        tensors, report = fit(examples, solver.settings.search.seed)
        solver.progress.ended()
    ProbeHead(tensors, generator["sha256"], model, report).save(out)
    return report


def _settings_of(run: Path, given: Mapping[str, Any]) -> Settings:
    """Return the settings with which to read a run's paths again.

    Raises:
        InputError: if the folder holds no run, or its generator gives no hidden states.
    """
    written = read_json_object(run / "settings.json", "the settings of a run")
    try:
        model = written["settings"]["model"]
        kept = {name: model[name] for name in _KEPT if name in model}
    except (KeyError, TypeError) as error:
        raise InputError(f"{run}: its settings.json is not that of a run") from error
    settings = Settings.build(**{**kept, **given}, verifier="none", search="majority")
    if settings.model.runs_elsewhere:
        raise InputError(
            f"{run}: made with --model {settings.model.model}, which gives no hidden states"
        )
    return settings


def _paths_of(run: Path) -> Iterator[FinishedPath]:
    """Yield the paths of a run that are known to be right or wrong."""
    from beamwright_lab.commands.probe_fit import FinishedPath

    file = run / "results.jsonl"
    records, _ = parse_records(file, read_file(file))
    kept = [record for record in records.values() if record.prompt_ids]
    if not kept:
        raise InputError(f"{run}: holds no paths; run `eval` with --paths")
    for record in kept:
        for each in record.candidates:
            if each.get("correct") is None or not each["steps"]:
                continue
            asked = record.problem, record.prompt_ids
            yield FinishedPath.of(*asked, each["steps"], right=each["correct"])


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,}" if isinstance(figure, int) else f"{figure:.3f}"
