"""Recursive self-aggregation (RSA, arXiv 2509.26626): answers are written again from other answers.

Generation 1 holds n independent answers. For each answer of the next generation the model reads the
problem and `aggregate_size` answers of the last one, without their thoughts, and writes a better
answer. Each of these prompts stands alone, so the model reads nothing else. No verifier is needed;
the final answer is a vote of the last whole generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from beamwright.protocols import Action, Ask, EndSearch, Extend, FinishPath
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.best_of_n import IndependentPaths
from beamwright.search.synthesis import WRITE_BETTER, check_prompt, solutions_prompt
from beamwright.tree import Node, SearchTree, Turn


def last_generation(finished: Sequence[Node], n: int) -> list[Node]:
    """Return the newest generation with n answers; the first one if none is whole."""
    generations: dict[int, list[Node]] = {}
    for node in finished:
        generations.setdefault(_generation(node), []).append(node)
    whole = [number for number, nodes in generations.items() if len(nodes) >= n]
    return generations[max(whole, default=min(generations))] if generations else []


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
        actions: list[Action] = [FinishPath(node) for node in candidates if node not in going]
        if going:
            return [*actions, *(Extend(node, 1) for node in going)]
        ended = [*tree.finished(), *candidates]
        newest = max(map(_generation, ended))
        population = [node for node in ended if _generation(node) == newest]
        if len({_generation(node) for node in ended}) > self.aggregate_rounds:
            return [*actions, EndSearch()]
        return [
            *actions,
            *(Ask(tree.root, self._prompt(population, rng)) for _ in range(self.search.n)),
        ]

    def _prompt(self, population: Sequence[Node], rng: Random) -> Turn:
        """Return a prompt with randomly drawn answers.

        The answers keep their order in the tree, so that many prompts begin alike and share KV.
        """
        drawn = rng.sample(range(len(population)), min(self.aggregate_size, len(population)))
        solutions = [population[place] for place in sorted(drawn)]
        problem = population[0].root.problem_text
        text = solutions_prompt(self.aggregate_prompt, problem, solutions)
        return Turn(text, answers=True, alone=True)
