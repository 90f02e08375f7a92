"""Computes a checkpoint's digest: a SHA-256 of all bytes of the files that loading reads.

Results report it, so that the model can be identified. A thread reads the files while the model
loads, which brings them into the file cache anyway. On Linux this thread has a lower priority.
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
from beamwright.models.formats.files import weight_files
from beamwright.models.formats.gguf_metadata import shards

# A digest as it is reported.
#
# sha256: the digest of all files. files: the first digits of each file's digest, by file name.
# revision: the commit of a model that was downloaded from the hub; missing for others.
Digest = dict[str, Any]

_TEXTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template*", "verifier.yaml", "judge.yaml",
    "*_head.safetensors", "*_head.pt",
)  # fmt: skip
_READ_BYTES = 1 << 23  # bytes read at a time; reading and hashing release the GIL
_DIGITS = 16
_NICENESS = 5  # with a higher niceness, a digest takes a minute next to a busy process


def start_digest(folder: Path) -> Future[Digest | None]:
    """Start a thread that computes the digest of `folder`, and return the future of the result.

    The result is None if a file cannot be read.
    """
    pending: Future[Digest | None] = Future()

    def find() -> None:
        if sys.platform == "linux":  # only there does each thread have its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            pending.set_result(digest_of(folder))
        except (OSError, InputError):
            pending.set_result(None)

    # A daemon thread, so that the program can exit before gigabytes are read.
    threading.Thread(target=find, name="digest", daemon=True).start()
    return pending


def digest_of(folder: Path) -> Digest:
    """Compute the digest of a checkpoint: its weights, tokenizer, and configuration files.

    folder: a folder, a GGUF file, or the file of a verifier's head.

    Raises:
        OSError, InputError: if a file is missing or cannot be read.
    """
    if folder.is_file():  # GGUF, or a verifier's head
        files = {path.name: _sha256(path) for path in shards(folder)}
        return _of(folder.parent, files)
    weights, verifier = weight_files(folder)[1], folder / "verifier.yaml"
    texts = {path for pattern in _TEXTS for path in folder.glob(pattern) if path.is_file()}
    if verifier.is_file():  # verifier.yaml names the file of the verifier's head
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
