"""`beamwright solve`: solves one problem and shows its tree live, its answer and its costs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from beamwright.cli.live import LiveTree, StatusLine, round_line, write_picture
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import (
    one_line,
    pause_gc_for_import,
    print_error_line,
    print_json,
    printable,
    quiet_stdout,
)
from beamwright.config import Settings
from beamwright.errors import BeamwrightError, InputError, Interrupted, format_bytes
from beamwright.io import check_writable, read_text
from beamwright.search import strategy_entry
from beamwright.search.defaults import vote_note, with_strategy_and_verifier
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.engine.timeline import Timeline
    from beamwright.protocols import RoundCallback
    from beamwright.solver.solution import Solution
    from beamwright.solver.solver import Solver


@with_settings()
def solve(
    invocation: Invocation,
    problem: str | None = typer.Argument(
        None, metavar="PROBLEM", help="Text of the problem; - reads standard input."
    ),
    problem_file: str | None = option(None, "Read the problem from a file.", "FILE"),
    prompt_tokens: int | None = option(
        None, "Length of a synthetic prompt, for measurements.", "TOKENS", min=1
    ),
    progress: bool | None = option(
        None, "Show the rounds while they run (default: only in a terminal)."
    ),
    trace: Path | None = option(None, "Write a timeline for Perfetto.", "FILE"),
    tree: Path | None = option(None, "Write the search tree as an HTML page.", "FILE"),
    record_tree: Path | None = option(None, "Write the tree's shape for `simulate`.", "FILE"),
    picture: Path | None = option(None, "Write the tree as an SVG picture.", "FILE"),
    checkpoint: Path | None = option(
        None, "Save the search to this file after every round.", "FILE"
    ),
    resume: Path | None = option(
        None, "Continue a checkpoint with its settings, and keep it up to date.", "FILE"
    ),
) -> None:
    """Solve one problem by verifier-guided tree search."""
    _check_files(checkpoint, resume)
    if resume is not None and prompt_tokens is not None:
        raise InputError("--prompt-tokens has no effect with --resume, which has a prompt")
    text = None
    if resume is None or (problem, problem_file) != (None, None):
        text = _problem_text(problem, problem_file, prompt_tokens)
    views = {"trace": trace, "tree": tree, "record-tree": record_tree, "picture": picture}
    files = {name: file for name, file in views.items() if file is not None}
    for name, file in files.items():
        check_writable(file, f"--{name} ")
    settings = _with_defaults(invocation.settings, resume, measures=prompt_tokens is not None)
    if record_tree is not None and not strategy_entry(settings.search).by_level:
        raise InputError(
            f"--record-tree does not support --search {settings.search.search}: "
            "its rounds are not levels of the tree"
        )
    live = progress is not False and not invocation.as_json and sys.stdout.isatty()
    console = Console() if live else None
    status, timeline = StatusLine(), None
    if trace is not None or tree is not None:
        from beamwright.engine.timeline import Timeline

        timeline = Timeline()
    title = text or ("(resumed)" if resume else f"({prompt_tokens} synthetic tokens)")
    with progress_callback(console, title, status, as_lines=bool(progress)) as on_round:
        with pause_gc_for_import("beamwright.solver.solver"):
            from beamwright.solver.solver import Solver

        with Solver(settings, timeline=timeline, progress=status) as solver:
            asked = text or prompt_tokens
            solution, stopped = _search(solver, asked, resume, on_round, checkpoint)
    if solution is not None:
        print_solution(solution, console, stopped, as_json=invocation.as_json)
        try:  # after printing, so that the answer is not lost if a file cannot be written
            with quiet_stdout():
                _write_files(files, solution, timeline)
        except InputError as error:
            if stopped is None:
                raise
            print_error_line(f"error: {error}")
    if stopped is not None:
        raise stopped


def _search(
    solver: Solver,
    asked: str | int | None,
    resume: Path | None,
    on_round: RoundCallback | None,
    checkpoint: Path | None,
) -> tuple[Solution | None, BaseException | None]:
    """Run the search; return (solution, None), or (partial solution or None, error) if it fails.

    asked: a problem, or the number of tokens of a synthetic prompt; None to continue the checkpoint
        `resume`.
    """
    try:
        if isinstance(asked, int):
            return solver.synthetic(asked, on_round=on_round, checkpoint=checkpoint), None
        if resume is not None:
            kept = checkpoint or resume
            found = solver.resume(resume, problem=asked, on_round=on_round, checkpoint=kept)
            return found, None
        assert asked is not None
        return solver.solve(asked, on_round=on_round, checkpoint=checkpoint), None
    except (BeamwrightError, Interrupted) as error:
        return error.partial, error


def _check_files(checkpoint: Path | None, resume: Path | None) -> None:
    """Check the checkpoint files before models are loaded. Raises InputError for bad files."""
    if resume is not None and not resume.is_file():
        what = "not a regular file; name a checkpoint" if resume.exists() else "no such file"
        raise InputError(f"--resume {resume}: {what}")
    if checkpoint is not None:
        check_writable(checkpoint, "--checkpoint ")
        if checkpoint.exists() and not checkpoint.is_file():
            raise InputError(f"--checkpoint {checkpoint}: not a regular file; name another file")


def _problem_text(
    problem: str | None, problem_file: str | None, prompt_tokens: int | None
) -> str | None:
    """Read the problem from the argument, a file or standard input; None for a synthetic prompt.

    Raises:
        InputError: unless exactly one source is given, or if the problem is empty.
    """
    if (problem, problem_file, prompt_tokens).count(None) != 2:
        raise InputError("give exactly one of PROBLEM, --problem-file and --prompt-tokens")
    if prompt_tokens is not None:
        return None
    text = problem
    if problem == "-" or problem_file == "-":
        text = sys.stdin.read()
    elif problem_file is not None:
        text = read_text(Path(problem_file), "--problem-file ")
    if text is None or not text.strip():
        raise InputError("the problem is empty")
    return text


def _with_defaults(settings: Settings, resume: Path | None, *, measures: bool) -> Settings:
    """Return the settings with the default strategy and verifier filled in.

    Prints a note if the default strategy is a majority vote.
    measures: True if the prompt is synthetic. If no verifier is given, log-probabilities then serve
        as scores, so that the search grows a tree.
    """
    with quiet_stdout():
        if resume is not None:
            from beamwright.saved.checkpoint import resumed_settings

            settings = resumed_settings(resume, settings)
        if (
            measures
            and settings.model.verifier is None
            and settings.model.verifier_or_default == "none"
        ):
            model = settings.model.model_copy(update={"verifier": "logprob"})
            settings = settings.model_copy(update={"model": model})
        check_models(settings.model)
    note = vote_note(settings)
    if note is not None:
        print_error_line(note)
    return with_strategy_and_verifier(settings)


@contextmanager
def progress_callback(
    console: Console | None, title: str, status: StatusLine, *, as_lines: bool
) -> Iterator[RoundCallback | None]:
    """Yield the round callback that shows progress; None to show no progress.

    With a console the callback draws the live tree. With `as_lines` it prints a line per round on
    standard error.
    """
    if console is not None:
        with LiveTree(console, title, status) as tree:
            yield tree.show
        return
    with quiet_stdout():
        yield (lambda report: typer.echo(round_line(report), err=True)) if as_lines else None


def print_solution(
    solution: Solution, console: Console | None, stopped: BaseException | None, *, as_json: bool
) -> None:
    """Print the answer (in a terminal also its path), then warnings and costs.

    If the search failed, print only a remark about the finished candidates on standard error; with
    `as_json`, print the partial solution as well.
    """
    failed = isinstance(stopped, BeamwrightError)
    if as_json:
        failure = {"partial": True, "error": str(stopped)} if failed else {}
        print_json({**solution.to_json(), **failure})
    elif failed:
        candidates = solution.to_json()["candidates"]
        answers = Counter(each["answer"] for each in candidates if each["answer"] is not None)
        stated = ", ".join(f"{one_line(answer)} ({n})" for answer, n in answers.most_common(5))
        print_error_line(
            f"the search failed after {len(candidates)} candidates had finished; "
            f"their answers: {stated or 'none'}"
        )
        return
    elif console is not None:
        if tokens := solution.chosen.thought_tokens:
            console.print(Text(f"(thought for {tokens:,} tokens)\n", style="dim italic"))
        console.print(Text(f"{printable(solution.chosen.said)}\n", style="dim"))
        if solution.answer is not None:
            answer = Text("Answer  ", style="bold")
            console.print(answer.append(one_line(solution.answer), style="bold green"))
    elif solution.answer is None:
        typer.echo(printable(solution.last_step or solution.chosen.said))
    else:
        typer.echo(one_line(solution.answer))
    for warning in solution.warnings:
        print_error_line(f"warning: {warning}")
    if not as_json:
        typer.echo(cost_line(solution), err=True)
        if stopped is None and solution.reason_fewer:
            print_error_line(solution.reason_fewer)


def cost_line(solution: Solution) -> str:
    """Return one line about the costs of a search: rounds, tokens, seconds and memory."""
    stats, goodput = solution.tree_stats, solution.goodput_tok_s
    link, peak = solution.kv.link_bandwidth_emulated, solution.kv.device_peak_bytes
    remote, sparse = solution.remote, solution.sparse
    parts = [
        f"{solution.rounds} rounds",
        f"{stats.nodes:,} nodes",
        f"{stats.pruned:,} pruned",
        f"{solution.tokens.generated:,} tokens generated",
        f"{solution.tokens.thought:,} thought" if solution.tokens.thought else None,
        f"{solution.time.total_s:.1f} s",
        None if goodput is None else f"goodput {goodput:.1f} tok/s per path",
        None if peak is None else f"KV peak {format_bytes(peak)}",
        None if remote is None else f"{remote.requests:,} requests",
        None if link is None else f"link emulated at {format_bytes(link)}/s",
        None if sparse is None else sparse.line(),
    ]
    return " | ".join(part for part in parts if part)


def _write_files(files: Mapping[str, Path], solution: Solution, timeline: Timeline | None) -> None:
    """Write the timeline, pages and pictures of a search. files: paths by option name."""
    for name, file in files.items():
        if name == "trace" and timeline is not None:
            from beamwright.engine.timeline import write_trace

            write_trace(timeline, file, _title(solution))
        elif name == "tree":
            write_page(file, solution)
        elif name == "record-tree":
            from beamwright.tree.recording import write_tree_record

            write_tree_record(solution.tree, file)
        elif name == "picture":
            write_picture(solution, file)


def _title(solution: Solution) -> str:
    return solution.tree.root.problem_text or "synthetic prompt"


def write_page(file: Path, solution: Solution) -> None:
    """Write the HTML page of a solution's tree. Raises InputError if it cannot be written."""
    from beamwright.page.runs import write_tree_page

    write_tree_page(solution.tree, solution.tree.node(solution.lineage), file, _title(solution))
