"""Searches whose generator is elsewhere, beside the same searches here.

The bundled pair on problems of `bundled:test`, in blocks that all generators solve in turns: the
generator here; a Beamwright server as the generator; and any other servers of the same checkpoint
that are named. Accuracy with its interval, steps and requests per round, prompt tokens and those
that the server found in its KV, seconds per block. vLLM's own counters of its prefix cache are
read where a server has them. The verifier is here in every case.

A server for it: `python -m vllm.entrypoints.openai.api_server --model FOLDER --served-model-name
bundled`, with FOLDER of `python -c "import beamwright; print(beamwright.__path__[0])"` and
`bundled/generator`; on a CPU with --dtype float32 --enforce-eager --block-size 32
--no-enable-chunked-prefill --max-num-batched-tokens 8192 --enable-prompt-tokens-details, see
docs/scaling.md.

    python -m beamwright_lab.scale.elsewhere --server vllm=http://127.0.0.1:8101/v1#bundled
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from beamwright import Solution, Solver
from beamwright.counters import Counters
from beamwright.evaluate import AnswerChecker, load_problems
from beamwright.evaluate.metrics import wilson_interval
from beamwright_lab.common import finish, say, table

SEARCHES: dict[str, dict[str, Any]] = {
    "beam": {"search": "beam", "n": 16, "width": 4},
    "dvts": {"search": "dvts", "n": 16, "width": 4},
    "best-of-n": {"search": "best-of-n", "n": 16, "width": 4},
}
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass
class Found:
    """Of one generator with one search, over all blocks."""

    right: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = 0
    queries: float = 0.0
    hits: float = 0.0
    failed: int = 0

    def row(self, search: str, name: str) -> dict[str, Any]:
        """What is shown of it."""
        low, high = wilson_interval(sum(self.right) / len(self.right), len(self.right))
        cached = None
        if self.prompt_tokens and self.cached_tokens is not None:
            cached = round(self.cached_tokens / self.prompt_tokens, 3)
        return {
            "search": search,
            "generator": name,
            "problems": len(self.right),
            "accuracy": round(sum(self.right) / len(self.right), 3),
            "95 %": f"{low:.3f} to {high:.3f}",
            "failed": self.failed,
            "rounds": self.rounds,
            "steps per round": round(self.steps / max(1, self.rounds), 1),
            "requests per round": round(self.requests / max(1, self.rounds), 2),
            "tokens": self.tokens,
            "prompt tokens": self.prompt_tokens or None,
            "found in KV": cached,
            "its own counter": round(self.hits / self.queries, 3) if self.queries else None,
            "s per block, min": round(min(self.seconds), 2),
            "median": round(median(self.seconds), 2),
            "total s": round(sum(self.seconds), 1),
            "tok/s": round(self.tokens / sum(self.seconds)),
        }


@contextmanager
def own_server() -> Iterator[str]:
    """A server of the bundled generator, as `--model` takes it."""
    words = ["serve", "--verifier", "none", "--name", "bundled", "--port", "0", "--json"]
    words += ["--max-requests", "4096"]
    with subprocess.Popen(
        [sys.executable, "-m", "beamwright", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            base = json.loads(process.stdout.readline())["base_url"]
            yield f"openai:{base}#bundled:plain"
        finally:
            if process.poll() is not None:
                say(f"the server has ended by itself, with {process.returncode}")
            process.terminate()
            process.wait(60)


def counters(model: str) -> dict[str, float]:
    """vLLM's counters of its prefix cache; empty where there are none."""
    if not model.startswith("openai:"):
        return {}
    url = model.removeprefix("openai:").partition("#")[0].removesuffix("/v1")
    try:
        text = httpx.get(f"{url}/metrics", timeout=10).text
    except httpx.HTTPError:
        return {}
    return {name: float(value) for name, value in _COUNTER.findall(text)}


def solve_block(
    solver: Solver, model: str, block: Sequence[Any], options: dict[str, Any], found: Found,
    checker: AnswerChecker,
) -> None:  # fmt: skip
    """One generator's turn."""
    before, counted, start = counters(model), solver.usage().engine, time.perf_counter()
    problems = [(each.unique_id, each.problem) for each in block]
    solved = dict(solver.solve_many(problems, in_flight="auto", **options))
    found.seconds.append(time.perf_counter() - start)
    after = counters(model)
    found.queries += after.get("queries", 0) - before.get("queries", 0)
    found.hits += after.get("hits", 0) - before.get("hits", 0)
    for each in block:
        solution = solved[each.unique_id]
        if not isinstance(solution, Solution):
            found.failed += 1
            found.right.append(False)
            say(each.unique_id, solution)
            continue
        answer = solution.answer
        found.right.append(answer is not None and bool(checker.is_correct(each.answer, answer)))
        nodes = [node for node in solution.tree.nodes() if node.parent is not None]
        found.rounds += solution.rounds
        found.steps += len(nodes)
        found.tokens += solution.tokens.generated
    if model != "bundled":
        note_remote(solver.usage().engine - counted, found)


def note_remote(counts: Counters, found: Found) -> None:
    """What the generator elsewhere has counted."""
    found.requests += counts.requests
    found.prompt_tokens += counts.prompt_tokens
    if counts.untold_cached or found.cached_tokens is None:
        found.cached_tokens = None
    else:
        found.cached_tokens += counts.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL#MODEL")
    parser.add_argument("--search", action="append", choices=SEARCHES)
    args = parser.parse_args()
    problems = load_problems("bundled:test", args.problems).problems
    blocks = [problems[at : at + args.block] for at in range(0, len(problems), args.block)]
    found: dict[tuple[str, str], Found] = defaultdict(Found)
    searches = args.search or list(SEARCHES)
    with ExitStack() as stack:
        checker = stack.enter_context(AnswerChecker())
        models = {"here": "bundled", "own server": stack.enter_context(own_server())}
        for each in args.server:
            name, _, url = each.partition("=")
            models[name] = f"openai:{url}"
        solvers = {}
        for name, model in models.items():
            far = {} if model == "bundled" else {"tokenizer": "bundled"}
            solver = Solver(model=model, verifier="bundled", **far)
            solvers[name] = stack.enter_context(solver)
            solver.solve(problems[0].problem)  # caches and connections
        for search in searches:
            for number, block in enumerate(blocks):
                first = number % len(solvers)
                for name in [*list(solvers)[first:], *list(solvers)[:first]]:
                    to = found[search, name]
                    solve_block(solvers[name], models[name], block, SEARCHES[search], to, checker)
            rows = [found[search, name].row(search, name) for name in solvers]
            say(table(rows, list(rows[0])))
    rows = [each.row(*key) for key, each in found.items()]
    finish("scale_elsewhere", {"block": args.block, "rows": rows})


if __name__ == "__main__":
    main()
