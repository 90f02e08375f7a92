"""Verifiers without a second model: log-probability, entropy, DeepConf, and a user's functions.

The tree stores the log-probability of each sampled token under the distribution at temperature 1.
Other statistics of the distribution are computed and stored only if a scorer names them in
`token_stats` (`protocols.Traits`). DeepConf: Fu et al. 2025, "Deep Think with Confidence".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, get_args

from beamwright.errors import InputError, error_line
from beamwright.protocols import Traits, Verifier, traits_of
from beamwright.tree import Node, Sees

_ENTROPY, _CONFIDENCE = "entropy", "confidence"
_BOTTOM = 10  # `bottom_groups` uses one group in 10, those with the lowest confidence

# Function from the confidences of a path's tokens and the window, in tokens, to a score.
Measure = Callable[[Sequence[float], int], float]
# Function from the problem's text and the texts of a path's steps to the score of the last step;
# None for no score.
ScoreFunction = Callable[[str, list[str]], float | None]


class StepScorer:
    """Verifier that computes a step's score from the data on its node, without state of its own.

    measure: function from a node to its score.
    token_stats, sees: see `protocols.Traits`.
    """

    def __init__(
        self,
        measure: Callable[[Node], float | None],
        aggregate: str = "last",
        *,
        probabilities: bool = False,
        token_stats: Sequence[str] = (),
        sees: Sees = "both",
    ) -> None:
        self._measure, self.default_aggregate = measure, aggregate
        self.probabilities = probabilities
        self.traits = Traits(frozenset(token_stats), reads_drawn=True, sees=sees)

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """Return `measure(node)` for the node of each step."""
        return [self._measure(node) for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Do nothing, because the scorer stores nothing on the nodes."""


# --- DeepConf --------------------------------------------------------------------------------


def group_confidences(confidences: Sequence[float], window: int) -> list[float]:
    """Return the mean confidence of every `window` consecutive tokens.

    A path with fewer tokens is one group.
    """
    size = min(window, len(confidences))
    sums = list(accumulate(confidences, initial=0.0))
    return [(after - before) / size for before, after in zip(sums, sums[size:], strict=False)]


def lowest_group(confidences: Sequence[float], window: int) -> float:
    """Return DeepConf's lowest group confidence: the minimum over all groups of the path."""
    return min(group_confidences(confidences, window))


