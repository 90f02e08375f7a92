"""Two published files: how far log-probabilities are from float32 of their own values, and speed.

    python -m beamwright_lab.models.published [--only smollm2 gemma] [--n 1 16 64] [--tokens 64]
    python -m beamwright_lab.models.published --reference   what `transformers` says, written anew

The text is fixed: its token ids stand in `published.json`, beside what `transformers` makes of them
in float32, of values that it reads itself (this needs `accelerate` and `gguf`). Of each side:
perplexity, the error of a token's log-probability (median, largest), and how often the same token
is best. llama.cpp is left out where `xllamacpp` is not installed. Tokens a second are of n paths of
the default precision, decoding alone; peak is what the process had at most. Each in its own.
With `--only`, rows of other files are those of the last run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright.attention import make_attention
from beamwright.models.load import load_model, read_reference
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tokenizer import TextCodec
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright_lab.common import RESULTS, finish, say
from beamwright_lab.models.load_file import peak_bytes
from beamwright_lab.models.published_files import FILES, REFERENCE, read_reference_of
from beamwright_lab.models.shown import published_rows
from beamwright_lab.peers.adapters.own_worker import prefill_timed

_SIDES: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "`--weights int8`": {"weights": "int8"},
    "`--weights int4`": {"weights": "int4"},
}
_LLAMA = "llama.cpp"
_TEXT = (
    Path(__file__).resolve().parents[3] / "docs" / "log" / "2026-11-22-isolation-and-fairness.md"
)
_TOKENS, _PROMPT, _ROWS = 768, 128, 64
_BEGIN = {"smollm2": (), "gemma": (2,)}  # <bos>
_BEST, _ALL = 4000, 1 << 20  # tokens that llama.cpp is asked for, and where they are not enough
Predicted = list[tuple[float, int]]
"""Behind each token but the last: the log-probability of the next one, and the best token."""


def predicted(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, ids: Sequence[int]
) -> Predicted:
    """logits: of hidden states [tokens, hidden]."""
    found: Predicted = []
    parts = (hidden[:-1].split(_ROWS), torch.tensor(ids[1:]).split(_ROWS))
    for states, following in zip(*parts, strict=True):
        values = logits(states).float().log_softmax(-1)
        next_ones = values.gather(-1, following[:, None])[:, 0]
        found += zip(next_ones.tolist(), values.argmax(-1).tolist(), strict=True)
    return found


@torch.inference_mode()
def by_transformers(place: Path, ids: Sequence[int]) -> Predicted:
    model = read_reference(place, torch.float32).eval()
    return predicted(model.lm_head, model.model(torch.tensor([ids])).last_hidden_state[0], ids)


@torch.inference_mode()
def by_us(place: Path, ids: Sequence[int], options: Mapping[str, str]) -> Predicted:
    settings = ModelSettings(model=str(place), **options)  # type: ignore[arg-type]
    decoder = load_model(str(place), settings).decoder
    backend = make_attention("auto", decoder.device, decoder.dtype)
    budget = 2 * len(ids) * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    model = TreeModel(decoder, backend, budget)
    hidden = model.prefill([PrefillRequest((), model.store.create(), list(ids), 0)])[0]
    return predicted(decoder.logits, hidden, ids)


def by_llama_cpp(place: Path, ids: Sequence[int]) -> Predicted:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(place)
    params.n_ctx, params.n_parallel, params.swa_full = 2 * len(ids), 1, True
    server = xllamacpp.Server(params)
    ask = {"n_predict": 1, "temperature": 1.0, "cache_prompt": True}
    found: Predicted = []
    for at in range(1, len(ids)):
        values: dict[int, float] = {}
        for count in (_BEST, _ALL):
            if ids[at] not in values:
                asked = {**ask, "prompt": list(ids[:at]), "n_probs": count}
                (choice,) = server.handle_completions(asked)["choices"]
                best = choice["logprobs"]["content"][0]["top_logprobs"]
                values = {each["id"]: each["logprob"] for each in best}
        found.append((values[ids[at]], best[0]["id"]))
    return found


def errors(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> dict[str, Any]:
    pairs = list(zip(found, expected, strict=True))
    far = [abs(ours[0] - theirs[0]) for ours, theirs in pairs]
    return {
        "perplexity": math.exp(-statistics.fmean(ours[0] for ours, _ in pairs)),
        "median": statistics.median(far),
        "largest": max(far),
        "same_best": statistics.fmean(ours[1] == theirs[1] for ours, theirs in pairs),
    }


def speed(place: Path, n: int, tokens: int) -> dict[str, Any]:
    """The best of three searches."""
    paths = {"search": "best-of-n", "choose": "majority", "n": n, "ignore_eos": True}
    lengths = {"step_tokens": tokens, "max_tokens": tokens}
    solver = Solver(model=str(place), verifier="none", **paths, **lengths)  # type: ignore[arg-type]
    rates = []
    for _ in range(3):
        with prefill_timed(solver) as prefill_s:
            found = solver.synthetic(_PROMPT)
        rates.append(found.tokens.generated / (found.time.decode_s - sum(prefill_s)))
    return {"n": n, "tok_s": max(rates), "peak_bytes": peak_bytes()}


def one(name: str, side: str, given: argparse.Namespace) -> Any:
    """A side, in this process."""
    place, reference = FILES[name].path, read_reference_of(name)
    if side.isdecimal():
        return speed(place, int(side), given.tokens)
    by = partial(by_us, options=_SIDES[side]) if side in _SIDES else by_llama_cpp
    return {"side": side, **errors(by(place, reference["ids"]), reference["predicted"])}


def write_reference() -> None:
    written = {}
    for name, file in FILES.items():
        text = _TEXT.read_text(encoding="utf-8")
        ids = [*_BEGIN[name], *TextCodec.load(file.path).encode(text)][:_TOKENS]
        found = [(round(value, 5), best) for value, best in by_transformers(file.path, ids)]
        written[name] = {"ids": ids, "predicted": found}
    REFERENCE.write_text(json.dumps(written) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--n", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--reference", action="store_true", help="write published.json anew")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*given.one, given)))
        return
    if given.reference:
        write_reference()
        return
    llama = [] if find_spec("xllamacpp") is None else [_LLAMA]
    kept, names = RESULTS / "published.json", {FILES[name].name for name in given.only}
    before = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.is_file() else []
    rows: list[dict[str, Any]] = [row for row in before if row["file"] not in names]
    for name in given.only:
        expected = read_reference_of(name)["predicted"]
        row = {"file": FILES[name].name, "sides": [{"side": "", **errors(expected, expected)}]}
        rows.append({**row, "speed": []})
        for side in [*_SIDES, *llama, *map(str, given.n)]:
            numbers = ["--one", name, side, "--tokens", str(given.tokens)]
            command = [sys.executable, "-m", "beamwright_lab.models.published", *numbers]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            rows[-1]["speed" if side.isdecimal() else "sides"].append(found)
            say(name, found)
    print(published_rows(rows))
    finish("published", {"tokens": given.tokens, "rows": rows})


if __name__ == "__main__":
    main()
