"""Problem sets: bundled ones, files and folders (JSONL, JSON, CSV, parquet), and hub data sets.

This module knows file formats, the location of each row for messages, and the field names of public
problem sets. Each problem gets its own id, even if two texts are equal.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, resources
from inspect import signature
from pathlib import Path
from typing import Any

from beamwright.errors import InputError, UnavailableError
from beamwright.evaluate.options import ProblemRow, with_answer_options
from beamwright.io import import_optional, read_file
from beamwright.search.answers import extract_answer

BUNDLED = ("test", "dev")
NO_ANSWERS = "none"

# In order of priority: the first field that is present and not empty is used.
QUESTION_FIELDS = ("problem", "question", "Problem", "Question", "prompt")
ANSWER_FIELDS = (
    "answer", "Answer", "reference_answer", "extracted_groundtruth", "expected_answer",
    "final_answer", "ground_truth", "gold",
)  # fmt: skip
SOLUTION_FIELDS = ("canonical_solution", "solution", "Solution")
_ID_FIELDS = ("unique_id", "id", "ID", "Record ID")

_OTHER_FIELDS = frozenset(
    {*QUESTION_FIELDS, *_ID_FIELDS, "subject", "type", "Subdomain", "level"}
)  # known fields that hold no answer

_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|dev)(?=$|[^a-z])")
_SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
_ABOUT = ("dataset_info.json", "dataset_infos.json")  # describe a data set, hold no rows
_HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")
_MOST_BYTES = 1 << 28  # limit of a decompressed parquet file: a small file may expand to any size
_MOST_CELLS = 5_000_000


@dataclass(frozen=True)
class Problem:
    """One problem. answer: the right answer; None if the file has none.

    unique_id: unique within its problem set. index: its number in the file, from 0.
    """

    problem: str
    answer: str | None
    unique_id: str
    index: int
    level: str | int | None = None


@dataclass(frozen=True)
class ProblemSet:
    """Problems in file order. name: the source as the user wrote it.

    fingerprint: SHA-256 of everything that was read, independent of the limit, and the field names
        that the user gave.
    """

    name: str
    problems: tuple[Problem, ...]
    fingerprint: str


def load_problems(
    source: str,
    limit: int | None = None,
    *,
    problem_field: str | None = None,
    answer_field: str | None = None,
) -> ProblemSet:
    """Load the first `limit` problems of `source`.

    The whole source is read and checked, except for the rest of a parquet file that is too large.

    Sources: `bundled:test` or `bundled:dev`; a JSONL, JSON, CSV or parquet file, or a folder of
    them in the order of their paths (`FOLDER@SPLIT` for one split of several); `hf:ORG/NAME`,
    `hf:ORG/NAME/CONFIG@SPLIT` of the hub. The default split is `test`, or the only split. Either
    every problem has an answer, or none has.
    problem_field, answer_field: the fields of the problem and its right answer, if they are not
    known ones (QUESTION_FIELDS, ANSWER_FIELDS, SOLUTION_FIELDS). The answer field "none" means that
    no right answers are known.

    Raises:
        InputError: one line that names the file, and the line or row where there is one.
        UnavailableError: if a package is not installed, or the hub cannot be reached.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}")
    rows, fingerprint = _read(source, limit)
    if not rows:
        raise InputError(f"{source}: holds no problems")
    questions = QUESTION_FIELDS if problem_field is None else (problem_field,)
    is_judged = answer_field != NO_ANSWERS
    named = answer_field if is_judged else None
    problems: dict[str, Problem] = {}
    for index, row in enumerate(rows):
        level = row.fields.get("level")
        level = level if isinstance(level, str | int) else None
        ids = [row.fields[key] for key in _ID_FIELDS if row.fields.get(key) not in (None, "")]
        name = str([*ids, index][0])
        while name in problems:
            name += f"#{index}"
        text, is_whole = _question(row, questions), problem_field not in (None, *QUESTION_FIELDS)
        listed = with_answer_options(
            row, text, str(ids[0]) if ids else "", named, is_whole=is_whole
        )
        text, answer = listed or (text, _answer(row, named) if is_judged else None)
        problems[name] = Problem(text, answer if is_judged else None, name, index, level)
    answers = [problem.answer for problem in problems.values()]
    if is_judged and None in answers:
        _check_answers_known(rows, answers, problem_field, answer_field)
    if problem_field or answer_field:
        fingerprint += f", --problem-field {problem_field}, --answer-field {answer_field}"
    return ProblemSet(source, tuple(problems.values())[:limit], fingerprint)


