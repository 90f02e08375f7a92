"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Running:
    """A server that answers. facts: what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.facts: dict[str, Any] = json.loads(process.stdout.readline())
        self.url: str = self.facts["url"]
        self._callbacks_s: list[float] = []
        if process.stderr is not None:
            threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        """Pass on what it says, and keep what asyncio says of callbacks that took long."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"Executing <.* took ([\d.]+) seconds", line):
                self._callbacks_s.append(float(found[1]))
            else:
                sys.stderr.write(line)

    def longest_callback_s(self) -> float:
        """Of its event loop since this was asked last; 0 if none took 0.1 s."""
        longest = max(self._callbacks_s, default=0.0)
        self._callbacks_s.clear()
        return longest

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def terminate(self) -> None:
        """Tell it to end."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def server(*words: str, watched: bool = False) -> Iterator[Running]:
    """`beamwright serve` with these options, until the context ends.

    watched: with `longest_callback_s`, in asyncio's debug mode.
    """
    command = [sys.executable, "-m", "beamwright", "serve", "--port", "0", "--json", *words]
    environment = {**os.environ, "PYTHONASYNCIODEBUG": "1"} if watched else None
    errors = subprocess.PIPE if watched else None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
    ) as process:
        try:
            yield Running(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(60)
