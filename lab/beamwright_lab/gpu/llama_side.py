"""llama.cpp as a side of stage `peers`, by its own `llama-batched-bench` if that is on PATH.

A random bfloat16 checkpoint is written as GGUF. The tool prefills the prompt once, copies its KV to
all sequences, and decodes: it copies all logits to the host but samples no tokens from them. Every
number of paths runs three times in one process, the first as a warm-up.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

from beamwright_lab.gpu.context import Context, release
from beamwright_lab.gpu.parity import sizes_of, write_checkpoint
from beamwright_lab.gpu.sides import Case, Side, seconds_of
from beamwright_lab.models.gguf_files import write_gguf

_TOOL = "llama-batched-bench"
_NO_CARD = "no usable GPU found"  # printed before it falls back to the CPU
_COST_S = 9.5  # the first row takes longer
_RUNS = 3
_SLACK = 256  # spare tokens of context per sequence


def sides(context: Context, case: Case) -> list[Side]:
    """Return llama.cpp's side; empty if the tool is not installed."""
    tool = shutil.which(_TOOL)
    if tool is None:
        return []
    held = _BenchRun(context, case, tool)
    said = f"{held.version}, BF16, flash attention; tokens are not drawn"
    return [Side("llama.cpp", held.row, _COST_S, said=said)]


class _BenchRun:
    """One run of the tool, which measures all rows."""

    def __init__(self, context: Context, case: Case, tool: str) -> None:
        self._context, self._case, self._tool = context, case, tool

    @property
    def version(self) -> str:
        done = subprocess.run(
            [self._tool, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
        found = re.search(r"version: (\S+)", done.stdout + done.stderr)
        return found[1] if found else "of unknown version"

    def row(self, n: int) -> dict[str, Any]:
        took_s = self._seconds[n]
        return seconds_of(took_s, n * self._case.tokens)

    @cached_property
    def _seconds(self) -> dict[int, list[float]]:
        case, device = self._case, self._context.device
        sizes = sizes_of(case.model) if self._context.on_gpu else {"vocab_size": 600}
        with tempfile.TemporaryDirectory() as folder:
            model, file = Path(folder) / "model", Path(folder) / "model.gguf"
            write_checkpoint("qwen2", model, device, "bfloat16", **sizes)
            write_gguf(model, file, "BF16")
            shutil.rmtree(model)
            release(device)
            most = max(case.counts)
            counts = [str(n) for n in case.counts for _ in range(_RUNS)]
            words = [self._tool, "-m", str(file), "-npp", str(case.prompt), "-pps"]
            words += ["-ntg", str(case.tokens), "-npl", ",".join(counts), "-ngl", "99"]
            words += ["-c", str(most * (case.prompt + case.tokens + _SLACK)), "-fa", "on"]
            words += ["--output-format", "jsonl"]
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=self._context.left_s, check=False
            )
        if self._context.on_gpu and _NO_CARD in done.stderr:
            raise RuntimeError(f"{_TOOL}: {_NO_CARD}")
        found: dict[int, list[float]] = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found.setdefault(row["pl"], []).append(row["t_pp"] + row["t_tg"])
        if set(found) != set(case.counts):
            raise RuntimeError(f"{_TOOL}: {(done.stderr or done.stdout)[-400:]}")
        return found
