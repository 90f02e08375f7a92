"""Settings: all options of a run, merged from a recipe file and command-line or Python options.

A recipe is a YAML file with the sections of `sections`. Options override the recipe. This module
imports no torch and no models.
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
from beamwright.io import describe_fault, read_yaml
from beamwright.registry import declared_options, unknown_option
from beamwright.sections import Section

# Sections of a recipe that only `beamwright eval --recipe` reads (`evaluate.recipes`).
_EVALUATION_SECTIONS = ("base", "settings", "grid", "dataset")


class Settings(Section):
    """All options of one run, in the same sections as a recipe file."""

    model: sections.ModelSettings = sections.ModelSettings()
    sampling: sections.SamplingSettings = sections.SamplingSettings()
    step: sections.StepSettings = sections.StepSettings()
    search: sections.SearchSettings = sections.SearchSettings()
    stop: sections.StopSettings = sections.StopSettings()
    memory: sections.MemorySettings = sections.MemorySettings()
    schedule: sections.ScheduleSettings = sections.ScheduleSettings()
    sparse: sections.SparseSettings = sections.SparseSettings()

    def __repr__(self) -> str:
        """Return the settings that differ from their defaults, in the form that `build` accepts."""
        usual, shown = type(self)(), []
        for name, _ in self:
            section, plain = dict(getattr(self, name)), dict(getattr(usual, name))
            shown += [f"{k}={v!r:.80}" for k, v in section.items() if v != plain.get(k)]
        return f"Settings({', '.join(shown)})"

    __str__ = __repr__

    @classmethod
    def build(cls, recipe: str | os.PathLike[str] | None = None, **options: Any) -> Settings:
        """Build settings from an optional recipe file and options; options override the recipe.

        options: values by option name, without sections. None means "not given".

        Raises:
            InputError: if an option is unknown or a value is not valid; the message is one line.
        """
        given = load_recipe(Path(recipe)) if recipe else {}
        source = f"recipe {recipe}: " if recipe else ""
        owners = option_sections()
        for section, keys in given.items():
            if section not in cls.model_fields:
                raise InputError(source + _no_section(section, owners))
            for name in keys:
                if owners.get(name) != section:
                    raise InputError(source + _unknown(name, owners, section))
        return cls._with(given, options, source)

    def changed(self, **options: Any) -> Settings:
        """Return a copy with some options changed; None leaves an option as it is.

        If the strategy changes, the options of the old strategy are dropped.

        Raises:
            InputError: for the same reasons as `build`.
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
        owners = option_sections()
        for name, value in options.items():
            if name not in owners:
                raise InputError(_unknown(name, owners))
            if value is not None:
                given.setdefault(owners[name], {})[name] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InputError(source + describe_invalid(error, in_recipe=bool(source))) from error


@cache
def removed_options() -> dict[str, str]:
    """Return advice for each option or value that an older version had, for error messages.

    The keys are option names, or values such as `--choose pairwise`.
    """
    advice: dict[str, str] = read_yaml(Path(__file__).with_name("gone.yaml"), "options")
    return advice


def section_fields() -> dict[str, dict[str, FieldInfo]]:
    """Return the pydantic field of every setting, by section name and option name."""
    sections: Any = Settings.model_fields.items()
    return {name: info.annotation.model_fields for name, info in sections}


def option_sections() -> dict[str, str]:
    """Return the section of every option, by the option's name.

    Options that strategies, schedules and verifiers declare are included once their packages are
    imported.
    """
    fields = {name: section for section, names in section_fields().items() for name in names}
    return {**declared_options(), **fields}


def load_recipe(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a YAML recipe, not yet validated.

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
            raise InputError(f"recipe {path}: section {section!r} must contain keys and values")
    return content


def _no_section(key: str, owners: dict[str, str]) -> str:
    """Return the error message for a recipe's key that is not a section."""
    if key in _EVALUATION_SECTIONS:
        return f"{key!r} works only in recipes of `beamwright eval --recipe`"
    if key in owners:
        return f"unknown section {key!r}. Write `{owners[key]}: {{{key}: ...}}`."
    return unknown_option(key, key, Settings.model_fields)


def _unknown(name: str, owners: dict[str, str], section: str | None = None) -> str:
    """Return the error message for an option that is unknown, or unknown in `section`."""
    where = name if section is None else f"{section}.{name}"
    if section is not None and name in owners:
        return f"unknown option {where!r}. Move {name} to section {owners[name]!r}."
    if name in removed_options():
        return f"unknown option {where!r}. {removed_options()[name]}"
    return unknown_option(where, name, owners)


def describe_invalid(error: ValidationError, where: str = "", *, in_recipe: bool = False) -> str:
    """Return a one-line error message for the first error that pydantic reports.

    where: text before the option's path, such as "search.".
    in_recipe: True if a recipe may contain the error, so that the message shows the path, too.
    """
    first = error.errors()[0]
    place = where + ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown option {place!r}"
    names = [part for part in first["loc"] if isinstance(part, str)]  # numbers are list indices
    option = f"--{(names or [place])[-1].replace('_', '-')}"
    shown = f"{place} ({option})" if in_recipe else option
    # An error from a parser of `units`. Its message contains the value already.
    if first["type"] == "value_error":
        return f"{shown}: {first['ctx']['error']}"
    if (written := f"{option} {first['input']}") in removed_options():
        return f"unknown value {written}. {removed_options()[written]}"
    return f"{shown}: {describe_fault(first)}, got {first['input']!r:.120}"
