"""A tree that grows in one process, seen in another: what has changed of it, and its mirror.

Steps cross by what they are: no KV, and no links, whose pickle would be as deep as the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.engine.row import OWNER, GeneratorState
from beamwright.protocols import RoundReport
from beamwright.tree import Node, NodeState, SearchTree, StopReason, TopTokens, Turn

Ordinals = tuple[str | int, ...]
"""A lineage without the problem's id."""


@dataclass(frozen=True)
class Place:
    """What a mirrored step says of its KV: where it is."""

    place: str


@dataclass(frozen=True)
class MirroredStep:
    """What a step is, from when it was opened or decoded on.

    kept, more: its text: so many characters of its parent's, and what follows.
    """

    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stats: Mapping[str, tuple[float, ...]]
    top: tuple[TopTokens, ...]
    kept: int
    more: str
    problem_text: str
    greedy: bool
    round: int
    turn: Turn | None


@dataclass(frozen=True)
class StepDelta:
    """A step that has changed. written: None where only its verdict has."""

    ordinals: Ordinals
    state: NodeState
    stop: StopReason | None
    step_score: float | None
    score: float | None
    place: str | None
    usage: Mapping[str, int]
    notes: Mapping[str, str]
    written: MirroredStep | None


@dataclass(frozen=True)
class TreeNews:
    """Steps of a tree that have changed, parents first. fresh: nothing of it was told before."""

    fresh: bool
    problem_id: str | int
    rounds: int
    done: bool
    reason_fewer: str | None
    steps: tuple[StepDelta, ...]


@dataclass(frozen=True)
class RoundNews:
    """A `RoundReport` that crosses processes."""

    tree: TreeNews
    round: int
    candidates: tuple[Ordinals, ...]
    survivors: tuple[Ordinals, ...]
    pruned: tuple[Ordinals, ...]
    finished: tuple[Ordinals, ...]
    elapsed_s: float


class Changes:
    """What of a search's tree has changed since it was last told, in the thread that grows it.

    A search that did not fit beside others has another tree when it begins again.
    """

    def __init__(self) -> None:
        self._tree: SearchTree | None = None
        self._known: dict[Node, tuple[Any, ...]] = {}

    def of_round(self, report: RoundReport) -> RoundNews:
        """Its round, too. Looks past pruned branches that are known."""
        return RoundNews(
            self._of(report.tree, whole=False),
            report.round,
            _ordinals(report.candidates),
            _ordinals(report.survivors),
            _ordinals(report.pruned),
            _ordinals(report.finished),
            report.elapsed_s,
        )

    def of_end(self, tree: SearchTree) -> TreeNews:
        """All that is not known of a tree that grows no more."""
        return self._of(tree, whole=True)

    def _of(self, tree: SearchTree, *, whole: bool) -> TreeNews:
        fresh, self._tree = tree is not self._tree, tree
        found: list[StepDelta] = []
        stack = [tree.root]
        while stack:
            node = stack.pop()
            changed = self._change(node)
            if changed is not None:
                found.append(changed)
            if whole or node.state is not NodeState.PRUNED or changed is not None:
                stack.extend(reversed(node.children))
        root = tree.root
        return TreeNews(
            fresh, root.problem_id, tree.rounds, tree.done, tree.reason_fewer, tuple(found)
        )

    def _change(self, node: Node) -> StepDelta | None:
        place = _place(node)
        now = (
            len(node.token_ids), node.stop, node.state, node.score, node.step_score, place,
            frozenset(node.usage.items()), len(node.notes),
        )  # fmt: skip
        before = self._known.get(node)
        if now == before:
            return None
        self._known[node] = now
        return StepDelta(
            node.lineage[1:],
            node.state,
            node.stop,
            node.step_score,
            node.score,
            place,
            dict(node.usage),
            dict(node.notes),
            _written(node) if before is None or before[:2] != now[:2] else None,
        )


def _written(node: Node) -> MirroredStep:
    before = node.parent.text if node.parent is not None else ""
    kept = len(before) if node.text.startswith(before) else 0
    return MirroredStep(
        node.start, node.token_ids, node.logprobs, dict(node.stats), node.top, kept,
        node.text[kept:], node.problem_text, node.greedy, node.round, node.turn,
    )  # fmt: skip


def _place(node: Node) -> str | None:
    state: GeneratorState | None = node.handles.get(OWNER)
    return None if state is None else state.place


def _ordinals(nodes: Sequence[Node]) -> tuple[Ordinals, ...]:
    return tuple(node.lineage[1:] for node in nodes)


class Mirror:
    """The same tree in another process.

    A search that begins again, elsewhere, has the same nodes again: whoever knows them by what they
    are hears nothing twice.
    """

    def __init__(self) -> None:
        self._tree: SearchTree | None = None
        self._nodes: dict[Ordinals, Node] = {}
        self._before: dict[Ordinals, Node] = {}

    @property
    def tree(self) -> SearchTree:
        """The tree as it was last told of."""
        assert self._tree is not None
        return self._tree

    def hear(self, news: TreeNews) -> None:
        """Steps have changed."""
        if news.fresh and self._tree is not None:
            self._before |= self._nodes
            self._nodes = {}
            self._tree.cut()
        for step in news.steps:
            self._hear(news.problem_id, step)
        tree = self.tree
        tree.rounds, tree.done, tree.reason_fewer = news.rounds, news.done, news.reason_fewer

    def report(self, news: RoundNews) -> RoundReport:
        """The round, of this tree; its steps have been heard."""
        return RoundReport(
            self.tree,
            news.round,
            self._found(news.candidates),
            self._found(news.survivors),
            self._found(news.pruned),
            self._found(news.finished),
            news.elapsed_s,
        )

    def _found(self, ordinals: Sequence[Ordinals]) -> tuple[Node, ...]:
        return tuple(self._nodes[each] for each in ordinals)

    def _hear(self, problem_id: str | int, step: StepDelta) -> None:
        node = self._nodes.get(step.ordinals)
        if node is None:
            node = self._born(problem_id, step)
        if step.written is not None:
            _write(node, step.written)
        node.state, node.stop = step.state, step.stop
        node.step_score, node.score = step.step_score, step.score
        node.usage, node.notes = Counter(step.usage), dict(step.notes)
        node.handles = {} if step.place is None else {OWNER: Place(step.place)}

    def _born(self, problem_id: str | int, step: StepDelta) -> Node:
        assert step.written is not None
        ordinals = step.ordinals
        if not ordinals:
            if self._tree is None:
                ids, text = step.written.token_ids, step.written.problem_text
                self._tree = SearchTree(problem_id, ids, text)
            node = self._tree.root
        else:
            parent = self._nodes[ordinals[:-1]]
            lineage = (*parent.lineage, ordinals[-1])
            before = self._before.pop(ordinals, None)
            node = Node(lineage, parent, step.written.start) if before is None else before
            node.children.clear()
            self.tree.attach(node)
        self._nodes[ordinals] = node
        return node


def _write(node: Node, written: MirroredStep) -> None:
    node.start, node.token_ids, node.logprobs = written.start, written.token_ids, written.logprobs
    node.stats, node.top = dict(written.stats), written.top
    before = node.parent.text if node.parent is not None else ""
    node.text = before[: written.kept] + written.more
    node.problem_text, node.greedy = written.problem_text, written.greedy
    node.round, node.turn = written.round, written.turn
