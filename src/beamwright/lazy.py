"""What is imported when it is used, of this package and of others that add to it.

What needs no torch waits for none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import Any


def installed(group: str) -> EntryPoints:
    """What installed packages offer; looked for once for all groups, 20 ms."""
    points: EntryPoints = _entry_points(tuple(sys.path)).select(group=group)
    return points


@cache
def _entry_points(path: tuple[str, ...]) -> Any:  # whose type is another from Python 3.12 on
    """path: where packages are looked for, `sys.path`."""
    return entry_points()


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. modules: where a name is, by name."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
