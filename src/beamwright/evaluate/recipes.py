"""Recipes: YAML files with the settings of one or several runs. Knows no solver.

A recipe with only setting sections is one run. `settings:` (a list of named overrides) and `grid:`
(lists of values, all combinations) make several runs; together, each named setting runs over the
whole grid. Keys are the options of `Settings`, flat or in sections. Command-line options override
the recipe. A recipe of several runs may name its `dataset:`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamwright.config import Settings, load_recipe, option_sections
from beamwright.errors import InputError
from beamwright.search import make_strategy
from beamwright.search.defaults import vote_note, with_strategy_and_verifier

_PARTS = ("base", "settings", "grid", "dataset")
_MOST_POINTS = 10_000
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# Options of which the name of a run shows only the value.
_BARE = ("search", "model", "verifier", "schedule")


@dataclass(frozen=True)
class NamedSettings:
    """The settings of one run, with strategy and verifier resolved.

    name: the name of the run's folder; None for a single run.
    note: a message for the user, or None.
    """

    name: str | None
    settings: Settings
    note: str | None = None


@dataclass(frozen=True)
class Recipe:
    """The runs of a recipe. dataset: the problem set, if the recipe names one."""

    runs: tuple[NamedSettings, ...]
    dataset: str | None = None


def read_recipe(path: Path | None, given: Mapping[str, Any]) -> Recipe:
    """Read a recipe and check the settings of all runs.

    path: the recipe file; None means no recipe.
    given: options of the command line. They override the recipe and remove axes from its grid.

    Raises:
        InputError: one line that names the recipe and, if there are several, the setting.
    """
    if path is None:
        return Recipe((_checked(None, Settings.build(**given)),))
    content, where = load_recipe(path), f"recipe {path}"
    if not set(_PARTS) & set(content):
        return Recipe((_checked(None, Settings.build(path, **given), f"{where}: "),))
    for key in content:
        if key not in _PARTS:
            raise InputError(
                f"{where}: {key!r} is not one of {', '.join(_PARTS)}; move it into base"
            )
    dataset: Any = content.get("dataset")
    if not isinstance(dataset, str | None):
        raise InputError(f"{where}: 'dataset' must be text, as on the command line")
    return Recipe(tuple(_expand(content, given, where)), dataset)


def _expand(
    content: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> list[NamedSettings]:
    """Combine each named setting with each point of the grid."""
    base = _flat(content.get("base"), f"{where}, base")
    grid = _flat(content.get("grid"), f"{where}, grid")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}: {name!r} must be a list of values")
    axes = {name: values for name, values in grid.items() if name not in given}
    num_points = math.prod(map(len, axes.values()))
    if num_points > _MOST_POINTS:
        raise InputError(f"{where}, grid: {num_points:,} combinations exceed {_MOST_POINTS:,}")
    entries = content.get("settings") or [{"name": "-"}]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{where}: 'settings' must be a list of named overrides")
    runs: dict[str, NamedSettings] = {}
    for number, entry in enumerate(entries, start=1):
        overrides = {**entry}
        given_name = str(overrides.pop("name", ""))
        if not _NAME.fullmatch(given_name) and "settings" in content:
            needs = "needs a 'name' of letters, digits and . _ + -"
            raise InputError(f"{where}: setting {number} {needs}")
        flat = {**base, **_flat(overrides, f"{where}, setting {given_name!r}")}
        for point in itertools.product(*axes.values()):
            chosen = dict(zip(axes, point, strict=True))
            parts = [given_name, *(_label(key, value) for key, value in chosen.items())]
            name = "-".join(part for part in parts if part.strip("-")) or "run"
            if name in runs:
                raise InputError(f"{where}: two settings named {name!r}")
            place = f"{where}, setting {name!r}: "
            try:
                settings = Settings.build(**{**flat, **chosen, **given})
            except InputError as error:
                raise InputError(f"{place}{error}") from error
            runs[name] = _checked(name, settings, place)
    return list(runs.values())


def _flat(keys: Any, where: str) -> dict[str, Any]:
    """Flatten options and sections to options by name; `search` is a section if a mapping."""
    if not isinstance(keys, dict | None):
        raise InputError(f"{where}: must be options, such as 'n: 16'")
    owners = option_sections()
    flat: dict[str, Any] = {}
    for key, value in (keys or {}).items():
        section = isinstance(value, dict) and key in Settings.model_fields
        for name, option in value.items() if section else [(key, value)]:
            if name not in owners or (section and owners[name] != key):
                raise InputError(f"{where}: unknown option {name!r}")
            flat[name] = option
    return flat


def _checked(name: str | None, settings: Settings, where: str = "") -> NamedSettings:
    """Resolve and check settings, so that an error appears before any run starts."""
    try:
        chosen = with_strategy_and_verifier(settings)
        make_strategy(chosen.search)
    except InputError as error:
        raise InputError(f"{where}{error}") from error
    return NamedSettings(name, chosen, vote_note(settings))


def _label(key: str, value: Any) -> str:
    """Return a grid value as part of a folder name, such as `beam`, `n16` or `top_p0.9`."""
    text = _UNSAFE.sub("_", str(value)).strip("_.")
    return text if key in _BARE else f"{key}{text}"
