"""search-and-learn's beam search: text in, text out, every path encoded again every round.

Each round replicates the survivors round-robin to n, decodes a step of each and scores all n by
encoding their whole paths. It sets finished paths aside and keeps the best n / width of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamwright.search.answers import extract_answer
from beamwright.search.choose import choose
from beamwright_lab.peers.adapters.transformers_loops import Step

WriteSteps = Callable[[Sequence[str]], list[Step]]
Score = Callable[[str, Sequence[str]], list[float]]


@dataclass(frozen=True)
class Beam:
    """One path.

    text: its text after the prompt.
    stop: stop reason of its last step, see `Step`.
    rounds: number of steps.
    """

    text: str = ""
    stop: str = "delimiter"
    score: float = 0.0
    num_tokens: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Outcome:
    """Result of one problem.

    num_tokens: tokens decoded.
    candidates: final paths, best first.
    num_scored: paths scored by the PRM, summed over rounds.
    """

    answer: str | None
    rounds: int
    num_tokens: int
    candidates: tuple[Beam, ...]
    num_scored: int


def beam_search(
    problem: str,
    prompt: str,
    write: WriteSteps,
    score: Score,
    n: int,
    width: int,
    max_rounds: int,
    keep_n: bool,
) -> Outcome:
    """Search one problem.

    keep_n: True: extend only n minus the finished paths, Beamwright's rule, for an equal amount of
        work. False: refill to n until all have ended, as search-and-learn does.
    """
    beams = [Beam()] * n
    finished: list[Beam] = []
    rounds = num_tokens = num_scored = 0
    while beams and rounds < max_rounds:
        rounds += 1
        slots = n - len(finished) if keep_n else n
        if slots <= 0:
            break
        beams = [beams[i % len(beams)] for i in range(slots)]
        steps = write([prompt + beam.text for beam in beams])
        texts = [beam.text + step.text for beam, step in zip(beams, steps, strict=True)]
        scores = score(problem, texts)
        num_tokens += sum(step.num_tokens for step in steps)
        num_scored += len(texts)
        grown = [
            Beam(text, step.stop, value, beam.num_tokens + step.num_tokens, rounds)
            for beam, text, step, value in zip(beams, texts, steps, scores, strict=True)
        ]
        # As in search-and-learn, a step at its length limit ends the path too.
        finished += [beam for beam in grown if beam.stop != "delimiter"]
        going = [beam for beam in grown if beam.stop == "delimiter"]
        going.sort(key=lambda beam: -beam.score)
        beams = going[: max(1, n // width)]
    final = finished or beams
    final = sorted(final, key=lambda beam: -beam.score)[:n]
    answers = [extract_answer(beam.text) for beam in final]
    complete = [beam.stop == "eos" for beam in final]
    chosen = choose(answers, [beam.score for beam in final], complete, "best")
    return Outcome(answers[chosen], rounds, num_tokens, tuple(final), num_scored)
