"""The search tree: expand, keep, finish and prune nodes, release their KV, and hash the tree.

Ownership rule: a node owns the KV of its step. The KV is needed while the node or a descendant may
still be extended or waits for its score. Once the KV is not needed any more, `pop_dead` removes the
node from `held` and returns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from beamwright.tree.node import (
    Lineage,
    Node,
    NodeState,
    StopReason,
    TopTokens,
    Turn,
    nodes_on_paths,
)

T = TypeVar("T")
_lineage = attrgetter("lineage")
_LEAST_SHARED = 32  # minimum number of common first tokens for which prompts share a node
_LIVE = (NodeState.OPEN, NodeState.CANDIDATE, NodeState.KEPT)


class SearchTree:
    """The search tree of one problem.

    Args:
        problem_id: the first part of every lineage.
        prompt_ids: token ids of the rendered prompt, which the root owns.
        problem_text: the problem as the verifier reads it.
    """

    def __init__(self, problem_id: str | int, prompt_ids: tuple[int, ...], problem_text: str):
        self.root = Node((problem_id,), None, 0, NodeState.KEPT, tuple(prompt_ids))
        self.root.problem_text = problem_text
        self.rounds = 0  # number of completed rounds
        self.done = False  # True once the strategy has ended the search (`EndSearch`)
        # Why the search ended with fewer candidates than requested; None if it did not.
        self.reason_fewer: str | None = None
        # Nodes whose KV may still be needed. Tests compare them with the KV that is allocated.
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
        """Open `num_children` children of `node`, and return them.

        The ordinals of new children follow those of the existing children.

        Args:
            greedy: the new children decode the most likely tokens.
            begun: speculative children by ordinal; they are adopted with the tokens they have.

        Raises:
            ValueError: if `node` is not kept.
        """
        if node.state is not NodeState.KEPT:
            raise ValueError(f"{node!r} cannot be extended")
        first, begun = len(node.children), begun or {}
        ordinals = range(first, first + num_children)
        children = [begun.get(i) or make_child(node, i, greedy=greedy) for i in ordinals]
        for child in children:
            child.speculative, child.round = False, self.rounds + 1
        node.children.extend(children)
        self.held.update(children)
        self._leaves.extend(children)
        return children

    def attach(self, node: Node) -> None:
        """Add a node that was created elsewhere (`make_child`) to the children of its parent."""
        assert node.parent is not None
        node.parent.children.append(node)
        self._leaves.append(node)

    def reset(self) -> None:
        """Remove all nodes except the root, to start the search again."""
        self.root.children.clear()
        self.rounds, self.done, self.reason_fewer = 0, False, None
        self.held, self._leaves = {self.root}, []

    def ask(self, node: Node, turn: Turn, token_ids: tuple[int, ...]) -> Node:
        """Add a user turn after the reply that ends with `node`, and return the turn's node.

        Args:
            node: a kept node with an ended reply; the root for a turn that is a prompt of its own
                (`Turn.alone`).
            token_ids: all tokens between the end of the reply of `node` and the start of the next
                reply.
        """
        (added,) = self.expand(node, 1)
        added.state, added.turn, added.token_ids, added.text = NodeState.KEPT, turn, token_ids, ""
        added.start = 0 if added.above is None else node.end
        return added

    def ask_alone(self, prompts: Sequence[tuple[Turn, tuple[int, ...]]]) -> None:
        """Add prompts below the root that do not continue its prompt, and open a reply to each.

        Prompts that begin with the same tokens share the nodes of these tokens, and thus their KV.
        Equal prompts are one node with several replies.

        Args:
            prompts: each prompt's turn and its token ids.
        """
        self._ask_group(self.root, list(prompts))

    def _ask_group(self, parent: Node, prompts: Sequence[tuple[Turn, tuple[int, ...]]]) -> None:
        """Add `prompts` below `parent`, without the tokens that the path to `parent` contains."""
        groups: dict[tuple[int, ...], list[tuple[Turn, tuple[int, ...]]]] = {}
        for turn, ids in prompts:
            groups.setdefault(ids[:_LEAST_SHARED], []).append((turn, ids))
        for group in groups.values():
            together = enumerate(zip(*(ids for _, ids in group), strict=False))
            least = min(len(ids) for _, ids in group)
            shared = next((place for place, tokens in together if len({*tokens}) > 1), least)
            whole = [turn for turn, ids in group if len(ids) == shared]
            turn = whole[0] if whole else replace(group[0][0], text="", sources=())
            node = self.ask(parent, turn, group[0][1][:shared])
            if whole:
                self.expand(node, len(whole))
            self._ask_group(node, [(t, ids[shared:]) for t, ids in group if len(ids) > shared])

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
        """Store a decoded step in its open node, which becomes a candidate for selection.

        Raises:
            ValueError: if `node` is not open.
        """
        if node.state is not NodeState.OPEN:
            raise ValueError(f"{node!r} is not open")
        node.token_ids, node.logprobs, node.stop, node.text = token_ids, logprobs, stop, text
        node.stats, node.top, node.thought = dict(stats or {}), top, thought
        node.state = NodeState.CANDIDATE

    def keep(self, node: Node) -> None:
        """Mark a candidate as selected, so that it can get children."""
        _set_state(node, NodeState.KEPT)

    def finish(self, node: Node) -> None:
        """Mark a candidate whose path has ended as a final candidate."""
        _set_state(node, NodeState.FINISHED)

    def prune(self, node: Node) -> None:
        """Prune a candidate, a final candidate, or a kept node that has only pruned children."""
        states = {child.state for child in node.children}
        empty = node.state is NodeState.KEPT and states == {NodeState.PRUNED}
        _set_state(node, NodeState.PRUNED, empty or node.state is NodeState.FINISHED)

    # --- reading -----------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Yield every node depth-first by child ordinal (lineage order)."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def collect_changes(
        self, read_change: Callable[[Node], T | None], *, whole: bool = False
    ) -> list[T]:
        """Call `read_change` on all nodes, parents first; collect the results that are not None.

        This serves viewers and replicas, which send only changes. Descendants of a pruned node are
        skipped if `read_change` returns None for the node.

        Args:
            whole: visit every node, also below pruned nodes without a result.
        """
        changes: list[T] = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            change = read_change(node)
            if change is not None:
                changes.append(change)
            if whole or node.state is not NodeState.PRUNED or change is not None:
                stack.extend(reversed(node.children))
        return changes

    def node(self, lineage: Lineage) -> Node:
        """Return the node with the given lineage.

        Raises:
            KeyError: if the tree has no such node.
        """
        node = self.root
        for place in map(int, lineage[1:]):
            if lineage[0] != self.root.problem_id or place >= len(node.children):
                raise KeyError(lineage)
            node = node.children[place]
        return node

    def open_nodes(self) -> list[Node]:
        """Return the nodes with a step that is not decoded yet, in lineage order."""
        return self._in_state(NodeState.OPEN)

    def candidates(self) -> list[Node]:
        """Return the decoded nodes that wait for selection, in lineage order."""
        return self._in_state(NodeState.CANDIDATE)

    def finished(self) -> list[Node]:
        """Return the final candidates in lineage order."""
        return self._in_state(NodeState.FINISHED)

    def ended(self) -> list[Node]:
        """Return the final candidates and the candidates with an ended path, in lineage order.

        Candidates count, because selection may not have decided about them yet. Greedy rollouts and
        comments on an answer are left out.
        """
        fresh = [n for n in self.candidates() if n.ended and n.answers and not n.greedy]
        return sorted([*self.finished(), *fresh], key=_lineage)

    def _in_state(self, state: NodeState) -> list[Node]:
        nodes = [node for node in self._leaves if node.state is state]
        return sorted(nodes, key=_lineage)

    # --- ownership ---------------------------------------------------------------------------

    def pop_dead(self) -> list[Node]:
        """Remove the nodes whose KV is not needed any more from `held`, and return them.

        Leaves come first. The caller frees their KV. A node is returned only once.
        """
        dead = self.held - nodes_on_paths(self._live_leaves())
        self.held -= dead
        self._leaves = [
            node
            for node in self._leaves
            if not node.children and node.state is not NodeState.PRUNED
        ]
        return sorted(dead, key=_lineage, reverse=True)

    def outside_window(
        self, window: int, begins: Callable[[Node], int] = lambda leaf: leaf.start
    ) -> list[Node]:
        """Return the nodes whose KV no future token attends to, because of a sliding window.

        Args:
            window: number of tokens that a token attends to, itself included.
            begins: returns the first position that may still be computed on a leaf's path. The
                default is the start of the leaf's own step.

        The node below which a greedy rollout started also counts as a leaf, because it may get more
        children.
        """
        seen, live = set[Node](), self._live_leaves()
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
                node = node.above
        return sorted(self.held - seen, key=_lineage, reverse=True)

    def _live_leaves(self) -> list[Node]:
        """Return the leaves that are being decoded, await selection, or may still be extended."""
        if self.done:
            return []
        live = [node for node in self._leaves if node.state in _LIVE and not node.children]
        return live if self.root.children else [self.root]


def _set_state(node: Node, state: NodeState, anyway: bool = False) -> None:
    if node.state is not NodeState.CANDIDATE and not anyway:
        raise ValueError(f"{node!r} is not a candidate")
    node.state = state


def make_child(parent: Node, ordinal: int, *, greedy: bool = False) -> Node:
    """Create a speculative child of `parent`, which is not in `parent.children` yet.

    Sampling depends only on the lineage, so the child samples the same tokens as if selection had
    opened it.
    """
    lineage = (*parent.lineage, ordinal)
    return Node(lineage, parent, parent.end, text=parent.text, greedy=greedy, speculative=True)


def make_given_path(root: Node, ordinal: int, texts: Sequence[str]) -> list[Node]:
    """Create a path of given steps below `root`, and return its nodes without the root.

    The steps have text but no tokens, because no model generated them. The last one ends the path.

    Args:
        ordinal: the ordinal of the first step among the root's children.
        texts: the text of each step.
    """
    nodes = [root]
    for text in texts:
        node = make_child(nodes[-1], ordinal if len(nodes) == 1 else 0)
        node.state, node.text = NodeState.CANDIDATE, node.text + text
        node.stop = StopReason.EOS if len(nodes) == len(texts) else StopReason.DELIMITER
        nodes.append(node)
    return nodes[1:]


def tree_hash(tree: SearchTree) -> str:
    """Return the SHA-256 of all decoded nodes in lineage order, as a hexadecimal text.

    The hash covers lineages, tokens, stop reasons, and whether a node was pruned. Scores are left
    out, because they are compared separately with a tolerance of 1e-4.
    """
    digest = hashlib.sha256()
    for node in tree.nodes():
        if node.state is NodeState.OPEN:
            continue
        kept = "pruned" if node.state is NodeState.PRUNED else "kept"
        digest.update(f"{step_line(node)}|{kept}\n".encode())
    return digest.hexdigest()


def step_line(node: Node) -> str:
    """Return the text of a step that digests cover: its lineage, token ids and stop reason."""
    ordinals = ".".join(map(str, node.lineage[1:]))
    return f"{ordinals}|{','.join(map(str, node.token_ids))}|{node.stop}"


def repeated_tokens(tree: SearchTree) -> int:
    """Count tokens that another path of the same round has decoded too, after an equal prefix.

    Decoding would save these tokens if equal rows were computed only once.
    """
    rounds: dict[int, list[Node]] = {}
    for node in tree.nodes():
        rounds.setdefault(node.round, []).append(node)
    ends: dict[Node | None, int] = {None: 0}  # per node, the hash of all tokens of its path
    repeated = 0
    for _, nodes in sorted(rounds.items()):
        seen = set[int]()
        for node in nodes:
            own, end = list[int](), ends[node.above]
            for token in node.token_ids:
                own.append(end := hash((end, token)))
            ends[node] = end
            if node.parent is not None and node.turn is None:
                repeated += sum(map(seen.__contains__, own))
                seen.update(own)
    return repeated
