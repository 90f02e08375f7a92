"""Small searches for the tests of the engines."""

from dataclasses import dataclass

from beamwright_lab.rivals.requests import requests_by_round


@dataclass(frozen=True)
class Step:
    lineage: tuple[int, ...]
    tokens: int
    score: float | None = None


def one_round(num_beams, prompt=32, step=32):
    """Requests of the first round: all behind one prompt."""
    return requests_by_round(prompt, [Step((i,), step) for i in range(num_beams)])[0]


def two_rounds(survivors=(0, 1), width=2, num_beams=4, prompt=32, step=32):
    first = [Step((i,), step) for i in range(num_beams)]
    second = [Step((i, j), step) for i in survivors for j in range(width)]
    return requests_by_round(prompt, [*first, *second])


def run(engine, requests, most=10_000):
    """Drive an engine to the end of a round; loads arrive at once. Returns its iterations."""
    engine.submit(requests)
    left, seen = len(requests), []
    for _ in range(most):
        if not left:
            return seen
        iteration = engine.schedule()
        seen.append(iteration)
        if iteration.rows:
            left -= len(engine.commit(iteration))
        for request, _tokens in iteration.loads:
            engine.loaded(request)
    raise AssertionError("the engine does not come to an end")


def admitted(iteration):
    """Nodes of the requests that an iteration forwards."""
    return [request.node for request, _ in iteration.rows]
