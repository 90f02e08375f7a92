"""Mirror a search tree that grows in another process, by sending its changes after each round.

The messages contain plain values, without KV handles, and without links to parents and children,
because pickling would follow such links and recurse as deep as the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from beamwright.protocols import RoundReport
from beamwright.tree import Node, SearchTree

# A lineage without the problem's id.
Ordinals = tuple[str | int, ...]

# Attributes of `Node` that are not sent, because the receiver's copy rebuilds or never reads them.
_LINKS = ("lineage", "parent", "root", "_replied_node", "children", "handles", "speculative")
_FACTS = tuple(each.name for each in fields(Node) if each.name not in _LINKS)
_OF_TREE = ("rounds", "done", "reason_fewer")
# Fields of `RoundReport` that contain nodes.
_REPORTED = ("candidates", "survivors", "pruned", "finished")


@dataclass(frozen=True)
class StepDelta:
    """The changed attributes of one node."""

    ordinals: Ordinals
    attributes: Mapping[str, Any]  # changed attributes of `Node` with their new values, except text
    # The node's new text as (number of characters that it shares with the beginning of the parent's
    # text, the rest). None: the text has not changed.
    text: tuple[int, str] | None


@dataclass(frozen=True)
class TreeUpdate:
    """The changes of a tree since the last message."""

    fresh: bool  # True in the first message about a tree, also after a restart of the search
    problem_id: str | int
    attributes: Mapping[str, Any]  # attributes of the `SearchTree`
    steps: tuple[StepDelta, ...]  # the changed nodes, parents first
    # Fields of the round's `RoundReport`, with ordinals in place of nodes; empty at the end of the
    # search.
    report: Mapping[str, Any]


class TreeChangeCollector:
    """Sender's side: collects what has changed in a search's tree since the last message.

    Use it in the thread that grows the tree. A search that did not fit in memory beside other
    searches is restarted with a new tree.
    """

    def __init__(self) -> None:
        self._tree: SearchTree | None = None
        self._known: dict[Node, dict[str, Any]] = {}

    def collect(self, tree: SearchTree, report: RoundReport | None = None) -> TreeUpdate:
        """Return the changes of `tree` since the last call.

        report: the report of a round; None at the end of the search. In a round, branches that were
            sent as pruned before are skipped.
        """
        fresh, self._tree = tree is not self._tree, tree
        steps = tree.collect_changes(self._node_change, whole=report is None)
        report_fields: dict[str, Any] = {}
        if report is not None:
            report_fields = {"round": report.round, "elapsed_s": report.elapsed_s}
            for name in _REPORTED:
                report_fields[name] = tuple(node.lineage[1:] for node in getattr(report, name))
        attributes = {name: getattr(tree, name) for name in _OF_TREE}
        return TreeUpdate(fresh, tree.root.problem_id, attributes, tuple(steps), report_fields)

    def _node_change(self, node: Node) -> StepDelta | None:
        """Return the changes of one node since the last call; None if it has not changed."""
        before, text = self._known.setdefault(node, {}), None
        now = {name: getattr(node, name) for name in _FACTS}
        now["usage"] = node.usage.copy()  # a worker thread may still change the original
        changed = {n: copy(value) for n, value in now.items() if before.get(n, self) != value}
        before |= changed
        if (whole := changed.pop("text", None)) is not None:
            above = "" if node.parent is None else node.parent.text
            kept = len(above) if whole.startswith(above) else 0
            text = kept, whole[kept:]
        return StepDelta(node.lineage[1:], changed, text) if changed or text else None


class Mirror:
    """Receiver's side: builds a copy of a tree that grows in another process.

    If a search restarts on another replica, the copy keeps its node objects. A callback that tracks
    nodes by identity therefore sees no node twice.
    """

    def __init__(self) -> None:
        self._tree: SearchTree | None = None
        self._nodes: dict[Ordinals, Node] = {}
        self._before: dict[Ordinals, Node] = {}

    @property
    def tree(self) -> SearchTree:
        """The copy of the tree, with all changes applied so far."""
        assert self._tree is not None
        return self._tree

    def apply(self, news: TreeUpdate) -> None:
        """Apply a message's changes to the copy; messages must arrive in order."""
        if news.fresh and self._tree is not None:
            self._before |= self._nodes
            self._nodes = {}
            self._tree.reset()
        for step in news.steps:
            node = self._nodes.get(step.ordinals) or self._add_node(news.problem_id, step)
            for name, value in step.attributes.items():
                setattr(node, name, value)
            if step.text is not None:
                kept, more = step.text
                node.text = ("" if node.parent is None else node.parent.text)[:kept] + more
        for name, value in news.attributes.items():
            setattr(self.tree, name, value)

    def report(self, news: TreeUpdate) -> RoundReport:
        """Return a round's report with nodes of the copy, for callbacks. Call `apply` first."""
        report_fields = dict(news.report)
        for name in _REPORTED:
            report_fields[name] = tuple(self._nodes[ordinals] for ordinals in report_fields[name])
        return RoundReport(tree=self.tree, **report_fields)

    def _add_node(self, problem_id: str | int, step: StepDelta) -> Node:
        """Add the node of `step` to the copy, and return it.

        If the node existed before a restart, its object is kept.
        """
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
