"""Options of `Solver` and its calls with their types: settings, and options of built-in parts.

`make stubs` writes the same types to `options.pyi`, for type checkers and editors. Options that a
plugin declares are accepted by name, but no type checker knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

import beamwright.schedule  # noqa: F401 (its declarations have options)
from beamwright.config import Settings
from beamwright.engine.decisions import StopFunction
from beamwright.protocols import Verifier
from beamwright.registry import declared_options, entries_with_option
from beamwright.verify.scorers import ScoreFunction

# Sections that all problems of a solver share, because models and memory are set up once.
SHARED = ("model", "memory", "schedule", "sparse")

# Types of the objects that a user may pass in the place of a name, by option.
OBJECTS: dict[str, Any] = {"verifier": ScoreFunction | Verifier}


def option_fields(sections: Sequence[str]) -> dict[str, tuple[Any, FieldInfo]]:
    """Return each option of these sections, as the type that a caller may pass and the field."""
    options: dict[str, tuple[Any, FieldInfo]] = {}
    for section in sections:
        info = Settings.model_fields[section]
        for name, field in info.annotation.model_fields.items():
            parsers = [each for each in field.metadata if isinstance(each, BeforeValidator)]
            kind = parsers[0].json_schema_input_type if parsers else field.annotation
            options[name] = kind | OBJECTS[name] if name in OBJECTS else kind, field
    for name, section in declared_options().items():
        fields = [row.options[name] for row in entries_with_option(name) if not row.is_plugin]
        if section in sections and fields:
            options[name] = fields[0].annotation | None, fields[0]
    if "stop" in sections:
        words = "Of a tree whose round is scored: why it ends here, or None to go on; asked last."
        kind = StopFunction | Sequence[StopFunction] | None
        options["stop"] = kind, FieldInfo(default=None, description=words)
    return options


def _types(sections: Sequence[str]) -> dict[str, Any]:
    return {name: kind for name, (kind, _) in option_fields(sections).items()}


PER_REQUEST = tuple(name for name in Settings.model_fields if name not in SHARED)
RequestOptions = TypedDict("RequestOptions", _types(PER_REQUEST), total=False)
ProblemOptions = TypedDict("ProblemOptions", {**_types(PER_REQUEST), "priority": int}, total=False)
SolverOptions = TypedDict("SolverOptions", _types((*PER_REQUEST, *SHARED)), total=False)
