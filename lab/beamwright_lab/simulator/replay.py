"""Trees that are replayed: what every step of a search will be, known in advance.

Knows lineage, counts, stops, states and scores; `recorded` reads such trees, `synthetic` makes
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from beamwright.errors import InputError
from beamwright.protocols import (
    Action,
    Complete,
    Extend,
    Finish,
    Foresees,
    Prospect,
    Prune,
    traits_of,
)
from beamwright.search.prospects import by_scores, certain
from beamwright.tree import Node, NodeState, SearchTree
from beamwright_lab.simulator.recorded import RecordedNode, RecordedTree
from beamwright_lab.studies.clairvoyant import Life


def path_ends(tree: RecordedTree) -> dict[tuple[int, ...], int]:
    """Tokens of the path after each step, by lineage; () is the prompt."""
    ends: dict[tuple[int, ...], int] = {(): tree.prompt_tokens}
    for node in tree.nodes:
        ends[node.lineage] = ends[node.lineage[:-1]] + node.tokens
    return ends


Foresee = Callable[[Sequence[Node], Sequence[Node], int], list[Prospect]]


def foresee_by_scores(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """As strategies do that do not know better."""
    del ahead
    return by_scores(beams, width)


def foresee_certain(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """As best-of-n does, where every step has one child."""
    del width
    return certain([*beams, *ahead])


class Script:
    """What happens at every node of a replayed tree.

    width: the most children of a step. What a step would have been that nobody opened is drawn from
    those of its depth, by its lineage.
    """

    def __init__(self, tree: RecordedTree) -> None:
        self.problem_id, self.prompt_tokens = tree.problem_id, tree.prompt_tokens
        self._steps = {node.lineage: node for node in tree.nodes}
        self._children: dict[tuple[int, ...], int] = {}
        for node in tree.nodes:
            parent = node.lineage[:-1]
            self._children[parent] = self._children.get(parent, 0) + 1
        below = (count for parent, count in self._children.items() if parent)
        self.width = max(below, default=1)

    def step(self, node: Node) -> RecordedNode:
        """What an open node's step will be."""
        lineage: tuple[int, ...] = node.lineage[1:]  # type: ignore[assignment]
        return self._steps.get(lineage) or self._imagined(lineage)

    def _imagined(self, lineage: tuple[int, ...]) -> RecordedNode:
        alike = self._of_depth.get(len(lineage)) or list(self._steps.values())
        drawn = Random(repr(lineage)).choice(alike)
        return replace(drawn, lineage=lineage)

    @cached_property
    def _of_depth(self) -> dict[int, list[RecordedNode]]:
        found: dict[int, list[RecordedNode]] = {}
        for step in self._steps.values():
            found.setdefault(len(step.lineage), []).append(step)
        return found

    def num_children(self, node: Node) -> int:
        """How many children the node gets; none where the search ended with it."""
        lineage: tuple[int, ...] = node.lineage[1:]  # type: ignore[assignment]
        return self._children.get(lineage, 0)

    @property
    def num_beams(self) -> int:
        """Candidates that the search begins with."""
        return self._children.get((), 0)

    def search_tree(self) -> SearchTree:
        """A tree with only its prompt; token ids are all 0."""
        return SearchTree(self.problem_id, (0,) * self.prompt_tokens, "")

    def lives(self, block_tokens: int, state_blocks: int = 0) -> list[Life]:
        """When the KV and the state of every node is needed; a round is a level of the tree."""
        last: dict[tuple[int, ...], int] = {(): 0}
        for lineage in sorted(self._steps, key=len, reverse=True):
            last[lineage] = max(last.get(lineage, 0), len(lineage))
            above = lineage[:-1]
            last[above] = max(last.get(above, 0), last[lineage])
        prompt = -(-self.prompt_tokens // block_tokens)
        lives = [Life(0, last[()], prompt)]
        for lineage, step in self._steps.items():
            # The last token's KV could wait for an extension; an ended path's is not kept.
            kept = 0 if step.stop.ends_path else -(-(step.tokens - 1) // block_tokens)
            lives.append(Life(len(lineage), last[lineage], kept))
        if state_blocks:
            kept_by = [at for at, step in self._steps.items() if not step.stop.ends_path]
            for lineage in ((), *kept_by):  # children begin from it in the round behind its own
                born = len(lineage)
                lives.append(Life(born, min(last[lineage], born + 1), state_blocks, is_state=True))
        return lives

    def num_begun(self) -> Counter[int]:
        """Of each level, nodes that have children."""
        return Counter(map(len, self._children))

    def host_blocks(self, block_tokens: int, extra_tokens: int = 0, state_blocks: int = 0) -> int:
        """Blocks that hold every node, were none ever freed; steps longer by `extra_tokens`."""
        steps = (step.tokens + extra_tokens for step in self._steps.values())
        lengths = [self.prompt_tokens, *steps]
        return sum(-(-tokens // block_tokens) + state_blocks for tokens in lengths)


class Scripts:
    """The scripts of trees that are replayed together, by problem.

    Raises:
        InputError: if two of them are of one problem.
    """

    def __init__(self, trees: Sequence[RecordedTree]) -> None:
        self._of = {tree.problem_id: Script(tree) for tree in trees}
        if len(self._of) < len(trees):
            raise InputError("trees that are simulated together need problem ids of their own")

    def __iter__(self) -> Iterator[Script]:
        return iter(self._of.values())

    def step(self, node: Node) -> RecordedNode:
        """What an open node's step will be."""
        return self._of[node.problem_id].step(node)


@dataclass
class Foresight:
    """What a function says of the round under way: from its beams and `width`."""

    say: Foresee
    width: int
    foresees_by_score: bool = False

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """See `protocols.Foresees`."""
        del tree
        return self.say(beams, ahead, self.width)


class ReplayStrategy:
    """Does to every candidate what was done to it in the replayed tree.

    foresees: who says what it may extend, such as the strategy that grew the tree. None: by scores
    where steps compete, and where none has two children, that it goes on.
    """

    def __init__(self, script: Script, foresees: Foresees | None = None) -> None:
        usual = Foresight(foresee_by_scores, script.width, foresees_by_score=True)
        if script.width == 1:
            usual = Foresight(foresee_certain, 1)
        self._script, self._foresees = script, foresees or usual
        self.traits = traits_of(self._foresees)

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> Sequence[Prospect]:
        return self._foresees.prospects(tree, beams, ahead)

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        actions: list[Action] = []
        for node in tree.candidates() if tree.rounds else [tree.root]:
            children = self._script.num_children(node)
            if children:
                actions.append(Extend(node, children))
            elif tree.rounds:
                actions += _end(node, self._script.step(node).state)
        if not any(isinstance(action, Extend) for action in actions):
            actions.append(Finish())
        return actions


def _end(node: Node, state: NodeState) -> list[Action]:
    if state is NodeState.PRUNED:
        return [Prune(node)]
    if state is NodeState.FINISHED:
        return [Complete(node)]
    return []  # the search ended before this candidate's turn came


class ReplayVerifier:
    """Gives every step the score that it had. Holds no KV and takes no time."""

    default_aggregate = "last"
    probabilities = False

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [self._scripts.step(node).score for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None: ...
