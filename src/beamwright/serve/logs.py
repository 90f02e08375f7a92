"""Logs as lines of JSON: ids, paths, statuses and seconds. Keys and prompts are in none of them."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""Id of the request that a task, and whatever it begins, is for: in every line that it logs."""

_FIELDS = ("method", "path", "status", "seconds")


class JsonLines(logging.Formatter):
    """A record as one object."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII, so that no text can break a line or a terminal."""
        found: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if REQUEST.get() is not None:
            found["request"] = REQUEST.get()
        found |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)
