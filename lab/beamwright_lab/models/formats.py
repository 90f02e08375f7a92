"""Check each weight format: bits, errors, load seconds and memory, damaged files.

    python -m beamwright_lab.models.formats [--only NAME...] [--damaged 500] [--skip-large]

The lab writes the files. Errors are of a small model: against the format's definition, and against
`transformers` where it reads the file on a CPU (GGUF needs `gguf`; compressed-tensors and nf4 need
their packages). Seconds and memory are of half a billion parameters in a fresh process. Damaged
files are loaded 250 to a process, which has a time limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from beamwright.errors import error_line
from beamwright.models.formats import StoredWeights, open_checkpoint
from beamwright_lab.common import finish, say
from beamwright_lab.models.damage import write_damaged
from beamwright_lab.models.quantised import FORMATS, source_of, write_format
from beamwright_lab.models.shown import format_rows

_BATCH = 250


def by_transformers(name: str, place: Path) -> Mapping[str, torch.Tensor] | str:
    """Return tensors as dequantised by `transformers`, or why it fails."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    how: dict[str, Any] = {"dtype": torch.float32}
    folder = place
    if place.is_file():
        folder, how["gguf_file"] = place.parent, place.name
    elif name == "FP8 block":
        how["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    elif name == "MXFP4":
        how["quantization_config"] = Mxfp4Config(dequantize=True)
    elif name.startswith("compressed"):
        from transformers import CompressedTensorsConfig

        how["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **how)
        found = {key: value.detach() for key, value in model.state_dict().items()}
        if name == "nf4":
            from bitsandbytes.functional import dequantize_4bit

            for path, module in model.named_modules():
                state = getattr(getattr(module, "weight", None), "quant_state", None)
                if state is not None:
                    found[f"{path}.weight"] = dequantize_4bit(module.weight.data, state).detach()
    except Exception as error:  # such as a missing package or card
        return error_line(error)
    return found


def largest_error(weights: StoredWeights, expected: Mapping[str, torch.Tensor]) -> float | None:
    """Largest error of projection weights, relative to the largest value; None if not compared.

    Where expected values are bfloat16, ours are rounded to it first.
    """
    found = []
    for name, value in expected.items():
        if "_proj" not in name or name.endswith("bias"):
            continue
        ours = weights.tensor(name)
        if ours is None:
            return None
        meant = value.float() if ours.shape == value.shape else value.float().transpose(-1, -2)
        rounded = torch.equal(meant, meant.bfloat16().float())
        ours = ours.bfloat16().float() if rounded else ours.float()
        found.append(float((ours - meant).abs().max() / meant.abs().max()))
    return max(found, default=None)


def linear_error(weights: StoredWeights, names: Sequence[str]) -> float | None:
    """Largest relative error of the weights that projections compute with.

    None if they are dequantised on loading.
    """
    found = []
    for name in names:
        linear = weights.quantised_linear(name.removesuffix(".weight"))
        meant = weights.tensor(name)
        if linear is None or meant is None:
            continue
        ours = linear(torch.eye(meant.shape[1])).T
        found.append(float((ours - meant.float()).abs().max() / meant.abs().max()))
    return max(found, default=None)


def load_all(places: Sequence[Path], limit_s: float) -> Iterator[dict[str, Any]]:
    """Load each checkpoint in one process; after a crash or hang, go on in another one."""
    while places:
        given = [sys.executable, "-m", "beamwright_lab.models.load_file", *map(str, places)]
        try:
            done = subprocess.run(
                given, check=False, capture_output=True, text=True, timeout=limit_s
            )
            out, why = done.stdout, f"exit {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as error:
            out, why = (error.stdout or b"").decode(), "hang"
        lines = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        yield from lines
        places = places[len(lines) :]
        if places:
            yield {
                "place": str(places[0]),
                "outcome": "hang" if why == "hang" else "crash",
                "said": why,
            }
            places = places[1:]


def load_damaged(place: Path, count: int, limit_s: float) -> dict[str, Any]:
    """Load damaged copies; return counts of outcomes, and those that should not happen."""
    outcomes: Counter[str] = Counter()
    bad: list[dict[str, Any]] = []
    for first in range(0, count, _BATCH):
        with TemporaryDirectory() as folder:
            seeds = range(first, min(count, first + _BATCH))
            places = [write_damaged(place, Path(folder), seed) for seed in seeds]
            for seed, each in zip(seeds, load_all(places, limit_s), strict=True):
                outcomes[each["outcome"]] += 1
                if each["outcome"] not in ("loaded", "refused") or "\n" in each["said"]:
                    bad.append({"seed": seed, **each})
    return {"outcomes": dict(outcomes), "bad": bad}


def measure_small(name: str, place: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure errors and damaged files of a small model."""
    checkpoint, meant = write_format(name, source_of(name, place, large=False), place)
    facts: dict[str, Any] = {"format": name}
    try:
        weights = open_checkpoint(checkpoint)
        theirs = by_transformers(name, checkpoint)
        facts["definition"] = largest_error(weights, meant)
        facts["transformers"] = (
            theirs if isinstance(theirs, str) else largest_error(weights, theirs)
        )
        names = [each for each in weights.sizes if "_proj.weight" in each]
        facts["computed"] = linear_error(weights, names)
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    facts["alone"] = next(load_all([checkpoint], given.limit_s))
    facts["damaged"] = load_damaged(checkpoint, given.damaged, given.limit_s)
    return facts


def measure_large(name: str, place: Path, limit_s: float) -> dict[str, Any]:
    """Measure bits per weight, load seconds and memory with half a billion parameters."""
    source = source_of(name, place, large=True)
    checkpoint, _ = write_format(name, source, place)
    files = [checkpoint] if checkpoint.is_file() else [*checkpoint.glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files)
    from safetensors import safe_open

    with safe_open(source / "model.safetensors", framework="pt") as file:
        count = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    found = next(load_all([checkpoint], limit_s))
    return {"file_bytes": size, "parameters": count, "bits": 8 * size / count, "load": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--damaged", type=int, default=500)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--skip-large", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in given.only:
        with TemporaryDirectory() as folder:
            sizes = [Path(folder, size) for size in ("small", "large")]
            for place in sizes:
                place.mkdir()
            rows.append(measure_small(name, sizes[0], given))
            if not given.skip_large:
                rows[-1]["large"] = measure_large(name, sizes[1], given.limit_s)
        say(rows[-1])
    print(format_rows(rows))
    finish("formats", {"rows": rows})


if __name__ == "__main__":
    main()
