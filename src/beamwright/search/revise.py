"""Sequential revision: a draft, a critique of it, a new answer; n such paths side by side.

The model is asked twice per revision through its chat template and sees all that it has said
(Self-Refine). Critiques are not scored. Of a path's answers the best-scored one stands, so a bad
revision loses nothing but its tokens; without scores the last one does.
"""

from __future__ import annotations

from random import Random

from beamwright.protocols import Action, Ask, Complete, Extend, Finish
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.best_of_n import IndependentPaths
from beamwright.search.rounds import rank_key
from beamwright.tree import Node, SearchTree, Turn

CRITIQUE = "Check your solution step by step. Say which steps are wrong, and why."
REVISION = (
    "Solve the problem again with this in mind. Write the whole solution, in the same form, "
    "up to the final answer."
)


@strategy(
    "revise",
    meaning="n paths, each a draft, its critique and a new answer, in turn",
    by_level=False,
    competes=False,
    votes_change="a path's answer may still change",
)
class SequentialRevision(IndependentPaths):
    """n paths from the root; a reply that ends by itself is answered with the next turn."""

    revisions: int = option(1, ge=1, le=64, help="Critiques and new answers per path.")
    critique_prompt: str = option(
        CRITIQUE, min_length=1, metavar="TEXT", help="What asks for a critique."
    )
    revision_prompt: str = option(
        REVISION, min_length=1, metavar="TEXT", help="What asks for a new answer."
    )

    @property
    def turns(self) -> tuple[Turn, ...]:
        critique = Turn(self.critique_prompt, answers=False)
        return (critique, Turn(self.revision_prompt, answers=True)) * self.revisions

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        if tree.rounds == 0:
            return [Extend(tree.root, self.search.n)]
        actions = [self._next(node) for node in tree.candidates()]
        going = [action for action in actions if not isinstance(action, Complete)]
        if not going:
            return [*actions, Finish()]
        if tree.rounds >= self.search.max_rounds:
            # A reply that has ended stands, though nobody asks about it any more.
            ended = [Complete(node) for node in tree.candidates() if node.ended]
            return [*ended, Finish(f"{len(going)} of {self.search.n} paths reached --max-rounds")]
        return actions

    def _next(self, node: Node) -> Action:
        if not node.ended:
            return Extend(node, 1)
        num_asked = sum(each.turn is not None for each in node.path())
        if node.complete and num_asked < len(self.turns):
            return Ask(node, self.turns[num_asked])
        return Complete(node)


def asked_again(leaf: Node) -> bool:
    """True if there is a turn on a leaf's path; then there is a complete answer, too."""
    return any(node.turn is not None for node in leaf.path())


def best_answer(leaf: Node) -> Node:
    """The best-scored complete answer on a leaf's path, the later of equals.

    The leaf itself, if it was not asked again.
    """
    if not asked_again(leaf):
        return leaf
    answers = [node for node in leaf.path() if node.complete and node.answers]
    return min(reversed(answers), key=lambda node: rank_key(node)[0])
