"""Stage: microbenchmarks of the kernels, by the script that belongs to them, if there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.context import Context

SCRIPT = Path(__file__).resolve().parents[1] / "gpu_kernels.py"


def run(context: Context) -> dict[str, Any]:
    """The last JSON line that `gpu_kernels.py` prints, or why there is none."""
    if not SCRIPT.is_file():
        return {"skipped": f"benchmarks/{SCRIPT.name} does not exist"}
    command = [sys.executable, str(SCRIPT)]
    offered = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=False, timeout=60
    ).stdout
    for option, values in (
        ("--smoke", [] if context.smoke else None),
        ("--seconds", [f"{max(1.0, context.left_s - 3):.0f}"]),
        ("--device", [context.device]),
    ):
        if values is not None and option in offered:
            command += [option, *values]
    code, output = _output(command, max(1.0, context.left_s))
    data: dict[str, Any] = {"command": command[1:], "exit_code": code, "result": last_json(output)}
    if code != 0:
        ended = "stopped: no time left" if code is None else f"exit code {code}"
        data["error"] = f"{SCRIPT.name}: {ended}"
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
