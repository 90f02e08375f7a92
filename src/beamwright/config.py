"""All settings of a run, from a recipe and flat options. Knows names; no torch, no models.

A recipe is a YAML file with the sections of `sections`; command-line options override it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from beamwright import sections
from beamwright.errors import InputError
from beamwright.io import read_yaml
from beamwright.registry import declared_options, unknown
from beamwright.sections import Section

_LONGEST_SHOWN = 120
_OF_SEVERAL = ("base", "settings", "grid", "dataset")  # of `evaluate.recipes`


class Settings(Section):
    """Everything one run depends on; the same sections as a recipe file."""

    model: sections.ModelSettings = sections.ModelSettings()
    sampling: sections.SamplingSettings = sections.SamplingSettings()
    step: sections.StepSettings = sections.StepSettings()
    search: sections.SearchSettings = sections.SearchSettings()
    stop: sections.StopSettings = sections.StopSettings()
    memory: sections.MemorySettings = sections.MemorySettings()
    schedule: sections.ScheduleSettings = sections.ScheduleSettings()
    sparse: sections.SparseSettings = sections.SparseSettings()

    def __repr__(self) -> str:
        """What differs from the defaults, as `build` takes it."""
        usual, shown = type(self)(), []
        for name, _ in self:
            section, plain = dict(getattr(self, name)), dict(getattr(usual, name))
            shown += [f"{k}={v!r:.80}" for k, v in section.items() if v != plain.get(k)]
        return f"Settings({', '.join(shown)})"

    __str__ = __repr__

    @classmethod
    def build(cls, recipe: str | os.PathLike[str] | None = None, **options: Any) -> Settings:
        """Settings from an optional recipe and flat options, which override it.

        A flat option belongs to the one section that has a field of its name; `None` means
        "not given". Raises InputError with one line on an unknown or impossible value.
        """
        given = load_recipe(Path(recipe)) if recipe else {}
        source = f"recipe {recipe}: " if recipe else ""
        owners = option_owners()
        for section, keys in given.items():
            if section not in cls.model_fields:
                raise InputError(source + _no_section(section, owners))
            for name in keys:
                if owners.get(name) != section:
                    raise InputError(source + _unknown(name, owners, section))
        return cls._with(given, options, source)

    def changed(self, **options: Any) -> Settings:
        """The same settings but for these flat options; `None` means "not given".

        Another strategy does not inherit the options of the present one. Raises InputError as
        `build`.
        """
        given = self.model_dump(exclude_unset=True)
        if options.get("search") not in (None, self.search.search):
            for name in self.search.model_extra or ():
                del given["search"][name]
        return self._with(given, options)

    @classmethod
    def _with(
        cls, given: dict[str, dict[str, Any]], options: dict[str, Any], source: str = ""
    ) -> Settings:
        owners = option_owners()
        for name, value in options.items():
            if name not in owners:
                raise InputError(_unknown(name, owners))
            if value is not None:
                given.setdefault(owners[name], {})[name] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InputError(source + describe_invalid(error)) from error


@cache
def gone() -> dict[str, str]:
    """Options that there were, and values (`--choose pairwise`), with what became of each."""
    became: dict[str, str] = read_yaml(Path(__file__).with_name("gone.yaml"), "options")
    return became


def section_fields() -> dict[str, dict[str, FieldInfo]]:
    """The fields of every section by name."""
    sections: Any = Settings.model_fields.items()
    return {name: info.annotation.model_fields for name, info in sections}


def option_owners() -> dict[str, str]:
    """The section of every option: fields of the sections, and what strategies and others declare.

    Strategies and schedules are known once their rooms are imported.
    """
    fields = {name: section for section, names in section_fields().items() for name in names}
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


def _no_section(key: str, owners: dict[str, str]) -> str:
    """What is wrong with a key of a recipe that is no section."""
    if key in _OF_SEVERAL:
        return f"{key!r} makes it a recipe of several settings, for `beamwright eval --recipe`"
    if key in owners:
        return f"unknown section {key!r}: write it as `{owners[key]}: {{{key}: ...}}`"
    return unknown(key, key, Settings.model_fields)


def _unknown(name: str, owners: dict[str, str], section: str | None = None) -> str:
    """What is wrong with a name that no option has, or none of this section."""
    where = name if section is None else f"{section}.{name}"
    if section is not None and name in owners:
        return f"unknown option {where!r}: {name} belongs in section {owners[name]!r}"
    if name in gone():
        return f"unknown option {where!r}: {gone()[name]}"
    return unknown(where, name, owners)


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
    if (written := f"--{option} {first['input']}") in gone():
        return f"{written}: {gone()[written]}"
    value = repr(first["input"])  # of any length: a file may hold it
    if len(value) > _LONGEST_SHOWN:
        value = f"{value[:_LONGEST_SHOWN]}..."
    return f"{place} (--{option}): {first['msg']}, got {value}"
