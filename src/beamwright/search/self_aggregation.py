"""Recursive self-aggregation (RSA, arXiv 2509.26626): answers are written again from other answers.

Generation 1 holds n independent answers. For each answer of the next generation the model reads the
problem and `aggregate_size` answers of the last one, without their thoughts, and writes a better
answer. Each of these prompts stands alone, so the model reads nothing else. No verifier is needed;
the final answer is a vote of the last whole generation.

With `guide`, the verifier's scores decide what lasts (PRISM, arXiv 2603.02479). One answer of each
prompt is drawn by its score, and a new answer may be rejected: the best answer that it was written
from then keeps its place. The final vote is weighted by the scores. PRISM itself has
`aggregate_size` 1; the comments that its verifier writes are not shown to the model here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

from beamwright.protocols import Action, Ask, EndSearch, Extend, FinishPath, Prune
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.best_of_n import IndependentPaths
from beamwright.search.rounds import (
    effective_sample_size,
    score_weights,
    sort_by_rank,
    systematic_resample,
)
from beamwright.search.synthesis import (
    WRITE_BETTER,
    check_prompt,
    lineages_of,
    solutions_prompt,
)
from beamwright.tree import Node, SearchTree, Turn

# Constants of PRISM's published code: an answer weighs score ** (1 / temperature), and answers are
# resampled if their effective sample size is below this share of their number.
_TEMPERATURE, _LEAST_SHARE = 0.7, 0.5


def last_generation(finished: Sequence[Node], n: int) -> list[Node]:
    """Return the newest generation with n answers; if none is whole, all answers."""
    generations: dict[int, list[Node]] = {}
    for node in finished:
        generations.setdefault(_generation(node), []).append(node)
    whole = [number for number, nodes in generations.items() if len(nodes) >= n]
    return generations[max(whole)] if whole else [*finished]


def _generation(node: Node) -> int:
    """Return the round in which a reply began."""
    return node.reply()[0].round


@strategy(
    "aggregate",
    meaning="n answers, written again from each other for a few generations, then a vote",
    choose="majority",
    by_level=False,
    fills=False,
    votes_change="a later generation writes the answers again",
    finals=last_generation,
    guided={"choose": "weighted", "needs_scores": True},
)
class Aggregate(IndependentPaths):
    """Recursive self-aggregation of n answers over `aggregate_rounds` further generations."""

    aggregate_size: int = option(
        4, ge=1, le=64, help="Answers of the last generation that a new answer is written from."
    )
    aggregate_rounds: int = option(
        2, ge=1, le=64, help="Generations of answers after the first one."
    )
    aggregate_prompt: str = option(
        WRITE_BETTER,
        metavar="TEXT",
        help="Prompt for a new answer, with {problem} and {solutions}.",
    )
    guide: bool = option(
        False, "Draw answers by their scores, and reject new answers with lower scores (PRISM)."
    )

    def model_post_init(self, context: Any) -> None:
        check_prompt("--aggregate-prompt", self.aggregate_prompt)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """An example of the prompts, so that they are checked before the search begins."""
        return (Turn(self.aggregate_prompt, answers=True, alone=True),)

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        if tree.rounds == 0:
            return [Extend(tree.root, self.search.n)]
        candidates = tree.candidates()
        most = self.search.max_rounds
        going = [n for n in candidates if not n.ended and len(n.reply()) < most]
        if going:
            ended = [FinishPath(node) for node in candidates if node not in going]
            return [*ended, *(Extend(node, 1) for node in going)]
        answers = sorted([*tree.finished(), *candidates], key=lambda node: node.lineage[1:])
        began = sorted({child.round for child in tree.root.children})  # of each generation
        newest = [node for node in answers if _generation(node) == began[-1]]
        population = self._judge(tree, newest, rng) if self.guide else newest
        lost = {*answers} - {*population} if self.guide else set[Node]()
        actions: list[Action] = [FinishPath(node) for node in candidates if node not in lost]
        actions += [Prune(node) for node in answers if node in lost]
        if len(began) > self.aggregate_rounds:
            return [*actions, EndSearch()]
        drawn = order_alike(self._draw(population, rng))
        prompts = (self._prompt([population[place] for place in each]) for each in drawn)
        return [*actions, *(Ask(tree.root, prompt) for prompt in prompts)]

    def _draw(self, population: Sequence[Node], rng: Random) -> list[list[int]]:
        """Draw the answers of n prompts at random, and return their places in `population`.

        With `guide`, the first answer of each prompt is drawn by its score, as PRISM resamples: if
        there are fewer than n answers, or a few of them have most of the weight.
        """
        n, places = self.search.n, range(len(population))
        size = min(self.aggregate_size, len(population))
        if not self.guide:
            return [rng.sample(places, size) for _ in range(n)]
        weights, shares = _weights(population), [1] * n
        even = effective_sample_size(weights) >= _LEAST_SHARE * len(weights)
        if len(population) != n or not even:
            shares = systematic_resample(weights, n, rng.random())
        return [
            [place, *rng.sample([other for other in places if other != place], size - 1)]
            for place in places
            for _ in range(shares[place])
        ]

    def _judge(self, tree: SearchTree, newest: Sequence[Node], rng: Random) -> list[Node]:
        """Return the answers that last: the accepted new ones, and others instead of rejected ones.

        A new answer competes with the best of the answers that it was written from.
        """
        lasting: dict[Node, None] = {}
        for node in newest:
            turn = node.replies_to.turn
            sources = () if turn is None else turn.sources
            known = [tree.node((tree.root.problem_id, *source)) for source in sources]
            best = sort_by_rank(known)[0] if known else node
            weight, least = _weights([node, best])
            lasting[node if rng.random() * least <= weight else best] = None
        return sorted(lasting, key=lambda node: node.lineage[1:])

    def _prompt(self, answers: Sequence[Node]) -> Turn:
        """Return a prompt that contains these answers in this order."""
        problem = answers[0].root.problem_text
        text = solutions_prompt(self.aggregate_prompt, problem, answers)
        return Turn(text, answers=True, alone=True, sources=lineages_of(answers))


def order_alike(draws: Sequence[Sequence[int]]) -> list[list[int]]:
    """Order the items of each draw so that many draws begin alike, and their prompts share KV.

    The most frequent item comes first; the draws with it are then ordered in the same way.
    """
    ordered: list[list[int]] = [[] for _ in draws]
    groups = [[*range(len(draws))]]  # each: draws that are equal so far
    while groups:
        group = [i for i in groups.pop() if len(ordered[i]) < len(draws[i])]
        counts = Counter(item for i in group for item in {*draws[i]} - {*ordered[i]})
        if counts:
            next_item = min(counts, key=lambda item: (-counts[item], item))
            having = [i for i in group if next_item in draws[i]]
            for i in having:
                ordered[i].append(next_item)
            groups += [[i for i in group if i not in having], having]
    return ordered


def expected_prefills(n: int, size: int) -> float:
    """Return how many answers the model prefills for a generation on average; shared ones once."""
    rngs, places = map(Random, range(64)), range(n)
    drawn = (order_alike([rng.sample(places, size) for _ in places]) for rng in rngs)
    return fmean(len({tuple(d[: i + 1]) for d in each for i in range(size)}) for each in drawn)


def _weights(answers: Sequence[Node]) -> list[float]:
    """Return PRISM's weights of answers, each score ** (1 / temperature)."""
    weights = score_weights([node.score for node in answers], "linear", 1.0)
    return [weight ** (1 / _TEMPERATURE) for weight in weights]
