"""The machine under test: names, versions, clocks and free memory, read and never set."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
_PACKAGES = ("torch", "triton", "transformers", "torchao", "flashinfer-python", "beamwright")


# What each stage imports, directly or not: module, and the wheel that brings it.
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


def missing_wheels(modules: Mapping[str, str]) -> list[str]:
    """Wheels whose modules cannot be found here; nothing is imported."""
    return [wheel for module, wheel in modules.items() if find_spec(module) is None]


def device_name(device: str) -> str:
    """Short and fit for a file name: `nvidia-h200`, or `cpu`."""
    if device == "cpu":
        return "cpu"
    name = str(_smi(_CARD, device).get("name") or _torch_name(device))
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def has_device(device: str) -> bool:
    """True if torch is here and can use it."""
    if find_spec("torch") is None:
        return False
    import torch

    index = torch.device(device).index or 0
    return torch.cuda.is_available() and index < torch.cuda.device_count()


def versions() -> dict[str, str | None]:
    """Installed packages that matter here."""
    return {name: _version(name) for name in _PACKAGES}


def card(device: str) -> dict[str, Any]:
    """What does not change while stages run."""
    return _smi(_CARD, device) if device != "cpu" else {"name": "cpu"}


def facts_now(device: str) -> dict[str, Any]:
    """Clocks, temperature and free memory at this moment; empty on a CPU."""
    return _smi(_NOW, device) if device != "cpu" else {}


def source_state() -> dict[str, str | None]:
    """Which code is measured: the commit, where known, and a digest of the sources themselves."""
    digest = hashlib.sha256()
    files = [*(_ROOT / "src").rglob("*.py"), *(_ROOT / "lab").rglob("*.py")]
    for file in sorted(files):
        digest.update(str(file.relative_to(_ROOT)).encode() + file.read_bytes())
    return {"commit": _commit(), "sources": digest.hexdigest()[:12]}


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _smi(names: tuple[str, ...], device: str) -> dict[str, Any]:
    """What nvidia-smi says of the card; empty where it is missing or does not answer."""
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
