"""Measure log-probability errors of GGUF files, against float32 of the values that they store.

    python -m beamwright_lab.models.published [--only smollm2 gemma] [--file GGUF ...]
        [--llama-python FILE]
    python -m beamwright_lab.models.published --reference   rewrite the references

A reference is a text's token ids and what `transformers` predicts in float32 from the same file
(needs `accelerate` and `gguf`). `published.json` has those of the two published files; others are
computed once. Each side runs in its own process and has perplexity, the error of a token's
log-probability (median, largest), and how often the same token is best. llama.cpp needs a Python
that has it. Rows of other files are kept from the last run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from beamwright.attention import make_attention
from beamwright.models.load import load_model, load_reference_model
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tokenizer import TextCodec
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright_lab.common import RESULTS, finish, say
from beamwright_lab.models.published_files import FILES, REFERENCE, read_reference_of
from beamwright_lab.models.shown import published_rows
from beamwright_lab.peers.adapters.worker import LLAMA_PYTHON, Worker

_SIDES: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "`--weights int8`": {"weights": "int8"},
    "`--weights int4`": {"weights": "int4"},
}
_LLAMA = "llama.cpp"
_TEXT = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"
_TOKENS, _ROWS = 768, 64
_BEGIN = {"gemma": (2,)}  # <bos>
# For each token but the last: the next one's log-probability, and the best token.
Predicted = list[tuple[float, int]]


def predict_next(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, ids: Sequence[int]
) -> Predicted:
    """Predict each next token from hidden states [tokens, hidden]. logits: the output layer."""
    found: Predicted = []
    parts = (hidden[:-1].split(_ROWS), torch.tensor(ids[1:]).split(_ROWS))
    for states, following in zip(*parts, strict=True):
        values = logits(states).float().log_softmax(-1)
        next_ones = values.gather(-1, following[:, None])[:, 0]
        found += zip(next_ones.tolist(), values.argmax(-1).tolist(), strict=True)
    return found


@torch.inference_mode()
def by_transformers(place: Path, ids: Sequence[int]) -> Predicted:
    model = load_reference_model(place, torch.float32).eval()
    return predict_next(model.lm_head, model.model(torch.tensor([ids])).last_hidden_state[0], ids)


@torch.inference_mode()
def by_us(place: Path, ids: Sequence[int], options: Mapping[str, str]) -> Predicted:
    settings = ModelSettings(model=str(place), **options)  # type: ignore[arg-type]
    decoder = load_model(str(place), settings).decoder
    backend = make_attention("auto", decoder.device, decoder.dtype)
    budget = 2 * len(ids) * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    model = TreeModel(decoder, backend, budget)
    hidden = model.prefill([PrefillRequest((), model.store.create(), list(ids), 0)])[0]
    return predict_next(decoder.logits, hidden, ids)


def by_llama_cpp(place: Path, ids: Sequence[int], python: Path) -> Predicted:
    options = {"file": str(place), "length": len(ids), "n": 1, "threads": torch.get_num_threads()}
    log = RESULTS / "logs" / "llama.log"
    with Worker("llama_worker", options, log, python=python) as worker:
        return [tuple(pair) for pair in worker.ask(op="predicted", ids=[*ids])["predicted"]]


def compare_predictions(
    found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]
) -> dict[str, Any]:
    pairs = list(zip(found, expected, strict=True))
    far = [abs(ours[0] - theirs[0]) for ours, theirs in pairs]
    return {
        "perplexity": math.exp(-statistics.fmean(ours[0] for ours, _ in pairs)),
        "median": statistics.median(far),
        "largest": max(far),
        "same_best": statistics.fmean(ours[1] == theirs[1] for ours, theirs in pairs),
    }


_NAMES = {file.path: name for name, file in FILES.items()}


def reference_of(place: Path) -> dict[str, Any]:
    """Return a file's reference predictions; those of other files are computed once."""
    if place in _NAMES:
        return read_reference_of(_NAMES[place])
    kept = RESULTS / "references" / f"{place.name}.json"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(new_reference(place, ())), encoding="utf-8")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def new_reference(place: Path, begin: Sequence[int]) -> dict[str, Any]:
    ids = [*begin, *TextCodec.load(place).encode(_TEXT.read_text(encoding="utf-8"))][:_TOKENS]
    found = [(round(value, 5), best) for value, best in by_transformers(place, ids)]
    return {"ids": ids, "predicted": found}


def measure_side(place: Path, side: str, llama: Path) -> dict[str, Any]:
    """Measure a side in this process; "" is the reference."""
    reference = reference_of(place)
    found, ids = reference["predicted"], reference["ids"]
    if side:
        by_llama = side == _LLAMA
        found = by_llama_cpp(place, ids, llama) if by_llama else by_us(place, ids, _SIDES[side])
    return {"side": side, **compare_predictions(found, reference["predicted"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=FILES)
    parser.add_argument("--file", nargs="+", type=Path, default=[], metavar="GGUF")
    parser.add_argument("--llama-python", type=Path, default=LLAMA_PYTHON, metavar="FILE")
    parser.add_argument("--reference", action="store_true", help="rewrite published.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure_side(Path(given.one[0]), given.one[1], given.llama_python)))
        return
    if given.reference:
        found = {
            name: new_reference(file.path, _BEGIN.get(name, ())) for name, file in FILES.items()
        }
        REFERENCE.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return
    names = given.only or ([] if given.file else [*FILES])
    places = [*(FILES[name].path for name in names), *given.file]
    kept = RESULTS / "published.json"
    before = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.is_file() else []
    rows: list[dict[str, Any]] = [r for r in before if r["file"] not in {p.name for p in places}]
    for place in places:
        rows.append({"file": place.name, "sides": []})
        for side in (
            *("", *(_SIDES if place in _NAMES else ["auto"])),
            *[_LLAMA] * given.llama_python.is_file(),
        ):
            numbers = ["--one", str(place), side, "--llama-python", str(given.llama_python)]
            command = [sys.executable, "-m", "beamwright_lab.models.published", *numbers]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            rows[-1]["sides"].append(found)
            say(place.name, found)
    print(published_rows(rows))
    finish("published", {"rows": rows})


if __name__ == "__main__":
    main()
