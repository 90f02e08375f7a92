"""What a search is resumed with: the options that are given, and the rest from its checkpoint.

Reads the file and no models, so that an option that was another is found before they are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from beamwright.config import Settings
from beamwright.declare import VERIFIERS
from beamwright.errors import InputError
from beamwright.models.config import find_shape
from beamwright.models.load import resolve_dtype
from beamwright.registry import Table
from beamwright.saved.checkpoint import DECISIVE_SECTIONS, OWN, read_checkpoint, tree_settings
from beamwright.search import STRATEGIES
from beamwright.search.defaults import with_defaults

_DECLARED: dict[str, dict[str, Table[Any]]] = {
    "search": {"search": STRATEGIES},
    "model": {"verifier": VERIFIERS},
}


def resumed_settings(file: Path, given: Settings) -> Settings:
    """Settings to resume a checkpoint with.

    given: what it sets (`model_fields_set`) stands; of what it does not, all that decides the tree
    comes from the file.

    Raises:
        InputError: if the file is no whole checkpoint, or `given` sets an option that was another
            when the file was saved.
    """
    saved = read_checkpoint(file)
    for option in ("verifier", "search"):
        named = str(saved.settings.get(option))
        if named.startswith(OWN) and "@" in named:
            raise InputError(
                f"--resume {file}: was saved with the {option} {named}, "
                "which only Python has: give it to Solver, and call resume there"
            )
    saved.check_plugins(file)
    sections, set_here = {}, []
    for name in DECISIVE_SECTIONS:
        section = getattr(given, name)
        written = section.model_dump(exclude_unset=True)
        known = [*type(section).model_fields]
        for option, table in _DECLARED.get(name, {}).items():
            known += _own_options(table, written.get(option, saved.settings.get(option)))
        kept = {
            option: saved.settings[option]
            for option in known
            if option in saved.settings and option not in written
        }
        set_here += written
        try:
            sections[name] = type(section).model_validate({**written, **kept})
        except ValidationError as error:
            raise InputError(f"--resume {file}: holds settings that are unknown here") from error
    settings = given.model_copy(update=sections)
    model = settings.model
    try:
        found = resolve_dtype(model.dtype, model.device, find_shape(model))
        wanted = tree_settings(with_defaults(settings), str(found).removeprefix("torch."))
    except InputError as error:
        raise InputError(f"--resume {file}: {error}") from error
    # The options given go first: an error names one of them, not what a strategy makes of it.
    first = {option: wanted[option] for option in set_here if option in wanted}
    saved.check_settings(file, {**first, **wanted})
    return settings


def _own_options(table: Table[Any], name: Any) -> list[str]:
    """The options of a declaration; none of one that is unknown here, which is said elsewhere."""
    return [*table[name].options] if isinstance(name, str) and name in table else []
