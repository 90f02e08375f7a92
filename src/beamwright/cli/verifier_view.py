"""How a verifier reads a sample, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from beamwright.cli.output import add_row, plain


def print_verifier(report: Mapping[str, Any]) -> None:
    """Print what `verify.show` found: the format, every token, and every step's score."""
    console = Console()
    console.print(_format(report))
    console.print(_tokens(report))
    console.print(_steps(report))
    moved = [str(step["step"]) for step in report["steps"] if not step["same_tokens"]]
    if moved:
        console.print(
            f"Step {', '.join(moved)}: read in the path that ends with it, whose last tokens are "
            "others than in the whole path above."
        )
    if report["no_scores"] is not None:
        console.print(plain(f"No scores: {report['no_scores']}"))


def _format(report: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    for name in ("verifier", "folder", "format"):
        add_row(table, name, str(report[name]))
    for name, value in report["head"].items():
        shown = f"{value['text']!r} (token {value['id']})" if isinstance(value, dict) else value
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else shown
        add_row(table, "head" if name == "kind" else f"head: {name}", str(shown))
    of_tokens = f"{report['combine']} of the tokens that are read"
    add_row(table, "activation", report["activation"])
    add_row(table, "scored", report["scores"].replace("_", " "))
    add_row(table, "read at", report["read"].replace("_", " "))
    add_row(table, "score of a step", of_tokens)
    add_row(table, "score of a path", f"{report['aggregate']} of its steps")
    return table


def _tokens(report: Mapping[str, Any]) -> Table:
    table = Table("position", "token", "text", "part", "read for")
    for token in report["tokens"]:
        step = token["step_read"]
        add_row(
            table,
            str(token["position"]),
            str(token["id"]),
            repr(token["text"]),
            " + ".join(token["parts"]),
            "" if step is None else f"step {step}",
        )
    return table


def _steps(report: Mapping[str, Any]) -> Table:
    table = Table("step", "text", "read at", "tokens there", "score")
    for step in report["steps"]:
        add_row(
            table,
            str(step["step"]),
            repr(step["text"]),
            _ends([str(at) for at in step["read_at"]]),
            _ends([repr(token["text"]) for token in step["read"]]),
            _score(step["score"]),
        )
    add_row(table, "path", "", "", "", _score(report["score"]))
    return table


def _ends(items: list[str]) -> str:
    """All of a few, the first and the last of many."""
    if not items:
        return "nowhere"
    return ", ".join(items) if len(items) <= 2 else f"{items[0]} ... {items[-1]} ({len(items)})"


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:.3g}"
