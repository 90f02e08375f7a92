"""Run `beamwright serve` in a process of its own, as a user would."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class RunningServer:
    """A running server. facts: the JSON line that it prints at start."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.facts: dict[str, Any] = json.loads(process.stdout.readline())
        self.url: str = self.facts["url"]

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def terminate(self) -> None:
        """Send SIGTERM to the server."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def server(*words: str) -> Iterator[RunningServer]:
    """Run `beamwright serve` with these options until the context ends."""
    command = [sys.executable, "-m", "beamwright", "serve", "--port", "0", "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RunningServer(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
