"""`beamwright eval`: solves a problem set, in this process or over Ray, and reports the accuracy.

A progress bar shows the accuracy so far. An interrupted run can be resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from beamwright.cli.live import StatusLine
from beamwright.cli.options import Invocation, number_or_auto, option, with_settings
from beamwright.cli.output import (
    add_row,
    pause_gc_for_import,
    plain,
    print_error_line,
    print_json,
    quiet_stdout,
)
from beamwright.cli.solve import write_page
from beamwright.cores import num_cores
from beamwright.errors import BeamwrightError, InputError
from beamwright.evaluate.advise import MOST_PROBLEMS, make_advice, trial_settings
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record, wilson_interval
from beamwright.evaluate.problems import (
    ANSWER_FIELDS,
    QUESTION_FIELDS,
    SOLUTION_FIELDS,
    ProblemSet,
    load_problems,
)
from beamwright.evaluate.recipes import NamedSettings, read_recipe
from beamwright.evaluate.run import judge_votes, run
from beamwright.search import DEFAULT_SEARCH
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.cluster.roster import SentTree
    from beamwright.cluster.serving import Cluster
    from beamwright.config import Settings
    from beamwright.solver.solution import Solution

_MOST_CHECKERS = 16  # maximum number of processes that check answers, each with 63 MB


@with_settings(recipe=False, cluster=True)
def evaluate(
    invocation: Invocation,
    dataset: str | None = typer.Argument(
        None,
        metavar="DATASET",
        help="bundled:test, bundled:dev, a JSONL, JSON, CSV or parquet file, a folder of them "
        "(FOLDER@SPLIT for one split), hf:ORG/NAME or hf:ORG/NAME/CONFIG@SPLIT (default: the "
        "recipe's).",
    ),
    recipe_file: Path | None = option(
        None,
        "YAML file with the settings of one search or several (base, settings, grid).",
        "FILE",
        "--recipe",
    ),
    limit: int | None = option(None, "Solve only the first N problems.", "N"),
    out: Path | None = option(
        None,
        "Folder to write results to and to resume from; a subfolder per setting.",
        "DIR",
    ),
    in_flight: str = option(
        "auto",
        "Problems in flight (auto: as many as keep the device busy).",
        "N",
    ),
    trees: int | None = option(
        None,
        "Write a page for the tree of each of the first K problems (needs --out).",
        "K",
        min=1,
    ),
    advise: bool = option(
        False,
        f"Compare the search with best-of-n and votes on up to {MOST_PROBLEMS} problems, at equal "
        "tokens and equal seconds.",
    ),
    paths: bool = option(
        False, "Store the tokens of all candidates (needs --out), for probe train.", flag="--paths"
    ),
    problem_field: str | None = option(
        None, f"Field of DATASET with the problem (default: {', '.join(QUESTION_FIELDS)}).", "NAME"
    ),
    answer_field: str | None = option(
        None,
        "Field of DATASET with the right answer, or none to report no accuracy (default: the "
        f"first of {', '.join((*ANSWER_FIELDS, *SOLUTION_FIELDS))} that exists).",
        "NAME",
    ),
) -> None:
    """Solve a set of problems and report the accuracy."""
    for flag, given in (("--trees", trees is not None), ("--paths", paths)):
        if given and out is None:
            raise InputError(f"{flag} needs --out DIR")
    together, cluster = number_or_auto("--in-flight", in_flight, least=1), invocation.cluster
    recipe = read_recipe(recipe_file, invocation.given)
    dataset = dataset or recipe.dataset
    if dataset is None:
        raise InputError("no problem set is named. Give DATASET, such as bundled:test")
    limit = MOST_PROBLEMS if advise and limit is None else limit
    problem_set = load_problems(
        dataset, limit, problem_field=problem_field, answer_field=answer_field
    )
    for note, model in {each.note: each.settings.model for each in recipe.runs}.items():
        with suppress(BeamwrightError):  # loading the model raises this error again
            if note is not None:
                check_models(model)
                print_error_line(note)
    # With a remote cluster this process's cores are idle, so the answer checker may use them.
    alone = cluster is None or cluster.address is None
    most = 2 if alone else max(2, min(_MOST_CHECKERS, num_cores() - 1))
    with AnswerChecker(num_workers=most) as checker:
        work = _Evaluation(problem_set, out, together, trees or 0, checker, cluster, paths)
        if advise:
            said = work.advice(recipe.runs)
            print_json(said) if invocation.as_json else Console().print(*_advice_parts(said))
            return
        reports = [work.report(named) for named in recipe.runs]
    several = recipe.runs[0].name is not None
    if invocation.as_json:
        print_json({"dataset": problem_set.name, "runs": reports} if several else reports[0])
    else:
        Console().print(*map(_table, reports))
    if any("error" in report for report in reports):
        raise typer.Exit(1)
    for failure in work.failures:
        raise failure


@dataclass(frozen=True)
class _Evaluation:
    """Runs one or several settings on the same problems, and returns their reports.

    num_trees: number of problems whose trees are written as pages.
    failures: errors of pages that could not be written.
    """

    problem_set: ProblemSet
    out: Path | None
    in_flight: int | None
    num_trees: int
    checker: AnswerChecker
    cluster: Cluster | None = None
    paths: bool = False
    failures: list[InputError] = field(default_factory=list)

    def report(self, named: NamedSettings) -> dict[str, Any]:
        """Run one setting and return its report. A named setting has its own folder.

        If a named setting fails, for example for lack of memory, its report has the error, so that
        the remaining settings still run.
        """
        name, settings = named.name, named.settings
        if name is None:
            return self._run(settings, self.out, "")[0]
        try:
            out = None if self.out is None else self.out / name
            return {"name": name, **self._run(settings, out, f"{name}: ")[0]}
        except InputError as error:
            raise InputError(f"setting {name}: {error}") from error
        except BeamwrightError as error:
            print_error_line(f"setting {name}: {error}")
            return {"name": name, "error": str(error), "settings": settings.model_dump(mode="json")}

    def advice(self, runs: Sequence[NamedSettings]) -> dict[str, Any]:
        """Run independent samples and the search; return advice on which of the two to use.

        Each of the two runs has its own folder.

        Raises:
            InputError: for a recipe of several settings, or if no problem has a right answer.
        """
        if len(runs) != 1:
            raise InputError(f"--advise needs a recipe of one setting, this one has {len(runs)}")
        if all(problem.answer is None for problem in self.problem_set.problems):
            raise InputError(
                "--advise needs right answers, the problems have none. Set --answer-field."
            )
        settings, found = runs[0].settings, dict[str, list[Record]]()
        asked = trial_settings(settings)
        for name, each in asked.items():
            out = None if self.out is None else self.out / name
            _, records = self._run(each, out, f"{name}: ")
            found[name] = [records[each.unique_id] for each in self.problem_set.problems]

        def judge(record: Record) -> Mapping[str | None, bool | None]:
            votes = {each["answer"]: each["vote"] for each in record.candidates}
            solved = {"answer": record.answer, "settings": settings.model_dump(mode="json")}
            return judge_votes(record.gold, solved, votes, self.checker, record.problem)

        searched = asked.get("search", settings).search.search or DEFAULT_SEARCH
        said = make_advice(found["samples"], found.get("search", ()), searched, judge)
        return {"dataset": self.problem_set.name, "problems": len(found["samples"]), **said}

    def _run(
        self, settings: Settings, out: Path | None, prefix: str
    ) -> tuple[dict[str, Any], Mapping[str, Record]]:
        """Run one setting, and return its report and its records by problem id."""
        first = self.problem_set.problems[: self.num_trees] if out is not None else ()
        pages = {each.unique_id: out / "trees" / f"{each.index:04d}.html" for each in first if out}
        status = StatusLine()
        with quiet_stdout(), _bar() as bar, ExitStack() as stack:
            tally = _AccuracyBar(bar, prefix, status)
            solve_many = partial(self._solve_many, settings, pages, stack, status)
            try:
                work = self.problem_set, solve_many, settings, self.checker, out
                return run(*work, paths=self.paths, on_record=tally), tally.records
            except KeyboardInterrupt:
                print_error_line(tally.so_far(out))
                raise

    def _solve_many(
        self,
        settings: Settings,
        pages: dict[str, Path],
        stack: ExitStack,
        status: StatusLine,
        problems: Sequence[tuple[str | int, str]],
    ) -> Iterator[tuple[str | int, Solution | BeamwrightError]]:
        """Solve the problems in this process or over Ray; yield each problem's id and outcome.

        pages: files of tree pages by problem id; each is written when its problem is solved.
        """
        # The code of this Python generator runs only if a problem is unfinished. No model is loaded
        # to report a folder in which all problems are finished.
        if self.cluster is None:
            check_models(settings.model)
            with pause_gc_for_import("beamwright.solver.solver"):
                from beamwright.solver.solver import Solver

            solver = stack.enter_context(Solver(settings, progress=status))
            outcomes = solver.solve_many(problems, in_flight=self.in_flight or "auto")
        else:
            with pause_gc_for_import("torch"):
                from beamwright.cluster.solver import ClusterSolver

            engines = ClusterSolver(self.cluster, settings, in_flight=self.in_flight)
            tells: SentTree = "tree" if pages or self.paths else "nothing"
            outcomes = stack.enter_context(engines).solve_many(problems, tells=tells)
        for problem_id, outcome in outcomes:
            file = pages.get(str(problem_id))
            if file is not None and not isinstance(outcome, BeamwrightError):
                try:
                    _write_tree(file, outcome)
                except InputError as error:  # go on with the problems, but write no more pages
                    self.failures.append(error)
                    pages.clear()
            yield problem_id, outcome


def _write_tree(file: Path, solution: Solution) -> None:
    """Write the page of a tree and create its folder. Raises InputError if this fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file.parent}: cannot create the folder ({error.strerror})") from error
    write_page(file, solution)


