"""Requests to a simulated serving engine, its iterations, and its interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from beamwright.tree import Lineage


@dataclass(eq=False)
class StepRequest:
    """A request to decode the next step of one beam, whose path is the prompt.

    path: nodes of the prompt, the root () first; lengths: tokens of each.
    node: the node of the step; step_tokens: tokens that the step will have.
    score: the verifier's score of the path; None: not scored.
    drawn: tokens sampled so far.
    computed: tokens of prompt and step that have KV.
    """

    path: tuple[Lineage, ...]
    lengths: tuple[int, ...]
    node: Lineage
    step_tokens: int
    score: float | None = None
    drawn: int = 0
    computed: int = 0
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and step so far; the newest has no KV yet."""
        return self.prompt_tokens + self.drawn

    @property
    def final_tokens(self) -> int:
        return self.prompt_tokens + self.step_tokens

    @property
    def complete(self) -> bool:
        return self.drawn == self.step_tokens

    def forward(self, num_tokens: int, passes: int = 1) -> None:
        """Compute KV of `num_tokens` tokens per pass; sample a token once all have KV.

        More than one pass is allowed only if `num_tokens` is 1.
        """
        self.computed += num_tokens * passes
        if passes > 1:
            self.drawn += passes
        elif self.computed == self.num_tokens:
            self.drawn += 1


@dataclass(frozen=True)
class Iteration:
    """The work that the engine schedules next.

    rows: requests, each with its tokens in one pass.
    passes: equal passes until the schedule can change; 1 unless every row has one token.
    distinct_tokens: KV tokens read if shared prefixes are read once, new tokens included.
    loads: (request, tokens) to load from the host before the request can run.
    load_tokens: tokens to load during the pass, which ends no earlier than the load.
    store_tokens: tokens to store on the host during the pass.
    evicted_tokens: tokens to store on the host before the pass.
    """

    rows: Sequence[tuple[StepRequest, int]] = ()
    passes: int = 1
    distinct_tokens: int = 0
    loads: Sequence[tuple[StepRequest, int]] = ()
    load_tokens: int = 0
    store_tokens: int = 0
    evicted_tokens: int = 0


class RequestEngine(Protocol):
    """A scheduler of requests, driven by `simulator.engines.EngineRun`.

    preemptions: number of preempted requests.
    stopped: nodes whose requests the engine ended before their steps were complete.
    peak_tokens, host_peak_tokens: most tokens of KV on device and host.
    """

    preemptions: int
    stopped: set[Lineage]

    @property
    def peak_tokens(self) -> int: ...
    @property
    def host_peak_tokens(self) -> int: ...

    def submit(self, requests: Sequence[StepRequest]) -> None:
        """Queue requests. Each of them must fit the device with one more block."""
        ...

    def schedule(self) -> Iteration:
        """Return the next iteration; it has no rows if all requests wait for loads."""
        ...

    def loaded(self, request: StepRequest) -> None:
        """Continue with a request whose load has finished."""
        ...

    def commit(self, iteration: Iteration) -> list[StepRequest]:
        """Account for an iteration that has run; return the requests that are complete."""
        ...


class PlannedStep(Protocol):
    """A known step of a search."""

    @property
    def lineage(self) -> Lineage: ...
    @property
    def tokens(self) -> int: ...
    @property
    def score(self) -> float | None: ...


def requests_by_round(prompt_tokens: int, steps: Iterable[PlannedStep]) -> list[list[StepRequest]]:
    """Return the requests of each round, in lineage order.

    This order suits prefix caches best. search-and-learn's differs.
    """
    lengths: dict[Lineage, int] = {(): prompt_tokens}
    scores: dict[Lineage, float | None] = {(): None}
    for step in steps:
        lengths[step.lineage], scores[step.lineage] = step.tokens, step.score
    rounds: dict[int, list[StepRequest]] = {}
    for lineage in sorted(lengths):
        if not lineage:
            continue
        path = tuple(lineage[:depth] for depth in range(len(lineage)))
        request = StepRequest(
            path,
            tuple(lengths[node] for node in path),
            lineage,
            lengths[lineage],
            scores[path[-1]],
        )
        rounds.setdefault(len(lineage), []).append(request)
    return [rounds[number] for number in sorted(rounds)]
