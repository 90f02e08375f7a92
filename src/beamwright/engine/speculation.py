"""Speculative children of one tree: decoded, perhaps scored, before selection has opened them.

They hang below their parents and are in no tree. What they write follows from their lineage, so
those that selection opens are taken as they are, and the others cost nothing but their time
(FlashTTS section 4.1).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from beamwright.protocols import Prospect, StepDecoded
from beamwright.tree import Node, NodeState, SearchTree, unborn


class SpeculativeChildren:
    """By parent, ordinal, and whether they are greedy."""

    def __init__(self) -> None:
        self._children: dict[tuple[Node | None, bool], dict[int | str, Node]] = {}
        self._asked: set[Node] = set()
        self._scores: dict[Node, float | None] = {}

    def __contains__(self, node: Node) -> bool:
        return self._below(node).get(node.lineage[-1]) is node

    def __iter__(self) -> Iterator[Node]:
        return (node for children in self._children.values() for node in children.values())

    def of(self, prospects: Sequence[Prospect]) -> list[Node]:
        """The children that are meant and not complete; those that are new are made."""
        found: list[Node] = []
        for prospect in prospects:
            parent = prospect.node
            known = self._children.setdefault((parent, prospect.greedy), {})
            first = len(parent.children)
            for ordinal in range(first, first + prospect.children):
                if ordinal not in known:
                    known[ordinal] = unborn(parent, ordinal, greedy=prospect.greedy)
                if known[ordinal].state is NodeState.OPEN:
                    found.append(known[ordinal])
        return found

    def decoded(self, tree: SearchTree, event: StepDecoded) -> None:
        """A child has its step; it is still in no tree."""
        commit(tree, event)

    def complete(self) -> list[Node]:
        """Those that have their step."""
        return [node for node in self if node.state is NodeState.CANDIDATE]

    def to_score(self, behind: Container[Node], most: int) -> list[Node]:
        """Up to so many that have their step, whose parents are scored or about to be; once."""
        found: list[Node] = []
        for node in self:  # parents come first
            if len(found) >= most:
                break
            complete = node.state is NodeState.CANDIDATE and node.answers
            sure = node.parent in behind or node.parent in self._asked
            if complete and sure and node not in self._asked:
                found.append(node)
                self._asked.add(node)
        return found

    def scored(self, node: Node, score: float | None) -> None:
        """A child has been scored behind its parent."""
        self._scores[node] = score

    def score_of(self, node: Node) -> tuple[bool, float | None]:
        """If it has been scored, and its score; once."""
        self._asked.discard(node)
        return node in self._scores, self._scores.pop(node, None)

    def forget(self, node: Node) -> None:
        """A child has lost what it had; its parent bears what it cost."""
        self._below(node).pop(node.lineage[-1], None)
        self._scores.pop(node, None)
        self._asked.discard(node)
        assert node.parent is not None
        node.parent.usage.update(node.usage)

    def taken(self, parent: Node, num_children: int, *, greedy: bool) -> dict[int | str, Node]:
        """What has been begun of these children, which selection has opened."""
        known = self._children.get((parent, greedy), {})
        first = len(parent.children)
        ordinals = [i for i in range(first, first + num_children) if i in known]
        found: dict[int | str, Node] = {i: known.pop(i) for i in ordinals}
        for node in found.values():
            node.usage["speculated_kept"] = node.usage["speculated"]
        return found

    def rest(self, tree: SearchTree) -> list[Node]:
        """Those that cannot be opened any more; they are forgotten, the last made first.

        A parent that nothing was decided about may still get children, unless the search is over.
        """
        gone: dict[Node, None] = {}
        for node in self:  # parents come first
            assert node.parent is not None
            undecided = node.parent.state is NodeState.CANDIDATE and not tree.done
            if node.parent in gone or not undecided:
                gone[node] = None
        for node in reversed(gone):
            self.forget(node)
        self._children = {key: known for key, known in self._children.items() if known}
        return list(reversed(gone))

    def _below(self, node: Node) -> dict[int | str, Node]:
        return self._children.get((node.parent, node.greedy), {})


def commit(tree: SearchTree, event: StepDecoded) -> None:
    """Write a step into its open node, whether it is a child of the tree already or not."""
    tree.commit(
        event.node,
        event.token_ids,
        event.logprobs,
        event.stop,
        event.text,
        event.stats,
        event.top,
    )
