"""Families of verifiers: a declaration each in `families/`, and whose checkpoints they are.

Knows config.json, names of tensors and of tokens; no weights.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from beamwright.errors import InputError
from beamwright.io import read_object
from beamwright.sections import Section
from beamwright.verify.spec import PACKAGED_JUDGE, JudgeSpec, VerifierSpec, read_mapping, validated

SPEC_FILE = "verifier.yaml"
AnySpec: TypeAlias = VerifierSpec | JudgeSpec
_FAMILIES = Path(__file__).parent / "families"
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

    def matches(self, folder: Path) -> bool:
        """True if the checkpoint in this folder looks so."""
        config: dict[str, Any] = {}
        with suppress(InputError):  # what is wrong with it is said when the model is loaded
            config = read_object(folder / "config.json")
        if self.name is not None:
            # The hub's cache, whose folders are named by commit: models--ORG--NAME/snapshots/...
            hub = folder.parent.parent.name
            names = [folder.name, hub if hub.startswith("models--") else ""]
            text = " ".join([*names, str(config.get("_name_or_path", ""))])
            if not re.search(self.name, text, re.IGNORECASE):
                return False
        if self.architectures:
            named = map(str, config.get("architectures") or ())
            if not any(fnmatchcase(n, wanted) for n in named for wanted in self.architectures):
                return False
        if self.token is not None:
            files = [file for name in _TOKEN_FILES if (file := folder / name).is_file()]
            texts = (file.read_text("utf-8", errors="replace") for file in files)
            if not any(json.dumps(self.token) in text for text in texts):
                return False
        if not self.tensors:
            return True
        from beamwright.models.formats import open_checkpoint  # noqa: PLC0415 (slow import)

        return set(self.tensors) <= open_checkpoint(folder).sizes.keys()


@dataclass(frozen=True)
class VerifierFamily:
    """A row. written: its spec as a mapping, for `family: NAME` in a user's file."""

    spec: AnySpec
    detect: Detect | None
    written: dict[str, Any]


def _validated(written: dict[str, Any], where: str) -> AnySpec:
    """A declaration; one with a `prompt` is a judge's, over the packaged one."""
    if "prompt" in written:
        return validated(JudgeSpec, read_mapping(PACKAGED_JUDGE) | written, where)
    return validated(VerifierSpec, written, where)


def families(folder: Path = _FAMILIES) -> dict[str, VerifierFamily]:
    """All rows by name.

    Raises:
        InputError: if a row is not valid.
    """
    rows: dict[str, VerifierFamily] = {}
    for file in sorted(folder.glob("*.yaml")):
        written = read_mapping(file)
        written.pop("about", None)  # for who reads the file
        detect = written.pop("detect", None)
        looks = None if detect is None else validated(Detect, detect, f"{file}: detect")
        spec = _validated(written, str(file))
        rows[spec.name] = VerifierFamily(spec, looks, written)
    return rows


def family(name: str) -> VerifierFamily:
    """The row of that name.

    Raises:
        InputError: if there is none.
    """
    rows = families()
    if name not in rows:
        raise InputError(f"verifier family {name!r} is not known; there are {', '.join(rows)}")
    return rows[name]


def load_spec(folder: Path) -> AnySpec:
    """The spec of a checkpoint folder: its `verifier.yaml`, or the family it is recognised as.

    Raises:
        InputError: if there is neither, or the file is not valid.
    """
    file = folder / SPEC_FILE
    if file.is_file():
        written = read_mapping(file)
        if "family" in written:
            name = written.pop("family")
            if not isinstance(name, str):
                raise InputError(f"verifier {file}: family: a name is expected")
            base = {**family(name).written, "name": f"{name}, changed"}
            for key, value in written.items():  # mappings are merged key by key, others replaced
                both = isinstance(base.get(key), dict) and isinstance(value, dict)
                base[key] = {**base[key], **value} if both else value
            written = base
        return _validated(written, str(file))
    rows = families()
    matches = [row.spec for row in rows.values() if row.detect and row.detect.matches(folder)]
    if len(matches) == 1:
        return matches[0]
    several = " and ".join(spec.name for spec in matches)
    raise InputError(
        f"verifier {folder}: no {SPEC_FILE} says how its scores are read, and it is recognised as "
        f"{several or 'no known family'}; name one: --verifier family:NAME:{folder} "
        f"(NAME: {', '.join(rows)})"
    )
