"""Sequential revision (Self-Refine): each of n paths is a draft, its critique and a new answer.

Each revision adds two user turns through the chat template: one asks for a critique, one for a new
answer. The model sees the whole conversation. Critiques are not scored. The best-scored answer of a
path counts, so a bad revision costs only its tokens. Without scores the last answer counts.
"""

from __future__ import annotations

from random import Random

from beamwright.protocols import Action, Ask, EndSearch, Extend, FinishPath
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
    meaning="n paths, each a draft, then critiques and new answers in turn",
    by_level=False,
    competes=False,
    votes_change="a path's answer may still change",
)
class SequentialRevision(IndependentPaths):
    """Sequential revision on n paths. The next turn follows when the model has ended its reply."""

    revisions: int = option(1, ge=1, le=64, help="Critiques and new answers per path.")
    critique_prompt: str = option(
        CRITIQUE, min_length=1, metavar="TEXT", help="User message that asks for a critique."
    )
    revision_prompt: str = option(
        REVISION, min_length=1, metavar="TEXT", help="User message that asks for a new answer."
    )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The user turns of one path: a critique and a new answer for each revision."""
        critique = Turn(self.critique_prompt, answers=False)
        return (critique, Turn(self.revision_prompt, answers=True)) * self.revisions

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        if tree.rounds == 0:
            return [Extend(tree.root, self.search.n)]
        actions = [self._next_action(node) for node in tree.candidates()]
        going = [action for action in actions if not isinstance(action, FinishPath)]
        if not going:
            return [*actions, EndSearch()]
        if tree.rounds >= self.search.max_rounds:
            # Ended replies become final candidates, although some turns have not been asked.
            ended = [FinishPath(node) for node in tree.candidates() if node.ended]
            return [
                *ended,
                EndSearch(f"{len(going)} of {self.search.n} paths reached --max-rounds"),
            ]
        return actions

    def _next_action(self, node: Node) -> Action:
        """Return the action that continues the path of `node`: extend, ask or finish."""
        if not node.ended:
            return Extend(node, 1)
        num_asked = sum(each.turn is not None for each in node.path())
        if node.complete and num_asked < len(self.turns):
            return Ask(node, self.turns[num_asked])
        return FinishPath(node)


def has_turn(leaf: Node) -> bool:
    """Return True if the path of `leaf` has a user turn, and so an answer before that turn."""
    return any(node.turn is not None and not node.turn.alone for node in leaf.path())


def best_answer_node(leaf: Node) -> Node:
    """Return the node with the best-scored complete answer on the path of `leaf`.

    Among equal scores the later answer wins. Without a turn on the path, return `leaf` itself.
    """
    if not has_turn(leaf):
        return leaf
    answers = [node for node in leaf.context() if node.complete and node.answers]
    return min(reversed(answers), key=lambda node: rank_key(node)[0])
