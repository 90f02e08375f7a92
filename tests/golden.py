"""What the program prints today, pinned: `python tests/golden.py [NAME ...]` writes it again.

Write it again where a change of it is meant, and say why in the changelog. Everything is asked for
through the command line, so that a golden outlives the modules behind it.
"""

import io
import json
import math
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from beamwright.cli import main

FOLDER = Path(__file__).parent / "data" / "golden"
DIGITS = 12
"""Significant digits of a float that is kept; as far as two may differ in the last bits."""

_SEARCH = ["--n", "32", "--width", "4", "--generate", "256", "--step-tokens", "32"]
_LONG = ["--n", "16", "--width", "4", "--prompt", "6000", "--generate", "128"]
_OPT = ["--model", "opt-6.7b", *_SEARCH]
_QWEN = ["--model", "qwen2.5-1.5b", *_SEARCH]
_SCORED = [*_QWEN, "--verifier", "skywork-prm-1.5b"]
SIMULATED = {
    "lbs and its parts": [*_OPT, "--kv-memory", "950MiB", "--ablation", "--engines", "none"],
    "every engine": [
        *(*_OPT, "--kv-memory", "900MiB", "--schedules", "locality/tree"),
        *("--engines", "vllm,vllm-offload,sglang,sglang-hicache,sglang-write-back,clairvoyant"),
    ],
    "hardly any memory, barriers": [
        *(*_QWEN, "--kv-memory", "14MiB", "--schedules", "locality,layerwise/tree"),
        *("--engines", "none", "--batching", "grouped"),
    ],
    "speculation, scored ahead": [
        *(*_SCORED, "--kv-memory", "160MiB", "--step-spread", "0.5"),
        *("--speculation", "exact", "--verify-ahead", "slack", "--schedules", "in-gpu,locality"),
    ],
    "speculation, dvts, roofline split": [
        *(*_SCORED, "--kv-memory", "90MiB", "--speculation", "exact", "--search", "dvts"),
        *("--split", "roofline", "--schedules", "locality"),
    ],
    "everything in turn, dynamic": [
        *(*_SCORED, "--kv-memory", "70MiB", "--split", "offload", "--search", "dynamic"),
        *("--survival", "score", "--schedules", "locality,layerwise"),
    ],
    "fixed split, particles, few rows": [
        *(*_SCORED, "--kv-memory", "110MiB", "--split", "0.6", "--search", "particles"),
        *("--max-batch", "5", "--schedules", "in-gpu,locality"),
    ],
    "split by need, eager": [
        *(*_SCORED, "--kv-memory", "90MiB", "--split", "auto", "--write-back", "eager"),
        *("--schedules", "locality,layerwise/tree", "--seed", "1"),
    ],
    "best of n, lru": [
        *(*_QWEN, "--kv-memory", "80MiB", "--search", "best-of-n", "--step-spread", "1"),
        *("--victims", "lru", "--batching", "continuous", "--schedules", "locality/tree"),
        *("--engines", "vllm-offload,sglang-hicache"),
    ],
    "by cost, lazy, slow link, another card": [
        *(*_QWEN, "--kv-memory", "30MiB", "--victims", "cost", "--write-back", "lazy"),
        *("--link-bandwidth", "4GB/s", "--gpu", "custom:12GB,360GB/s,25TFLOPS"),
        *("--weights", "int8", "--schedules", "locality", "--engines", "none"),
    ],
    "sparse, a query ahead": [
        *("--model", "qwen2.5-1.5b", *_LONG, "--kv-memory", "180MiB", "--sparse", "ahead"),
        *("--select", "512", "--schedules", "locality/tree,layerwise/tree,in-gpu/tree"),
    ],
    "sparse, predicted": [
        *("--model", "qwen2.5-1.5b", *_LONG, "--kv-memory", "180MiB", "--sparse", "asyncspade"),
        *("--select", "1/8", "--sparse-from", "1024", "--schedules", "locality/tree"),
    ],
}


def printed(*words):
    """The JSON object that a command prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in (*words, "--json")])
    assert code == 0, err.getvalue()
    return json.loads(out.getvalue())


def simulated(name):
    """What `beamwright simulate` says of a case."""
    words = SIMULATED[name]
    card = [] if "--gpu" in words else ["--gpu", "rtx-4090"]
    return printed("simulate", *words, *card)


def differences(found, pinned, place=""):
    """Where two JSON values are not the same: lines of place, what is pinned, what is found."""
    if isinstance(found, dict) and isinstance(pinned, dict):
        for key in sorted(found.keys() & pinned.keys()):
            yield from differences(found[key], pinned[key], f"{place}/{key}")
        for key in sorted(found.keys() ^ pinned.keys()):
            yield f"{place}/{key}: is {'not pinned' if key in found else 'not found'}"
    elif isinstance(found, list) and isinstance(pinned, list) and len(found) == len(pinned):
        for i, inner in enumerate(zip(found, pinned, strict=True)):
            yield from differences(*inner, f"{place}/{i}")
    elif not _same(found, pinned):
        yield f"{place}: {pinned!r} is pinned, {found!r} is found"


def _same(found, pinned):
    if type(found) is not type(pinned):
        return False
    if isinstance(found, float):
        return math.isclose(found, pinned, rel_tol=10 ** (1 - DIGITS))
    return found == pinned


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


GOLDENS = {"simulate": (SIMULATED, simulated)}
"""By file: its cases, and what is found of one."""


def pinned(name):
    """What a file holds, by case."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name):
    cases, find = GOLDENS[name]
    found = {case: _rounded(find(case)) for case in cases}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for golden in sys.argv[1:] or GOLDENS:
        write(golden)
