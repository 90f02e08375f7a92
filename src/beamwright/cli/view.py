"""`beamwright view`: saved runs in the browser, with the page that `serve` shows live ones on."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beamwright.cli.options import DEBUG, JSON, option
from beamwright.cli.output import complain, guard, needs_serve, print_json
from beamwright.errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from beamwright.serve.events import Event

_HOST = "127.0.0.1"

_RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="What the page exported, a checkpoint, a page (--tree), or a folder of `eval --out` "
        "with --trees.",
    ),
]
_PortOption = Annotated[
    int, option("--port", "Port on this machine; 0 for any free one.", "N", min=0, max=65535)
]
_BrowserOption = Annotated[bool, option("--browser/--no-browser", "Open the browser.")]


def view(
    paths: _RunsArgument,
    port: _PortOption = 0,
    browser: _BrowserOption = True,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Open saved searches in the browser: replay, compare, export."""
    with guard(debug):
        with needs_serve("view"):
            import uvicorn

            from beamwright.serve.runs import read_runs, with_unique_ids

            runs = with_unique_ids([run for path in paths for run in read_runs(path)])
            app = make_app(runs)
        with _listen(port) as listener:
            address = f"http://{_HOST}:{listener.getsockname()[1]}/"
            if as_json:
                print_json({"address": address, "runs": [_shown(run) for run in runs]})
            else:
                typer.echo(address)
                complain(f"{len(runs)} saved searches; Ctrl-C ends")
            if browser and not as_json:
                webbrowser.open(address)
            config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False)
            config.timeout_graceful_shutdown = 1
            with suppress(KeyboardInterrupt):  # that is how it ends
                uvicorn.Server(config).run(sockets=[listener])


def make_app(runs: Sequence[list[Event]]) -> FastAPI:
    """The page over these runs, for browsers of this machine; nothing can be asked for."""
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from beamwright.serve.feed import Feed, feed_routes, page_routes

    feed = Feed(most=float("inf"), most_bytes=float("inf"))
    for run in reversed(runs):  # the newest is shown first
        feed.add(run)
    app = FastAPI(openapi_url=None)
    app.include_router(feed_routes(feed, None))
    app.include_router(page_routes())
    # A name that somebody else's DNS points here is not this machine's.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[_HOST, "localhost"])
    return app


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror or error}") from error


def _shown(run: Sequence[Event]) -> dict[str, Any]:
    first, last = run[0], run[-1]
    assert first["event"] == "begin"
    assert last["event"] == "end"
    return {"id": first["id"], "problem": first["problem"], "answer": last["answer"]}
