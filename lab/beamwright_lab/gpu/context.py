"""What a stage's process knows: its device, its size, its time, and where its results go."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beamwright_lab.gpu.machine import facts_now
from beamwright_lab.gpu.runner import Journal


@dataclass
class Context:
    """Given to every stage.

    smoke: tiny sizes, on whatever device; the code is the same.
    journal: of all stages; out: the folder that it lies in, for files beside it.
    link_bandwidth: bytes/s of an emulated, slower link.
    earlier: what a run with the same settings has found already.
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
        """Seconds that this stage still has."""
        return self.seconds - (time.monotonic() - self.started_s)

    def save(self, data: Mapping[str, Any]) -> None:
        """What has been found so far: it outlives whatever happens to this process."""
        self.journal.save(self.stage, data, self._saved)
        self._saved |= deepcopy(dict(data))

    def finish(self, data: Mapping[str, Any]) -> None:
        """The whole result."""
        self.save({"error": None, **data})
        self._facts("at_end")

    def data_of(self, stage: str) -> dict[str, Any] | None:
        """What another stage has found, if anything."""
        return self.journal.results().get(stage, {}).get("data") or None

    def _facts(self, when: str) -> None:
        if facts := facts_now(self.device):
            self.save({when: facts})


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


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it finds, or its error: a failure costs one row."""
    try:
        return work()
    except Exception as error:  # the other rows are worth having
        return {"error": one_line(error)}


def one_line(error: BaseException) -> str:
    """The error as one short line, with its class."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
