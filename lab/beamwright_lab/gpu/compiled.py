"""Pack Triton's compiled kernels into one small file, for another machine with the same card.

Only files that Triton loads are packed: binaries, their metadata, launchers. Triton stores absolute
paths in its file lists; `unpack` rewrites them.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

_LOADED = {".cubin", ".json", ".so"}


def pack(cache: Path, file: Path) -> None:
    """Replace `file` by an archive of the cache."""
    partial = file.with_suffix(".tmp")
    with tarfile.open(partial, "w:gz", compresslevel=6) as tar:
        for each in sorted(cache.rglob("*")):
            if each.suffix in _LOADED and each.is_file():
                tar.add(each, str(each.relative_to(cache)))
    partial.replace(file)


def unpack(file: Path, cache: Path) -> None:
    """Extract an archive into the cache; do nothing if the file does not exist."""
    if not file.exists():
        return
    with tarfile.open(file) as tar:
        tar.extractall(cache, filter="data")
    for group in cache.rglob("__grp__*.json"):
        found = json.loads(group.read_text(encoding="utf-8")).get("child_paths", {})
        moved = {name: str(group.parent / Path(path).name) for name, path in found.items()}
        group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
