"""The feed and the page without the server: an application of them, and jobs that only say so."""

from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from beamwright.serve.feed import feed_routes, page_routes


@dataclass
class Job:
    """A search that was asked for."""

    id: str
    problem: str
    options: dict
    owner: str | None = None

    @property
    def about(self):
        known = {name: self.options.get(name) for name in ("method", "n", "width", "seed")}
        return {"problem": self.problem, "model": "bundled", **known}


def make_app(feed, key=None):
    """The page and its feed; with a key the feed wants it, and the page's files do not."""
    app = FastAPI(docs_url=None)
    app.include_router(feed_routes(feed, None, tuple))
    app.include_router(page_routes())

    @app.middleware("http")
    async def guard(request, call_next):
        wanted = None if key is None else f"Bearer {key}"
        given = request.headers.get("authorization")
        if wanted and request.url.path.startswith("/feed") and given != wanted:
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        return await call_next(request)

    return app
