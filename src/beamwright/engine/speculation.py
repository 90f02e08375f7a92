"""Speculation: children decoded in idle slots before selection, and whether that saves time.

A speculative child points to its parent, but is no child in the tree before selection opens it. Its
tokens follow from its lineage, so opened children are used unchanged; the others cost only time
(FlashTTS section 4.1).

A round lasts as long as its longest step, and the slots of the other rows are idle until it ends.
Speculative tokens that are decoded in these slots and kept shorten the next round. The price has
two parts. The verifier is called once per few steps, instead of once per round. Rows also join as
often, and each joining takes about as long as decoding one token of all rows
(docs/log/2026-11.md#decoding-ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from beamwright.counters import Counters
from beamwright.protocols import Prospect
from beamwright.tree import Node, NodeState, SearchTree, make_child

_MARGIN = 1.25  # speculation pays if the gain is at least this many times the cost
# Times that a round's idle slots would be filled: 4 (when a quarter of the rows has ended), plus
# once per 16 tokens of its longest step.
_CALLS, _TOKENS_PER_CALL = 4, 16
_LEAST_ROUNDS = 2  # minimum number of measured rounds before speculation can pay
_FEW_TOKENS = 500  # weight of the initial guess of the kept share, in tokens
_HOPE = 0.005  # initial guess: share of a verifier call's time that does not depend on its steps


class SpeculativeChildren:
    """All speculative children of one tree, by parent, greediness and number among siblings.

    scores: scores of children that were scored before selection opened them.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[Node | None, bool], dict[int | str, Node]] = {}
        self.scores: dict[Node, float | None] = {}
        self._submitted: set[Node] = set()

    def __contains__(self, node: Node) -> bool:
        return self._siblings(node).get(node.lineage[-1]) is node

    def __iter__(self) -> Iterator[Node]:
        """Yield all children, parents first."""
        return (node for children in self._children.values() for node in children.values())

    def create_children(self, prospect: Prospect) -> list[Node]:
        """Return the children that a prospect would get and that are not decoded yet.

        Missing children are created.
        """
        parent, greedy = prospect.node, prospect.greedy
        known, first = self._children.setdefault((parent, greedy), {}), len(parent.children)
        ordinals = range(first, first + prospect.children)
        for ordinal in ordinals:
            if ordinal not in known:
                known[ordinal] = make_child(parent, ordinal, greedy=greedy)
        return [known[i] for i in ordinals if known[i].state is NodeState.OPEN]

    def add_given(self, path: Sequence[Node]) -> None:
        """Add the nodes of a given path (`tree.make_given_path`), so that nothing is decoded."""
        for node in path:
            self._children.setdefault((node.parent, node.greedy), {})[node.lineage[-1]] = node

    def decoded_children(self) -> list[Node]:
        """Return the children whose step is decoded."""
        return [node for node in self if node.state is NodeState.CANDIDATE]

    def take_to_score(
        self,
        submitted: Container[Node],
        most: int,
        judges: Callable[[Node], bool] = lambda node: True,
    ) -> list[Node]:
        """Return up to `most` decoded children to score now, each only once.

        A child is returned only if its parent is in `submitted`, was returned by an earlier call,
        or is a step that the verifier does not judge.
        """
        chosen: list[Node] = []
        for node in self.decoded_children():
            above = node.parent
            sure = above in submitted or above in self._submitted
            sure = sure or (above is not None and not above.speculative and not judges(above))
            if len(chosen) < most and node.answers and sure and node not in self._submitted:
                chosen += [node] if judges(node) else []
                self._submitted.add(node)
        return chosen

    def remove(self, node: Node) -> None:
        """Remove a child that was dropped, and add its token counts to its parent's."""
        self._siblings(node).pop(node.lineage[-1], None)
        self.scores.pop(node, None)
        assert node.parent is not None
        node.parent.usage.update(node.usage)

    def pop_opened(self, parent: Node, num_children: int, *, greedy: bool) -> dict[int | str, Node]:
        """Remove and return the children that selection opens now, by number among siblings.

        Only children that were created before selection are in the result.
        """
        known, first = self._children.get((parent, greedy), {}), len(parent.children)
        begun: dict[int | str, Node] = {
            i: known.pop(i) for i in range(first, first + num_children) if i in known
        }
        for node in begun.values():
            node.usage["speculated_kept"] = node.usage["speculated"]
        return begun

    def pop_unopenable(self, tree: SearchTree) -> list[Node]:
        """Remove and return the children that selection can no longer open, deepest first.

        A child can still be opened while its parent waits for selection.
        """
        gone: dict[Node, None] = {}
        for node in self:
            assert node.parent is not None
            undecided = node.parent.state is NodeState.CANDIDATE and not tree.done
            if node.parent in gone or not undecided:
                gone[node] = None
        for node in reversed(gone):
            self.remove(node)
        self._children = {key: known for key, known in self._children.items() if known}
        return list(reversed(gone))

    def _siblings(self, node: Node) -> dict[int | str, Node]:
        return self._children.get((node.parent, node.greedy), {})


