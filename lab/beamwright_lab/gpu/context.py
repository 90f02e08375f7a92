"""The context of a GPU check's stage, and facts about the machine under test.

Clocks and other settings are read, never set. Importing this module needs no torch.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from beamwright_lab.gpu.runner import Journal

_ROOT = Path(__file__).resolve().parents[3]
_CARD = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
_NOW = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "memory.used",
    "memory.free",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "utilization.gpu",
)
VLLM_PYTHON = "BEAMWRIGHT_VLLM_PYTHON"
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "beamwright")

# Modules that stages import, directly or not, and the wheels that bring them.
ENGINE = {
    "numpy": "numpy", "pydantic": "pydantic", "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types", "typing_inspection": "typing-inspection",
    "yaml": "pyyaml", "safetensors": "safetensors", "tokenizers": "tokenizers",
    "transformers": "transformers",
}  # fmt: skip
TESTS = {
    "pytest": "pytest", "pluggy": "pluggy", "iniconfig": "iniconfig", "packaging": "packaging",
    "pygments": "pygments",
}  # fmt: skip


@dataclass
class Context:
    """Settings of a stage, and where its results go.

    smoke: tiny sizes on any device; the code is the same. journal: results of all stages; `out` is
    its folder. link_bandwidth: bytes/s of an emulated, slower link, or None. earlier: data that a
    run with the same settings saved.
    """

    stage: str
    device: str
    smoke: bool
    seconds: float
    journal: Journal
    link_bandwidth: int | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._saved = deepcopy(dict(self.earlier))
        self._facts("at_start")

    @property
    def out(self) -> Path:
        return self.journal.file.parent

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def left_s(self) -> float:
        """Seconds left for this stage."""
        return self.seconds - (time.monotonic() - self.started_s)

    def save(self, data: Mapping[str, Any]) -> None:
        """Save the data so far, so that they survive a crash of this process."""
        self.journal.save(self.stage, data, self._saved)
        self._saved |= deepcopy(dict(data))

    def finish(self, data: Mapping[str, Any]) -> None:
        """Save the whole result."""
        self.save({"error": None, **data})
        self._facts("at_end")

    def rows(
        self,
        data: dict[str, Any],
        name: str,
        work: Iterable[tuple[Mapping[str, Any], Callable[[], dict[str, Any]]]],
        least_s: float = 0.0,
    ) -> None:
        """Run each piece of work and append its row to `data[name]`, saving every row.

        An error becomes the row's `error`. Work with less than `least_s` left is listed in
        `not_run`.
        """
        for what, measure in work:
            if self.left_s < least_s and not self.smoke:
                data.setdefault("not_run", []).append(what)
                continue
            data[name].append({**what, **attempt(measure)})
            self.save(data)
            release(self.device)

    def data_of(self, stage: str) -> dict[str, Any] | None:
        """Return another stage's data; None if it has none."""
        return self.journal.results().get(stage, {}).get("data") or None

    def _facts(self, when: str) -> None:
        if facts := facts_now(self.device):
            self.save({when: facts})


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def release(device: str) -> None:
    """Free the memory of dropped objects."""
    import torch

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `work`; return its row, or its error as a row."""
    try:
        return work()
    except Exception as error:
        return {"error": one_line(error)}


def is_fatal(row: Mapping[str, Any]) -> bool:
    """True for a CUDA error, after which this process cannot use the device."""
    return "CUDA error" in row.get("error", "")


def one_line(error: BaseException) -> str:
    """The error as one short line, with its class."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


# --- the machine -----------------------------------------------------------------------------


def missing_wheels(modules: Mapping[str, str]) -> list[str]:
    """List the wheels whose modules are not installed; nothing is imported."""
    return [wheel for module, wheel in modules.items() if find_spec(module) is None]


def missing_vllm() -> str:
    """Explain why vLLM cannot run here; empty if it can."""
    if find_spec("vllm") or VLLM_PYTHON in os.environ:
        return ""
    return f"vllm is not installed: install it, or set {VLLM_PYTHON} to a Python that has it"


def device_name(device: str) -> str:
    """Return a short name that is fit for a file name: `nvidia-h200`, or `cpu`."""
    if device == "cpu":
        return "cpu"
    name = str(_smi(_CARD, device).get("name") or _torch_name(device))
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def has_device(device: str) -> bool:
    """True if torch is installed and can use the device."""
    if find_spec("torch") is None:
        return False
    import torch

    index = torch.device(device).index or 0
    return torch.cuda.is_available() and index < torch.cuda.device_count()


def versions() -> dict[str, str | None]:
    """Versions of the packages that matter here; None if not installed."""
    return {name: _version(name) for name in _PACKAGES}


def card(device: str) -> dict[str, Any]:
    """Facts of the card that do not change, such as its driver and memory."""
    return _smi(_CARD, device) if device != "cpu" else {"name": "cpu"}


def facts_now(device: str) -> dict[str, Any]:
    """Clocks, temperature and free memory at this moment; empty on a CPU."""
    return _smi(_NOW, device) if device != "cpu" else {}


def source_state() -> dict[str, str | None]:
    """Identify the measured code: the commit (None if unknown) and a digest of the sources."""
    files = [*(_ROOT / "src").rglob("*.py"), *(_ROOT / "lab").rglob("*.py")]
    found = {PurePosixPath(file.relative_to(_ROOT)): file.read_bytes() for file in files}
    lines = _git("rev-parse", "--short=12", "HEAD")
    return {"commit": lines.decode().strip() or None, "sources": digest(found)}


def digest(files: Mapping[PurePosixPath, bytes]) -> str:
    """Twelve hex digits that identify paths and contents of files."""
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(str(path).encode() + files[path])
    return found.hexdigest()[:12]


def commit_of(sources: str, among: int = 200) -> str | None:
    """Find the latest commit with these sources; None if the last `among` have others.

    Git may have reported an older commit, if a changed working tree was measured.
    """
    commits = _git("log", f"-{among}", "--format=%h").decode().split()
    return next((commit for commit in commits if _sources_of(commit) == sources), None)


@cache
def _sources_of(commit: str) -> str:
    packed = io.BytesIO(_git("archive", commit, "src", "lab"))
    with tarfile.open(fileobj=packed) as tar:
        members = [each for each in tar if each.isfile() and each.name.endswith(".py")]
        return digest({PurePosixPath(each.name): _bytes_of(tar, each) for each in members})


def _bytes_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    return stream.read() if stream else b""


def _git(*words: str) -> bytes:
    """Return git's output in this checkout; empty if it fails."""
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _smi(names: tuple[str, ...], device: str) -> dict[str, Any]:
    """Query nvidia-smi for these fields; empty if it fails."""
    index = device.partition(":")[2] or "0"
    query = f"--query-gpu={','.join(names)}"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", index],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().partition("\n")[0].split(",")]
    return dict(zip(names, values, strict=False))


def _torch_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device)
