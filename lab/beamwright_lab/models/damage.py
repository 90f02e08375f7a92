"""Make damaged copies of checkpoints to test the loader: corrupt bytes, or change JSON values."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HEAD = 4096
_VALUES = (None, -1, 0, 1, 3, 2**31, 2**63, 1e300, "x", "", [], {}, [[]], True, "../../model")


def _flip(data: bytearray, rng: random.Random, end: int) -> None:
    for _ in range(rng.choice((1, 1, 4, 32))):
        data[rng.randrange(end)] = rng.randrange(256)


def _cut(data: bytearray, rng: random.Random, end: int) -> None:
    del data[rng.choice((rng.randrange(end), rng.randrange(len(data)))) :]


_WAYS: tuple[Callable[[bytearray, random.Random, int], None], ...] = (_flip, _cut)


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Corrupt bytes in one way (flip, truncate), mostly near the beginning."""
    changed = bytearray(data)
    end = len(data) if rng.random() < 0.3 else min(_HEAD, len(data))
    rng.choice(_WAYS)(changed, rng, end)
    return bytes(changed)


def change_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part, at any depth, removed or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        rest = {name: each for name, each in value.items() if name != key}
        return rest if rng.random() < 0.2 else {**rest, key: change_json(value[key], rng)}
    return rng.choice(_VALUES)


def write_damaged(place: Path, folder: Path, seed: int) -> Path:
    """Write a damaged copy of a checkpoint file, or of a folder with one damaged file."""
    rng = random.Random(seed)
    if place.is_file():
        file = folder / f"{seed}{place.suffix}"
        file.write_bytes(damage_bytes(place.read_bytes(), rng))
        return file
    copy = folder / str(seed)
    copy.mkdir()
    for file in place.iterdir():
        (copy / file.name).symlink_to(file.resolve())
    name = rng.choice(("model.safetensors", "model.safetensors", "config.json"))
    (copy / name).unlink()
    data = (place / name).read_bytes()
    if name == "config.json":
        config = json.loads(data)
        if rng.random() < 0.6:
            part = "quantization_config"
            config = {**config, part: change_json(config[part], rng)}
        data = json.dumps(change_json(config, rng) if rng.random() < 0.5 else config).encode()
    else:
        data = damage_bytes(data, rng)
    (copy / name).write_bytes(data)
    return copy
