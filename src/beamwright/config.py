"""All settings of a run, from a recipe and flat options. Knows names; no torch, no models.

A recipe is a YAML file with the sections of `sections`; command-line options override it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.registry import declared_options, did_you_mean
from beamwright.sections import (
    MemorySettings,
    ModelSettings,
    SamplingSettings,
    ScheduleSettings,
    SearchSettings,
    Section,
    SparseSettings,
    StepSettings,
    StopSettings,
)

_LONGEST_SHOWN = 120
_OF_SEVERAL = ("base", "settings", "grid", "dataset")  # of `evaluate.recipes`

# Options that there were, and what became of them.
GONE = {
    "score_cache": "scores are kept no longer; repeats of one call are scored once anyway",
    "stop_score": "Solver(stop=...) takes a function that says when a search ends",
    "compat": "it is a plug-in of the lab, --plugin lab/beamwright_lab/search_and_learn.py "
    "--search search-and-learn",
    "paper": "the LBS paper's equations are the lab's, python -m beamwright_lab.paper.figures",
}


class Settings(Section):
    """Everything one run depends on; the same sections as a recipe file."""

    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    step: StepSettings = StepSettings()
    search: SearchSettings = SearchSettings()
    stop: StopSettings = StopSettings()
    memory: MemorySettings = MemorySettings()
    schedule: ScheduleSettings = ScheduleSettings()
    sparse: SparseSettings = SparseSettings()

    @classmethod
    def build(cls, recipe: str | os.PathLike[str] | None = None, **options: Any) -> Settings:
        """Settings from an optional recipe and flat options, which override it.

        A flat option belongs to the one section that has a field of its name; `None` means
        "not given". Raises InputError with one line on an unknown or impossible value.
        """
        sections: dict[str, dict[str, Any]] = load_recipe(Path(recipe)) if recipe else {}
        source = f"recipe {recipe}: " if recipe else ""
        owners = option_owners()
        for section, keys in sections.items():
            if section not in cls.model_fields:
                raise InputError(source + _no_section(section, owners))
            for name in keys:
                if owners.get(name) != section:
                    raise InputError(source + _unknown(name, owners, section))
        return cls._with(sections, options, source)

    def changed(self, **options: Any) -> Settings:
        """The same settings but for these flat options; `None` means "not given".

        Another strategy does not inherit the options of the present one. Raises InputError as
        `build`.
        """
        sections = {
            name: getattr(self, name).model_dump(exclude_unset=True)
            for name in type(self).model_fields
        }
        if options.get("search") not in (None, self.search.search):
            for name in self.search.model_extra or ():
                del sections["search"][name]
        return self._with(sections, options)

    @classmethod
    def _with(
        cls, sections: dict[str, dict[str, Any]], options: dict[str, Any], source: str = ""
    ) -> Settings:
        owners = option_owners()
        for name, value in options.items():
            if name not in owners:
                raise InputError(_unknown(name, owners))
            if value is not None:
                sections.setdefault(owners[name], {})[name] = value
        try:
            return cls.model_validate(sections)
        except ValidationError as error:
            raise InputError(source + describe_invalid(error)) from error


def option_owners() -> dict[str, str]:
    """The section of every option: fields of the sections, and what strategies and others declare.

    Strategies and schedules are known once their rooms are imported.
    """
    fields = {
        name: section
        for section, info in Settings.model_fields.items()
        for name in _fields_of(info)
    }
    return {**declared_options(), **fields}


def load_recipe(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a YAML recipe, not yet validated.

    Raises:
        InputError: if the file is missing, is not YAML, or is not a mapping of mappings.
    """
    content = read_yaml(path, "recipe")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"recipe {path}: expected sections such as 'search:', not a plain value")
    for section, keys in content.items():
        if section in Settings.model_fields and not isinstance(keys, dict):
            raise InputError(f"recipe {path}: section {section!r} must hold keys and values")
    return content


def _short(value: Any) -> str:
    """A value as an error shows it, whatever a file may hold in its place."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _fields_of(section: FieldInfo) -> Iterable[str]:
    return section.annotation.model_fields  # type: ignore[union-attr, no-any-return]


def _no_section(key: str, owners: dict[str, str]) -> str:
    """What is wrong with a key of a recipe that is no section."""
    if key in _OF_SEVERAL:
        return f"{key!r} makes it a recipe of several settings, for `beamwright eval --recipe`"
    if key in owners:
        return f"unknown section {key!r}: write it as `{owners[key]}: {{{key}: ...}}`"
    hint = did_you_mean(key, Settings.model_fields).rstrip()
    return f"unknown option {key!r}" + (f": {hint}" if hint else "")


def _unknown(name: str, owners: dict[str, str], section: str | None = None) -> str:
    """What is wrong with a name that no option has, or none of this section."""
    where = name if section is None else f"{section}.{name}"
    if section is not None and name in owners:
        return f"unknown option {where!r}: {name} belongs in section {owners[name]!r}"
    hint = GONE.get(name) or did_you_mean(name, owners).rstrip()
    return f"unknown option {where!r}" + (f": {hint}" if hint else "")


def describe_invalid(error: ValidationError, where: str = "") -> str:
    """One line of what pydantic found. where: of the settings, what goes before the option."""
    first = error.errors()[0]
    place = where + ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown option {place!r}"
    names = [part for part in first["loc"] if isinstance(part, str)]  # numbers are list places
    option = (names or [place])[-1].replace("_", "-")
    if first["type"] == "value_error":  # of a parser above, whose words hold the value
        return f"{place} (--{option}): {first['ctx']['error']}"
    return f"{place} (--{option}): {first['msg']}, got {_short(first['input'])}"
