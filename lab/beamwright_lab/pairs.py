"""Makes the table of `docs/pair.md`: which generator and verifier fit on which machine.

    python -m beamwright_lab.pairs

The numbers are predictions of `beamwright plan` from data sheets; nothing is measured.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from beamwright.cli.app import main as beamwright
from beamwright.units import GIB
from beamwright_lab.common import finish, say, table

SKYWORK = "Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B"
QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
MATH_PRM = "Qwen/Qwen2.5-Math-PRM-7B"
RLHFLOW = "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data"
INT4 = ("--weights", "int4", "--verifier-weights", "int4")
# Short names for the table; the commands below it have full names.
_CALLED = {
    "Skywork-o1-Open-PRM-Qwen-2.5-1.5B": "Skywork PRM 1.5B",
    "Skywork-o1-Open-PRM-Qwen-2.5-7B": "Skywork PRM 7B",
    "Qwen2.5-Math-PRM-7B": "Qwen Math PRM 7B",
    "Llama3.1-8B-PRM-Deepseek-Data": "RLHFlow PRM 8B",
}
_WIDTH = 80


@dataclass(frozen=True)
class Pair:
    """A machine, two models of the hub, and the options to run them.

    gpu: its name for `plan --gpu`. memory_gib: for `--memory`. generate: tokens per path.
    """

    heading: str
    gpu: str
    generator: str
    verifier: str
    n: int
    memory_gib: int
    options: tuple[str, ...] = ()
    generate: int = 1024

    @property
    def on_gpu(self) -> bool:
        return self.gpu != "epyc-2core"

    def plan(self) -> list[str]:
        """Return the arguments of `beamwright plan`, with model names without their owners."""
        models = ["--model", _short(self.generator), "--verifier", _short(self.verifier)]
        where = ["--gpu", self.gpu, "--memory", f"{self.memory_gib}GiB"]
        search = ["--n", str(self.n), "--generate", str(self.generate)]
        return ["plan", *models, *self.options, *where, *search]

    def solve(self) -> list[str]:
        """Return the arguments of the matching `beamwright solve`."""
        models = ["--model", f"hf:{self.generator}", "--verifier", f"hf:{self.verifier}"]
        where = ["--device", "cuda"] if self.on_gpu else []
        where += ["--memory", f"{self.memory_gib}GiB", "--n", str(self.n)]
        limit = ["--max-tokens", str(self.generate)]
        return ["solve", "--problem-file", "problem.txt", *models, *self.options, *where, *limit]


PAIRS = (
    Pair(
        "Laptop without a GPU, 16 GB of RAM", "epyc-2core", "Qwen/Qwen2.5-0.5B-Instruct", SKYWORK,
        8, 8, ("--weights", "int8", "--verifier-weights", "int8"), 512,
    ),
    Pair("RTX 4060, 8 GB", "rtx-4060", QWEN, SKYWORK, 16, 7),
    Pair(
        "RTX 3060, 12 GB", "rtx-3060", QWEN, "Skywork/Skywork-o1-Open-PRM-Qwen-2.5-7B", 16, 11,
        ("--verifier-weights", "int4"),
    ),
    Pair("T4, 16 GB (free notebooks)", "t4", QWEN, SKYWORK, 16, 13),
    Pair(
        "RTX 4060 Ti, 16 GB", "rtx-4060-ti-16gb", "Qwen/Qwen2.5-7B-Instruct", MATH_PRM, 16, 14, INT4
    ),
    Pair("RTX 3090, 24 GB", "rtx-3090", "meta-llama/Llama-3.2-1B-Instruct", RLHFLOW, 64, 22),
    Pair(
        "RTX 4090, 24 GB", "rtx-4090", "meta-llama/Llama-3.1-8B-Instruct", RLHFLOW, 64, 22, INT4
    ),
    Pair("Radeon RX 7800 XT, 16 GB", "rx-7800-xt", QWEN, SKYWORK, 16, 14),
    Pair("Radeon RX 7900 XTX, 24 GB", "rx-7900-xtx", QWEN, MATH_PRM, 64, 22),
)  # fmt: skip


def _short(name: str) -> str:
    return name.partition("/")[2]


def run_command(words: Sequence[str]) -> str:
    """Run a command of `beamwright`, and return what it prints in 100 columns.

    Raises:
        ValueError: if it fails.
    """
    written = io.StringIO()
    with redirect_stdout(written), patch.dict(os.environ, COLUMNS="100"):
        code = beamwright(words)
    if code:
        raise ValueError(f"beamwright {' '.join(words)}: exit code {code}")
    return written.getvalue()


def read_plan(words: Sequence[str]) -> dict[str, Any]:
    """Return the JSON of `beamwright plan`."""
    found: dict[str, Any] = json.loads(run_command([*words, "--json"]))
    return found


def sample() -> list[str]:
    """Return the first lines that `plan` prints for one pair, up to the first empty line."""
    lines = run_command(PAIRS[1].plan()).splitlines()
    empty = next(number for number, line in enumerate(lines) if not line.strip())
    return [line.rstrip() for line in lines[:empty]]


def row(pair: Pair) -> dict[str, Any]:
    """Return the plan of a pair: sizes to 0.1 GiB, seconds to two digits."""
    found = read_plan(pair.plan())
    memory, resident = found["memory"], found["schedules"]["in-gpu/tree"]
    return {
        "machine": pair.heading,
        "plan": pair.plan(),
        "solve": pair.solve(),
        "gpu_source": found["gpu_source"],
        "fits": found["fits"],
        "advice": found["advice"],
        "beams": found["max_beams_in_gpu"],
        "needs_gib": round(memory["needed_bytes"] / GIB, 1),
        "of_gib": round(memory["limit_bytes"] / GIB, 1),
        "seconds": float(f"{resident['time_s']:.2g}"),
    }


def rows() -> list[dict[str, Any]]:
    """Return the plans of all pairs."""
    return [row(pair) for pair in PAIRS]


# --- the page ----------------------------------------------------------------------------------


def block(found: Mapping[str, Any]) -> str:
    """Return the table, then the commands for each machine. found: content of docs/figures."""
    rows = [*map(_row, found["rows"])]
    commands = (line for each in found["rows"] for line in _commands(each))
    return "\n".join([table(rows, list(rows[0])), *commands])


def sample_block(found: Mapping[str, Any]) -> str:
    """Return the command of one pair, and the first lines that it prints."""
    command = ["```bash", _wrapped(PAIRS[1].plan()), "```", "", "```text"]
    return "\n".join([*command, *found["sample"], "...", "```"])


def _row(each: Mapping[str, Any]) -> dict[str, str]:
    words = each["plan"]
    kept = {
        option: f", {words[words.index(option) + 1]}" for option in words if "weights" in option
    }

    def model(option: str, weights: str) -> str:
        name = words[words.index(option) + 1]
        short = _CALLED.get(name) or name.removesuffix("-Instruct").replace("-", " ")
        return f"{short}{kept.get(weights, '')}"

    anchor = "".join(
        c for c in each["machine"].lower().replace(" ", "-") if c.isalnum() or c == "-"
    )
    return {
        "you have": f"[{each['machine']}](#{anchor})",
        "generator": model("--model", "--weights"),
        "verifier": model("--verifier", "--verifier-weights"),
        "needs / limit, GiB": f"{each['needs_gib']} / {each['of_gib']}",
        "paths (most)": f"{words[words.index('--n') + 1]} ({each['beams']})",
        "predicted": _time(each["seconds"]),
    }


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _commands(each: Mapping[str, Any]) -> Iterator[str]:
    fits = "up to" if each["fits"] else "about"
    said = f"{fits} {each['beams']:,} paths fit; {each['advice']}"
    total = f"needs {each['needs_gib']} of {each['of_gib']} GiB"
    yield from ("", f"### {each['machine']}", "", "```bash", f"# {said}; {total}")
    yield _wrapped(each["plan"])
    yield from (_wrapped(each["solve"]), "```")


def _wrapped(words: Sequence[str]) -> str:
    """Return a command in lines of at most 80 characters, broken before options."""
    lines, current = [], "beamwright"
    for index, word in enumerate(words):
        whole = f"{word} {words[index + 1]}" if word.startswith("--") else word
        if index and words[index - 1].startswith("--"):
            continue
        if len(current) + len(whole) > _WIDTH - 3:
            lines, current = [*lines, f"{current} \\"], " "
        current = f"{current} {whole}"
    return "\n".join([*lines, current])


def main() -> None:
    found = {"rows": rows(), "sample": sample()}
    say(block(found))
    finish("pairs", found)


if __name__ == "__main__":
    main()
