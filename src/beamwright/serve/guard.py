"""Guard: what is refused before any route sees it. A plain ASGI application around another one.

Hosts and origins are checked so that a page of somebody else's cannot drive a server on this
machine; there is no CORS, and a POST has to say that it is JSON, which no form can.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beamwright.serve.ascii_json import refusal
from beamwright.serve.errors import ApiError, log
from beamwright.serve.limits import ServerLimits
from beamwright.serve.logs import REQUEST

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True)
class Doors:
    """Who is let in. hosts: names that a request may use, None: any. keys: digests; empty: no key
    is needed. open_paths: for anybody, and what is below them if they end with a slash."""

    hosts: frozenset[str] | None
    keys: tuple[bytes, ...]
    open_paths: tuple[str, ...] = ("/", "/health", "/page/")

    @classmethod
    def of(cls, hosts: Collection[str] | None, keys: Sequence[str]) -> Doors:
        """Keys are kept as digests only."""
        allowed = None if hosts is None else frozenset(host.lower() for host in hosts)
        return cls(allowed, tuple(_digest(key.encode()) for key in keys))

    def knows(self, authorization: str) -> bool:
        """Takes as long for every key, right or wrong."""
        scheme, _, key = authorization.partition(" ")
        given, found = _digest(key.strip().encode("latin-1")), False  # as headers are read
        for each in self.keys:
            found |= hmac.compare_digest(given, each)
        return found and scheme.lower() == "bearer"

    def is_open(self, path: str) -> bool:
        """True if no key is needed."""
        return not self.keys or any(
            path == each or (each != "/" and each.endswith("/") and path.startswith(each))
            for each in self.open_paths
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """Checks a request, gives it an id, and logs how it ended: its path, never its text."""

    def __init__(self, app: ASGIApp, doors: Doors, limits: ServerLimits) -> None:
        self._app, self._doors, self._limits = app, doors, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        given = headers.get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        REQUEST.set(number)
        began_s, status, whole = time.monotonic(), 0, False

        async def sent(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(b"x-request-id", number.encode()), *_HEADERS]
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        size = 0

        async def received() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limits.body_bytes:  # without a length, or beyond it
                raise too_large(self._limits)
            return message

        try:
            self._check(scope, headers)
            await self._app(scope, received, sent)
        except ApiError as error:
            await refusal(error)(scope, receive, sent)
        except Exception:
            # It has been logged and answered; a server that hears of it cuts the connection.
            if not whole:
                raise
        log.info(
            "request %s",
            number,
            extra={
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - began_s, 3),
            },
        )

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises ApiError."""
        doors, host = self._doors, _host(headers.get("host", ""))
        if doors.hosts is not None and host not in doors.hosts:
            raise ApiError(421, f"this server is not {host[:100]!r} (--allow-host)")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host"):
            raise ApiError(403, "requests of other origins are refused")
        if not doors.is_open(scope["path"]) and not doors.knows(headers.get("authorization", "")):
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "the content type has to be application/json")
            length = headers.get("content-length", "0")
            if length.isdigit() and int(length) > self._limits.body_bytes:
                raise too_large(self._limits)


def too_large(limits: ServerLimits) -> ApiError:
    """A body that nobody reads to its end."""
    return ApiError(413, f"the body is larger than {limits.body_bytes:,} bytes")


def _host(header: str) -> str:
    """Without the port: `[::1]:8000` is `::1`."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
