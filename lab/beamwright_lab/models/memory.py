"""The memory that half a billion parameters take while they are loaded, and while they write.

    python -m beamwright_lab.models.memory [--sides NAME...] [--n 16] [--tokens 16] [--memory SIZE]

Each side runs in a fresh process: n paths from one prompt, twice. process: resident once libraries
are imported and the tokenizer is read; peak: the most until the end; steady: behind the last path;
files: what the checkpoint has on the disk; all GiB. With --memory the solver plans within it.
llama.cpp writes one path, and is left out where `llama_cpp` is not installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beamwright_lab.common import finish, say, table
from beamwright_lab.models.load_file import peak_bytes
from beamwright_lab.models.quantised import write_format
from beamwright_lab.peers.models import LARGE, model_folder

_OURS: dict[str, tuple[str | None, dict[str, str]]] = {
    "bfloat16": (None, {}),
    "int8": (None, {"weights": "int8"}),
    "int4": (None, {"weights": "int4"}),
    "GGUF Q8_0": ("GGUF Q8_0", {}),
    "GGUF Q4_K_M": ("GGUF Q4_K_M", {}),
}
"""By side: the format of its file, and options."""
_PEERS: dict[str, str | None] = {
    "transformers": None, "llama.cpp Q8_0": "GGUF Q8_0", "llama.cpp Q4_K_M": "GGUF Q4_K_M",
}  # fmt: skip
_PROMPT = 128
_COLUMNS = ("side", "files", "process", "peak", "steady", "said")


def resident_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def ours(place: Path, options: dict[str, str], given: argparse.Namespace) -> Callable[[], int]:
    from beamwright import Solver
    from beamwright.models.tokenizer import TextCodec

    TextCodec.load(place)
    paths = {"search": "best-of-n", "choose": "majority", "n": given.n, "ignore_eos": True}
    lengths = {"step_tokens": given.tokens, "max_tokens": given.tokens}
    more = {"memory": given.memory} if given.memory else {}

    def run() -> int:
        solver = Solver(
            model=str(place),
            verifier="none",
            dtype="bfloat16",
            **paths,
            **lengths,
            **options,
            **more,
        )  # type: ignore[arg-type]
        for _ in range(2):
            solver.synthetic(_PROMPT)
        return resident_bytes()

    return run


def transformers(place: Path, given: argparse.Namespace) -> Callable[[], int]:
    from transformers import AutoTokenizer

    from beamwright_lab.peers.adapters.transformers_loops import generate_paths, load_model

    AutoTokenizer.from_pretrained(place)

    def run() -> int:
        model = load_model(place, "bfloat16")
        for _ in range(2):
            generate_paths(model, range(_PROMPT), given.n, given.tokens, 0.8)
        return resident_bytes()

    return run


def llama_cpp(place: Path, given: argparse.Namespace) -> Callable[[], int]:
    from llama_cpp import Llama

    def run() -> int:
        model = Llama(str(place), n_ctx=4 * _PROMPT, verbose=False)
        for _ in range(2):
            written = model.generate(list(range(3, _PROMPT)), temp=0.8)
            for _ in range(given.tokens):
                next(written)
        return resident_bytes()

    return run


def one(side: str, place: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A side, in this process."""
    if side in _OURS:
        run = ours(place, _OURS[side][1], given)
    else:
        run = (transformers if side == "transformers" else llama_cpp)(place, given)
    before = resident_bytes()
    steady = run()
    return {"process": before, "peak": peak_bytes(), "steady": steady}


def measured(side: str, given: argparse.Namespace) -> dict[str, Any]:
    """A side, in a process of its own."""
    kind = _OURS[side][0] if side in _OURS else _PEERS[side]
    with TemporaryDirectory() as folder:
        place = model_folder(LARGE)
        place = place if kind is None else write_format(kind, place, Path(folder))[0]
        files = [place] if place.is_file() else [*place.glob("*.safetensors")]
        command = [sys.executable, "-m", "beamwright_lab.models.memory", "--one", side, str(place)]
        numbers = ["--n", given.n, "--tokens", given.tokens, "--memory", given.memory or ""]
        done = subprocess.run(
            [*command, *map(str, numbers)], check=False, capture_output=True, text=True
        )
        row = {"side": side, "files": sum(file.stat().st_size for file in files)}
        if done.returncode:
            return {**row, "said": done.stderr.strip().splitlines()[-1][:80]}
        return {**row, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sides = [*_OURS, *_PEERS]
    parser.add_argument("--sides", nargs="+", choices=sides, default=sides)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--memory")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], Path(given.one[1]), given)))
        return
    rows: list[dict[str, Any]] = []
    for side in given.sides:
        rows.append(measured(side, given))
        say(rows[-1])
    gib = [
        {k: round(v / 2**30, 2) if isinstance(v, int) else v for k, v in row.items()}
        for row in rows
    ]
    print(table([dict.fromkeys(_COLUMNS) | row for row in gib], _COLUMNS))
    finish("memory", {"n": given.n, "tokens": given.tokens, "memory": given.memory, "rows": rows})


if __name__ == "__main__":
    main()
