"""`beamwright report`: folders of `eval --out` as one page and its charts as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from beamwright.cli.options import DEBUG, JSON, option
from beamwright.cli.output import complain, guard, one_line, print_json
from beamwright.errors import InputError
from beamwright.evaluate.report import find_runs, write_report
from beamwright.io import check_writable

_DirsArgument = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Folders of `eval --out`, or above them.")
]
_OutOption = Annotated[
    Path | None, option("--out", "The page (default: report.html in the first DIR).", "FILE")
]
_TitleOption = Annotated[str, option("--title", "Title of the page.", "TEXT")]
_PngOption = Annotated[bool, option("--png/--no-png", "Also write a PNG per chart.")]


def report(
    folders: _DirsArgument,
    out: _OutOption = None,
    title: _TitleOption = "Evaluation",
    png: _PngOption = True,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Make one page of evaluations: accuracy against n, tokens, seconds and KV."""
    with guard(debug):
        for folder in folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: no such folder")
        page = folders[0] / "report.html" if out is None else out
        check_writable(page)
        runs = [run for folder in folders for run in find_runs(folder)]
        pngs, missing = write_report(runs, page, title, png=png)
        if missing is not None:  # the page has its tables without them
            complain(missing)
        if as_json:
            print_json(
                {
                    "page": str(page),
                    "png": [str(file) for file in pngs],
                    "runs": [{"name": run.name, **run.summary} for run in runs],
                }
            )
        else:
            for file in (page, *pngs):
                typer.echo(one_line(str(file)))
