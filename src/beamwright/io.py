"""Reads files and YAML within bounds, and writes files whole or not at all.

Knows paths, bytes and plain data, no content. Readers of a file see the old one or the whole of
the other, and two processes that write the same file do not disturb each other. A few lines of YAML
can stand for billions of values, and its tags for Python objects: the safe loader refuses the
latter, and the file, with what its aliases stand for, is bounded.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.errors import InputError, UnavailableError, said_by

if TYPE_CHECKING:
    import yaml
    from pydantic import ValidationError

MOST_BYTES = 256 * 1024  # of a YAML file
MOST_VALUES = 20_000
_NAME_CHARACTERS = 100  # of the target's name, which may be as long as a name can be


def read_regular(path: Path, max_bytes: int = -1) -> bytes:
    """The content of a regular file, or of a pipe that this process was handed by the shell.

    Other pipes and devices may never end, or never begin; nor may a file whose size says nothing
    of what it gives (`/proc/kmsg`), of which its size is read. max_bytes: bytes, -1 for all.

    Raises:
        OSError: if it cannot be read, or is neither.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(handle)
    regular = stat.S_ISREG(status.st_mode)
    handed = str(path) == "/dev/stdin" or str(path.parent) == "/dev/fd"
    if not regular and not (handed and (stat.S_ISFIFO(status.st_mode) or os.isatty(handle))):
        os.close(handle)
        folder = stat.S_ISDIR(status.st_mode)
        reason = os.strerror(errno.EISDIR) if folder else "not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    if sys.platform != "win32":
        os.set_blocking(handle, True)
    with os.fdopen(handle, "rb") as stream:
        size = status.st_size if max_bytes < 0 else min(max_bytes, status.st_size)
        return stream.read(size if regular else max_bytes)


def read_file(path: Path, option: str = "") -> bytes:
    """What `read_regular` reads. option: what an error begins with.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        return read_regular(path)
    except (OSError, ValueError) as error:  # ValueError: no path has such a name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option}{path}: cannot be read ({reason})") from error


def read_text(path: Path, option: str = "") -> str:
    """The same as text; raises InputError for what is not UTF-8, too."""
    try:
        return read_file(path, option).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{option}{path}: not UTF-8 text") from error


def read_object(path: Path, what: str = "a JSON object", option: str = "") -> dict[str, Any]:
    """The JSON object that a file holds. what, option: what an error calls it, and begins with.

    Raises:
        InputError: if it cannot be read, or holds none.
    """
    try:
        content = json.loads(read_file(path, option))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{option}{path}: not {what}, or a damaged one") from error
    if not isinstance(content, dict):
        raise InputError(f"{option}{path}: not {what}")
    return content


def describe_fault(error: ValidationError) -> str:
    """What pydantic found first, with its place: `nodes.1.tokens: ..., got 0`."""
    fault = error.errors()[0]
    what = f"{'.'.join(map(str, fault['loc'])):.80}: {fault['msg']}"
    missing = fault["type"] in ("missing", "missing_argument")
    return what if missing else f"{what}, got {fault['input']!r:.80}"


def private(path: str, flags: int) -> int:
    """For `open`: a file that it makes is its user's alone, since it holds problems and texts."""
    return os.open(path, flags, 0o600)


def write_whole(path: Path, content: str | bytes, option: str = "") -> None:
    """Replace a file as a whole; it is on the disk when this returns. Text is ASCII.

    What a regular file held before stays until all of it is written, and who may read it stays;
    a new one is its user's alone. A pipe or a device is written to, never replaced.
    option: what an error puts before the path.

    Raises:
        InputError: if it cannot be written.
    """
    content = content.encode("ascii") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with os.fdopen(_open_pipe(path), "wb") as stream:
                stream.write(content)
        else:
            _replace(path.resolve(), content)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option}{path}: cannot be written ({reason})") from error


def _open_pipe(path: Path) -> int:
    """Without a reader, opening a pipe would wait for ever. A device is there at once."""
    for tries_left in reversed(range(1000)):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if not tries_left:
                raise OSError(errno.ENXIO, "nobody reads this pipe") from error
            time.sleep(0.01)
        else:
            break
    os.set_blocking(handle, True)
    return handle


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
    if sys.platform == "win32":
        return
    with suppress(OSError):  # the name, too, has to survive a power cut, where that can be promised
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def extra(module: str, needs: str) -> Any:
    """A module of an optional package. Raises UnavailableError with this line where it is not."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnavailableError(needs) from error


def installed(group: str) -> EntryPoints:
    """What installed packages add here; looked for once for all groups, 20 ms."""
    points: EntryPoints = _entry_points(tuple(sys.path)).select(group=group)
    return points


@cache
def _entry_points(path: tuple[str, ...]) -> Any:  # whose type is another from Python 3.12 on
    """path: where packages are looked for, `sys.path`."""
    return entry_points()


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for: a figure that does not apply."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


@cache
def read_beside(module: str) -> dict[str, Any]:
    """The TOML table of package data that lies beside a module. module: its `__file__`."""
    import tomllib  # noqa: PLC0415 - --help waits for none

    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def read_yaml(file: Path, whose: str) -> Any:
    """What a YAML file holds; mappings have text as keys. whose: what an error names it by.

    Raises:
        InputError: if it cannot be read, is not YAML, or is too large.
    """
    import yaml  # noqa: PLC0415 - --help waits for none

    where = f"{whose} {file}"
    try:
        content = read_regular(file, MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    if len(content) > MOST_BYTES:
        raise InputError(f"{where}: larger than {MOST_BYTES // 1024} KiB")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_VALUES:
            raise InputError(f"{where}: more than {MOST_VALUES:,} values (aliases count in full)")
        value = loader.construct_document(node)
        _check_keys(value, where)
    except RecursionError as error:
        raise InputError(f"{where}: not YAML (nested too deeply)") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        # Dates that are none and numbers of thousands of digits are ValueErrors.
        raise InputError(f"{where}: not YAML ({said_by(error)})") from error
    return value


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node, itself included, each as often as it is written or referred to.

    Raises:
        ValueError: for a node that holds itself.
    """
    if id(node) not in known:
        known[id(node)] = -1  # until all below is counted
        parts = node.value if isinstance(node.value, list) else []  # a mapping's are pairs
        below = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_num_values(part, known) for part in below)
    if known[id(node)] < 0:
        raise ValueError("an alias is inside what it refers to")
    return known[id(node)]


def _check_keys(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where}: the key {key!r:.80} is no text; write it in quotes")
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _check_keys(part, where)
