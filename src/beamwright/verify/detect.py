"""Which family a checkpoint belongs to: rows of `families/*.yaml`, and what each looks for.

Reads config.json, names of tensors and of tokens; no weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from beamwright.errors import InputError
from beamwright.files import read_regular
from beamwright.sections import Section
from beamwright.verify.spec import SPEC_FILE, VerifierSpec, parse_spec, read_spec_file

_FOLDER = Path(__file__).parent / "families"
_TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


class Detect(Section):
    """What tells a family's checkpoints; all that is given must hold.

    tensors: names in the weight files. architectures: patterns for config.json's. token: is in the
    tokenizer's files. name: regular expression for the folder's or the hub's name.
    """

    tensors: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    token: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Family:
    """A row. written: its spec as a mapping, for `family: NAME` in a user's file."""

    spec: VerifierSpec
    about: str
    detect: Detect | None
    written: dict[str, Any]


def families(folder: Path = _FOLDER) -> dict[str, Family]:
    """All rows by name.

    Raises:
        InputError: if a row is not valid.
    """
    found: dict[str, Family] = {}
    for file in sorted(folder.glob("*.yaml")):
        written = read_spec_file(file)
        about, detect = str(written.pop("about", "")), written.pop("detect", None)
        spec = parse_spec(written, str(file))
        try:
            seen = None if detect is None else Detect.model_validate(detect)
        except ValidationError as error:
            raise InputError(f"verifier {file}: detect: {error.errors()[0]['msg']}") from error
        found[spec.name] = Family(spec, about, seen, written)
    return found


def family_spec(name: str) -> VerifierSpec:
    """The spec of a family.

    Raises:
        InputError: if there is none of that name.
    """
    return _row(name).spec


def load_spec(folder: Path) -> VerifierSpec:
    """The spec of a checkpoint folder: its `verifier.yaml`, or the family it is recognised as.

    Raises:
        InputError: if there is neither, or the file is not valid.
    """
    file = folder / SPEC_FILE
    if file.is_file():
        written = read_spec_file(file)
        if "family" in written:
            name = written.pop("family")
            if not isinstance(name, str):
                raise InputError(f"verifier {file}: family: a name is expected")
            written = _merged({**_row(name).written, "name": f"{name}, changed"}, written)
        return parse_spec(written, str(file))
    rows = families()
    matches = [row.spec for row in rows.values() if row.detect and _matches(row.detect, folder)]
    if len(matches) == 1:
        return matches[0]
    several = " and ".join(spec.name for spec in matches)
    raise InputError(
        f"verifier {folder}: no {SPEC_FILE} says how its scores are read, and it is recognised as "
        f"{several or 'no known family'}; name one: --verifier family:NAME:{folder} "
        f"(NAME: {', '.join(rows)})"
    )


def _row(name: str) -> Family:
    rows = families()
    if name not in rows:
        raise InputError(f"verifier family {name!r} is not known; there are {', '.join(rows)}")
    return rows[name]


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = {**old, **value} if both and old is not None else value
    return merged


def _matches(detect: Detect, folder: Path) -> bool:
    config = _config(folder)
    if detect.name is not None:
        names = f"{folder.name} {_hub_name(folder)} {config.get('_name_or_path', '')}"
        if not re.search(detect.name, names, re.IGNORECASE):
            return False
    if detect.architectures:
        own = [str(name) for name in config.get("architectures") or ()]
        if not any(fnmatchcase(name, wanted) for name in own for wanted in detect.architectures):
            return False
    if detect.token is not None and not _has_token(folder, detect.token):
        return False
    if not detect.tensors:
        return True
    from beamwright.models.weights import tensor_names  # noqa: PLC0415 (slow import)

    return set(detect.tensors) <= tensor_names(folder)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / "config.json"))
    except (OSError, ValueError):
        return {}  # what is wrong with it is said when the model is loaded
    return found if isinstance(found, dict) else {}


def _hub_name(folder: Path) -> str:
    """`models--ORG--NAME` of the hub's cache, whose folders are named by commit."""
    name = folder.parent.parent.name
    return name if name.startswith("models--") else ""


def _has_token(folder: Path, token: str) -> bool:
    written = json.dumps(token)
    files = [folder / name for name in _TOKEN_FILES]
    return any(f.is_file() and written in f.read_text("utf-8", errors="replace") for f in files)
