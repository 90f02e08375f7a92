"""The measured profile of this machine, kept as JSON in the user's cache folder. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.files import write_whole
from beamwright.plan.profile import HardwareProfile

_ADVICE = "run `beamwright doctor --probe`"


def default_cache_file() -> Path:
    """`~/.cache/beamwright/profile.json`."""
    return Path.home() / ".cache" / "beamwright" / "profile.json"


def write_profile(profile: HardwareProfile, file: Path | None = None) -> Path:
    """Store the profile and return where. A reader sees the old file or the whole of the other.

    Raises:
        InputError: if the folder or the file cannot be written.
    """
    file = file or default_cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file}: the measured profile cannot be written ({error})") from error
    write_whole(file, json.dumps(asdict(profile), indent=2), option="measured profile ")
    return file


def read_profile(file: Path | None = None) -> HardwareProfile:
    """The stored profile.

    Raises:
        InputError: if there is none, or it is not a valid profile.
    """
    file = file or default_cache_file()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return HardwareProfile(**_checked(content))
    except FileNotFoundError as error:
        raise InputError(f"no measured profile ({file}): {_ADVICE}") from error
    except (OSError, ValueError) as error:  # both JSON and text decoding errors are ValueErrors
        raise InputError(f"{file}: not a hardware profile ({error}); {_ADVICE}") from error


def _checked(content: Any) -> dict[str, Any]:
    """The JSON content with exactly the profile's keys and kinds of values."""
    expected = {field.name: str(field.type) for field in fields(HardwareProfile)}
    if not isinstance(content, dict) or set(content) != set(expected):
        raise ValueError("keys differ")
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    for key, kind in expected.items():
        value = content[key]
        if isinstance(value, bool) or not isinstance(value, kinds[kind]):
            raise ValueError(f"{key} is {value!r}")
    return content
