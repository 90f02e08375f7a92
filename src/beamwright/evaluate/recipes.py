"""Recipes of one or several settings: `base:`, `settings:` and `grid:`. Knows no solver.

A recipe with sections alone is one run. With `settings:` (named overrides), `grid:` (lists of
values, every combination) or both (each named setting over the whole grid) it is several. Keys are
the options of `Settings`, flat or in their sections; what the command line gives goes before all.
A recipe of several may name its `dataset:`, and in it `problem_field:` and `answer_field:`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamwright.config import Settings, load_recipe, option_owners
from beamwright.errors import InputError
from beamwright.search import make_strategy
from beamwright.search.defaults import resolved, vote_note

_TEXTS = ("dataset", "problem_field", "answer_field")
_PARTS = ("base", "settings", "grid", *_TEXTS)
_MOST_POINTS = 10_000
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_BARE = ("search", "model", "verifier", "schedule")  # their values say what they are


@dataclass(frozen=True)
class NamedSettings:
    """One run of several, its strategy and verifier named.

    name: of its folder; None where a recipe holds a single run. note: what its user should know.
    """

    name: str | None
    settings: Settings
    note: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What a recipe asks for. The others: as the options of `eval`, where the recipe names them."""

    runs: tuple[NamedSettings, ...]
    dataset: str | None = None
    problem_field: str | None = None
    answer_field: str | None = None


def read_recipe(path: Path | None, given: Mapping[str, Any]) -> Recipe:
    """The runs of a recipe, all checked before the first starts.

    given: flat options of the command line, which override the recipe and take an axis out of
    its grid. path: None stands for a recipe without keys.

    Raises:
        InputError: one line that names the recipe, and the setting where there is one.
    """
    if path is None:
        return Recipe((_checked(None, Settings.build(**given)),))
    content = load_recipe(path)
    if not set(_PARTS) & set(content):
        settings = Settings.build(path, **given)
        return Recipe((_checked(None, settings, f"recipe {path}: "),))
    texts: dict[str, Any] = {name: content.get(name) for name in _TEXTS}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"recipe {path}: {name!r} must be text, as on the command line")
    return Recipe(tuple(_expand(content, given, f"recipe {path}")), **texts)


def _expand(
    content: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> Iterator[NamedSettings]:
    unknown = [key for key in content if key not in _PARTS]
    if unknown:
        raise InputError(f"{where}: {unknown[0]!r} beside {', '.join(_PARTS)}; it belongs in base")
    base = _flat(content.get("base"), f"{where}, base")
    axes = _axes(content.get("grid"), given, where)
    num_points = math.prod(map(len, axes.values()))
    if num_points > _MOST_POINTS:
        raise InputError(f"{where}, grid: {num_points:,} combinations; at most {_MOST_POINTS:,}")
    taken: set[str] = set()
    for name, overrides in _named(content.get("settings"), where):
        for point in itertools.product(*axes.values()):
            chosen = dict(zip(axes, point, strict=True))
            parts = [name, *(_label(key, value) for key, value in chosen.items())]
            full = "-".join(part for part in parts if part) or "run"
            if full in taken:
                raise InputError(f"{where}: two settings named {full!r}")
            taken.add(full)
            options = {**base, **overrides, **chosen}
            yield _built(full, options, given, f"{where}, setting {full!r}")


def _named(entries: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    if entries is None:
        return [("", {})]
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{where}: 'settings' must be a list of named overrides")
    named = []
    for number, entry in enumerate(entries, start=1):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"{where}: setting {number} needs a 'name' of letters, digits and . _ + -"
            )
        overrides = {key: value for key, value in entry.items() if key != "name"}
        named.append((name, _flat(overrides, f"{where}, setting {name!r}")))
    return named


def _axes(grid: Any, given: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
    if grid is None:
        return {}
    if not isinstance(grid, dict):
        raise InputError(f"{where}: 'grid' must hold options with lists of values")
    for name, values in grid.items():
        if name not in option_owners():
            raise InputError(f"{where}, grid: unknown option {name!r}")
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}, grid: {name!r} must be a list of values")
    return {name: values for name, values in grid.items() if name not in given}


def _flat(keys: Any, where: str) -> dict[str, Any]:
    """Options by name, from options and sections (`search` is both: a mapping is a section)."""
    if keys is None:
        return {}
    if not isinstance(keys, dict):
        raise InputError(f"{where}: expected options, such as 'n: 16'")
    owners = option_owners()
    flat: dict[str, Any] = {}
    for key, value in keys.items():
        section = isinstance(value, dict) and key in Settings.model_fields
        for name, option in value.items() if section else [(key, value)]:
            if name not in owners or (section and owners[name] != key):
                raise InputError(f"{where}: unknown option {name!r}")
            flat[name] = option
    return flat


def _built(
    name: str | None, options: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> NamedSettings:
    try:
        settings = Settings.build(**{**options, **given})
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return _checked(name, settings, f"{where}: ")


def _checked(name: str | None, settings: Settings, where: str = "") -> NamedSettings:
    """A strategy that refuses its settings does so before hours of other runs."""
    try:
        chosen = resolved(settings)
        make_strategy(chosen.search)
    except InputError as error:
        raise InputError(f"{where}{error}") from error
    return NamedSettings(name, chosen, vote_note(settings))


def _label(key: str, value: Any) -> str:
    """`beam`, `n16`, `top_p0.9`: a grid value as part of a folder's name."""
    text = _UNSAFE.sub("_", str(value)).strip("_.")
    return text if key in _BARE else f"{key}{text}"
