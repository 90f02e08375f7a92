"""Which keys and tensors of a model's files are read, and what happens to all others.

One table per reader, in `known.toml`. A key that is in no row is one that this version has never
met: it is refused where it may change results, else named in a remark (`doctor`, and once when the
model is loaded). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from beamwright.errors import InputError, UnsupportedModelError
from beamwright.io import read_beside

Sizes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KeyTable:
    """What one reader does with each key. Keys are patterns as of a shell: `rope.scaling.*`.

    used: read. harmless: known to change nothing that is computed here. refused: known to change
    results in a way that is not implemented, each with what to do. rest: for all other keys.
    """

    reader: str
    used: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    rest: Literal["refuse", "remark"] = "remark"

    def check(self, keys: Iterable[str], where: str) -> tuple[str, ...]:
        """Remarks on keys that are not known, a line each.

        Raises:
            UnsupportedModelError: for a key that changes results and is not implemented.
        """
        remarks = []
        for key in keys:
            if is_among(key, self.used) or is_among(key, self.harmless):
                continue
            advice = [text for pattern, text in self.refused.items() if fnmatchcase(key, pattern)]
            if advice or self.rest == "refuse":
                way_out = advice[0] if advice else "this version does not know it"
                raise UnsupportedModelError(f"{where}: {self.reader} has {key!r:.80}: {way_out}")
            remarks.append(f"{where}: {self.reader} has {key!r:.80}, which is not read")
        return tuple(remarks)


def is_among(key: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is for this key."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def said(values: Mapping[str, Any]) -> list[str]:
    """Keys that say something, nested ones as `outer.inner`; None, False and `{}` do not."""
    found = []
    for key, value in values.items():
        nested = said(value) if isinstance(value, dict) else [""] * bool(value)
        found += [f"{key}.{inner}" if inner else key for inner in nested]
    return found


# --- the tables ------------------------------------------------------------------------------

_TABLES = read_beside(__file__)
_CONFIG, _GGUF = _TABLES["config"], _TABLES["gguf"]
HARMLESS: tuple[str, ...] = tuple(_CONFIG["harmless"])
"""Of every config.json."""
QUANTISATION, GGUF_FILE, TOKENIZER_CONFIG, GENERATION, _TENSORS = (
    KeyTable(**_TABLES[name])
    for name in ("quantisation", "gguf_file", "tokenizer_config", "generation", "tensors")
)
CONFIGS = {
    family: KeyTable(
        "config.json",
        (*_CONFIG["every"], *(_CONFIG["llama_like"] if family != "opt" else ()), *more),
        HARMLESS,
    )
    for family, more in _CONFIG["families"].items()
}
"""By family of the own decoder."""
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
"""By architecture, of keys that begin with its name and whose values say something."""


# --- tensors ---------------------------------------------------------------------------------


def check_fit(
    needed: Sizes, stored: Sizes, where: str, kind: str, spare: Iterable[str] = ()
) -> None:
    """Every tensor of the checkpoint is used, or known not to matter, and none is missing.

    The one comparison of the own decoder, GGUF files and the adapter over `transformers`: it comes
    before any value is read, and `doctor` makes it, too.
    needed, stored: sizes by name; what has no meaning here is stored by the file's own name.
    where, kind: the model and its architecture, for messages. spare: patterns of more names that
    do not matter.

    Raises:
        InputError: that names a tensor left over, missing or of another size, and what to do.
    """
    spared = (*_TENSORS.harmless, *spare)
    left = [name for name in stored if name not in needed and not is_among(name, spared)]
    missing = [name for name in needed if name not in stored]
    strange = f"is not one of a {kind} with this config"
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
    found = [why for pattern, why in causes.items() if left and fnmatchcase(left[0], pattern)]
    found.append(causes["missing" if missing and not left else "other"])
    if faults:
        raise InputError(f"{where}: {', '.join(faults)}: {found[0]}")
