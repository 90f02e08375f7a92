"""The folder of a resumable run: settings.json, written first, and results.jsonl.

A problem is finished when its whole line is on disk. A process killed at any moment leaves at
most one torn line, the last, which is dropped when the run goes on. One process at a time may
hold a folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from beamwright.errors import InputError
from beamwright.evaluate.record import Record

if sys.platform != "win32":
    import fcntl


class ResultsFolder:
    """An open `--out` folder, locked until closed. A context manager.

    records: the finished problems by unique id, those of earlier runs included.

    Raises:
        InputError: if the folder belongs to a run with other settings, is in use, or its
            results are damaged anywhere but in the last line.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._results = folder / "results.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._results.open("a+b", buffering=0)
        except OSError as error:
            raise InputError(f"--out {folder}: cannot be used ({error.strerror})") from error
        try:
            self._lock()
            self._check_settings(settings)
            self.records = self._recover()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, record: Record) -> None:
        """Write one finished problem through to the disk."""
        line = record.to_line()
        while line:
            line = line[self._file.write(line) or 0 :]
        os.fsync(self._file.fileno())
        self.records[record.unique_id] = record

    def _lock(self) -> None:
        # The kernel drops the lock with the process, so a killed run never blocks the next one.
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(f"--out {self._folder}: another run is writing there") from error

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self._folder / "settings.json"
        # What JSON makes of the settings is what is compared (tuples become lists).
        wanted = json.loads(json.dumps(settings))
        if not self._results.stat().st_size:  # nothing finished: the folder is anybody's
            _write_whole(path, json.dumps(wanted, indent=2) + "\n")
            return
        if not path.exists():
            raise InputError(f"--out {self._folder}: results.jsonl without settings.json")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as JSON") from error
        if not isinstance(found, dict):
            raise InputError(f"{path}: not the settings of a run")
        differences = _differences(found, wanted)
        if differences:
            raise InputError(
                f"--out {self._folder} holds a run with other settings: {'; '.join(differences)}"
            )

    def _recover(self) -> dict[str, Record]:
        """Records on disk; leaves the file ending after the last whole line."""
        content = self._results.read_bytes()
        lines = content.splitlines(keepends=True)
        records: dict[str, Record] = {}
        end = 0
        for number, line in enumerate(lines, start=1):
            torn = not line.endswith(b"\n")
            try:
                record = Record.from_line(line)
            except ValueError as error:
                if number == len(lines):
                    break
                raise InputError(f"{self._results}, line {number}: not JSON") from error
            except InputError as error:
                raise InputError(f"{self._results}, line {number}: {error}") from error
            if record.unique_id in records:
                raise InputError(
                    f"{self._results}, line {number}: {record.unique_id!r} appears twice"
                )
            if torn:  # everything but the newline arrived: write it again, whole
                break
            records[record.unique_id] = record
            end += len(line)
        if end < len(content):
            self._file.truncate(end)
            os.fsync(self._file.fileno())
        return records


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there with all its text, or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    if sys.platform != "win32":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """`name: old -> new` for every leaf in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return [
            difference
            for key in dict.fromkeys([*found, *wanted])
            for difference in _differences(
                found.get(key), wanted.get(key), f"{name}.{key}" if name else str(key)
            )
        ]
    return [] if found == wanted else [f"{name} was {found!r}, is {wanted!r}"]
