"""Scores of steps that were scored before: by content, bounded, on disk where a file is named.

A key is a digest of who scores and of the path's tokens, cut as its segments are, since cuts decide
last bits. So what is found is bit for bit what would be computed, where that depends on nothing
else: not on the batch (`exact`).
"""

from __future__ import annotations

import hashlib
import math
import platform
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from beamwright.errors import InputError
from beamwright.files import check_writable, read_regular, write_bytes
from beamwright.models import LoadedModel
from beamwright.verify.spec import VerifierSpec

IN_MEMORY = "memory"
OPTION = "--score-cache "
MOST_ENTRIES = 2**18  # 24 bytes each in a file
_KEY_BYTES = 16
_MAGIC = b"beamwright scores 1\n"
_RECORD = struct.Struct(f"<{_KEY_BYTES}sd")
_ROOMS = (
    "attention",
    "kv",
    "models",
    "verify",
)  # of this package, whose code decides a score's bits


def digest(*parts: bytes) -> bytes:
    """Of all parts in their order and lengths."""
    found = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def of_numbers(numbers: Sequence[int]) -> bytes:
    """Token ids or places, as bytes."""
    return array("q", numbers).tobytes()


class ScoreCache:
    """Scores by key; the one that was asked for longest ago goes first.

    identity: of whoever scores, the first part of every key. file: read now, written by `save`.

    Raises:
        InputError: if the file is none of these, is damaged, or cannot be written.
    """

    def __init__(
        self, identity: bytes, file: Path | None = None, most_entries: int = MOST_ENTRIES
    ) -> None:
        self.identity, self._file, self._most = identity, file, most_entries
        self._changed = False
        self._scores: dict[bytes, float] = {}
        if file is not None:
            check_writable(file, OPTION)
            self._scores = _read(file)
            self._shrink()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: bytes) -> float | None:
        """The score, if it is known."""
        score = self._scores.pop(key, None)
        if score is not None:
            self._scores[key] = score
        return score

    def put(self, key: bytes, score: float) -> None:
        """Keep a score that is a number."""
        if math.isfinite(score):
            self._scores.pop(key, None)
            self._scores[key] = score
            self._changed = True
            self._shrink()

    def save(self) -> None:
        """Write what is new to the file, beside what others have written there since.

        Raises:
            InputError: if that cannot be done.
        """
        if self._file is None or not self._changed:
            return
        self._scores = {**_read(self._file), **self._scores}
        self._shrink()
        body = b"".join(_RECORD.pack(key, score) for key, score in self._scores.items())
        write_bytes(self._file, _MAGIC + digest(body) + body, OPTION)
        self._changed = False

    def _shrink(self) -> None:
        while len(self._scores) > self._most:
            del self._scores[next(iter(self._scores))]


def _read(file: Path) -> dict[bytes, float]:
    try:
        content = read_regular(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{OPTION}{file}: cannot be read ({error.strerror})") from error
    head, body = content[: len(_MAGIC) + _KEY_BYTES], content[len(_MAGIC) + _KEY_BYTES :]
    if not head.startswith(_MAGIC):
        raise InputError(f"{OPTION}{file}: is no score cache; name another file")
    if head[len(_MAGIC) :] != digest(body) or len(body) % _RECORD.size:
        raise InputError(f"{OPTION}{file}: is damaged; delete it")
    return dict(_RECORD.iter_unpack(body))


def scorer_identity(
    spec: VerifierSpec, model: LoadedModel, attention: str, num_threads: int, sample: bytes
) -> bytes:
    """All that decides a score beside the path: weights and format, code, precision, machine.

    Reads the whole checkpoint. sample: bits that the model computes here.
    """
    decoder = model.decoder
    told = (spec.model_dump_json(), str(decoder.dtype), str(model.storage), attention)
    here = (torch.__version__, str(num_threads), *_machine(decoder.device))
    files = sorted(each for each in (model.folder or Path()).rglob("*") if each.is_file())
    contents = [_file_digest(file) for file in (*(files if model.folder else ()), *_code())]
    return digest(*(text.encode() for text in (*told, *here)), *contents, sample)


def _code() -> Iterator[Path]:
    package = Path(__file__).parent.parent
    for room in _ROOMS:
        yield from sorted((package / room).rglob("*.py"))


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def _machine(device: torch.device) -> Iterator[str]:
    yield str(device.type)
    if device.type == "cuda":
        yield torch.cuda.get_device_name(device)
        return
    yield torch.backends.cpu.get_cpu_capability()
    yield platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    yield next((each for each in lines if each.startswith("model name")), platform.processor())
