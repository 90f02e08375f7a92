"""A model folder's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.files import read_regular

_LONGEST_LINE = 200


def read_object(file: Path) -> dict[str, Any]:
    """Raises InputError if the file does not hold a JSON object."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({line_of(error)})") from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: a JSON object is expected, not {type(found).__name__}")
    return found


def is_panic(error: BaseException) -> bool:
    """True for what a library written in Rust gives up with, which is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def line_of(error: BaseException) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_LONGEST_LINE]
