"""Families of verifiers: their declarations in `families/`, and detection of their checkpoints.

Detection reads config.json and the names of tensors and tokens, but no weights.
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
from beamwright.io import read_json_object
from beamwright.sections import Section
from beamwright.verify.spec import (
    PACKAGED_JUDGE,
    JudgeSpec,
    VerifierSpec,
    read_mapping,
    validate_spec,
)

SPEC_FILE = "verifier.yaml"
AnySpec: TypeAlias = VerifierSpec | JudgeSpec
_FAMILIES = Path(__file__).parent / "families"
_TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


class Detect(Section):
    """Conditions that detect the checkpoints of a family. All given conditions must hold."""

    tensors: tuple[str, ...] = ()  # names of tensors in the weight files
    architectures: tuple[str, ...] = ()  # patterns; one matches an architecture in config.json
    token: str | None = None  # a token in the tokenizer's files
    name: str | None = None  # regular expression for the folder's name, or the name on the hub

    def matches(self, folder: Path) -> bool:
        """Return True if the checkpoint in `folder` meets all conditions."""
        config: dict[str, Any] = {}
        with suppress(InputError):  # loading the model reports errors in this file
            config = read_json_object(folder / "config.json")
        if self.name is not None:
            # In the hub's cache a folder is named by its commit, and the model's name is two levels
            # higher: models--ORG--NAME/snapshots/COMMIT.
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
    """A family declared in `families/`: how to score, and how to detect its checkpoints."""

    spec: AnySpec
    detect: Detect | None  # None: only `family:NAME:PATH` selects this family
    written: dict[str, Any]  # the declaration, which `family: NAME` in a user's file starts from


def _validated(written: dict[str, Any], where: str) -> AnySpec:
    """Return the validated spec of a declaration.

    A declaration with a `prompt` is a judge, whose missing fields come from the packaged
    `judge.yaml`.
    """
    if "prompt" in written:
        return validate_spec(JudgeSpec, read_mapping(PACKAGED_JUDGE) | written, where)
    return validate_spec(VerifierSpec, written, where)


def families(folder: Path = _FAMILIES) -> dict[str, VerifierFamily]:
    """Return all families by name.

    Raises:
        InputError: if a declaration is not valid.
    """
    rows: dict[str, VerifierFamily] = {}
    for file in sorted(folder.glob("*.yaml")):
        written = read_mapping(file)
        written.pop("about", None)  # a description for readers of the file
        detect = written.pop("detect", None)
        looks = None if detect is None else validate_spec(Detect, detect, f"{file}: detect")
        spec = _validated(written, str(file))
        rows[spec.name] = VerifierFamily(spec, looks, written)
    return rows


def family(name: str) -> VerifierFamily:
    """Return the declared family with this name.

    Raises:
        InputError: if no family has this name.
    """
    rows = families()
    if name not in rows:
        raise InputError(f"verifier family {name!r} is unknown; known: {', '.join(rows)}")
    return rows[name]


def load_spec(folder: Path) -> AnySpec:
    """Return the spec of a checkpoint folder: from its `verifier.yaml`, or of the detected family.

    Raises:
        InputError: if the folder has no `verifier.yaml` and is not detected as exactly one family,
            or if the file is not valid.
    """
    file = folder / SPEC_FILE
    if file.is_file():
        written = read_mapping(file)
        if "family" in written:
            name = written.pop("family")
            if not isinstance(name, str):
                raise InputError(f"verifier {file}: family must be a name")
            base = {**family(name).written, "name": f"{name}, changed"}
            for key, value in written.items():  # merge mappings key by key; replace other values
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
        f"verifier {folder}: the folder has no {SPEC_FILE} and is recognised as "
        f"{several or 'no known family'}; name its family with --verifier family:NAME:{folder} "
        f"(NAME: {', '.join(rows)})"
    )
