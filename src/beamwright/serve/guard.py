"""Guard: what is refused before any route sees it. A plain ASGI application around another one.

Hosts and origins are checked so that a page of somebody else's cannot drive a server on this
machine (addresses are let in, which Starlette's middleware cannot say); there is no CORS, and a
POST has to say that it is JSON, which no form can. It logs how requests ended: ids, paths, statuses
and seconds, never a key or a prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beamwright.serve.body import ServerLimits
from beamwright.serve.errors import ApiError, log

_REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Id of the request that a task, and whatever it begins, is for: in every line that it logs."""

_LOGGED = ("method", "path", "status", "seconds")
_SMALL_BYTES = 64 * 1024
"""Of a body that others' large ones never keep out; ServerLimits.bodies_bytes bounds the rest."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_OPEN = ("/", "/docs", "/health", "/ready")
"""For anybody, as is what is below /page/."""

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def owner_of(request: Request) -> str | None:
    """Whose key a request came with, as a digest; None where there are no keys."""
    owner: str | None = getattr(request.state, "owner", None)
    return owner


class Guard:
    """Checks a request, gives it an id, bounds its body, and logs how it ended.

    hosts: names that a request may use, beside addresses, which are no name that somebody's DNS
    could point here. keys: kept as digests only; empty: no key is needed.
    """

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, hosts: Collection[str], keys: Sequence[str] = ()
    ) -> None:
        self._app, self._limits = app, limits
        self._hosts = {host.lower() for host in hosts}
        self._keys = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
        self._bodies_bytes = 0  # of large bodies, see `_SMALL_BYTES`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        _REQUEST.set(number)
        began_s, status, whole = time.monotonic(), 0, False
        size = large = 0

        async def sent(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(b"x-request-id", number.encode()), *_HEADERS]
                if _has_two_lengths(headers):  # what is behind it may be of somebody else
                    named.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        async def received() -> Message:
            nonlocal size, large
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limits.body_bytes:  # without a length, or beyond it
                raise self._limits.too_large
            before, large = large, max(0, size - _SMALL_BYTES)
            self._bodies_bytes += large - before
            if self._bodies_bytes > self._limits.bodies_bytes:
                raise ApiError(503, "too many large bodies at a time", retry_after_s=5)
            return message

        try:
            scope.setdefault("state", {})["owner"] = self._check(scope, headers)
            await self._app(scope, received, sent)
        except ApiError as error:
            await error.response(scope, receive, sent)
        except Exception:
            # It has been logged and answered; a server that hears of it cuts the connection.
            if not whole:
                raise
        finally:
            self._bodies_bytes -= large
        seconds = round(time.monotonic() - began_s, 3)
        logged = (scope["method"], scope["path"], status, seconds)
        log.info("request %s", number, extra=dict(zip(_LOGGED, logged, strict=True)))

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> str | None:
        """Whose request it is (`owner`). Raises ApiError."""
        if _has_two_lengths(headers):
            raise ApiError(400, "content-length beside transfer-encoding")
        host, origin = headers.get("host", "").strip().lower(), headers.get("origin")
        is_v6 = host.startswith("[")  # without the port: `[::1]:8000` is `::1`
        host = host[1:].partition("]")[0] if is_v6 else host.partition(":")[0]
        if host not in self._hosts and not _is_address(host):
            raise ApiError(421, f"this server is not {host[:100]!r} (--allow-host)")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host"):
            raise ApiError(403, "requests of other origins are refused")
        owner, path = self.owner(headers.get("authorization", "")), scope["path"]
        is_open = path in _OPEN or path.startswith("/page/")
        if self._keys and owner is None and not is_open:
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "the content type has to be application/json")
            length = headers.get("content-length", "0")
            if length.isdigit() and int(length) > self._limits.body_bytes:
                raise self._limits.too_large
        return owner

    def owner(self, authorization: str) -> str | None:
        """Who has this key: its digest; None for a wrong one. Takes as long for every key."""
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()  # as headers are read
        known = False
        for digest in self._keys:
            known |= hmac.compare_digest(given, digest)
        return given.hex() if known and scheme.lower() == "bearer" else None


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _has_two_lengths(headers: Mapping[str, str]) -> bool:
    """Whoever stands between may have gone by the other one."""
    return "transfer-encoding" in headers and "content-length" in headers


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII, so that no text can break a line or a terminal."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if _REQUEST.get() is not None:
            line["request"] = _REQUEST.get()
        line |= {name: getattr(record, name) for name in _LOGGED if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
