"""Replay a search tree whose steps are known in advance: script, strategy and verifier.

`recorded` reads such trees, `synthetic` generates them.
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
    Ask,
    EndSearch,
    Extend,
    FinishPath,
    Foresees,
    Prospect,
    Prune,
    traits_of,
)
from beamwright.search.prospects import predict_by_scores, predict_certain
from beamwright.tree import Node, NodeState, SearchTree, Turn
from beamwright_lab.simulator.recorded import RecordedNode, RecordedTree
from beamwright_lab.studies.clairvoyant import Life


def path_ends(tree: RecordedTree) -> dict[tuple[int, ...], int]:
    """Return the length of every path in tokens, by lineage; () is the prompt."""
    ends: dict[tuple[int, ...], int] = {(): tree.prompt_tokens}
    for node in tree.nodes:
        ends[node.lineage] = ends[node.lineage[:-1]] + node.tokens
    return ends


Foresee = Callable[[Sequence[Node], Sequence[Node], int], list[Prospect]]


def foresee_by_scores(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """Expect the best-scored beams to be extended, the default of strategies."""
    del ahead
    return predict_by_scores(beams, width)


def foresee_certain(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """Expect every beam to get one child, as in best-of-n."""
    del width
    return predict_certain([*beams, *ahead])


class Script:
    """The known steps of a replayed tree.

    A speculative step that the recorded search never opened is a random one of the same depth,
    chosen by its lineage.

    width: most children of a step.
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
        """Return the step that an open node will get."""
        lineage: tuple[int, ...] = node.lineage[1:]  # type: ignore[assignment]
        return self._steps.get(lineage) or self._random_step(lineage)

    def _random_step(self, lineage: tuple[int, ...]) -> RecordedNode:
        alike = self._steps_by_depth.get(len(lineage)) or list(self._steps.values())
        drawn = Random(repr(lineage)).choice(alike)
        return replace(drawn, lineage=lineage)

    @cached_property
    def _steps_by_depth(self) -> dict[int, list[RecordedNode]]:
        found: dict[int, list[RecordedNode]] = {}
        for step in self._steps.values():
            found.setdefault(len(step.lineage), []).append(step)
        return found

    def num_steps_below(self, node: Node) -> int:
        """Return the number of steps that continue a node's reply."""
        lineage: tuple[int, ...] = node.lineage[1:]  # type: ignore[assignment]
        return sum(not self._steps[at].turn for at in self._below(lineage))

    @property
    def num_beams(self) -> int:
        """Beams of the first round."""
        return sum(not step.turn for at, step in self._steps.items() if len(at) == 1)

    def search_tree(self) -> SearchTree:
        """Create a tree with only the prompt. All token ids are 0."""
        return SearchTree(self.problem_id, (0,) * self.prompt_tokens, "")

    def lives(self, block_tokens: int, state_blocks: int = 0) -> list[Life]:
        """Return the rounds in which each node's KV, and recurrent state, is needed.

        state_blocks: blocks of one state; 0: the model has no recurrent layers.
        """
        last: dict[tuple[int, ...], int] = {(): 0}
        for lineage in sorted(self._steps, key=len, reverse=True):
            step, above = self._steps[lineage], lineage[:-1]
            last[lineage] = max(last.get(lineage, 0), step.round)
            if above or step.turn != "alone":
                last[above] = max(last.get(above, 0), last[lineage])
        prompt = -(-self.prompt_tokens // block_tokens)
        lives = [Life(0, last[()], prompt)]
        for lineage, step in self._steps.items():
            # A step's last token has no KV before an extension; ended paths keep none.
            kept = 0 if step.ends_path else -(-(step.tokens - (not step.turn)) // block_tokens)
            lives.append(Life(step.round, last[lineage], kept))
        if state_blocks:
            kept_by = [at for at, step in self._steps.items() if not step.ends_path]
            for lineage in ((), *kept_by):  # children start from it in the next round
                born = self._steps[lineage].round if lineage else 0
                lives.append(Life(born, min(last[lineage], born + 1), state_blocks, is_state=True))
        return lives

    def num_parents(self) -> Counter[int]:
        """Return the number of nodes with children, per round that opened these nodes."""
        return Counter(self._steps[at].round if at else 0 for at in self._children)

    def questions(self, parent: Node, round_number: int) -> Iterator[Ask]:
        """Yield the turns that the recorded search added in a round below a node.

        A prompt of its own is asked once for each reply, in the order of the lineages.
        """
        alone, above = parent.parent is None, parent.lineage[1:]
        for lineage, step in self._steps.items():
            follows = step.turn == "follows" and lineage[:-1] == above
            if step.round == round_number and (step.turn == "alone" if alone else follows):
                turn = Turn(".".join(map(str, lineage)), answers=True, alone=alone)
                replies = [at for at in self._below(lineage) if not self._steps[at].turn]
                yield from [Ask(parent, turn)] * (len(replies) if alone else 1)

    def render_turn(self, node: Node, turn: Turn) -> tuple[int, ...]:
        """Return the token ids of a turn: those of different recorded turns differ."""
        lineage = tuple(map(int, turn.text.split(".")))
        first = 1 if turn.alone else len(lineage)
        ids = (lineage[:depth] for depth in range(first, len(lineage) + 1))
        numbers = {at: number for number, at in enumerate(self._steps, start=1)}
        return tuple(numbers[at] for at in ids for _ in range(self._steps[at].tokens))

    def _below(self, lineage: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the lineages of the children of a node."""
        return [(*lineage, place) for place in range(self._children.get(lineage, 0))]

    def host_blocks(self, block_tokens: int, extra_tokens: int = 0, state_blocks: int = 0) -> int:
        """Return the blocks that hold the whole tree, with `extra_tokens` more in every step."""
        steps = (step.tokens + extra_tokens for step in self._steps.values())
        lengths = [self.prompt_tokens, *steps]
        return sum(-(-tokens // block_tokens) + state_blocks for tokens in lengths)


class Scripts:
    """Scripts of trees that are replayed together, by problem id.

    Raises:
        InputError: if two trees have one problem id.
    """

    def __init__(self, trees: Sequence[RecordedTree]) -> None:
        self._by_problem = {tree.problem_id: Script(tree) for tree in trees}
        if len(self._by_problem) < len(trees):
            raise InputError("trees simulated together need different problem ids")

    def __iter__(self) -> Iterator[Script]:
        return iter(self._by_problem.values())

    def step(self, node: Node) -> RecordedNode:
        return self._by_problem[node.problem_id].step(node)


@dataclass
class Foresight:
    """A function as `Foresees`: it predicts what selection will extend.

    foresee: called with the beams, their speculative descendants, and `width`.
    """

    foresee: Foresee
    width: int
    foresees_by_score: bool = False

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """See `protocols.Foresees`."""
        del tree
        return self.foresee(beams, ahead, self.width)


class ReplayStrategy:
    """A strategy that repeats the selections of the replayed tree.

    foresees: predicts which steps selection will extend, such as the strategy that grew the tree.
        None: by scores, or, if no step has two children, every beam is extended.
    """

    def __init__(self, script: Script, foresees: Foresees | None = None) -> None:
        default = Foresight(foresee_by_scores, script.width, foresees_by_score=True)
        if script.width == 1:
            default = Foresight(foresee_certain, 1)
        self._script, self._foresees = script, foresees or default
        self.traits = traits_of(self._foresees)

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> Sequence[Prospect]:
        return self._foresees.prospects(tree, beams, ahead)

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        actions: list[Action] = []
        for node in tree.candidates() if tree.rounds else [tree.root]:
            children = self._script.num_steps_below(node)
            asked = [*self._script.questions(node, tree.rounds + 1)] if node.parent else []
            if children:
                actions.append(Extend(node, children))
            elif asked:
                actions += asked
            elif tree.rounds:
                actions += _final_actions(node, self._script.step(node).state)
        if tree.rounds:
            actions += self._script.questions(tree.root, tree.rounds + 1)
        if not any(isinstance(action, Extend | Ask) for action in actions):
            actions.append(EndSearch())
        return actions


def _final_actions(node: Node, state: NodeState) -> list[Action]:
    if state is NodeState.PRUNED:
        return [Prune(node)]
    if state is NodeState.FINISHED:
        return [FinishPath(node)]
    return []  # the search ended before selecting this candidate


class ReplayVerifier:
    """A verifier that returns recorded scores, without KV and in no time."""

    default_aggregate = "last"
    probabilities = False

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [self._scripts.step(node).score for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None: ...
