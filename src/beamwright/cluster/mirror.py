"""Mirror a tree that grows in another process: what has changed of it, and the copy.

Steps cross by what they are: no KV, and no links, whose pickle would be as deep as the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from beamwright.protocols import RoundReport
from beamwright.tree import Node, SearchTree

Ordinals = tuple[str | int, ...]
"""A lineage without the problem's id."""

_LINKS = ("lineage", "parent", "root", "_follows", "children", "handles", "speculative")
_FACTS = tuple(each.name for each in fields(Node) if each.name not in _LINKS)
_OF_TREE = ("rounds", "done", "reason_fewer")
_REPORTED = ("candidates", "survivors", "pruned", "finished")


@dataclass(frozen=True)
class StepDelta:
    """The change of one step.

    attributes: of its `Node`, those that are others now, but for its text: so many characters of
    its parent's, and what follows.
    """

    ordinals: Ordinals
    attributes: Mapping[str, Any]
    text: tuple[int, str] | None


@dataclass(frozen=True)
class TreeNews:
    """Steps of a tree that have changed, parents first. fresh: nothing of it was told before.

    report: facts of its `RoundReport`, with ordinals in the place of nodes; none at its end.
    """

    fresh: bool
    problem_id: str | int
    attributes: Mapping[str, Any]
    steps: tuple[StepDelta, ...]
    report: Mapping[str, Any]


class Changes:
    """Collects what a search's tree has changed since the last call, in the thread that grows it.

    A search that did not fit beside others has another tree when it begins again.
    """

    def __init__(self) -> None:
        self._tree: SearchTree | None = None
        self._known: dict[Node, dict[str, Any]] = {}

    def of(self, tree: SearchTree, report: RoundReport | None = None) -> TreeNews:
        """Return all changes; in a round, known pruned branches are skipped."""
        fresh, self._tree = tree is not self._tree, tree
        steps = tree.collect_changes(self._change, whole=report is None)
        told: dict[str, Any] = {}
        if report is not None:
            told = {"round": report.round, "elapsed_s": report.elapsed_s}
            for name in _REPORTED:
                told[name] = tuple(node.lineage[1:] for node in getattr(report, name))
        attributes = {name: getattr(tree, name) for name in _OF_TREE}
        return TreeNews(fresh, tree.root.problem_id, attributes, tuple(steps), told)

    def _change(self, node: Node) -> StepDelta | None:
        before, text = self._known.setdefault(node, {}), None
        now = {name: getattr(node, name) for name in _FACTS}
        now["usage"] = node.usage.copy()  # a worker may be writing to it still
        changed = {n: copy(value) for n, value in now.items() if before.get(n, self) != value}
        before |= changed
        if (whole := changed.pop("text", None)) is not None:
            above = "" if node.parent is None else node.parent.text
            kept = len(above) if whole.startswith(above) else 0
            text = kept, whole[kept:]
        return StepDelta(node.lineage[1:], changed, text) if changed or text else None


class Mirror:
    """A copy of the tree in another process.

    A search that begins again, elsewhere, has the same nodes again: whoever knows them by what they
    are hears nothing twice.
    """

    def __init__(self) -> None:
        self._tree: SearchTree | None = None
        self._nodes: dict[Ordinals, Node] = {}
        self._before: dict[Ordinals, Node] = {}

    @property
    def tree(self) -> SearchTree:
        """The copy as of the last news."""
        assert self._tree is not None
        return self._tree

    def hear(self, news: TreeNews) -> None:
        """Apply changes to the copy."""
        if news.fresh and self._tree is not None:
            self._before |= self._nodes
            self._nodes = {}
            self._tree.reset()
        for step in news.steps:
            node = self._nodes.get(step.ordinals) or self._born(news.problem_id, step)
            for name, value in step.attributes.items():
                setattr(node, name, value)
            if step.text is not None:
                kept, more = step.text
                node.text = ("" if node.parent is None else node.parent.text)[:kept] + more
        for name, value in news.attributes.items():
            setattr(self.tree, name, value)

    def report(self, news: TreeNews) -> RoundReport:
        """Return the round as a report of the copy, after its changes were applied."""
        told = dict(news.report)
        for name in _REPORTED:
            told[name] = tuple(self._nodes[ordinals] for ordinals in told[name])
        return RoundReport(tree=self.tree, **told)

    def _born(self, problem_id: str | int, step: StepDelta) -> Node:
        ordinals, written = step.ordinals, step.attributes
        if not ordinals:
            if self._tree is None:
                ids, text = written["token_ids"], written["problem_text"]
                self._tree = SearchTree(problem_id, ids, text)
            node = self._tree.root
        else:
            parent = self._nodes[ordinals[:-1]]
            lineage = (*parent.lineage, ordinals[-1])
            before = self._before.pop(ordinals, None)
            node = Node(lineage, parent, written["start"]) if before is None else before
            node.children.clear()
            self.tree.attach(node)
        self._nodes[ordinals] = node
        return node
