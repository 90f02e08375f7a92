"""Stage: microbenchmarks of the kernels, by the benchmark that belongs to them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu.context import Context

_ALL_MODELS_S = 180  # most of it is compilation
BENCHMARK = "attention_kernels"
COMMAND = (sys.executable, "-m", f"benchmarks.gpu.{BENCHMARK}")


def run(context: Context) -> dict[str, Any]:
    """The last JSON line that it prints, or why there is none."""
    if not context.on_gpu:
        return {"skipped": "kernels are timed on a GPU"}
    command = [*COMMAND]
    if context.left_s < _ALL_MODELS_S:
        command.append("--quick")
    code, output = _output(command, max(1.0, context.left_s))
    data: dict[str, Any] = {"command": command[1:], "exit_code": code, "result": last_json(output)}
    if code != 0:
        ended = "stopped: no time left" if code is None else f"exit code {code}"
        data["error"] = f"{BENCHMARK}: {ended}"
    return data


def _output(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code (None: stopped) and standard output."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        return None, printed.decode() if isinstance(printed, bytes) else printed
    return done.returncode, done.stdout


def last_json(output: str) -> dict[str, Any] | None:
    """The last line that is a JSON object."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None
