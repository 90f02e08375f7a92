"""`beamwright report`: folders of `eval --out` as one page and its charts as PNG files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from beamwright.cli.options import DEBUG, JSON, option
from beamwright.cli.output import complain, guard, one_line, print_json
from beamwright.cli.views import tree_page
from beamwright.errors import InputError
from beamwright.evaluate import summarise
from beamwright.evaluate.charts import EvaluatedRun, TreeLink
from beamwright.evaluate.report import write_report
from beamwright.evaluate.results import FinishedRun, find_runs
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
        runs = [run for folder in folders for run in _runs_in(folder, page)]
        written = write_report(runs, page, title, png=png)
        if written.missing is not None:  # the page has its tables without them
            complain(written.missing)
        if as_json:
            print_json(
                {
                    "page": str(page),
                    "png": [str(file) for file in written.pngs],
                    "runs": [{"name": run.name, **run.summary} for run in runs],
                }
            )
        else:
            for file in (page, *written.pngs):
                typer.echo(one_line(str(file)))


def _runs_in(folder: Path, page: Path) -> Iterator[EvaluatedRun]:
    for found in find_runs(folder):
        inner = found.folder.relative_to(folder)
        name = folder.resolve().name if inner == Path() else str(inner)
        yield EvaluatedRun(
            name=name,
            dataset=found.dataset,
            settings=found.settings,
            summary=summarise(found.records, found.settings["search"]["n"]),
            trees=tuple(_trees(found, page)),
        )


def _trees(run: FinishedRun, page: Path) -> Iterator[TreeLink]:
    for record in run.records:
        file = tree_page(run.folder / "trees", record.index)
        if file.is_file():
            address = Path(os.path.relpath(file.resolve(), page.resolve().parent)).as_posix()
            yield TreeLink(record.problem, record.index, address, record.answer, record.correct)
