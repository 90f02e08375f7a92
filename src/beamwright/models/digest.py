"""Who a checkpoint is: SHA-256 over every byte of the files that loading it reads.

They are read in a thread beside the loading, which brings them into memory anyway. On Linux that
thread gives way to others.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from beamwright.errors import InputError
from beamwright.models.formats.described import shards
from beamwright.models.formats.files import weight_files

Digest = dict[str, Any]
"""`sha256` of all; `files`: the first digits of each, by name; `revision`, of the hub's."""

_TEXTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template*", "verifier.yaml", "judge.yaml",
    "*_head.safetensors", "*_head.pt",
)  # fmt: skip
_READ_BYTES = 1 << 23  # at a time, without the interpreter's lock
_DIGITS = 16
_NICENESS = 5  # more, and beside a busy process the digest would take a minute


def digest_later(folder: Path) -> Future[Digest | None]:
    """The digest of a folder, whose files are read from now on; None if one cannot be read."""
    found: Future[Digest | None] = Future()

    def find() -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            found.set_result(digest_of(folder))
        except (OSError, InputError):
            found.set_result(None)

    # A daemon: who ends the program does not wait for gigabytes.
    threading.Thread(target=find, name="digest", daemon=True).start()
    return found


def digest_of(folder: Path) -> Digest:
    """Of the weights, as `models.weights` and verifiers find them, and of what makes tokens and
    formats. Raises OSError and InputError."""
    if folder.is_file():  # GGUF, or a verifier's head
        files = {path.name: _sha256(path) for path in shards(folder)}
        return _of(folder.parent, files)
    weights, verifier = weight_files(folder)[1], folder / "verifier.yaml"
    texts = {path for pattern in _TEXTS for path in folder.glob(pattern) if path.is_file()}
    if verifier.is_file():  # whose head is in a file that it names
        named = verifier.read_text(encoding="utf-8", errors="replace")
        texts |= {path for path in folder.iterdir() if path.name in named and path.is_file()}
    return _of(folder, {path.name: _sha256(path) for path in sorted(texts.union(weights))})


def _of(folder: Path, files: dict[str, str]) -> Digest:
    lines = "".join(f"{digest}  {name}\n" for name, digest in files.items())
    whole = hashlib.sha256(lines.encode()).hexdigest()
    hub = {"revision": folder.name} if folder.parent.name == "snapshots" else {}
    short = {name: digest[:_DIGITS] for name, digest in files.items()}
    return {"sha256": whole, **hub, "files": short}


def _sha256(file: Path) -> str:
    digest, room = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(room):
            digest.update(room[:count])
    return digest.hexdigest()
