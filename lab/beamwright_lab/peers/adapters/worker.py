"""A side in a process of its own, asked by JSON lines. Standard library only: peers run it, too.

`Worker` is the client. A worker module calls `serve` and is run as
`python -m beamwright_lab.peers.adapters.NAME OPTIONS` by the interpreter of its side's environment.
It sleeps on its standard input between requests, so other sides have the cores.
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
    """One worker process. A context manager. facts: what it said when it was ready.

    env: added to the environment, from which the client's own thread settings are taken out.
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
            raise RuntimeError(f"a worker ended; see {self._log.name}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it may have died
            self._process.stdin.close()  # a worker ends when it has nothing left to read
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Mapping[str, Handler]]]) -> None:
    """Answer requests until standard input ends.

    start: from the options on the command line to the facts of the first reply and a handler per
    `op`. Every reply has the process's peak RSS so far, in bytes.
    """
    # Libraries write their log to standard output: give them standard error, keep the pipe.
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
    """Bytes of memory that this process held at most, mapped files included."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(found[0]) * 1024 if found else None
