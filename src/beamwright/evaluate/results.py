"""What a run has found: records, and the folder that a run goes on from.

settings.json is written first; results.jsonl holds a problem a line. A problem is finished when
its whole line is on disk. A process killed at any moment leaves at most one torn line, the last,
which is dropped when the run goes on. One process at a time may hold a folder. Knows the solution's
JSON, no solver.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from beamwright.errors import InputError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import Problem
from beamwright.io import private, read_regular, write_whole
from beamwright.search.answers import normalise_answer
from beamwright.search.choose import CHOICES, choose
from beamwright.sections import MOST_CANDIDATES
from beamwright.tree import COMPLETE_STOPS

if sys.platform != "win32":
    import fcntl

_KEPT = ("answer", "score", "stop", "tokens", "notes")  # of a candidate
_COPIED = (
    "score", "stop", "rounds", "tokens", "kv", "time", "goodput_tok_s", "tree_hash", "exact",
)  # fmt: skip
_BOUNDS = Field(gt=-(2**63), lt=2**63)  # of tokens, bytes, seconds
_Count = Annotated[int, _BOUNDS]
_Figure = Annotated[float, _BOUNDS]
_NEEDED = frozenset({"unique_id", "index", "problem", "gold", "level"})


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Record:
    """What is kept of one problem; enough to compute every metric again.

    correct: None when the file names no answer; a problem with an `error` is wrong.
    choices: for best, majority and weighted what it would have answered, from these candidates.
    num_correct: candidates that ended by themselves with the right answer; None when the file
    names no answer. candidates: without their texts, which are many times the rest. kv: the
    solution's KV figures, in bytes. mean_path_tokens: over the final candidates, after the prompt.
    """

    unique_id: str
    index: Annotated[int, Field(ge=0)]
    problem: str
    gold: str | None
    level: str | int | bool | None
    answer: str | None = None
    correct: bool | None = None
    score: float | None = None
    stop: str | None = None
    rounds: int | None = None
    reason_fewer: str | None = None
    warnings: Sequence[str] = ()
    system_prompt: str | None = None
    error: str | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_correct: int | None = None
    tokens: Mapping[str, _Count | None] = field(default_factory=dict)
    kv: Mapping[str, _Count | None] = field(default_factory=dict)
    time: Mapping[str, _Figure | None] = field(default_factory=dict)
    mean_path_tokens: _Figure | None = None
    goodput_tok_s: _Figure | None = None
    tree_hash: str | None = None
    exact: bool | None = None

    def to_line(self) -> bytes:
        """One line of JSON in ASCII (a model's text may hold what UTF-8 cannot), with newline."""
        return (json.dumps(asdict(self)) + "\n").encode("ascii")

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """The record on a line; a field that the line leaves out keeps its default.

        Raises:
            ValueError: if the line is not JSON.
            InputError: if it is JSON, but not a record.
        """
        try:
            content = json.loads(line)
        except RecursionError as error:
            raise InputError("not a result: nested too deeply") from error
        known = {each.name for each in fields(cls)}
        if not isinstance(content, dict) or not _NEEDED <= set(content) <= known:
            raise InputError("not a result of this version")
        try:
            record = cls(**content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{place:.80}: {first['msg']}") from error
        _check_values(record)
        return record


def _check_values(record: Record) -> None:
    """Raises InputError for what has the right type, and cannot be of a problem."""
    if not 0 <= (record.num_correct or 0) <= len(record.candidates):
        raise InputError(f"num_correct: there are {len(record.candidates)} candidates")
    for how, chosen in record.choices.items():
        if not isinstance(chosen.get("correct"), bool | None) or "correct" not in chosen:
            raise InputError(f"choices.{how:.80}.correct: neither a verdict nor null")


def make_record(problem: Problem, solution: Mapping[str, Any], checker: AnswerChecker) -> Record:
    """Judge a solution (the object that `solve --json` prints)."""
    candidates = [
        {name: candidate[name] for name in _KEPT if name in candidate}
        for candidate in solution["candidates"]
    ]
    answers = [candidate["answer"] for candidate in candidates]
    verdicts = _judged(problem.answer, [solution["answer"], *answers], checker)
    complete = [candidate["stop"] in COMPLETE_STOPS for candidate in candidates]
    scores = [candidate["score"] for candidate in candidates]
    chosen = {
        how: answers[choose(answers, scores, complete, how)] if answers else None for how in CHOICES
    }
    num_correct = sum(
        bool(verdicts[answer]) for answer, ended in zip(answers, complete, strict=True) if ended
    )
    lengths = [candidate["tokens"] for candidate in candidates]
    return Record(
        **_identity(problem),
        answer=solution["answer"],
        correct=verdicts[solution["answer"]],
        reason_fewer=solution.get("reason_fewer"),
        warnings=solution.get("warnings", ()),
        system_prompt=solution.get("settings", {}).get("model", {}).get("system_prompt"),
        candidates=candidates,
        choices={
            how: {"answer": answer, "correct": verdicts[answer]} for how, answer in chosen.items()
        },
        num_correct=None if problem.answer is None else num_correct,
        mean_path_tokens=sum(lengths) / len(lengths) if lengths else None,
        **{name: solution[name] for name in _COPIED},
    )


def make_error_record(problem: Problem, error: Exception) -> Record:
    """A problem that could not be attempted counts as wrong, with the reason beside it."""
    known = problem.answer is not None
    return Record(
        **_identity(problem),
        correct=False if known else None,
        num_correct=0 if known else None,
        error=str(error),
    )


def _identity(problem: Problem) -> dict[str, Any]:
    names = ("unique_id", "index", "problem", "level")
    return {**{name: getattr(problem, name) for name in names}, "gold": problem.answer}


def _judged(
    gold: str | None, answers: Sequence[str | None], checker: AnswerChecker
) -> dict[str | None, bool | None]:
    """The verdict on every answer; None when nobody knows what is right.

    All of them together, and each spelling once.
    """
    if gold is None:
        return dict.fromkeys([*answers, None])
    spellings: dict[str, str] = {}
    for answer in answers:
        if answer is not None:
            spellings.setdefault(normalise_answer(answer), answer)
    right = dict(zip(spellings, checker.judge(gold, list(spellings.values())), strict=True))
    verdicts: dict[str | None, bool | None] = {None: False}
    verdicts |= {
        answer: right[normalise_answer(answer)] for answer in answers if answer is not None
    }
    return verdicts


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


class FinishedRun(NamedTuple):
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
