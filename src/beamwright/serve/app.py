"""The FastAPI application: OpenAI's routes, the live page with its feed, metrics and health."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import beamwright
from beamwright import serve
from beamwright.engine.row import OWNER, GeneratorState
from beamwright.registry import import_modules
from beamwright.serve.body import NEUTRAL, ApiError, AsciiJSON, api_error, log
from beamwright.serve.endpoint import ENDPOINTS, Endpoint
from beamwright.serve.feed import Feed, feed_routes, page_routes
from beamwright.serve.metrics import Metrics, health
from beamwright.serve.queue import RequestQueue
from beamwright.tree import Node


def make_app(queue: RequestQueue) -> FastAPI:
    """Build the application; a `Guard` has to wrap it to check requests."""

    version = beamwright.__version__
    # FastAPI's own documentation page loads scripts from other hosts, so `page_routes` serves
    # another one.
    app = FastAPI(title="Beamwright", version=version, docs_url=None, redoc_url=None)
    import_modules(serve.__name__, serve.__path__)  # every module may declare endpoints
    for endpoint in sorted(ENDPOINTS, key=lambda each: each.path):
        _add_endpoint(app, queue, endpoint)
    _add_states(app, queue)
    feed, counted = Feed(places=kv_place), Metrics(queue)
    queue.listeners += [feed, counted]
    for routes in (feed_routes(feed, queue, counted.gauges), page_routes()):
        app.include_router(routes)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(counted.text(), media_type=CONTENT_TYPE_LATEST)

    for kind in (ApiError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)
    return app


def kv_place(node: Node) -> str | None:
    """Return where a step's KV is: `device`, `host` or `both`; None if the step has no KV.

    Only the solver's thread, which moves the KV, may call this.
    """
    state: GeneratorState | None = node.handles.get(OWNER)
    return None if state is None else state.place


def _add_endpoint(app: FastAPI, queue: RequestQueue, endpoint: type[Endpoint]) -> None:
    # Endpoints read bodies themselves to enforce limits, so FastAPI does not know their pydantic
    # model. Declare the model's schema here, for the OpenAPI document.
    place = endpoint.path.replace("/", "~1")
    place = f"#/paths/{place}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    schema = endpoint.takes.model_json_schema(ref_template=place)
    schema["properties"]["model"]["enum"] = queue.reader.models()
    for name, neutral in NEUTRAL.items():
        known = {"enum": [None, *neutral]} if isinstance(neutral, tuple) else {}
        schema["properties"].setdefault(name, known)
    content = {"application/json": {"schema": {**schema, "additionalProperties": False}}}
    body = {"requestBody": {"required": True, "content": content}}

    @app.post(endpoint.path, description=endpoint.__doc__ or "", openapi_extra=body)
    async def respond(request: Request) -> Response:
        return await endpoint(queue).respond(request)


def _add_states(app: FastAPI, queue: RequestQueue) -> None:
    def facts(name: str) -> dict[str, Any]:
        about = {"object": "model", "created": int(queue.started_s), "owned_by": "beamwright"}
        return {"id": name, **about, "max_model_len": queue.solver.context}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """List the model names that requests may use; each stands for one way to search."""
        return {"object": "list", "data": [facts(name) for name in queue.reader.models()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        """Describe one model name."""
        queue.reader.options(name)
        return facts(name)

    @app.get("/health")
    def state() -> dict[str, Any]:
        """Report that the server is alive, and its status."""
        return health(queue)

    @app.get("/ready")
    def ready() -> AsciiJSON:
        """Report whether the server can take searches; 503 if not."""
        found = health(queue)
        if queue.draining or found.get("replicas") == [] or "generator" in found:
            return AsciiJSON(found, status_code=503)
        return AsciiJSON({**found, "status": "ready"})


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
