"""From files to rows: JSONL, JSON, CSV, parquet, folders of them, and data sets of the hub.

Knows file formats and where a row came from, for messages. Does not know what a problem is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from beamwright.errors import BeamwrightError, InputError, UnavailableError
from beamwright.io import read_regular

_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|dev)(?=$|[^a-z])")
_BOM = "\ufeff".encode()  # the mark that some editors put at the front
_ABOUT = ("dataset_info.json", "dataset_infos.json")  # describe a data set, hold no rows
_MOST_BYTES = 1 << 28  # that a parquet file unpacks to; a small one may hold any number
_MOST_CELLS = 5_000_000
_HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")


@dataclass(frozen=True)
class DataRow:
    """The named fields of one row. where: its file and line or row (from 1), for messages."""

    where: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class DataRows:
    """Rows in file order; fingerprint: SHA-256 of everything they were read from."""

    rows: tuple[DataRow, ...]
    fingerprint: str


def read_path(source: str, limit: int | None = None) -> DataRows:
    """The rows of a file, of every data file below a folder, or of `FOLDER@SPLIT`.

    A folder's files come in the order of their paths; hidden ones are left out. A file whose
    name ends in none of .json, .csv and .parquet is read as JSONL. limit: see `read_content`.

    Raises:
        InputError: if something cannot be read, or a folder mixes splits.
        UnavailableError: for parquet without pyarrow.
    """
    folder, split = source, ""
    if not os.path.exists(source) and "@" in source:
        folder, _, split = source.rpartition("@")
    if not os.path.isdir(folder):
        return read_content(_read_bytes(Path(source)), source, limit)
    digest = hashlib.sha256()
    found: list[DataRow] = []
    for file in _data_files(Path(folder), split, source):
        rows = read_content(_read_bytes(file), str(file), limit)
        name = file.relative_to(folder).as_posix()
        digest.update(f"{name}\0{rows.fingerprint}\n".encode(errors="surrogateescape"))
        found += rows.rows
    return DataRows(tuple(found), digest.hexdigest())


def read_content(content: bytes, name: str, limit: int | None = None) -> DataRows:
    """The rows of one file's content. name: for messages, and its ending tells the format.

    limit: rows that are wanted. All are read all the same, but for a parquet file that holds more
    than fits, of which no others are.

    Raises:
        InputError: if the content is not of that format.
        UnavailableError: for parquet without pyarrow.
    """
    parse = _PARSERS.get(Path(name).suffix.lower(), _parse_jsonl)
    return DataRows(tuple(parse(content, name, limit)), hashlib.sha256(content).hexdigest())


def read_hub(source: str) -> DataRows:
    """The rows of `hf:ORG/NAME`, `hf:ORG/NAME/CONFIG` or either with `@SPLIT`.

    Without a split: `test` if there is one, else the only one.

    Raises:
        InputError: if the name is malformed or the hub knows no such data set or split.
        UnavailableError: if the package `datasets` is missing or the hub out of reach.
    """
    match = _HUB_NAME.fullmatch(source)
    if match is None:
        raise InputError(f"{source}: not of the form hf:ORG/NAME, hf:ORG/NAME/CONFIG@SPLIT")
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise _missing(source, "datasets") from error
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a warning for every attempt: one message says it at the end
    try:
        fields = _hub_rows(datasets, source, *match.groups())
    except BeamwrightError:
        raise
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise InputError(f"{source}: {_first_line(error)}") from error
    except Exception as error:  # whatever network and cache raise: the hub is out of reach
        raise UnavailableError(
            f"{source}: the hub cannot be reached ({_first_line(error)}); "
            "a local file or folder works without it"
        ) from error
    finally:
        logger.setLevel(level)
    rows = tuple(DataRow(f"{source}, row {i}", row) for i, row in enumerate(fields, start=1))
    content = json.dumps(fields, sort_keys=True, default=str)
    return DataRows(rows, hashlib.sha256(content.encode()).hexdigest())


def _hub_rows(
    datasets: Any, source: str, name: str, config: str | None, split: str | None
) -> list[dict[str, Any]]:
    # Before release 4 it asks whether to run a data set's own code.
    takes = signature(datasets.load_dataset).parameters
    never = {"trust_remote_code": False} if "trust_remote_code" in takes else {}
    table = datasets.load_dataset(name, config, split=split, **never)
    if split is None:
        splits = sorted(table)
        chosen = splits[0] if len(splits) == 1 else "test"
        if chosen not in splits:
            raise InputError(f"{source}: choose a split with @: {', '.join(splits)}")
        table = table[chosen]
    return [dict(row) for row in table]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _missing(source: str, package: str) -> UnavailableError:
    return UnavailableError(f"{source}: needs {package} (pip install 'beamwright[hub]')")


def _data_files(folder: Path, split: str, source: str) -> list[Path]:
    by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        known = file.suffix.lower() in _PARSERS and file.name not in _ABOUT
        if known and not hidden and file.is_file():
            marked = _SPLIT.findall(inside.with_suffix("").as_posix().lower())
            by_split.setdefault(marked[-1] if marked else "", []).append(file)
    if not by_split:
        raise InputError(f"{source}: holds no problem files ({', '.join(sorted(_PARSERS))})")
    names = ", ".join(sorted(each or "no split" for each in by_split))
    if split:
        if split not in by_split:
            raise InputError(f"{source}: no such split (there are {names})")
        return by_split[split]
    if len(by_split) > 1:
        raise InputError(f"{source}: holds several splits ({names}); write {folder}@SPLIT")
    return next(iter(by_split.values()))


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason})") from error


# --- formats: content, name and limit to rows --------------------------------------------------


def _parse_jsonl(content: bytes, name: str, limit: int | None) -> Iterator[DataRow]:
    for number, line in enumerate(content.removeprefix(_BOM).split(b"\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                fields = json.loads(_decode(line, where))
            except (ValueError, RecursionError) as error:
                reason = type(error).__name__
                if isinstance(error, json.JSONDecodeError):
                    reason = f"{error.msg.removesuffix(' starting at')}, column {error.colno}"
                raise InputError(f"{where}: not JSON ({reason})") from error
            yield _row(fields, where)


def _parse_json(content: bytes, name: str, limit: int | None) -> Iterator[DataRow]:
    """A list of rows, `{"data": [...]}`, a single row, or JSONL under the name of JSON."""
    try:
        document = json.loads(content)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _parse_jsonl(content, name, limit)
            return
        raise InputError(f"{name}, line {error.lineno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({type(error).__name__})") from error
    if isinstance(document, dict):
        document = document.get("data", [document])
    if not isinstance(document, list):
        raise InputError(f"{name}: neither a list of problems nor an object with a list 'data'")
    for number, fields in enumerate(document, start=1):
        yield _row(fields, f"{name}, row {number}")


def _parse_csv(content: bytes, name: str, limit: int | None) -> Iterator[DataRow]:
    lines = io.StringIO(_decode(content, name).removeprefix("\ufeff"), newline="")
    reader = csv.reader(lines, strict=True)
    header: list[str] = []
    where = f"{name}, line 1"  # where a row begins: a cell may hold several lines
    try:
        for cells in reader:
            if header and cells and len(cells) != len(header):
                raise InputError(f"{where}: {len(cells)} cells, the header names {len(header)}")
            if header and cells:
                yield DataRow(where, dict(zip(header, cells, strict=True)))
            header = header or cells
            where = f"{name}, line {reader.line_num + 1}"
    except csv.Error as error:
        raise InputError(f"{where}: not CSV ({error})") from error


def _parse_parquet(content: bytes, name: str, limit: int | None) -> Iterator[DataRow]:
    try:
        pyarrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise _missing(name, "pyarrow to read parquet") from error
    try:
        file = parquet.ParquetFile(io.BytesIO(content))
        wanted, at_once = _bounds(file.metadata, name, limit)
        number = size = 0
        for batch in file.iter_batches(at_once):
            for fields in batch.slice(0, wanted - number).to_pylist():
                number += 1
                size += sum(len(str(value)) for value in fields.values())
                if size > _MOST_BYTES:
                    raise InputError(f"{name}, row {number}: beyond {_MOST_BYTES:,} characters")
                yield DataRow(f"{name}, row {number}", fields)
            if number >= wanted:
                return
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{name}: not parquet ({_first_line(error)})") from error


def _bounds(metadata: Any, name: str, limit: int | None) -> tuple[int, int]:
    """How many rows of a parquet file are read, and how many at a time.

    A list has a cell for each of its items.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = range(metadata.num_columns)
    cells = sum(group.column(column).num_values for group in groups for column in columns)
    size = max((group.total_byte_size for group in groups), default=0)
    at_once = max(1, min(1024, _MOST_BYTES // max(size, 1)))  # no row is larger than its group
    if cells <= _MOST_CELLS:
        return metadata.num_rows, at_once
    if limit is None or limit * metadata.num_columns > _MOST_CELLS:
        raise InputError(
            f"{name}: {metadata.num_rows:,} rows of {cells:,} cells; at most {_MOST_CELLS:,} are "
            "read (--limit N reads the first N rows)"
        )
    return limit, at_once


_PARSERS: dict[str, Callable[[bytes, str, int | None], Iterator[DataRow]]] = {
    ".jsonl": _parse_jsonl,
    ".ndjson": _parse_jsonl,
    ".json": _parse_json,
    ".csv": _parse_csv,
    ".parquet": _parse_parquet,
}


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error


def _row(fields: Any, where: str) -> DataRow:
    if not isinstance(fields, dict):
        raise InputError(f"{where}: not a JSON object")
    return DataRow(where, fields)
