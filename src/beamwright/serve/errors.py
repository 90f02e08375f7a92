"""ApiError: what goes wrong with a request, in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from beamwright.errors import (
    BeamwrightError,
    Cancelled,
    CapacityError,
    DeviceMemoryError,
    InputError,
    ProblemTooLongError,
    UnavailableError,
)

log = logging.getLogger("beamwright.serve")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


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
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> Mapping[str, str]:
        """What clients go by before they ask again."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": str(self.retry_after_s)}


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """What a search that failed is to who asked for it. A bug's own words stay in the log."""
    match error:
        case ApiError():
            found = error
        case ProblemTooLongError():
            found = ApiError(400, str(error), param, "context_length_exceeded")
        case InputError():
            found = ApiError(400, str(error), param)
        case Cancelled():
            found = ApiError(499, "the search was cancelled", code="cancelled")
        case UnavailableError():
            found = ApiError(503, str(error), code="unavailable", retry_after_s=30)
        # Some clients ask again whatever they are told at 5xx, 408, 409 and 429.
        case CapacityError() | DeviceMemoryError():
            found = ApiError(422, str(error), code="out_of_memory")
        case BeamwrightError():
            found = ApiError(422, str(error), code="search_failed")
        case _:
            found = ApiError(500, "internal error", code="internal_error")
    return found


def told_error(error: Exception, what: str) -> ApiError:
    """The same at the end of a stream; a bug goes to the log. what: whose, for the log."""
    found = api_error(error)
    if found.status >= 500 and not isinstance(error, ApiError):
        log.error("%s", what, exc_info=error)
    return found
