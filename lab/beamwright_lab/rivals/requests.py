"""What a serving engine is sent, and what it answers: requests, iterations, the engine's verbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from beamwright.tree import Lineage


@dataclass(eq=False)
class StepRequest:
    """The next step of one beam, sent as a prompt.

    path: the nodes of the prompt, the root () first; lengths: tokens of each.
    node: whose step is decoded; step_tokens: that it will have.
    score: of the path so far, from the verifier; None where it has none.
    drawn: tokens sampled so far; computed: tokens of prompt and step whose KV is on the device.
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
        """Of prompt and step so far; the newest one has no KV yet."""
        return self.prompt_tokens + self.drawn

    @property
    def final_tokens(self) -> int:
        """The same when the step is complete."""
        return self.prompt_tokens + self.step_tokens

    @property
    def complete(self) -> bool:
        """True once all tokens are drawn."""
        return self.drawn == self.step_tokens

    def forward(self, num_tokens: int, passes: int = 1) -> None:
        """So many more tokens have KV in each pass; one that ends at the newest draws another.

        Only rows of one token have several passes.
        """
        self.computed += num_tokens * passes
        if passes > 1:
            self.drawn += passes
        elif self.computed == self.num_tokens:
            self.drawn += 1


@dataclass(frozen=True)
class Iteration:
    """What the engine does next.

    rows: tokens that each request forwards in one pass; passes: how many such passes come before
        anything can change (more than one only where each row forwards one token).
    distinct_tokens: KV that the rows read where shared parts are read once, new tokens included.
    loads: (request, tokens) to bring from the host before the request can run.
    load_tokens: to bring while the pass runs, which ends no earlier.
    store_tokens: to send to the host meanwhile; evicted_tokens: to send before the pass begins.
    """

    rows: Sequence[tuple[StepRequest, int]] = ()
    passes: int = 1
    distinct_tokens: int = 0
    loads: Sequence[tuple[StepRequest, int]] = ()
    load_tokens: int = 0
    store_tokens: int = 0
    evicted_tokens: int = 0


class RequestEngine(Protocol):
    """Takes requests, says what runs next, and hears when it has run.

    preemptions: requests that lost their place and their KV. stopped: nodes whose request was ended
    for good before its step was complete, by an engine that does so. peak_tokens, host_peak_tokens:
    most KV on either side.
    """

    preemptions: int
    stopped: set[Lineage]

    @property
    def peak_tokens(self) -> int: ...
    @property
    def host_peak_tokens(self) -> int: ...

    def submit(self, requests: Sequence[StepRequest]) -> None:
        """Queue requests. The device has to hold any one of them, and a block more."""
        ...

    def schedule(self) -> Iteration:
        """The next iteration; without rows where everything waits for loads."""
        ...

    def loaded(self, request: StepRequest) -> None:
        """What a request waited for has arrived."""
        ...

    def commit(self, iteration: Iteration) -> list[StepRequest]:
        """The iteration has run; returns the requests that are complete."""
        ...


class PlannedStep(Protocol):
    """A step of a search that is known in advance."""

    @property
    def lineage(self) -> Lineage: ...
    @property
    def tokens(self) -> int: ...
    @property
    def score(self) -> float | None: ...


def requests_by_round(prompt_tokens: int, steps: Iterable[PlannedStep]) -> list[list[StepRequest]]:
    """The requests of each round of a search, siblings beside each other.

    search-and-learn sends them in another order; this one is what prefix caches like best.
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
