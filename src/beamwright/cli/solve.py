"""`beamwright solve`: one problem, the tree growing live, then the answer and what it took."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from beamwright.cli.live import LiveTree, ProgressLines, Status
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import (
    complain,
    first_import,
    one_line,
    print_json,
    printable,
    quiet_stdout,
)
from beamwright.cli.views import Views
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError, Interrupted, format_bytes
from beamwright.io import check_writable, read_regular
from beamwright.search import strategy_row
from beamwright.search.defaults import resolved, vote_note
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.protocols import RoundCallback, RoundReport
    from beamwright.solver.solution import Solution
    from beamwright.solver.solver import Solver


_ProblemArgument = Annotated[
    str | None, typer.Argument(metavar="PROBLEM", help="The problem; - reads standard input.")
]
_FileOption = Annotated[
    str | None, option("--problem-file", "Read the problem from a file.", "FILE")
]
_PromptOption = Annotated[
    int | None, option("--prompt-tokens", "A synthetic prompt, to measure with.", "TOKENS")
]
_ProgressOption = Annotated[
    bool | None, option("--progress/--no-progress", "Show rounds (default: live in a terminal).")
]


_TraceOption = Annotated[Path | None, option("--trace", "Write a timeline for Perfetto.", "FILE")]
_TreeOption = Annotated[
    Path | None, option("--tree", "Write the search tree as an HTML page.", "FILE")
]
_PictureOption = Annotated[
    Path | None, option("--picture", "Write the terminal's tree as an SVG picture.", "FILE")
]
_RecordOption = Annotated[
    Path | None, option("--record-tree", "Write the tree's shape for `simulate`.", "FILE")
]

_CheckpointOption = Annotated[
    Path | None, option("--checkpoint", "Save the search here after every round.", "FILE")
]
_ResumeOption = Annotated[
    Path | None,
    option("--resume", "Go on from a checkpoint with its settings; it is kept up to date.", "FILE"),
]


@dataclass(frozen=True)
class _Task:
    """What to solve: a problem, a synthetic prompt, or what a checkpoint holds."""

    problem: str | None
    prompt_tokens: int | None
    checkpoint: Path | None
    resume: Path | None

    @property
    def title(self) -> str:
        if self.problem is not None:
            return self.problem
        return "(resumed)" if self.resume else f"({self.prompt_tokens} synthetic tokens)"

    def solve(self, solver: Solver, on_round: RoundCallback) -> Solution:
        """Raises what the solver raises."""
        if self.resume is not None:
            file = self.checkpoint or self.resume
            return solver.resume(
                self.resume, problem=self.problem, on_round=on_round, checkpoint=file
            )
        saving: dict[str, Any] = {} if self.checkpoint is None else {"checkpoint": self.checkpoint}
        if self.problem is not None:
            return solver.solve(self.problem, on_round=on_round, **saving)
        assert self.prompt_tokens is not None
        return solver.synthetic(self.prompt_tokens, on_round=on_round, **saving)


@with_settings()
def solve(
    invocation: Invocation,
    problem: _ProblemArgument = None,
    problem_file: _FileOption = None,
    prompt_tokens: _PromptOption = None,
    progress: _ProgressOption = None,
    trace: _TraceOption = None,
    tree: _TreeOption = None,
    record_tree: _RecordOption = None,
    picture: _PictureOption = None,
    checkpoint: _CheckpointOption = None,
    resume: _ResumeOption = None,
) -> None:
    """Solve one problem by verifier-guided tree search."""
    _check_files(checkpoint, resume)
    given = [each for each in (problem, problem_file, prompt_tokens) if each is not None]
    if resume is not None and prompt_tokens is not None:
        raise InputError("--prompt-tokens does not go with --resume: the checkpoint has the prompt")
    text = None
    if given or resume is None:
        text = _problem_text(problem, problem_file, prompt_tokens)
    task = _Task(text, prompt_tokens, checkpoint, resume)
    views = Views(trace=trace, tree=tree, record_tree=record_tree, picture=picture)
    views.check()
    if resume is not None:
        with quiet_stdout():
            from beamwright.saved.resumed import resumed_settings

            found = resumed_settings(resume, invocation.settings)
        invocation = replace(invocation, settings=found)
    settings = _resolved(invocation.settings, measures=prompt_tokens is not None)
    invocation = replace(invocation, settings=settings)
    strategy = strategy_row(settings.search)
    if record_tree is not None and not strategy.by_level:
        raise InputError(
            f"--record-tree does not go with --search {settings.search.search}: "
            "its rounds are not the tree's levels"
        )
    status = Status(settings)
    live = progress is not False and not invocation.as_json and sys.stdout.isatty()
    console = Console() if live else None
    with _watching(console, task.title, status, as_lines=bool(progress)) as on_round:
        solution, stopped = _run(invocation, task, on_round, views, status)
    if solution is not None and console is not None:
        print_solution(console, solution, stopped)
    elif solution is not None:
        print_plain(solution, invocation.as_json, stopped)
    _write_views(views, solution, stopped)
    if stopped is not None:
        raise stopped


def _write_views(views: Views, solution: Solution | None, stopped: BaseException | None) -> None:
    """Behind the answer, so that a file that cannot be written takes nothing with it."""
    try:
        with quiet_stdout():
            views.write(solution)
    except InputError as error:
        if stopped is None:
            raise
        complain(f"error: {error}")


@contextmanager
def _watching(
    console: Console | None, title: str, status: Status, *, as_lines: bool
) -> Iterator[RoundCallback | None]:
    """What shows the rounds: the tree in a terminal, lines on standard error, or nothing."""
    if console is not None:
        with LiveTree(console, title, status) as tree:
            yield tree.show
        return
    with quiet_stdout():
        if not as_lines:
            yield None
            return
        with ProgressLines(lambda line: typer.echo(line, err=True), status) as lines:
            yield lines.show


def _resolved(settings: Settings, *, measures: bool) -> Settings:
    """Settings in which a strategy and a verifier are named; says where it is a vote by default.

    measures: the prompt is synthetic; any scores will do, so that it is still a tree that grows.
    """
    if measures and settings.model.verifier is None and settings.model.scorer == "none":
        model = settings.model.model_copy(update={"verifier": "logprob"})
        settings = settings.model_copy(update={"model": model})
    with quiet_stdout():
        check_models(settings.model)
    note = vote_note(settings)
    if note is not None:
        complain(note)
    return resolved(settings)


def _run(
    invocation: Invocation,
    task: _Task,
    on_round: RoundCallback | None,
    views: Views,
    status: Status,
) -> tuple[Solution | None, BaseException | None]:
    """The solution, or what was finished when an error stopped the search, and that error."""

    def seen(report: RoundReport) -> None:
        views.observe(report.tree)
        if on_round is not None:
            on_round(report)

    with first_import("beamwright.solver.solver"):
        from beamwright.solver.solver import Solver

    with Solver(invocation.settings, timeline=views.timeline(), progress=status) as solver:
        stopped: BeamwrightError | Interrupted | None = None
        solution: Solution | None = None
        try:
            solution = task.solve(solver, seen)
        except (BeamwrightError, Interrupted) as error:
            stopped, solution = error, error.partial
    return solution, stopped


def _check_files(checkpoint: Path | None, resume: Path | None) -> None:
    """Find out before the models are loaded that a file is not there."""
    if resume is not None and not resume.is_file():
        what = "not a regular file" if resume.exists() else "no such file"
        raise InputError(f"--resume {resume}: {what}")
    if checkpoint is not None:
        check_writable(checkpoint, "--checkpoint ")
        if checkpoint.exists() and not checkpoint.is_file():
            raise InputError(f"--checkpoint {checkpoint}: not a regular file")


def _problem_text(
    problem: str | None, problem_file: str | None, prompt_tokens: int | None
) -> str | None:
    """The problem; None for a synthetic prompt."""
    given = [each for each in (problem, problem_file, prompt_tokens) if each is not None]
    if len(given) != 1:
        raise InputError("give one of PROBLEM, --problem-file FILE and --prompt-tokens N")
    if prompt_tokens is not None:
        if prompt_tokens < 1:
            raise InputError(f"--prompt-tokens must be at least 1, got {prompt_tokens}")
        return None
    text = problem
    if problem == "-" or problem_file == "-":
        text = sys.stdin.read()
    elif problem_file is not None:
        try:
            text = read_regular(Path(problem_file)).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"--problem-file {problem_file}: not UTF-8 text") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"--problem-file {problem_file}: cannot be read ({reason})") from error
    if text is None or not text.strip():
        raise InputError("the problem is empty")
    return text


def print_plain(solution: Solution, as_json: bool, stopped: BaseException | None = None) -> None:
    """The answer on standard output. Of a search that failed, it is no answer but a remark."""
    failed = isinstance(stopped, BeamwrightError)
    if failed and not as_json:
        complain(_partial(solution))
        return
    if as_json:
        failure = {"partial": True, "error": str(stopped)} if failed else {}
        print_json({**solution.to_json(), **failure})
    elif solution.answer is None:
        typer.echo(printable(solution.last_step or solution.text))
    else:
        typer.echo(one_line(solution.answer))
    for warning in solution.warnings:
        complain(f"warning: {warning}")
    if as_json:
        return
    typer.echo(accounting(solution), err=True)
    if stopped is None and solution.reason_fewer:
        complain(solution.reason_fewer)


def _partial(solution: Solution) -> str:
    """What a search that failed had finished, as a remark."""
    candidates = solution.to_json()["candidates"]
    answers = Counter(each["answer"] for each in candidates if each["answer"] is not None)
    stated = ", ".join(f"{one_line(answer)} ({n})" for answer, n in answers.most_common(5))
    return (
        f"the search failed with {len(candidates)} candidates finished; "
        f"they state: {stated or 'no answer'}"
    )


def print_solution(
    console: Console, solution: Solution, stopped: BaseException | None = None
) -> None:
    """The chosen path and its answer in a terminal; of a search that failed, a remark."""
    if isinstance(stopped, BeamwrightError):
        console.print(Text(_partial(solution), style="bold yellow"))
        return
    console.print(Text(printable(solution.text), style="dim"))
    console.print()
    if solution.answer is not None:
        answer = Text("Answer  ", style="bold")
        answer.append(one_line(solution.answer), style="bold green")
        console.print(answer)
    for warning in solution.warnings:
        console.print(Text(f"Warning: {printable(warning)}", style="bold yellow"))
    if solution.reason_fewer:
        console.print(Text(f"fewer candidates than asked for: {solution.reason_fewer}", "yellow"))
    console.print(Text(accounting(solution), style="dim"), soft_wrap=True)


def accounting(solution: Solution) -> str:
    """One line of what a search took."""
    stats, goodput = solution.tree_stats, solution.goodput_tok_s
    link, peak = solution.kv.link_bandwidth_emulated, solution.kv.device_peak_bytes
    remote = solution.remote
    parts = [
        f"{solution.rounds} rounds",
        f"{stats.nodes:,} nodes",
        f"{stats.pruned:,} pruned",
        f"{solution.tokens.generated:,} tokens generated",
        f"{solution.time.total_s:.1f} s",
        None if goodput is None else f"goodput {goodput:.1f} tok/s (one path's)",
        None if peak is None else f"KV peak {format_bytes(peak)}",
        None if remote is None else f"{remote.requests:,} requests",
        None if link is None else f"link emulated at {format_bytes(link)}/s",
    ]
    return " | ".join(part for part in parts if part)
