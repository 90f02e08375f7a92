"""Files and installed packages with declarations, which join the tables on import.

A file runs only if its user names it (`--plugin FILE.py`, `Solver(plugins=[...])`); no recipe and
no checkpoint can. Installed packages name themselves in the entry point group `beamwright.plugins`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from beamwright.errors import BeamwrightError, InputError

GROUP = "beamwright.plugins"


def load_plugin(file: str | os.PathLike[str]) -> None:
    """Run a file for what it declares.

    Raises:
        InputError: if it is no Python file, or fails.
    """
    from beamwright.registry import PLUGIN_MODULE  # noqa: PLC0415 - --help waits for no pydantic

    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise InputError(f"--plugin {path}: no such Python file")
    name = f"{PLUGIN_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"--plugin {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BeamwrightError as error:
        raise InputError(f"--plugin {path}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's file raises, `sys.exit()` too
        del sys.modules[name]
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"--plugin {path}: it raised {line}") from error


def load_installed() -> list[str]:
    """Import the plugins of installed packages; a line about each that fails."""
    failed = []
    for point in sorted(entry_points(group=GROUP), key=lambda each: (each.name, each.value)):
        try:
            point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken package must not stop the others
            line = " ".join(f"{type(error).__name__}: {error}".split())
            failed.append(f"plugin {point.name} ({point.value}): {line}")
    return failed


def load_all(files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Installed plugins, then these files; returns the lines of `load_installed`.

    Raises:
        InputError: as `load_plugin`.
    """
    failed = load_installed()
    for file in files:
        load_plugin(file)
    return failed
