"""Sequential revision: a draft, a critique of it, a new answer; n such paths side by side.

The model is asked twice per revision through its chat template and sees all that it has said
(Self-Refine). Critiques are not scored. Of a path's answers the best-scored one stands, so a bad
revision loses nothing but its tokens; without scores the last one does.
"""

from __future__ import annotations

from beamwright.config import SearchSettings
from beamwright.protocols import Action, Ask, Complete, Extend, Finish
from beamwright.search.ranking import rank_key
from beamwright.tree import Node, SearchTree, StopReason, Turn

CRITIQUE = "Check your solution step by step. Say which steps are wrong, and why."
REVISION = (
    "Solve the problem again with this in mind. Write the whole solution, in the same form, "
    "up to the final answer."
)


class SequentialRevision:
    """n paths from the root; a reply that ends by itself is answered with the next turn."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        critique = Turn(settings.critique_prompt or CRITIQUE, answers=False)
        revision = Turn(settings.revision_prompt or REVISION, answers=True)
        self.turns = (critique, revision) * (settings.revisions or 1)

    def select(self, tree: SearchTree) -> list[Action]:
        """See `protocols.Strategy`."""
        if tree.rounds == 0:
            return [Extend(tree.root, self.settings.n)]
        actions = [self._next(node) for node in tree.candidates()]
        going = [action for action in actions if not isinstance(action, Complete)]
        if not going:
            return [*actions, Finish()]
        if tree.rounds >= self.settings.max_rounds:
            # A reply that has ended stands, though nobody asks about it any more.
            ended = [Complete(node) for node in tree.candidates() if node.ended]
            return [*ended, Finish(f"{len(going)} of {self.settings.n} paths reached --max-rounds")]
        return actions

    def _next(self, node: Node) -> Action:
        if not node.ended:
            return Extend(node, 1)
        num_asked = sum(each.turn is not None for each in node.path())
        if node.stop is StopReason.EOS and num_asked < len(self.turns):
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
    answers = [node for node in leaf.path() if node.stop is StopReason.EOS and node.answers]
    return min(reversed(answers), key=lambda node: rank_key(node)[0])
