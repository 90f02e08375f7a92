"""Beamwright and the `transformers` loops as workers, in Beamwright's own environment."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from beamwright_lab.peers.adapters.worker import Worker, serve


def own_worker(side: str, folder: Path, log: Path, **options: Any) -> Worker:
    """A worker of `beamwright` or `transformers`. dtype, threads, weights, verifier: as named."""
    full = {"side": side, "folder": str(folder), **options}
    return Worker("own_worker", full, log, python=Path(sys.executable))


# --- worker ----------------------------------------------------------------------------------


class _Beamwright:
    """A Solver with, or without, a verifier."""

    def __init__(self, options: dict[str, Any]) -> None:
        from beamwright import Solver

        verifier = options.get("verifier", "none")
        self._solver = Solver(
            model=options["folder"],
            verifier=verifier,
            dtype=options["dtype"],
            weights=options.get("weights", "auto"),
            search="best-of-n" if verifier == "none" else "beam",
            choose="majority" if verifier == "none" else "best",
            n=options["n"],
            ignore_eos=True,
        )
        self.facts = {"exact": self._solver.exact}
        self.handlers = {"paths": self.paths, "search": self.search}

    def paths(self, prompt: list[int], n: int, num_new: int, temperature: float) -> dict[str, Any]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._solver.settings.model.model)
        text = tokenizer.decode(prompt).removeprefix(" ")  # the template writes it
        start = time.perf_counter()
        solution = self._solver.solve(
            text, n=n, step_tokens=num_new, max_tokens=num_new, temperature=temperature
        )
        seconds = time.perf_counter() - start
        assert list(solution.tree.root.token_ids) == prompt
        first = solution.tree.node(solution.candidates[0].lineage)
        return {
            "seconds": seconds,
            "tokens": solution.tokens.generated,
            "first": list(first.token_ids),
            "kv_bytes": solution.kv.device_peak_bytes,
        }

    def search(
        self, problem: str, n: int, width: int, rounds: int, step_tokens: int, temperature: float
    ) -> dict[str, Any]:
        start = time.perf_counter()
        solution = self._solver.solve(
            problem,
            n=n,
            width=width,
            max_rounds=rounds,
            step_tokens=step_tokens,
            max_tokens=rounds * step_tokens,
            temperature=temperature,
        )
        return {
            "seconds": time.perf_counter() - start,
            "rounds": solution.rounds,
            "generated": solution.tokens.generated,
            "prm_encoded": solution.tokens.verifier_prefilled,
            "candidates": [[c.text, c.score] for c in solution.candidates],
        }


class _Transformers:
    """The honest loop: prefill once, repeat the cache, decode n rows together."""

    def __init__(self, options: dict[str, Any]) -> None:
        from beamwright_lab.peers.adapters.transformers_loops import load_model

        self._model = load_model(Path(options["folder"]), options["dtype"])
        self.facts: dict[str, Any] = {}
        self.handlers = {"paths": self.paths}

    def paths(self, prompt: list[int], n: int, num_new: int, temperature: float) -> dict[str, Any]:
        from beamwright_lab.peers.adapters.transformers_loops import repeat_cache_paths

        start = time.perf_counter()
        tokens, kv_bytes = repeat_cache_paths(
            self._model, prompt, n, num_new, temperature, preallocate=True
        )
        seconds = time.perf_counter() - start
        first = tokens[0].tolist()
        return {
            "seconds": seconds,
            "tokens": tokens.numel(),
            "first": first,
            "kv_bytes": kv_bytes,
        }


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    side = {"beamwright": _Beamwright, "transformers": _Transformers}[options["side"]](options)
    return {**side.facts, "torch_threads": torch.get_num_threads()}, side.handlers


if __name__ == "__main__":
    serve(_start)
