"""SearchTree: grows, prunes and finishes nodes, says whose KV is no longer needed; tree_hash.

Ownership rule: a node owns its segment. A node needs its KV while it, or a descendant, may still
be extended or waits for its score; the moment that ends, `release_dead` returns it exactly once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

from beamwright.tree.node import Lineage, Node, NodeState, StopReason, TopTokens, Turn, on_paths

T = TypeVar("T")
_lineage = attrgetter("lineage")
_LIVE = (NodeState.OPEN, NodeState.CANDIDATE, NodeState.KEPT)


class SearchTree:
    """One problem's tree.

    prompt_ids: token ids of the rendered prompt, owned by the root.
    problem_text: the problem as the verifier sees it.
    held: nodes whose KV may be needed (what a conservation check compares with the pools).
    """

    def __init__(self, problem_id: str | int, prompt_ids: tuple[int, ...], problem_text: str):
        self.root = Node((problem_id,), None, 0, NodeState.KEPT, tuple(prompt_ids))
        self.root.problem_text = problem_text
        self.rounds = 0
        self.done = False
        self.reason_fewer: str | None = None
        self.held: set[Node] = {self.root}
        self._leaves: list[Node] = []

    # --- growing -----------------------------------------------------------------------------

    def expand(
        self,
        node: Node,
        num_children: int,
        *,
        greedy: bool = False,
        begun: Mapping[int | str, Node] | None = None,
    ) -> list[Node]:
        """Open `num_children` children of `node`; ordinals go on from those that exist.

        begun: speculative children by their ordinals, to be taken as they are.
        """
        if node.state is not NodeState.KEPT:
            raise ValueError(f"{node!r} cannot be extended")
        first, begun = len(node.children), begun or {}
        ordinals = range(first, first + num_children)
        children = [begun.get(i) or unborn(node, i, greedy=greedy) for i in ordinals]
        for child in children:
            child.speculative, child.round = False, self.rounds + 1
        node.children.extend(children)
        self.held.update(children)
        self._leaves.extend(children)
        return children

    def attach(self, node: Node) -> None:
        """Let a node that is known from elsewhere be its parent's next child."""
        assert node.parent is not None
        node.parent.children.append(node)
        self._leaves.append(node)

    def cut(self) -> None:
        """Leave nothing but the prompt."""
        self.root.children.clear()
        self.rounds, self.done, self.reason_fewer = 0, False, None
        self.held, self._leaves = {self.root}, []

    def ask(self, node: Node, turn: Turn, token_ids: tuple[int, ...]) -> Node:
        """Let a turn follow `node`, a kept one whose reply has ended; it can be extended at once.

        token_ids: from the end of the reply to where the next one begins.
        """
        (asked,) = self.expand(node, 1)
        asked.state, asked.turn, asked.token_ids, asked.text = NodeState.KEPT, turn, token_ids, ""
        return asked

    def commit(
        self,
        node: Node,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        stop: StopReason,
        text: str,
        stats: Mapping[str, tuple[float, ...]] | None = None,
        top: tuple[TopTokens, ...] = (),
        *,
        thought: bool = False,
    ) -> None:
        """Write a decoded step into its open node."""
        if node.state is not NodeState.OPEN:
            raise ValueError(f"{node!r} is not open")
        node.token_ids, node.logprobs, node.stop, node.text = token_ids, logprobs, stop, text
        node.stats, node.top, node.thought = dict(stats or {}), top, thought
        node.state = NodeState.CANDIDATE

    def keep(self, node: Node) -> None:
        """Mark a candidate as a survivor."""
        _judge(node, NodeState.KEPT)

    def finish(self, node: Node) -> None:
        """Mark a candidate whose path has ended as a final candidate."""
        _judge(node, NodeState.FINISHED)

    def prune(self, node: Node) -> None:
        """Drop a candidate, a final one that loses its place, or a kept node with nothing left."""
        states = {child.state for child in node.children}
        empty = node.state is NodeState.KEPT and states == {NodeState.PRUNED}
        _judge(node, NodeState.PRUNED, empty or node.state is NodeState.FINISHED)

    # --- looking -----------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, depth-first by child ordinal (lineage order)."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def changed(self, change: Callable[[Node], T | None], *, whole: bool = False) -> list[T]:
        """What `change` finds of nodes, parents first; looks past pruned branches of which it finds
        nothing.

        whole: looks at every node.
        """
        found: list[T] = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            each = change(node)
            if each is not None:
                found.append(each)
            if whole or node.state is not NodeState.PRUNED or each is not None:
                stack.extend(reversed(node.children))
        return found

    def node(self, lineage: Lineage) -> Node:
        """The node with this lineage.

        Raises:
            KeyError: if there is none.
        """
        node = self.root
        for place in map(int, lineage[1:]):
            if lineage[0] != self.root.problem_id or place >= len(node.children):
                raise KeyError(lineage)
            node = node.children[place]
        return node

    def open_nodes(self) -> list[Node]:
        """Nodes whose step is not decoded yet, in lineage order."""
        return self._in_state(NodeState.OPEN)

    def candidates(self) -> list[Node]:
        """Decoded nodes that wait for selection, in lineage order."""
        return self._in_state(NodeState.CANDIDATE)

    def finished(self) -> list[Node]:
        """Final candidates, in lineage order."""
        return self._in_state(NodeState.FINISHED)

    def ended(self) -> list[Node]:
        """Final candidates and, before a round is decided, paths to an answer that ended in it."""
        fresh = [n for n in self.candidates() if n.ended and n.answers and not n.greedy]
        return sorted([*self.finished(), *fresh], key=_lineage)

    def _in_state(self, state: NodeState) -> list[Node]:
        nodes = [node for node in self._leaves if node.state is state]
        return sorted(nodes, key=_lineage)

    # --- ownership ---------------------------------------------------------------------------

    def release_dead(self) -> list[Node]:
        """Nodes whose KV nobody can need any more; each is returned once, leaves first."""
        dead = self.held - on_paths(self._live())
        self.held -= dead
        self._leaves = [
            node
            for node in self._leaves
            if not node.children and node.state is not NodeState.PRUNED
        ]
        return sorted(dead, key=_lineage, reverse=True)

    def beyond(
        self, window: int, begins: Callable[[Node], int] = lambda leaf: leaf.start
    ) -> list[Node]:
        """Held nodes that nothing sees any more, where a token sees so many.

        begins: the first position that may yet be computed on a leaf's path; at least its own step
        may be, behind its parent. A node whose greedy rollout a leaf is may get other children.
        """
        seen, live = set[Node](), self._live()
        ends = [(leaf, begins(leaf)) for leaf in live]
        for leaf in live:
            node: Node | None = leaf
            while node is not None and node.greedy:
                node = node.parent
            if node is not None and node is not leaf:
                ends.append((node, node.end))
        for leaf, first in ends:
            node = leaf
            while node is not None and first - node.end + 1 < window:
                seen.add(node)
                node = node.parent
        return sorted(self.held - seen, key=_lineage, reverse=True)

    def _live(self) -> list[Node]:
        """Leaves that may be extended, or are being decoded."""
        if self.done:
            return []
        live = [node for node in self._leaves if node.state in _LIVE and not node.children]
        return live if self.root.children else [self.root]


