"""Read files, JSON and YAML safely, and write files atomically.

Writing: a reader sees either the old file or the whole new one, and two processes may write the
same file. Reading: a few lines of YAML can expand to billions of values through aliases, and YAML
tags can create Python objects. So tags are refused, and the size of a file and of its expansion is
limited.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.errors import InputError, UnavailableError, message_of

if TYPE_CHECKING:
    import yaml
    from pydantic import ValidationError

MOST_BYTES = 256 * 1024  # limit on a YAML file
MOST_VALUES = 20_000
# Maximum number of characters of a file's name that its temporary file repeats. The whole name may
# already be as long as the file system allows.
_NAME_CHARACTERS = 100
# Patterns in pydantic's messages, and what replaces them.
_PLAIN = (
    (r"^Value error, ", ""),
    (r"^(?:Input|\w+) should (?=be|have|match)", "must "),
    (r"^(must be) greater than or equal to", r"\1 at least"),
    (r"^(must be) less than or equal to", r"\1 at most"),
    (r"^(must be) greater than", r"\1 above"),
    (r"^(must be) less than", r"\1 below"),
    (r"^(must be a) valid integer.*", r"\1 whole number"),
    (r"^(must be a) valid (\w+)(?:, unable to parse.*)?$", r"\1 \2"),
)


def read_regular(path: Path, max_bytes: int = -1) -> bytes:
    """Return the content of a regular file, or of a pipe that the shell passed to this process.

    Other pipes and devices are refused, because reading them might never end or never begin. A
    regular file is read up to its stated size: files such as `/proc/kmsg` state none and never end.

    max_bytes: the limit in bytes; -1 for none.

    Raises:
        OSError: if the file cannot be read, or is neither a regular file nor a pipe from the shell.
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
    """Return the bytes of a regular file, or of a pipe from the shell (`read_regular`).

    option: text in front of an error message.

    Raises:
        InputError: if the file cannot be read.
    """
    try:
        return read_regular(path)
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option}{path}: cannot be read ({reason})") from error


def read_text(path: Path, option: str = "") -> str:
    """Return the text of a UTF-8 file, or of a pipe from the shell.

    Raises:
        InputError: if the file cannot be read, or is not UTF-8.
    """
    try:
        return read_file(path, option).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{option}{path}: not UTF-8 text") from error


def read_json_object(path: Path, what: str = "a JSON object", option: str = "") -> dict[str, Any]:
    """Return the JSON object that a file contains.

    what: a name for the content in error messages.
    option: text in front of an error message.

    Raises:
        InputError: if the file cannot be read, or does not contain an object.
    """
    try:
        content = json.loads(read_file(path, option))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{option}{path}: not {what}, or damaged") from error
    if not isinstance(content, dict):
        raise InputError(f"{option}{path}: not {what}")
    return content


def describe_validation_error(error: ValidationError) -> str:
    """Return pydantic's first error with its place: `nodes.1.tokens: ..., got 0`."""
    fault = error.errors()[0]
    what = f"{'.'.join(map(str, fault['loc'])):.80}: {describe_fault(fault)}"
    return what if "missing" in fault["type"] else f"{what}, got {fault['input']!r:.80}"


def describe_fault(fault: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors in plain words: `must be at least 1`."""
    return reduce(lambda text, pair: re.sub(pair[0], pair[1], text), _PLAIN, str(fault["msg"]))


def open_private(path: str, flags: int) -> int:
    """Open a file with mode 0600, because it holds a user's texts; the `opener` of `open`."""
    return os.open(path, flags, 0o600)


def write_atomically(path: Path, content: str | bytes, option: str = "") -> None:
    """Write a file atomically: it has either its old or its whole new content at any time.

    The content is on the disk when this returns. Text must be ASCII. The file keeps its
    permissions; a file that did not exist gets mode 0600. A pipe or a device is written to and
    never replaced.

    option: text in front of an error message.

    Raises:
        InputError: if the file cannot be written.
    """
    content = content.encode("ascii") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with os.fdopen(_open_pipe(path), "wb") as stream:
                stream.write(content)
        else:
            _replace(path.resolve(), content)
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option}{path}: cannot be written ({reason})") from error


def _open_pipe(path: Path) -> int:
    """Open a pipe or a device for writing, and wait at most 10 seconds for a reader of the pipe.

    A plain `open` would wait for a reader without a limit.
    """
    for tries_left in reversed(range(1000)):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if not tries_left:
                raise OSError(errno.ENXIO, "no process reads this pipe") from error
            time.sleep(0.01)
        else:
            break
    os.set_blocking(handle, True)
    return handle


def check_writable(path: Path, option: str = "") -> None:
    """Check before a long computation that a file can be written at `path`.

    Raises:
        InputError: if the path is a folder, or its parent folder does not exist.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(
            f"{option}{path}: cannot be written "
            f"({'it is a folder' if path.is_dir() else 'its folder does not exist'})"
        )


def _replace(path: Path, content: bytes) -> None:
    name = f".{path.name[:_NAME_CHARACTERS]}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    partial = path.with_name(name)
    try:
        with open(partial, "xb", opener=open_private) as stream:
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
    # Make the rename survive a power cut, on file systems that can sync a folder.
    with suppress(OSError):
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def import_optional(module: str, needs: str) -> Any:
    """Import and return a module of an optional package.

    needs: the error message, which names the package to install.

    Raises:
        UnavailableError: if the module cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UnavailableError(needs) from error


def installed_entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group, such as `beamwright.plugins`.

    The search takes 20 ms; its result is cached for all groups.
    """
    points: EntryPoints = _entry_points(tuple(sys.path)).select(group=group)
    return points


@cache
def _entry_points(path: tuple[str, ...]) -> Any:  # the result's type differs from Python 3.12 on
    """Return all entry points on `path`, the value of `sys.path`, which is the cache's key."""
    return entry_points()


def nonfinite_as_null(value: Any) -> Any:
    """Return a copy of JSON data with None in place of NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: nonfinite_as_null(part) for key, part in value.items()}
    return [nonfinite_as_null(part) for part in value] if isinstance(value, list | tuple) else value


@cache
def read_toml_beside(module: str) -> dict[str, Any]:
    """Read the TOML file that lies next to a module and has its name (cached).

    module: the module's `__file__`.
    """
    import tomllib  # noqa: PLC0415 (not needed for --help)

    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def read_yaml(file: Path, whose: str) -> Any:
    """Return the content of a YAML file; keys of mappings must be text.

    whose: a name for the file in error messages.

    Raises:
        InputError: if the file cannot be read, is not YAML, or is too large.
    """
    import yaml  # noqa: PLC0415 (not needed for --help)

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
        # Invalid dates and numbers with thousands of digits raise a ValueError.
        raise InputError(f"{where}: not YAML ({message_of(error)})") from error
    return value


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node, itself included.

    An alias counts as all values that it refers to.

    known: counts of the nodes visited so far, by `id`.

    Raises:
        ValueError: for a node that contains itself.
    """
    if id(node) not in known:
        known[id(node)] = -1  # -1 until all values below are counted: a second visit means a cycle
        # a mapping's values are (key, value) pairs
        parts = node.value if isinstance(node.value, list) else []
        below = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_num_values(part, known) for part in below)
    if known[id(node)] < 0:
        raise ValueError("an alias refers to a value that contains it")
    return known[id(node)]


def _check_keys(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where}: the key {key!r:.80} is not text; write it in quotes")
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _check_keys(part, where)
