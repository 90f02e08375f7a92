"""Where outputs are written, there with all their content or not at all, and inputs are read.

Knows paths and bytes, no content. Readers of a file see the old one or the whole of the other, and
two processes that write the same file do not disturb each other: the last one's content stays.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from beamwright.errors import InputError

_PIPE_WAIT_S = 10.0
_NAME_CHARACTERS = 100  # of the target's name, which may be as long as a name can be


def read_regular(path: Path, max_bytes: int = -1) -> bytes:
    """The content of a regular file, or of a pipe that this process was handed by the shell.

    Other pipes and devices may never end, or never begin; nor may a file whose size says nothing
    of what it gives (`/proc/kmsg`), of which its size is read. max_bytes: bytes, -1 for all.

    Raises:
        OSError: if it cannot be read, or is neither.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    found = os.fstat(handle)
    mode = found.st_mode
    handed = str(path) == "/dev/stdin" or str(path.parent) == "/dev/fd"
    if not stat.S_ISREG(mode) and not (handed and (stat.S_ISFIFO(mode) or os.isatty(handle))):
        os.close(handle)
        reason = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    if sys.platform != "win32":
        os.set_blocking(handle, True)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(mode):
            return stream.read(max_bytes)
        return stream.read(found.st_size if max_bytes < 0 else min(max_bytes, found.st_size))


def private(path: str, flags: int) -> int:
    """For `open`: a file that it makes is its user's alone, since it holds problems and texts."""
    return os.open(path, flags, 0o600)


def write_whole(path: Path, text: str, option: str = "") -> None:
    """Write ASCII `text`, see `write_bytes`."""
    write_bytes(path, text.encode("ascii"), option)


def write_bytes(path: Path, content: bytes, option: str = "") -> None:
    """Replace a file as a whole; it is on the disk when this returns.

    What a regular file held before stays until all of it is written, and who may read it stays;
    a new one is its user's alone. A pipe or a device is written to, never replaced.
    option: what an error puts before the path.

    Raises:
        InputError: if it cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            _pour(path, content)
        else:
            _replace(path.resolve(), content)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option}{path}: cannot be written ({reason})") from error


def check_writable(path: Path, option: str = "") -> None:
    """Find out early that a file cannot be written there.

    Raises:
        InputError: if it is a folder, or its folder is not there.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{option}{path}: cannot be written there")


def _replace(path: Path, content: bytes) -> None:
    name = f".{path.name[:_NAME_CHARACTERS]}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    partial = path.with_name(name)
    try:
        with open(partial, "xb", opener=private) as stream:
            if path.exists() and sys.platform != "win32":
                os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder, too, have to survive a power cut, where the system can promise it."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _pour(path: Path, content: bytes) -> None:
    """Write to a device, or to a pipe that somebody reads."""
    handle = _open_pipe(path) if stat.S_ISFIFO(path.stat().st_mode) else os.open(path, os.O_WRONLY)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)


def _open_pipe(path: Path) -> int:
    """Without a reader, opening would wait for ever."""
    give_up = time.monotonic() + _PIPE_WAIT_S
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > give_up:
                raise OSError(errno.ENXIO, "nobody reads this pipe") from error
            time.sleep(0.01)
        else:
            os.set_blocking(handle, True)
            return handle
