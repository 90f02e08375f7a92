"""ServerClient: an HTTP client for one OpenAI-compatible server.

The client follows proxies and redirects and reads compressed replies. Replies are limited in bytes
and seconds. Errors quote the server's message, with the API key and login removed.
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from httpx_sse import EventSource

from beamwright.errors import InputError

BROKEN = 500  # HTTP status that, after all retries, counts as caused by the request
# Timeout of connecting, and seconds to keep an idle connection: servers close it after five.
_CONNECT_S, _KEPT_S = 10.0, 2.0
_ERROR_BYTES, _ERROR_CHARS, _SHOWN = 64 << 10, 1000, 200
_JSON, _LOGIN = json.JSONDecoder(), re.compile(r"//[^/]*@")
# utf-8-sig skips a byte order mark before the first event.
_SSE = {"content-type": "text/event-stream; charset=utf-8-sig"}


class RequestRefused(Exception):
    """Error: the server refused the request, by its HTTP status or inside a reply.

    status: the HTTP status, or the code of the error inside a reply.
    text: the server's message.
    retry_after_s: seconds until a retry is allowed.
    """

    def __init__(self, status: int, text: str, retry_after_s: float = 0.0, how: str = "") -> None:
        super().__init__(f"{how or f'HTTP {status}'}: {text}")
        self.status, self.retry_after_s = status, retry_after_s


class ServerClient:
    """An HTTP client of the server at `url`, for use in one event loop.

    key, login: the API key and the user:password for the server; None or "" for none.
    last: the beginning of the last complete reply, for error messages.

    Raises:
        InputError: if the environment names a proxy that cannot be used.
    """

    def __init__(self, url: str, key: str | None, login: str) -> None:
        user, _, password = (unquote(part) for part in login.partition(":"))
        basic = b64encode(f"{user}:{password}".encode()).decode()
        hidden = (key, login and basic, password or user, login.partition(":")[2])
        self._secrets = re.compile("|".join(re.escape(each) for each in hidden if each) or "(?!)")
        self.last, proxy = "", _proxy_for(url)
        host, shown = urlsplit(url).hostname, _LOGIN.sub("//", proxy or "")
        way = f"proxy {shown} of the environment; NO_PROXY={host} bypasses it"
        self._hint = f" (through the {way})" if proxy else ""
        # Request uncompressed replies, because a compressed reply's size is unknown in advance.
        headers = {"Accept-Encoding": "identity"}
        try:
            limits = httpx.Limits(keepalive_expiry=_KEPT_S)
            transport = httpx.AsyncHTTPTransport(proxy=proxy, limits=limits)
        except (ImportError, ValueError) as error:  # the message names a missing package
            raise InputError(f"{way}: {self.printable_line(str(error))}") from error
        self.client = httpx.AsyncClient(
            base_url=f"{url}/",
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            auth=httpx.BasicAuth(user, password) if login else None,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # `stream` sets a reply's timeout
            transport=transport,
            follow_redirects=True,
        )

    def printable_line(self, said: str) -> str:
        """Return a server's text on one printable line, with the API key and login replaced."""
        shown = self._secrets.sub("(the key)", said)
        printable = "".join(char if char.isprintable() else " " for char in shown)
        return " ".join(printable.split())[:_ERROR_CHARS]

    def describe_error(self, error: BaseException) -> str:
        """Return an error's message on one line, with a hint if a proxy is in use."""
        return f"{self.printable_line(str(error)) or type(error).__name__}{self._hint}"

    async def fetch_json(
        self, method: str, path: str, most_s: float, most: int, body: Any = None
    ) -> Any:
        """Send a request, and return the complete JSON reply. Parameters as of `stream`.

        Raises what `stream` raises, and RequestRefused for an error inside the reply.
        """
        async with self.stream(method, path, most_s, most, body) as chunks:
            said = b"".join([chunk async for chunk in chunks])
        self.last = said[:_SHOWN].decode(errors="replace")
        return _raise_on_error(json.loads(said))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, most_s: float, most: int, body: Any = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request, and stream the bytes of the reply.

        most_s, most: limits on the whole reply, in seconds and in bytes.

        Raises:
            RequestRefused: if the server refuses the request.
            TimeoutError: if the reply takes longer than `most_s`.
            ValueError: if the reply is larger than `most`.
        """
        asked = self.client.stream(method, path, json=body)
        async with asyncio.timeout(most_s), asked as response:
            if response.request.method != method:  # some redirects turn POST into GET
                moved = response.history[0]
                where = (
                    f"the server redirects to {moved.headers['location']}; use that URL in --model"
                )
                raise RequestRefused(moved.status_code, where)
            if response.status_code != httpx.codes.OK:
                said = b""
                with suppress(ValueError, httpx.DecodingError):
                    async for chunk in _bounded(response, _ERROR_BYTES):
                        said += chunk
                after_s = _retry_after_s(response.headers.get("retry-after", ""))
                raise RequestRefused(response.status_code, said.decode(errors="replace"), after_s)
            yield _bounded(response, most)


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON objects of server-sent events; raises RequestRefused for an error event.

    An event may hold several JSON values, each on its own line. If a server replies with a single
    JSON value instead of events, this value is yielded.
    """
    heard = list[bytes]()  # bytes received after the last event

    async def noted() -> AsyncIterator[bytes]:
        async for chunk in chunks:
            heard.append(chunk)
            yield chunk

    response = httpx.Response(200, headers=_SSE, content=noted())
    async for event in EventSource(response).aiter_sse():
        rest = event.data.strip()
        if event.event == "error" and rest:
            raise RequestRefused(BROKEN, rest, how="an error in its reply")
        while rest:
            if rest.startswith("[DONE]"):
                return
            value, end = _JSON.raw_decode(rest)
            heard.clear()
            yield _raise_on_error(value)
            rest = rest[end:].lstrip()
    with suppress(ValueError):
        yield _raise_on_error(json.loads(b"".join(heard)))


def _raise_on_error(value: Any) -> Any:
    """Return a reply unchanged; raises RequestRefused for an error inside it, as some servers
    send with HTTP status 200."""
    if isinstance(value, dict):
        error = value if value.get("object") == "error" else value.get("error")
        choices = value.get("choices")
        of_choices = choices if isinstance(choices, list) else ()
        errors = (each.get("error") for each in of_choices if isinstance(each, dict))
        if error := error or next(filter(None, errors), None):
            code = str(error.get("code") if isinstance(error, dict) else "")
            status = int(code) if re.fullmatch("[45][0-9][0-9]", code) else BROKEN
            said = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
            raise RequestRefused(status, said, how="an error in its reply")
    return value


async def _bounded(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Yield a reply's decompressed bytes; raises ValueError for more than `most`."""
    encoding, size = response.headers.get("content-encoding", "identity"), 0
    if encoding.lower() not in ("identity", "gzip", "deflate"):
        raise httpx.DecodingError(f"the reply is in {encoding}, which was not requested")
    async for chunk in response.aiter_bytes():  # decompresses at most one socket read at once
        size += len(chunk)
        if size > most:
            raise ValueError(f"the reply has more than {most:,} bytes")
        yield chunk
    yield b"\n\n"  # end the last event, which a server may have left open


def _retry_after_s(said: str) -> float:
    """Return the seconds until a retry from a `Retry-After` header, which has seconds or a date."""
    with suppress(ValueError):
        return float(said)
    with suppress(ValueError, TypeError):
        return (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
    return 0.0


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment or the system configures for this URL, or None."""
    address, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(address.netloc):
        return None
    return re.sub("^socks:", "socks5:", proxy) if "://" in proxy else f"http://{proxy}"
