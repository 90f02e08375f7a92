"""The answer of `solve`, for people and for programs, and one line of what it took."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from beamwright.cli.guard import complain
from beamwright.cli.output import format_bytes, one_line, print_json, printable
from beamwright.errors import BeamwrightError

if TYPE_CHECKING:
    from beamwright.solver.solution import Solution


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
