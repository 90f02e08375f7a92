"""`--choose synthesis`: after any search, the model reads the candidates and writes the answer.

The candidates stand in one prompt of its own, without their thoughts. The single reply to it is the
search's answer, so open questions, on which no vote is possible, have an answer too. If the reply
is cut off, or a stop rule ends the search before it, the candidates vote instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from beamwright.errors import InputError
from beamwright.protocols import (
    Action,
    Ask,
    EndSearch,
    Extend,
    FinishPath,
    Foresees,
    Prospect,
    Strategy,
    Traits,
    traits_of,
)
from beamwright.search import strategy_entry
from beamwright.search.prospects import predict_certain
from beamwright.search.revise import best_answer_node
from beamwright.search.rounds import sort_by_rank
from beamwright.sections import SearchSettings
from beamwright.tree import Node, SearchTree, Turn

WRITE_BETTER = """\
{problem}

Here are candidate solutions to this problem. Some may contain mistakes.

{solutions}

Write one improved solution to the problem. Keep what is right, correct what is wrong, and where \
the solutions disagree, work out which one is right. Give the final answer in the same form."""


def is_synthesis(node: Node) -> bool:
    """Return True if the node belongs to the reply that is the search's answer."""
    turn = node.replies_to.turn
    return turn is not None and turn.final


def solutions_prompt(template: str, problem: str, solutions: Iterable[Node]) -> str:
    """Return a prompt that contains a problem and the answers of ended replies.

    template: a text with the places {problem} and {solutions}.
    """
    texts = (f"Solution {i}:\n{node.said.strip()}" for i, node in enumerate(solutions, start=1))
    return template.replace("{problem}", problem).replace("{solutions}", "\n\n".join(texts))


def lineages_of(nodes: Iterable[Node]) -> tuple[tuple[int, ...], ...]:
    """Return the nodes' lineages without the problem id, as `Turn.sources` holds them."""
    return tuple(tuple(map(int, node.lineage[1:])) for node in nodes)


def check_prompt(option: str, template: str) -> None:
    """Check that a prompt shows the solutions.

    Raises:
        InputError: if {solutions} is missing.
    """
    if "{solutions}" not in template:
        raise InputError(f"{option} has no {{solutions}}, so the model would read no candidate")


@dataclass(frozen=True)
class Synthesis(Strategy):
    """A strategy, followed by one reply that is written from its candidates."""

    strategy: Strategy
    search: SearchSettings

    def __post_init__(self) -> None:
        check_prompt("--synthesis-prompt", self._template)

    @property
    def traits(self) -> Traits:
        """The traits of the strategy."""
        return traits_of(self.strategy)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the strategy and an example of the last prompt, to check before decoding."""
        return (*getattr(self.strategy, "turns", ()), self._turn(""))

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        writing = [node for node in tree.candidates() if is_synthesis(node)]
        if writing:
            (node,) = writing
            if node.ended or len(node.reply()) >= self.search.max_rounds:
                missing = self.search.n - len(tree.finished())
                reason = f"{missing} of {self.search.n} paths did not end" if missing > 0 else None
                return [FinishPath(node), EndSearch(reason)]
            return [Extend(node, 1)]
        actions = self.strategy.select(tree, rng)
        ended = [action.node for action in actions if isinstance(action, FinishPath)]
        finals, solutions = strategy_entry(self.search).finals, [*tree.finished(), *ended]
        solutions = solutions if finals is None else finals(solutions, self.search.n)
        finish = next((action for action in actions if isinstance(action, EndSearch)), None)
        if finish is None or not solutions:
            return actions
        best = sort_by_rank(map(best_answer_node, solutions))[: self.search.synthesis_size]
        chosen = sorted(best, key=lambda node: node.lineage[1:])
        problem = tree.root.problem_text
        turn = self._turn(solutions_prompt(self._template, problem, chosen), chosen)
        return [*(action for action in actions if action is not finish), Ask(tree.root, turn)]

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> Sequence[Prospect]:
        nodes = [*beams, *ahead]
        if any(map(is_synthesis, nodes)):
            return predict_certain(nodes, self.search.max_rounds)
        inner: Any = self.strategy
        return inner.prospects(tree, beams, ahead) if isinstance(inner, Foresees) else ()

    @property
    def _template(self) -> str:
        return self.search.synthesis_prompt or WRITE_BETTER

    def _turn(self, text: str, chosen: Sequence[Node] = ()) -> Turn:
        text = text or self._template
        return Turn(text, answers=True, alone=True, final=True, sources=lineages_of(chosen))
