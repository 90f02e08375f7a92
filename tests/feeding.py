"""The feed and the page without the server: a desk that only searches, and their application."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from beamwright.errors import BeamwrightError
from beamwright.serve.body import ServerLimits
from beamwright.serve.errors import ApiError
from beamwright.serve.feed import Feed
from beamwright.serve.feed_routes import feed_routes, page_routes


@dataclass
class Job:
    """A search that was asked for."""

    id: str
    problem: str
    options: dict
    owner: str | None = None
    cancelled: bool = False
    handle: object = None

    def cancel(self):
        self.cancelled = True
        if self.handle is not None:
            self.handle.cancel()


def about(job):
    known = {name: job.options.get(name) for name in ("method", "n", "width", "seed")}
    return {"problem": job.problem, "model": "bundled", **known}


@dataclass
class SearchDesk:
    """Hands problems to a solver as `serve` does, and tells the feed."""

    solver: object
    feed: Feed
    limits: ServerLimits = field(default_factory=ServerLimits)
    numbers: itertools.count = field(default_factory=itertools.count)
    threads: list = field(default_factory=list)

    async def begin_search(self, problem, options, owner=None):
        job = Job(f"search-{next(self.numbers)}", problem, options, owner)
        self.feed.begun(job)
        given = {"search" if name == "method" else name: value for name, value in options.items()}
        given["max_rounds"] = given.pop("rounds", 8)
        job.handle = self.solver.submit(
            problem,
            problem_id=job.id,
            on_round=lambda report: self.feed.round(job, report),
            **given,
        )
        self.threads.append(threading.Thread(target=self._wait, args=(job,)))
        self.threads[-1].start()
        return job

    def _wait(self, job):
        try:
            outcome = job.handle.result()
        except BeamwrightError as error:
            outcome = error
        self.feed.ended(job, outcome)


def make_app(feed, desk=None, key=None, gauges=tuple):
    """The page and its feed; with a key the feed wants it, and the page's files do not."""
    app = FastAPI(docs_url=None)
    app.include_router(feed_routes(feed, desk, gauges))
    app.include_router(page_routes())

    @app.exception_handler(ApiError)
    def refused(request, error):
        return JSONResponse(error.body, error.status)

    @app.middleware("http")
    async def guard(request, call_next):
        wanted = None if key is None else f"Bearer {key}"
        given = request.headers.get("authorization")
        if wanted and request.url.path.startswith("/feed") and given != wanted:
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        return await call_next(request)

    return app
