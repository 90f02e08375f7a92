"""The application: OpenAI's routes, and what they say of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import beamwright
from beamwright.serve.api import Api
from beamwright.serve.ascii_json import AsciiJSON, refusal
from beamwright.serve.desk import Desk
from beamwright.serve.engine import health, takes_searches
from beamwright.serve.errors import ApiError, api_error, log
from beamwright.serve.fields import NEUTRAL, ChatFields, CompletionFields, Fields
from beamwright.serve.responses import Responses


def make_app(desk: Desk, *routers: APIRouter) -> FastAPI:
    """The application without its guard. routers: of what is served beside it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        yield
        await desk.drain()

    app = FastAPI(
        title="Beamwright",
        version=beamwright.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    api = Api(desk)
    _add_routes(app, api)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(Exception, _failed)
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    responses = Responses(api)
    posts: dict[str, tuple[Callable[[Request], Awaitable[Response]], type[Fields]]] = {
        "/v1/chat/completions": (api.chat, ChatFields),
        "/v1/completions": (api.completions, CompletionFields),
        "/v1/responses": (responses.respond, responses.fields),
    }
    for path, (handler, fields) in posts.items():
        # Bodies are read by hand, for their limits; what they hold is declared all the same.
        schema = _schema(fields, api.desk.models.ids())
        declared = {"required": True, "content": {"application/json": {"schema": schema}}}
        app.add_api_route(
            path, handler, methods=["POST"], openapi_extra={"requestBody": declared},
            response_model=None, name=path,
        )  # fmt: skip

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return api.models()

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        return api.model(name)

    @app.get("/health")
    def alive() -> dict[str, Any]:
        return health(api.desk.solver)

    @app.get("/ready")
    def ready() -> AsciiJSON:
        status = "draining" if api.desk.draining else "ready"
        if status == "ready" and not takes_searches(api.desk.solver):
            status = "no replica"
        state = {"status": status, "searches": len(api.desk.jobs)}
        return AsciiJSON(state, status_code=200 if status == "ready" else 503)


def _schema(fields: type[Fields], models: Sequence[str]) -> dict[str, Any]:
    """Of a body: what `parsed` takes, and the names that there are."""
    found = _whole(fields.model_json_schema())
    found["properties"]["model"]["enum"] = list(models)
    found["properties"].update({name: {} for name in NEUTRAL})
    return {**found, "additionalProperties": False}


# Behind a validator of one's own pydantic leaves them as they are.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}


def _whole(schema: Any, named: Mapping[str, Any] | None = None) -> Any:
    """A schema with what it refers to in its places: where it goes it cannot have `$defs`."""
    match schema:
        case {"$ref": str(path)} if named is not None:
            return _whole(named[path.rpartition("/")[2]], named)
        case dict():
            named = schema.get("$defs", {}) if named is None else named
            return {
                _BOUNDS.get(key, key): _whole(value, named)
                for key, value in schema.items()
                if key != "$defs"
            }
        case list():
            return [_whole(each, named) for each in schema]
    return schema


# --- errors ----------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    del request
    return refusal(api_error(error))


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "method not allowed" if error.status_code == 405 else str(error.detail).lower()
    return refusal(ApiError(error.status_code, f"{request.method} {request.url.path}: {what}"))


async def _not_valid(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return refusal(ApiError(400, f"{param}: {first['msg']}", param))


async def _failed(request: Request, error: Exception) -> Response:
    log.error("internal error", exc_info=error)
    return await _refused(request, error)