# --- progress --------------------------------------------------------------------------------


class _AccuracyBar:
    """Progress bar of an evaluation, with the accuracy so far. Call it with every new record.

    prefix: text that precedes the bar's description.
    """

    def __init__(self, bar: Progress, prefix: str, status: StatusLine) -> None:
        self._bar, self._prefix = bar, prefix
        self.records, self._verdicts = dict[str, Record](), list[bool]()
        self._task = bar.add_task(f"{prefix}no problem finished", total=None, status=status)

    def __call__(self, record: Record, done: int, total: int) -> None:
        self.records[record.unique_id] = record
        if record.correct is not None:
            self._verdicts.append(record.correct)
        judged = len(self._verdicts)
        share = f"{sum(self._verdicts) / judged:.1%}" if judged else "not judged"
        line = f"{self._prefix}accuracy {share}"
        self._bar.update(self._task, description=line, completed=done, total=total)

    def so_far(self, out: Path | None) -> str:
        """Return a line with the results of an interrupted run, and how to resume the run."""
        total, judged = self._bar.tasks[0].total, len(self._verdicts)
        line = f"{len(self.records)} of {int(total) if total else '?'} problems finished"
        if judged:
            share = sum(self._verdicts) / judged
            low, high = wilson_interval(share, judged)
            line += f", accuracy so far {share:.1%} (95 %: {low:.1%} to {high:.1%})"
        if out is None:
            return f"{line}. They are lost; --out DIR keeps results."
        return f"{line}. Run the same command again to resume."


