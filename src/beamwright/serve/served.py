"""Everything that a server has: the API and, beside it, the live page, its feed and metrics."""

from __future__ import annotations

from fastapi import FastAPI

from beamwright.serve.app import make_app
from beamwright.serve.desk import Desk, about
from beamwright.serve.feed import Feed
from beamwright.serve.feed_routes import feed_routes, page_routes
from beamwright.serve.metrics import Metrics
from beamwright.serve.places import kv_place


def make_served(desk: Desk) -> FastAPI:
    """The application without its guard."""
    feed = Feed(lambda job: about(job, desk.models.search), places=kv_place)
    metrics = Metrics(desk)
    desk.listeners += [feed, metrics]
    routers = (feed_routes(feed, desk, metrics.gauges), page_routes(), metrics.routes())
    return make_app(desk, *routers)