def _check_answers_known(
    rows: Sequence[ProblemRow],
    answers: Sequence[str | None],
    problem_field: str | None,
    answer_field: str | None,
) -> None:
    """Raise if some problems have no answer, because the accuracy would silently omit them.

    Also raise if no problem has an answer, but rows have unread fields that probably hold it.
    """
    first = rows[answers.index(None)]
    known = (*ANSWER_FIELDS, *SOLUTION_FIELDS) if answer_field is None else (answer_field,)
    others = ", though others have one" if set(answers) != {None} else ""
    there = [str(name) for name in first.fields]
    if others or answer_field is not None or not {*there} <= {*_OTHER_FIELDS, problem_field}:
        raise InputError(
            f"{first.where}: no answer{others} (looked for {', '.join(known)}; fields are "
            f"{', '.join(there)}); name its field with --answer-field, or use --answer-field "
            f"{NO_ANSWERS} to evaluate without accuracy"
        )


# --- from a row to a problem -------------------------------------------------------------------


def _question(row: ProblemRow, questions: Sequence[str]) -> str:
    for name in questions:
        text = row.fields.get(name)
        if not isinstance(text, str | None):
            raise InputError(f"{row.where}: field {name!r} is not text")
        if text and text.strip():
            return text
    if any(row.fields.get(name) is not None for name in questions):
        raise InputError(f"{row.where}: the problem is empty")
    looked, there = ", ".join(questions), ", ".join(map(str, row.fields)) or "no fields"
    raise InputError(
        f"{row.where}: no problem field (looked for {looked}; fields are {there}); name one with "
        "--problem-field"
    )


def _answer(row: ProblemRow, answer_field: str | None) -> str | None:
    for name in ANSWER_FIELDS if answer_field is None else (answer_field,):
        # GSM8K's worked solution in an answer field ends with "#### ANSWER".
        text = row.text(name).rpartition("####")[2].strip()
        if text:
            return text
    for name in SOLUTION_FIELDS if answer_field is None else ():
        text = str(row.fields.get(name) or "").strip()
        answer = extract_answer(text)
        # A single line without a marked answer is taken to be the answer itself.
        if answer or (text and "\n" not in text):
            return answer or text
    return None


# --- from a source to rows ---------------------------------------------------------------------


def _read(source: str, limit: int | None) -> tuple[list[ProblemRow], str]:
    """Return the rows of `source` in file order, and the SHA-256 of all that was read."""
    if source.startswith("hf:"):
        return _read_hub(source)
    if source.startswith("bundled:"):
        name = source.removeprefix("bundled:")
        if name not in BUNDLED:
            known = ", ".join(f"bundled:{name}" for name in BUNDLED)
            raise InputError(f"{source}: no such bundled problem set; use {known}")
        file = resources.files("beamwright").joinpath("bundled", f"{name}.jsonl")
        return _parse(file.read_bytes(), source, None)
    folder, split = source, ""
    if not os.path.exists(source) and "@" in source:
        folder, _, split = source.rpartition("@")
    if not os.path.isdir(folder):
        return _parse(read_file(Path(source)), source, limit)
    rows: list[ProblemRow] = []
    digest = hashlib.sha256()
    for path in _data_files(Path(folder), split, source):
        more, fingerprint = _parse(read_file(path), str(path), limit)
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{fingerprint}\n".encode(errors="surrogateescape"))
        rows += more
    return rows, digest.hexdigest()


def _data_files(folder: Path, split: str, source: str) -> list[Path]:
    by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts) or file.name in _ABOUT
        if file.suffix.lower() in _SUFFIXES and not hidden and file.is_file():
            marked = _SPLIT.findall(inside.with_suffix("").as_posix().lower())
            by_split.setdefault(marked[-1] if marked else "", []).append(file)
    if not by_split:
        raise InputError(f"{source}: holds no problem files ({', '.join(_SUFFIXES)})")
    names = ", ".join(sorted(name or "no split" for name in by_split))
    if len(by_split) > 1 and not split:
        raise InputError(f"{source}: holds several splits ({names}); write {folder}@SPLIT")
    if split and split not in by_split:
        raise InputError(f"{source}: no such split; splits are {names}")
    return by_split[split] if split else next(iter(by_split.values()))


def _read_hub(source: str) -> tuple[list[ProblemRow], str]:
    match = _HUB_NAME.fullmatch(source)
    if match is None:
        raise InputError(f"{source}: must be hf:ORG/NAME or hf:ORG/NAME/CONFIG@SPLIT")
    datasets = _extra("datasets", source)
    name, config, split = match.groups()
    # Before release 4, `datasets` asks whether to run a data set's own code.
    takes = signature(datasets.load_dataset).parameters
    never = {"trust_remote_code": False} if "trust_remote_code" in takes else {}
    try:
        table = datasets.load_dataset(name, config, split=split, **never)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise InputError(f"{source}: {_first_line(error)}") from error
    except Exception as error:  # network and cache errors of any type: the hub is out of reach
        raise UnavailableError(
            f"{source}: the hub cannot be reached ({_first_line(error)}); "
            "a local file or folder works without it"
        ) from error
    if split is None:
        splits = sorted(table)
        chosen = splits[0] if len(splits) == 1 else "test"
        if chosen not in splits:
            raise InputError(f"{source}: choose a split with @: {', '.join(splits)}")
        table = table[chosen]
    found = [dict(row) for row in table]
    content = json.dumps(found, sort_keys=True, default=str)
    rows = [ProblemRow(f"{source}, row {number}", row) for number, row in enumerate(found, start=1)]
    return rows, hashlib.sha256(content.encode()).hexdigest()


