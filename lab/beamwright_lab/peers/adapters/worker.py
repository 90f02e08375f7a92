"""Worker processes, one per engine, that answer requests in JSON lines.

`Worker` is the client. A worker module calls `serve` and runs as
`python -m beamwright_lab.peers.adapters.NAME OPTIONS` in its engine's environment, so this module
uses the standard library only. Between requests a worker sleeps and leaves the cores to others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
LLAMA_PYTHON = ROOT / ".venv-llama" / "bin" / "python"

Handler = Callable[..., dict[str, Any]]


class Worker:
    """A worker process. A context manager.

    facts: the worker's first reply, sent when it is ready.
    env: additional environment variables. OpenMP settings of this process are not passed on.
    """

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        log: Path,
        *,
        python: Path = PEERS_PYTHON,
        env: Mapping[str, str] | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        full = {**os.environ, **(env or {})}
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            full.pop(name, None)
        if str(python) != sys.executable:
            full["PYTHONPATH"] = str(ROOT / "lab")
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [str(python), "-m", f"beamwright_lab.peers.adapters.{module}", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=full,
            cwd=ROOT,
        )
        try:
            self.facts = self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker process ended unexpectedly. Its log is {self._log.name}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the worker may have died
            self._process.stdin.close()  # the worker ends at the end of its input
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Mapping[str, Handler]]]) -> None:
    """Answer requests until standard input ends.

    Every reply has the process's peak memory so far, as `peak_rss` in bytes.

    start: takes the command line's options; returns the first reply, and a handler for each `op`.
    """
    # Libraries log to standard output, so redirect it to standard error and keep the pipe.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps({**content, "peak_rss": peak_rss()}) + "\n")
        replies.flush()

    facts, handlers = start(json.loads(sys.argv[1]))
    reply(facts)
    for line in sys.stdin:
        request = json.loads(line)
        reply(handlers[request.pop("op")](**request))


def peak_rss() -> int | None:
    """Return the peak memory of this process in bytes, mapped files included; None if unknown."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(found[0]) * 1024 if found else None
