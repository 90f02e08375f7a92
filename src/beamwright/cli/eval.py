"""`beamwright eval`: a problem set, resumable, with the accuracy so far."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from beamwright.cli.eval_ray import (
    CoresOption,
    RayOption,
    ReplicasOption,
    checker_processes,
    find_cluster,
    solving_far,
)
from beamwright.cli.eval_view import print_report, print_reports
from beamwright.cli.in_flight import ProblemsInFlight
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import complain, first_import, print_json, quiet_stdout
from beamwright.cli.views import TreePages
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record, wilson_interval
from beamwright.evaluate.problems import (
    ANSWER_FIELDS,
    QUESTION_FIELDS,
    SOLUTION_FIELDS,
    ProblemSet,
    load_problems,
)
from beamwright.evaluate.recipes import NamedSettings, Recipe, read_recipe
from beamwright.evaluate.run import InFlight, Solved, SolveMany, run
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.cluster.serving import Cluster
    from beamwright.solver.solver import Solver

_DatasetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DATASET",
        help="bundled:test, bundled:dev; a JSONL, JSON, CSV or parquet file, or a folder of them "
        "(FOLDER@SPLIT for one split); hf:ORG/NAME, hf:ORG/NAME/CONFIG@SPLIT "
        "(default: the recipe's).",
    ),
]
_RecipeOption = Annotated[
    Path | None,
    option(
        "--recipe",
        "YAML file of settings, or of several (base, settings, grid).",
        "FILE",
    ),
]
_LimitOption = Annotated[int | None, option("--limit", "Only the first N problems.", "N")]
_OutOption = Annotated[
    Path | None,
    option(
        "--out",
        "Write results here, and resume from here; several settings take a subfolder each.",
        "DIR",
    ),
]
_InFlightOption = Annotated[
    str | None,
    option(
        "--in-flight",
        "Problems solved at a time; the next begins as one ends (default: auto, as many as keep "
        "the device busy).",
        "N",
    ),
]
_ProblemFieldOption = Annotated[
    str | None,
    option(
        "--problem-field",
        f"Field of DATASET with the problem (default: {', '.join(QUESTION_FIELDS)}).",
        "NAME",
    ),
]
_AnswerFieldOption = Annotated[
    str | None,
    option(
        "--answer-field",
        "Field of DATASET with the right answer; none to go without accuracy (default: "
        f"{', '.join((*ANSWER_FIELDS, *SOLUTION_FIELDS))}).",
        "NAME",
    ),
]
_TreesOption = Annotated[
    int | None,
    option(
        "--trees",
        "Write the trees of the first K problems as pages, as they are solved (with --out).",
        "K",
    ),
]


@dataclass(frozen=True)
class _Work:
    """What every setting of a run shares. failures: pages that were not written."""

    problem_set: ProblemSet
    out: Path | None
    in_flight: int | None
    num_trees: int
    checker: AnswerChecker
    cluster: Cluster | None = None
    failures: list[InputError] = field(default_factory=list)


@with_settings(recipe=False)
def evaluate(
    invocation: Invocation,
    dataset: _DatasetArgument = None,
    recipe_file: _RecipeOption = None,
    limit: _LimitOption = None,
    out: _OutOption = None,
    in_flight: _InFlightOption = None,
    ray: RayOption = None,
    replicas: ReplicasOption = None,
    replica_cores: CoresOption = None,
    trees: _TreesOption = None,
    problem_field: _ProblemFieldOption = None,
    answer_field: _AnswerFieldOption = None,
) -> None:
    """Solve a set of problems and report the accuracy."""
    if trees is not None and trees < 1:
        raise InputError(f"--trees must be at least 1, got {trees}")
    if trees is not None and out is None:
        raise InputError("--trees needs --out DIR to write to")
    cluster = find_cluster(ray, replicas, replica_cores, invocation.plugins)
    recipe = read_recipe(recipe_file, invocation.given)
    dataset = dataset or recipe.dataset
    if dataset is None:
        raise InputError("give DATASET, such as bundled:test: neither a recipe nor you name one")
    problem_set = load_problems(
        dataset,
        limit,
        problem_field=problem_field,
        answer_field=answer_field,
    )
    for said, model in {each.note: each.settings.model for each in recipe.runs}.items():
        with suppress(BeamwrightError):  # which says all where the model is needed
            if said is not None:
                check_models(model)
                complain(said)
    with AnswerChecker(num_workers=checker_processes(cluster)) as checker:
        together = None if in_flight is None else _in_flight(in_flight)
        work = _Work(problem_set, out, together, trees or 0, checker, cluster)
        if recipe.runs[0].name is None:
            report = _evaluate(recipe.runs[0], work)
            _show(report, print_report, invocation)
        else:
            _evaluate_all(recipe, work, invocation)
    for failure in work.failures:
        raise failure


def _evaluate_all(recipe: Recipe, work: _Work, invocation: Invocation) -> None:
    """Every setting in turn; one that fails (memory, say) does not stop the others."""
    reports: list[dict[str, Any]] = []
    for each in recipe.runs:
        try:
            report = _evaluate(each, work)
        except InputError as error:
            raise InputError(f"setting {each.name}: {error}") from error
        except BeamwrightError as error:
            complain(f"setting {each.name}: {error}")
            report = {"error": str(error), "settings": each.settings.model_dump(mode="json")}
        reports.append({"name": each.name, **report})
    whole = {"dataset": work.problem_set.name, "runs": reports}
    _show(whole, print_reports, invocation)
    if any("error" in report for report in reports):
        raise typer.Exit(1)


def _show(
    report: dict[str, Any],
    print_it: Callable[[dict[str, Any], Console], None],
    invocation: Invocation,
) -> None:
    if invocation.as_json:
        print_json(report)
    else:
        print_it(report, Console())


def _evaluate(named: NamedSettings, work: _Work) -> dict[str, Any]:
    """The report of one setting, in its own folder where it has a name."""
    out = work.out
    if out is not None and named.name is not None:
        out = out / named.name
    pages = None
    if work.num_trees and out is not None:
        pages = TreePages(out / "trees", work.problem_set.problems[: work.num_trees])
    with ExitStack() as stack:
        stack.enter_context(quiet_stdout())
        status = ProblemsInFlight()
        on_record = stack.enter_context(_progress(named.name, status))
        if work.cluster is None:
            solve_many = _solving(named.settings, pages, stack, status)
        else:
            solve_many = solving_far(named.settings, work.cluster, pages, stack)
        try:
            report = run(
                *(work.problem_set, solve_many, named.settings, work.checker),
                out=out,
                in_flight=work.in_flight,
                on_record=on_record,
            )
        except KeyboardInterrupt:
            complain(_so_far(on_record, out))
            raise
    if pages is not None and pages.failure is not None:
        work.failures.append(pages.failure)
    return report


def _so_far(progress: _Tally, out: Path | None) -> str:
    """What an interrupted run has found, and how to go on with it."""
    line = f"{progress.done} of {progress.total or '?'} problems finished"
    if progress.judged:
        right, judged = progress.right, progress.judged
        low, high = wilson_interval(right / judged, judged)
        line += f", accuracy so far {right / judged:.1%} (95 %: {low:.1%} to {high:.1%})"
    if out is None:
        return f"{line}; with --out DIR they would have been kept"
    return f"{line}; run the same command again to resume"


def _in_flight(text: str) -> int | None:
    """`auto` is None: as many as the number of paths suggests."""
    if text != "auto" and not text.isdecimal():
        raise InputError(f"--in-flight {text}: give a number, or auto")
    return None if text == "auto" else int(text)


def _solving(
    settings: Settings, pages: TreePages | None, stack: ExitStack, status: ProblemsInFlight
) -> SolveMany:
    # Loaded at the first unfinished problem: a complete folder is reported without any model.
    @cache
    def solver() -> Solver:
        check_models(settings.model)
        with first_import("beamwright.solver.solver"):
            from beamwright.solver.solver import Solver

        return stack.enter_context(Solver(settings, progress=status))

    on_round = status.show if sys.stderr.isatty() else None  # trees are walked for it

    def solve_many(
        problems: Sequence[tuple[str | int, str]], /, *, in_flight: InFlight
    ) -> Iterator[tuple[str | int, Solved | BeamwrightError]]:
        found = solver().solve_many(problems, in_flight=in_flight, on_round=on_round)
        for problem_id, outcome in found:
            if pages is not None:
                pages.write([outcome])  # what fails there is reported at the end
            yield problem_id, outcome

    return solve_many


class _Tally:
    """Finished problems and their verdicts, shown on a bar. prefix: before what the bar says."""

    def __init__(self, bar: Progress, prefix: str) -> None:
        self.done, self.total = 0, 0
        self.judged = self.right = 0
        self._bar, self._prefix = bar, prefix
        self._task = bar.add_task(f"{prefix}no problem finished", total=None)

    def __call__(self, record: Record, done: int, total: int) -> None:
        self.done, self.total = done, total
        if record.correct is not None:
            self.judged += 1
            self.right += record.correct
        share = f"{self.right / self.judged:.1%}" if self.judged else "not judged"
        said = f"{self._prefix}accuracy {share}"
        self._bar.update(self._task, completed=done, total=total, description=said)


class _StatusColumn(ProgressColumn):
    """What the engine is doing."""

    def __init__(self, status: ProblemsInFlight) -> None:
        super().__init__(Column(no_wrap=True))
        self._status = status

    def render(self, task: Task) -> Text:
        return Text(self._status.line(), "cyan", overflow="ellipsis")


class _Bar(Progress):
    """A bar, and the problems in flight above it."""

    def __init__(self, status: ProblemsInFlight, *columns: ProgressColumn, **options: Any) -> None:
        self._status = status
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        table = self._status.table()
        if table is not None:
            yield table
        yield from super().get_renderables()


@contextmanager
def _progress(name: str | None, status: ProblemsInFlight) -> Iterator[_Tally]:
    """A bar on standard error, if that is a terminal. name: of the setting, of several.

    status: what goes on between two finished problems.
    """
    prefix = "" if name is None else f"{name}: "
    console = Console(stderr=True)
    bar = _Bar(
        status,
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        _StatusColumn(status),
        console=console,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        yield _Tally(bar, prefix)
