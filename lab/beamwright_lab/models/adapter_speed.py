"""Speed of the `transformers` adapter beside our decoder and plain `transformers`: 16 paths.

    python -m beamwright_lab.models.adapter_speed [--rounds 5] [--tokens 32] [--n 16]

Sides take turns in one process. The plain side prefills the prompt once, repeats its cache, and
decodes all paths together. Random weights: qwen2.5-0.5b's shape, and a mixture of 128 experts, of
which a token uses 8.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright_lab.common import RESULTS, finish, interleave
from beamwright_lab.models.checkpoints import copy_tokenizer
from beamwright_lab.models.shown import speed_rows
from beamwright_lab.peers.adapters.transformers_loops import load_model, repeat_cache_paths
from beamwright_lab.peers.models import LARGE, model_folder

_EXPERTS = {
    **{"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64},
    **{"num_key_value_heads": 2, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 192, "vocab_size": 4096, "max_position_embeddings": 1024},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MIXTURE = "mixture of 128"


def folder_of(model: str) -> Path:
    """Return the model's folder, written the first time."""
    if model != MIXTURE:
        return model_folder(model)
    folder = RESULTS / "models" / "qwen3_moe-128"
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_moe", **_EXPERTS)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        copy_tokenizer(folder)
    return folder


def sides_of(model: str, given: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return a function for each side that generates all paths once."""
    folder, sides = folder_of(model), dict[str, Callable[[], None]]()

    def solver(decoder: str) -> Callable[[], None]:
        made = Solver(
            model=str(folder),
            verifier="none",
            search="best-of-n",
            choose="majority",  # there is no verifier
            n=given.n,
            step_tokens=given.tokens,
            max_tokens=given.tokens,
            ignore_eos=True,
            dtype="float32",
            decoder=decoder,
        )

        def once() -> None:
            solution = made.synthetic(given.prompt)
            assert solution.tokens.generated == given.n * given.tokens, solution.tokens

        return once

    for decoder in ("transformers",) if model == MIXTURE else ("own", "transformers"):
        sides[f"beamwright, {decoder}"] = solver(decoder)
    theirs = load_model(folder)
    prompt = torch.randint(3, theirs.config.vocab_size, (given.prompt,)).tolist()

    def loop() -> None:
        repeat_cache_paths(theirs, prompt, given.n, given.tokens, 0.8)

    return {**sides, "transformers, prefill once": loop}


def measure(model: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all sides of a model; return a row each."""
    sides = sides_of(model, given)
    for once in sides.values():
        once()
    before = os.getloadavg()[0]
    timings = interleave(sides, given.rounds)
    ours = timings["beamwright, transformers"]
    return [
        {
            **{"model": model, "side": side, "n": given.n},
            "tok/s, best": round(given.n * given.tokens / timing.min_s, 1),
            "tok/s, median": round(given.n * given.tokens / timing.median_s, 1),
            "best tok/s of the adapter / of this row": round(timing.min_s / ours.min_s, 2),
            "median tok/s of the adapter / of this row": round(timing.median_s / ours.median_s, 2),
            "machine load": f"{before:.1f}-{os.getloadavg()[0]:.1f}",
        }
        for side, timing in timings.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=[LARGE, MIXTURE], choices=[LARGE, MIXTURE])
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = [row for model in given.models for row in measure(model, given)]
    print(speed_rows(rows))
    settings = {name: getattr(given, name) for name in ("n", "prompt", "tokens", "rounds")}
    finish("adapter_speed", {**settings, "rows": rows})


if __name__ == "__main__":
    main()
