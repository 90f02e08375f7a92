"""Checks the keys and tensor names of a model's files against tables of known ones.

`key_tables.toml` has one table for each kind of file. A key that is in no row is unknown to this
version. An unknown key is refused where it may change results; otherwise `doctor` and the loader
print a remark. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_toml_beside

Sizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KeyTable:
    """The known keys of one kind of file, as shell patterns such as `rope.scaling.*`."""

    # Name of the kind of file, for messages.
    reader: str
    # Keys that Beamwright reads.
    used: tuple[str, ...] = ()
    # Keys that are known not to affect results here.
    harmless: tuple[str, ...] = ()
    # Keys that are known to affect results in a way that is not implemented, each with advice.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Whether keys in none of these tables are refused, or cause a remark.
    rest: Literal["refuse", "remark"] = "remark"

    def check(self, keys: Iterable[str], where: str) -> tuple[str, ...]:
        """Check the keys of a file. Return remarks on unknown keys, one line each.

        Raises:
            UnsupportedModelError: for a key that changes results and is not implemented.
        """
        remarks = []
        for key in keys:
            if matches_any(key, self.used) or matches_any(key, self.harmless):
                continue
            advice = [text for pattern, text in self.refused.items() if fnmatchcase(key, pattern)]
            if advice or self.rest == "refuse":
                way_out = advice[0] if advice else "this version does not support it"
                raise UnsupportedModelError(f"{where}: {self.reader} has {key!r:.80}: {way_out}")
            remarks.append(f"{where}: {self.reader} has {key!r:.80}, which is ignored")
        return tuple(remarks)


def matches_any(key: str, patterns: Iterable[str]) -> bool:
    """Return whether `key` matches one of the shell patterns."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def nonempty_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys that are set; nested ones as `outer.inner`.

    Keys whose values are empty, such as None, False, 0 and {}, are left out.
    """
    keys = []
    for key, value in values.items():
        nested = nonempty_keys(value) if isinstance(value, dict) else [""] * bool(value)
        keys += [f"{key}.{inner}" if inner else key for inner in nested]
    return keys


# --- the tables ------------------------------------------------------------------------------

_TABLES = read_toml_beside(__file__)
_CONFIG, _GGUF = _TABLES["config"], _TABLES["gguf"]
# Harmless keys of every config.json.
HARMLESS: tuple[str, ...] = tuple(_CONFIG["harmless"])
QUANTISATION, GGUF_FILE, TOKENIZER_CONFIG, GENERATION, _TENSORS = (
    KeyTable(**_TABLES[name])
    for name in ("quantisation", "gguf_file", "tokenizer_config", "generation", "tensors")
)
# Tables for config.json, by family of Beamwright's own decoder.
CONFIGS = {
    family: KeyTable(
        "config.json",
        (*_CONFIG["every"], *(_CONFIG["llama_like"] if family != "opt" else ()), *more),
        HARMLESS,
    )
    for family, more in _CONFIG["families"].items()
}
# Tables for GGUF metadata, by architecture, for keys that begin with the architecture's name.
GGUF = {
    model: KeyTable(
        "GGUF header",
        used=tuple(f"{model}.{key}" for key in (*_GGUF["every"], *more)),
        harmless=tuple(f"{model}.{key}" for key in _GGUF["harmless"]),
        refused={f"{model}.{key}": why for key, why in _GGUF["refused"].items()},
        rest="refuse",
    )
    for model, more in _GGUF["models"].items()
}


# --- tensors ---------------------------------------------------------------------------------


def check_tensor_sizes(
    needed: Sizes, stored: Sizes, where: str, kind: str, spare: Iterable[str] = ()
) -> None:
    """Check that a checkpoint has exactly the tensors that a model needs, in their sizes.

    Tensors that are known not to affect results are ignored. Every loader calls this function
    before it reads values, and `doctor` calls it too.

    Args:
        needed: sizes of the model's tensors by name.
        stored: sizes of the checkpoint's tensors by name.
        where: the model, for messages.
        kind: its architecture, for messages.
        spare: patterns of further tensors that may be ignored.

    Raises:
        InputError: if a tensor is left over, missing or of another size, with advice.
    """
    spared = (*_TENSORS.harmless, *spare)
    left = [name for name in stored if name not in needed and not matches_any(name, spared)]
    missing = [name for name in needed if name not in stored]
    strange = f"does not belong to a {kind} with this config"
    faults = [
        f"weight {names[0]} {what}{f' (and {len(names) - 1:,} more)' * (len(names) > 1)}"
        for what, names in {"is missing": missing, strange: left}.items()
        if names
    ] or [
        f"weight {name} has shape {stored[name]}, config says {size}"
        for name, size in needed.items()
        if stored[name] != size
    ][:1]
    causes = _TABLES["causes"]
    reasons = [why for pattern, why in causes.items() if left and fnmatchcase(left[0], pattern)]
    reasons.append(causes["missing" if missing and not left else "other"])
    if faults:
        raise InputError(f"{where}: {', '.join(faults)}: {reasons[0]}")
