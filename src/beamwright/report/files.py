"""Writing a report: there with all its text, or not at all. Knows paths, no content."""

from __future__ import annotations

import os
from pathlib import Path

from beamwright.errors import InputError


def write_whole(path: Path, text: str) -> None:
    """Write ASCII `text`; what a regular file held before stays until all of it is written.

    Raises:
        InputError: if the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="ascii")  # a pipe or a device is not to be replaced
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="ascii")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
