"""The folder of a resumable run: settings.json, written first, and results.jsonl.

A problem is finished when its whole line is on disk. A process killed at any moment leaves at
most one torn line, the last, which is dropped when the run goes on. One process at a time may
hold a folder.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from beamwright.errors import InputError
from beamwright.evaluate.record import Record
from beamwright.files import private, read_regular, write_whole
from beamwright.sections import MOST_CANDIDATES

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
            self._file: IO[bytes] = open(  # noqa: SIM115 (it is closed with the folder)
                self._results, "a+b", buffering=0, opener=private
            )
        except OSError as error:
            raise InputError(f"--out {folder}: cannot be used ({error.strerror})") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise InputError(f"{self._results}: not a regular file")
            self._lock()
            self._check_settings(settings)
            self.records = self._recover()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, record: Record) -> None:
        """Write one finished problem through to the disk.

        Raises:
            InputError: if it cannot be written; what was written before stays.
        """
        try:
            line = record.to_line()
            while line:
                line = line[self._file.write(line) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # A torn last line is dropped when the run goes on.
            raise InputError(
                f"{self._results}: cannot be written ({error.strerror or error}); "
                f"{len(self.records)} problems are kept: run again with --out {self._folder}"
            ) from error
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
            write_whole(path, json.dumps(wanted, indent=2) + "\n")
            return
        if not path.exists():
            raise InputError(f"--out {self._folder}: results.jsonl without settings.json")
        try:
            found = json.loads(read_regular(path))
        except (OSError, ValueError, RecursionError) as error:
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
        records = _parse_lines(self._results, lines)
        end = sum(len(line) for line in lines[: len(records)])
        if end < len(content):
            self._file.truncate(end)
            os.fsync(self._file.fileno())
        return records


@dataclass(frozen=True)
class FinishedRun:
    """What a run's folder holds. settings: as JSON; records: in the order of the problem set."""

    folder: Path
    dataset: str
    settings: dict[str, Any]
    records: tuple[Record, ...]


def find_runs(folder: Path) -> list[FinishedRun]:
    """The runs in a folder: its own, or those of its subfolders, by name. Changes nothing.

    Raises:
        InputError: if there is none with a finished problem, or a file is damaged.
    """
    found = [read_run(each.parent) for each in sorted(folder.rglob("results.jsonl"))]
    found = [run for run in found if run.records]
    if not found:
        raise InputError(f"{folder}: holds no results of `eval --out`")
    return found


def read_run(folder: Path) -> FinishedRun:
    """The run in a folder, finished or not. Changes nothing.

    Raises:
        InputError: one line that names the file, and the line where there is one.
    """
    results, path = folder / "results.jsonl", folder / "settings.json"
    try:
        lines = read_regular(results).splitlines(keepends=True)
        identity = json.loads(read_regular(path))
        dataset, settings = str(identity["dataset"]), dict(identity["settings"])
        search = settings["search"]
        if type(search["n"]) is not int or not 1 <= search["n"] <= MOST_CANDIDATES:
            raise TypeError("n is no number of candidates")
        if not isinstance(search["search"], str | None):
            raise TypeError("the search is no name")
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not the settings of a run") from error
    records = _parse_lines(results, lines).values()
    ordered = sorted(records, key=lambda record: record.index)
    return FinishedRun(folder, dataset, settings, tuple(ordered))


def _parse_lines(path: Path, lines: Sequence[bytes]) -> dict[str, Record]:
    """Records of the whole lines; a torn last line, what a killed run leaves, is left out."""
    records: dict[str, Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.from_line(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number}: not JSON") from error
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if record.unique_id in records:
            raise InputError(f"{path}, line {number}: {record.unique_id!r} appears twice")
        if not line.endswith(b"\n"):  # everything but the newline arrived: not finished
            break
        records[record.unique_id] = record
    return records


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
