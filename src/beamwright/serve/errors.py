"""ApiError: what goes wrong with a request, in OpenAI's shape, and the JSON that it goes out in."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from beamwright.errors import (
    BeamwrightError,
    Cancelled,
    CapacityError,
    DeviceMemoryError,
    InputError,
    ProblemTooLongError,
    UnavailableError,
)
from beamwright.io import finite

log = logging.getLogger("beamwright.serve")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Some clients ask again whatever they are told at 5xx, 408, 409 and 429.
_STATUSES: tuple[tuple[type[BeamwrightError], int, str | None], ...] = (
    (ProblemTooLongError, 400, "context_length_exceeded"),
    (InputError, 400, None),
    (Cancelled, 499, "cancelled"),
    (UnavailableError, 503, "unavailable"),
    (CapacityError, 422, "out_of_memory"),
    (DeviceMemoryError, 422, "out_of_memory"),
    (BeamwrightError, 422, "search_failed"),
)


class ApiError(Exception):
    """A refusal. param: the field that is wrong; code: for programs.

    retry_after_s: when it may be asked again; None: it would only fail again, and clients are told
    not to (`x-should-retry`).
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> AsciiJSON:
        """As a client gets it, with what clients go by before they ask again."""
        headers: Mapping[str, str] = {"x-should-retry": "false"}
        if self.retry_after_s is not None:
            headers = {"retry-after": str(self.retry_after_s)}
        return AsciiJSON(self.body, status_code=self.status, headers=headers)


class AsciiJSON(JSONResponse):
    """JSON whose characters are escaped: what clients send back to them may be no UTF-8, halves of
    characters, say, which Starlette's cannot encode. Blanks follow colons, as in OpenAI's: clients
    look for `"code": "context_length_exceeded"` in it. Numbers that JSON lacks are null."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(finite(content), allow_nan=False).encode("ascii")


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """What a search that failed is to who asked for it. A bug's own words stay in the log."""
    if isinstance(error, ApiError):
        return error
    said = str(error)
    if isinstance(error, ProblemTooLongError):  # in OpenAI's words: clients go by them
        said = (
            f"This model's maximum context length is {error.context} tokens. However, your "
            f"messages resulted in {error.num_tokens} tokens. (context_length_exceeded)"
        )
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            retry_after_s = 30 if status == 503 else None
            return ApiError(status, said, param if status == 400 else None, code, retry_after_s)
    return ApiError(500, "internal error", code="internal_error")
