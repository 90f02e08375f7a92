"""The JSON of a request: bytes in, a plain object out, or one line that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from beamwright.serve.errors import ApiError
from beamwright.serve.limits import ServerLimits

T = TypeVar("T")

BODY_S = 60.0
"""Seconds that a request's body may take to come."""

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Strings as a whole, one that never ends, too; possessive, so that none is read twice."""

_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


async def read_body(
    request: Request, limits: ServerLimits, taken: Callable[[dict[str, Any]], T]
) -> T:
    """What `taken` makes of a request's JSON, in a thread: megabytes take a while to look at.

    Raises:
        ApiError: as `read_json` and `taken`; 408 for a body that does not come, 499 where nobody
            is left.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > limits.body_bytes:
                    break
    except ClientDisconnect:
        raise ApiError(499, "the client has gone", code="cancelled") from None
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_S:.0f} s") from None
    body = bytes(found)
    return await asyncio.to_thread(lambda: taken(read_json(body, limits)))


def read_json(body: bytes, limits: ServerLimits) -> dict[str, Any]:
    """Raises ApiError 400 for what is no JSON object, nested too deeply, or of too many values, 413
    for too many bytes."""
    if len(body) > limits.body_bytes:
        raise ApiError(413, f"the body is larger than {limits.body_bytes:,} bytes")
    bare = _STRINGS.sub(b"", body)
    # The parser lets nobody else compute while it makes objects of them.
    if sum(map(bare.count, (b",", b"[", b"{"))) > limits.values:
        raise ApiError(400, f"the body has more than {limits.values:,} values")
    if _depth(bare) > limits.depth:
        raise ApiError(400, f"the body is nested more than {limits.depth} deep")
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refused, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no UTF-8: byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise ApiError(400, f"the body is no JSON: {line}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is a JSON {_KINDS.get(type(found), 'value')}, not an object")
    return found


_KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "literal"}


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _depth(bare: bytes) -> int:
    """How deep brackets go in a body without its strings; the parser's own recursion never sees
    more."""
    brackets = bare.translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)
