"""The server process: its listening socket, a guard against hostile clients, and its shutdown.

The guard is an ASGI application that wraps another one. It checks hosts and origins, so that a
foreign web page in the user's browser cannot control a server on this machine. It accepts every IP
address as a host, which Starlette's middleware cannot express. CORS is not enabled, and a POST must
have the content type JSON, which an HTML form cannot send. The guard logs each request's id, path,
status and seconds, never a key or a prompt. A server that shuts down still answers the searches
that run.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from beamwright.errors import InputError
from beamwright.serve.body import ApiError, ServerLimits, log

if TYPE_CHECKING:
    from beamwright.serve.queue import RequestQueue

# Id of the request that the current task handles. `JsonLines` adds the id to every log line.
_REQUEST: ContextVar[str | None] = ContextVar("request", default=None)

_LOGGED = ("method", "path", "status", "seconds")
# Number of bytes of each body that are always admitted. `ServerLimits.bodies_bytes` limits the sum
# of all other bytes of all bodies.
_SMALL_BYTES = 64 * 1024

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# URL paths that need no API key, apart from those below /page/.
_OPEN = ("/", "/docs", "/health", "/ready")

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def owner_of(request: Request) -> str | None:
    """Return the digest of the request's API key; None if the server has no keys."""
    owner: str | None = getattr(request.state, "owner", None)
    return owner


class Guard:
    """An ASGI application that checks each request, gives it an id, limits its body and logs it.

    hosts: host names that a request may use. IP addresses are always accepted, since a foreign DNS
        entry cannot imitate them (DNS rebinding).
    keys: the API keys, of which only digests are kept; if empty, no key is needed.
    """

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, hosts: Collection[str], keys: Sequence[str] = ()
    ) -> None:
        self._app, self._limits = app, limits
        self._hosts = {host.lower() for host in hosts}
        self._keys = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
        # Number of bytes of all bodies in memory, without the first `_SMALL_BYTES` of each.
        self._bodies_bytes = 0

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
                # If a body's length is ambiguous, bytes after it may belong to another client of
                # the same proxy, so close the connection.
                if _has_two_lengths(headers):
                    named.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        async def received() -> Message:
            nonlocal size, large
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limits.body_bytes:  # the header content-length was missing or wrong
                raise self._limits.too_large
            before, large = large, max(0, size - _SMALL_BYTES)
            self._bodies_bytes += large - before
            if self._bodies_bytes > self._limits.bodies_bytes:
                raise ApiError(503, "too many large bodies at a time; retry later", retry_after_s=5)
            return message

        try:
            scope.setdefault("state", {})["owner"] = self._check(scope, headers)
            await self._app(scope, received, sent)
        except ApiError as error:
            await error.response(scope, receive, sent)
        except Exception:
            # The application has logged and answered the error. Raise it again only if the response
            # is incomplete, because uvicorn then closes the connection.
            if not whole:
                raise
        finally:
            self._bodies_bytes -= large
        seconds = round(time.monotonic() - began_s, 3)
        logged = (scope["method"], scope["path"], status, seconds)
        log.info("request %s", number, extra=dict(zip(_LOGGED, logged, strict=True)))

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> str | None:
        """Return the owner of a request; raise ApiError if the request is not permitted."""
        if _has_two_lengths(headers):
            raise ApiError(400, "send either content-length or transfer-encoding, not both")
        host, origin = headers.get("host", "").strip().lower(), headers.get("origin")
        is_v6 = host.startswith("[")  # drop the port: `[::1]:8000` gives `::1`
        host = host[1:].partition("]")[0] if is_v6 else host.partition(":")[0]
        if host not in self._hosts and not _is_address(host):
            raise ApiError(
                421,
                f"the host {host[:100]!r} is not allowed; start the server with --allow-host HOST",
            )
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host"):
            raise ApiError(
                403, "requests from web pages of other origins are refused; call from a program"
            )
        owner, path = self.owner(headers.get("authorization", "")), scope["path"]
        is_open = path in _OPEN or path.startswith("/page/")
        if self._keys and owner is None and not is_open:
            raise ApiError(401, "a valid API key is required", code="invalid_api_key")
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "the content type must be application/json")
            length = headers.get("content-length", "0")
            if length.isdigit() and int(length) > self._limits.body_bytes:
                raise self._limits.too_large
        return owner

    def owner(self, authorization: str) -> str | None:
        """Return the digest of a known key, None for an unknown one.

        The comparison takes the same time for every key, so that timing reveals nothing.
        """
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()  # as ASGI decodes
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
    """Return True if a proxy may have read another body length than this server.

    Attackers use such requests for request smuggling.
    """
    return "transfer-encoding" in headers and "content-length" in headers


class JsonLines(logging.Formatter):
    """A log formatter that writes each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record in ASCII, so that no text can break the line or confuse a terminal."""
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


# --- the socket ------------------------------------------------------------------------------

# Maximum number of bytes read from a connection at once. The parser needs 60 us per HTTP chunk,
# which may be one byte, and all other requests wait until it has parsed what was read.
READ_BYTES = 16 * 1024

# Timeout for a request's head in seconds, counted from the connection or the head's first byte.
HEAD_S = 30.0

# Maximum number of open connections. A further connection replaces the one that has been idle for
# the longest time. If no connection is idle, the new one is closed.
MOST_CONNECTIONS = 512


class Connection(H11Protocol):
    """An HTTP connection with a timeout for the head of a request, which uvicorn does not have.

    The head is the request line with its headers.
    """

    _late: asyncio.TimerHandle | None = None
    _heard_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first head, and close a connection if there are too many."""
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS:
            others = [other for other in self.connections if isinstance(other, Connection)]
            idle = [other for other in others if other._is_idle]  # includes the new connection
            min(idle, key=lambda other: other._heard_s).transport.close()
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's default: 256 KiB
        self._late = self.loop.call_later(HEAD_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; stop a head's timeout at its end, and start it at the next head."""
        self._heard_s = self.loop.time()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._in_time()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout of a connection that has closed."""
        self._in_time()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        done = self.cycle is None or self.cycle.response_complete
        return done and not self.transport.is_closing()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """A uvicorn server that shuts down gracefully.

    After SIGTERM or Ctrl-C the server refuses new searches, and waits for running ones for a grace
    period. At its end, or at a second signal, these searches end with the best candidate so far.
    """

    def __init__(self, app: ASGIApp, queue: RequestQueue) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=10,
            h11_max_incomplete_event_size=65536,
        )
        super().__init__(config)
        self._queue = queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin the shutdown on a signal. Replaces uvicorn's handler; any thread may call this."""
        del sig, frame
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the shutdown is complete."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def _end(self) -> None:
        if self._draining is not None:
            self._queue.end_grace_period()
            return
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._queue.drain()
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket at `host` and `port`; port 0 takes any free port.

    Raises:
        InputError: if the address cannot be used.
    """
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    both = is_v6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--host {host} --port {port}: {reason}") from error


def run_app(app: ASGIApp, listening: socket.socket, log_level: str) -> None:
    """Serve an application that has no request queue to drain; Ctrl-C ends it at once."""
    config = uvicorn.Config(app, log_level=log_level, access_log=False)
    config.timeout_graceful_shutdown = 1
    with suppress(KeyboardInterrupt):  # Ctrl-C is the normal way to end this server
        uvicorn.Server(config).run(sockets=[listening])
