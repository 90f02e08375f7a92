"""The feed and the page without the server: an application of them, and jobs that only say so."""

from dataclasses import dataclass
from types import SimpleNamespace

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from beamwright.serve.body import ApiError, ServerLimits
from beamwright.serve.feed import feed_routes, page_routes

ASKS = SimpleNamespace(limits=ServerLimits())
"""A queue of which the page believes that it may ask it."""


@dataclass
class Job:
    """A search that was asked for."""

    id: str
    problem: str
    options: dict
    owner: str | None = None
    cancelled: bool = False

    def cancel(self):
        self.cancelled = True

    @property
    def about(self):
        known = {name: self.options.get(name) for name in ("method", "n", "width", "seed")}
        return {"problem": self.problem, "model": "bundled", **known}


def make_app(feed, queue=None, key=None, gauges=tuple):
    """The page and its feed; with a key the feed wants it, and the page's files do not."""
    app = FastAPI(docs_url=None)
    app.include_router(feed_routes(feed, queue, gauges))
    app.include_router(page_routes())

    @app.exception_handler(ApiError)
    def refused(request, error):
        return error.response

    @app.middleware("http")
    async def guard(request, call_next):
        wanted = None if key is None else f"Bearer {key}"
        given = request.headers.get("authorization")
        if wanted and request.url.path.startswith("/feed") and given != wanted:
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        return await call_next(request)

    return app