def _bar() -> Progress:
    """Return a progress bar with a status of the running problems.

    The bar is visible only if standard error is a terminal.
    """
    column = Column(no_wrap=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", "cyan", markup=False, table_column=column),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )


# --- the table ----------------------------------------------------------------------------------


def _table(report: Mapping[str, Any]) -> Table:
    """Return the table of one setting, a row per figure."""
    title = plain(report.get("name", report.get("dataset", "")))
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in [("failed", report["error"])] if "error" in report else _rows(report):
        add_row(table, name, value)
    return table


def _advice_parts(said: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the printed advice: a table at equal tokens, one at equal seconds, and a summary.

    The summary includes the noise of the scores if this noise is known.
    """
    for unit in ("tokens", "seconds"):
        if unit not in said:
            continue
        found = said[unit]
        title = f"at {found['each']:,.4g} {unit} a problem"
        table = Table("way", "accuracy", "ahead of the vote (95 %)", title=title)
        for called, way in found["ways"].items():
            low, high = way["ahead"]["interval"]
            points = f"{100 * way['ahead']['value']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
            name = called if way["k"] is None else f"{called}, {way['k']} samples"
            table.add_row(plain(name), f"{way['accuracy']['value']:.1%}", points)
        yield table
    if said["noise"] is not None:
        form = (
            "Scores: gap {gap:.3g}, noise {noise:.3g}; they support a width of about {width:,.0f}."
        )
        yield form.format(**said["noise"])
    yield plain(said["say"])


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    judged, errors = report["judged"], report["errors"]
    none = "not judged: the problems have no right answers"
    said = f"{report['problems']:,}, {f'{judged:,} judged' if judged else none}"
    yield "problems", said + (f", {errors:,} failed (counted as wrong)" if errors else "")
    if report["accuracy_interval"] is not None:
        low, high = report["accuracy_interval"]
        yield "accuracy", f"{report['accuracy']:.1%}  (95 %: {low:.1%} to {high:.1%})"
        for how, accuracy in report["by_choice"].items():
            yield f"  chosen by {how}", f"{accuracy:.1%}"
    for level, group in report["by_level"].items():
        if group["accuracy"] is not None:
            yield f"  level {level}", f"{group['accuracy']:.1%} of {group['problems']}"
    warned = report["warnings"]
    if warned["problems"]:
        share = f"{warned['problems']:,} of {report['problems']:,}"
        yield "warnings", f"{share}, such as: {warned['example']}"
    figures: list[tuple[str, Any, str]] = [
        *((f"pass@{k}", value, "{:.1%}") for k, value in [*report["pass_at"].items()][-1:]),
        ("mean rounds", report["mean_rounds"], "{:.1f}"),
        ("tokens generated", report["tokens"].get("generated"), "{:,}"),
        ("tokens of thoughts", report["tokens"].get("thought"), "{:,}"),
        ("seconds", report["time"].get("total_s"), "{:,.1f}"),
        ("goodput", report["goodput_tok_s"], "{:.1f} tok/s (a path's tokens over its time)"),
        ("latency, median", report["latency_s"]["p50"], "{:,.2f} s"),
        ("latency, 95 %", report["latency_s"]["p95"], "{:,.2f} s"),
    ]
    for name, value, form in figures:
        if value is not None:
            yield name, form.format(value["value"] if isinstance(value, Mapping) else value)
