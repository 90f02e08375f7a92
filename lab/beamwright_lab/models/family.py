"""Check one architecture: parity, equal trees, speed. Prints one JSON line.

    python -m beamwright_lab.models.family NAME FOLDER [--decoder own|transformers]

If a check fails, the line has its `error` and `stage`, and lacks the results of later checks.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from beamwright import Solution, Solver
from beamwright.errors import BeamwrightError
from beamwright.protocols import RoundReport
from beamwright_lab.common import interleave
from beamwright_lab.models.checkpoints import write_checkpoint
from beamwright_lab.peers.adapters.transformers_loops import generate_paths

PROBLEM = "Jack has 70 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?"
NUM_TOKENS, _STEP, _N = 192, 16, 12
_PATH_TOKENS = 64
_QUARTER = 4
_SEARCH: Mapping[str, Any] = {
    # Six subtrees share only the prompt: a quarter of the KV holds one path of the six.
    **{"search": "dvts", "n": _N, "width": 2, "verifier": "logprob", "temperature": 1.0},
    **{"step_tokens": _STEP, "max_tokens": NUM_TOKENS, "ignore_eos": True, "dtype": "float32"},
}
_PATHS: Mapping[str, Any] = {
    **{"search": "best-of-n", "choose": "majority", "verifier": "none", "dtype": "float32"},
    **{"n": _N, "step_tokens": _PATH_TOKENS, "max_tokens": _PATH_TOKENS, "ignore_eos": True},
}


def path_of(solution: Solution, number: int) -> tuple[list[int], list[float], int]:
    """Return a path's token ids, log-probabilities of generated tokens, and prompt length."""
    root, *steps = solution.tree.node(solution.candidates[number].lineage).path()
    ids = [*root.token_ids, *(token for step in steps for token in step.token_ids)]
    return ids, [value for step in steps for value in step.logprobs], len(root.token_ids)


@torch.inference_mode()
def parity(model: Any, solution: Solution) -> float:
    """Largest difference of final paths' log-probabilities from those of `transformers`."""
    found = [path_of(solution, number) for number in range(len(solution.candidates))]
    worst = 0.0
    for ids, ours, start in found:
        logits = model(torch.tensor([ids])).logits[0].float()
        theirs = logits.log_softmax(-1)[start - 1 : -1]
        drawn = theirs.gather(-1, torch.tensor(ids[start:])[:, None])[:, 0]
        worst = max(worst, float((drawn - torch.tensor(ours)).abs().max()))
    return worst


def search_and_resume(solver: Solver, folder: Path) -> tuple[Solution, Solution]:
    """Search with a checkpoint, and resume it after half of the rounds; return both solutions."""
    file, kept = folder / "search.json", folder / "half.json"

    def look(report: RoundReport) -> None:
        if report.round == NUM_TOKENS // _STEP // 2:
            kept.write_bytes(file.read_bytes())

    return solver.solve(PROBLEM, on_round=look, checkpoint=file), solver.resume(kept)


def check(facts: dict[str, Any], folder: Path, decoder: Mapping[str, str], rounds: int) -> None:
    """Run all checks in order; results go into `facts`, which keeps them if a later one fails."""
    facts["stage"] = "load"
    model = str(folder)
    with Solver(model=model, schedule="in-gpu", **_SEARCH, **decoder) as solver:
        facts |= {"loads": True, "exact": solver.exact, "stage": "search"}
        with TemporaryDirectory() as place:
            base, resumed = search_and_resume(solver, Path(place))
    facts["resumed"] = base.tree_hash == resumed.tree_hash
    facts |= {"tokens": base.tokens.generated, "stage": "parity"}
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    facts["parity"] = parity(reference, base)
    facts["stage"] = "locality"
    assert base.kv.device_peak_bytes is not None
    quarter = base.kv.device_peak_bytes // _QUARTER
    tight = {"schedule": "locality", "kv_memory": quarter}
    with Solver(model=model, **_SEARCH, **tight, **decoder) as solver:
        solution = solver.solve(PROBLEM)
    facts["locality"] = solution.tree_hash == base.tree_hash
    facts |= {"h2d_bytes": solution.kv.h2d_bytes, "stage": "speed"}
    facts |= speed(folder, path_of(base, 0)[0][:32], decoder, rounds)
    del facts["stage"]


def speed(
    folder: Path, prompt: Sequence[int], decoder: Mapping[str, str], rounds: int
) -> dict[str, float]:
    """Tokens per second of 12 paths of 64 tokens, and of `generate`; best rounds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with Solver(model=str(folder), **_PATHS, **decoder) as solver:
        sides = {
            "tok_s": lambda: _discard(solver.synthetic(len(prompt))),
            "generate_tok_s": lambda: _discard(
                generate_paths(model, prompt, _N, _PATH_TOKENS, 1.0)
            ),
        }
        timings = interleave(sides, rounds + 1)  # the first warms up
    return {name: round(_N * _PATH_TOKENS / timing.min_s, 1) for name, timing in timings.items()}


def _discard(_: object) -> None:
    """Discard a result: `interleave` times the call."""


def report(name: str, folder: Path, decoder: str | None, rounds: int) -> dict[str, Any]:
    """Write the checkpoint and run all checks; errors are part of the returned facts."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    facts: dict[str, Any] = {"stage": "write"}
    try:
        write_checkpoint(name, folder)
        check(facts, folder, {} if decoder is None else {"decoder": decoder}, rounds)
    except BeamwrightError as error:
        facts |= {"error": str(error), "refused": facts["stage"] == "load"}
    except Exception as error:  # of any kind: other rows follow
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--decoder", choices=["own", "transformers"])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    print(json.dumps(report(given.name, given.folder, given.decoder, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
