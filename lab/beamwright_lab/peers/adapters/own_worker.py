"""Worker process of Beamwright, separate so that its peak memory is measured alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from beamwright_lab.peers.adapters.worker import serve


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    import beamwright
    from beamwright import Solver
    from beamwright.protocols import RoundReport

    torch.set_num_threads(options["threads"])
    solver = Solver(
        model=options["folder"],
        verifier="none",
        dtype=options["dtype"],
        weights=options["weights"],
        search="best-of-n",
        choose="majority",  # paths have no scores
        n=options["n"],
        step_tokens=options["tokens"],
        max_tokens=options["tokens"],
        ignore_eos=True,
        temperature=options["temperature"],
        drafts="off",  # drafts are useless with random weights
        **options.get("more", {}),
    )
    prompt: list[int] = []

    def record_prompt(report: RoundReport) -> None:
        prompt[:] = report.tree.root.token_ids

    exact = solver.synthetic(options["prompt_tokens"], on_round=record_prompt).exact
    facts = {"version": f"beamwright {beamwright.__version__}", "prompt": prompt, "exact": exact}
    paths = partial(_paths, solver, options["prompt_tokens"])
    return facts, {"paths": paths, "reset_peak": _reset_peak}


def _reset_peak() -> dict[str, Any]:
    """Let the peak memory start again from the memory in use now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return {}


def _paths(solver: Any, prompt_tokens: int, **same: Any) -> dict[str, Any]:
    """Decode the paths that the solver was configured for, from the prompt that all engines get."""
    del same
    with timed_prefills(solver) as spent:
        start = time.perf_counter()
        solution = solver.synthetic(prompt_tokens)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "prefill_s": sum(spent), "tokens": solution.tokens.generated}


@contextmanager
def timed_prefills(solver: Any) -> Iterator[list[float]]:
    """Collect the seconds of each generator prefill; the solver's times count it as decoding."""
    spent: list[float] = []
    model, prefill = solver.generator, solver.generator.prefill

    def timed(*given: Any) -> Any:
        start = time.perf_counter()
        found = prefill(*given)
        spent.append(time.perf_counter() - start)
        return found

    model.prefill = timed
    try:
        yield spent
    finally:
        del model.prefill


if __name__ == "__main__":
    serve(_start)
