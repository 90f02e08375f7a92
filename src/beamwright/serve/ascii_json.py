"""AsciiJSON: a response that any text fits in. What clients send back to them may be no UTF-8."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

from beamwright.serve.errors import ApiError


class AsciiJSON(JSONResponse):
    """JSON whose characters are escaped: halves of one, too, which Starlette's cannot encode."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def refusal(error: ApiError) -> AsciiJSON:
    """An error as a client gets it."""
    return AsciiJSON(error.body, status_code=error.status, headers=dict(error.headers))
