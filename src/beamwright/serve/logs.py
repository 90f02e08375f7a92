"""Logs as lines of JSON: ids, paths, statuses and seconds. Keys and prompts are in none of them."""

from __future__ import annotations

import json
import logging
import time

_FIELDS = ("request", "method", "path", "status", "seconds")


class JsonLines(logging.Formatter):
    """A record as one object."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII, so that no text can break a line or a terminal."""
        found = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        found |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)