def _extra(package: str, source: str) -> Any:
    return import_optional(package, f"{source}: needs {package} (pip install 'beamwright[hub]')")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _parse(content: bytes, name: str, limit: int | None) -> tuple[list[ProblemRow], str]:
    """Parse the rows of one file, in the format of its ending; return them and a SHA-256.

    name: the file's name.
    """
    parsers: dict[str, Callable[[bytes, str], Iterator[ProblemRow]]] = {
        ".json": _parse_json,
        ".csv": _parse_csv,
        ".parquet": partial(_parse_parquet, limit=limit),
    }
    rows = [*parsers.get(Path(name).suffix.lower(), _parse_jsonl)(content, name)]
    for row in rows:
        if not isinstance(row.fields, dict):
            raise InputError(f"{row.where}: not a JSON object")
    return rows, hashlib.sha256(content).hexdigest()


def _parse_jsonl(content: bytes, name: str) -> Iterator[ProblemRow]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                yield ProblemRow(where, json.loads(_decode(line, where)))
            except (ValueError, RecursionError) as error:
                raise _not_json(where, error) from error


def _parse_json(content: bytes, name: str) -> Iterator[ProblemRow]:
    """Parse a list of rows, `{"data": [...]}`, a single row, or JSONL in a file named .json."""
    try:
        document = json.loads(_decode(content, name))
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":
            yield from _parse_jsonl(content, name)
            return
        raise _not_json(f"{name}, line {getattr(error, 'lineno', 1)}", error) from error
    if isinstance(document, dict):
        document = document.get("data", [document])
    if not isinstance(document, list):
        raise InputError(f"{name}: neither a list of problems nor an object with a list 'data'")
    for number, fields in enumerate(document, start=1):
        yield ProblemRow(f"{name}, row {number}", fields)


def _not_json(where: str, error: Exception) -> InputError:
    reason = type(error).__name__
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg.removesuffix(' starting at')}, column {error.colno}"
    return InputError(f"{where}: not JSON ({reason})")


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error


def _parse_csv(content: bytes, name: str) -> Iterator[ProblemRow]:
    longest = csv.field_size_limit(len(content) + 1)  # the limit is global in the library
    reader = csv.reader(io.StringIO(_decode(content, name), newline=""), strict=True)
    header: list[str] = []
    where = f"{name}, line 1"  # where a row begins: a cell may hold several lines
    try:
        for cells in reader:
            if header and cells and len(cells) != len(header):
                raise InputError(f"{where}: {len(cells)} cells, but the header has {len(header)}")
            if header and cells:
                yield ProblemRow(where, dict(zip(header, cells, strict=True)))
            header = header or cells
            where = f"{name}, line {reader.line_num + 1}"
    except csv.Error as error:
        raise InputError(f"{where}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(longest)


def _parse_parquet(content: bytes, name: str, limit: int | None) -> Iterator[ProblemRow]:
    """Parse rows in batches of bounded memory. Each item of a list counts as a cell."""
    pyarrow = _extra("pyarrow", name)
    try:
        file = import_module("pyarrow.parquet").ParquetFile(io.BytesIO(content))
        about, wanted = file.metadata, file.metadata.num_rows
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        columns = range(about.num_columns)
        cells = sum(group.column(column).num_values for group in groups for column in columns)
        if cells > _MOST_CELLS:
            if limit is None or limit * len(columns) > _MOST_CELLS:
                raise InputError(
                    f"{name}: {wanted:,} rows with {cells:,} cells exceed {_MOST_CELLS:,}; "
                    "read the first rows with --limit N"
                )
            wanted = limit
        largest = max([1, *(group.total_byte_size for group in groups)])  # no row is larger
        number = size = 0
        for batch in file.iter_batches(max(1, min(1024, _MOST_BYTES // largest))):
            for fields in batch.slice(0, wanted - number).to_pylist():
                number += 1
                size += sum(len(str(value)) for value in fields.values())
                if size > _MOST_BYTES:
                    raise InputError(f"{name}, row {number}: more than {_MOST_BYTES:,} characters")
                yield ProblemRow(f"{name}, row {number}", fields)
            if number >= wanted:
                return
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{name}: not parquet ({_first_line(error)})") from error
