"""Stages `graphs` and `tests`: do captured steps and the sampling kernel work on this card?

Steps as graphs must give the same tokens and log-probabilities as plain calls, bit for bit; one
sampling kernel must agree with torch. `tests` runs the repository's own tests that matter on a
card, a row each, if pytest is installed. The first case of each runs before the second of any,
because every case compiles kernels and time may run out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright_lab.gpu.context import Context

_ROOT = Path(__file__).resolve().parents[3]
TESTS = (
    "tests/attention/kernels/test_replay.py",
    "tests/engine/test_selftest.py::test_tiles_and_kernels_are_exact_on_a_card",
    "tests/models/test_codes.py",
    "tests/lab/layerwise/test_streams.py::test_a_card_s_streams_change_no_context",
    "tests/kv/test_streams.py::test_blocks_cross_a_card_s_link_in_one_launch",
    "tests/solver/test_split.py::test_memory_moves_on_a_card",
    "tests/models/test_layer_kernels.py",
    "tests/models/test_step_kernels.py",
    "tests/attention/kernels/test_kernels.py",
    "tests/engine/test_draw_kernel.py",
)
_ABSENT_CARD = "compile"  # in names of tests that compile for an absent card
_LAST_TEST_S = 4.0
_SHAPES = {
    "one layer": "llama,layers=1,hidden=32,heads=2,kv_heads=1,intermediate=48,vocab=64,context=128",
    "like qwen2.5-1.5b": "llama,layers=4,hidden=1536,heads=12,kv_heads=2,intermediate=2048,"
    "vocab=4096,context=512",
}


def run(context: Context) -> dict[str, Any]:
    """Compare graphs with plain steps, and the sampling kernel with torch."""
    data: dict[str, Any] = {"rows": []}
    shapes = dict([*_SHAPES.items()][:1]) if context.smoke else _SHAPES
    work = [
        ({"what": f"graphs, {name}"}, partial(_graphs, context, shape))
        for name, shape in shapes.items()
    ]
    context.rows(data, "rows", [*work, ({"what": "draw kernel"}, partial(_draws, context))])
    wrong = [
        row["what"]
        for row in data["rows"]
        if "error" in row or row.get("equal") is False or row.get("warnings")
    ]
    return {**data, "error": f"wrong: {', '.join(wrong)}"} if wrong else data


def _graphs(context: Context, shape: str) -> dict[str, Any]:
    plain, _, _ = _search_nodes(context, shape, "off")
    found, attention, warnings = _search_nodes(context, shape, "on")
    return {
        "equal": found == plain,
        "nodes": len(found),
        "attention": attention,
        "warnings": list(warnings),
    }


def _search_nodes(
    context: Context, shape: str, graphs: str
) -> tuple[list[Any], str, tuple[str, ...]]:
    """Return each node's tokens, log-probabilities and stop, the backend's name, and warnings."""
    trees: list[Any] = []
    with Solver(
        model=f"random:{shape}",
        verifier="none",
        device=context.device,
        n=16,
        width=4,
        max_rounds=4,
        step_tokens=12,
        ignore_eos=True,
        kv_memory="64MiB",
        graphs=graphs,
    ) as solver:
        solution = solver.synthetic(9, on_round=lambda report: trees.append(report.tree))
        nodes = [(n.token_ids, n.logprobs, n.stop) for n in trees[-1].nodes()]
        return nodes, solver.generator.backend.name, solution.warnings


def _draws(context: Context) -> dict[str, Any]:
    if not context.on_gpu:
        return {"skipped": "needs a GPU"}
    from beamwright_lab.gpu.attention_kernels import sampling_functions

    _, ways = sampling_functions(64, 151_936, torch.bfloat16, context.device)
    (tokens, logprobs), (found, found_logprobs) = ways["torch"](), ways["triton"]()
    difference = float((found_logprobs - logprobs).abs().max())
    others = int((found != tokens).sum())
    return {"equal": others == 0, "other_tokens": others, "difference": difference}


# --- tests -----------------------------------------------------------------------------------


def run_tests(context: Context, tests: Sequence[str] = TESTS) -> dict[str, Any]:
    """Run the tests in this process, which the runner can kill; save a row after each."""
    import pytest

    data: dict[str, Any] = {"tests": []}

    class Rows:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            items[:] = first_cases_first(items)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when != "call" and report.outcome == "passed":
                return
            row = {"test": report.nodeid, "outcome": report.outcome, "s": round(report.duration, 2)}
            if report.failed:
                row["error"] = str(report.longrepr)[-1500:]
            data["tests"].append(row)
            context.save(data)

        def pytest_sessionstart(self, session: Any) -> None:
            sessions.append(session)

        def pytest_runtest_logfinish(self) -> None:
            if context.left_s < _LAST_TEST_S:
                sessions[0].shouldstop = "the time is up"

    sessions: list[Any] = []
    files = [str(_ROOT / name) for name in tests]
    # Warnings that only CUDA gives are no failures.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", f"--rootdir={_ROOT}"]
    code = pytest.main([*options, *files], [Rows()])
    outcomes = Counter(row["outcome"] for row in data["tests"])
    data["summary"] = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    if sessions and sessions[0].shouldstop:
        data["summary"] += f" of {sessions[0].testscollected}, until the time was up"
    if outcomes["failed"] or not outcomes["passed"]:
        data["error"] = f"device tests: {data['summary']}, exit code {int(code)}"
    return data


def first_cases_first(items: Sequence[Any]) -> list[Any]:
    """Order tests: the first case of each, then the second of each, and so on.

    Leaves out tests that compile for a card that is not there.
    """
    seen: Counter[str] = Counter()
    ranked = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if _ABSENT_CARD not in name.rpartition("::")[2]:
            ranked.append((seen[name], item))
            seen[name] += 1
    return [item for _, item in sorted(ranked, key=lambda each: each[0])]
