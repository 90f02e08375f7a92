"""The server: an OpenAI-compatible API over one solver, a live page of its trees, metrics.

A request becomes an `Ask`, a `Desk` has it searched beside the others, and what is final of its
tree goes out while the rest is being decided (`final`). Needs the extra `serve`.
"""

from fastapi import FastAPI

from beamwright.serve.app import make_app
from beamwright.serve.desk import Desk, Job, Listener, about
from beamwright.serve.errors import ApiError
from beamwright.serve.feed import Feed
from beamwright.serve.feed_routes import feed_routes, page_routes
from beamwright.serve.guard import Doors, Guard
from beamwright.serve.limits import ServerLimits
from beamwright.serve.logs import JsonLines
from beamwright.serve.metrics import Metrics
from beamwright.serve.run import bind, run


def make_served(desk: Desk) -> FastAPI:
    """Everything that a server has."""
    feed = Feed(lambda job: about(job, desk.models.search))
    metrics = Metrics(desk)
    desk.listeners += [feed, metrics]
    routers = (feed_routes(feed, desk, metrics.gauges), page_routes(), metrics.routes())
    return make_app(desk, *routers)


__all__ = [
    "ApiError",
    "Desk",
    "Doors",
    "Guard",
    "Job",
    "JsonLines",
    "Listener",
    "ServerLimits",
    "bind",
    "make_app",
    "make_served",
    "run",
]
