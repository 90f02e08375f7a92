"""What a stage's process knows: its device, its size, its time, and where its results go."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import facts_now
from benchmarks.gpu.runner import read_result, write_json


@dataclass
class Context:
    """Given to every stage.

    smoke: tiny sizes, on whatever device; the code is the same.
    folder: results of the other stages. link_bandwidth: bytes/s of an emulated, slower link.
    earlier: what a run with the same settings and sources has found already.
    """

    device: str
    smoke: bool
    seconds: float
    into: Path
    folder: Path
    link_bandwidth: int | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    machine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = {"at_start": facts_now(self.device)}

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def left_s(self) -> float:
        """Seconds that this stage still has."""
        return self.seconds - (time.monotonic() - self.started_s)

    def save(self, data: Mapping[str, Any]) -> None:
        """What has been found so far: it outlives whatever happens to this process."""
        write_json(self.into, {**data, "machine": self.machine, "smoke": self.smoke})

    def finish(self, data: Mapping[str, Any]) -> None:
        """The whole result."""
        self.machine["at_end"] = facts_now(self.device)
        self.save(data)

    def data_of(self, stage: str) -> dict[str, Any] | None:
        """What another stage has found, if anything."""
        found = read_result(self.folder, stage)
        return found["data"] if found is not None and found["data"] else None


def synchronize(device: str) -> None:
    """Wait until the device has done all that was queued."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def release(device: str) -> None:
    """Give back what dropped objects held."""
    import torch

    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    """The error as one short line, with its class."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
