"""The application: OpenAI's routes and, beside them, the live page, its feed and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import beamwright
from beamwright.engine.row import OWNER, GeneratorState
from beamwright.serve.body import NEUTRAL
from beamwright.serve.chat import ChatEndpoint
from beamwright.serve.completions import CompletionsEndpoint
from beamwright.serve.endpoint import Endpoint
from beamwright.serve.errors import ApiError, AsciiJSON, api_error, log
from beamwright.serve.feed import Feed
from beamwright.serve.feed_routes import feed_routes, page_routes
from beamwright.serve.metrics import Metrics, health, readiness
from beamwright.serve.queue import RequestQueue
from beamwright.serve.responses import ResponsesEndpoint
from beamwright.tree import Node

ENDPOINTS: tuple[type[Endpoint[Any]], ...] = (
    ChatEndpoint,
    CompletionsEndpoint,
    ResponsesEndpoint,
)


def make_app(queue: RequestQueue) -> FastAPI:
    """The application without its guard."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await queue.drain()

    app = FastAPI(
        title="Beamwright",
        version=beamwright.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    for endpoint in ENDPOINTS:
        _add_endpoint(app, endpoint(queue))
    _add_states(app, queue)
    feed = Feed(lambda job: job.about(queue.models.search), places=kv_place)
    metrics = Metrics(queue)
    queue.listeners += [feed, metrics]
    for routes in (feed_routes(feed, queue, metrics.gauges), page_routes(), metrics.routes()):
        app.include_router(routes)
    for kind in (ApiError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)
    return app


def kv_place(node: Node) -> str | None:
    """Where a step's KV is: `device`, `host` or `both`; None for one without. In the thread that
    moves it."""
    state: GeneratorState | None = node.handles.get(OWNER)
    return None if state is None else state.place


def _add_endpoint(app: FastAPI, endpoint: Endpoint[Any]) -> None:
    # Bodies are read by hand, for their limits; what they hold is declared all the same.
    schema = _inlined(endpoint.fields.model_json_schema())
    schema["properties"]["model"]["enum"] = endpoint.queue.models.ids()
    schema["properties"].update({name: {} for name in NEUTRAL})
    schema["additionalProperties"] = False
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(
        endpoint.path, endpoint.respond, methods=["POST"], openapi_extra={"requestBody": body},
        response_model=None, name=endpoint.path,
    )  # fmt: skip


# Behind a validator of one's own pydantic leaves them as they are.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}


def _inlined(schema: Any, definitions: Mapping[str, Any] | None = None) -> Any:
    """A schema with what it refers to in its places: where it goes it cannot have `$defs`."""
    match schema:
        case {"$ref": str(path)} if definitions is not None:
            return _inlined(definitions[path.rpartition("/")[2]], definitions)
        case dict():
            definitions = schema.get("$defs", {}) if definitions is None else definitions
            return {
                _BOUNDS.get(key, key): _inlined(value, definitions)
                for key, value in schema.items()
                if key != "$defs"
            }
        case list():
            return [_inlined(item, definitions) for item in schema]
    return schema


def _add_states(app: FastAPI, queue: RequestQueue) -> None:
    def facts(name: str) -> dict[str, Any]:
        about = {"object": "model", "created": int(queue.started_s), "owned_by": "beamwright"}
        return {"id": name, **about, "max_model_len": queue.solver.context}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """Every name that a search has here."""
        return {"object": "list", "data": [facts(name) for name in queue.models.ids()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """One of them."""
        queue.models.options(name)
        return facts(name)

    @app.get("/health")
    def alive() -> dict[str, Any]:
        """That the server is alive."""
        return health(queue.solver)

    @app.get("/ready")
    def ready() -> AsciiJSON:
        """Whether it takes searches."""
        state = readiness(queue)
        return AsciiJSON(state, status_code=200 if state["status"] == "ready" else 503)


async def _refused(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException():
            what = str(error.detail).lower() if error.status_code != 405 else "method not allowed"
            said = f"{request.method} {request.url.path}: {what}"
            return ApiError(error.status_code, said).response
        case RequestValidationError():
            first = error.errors()[0]
            param = str(first["loc"][-1])
            return ApiError(400, f"{param}: {first['msg']}", param).response
        case ApiError():
            return error.response
    log.error("internal error", exc_info=error)
    return api_error(error).response
