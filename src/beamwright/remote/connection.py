"""ServerClient: HTTP to one server, whatever stands between: proxies, redirects, packed replies.

Replies are bounded in bytes and seconds. What a server says is told in its own words, without the
key and the login, which it may repeat.
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

BROKEN = 500  # by the question, if it stays so
_CONNECT_S, _KEPT_S = 10.0, 2.0  # servers hang up after five idle seconds
_ERROR_BYTES, _ERROR_CHARS, _SHOWN = 64 << 10, 1000, 200
_JSON, _LOGIN = json.JSONDecoder(), re.compile(r"//[^/]*@")
# A mark of the byte order before the first event is skipped.
_SSE = {"content-type": "text/event-stream; charset=utf-8-sig"}


class Refused(Exception):
    """The server has refused. status: HTTP's, or that of an error inside a reply. text: in its
    words; retry_after_s: when it may be asked again."""

    def __init__(self, status: int, text: str, retry_after_s: float = 0.0, how: str = "") -> None:
        super().__init__(f"{how or f'HTTP {status}'}: {text}")
        self.status, self.retry_after_s = status, retry_after_s


class ServerClient:
    """A client of the server at `url`, for one event loop.

    key, login: that the server wants. last: how its last whole reply begins.

    Raises:
        InputError: for a proxy of the environment that cannot be used.
    """

    def __init__(self, url: str, key: str | None, login: str) -> None:
        user, _, password = (unquote(part) for part in login.partition(":"))
        basic = b64encode(f"{user}:{password}".encode()).decode()
        hidden = (key, login and basic, password or user, login.partition(":")[2])
        self._secrets = re.compile("|".join(re.escape(each) for each in hidden if each) or "(?!)")
        self.last, proxy = "", _proxy_for(url)
        host, shown = urlsplit(url).hostname, _LOGIN.sub("//", proxy or "")
        way = f"proxy {shown}, which the environment names; NO_PROXY={host} goes around it"
        self._hint = f" (by the {way})" if proxy else ""
        headers = {"Accept-Encoding": "identity"}  # a packed one has no size to be bounded
        try:
            limits = httpx.Limits(keepalive_expiry=_KEPT_S)
            transport = httpx.AsyncHTTPTransport(proxy=proxy, limits=limits)
        except (ImportError, ValueError) as error:  # its words name what is to be installed
            raise InputError(f"{way}: {self.line(str(error))}") from error
        self.client = httpx.AsyncClient(
            base_url=f"{url}/",
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            auth=httpx.BasicAuth(user, password) if login else None,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # replies have theirs
            transport=transport,
            follow_redirects=True,
        )

    def line(self, said: str) -> str:
        """Make a server's words printable, without the key, on one line."""
        shown = self._secrets.sub("(the key)", said)
        printable = "".join(char if char.isprintable() else " " for char in shown)
        return " ".join(printable.split())[:_ERROR_CHARS]

    def failure(self, error: BaseException) -> str:
        """Describe an error in one line."""
        return f"{self.line(str(error)) or type(error).__name__}{self._hint}"

    async def whole(
        self, method: str, path: str, most_s: float, most: int, body: Any = None
    ) -> Any:
        """Return a whole reply; raises as `stream`, and Refused for an error inside it."""
        async with self.stream(method, path, most_s, most, body) as chunks:
            said = b"".join([chunk async for chunk in chunks])
        self.last = said[:_SHOWN].decode(errors="replace")
        return _checked(json.loads(said))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, most_s: float, most: int, body: Any = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Stream the bytes of a reply: at most `most` of them, in at most `most_s` seconds.

        Raises:
            Refused: if it says no; TimeoutError; ValueError: if there are more.
        """
        asked = self.client.stream(method, path, json=body)
        async with asyncio.timeout(most_s), asked as response:
            if response.request.method != method:  # as some statuses have it
                moved = response.history[0]
                where = f"it has moved to {moved.headers['location']}: write that as --model"
                raise Refused(moved.status_code, where)
            if response.status_code != httpx.codes.OK:
                said = b""
                with suppress(ValueError, httpx.DecodingError):
                    async for chunk in _bounded(response, _ERROR_BYTES):
                        said += chunk
                after_s = _retry_after_s(response.headers.get("retry-after", ""))
                raise Refused(response.status_code, said.decode(errors="replace"), after_s)
            yield _bounded(response, most)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON of server-sent events; raises Refused for an error among them.

    Values may have lines of their own, though no blank one parts them. A server that does not
    stream says all in one value, which is no event.
    """
    heard = list[bytes]()  # behind the last event

    async def noted() -> AsyncIterator[bytes]:
        async for chunk in chunks:
            heard.append(chunk)
            yield chunk

    response = httpx.Response(200, headers=_SSE, content=noted())
    async for event in EventSource(response).aiter_sse():
        rest = event.data.strip()
        if event.event == "error" and rest:
            raise Refused(BROKEN, rest, how="an error in its reply")
        while rest:
            if rest.startswith("[DONE]"):
                return
            value, end = _JSON.raw_decode(rest)
            heard.clear()
            yield _checked(value)
            rest = rest[end:].lstrip()
    with suppress(ValueError):
        yield _checked(json.loads(b"".join(heard)))


def _checked(value: Any) -> Any:
    """Return a reply; raises Refused for an error in it, whatever its HTTP status was."""
    if isinstance(value, dict):
        error = value if value.get("object") == "error" else value.get("error")
        choices = value.get("choices")
        of_choices = choices if isinstance(choices, list) else ()
        errors = (each.get("error") for each in of_choices if isinstance(each, dict))
        if error := error or next(filter(None, errors), None):
            code = str(error.get("code") if isinstance(error, dict) else "")
            status = int(code) if re.fullmatch("[45][0-9][0-9]", code) else BROKEN
            said = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
            raise Refused(status, said, how="an error in its reply")
    return value


async def _bounded(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Yield a reply's bytes, unpacked; raises ValueError for more than `most`."""
    encoding, size = response.headers.get("content-encoding", "identity"), 0
    if encoding.lower() not in ("identity", "gzip", "deflate"):
        raise httpx.DecodingError(f"it is in {encoding}, which was not asked for")
    async for chunk in response.aiter_bytes():  # a packed one is of a read of the socket, at most
        size += len(chunk)
        if size > most:
            raise ValueError(f"more than {most:,} bytes, for what was asked")
        yield chunk
    yield b"\n\n"  # the last event may lack it


def _retry_after_s(said: str) -> float:
    """Read a `Retry-After`: seconds, or a date."""
    with suppress(ValueError):
        return float(said)
    with suppress(ValueError, TypeError):
        return (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds()
    return 0.0


def _proxy_for(url: str) -> str | None:
    """Find the proxy that the environment, or the system, names for this URL."""
    address, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(address.netloc):
        return None
    return re.sub("^socks:", "socks5:", proxy) if "://" in proxy else f"http://{proxy}"
