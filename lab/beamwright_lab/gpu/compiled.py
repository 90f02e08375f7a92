"""Triton's compiled kernels as one small file, which another machine with such a card can use.

Only what is loaded again goes along: binaries, what is known of them, launchers. Triton writes
whole paths into its lists of files; they are turned to where the cache is unpacked.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

_LOADED = {".cubin", ".json", ".so"}


def pack(cache: Path, file: Path) -> None:
    """What is in the cache, over whatever the file was."""
    partial = file.with_suffix(".tmp")
    with tarfile.open(partial, "w:gz", compresslevel=6) as tar:
        for each in sorted(cache.rglob("*")):
            if each.suffix in _LOADED and each.is_file():
                tar.add(each, str(each.relative_to(cache)))
    partial.replace(file)


def unpack(file: Path, cache: Path) -> None:
    """Nothing where there is no such file."""
    if not file.exists():
        return
    with tarfile.open(file) as tar:
        tar.extractall(cache, filter="data")
    for group in cache.rglob("__grp__*.json"):
        found = json.loads(group.read_text(encoding="utf-8")).get("child_paths", {})
        moved = {name: str(group.parent / Path(path).name) for name, path in found.items()}
        group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