@dataclass
class Payoff:
    """Measurements from which `--speculation auto` decides whether speculation saves time.

    Fields are sums over rounds. Only rounds with a single tree in flight are timed. A failed
    attempt, in which steps were scored early but no slot was free, counts as one wasted step.
    """

    speculated: int = 0  # tokens decoded before selection
    kept: int = 0  # tokens among them whose nodes selection opened
    rounds: int = 0  # rounds measured
    waited: float = 0.0  # tokens by which each round's longest step exceeded its mean step
    fills: float = 0.0  # times that idle slots would be filled, each with an extra verifier call
    decode_s: float = 0.0  # seconds of decoding
    tokens: int = 0  # tokens of the longest steps
    # Products of (1, calls, scored tokens, seconds of scoring), summed over rounds: the normal
    # equations of a least-squares fit.
    _sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    _last_try: tuple[int, int] = (0, 0)  # submits of the last round, and `speculated` after it

    def record_round(self, lengths: Sequence[int], spent: Counters, submitted: int) -> None:
        """Record a finished round.

        lengths: tokens of each step of the round.
        spent: the costs of the round, speculative decoding and scoring included.
        submitted: number of times that steps were given to the verifier; more than 1 if some were
            scored early.
        """
        longest = max(lengths)
        self.rounds += 1
        # Whether early scores led to speculation is known only one round later.
        tried, speculated = self._last_try
        if tried > 1 and speculated == self.speculated:
            self.speculated += longest
        self._last_try = submitted, self.speculated
        self.waited += longest - sum(lengths) / len(lengths)
        self.fills += _CALLS + longest / _TOKENS_PER_CALL
        row = np.array([1, spent.verifier_calls, spent.scored_tokens, spent.verify_s], dtype=float)
        self._sums = self._sums + np.outer(row, row)
        self.decode_s, self.tokens = self.decode_s + spent.decode_s, self.tokens + longest

    @property
    def _call_s(self) -> float:
        """Estimate of the fixed seconds of a verifier call, independent of its tokens.

        Least squares over rounds: seconds = calls * `_call_s` + tokens * a constant. A low guess is
        used until a round had more than one call.
        """
        calls, _, seconds = map(float, self._sums[0, 1:])
        if not calls:
            return 0.0
        call_s, products = _HOPE * seconds / calls, self._sums[1:3, 1:3]
        if products[0, 0] > calls and np.linalg.det(products) > 1e-9 * np.prod(products.diagonal()):
            solution = np.linalg.solve(products, self._sums[1:3, 3])
            call_s = min(seconds / calls, max(0.0, float(solution[0])))
        return call_s

    @property
    def kept_share(self) -> float:
        """Share of speculative tokens that are kept; one half before any are known."""
        return (self.kept + _FEW_TOKENS / 2) / (self.speculated + _FEW_TOKENS)

    @property
    def pays(self) -> bool:
        """True if the expected gain exceeds the cost by a margin."""
        if self.rounds < _LEAST_ROUNDS:
            return False
        token_s = self.decode_s / max(1, self.tokens)
        gain_s = self.kept_share * self.waited * token_s
        return gain_s > _MARGIN * self.fills * (self._call_s + token_s)
