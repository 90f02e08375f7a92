"""`beamwright report` and `beamwright view`: web pages from the files of other commands.

`report` writes one page about evaluations, and each chart as a PNG file. `view` shows saved
searches on the page on which `serve` shows running searches.
"""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from beamwright.cli.options import DEBUG, JSON, option
from beamwright.cli.output import exit_on_error, needs_extra, one_line, print_error_line, print_json
from beamwright.errors import InputError
from beamwright.io import check_writable

if TYPE_CHECKING:
    from beamwright.page.runs import Event

_HOST = "127.0.0.1"


def report(
    folders: list[Path] = typer.Argument(
        ..., metavar="DIR...", help="Folders of `eval --out`, or parents of such folders."
    ),
    out: Path | None = option(
        None, "File of the page (default: report.html in the first DIR).", "FILE"
    ),
    title: str = option("Evaluation", "Title of the page.", "TEXT"),
    png: bool = option(True, "Also write each chart as a PNG file."),
    as_json: bool = JSON,
    debug: bool = DEBUG,
) -> None:
    """Write one page about evaluations: accuracy against n, tokens, seconds and KV memory."""
    with exit_on_error(debug):
        from beamwright.evaluate.report import find_runs, write_report

        for folder in folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: no such folder")
        page = folders[0] / "report.html" if out is None else out
        check_writable(page)
        runs = [run for folder in folders for run in find_runs(folder)]
        pngs, missing = write_report(runs, page, title, png=png)
        if missing is not None:  # a package is missing for PNG files; the page is complete
            print_error_line(missing)
        if as_json:
            named = [{"name": run.name, **run.summary} for run in runs]
            print_json({"page": str(page), "png": [*map(str, pngs)], "runs": named})
        else:
            for file in (page, *pngs):
                typer.echo(one_line(str(file)))


def view(
    paths: list[Path] = typer.Argument(
        ...,
        metavar="RUN...",
        help="A search exported by the page, a checkpoint, a page (--tree), or a folder of "
        "`eval --out --trees`.",
    ),
    port: int = option(0, "Port on this machine; 0: any free port.", "N", min=0, max=65535),
    browser: bool = option(True, "Open the page in the browser."),
    as_json: bool = JSON,
    debug: bool = DEBUG,
) -> None:
    """Open saved searches in the browser: replay, compare, export."""
    with exit_on_error(debug):
        with needs_extra("view"):
            from fastapi import FastAPI
            from starlette.middleware.trustedhost import TrustedHostMiddleware

            from beamwright.page.runs import read_runs, with_unique_ids
            from beamwright.serve.feed import Feed, feed_routes, page_routes
            from beamwright.serve.server import bind, run_app
        runs = with_unique_ids([run for path in paths for run in read_runs(path)])
        feed = Feed(most=float("inf"), most_bytes=float("inf"))
        for run in reversed(runs):  # the page lists runs in reverse order of adding
            feed.add(run)
        app = FastAPI(openapi_url=None)
        app.include_router(feed_routes(feed, None))
        app.include_router(page_routes())
        # Refuse host names other than localhost: a foreign DNS entry could point to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
        with bind(_HOST, port) as listener:
            address = f"http://{_HOST}:{listener.getsockname()[1]}/"
            if as_json:
                print_json({"address": address, "runs": [_shown(run) for run in runs]})
            else:
                typer.echo(address)
                print_error_line(f"showing {len(runs)} saved searches. Stop with Ctrl-C.")
            if browser and not as_json:
                webbrowser.open(address)
            run_app(app, listener, "error")


def _shown(run: Sequence[Event]) -> dict[str, Any]:
    first, last = run[0], run[-1]
    assert first["event"] == "begin"
    assert last["event"] == "end"
    return {"id": first["id"], "problem": first["problem"], "answer": last["answer"]}