def bottom_groups(confidences: Sequence[float], window: int) -> float:
    """Return DeepConf's bottom-10% group confidence: the mean of the lowest tenth of the groups.

    At least one group is used.
    """
    groups = sorted(group_confidences(confidences, window))
    return _mean(groups[: max(1, len(groups) // _BOTTOM)])


def tail_confidence(confidences: Sequence[float], window: int) -> float:
    """Return DeepConf's tail confidence: the mean confidence of the last `window` tokens."""
    return _mean(confidences[-window:])


def deepconf(window: int = 128, measure: Measure = lowest_group) -> StepScorer:
    """Create a scorer with DeepConf's confidence of the path so far.

    The score of the last step is the score of the whole path. Scores are means of token confidences
    as published, which are at least log(20) and have no upper limit (`engine.sampling.confidence`).
    Scaling them to [0, 1] would change the weights of a vote.

    window: number of tokens of a group.
    measure: `lowest_group`, `bottom_groups` or `tail_confidence`.
    """

    def confidence(node: Node) -> float | None:
        if not node.token_ids:
            return None
        drawn = [value for step in node.reply() for value in step.stats.get(_CONFIDENCE, ())]
        return measure(drawn, window) if drawn else None

    return StepScorer(confidence, token_stats=[_CONFIDENCE])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _exp(of: Callable[[Sequence[float]], float], drawn: Sequence[float]) -> float | None:
    """Return exp(of(drawn)), a probability in (0, 1]; None for a step without tokens."""
    return math.exp(of(drawn)) if drawn else None


_probability = partial(StepScorer, probabilities=True)
_PLAIN: dict[str, Callable[[], StepScorer]] = {
    # No scores: selection then takes steps in the order of their lineages.
    "none": partial(StepScorer, lambda _: None, sees="answer"),
    # The geometric mean of the tokens' probabilities, and the smallest probability.
    "logprob": partial(_probability, lambda node: _exp(_mean, node.logprobs), "mean"),
    "min-logprob": partial(_probability, lambda node: _exp(min, node.logprobs), "min"),
    # exp(-mean entropy): 1 if the distribution had one possible token everywhere, and 1 / k if it
    # had k equally likely tokens everywhere.
    "entropy": partial(
        _probability,
        lambda node: _exp(lambda drawn: -_mean(drawn), node.stats.get(_ENTROPY, ())),
        "mean",
        token_stats=[_ENTROPY],
    ),
}
_MEASURES: dict[str, Measure] = {
    "deepconf": lowest_group,
    "deepconf-bottom": bottom_groups,
    "deepconf-tail": tail_confidence,
}
# Name before the colon in `probe:HEAD`: a head on the generator's hidden states (`verify.probe`).
PROBE = "probe"
WITHOUT_MODEL = (*_PLAIN, *_MEASURES, PROBE)


def make_scorer(name: str, option: str | None) -> Verifier:
    """Create the scorer `name`, one of `WITHOUT_MODEL` except `PROBE`.

    option: the text after `name` and a colon, such as the window of DeepConf; None without a colon.

    Raises:
        InputError: for an option that the scorer does not take, or that is not valid.
    """
    if name in _PLAIN:
        if option is not None:
            raise InputError(f"--verifier {name}: takes no option, but got {option!r}")
        return _PLAIN[name]()
    if option is None:
        return deepconf(measure=_MEASURES[name])
    if not option.isdecimal() or int(option) < 1:
        raise InputError(f"--verifier {name}:{option}: the window must be a positive number")
    return deepconf(int(option), _MEASURES[name])


# --- code of the user ------------------------------------------------------------------------


class CallableVerifier(StepScorer):
    """Verifier that scores a step by a user's `function(problem, steps)`.

    steps: the texts of the path's steps with their delimiters. Empty steps are left out and get no
        score.
    function: returns the score of the last step, or None for no score.
    aggregate: how a path's score follows from the scores of its steps, such as "min".
    """

    def __init__(self, function: ScoreFunction, aggregate: str = "last") -> None:
        super().__init__(self._score, aggregate)
        self.function, self.traits = function, _traits(function)
        self.name = getattr(function, "__name__", type(function).__name__)

    def _score(self, node: Node) -> float | None:
        """Return the score of one step.

        Raises:
            InputError: if the function raises, or returns neither a finite number nor None.
        """
        if not node.step_text.strip():
            return None
        seen = (step for step in node.reply() if step.is_seen_by(self.traits.sees))
        steps = [step.step_text for step in seen if step.step_text.strip()]
        where = f"verifier {self.name} on problem {node.problem_id}, step {node.depth}"
        try:
            value: Any = self.function(node.root.problem_text, steps)
        except Exception as error:  # a user's function may raise anything
            raise InputError(f"{where}: it raised {error_line(error)}") from error
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = type(value).__name__
            raise InputError(f"{where}: it returned {kind}, not a finite float") from error
        if not math.isfinite(number):
            raise InputError(f"{where}: it returned {number}, not a finite number")
        return number


class ObjectVerifier:
    """Verifier that calls a user's object, with defaults for properties that it does not declare.

    Defaults of its traits (`protocols.Traits`): `listwise`, so that each call contains all steps of
    a round, unless the object declares `beside_decoding`: calls on a thread of its own then contain
    the steps that are ready. `reads_drawn`, if the object requests statistics of tokens.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = str(getattr(function, "name", type(function).__name__))
        self.default_aggregate: str = getattr(function, "default_aggregate", "last")
        self.probabilities = bool(getattr(function, "probabilities", False))
        said = _traits(function)
        usual = {"reads_drawn": bool(said.token_stats), "listwise": not said.beside_decoding}
        self.traits = traits_of(function, **usual)

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """Return the scores that the user's object gives.

        Raises:
            InputError: if the object raises.
        """
        try:
            return list(self.function.score(nodes))
        except Exception as error:  # a user's object may raise anything
            raise InputError(f"verifier {self.name}: it raised {error_line(error)}") from error

    def release(self, nodes: Sequence[Node]) -> None:
        """Call the object's `release` if it has one."""
        release: Callable[[Sequence[Node]], None] | None = getattr(self.function, "release", None)
        if release is not None:
            release(nodes)


def _traits(function: Any) -> Traits:
    """Return the traits that a user's verifier declares.

    Raises:
        InputError: if `sees` has an unknown value.
    """
    traits = traits_of(function)
    if traits.sees not in get_args(Sees):
        parts = ", ".join(get_args(Sees))
        raise InputError(f"verifier: sees must be one of {parts}, not {traits.sees!r:.40}")
    return traits