def _judge(node: Node, state: NodeState, anyway: bool = False) -> None:
    if node.state is not NodeState.CANDIDATE and not anyway:
        raise ValueError(f"{node!r} is not a candidate")
    node.state = state


def unborn(parent: Node, ordinal: int, *, greedy: bool = False) -> Node:
    """A child that its parent would have: what it writes depends on its lineage alone."""
    lineage = (*parent.lineage, ordinal)
    return Node(lineage, parent, parent.end, text=parent.text, greedy=greedy, speculative=True)


def given_path(root: Node, ordinal: int, texts: Sequence[str]) -> list[Node]:
    """Steps of these texts, which nobody drew: they have no tokens. The last one ends the path."""
    nodes = [root]
    for text in texts:
        node = unborn(nodes[-1], ordinal if len(nodes) == 1 else 0)
        node.state, node.text = NodeState.CANDIDATE, node.text + text
        node.stop = StopReason.EOS if len(nodes) == len(texts) else StopReason.DELIMITER
        nodes.append(node)
    return nodes[1:]


def tree_hash(tree: SearchTree) -> str:
    """SHA-256 over committed nodes in lineage order: tokens, stop reason, kept or pruned.

    Scores are left out: they are compared apart, to 1e-4.
    """
    digest = hashlib.sha256()
    for node in tree.nodes():
        if node.state is NodeState.OPEN:
            continue
        kept = "pruned" if node.state is NodeState.PRUNED else "kept"
        digest.update(f"{written(node)}|{kept}\n".encode())
    return digest.hexdigest()


def written(node: Node) -> str:
    """What a step has written, in a line for digests: lineage, tokens, stop reason."""
    ordinals = ".".join(map(str, node.lineage[1:]))
    return f"{ordinals}|{','.join(map(str, node.token_ids))}|{node.stop}"


def repeated_tokens(tree: SearchTree) -> int:
    """Tokens of steps that repeat, with all before them, those of another step of their round.

    What rows of equal tokens computed once would save.
    """
    rounds: dict[int, list[Node]] = {}
    for node in tree.nodes():
        rounds.setdefault(node.round, []).append(node)
    ends: dict[Node | None, int] = {None: 0}  # hashes of whole paths
    repeated = 0
    for _, nodes in sorted(rounds.items()):
        seen = set[int]()
        for node in nodes:
            own, end = list[int](), ends[node.parent]
            for token in node.token_ids:
                own.append(end := hash((end, token)))
            ends[node] = end
            if node.parent is not None and node.turn is None:
                repeated += sum(map(seen.__contains__, own))
                seen.update(own)
    return repeated
