"""Speculation: decode and score children of finished steps before selection, and whether it pays.

Speculative children hang below their parents but are in no tree. Their tokens follow from their
lineages. Children that selection opens are therefore used unchanged, and the rest cost nothing but
time (FlashTTS section 4.1).

A round lasts as long as its longest step, and the slots of the other rows are idle until it ends.
Speculative tokens that are decoded in these slots and kept shorten the next round. The price has
two parts. The verifier is called for every few steps that end, instead of once for all. Rows also
join that often, and each time that takes about as long as a token of all rows
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

_MARGIN = 1.25  # of the gain over the cost
# Times that a round's idle slots would be filled: 4 (when a quarter of the rows has ended), plus
# once per 16 tokens of its longest step.
_CALLS, _TOKENS_PER_CALL = 4, 16
_LEAST_ROUNDS = 2  # measured rounds before speculation can pay
_FEW_TOKENS = 500  # weight of the initial guess of the kept share, in tokens
_HOPE = 0.005  # initial guess: share of a verifier call's time that does not depend on its steps


class SpeculativeChildren:
    """The speculative children of one tree, by parent, greediness and ordinal.

    scores: scores of children that were scored before selection.
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

    def open_children(self, prospect: Prospect) -> list[Node]:
        """Return the children of a prospect that are not decoded yet; create missing ones."""
        parent, greedy = prospect.node, prospect.greedy
        known, first = self._children.setdefault((parent, greedy), {}), len(parent.children)
        ordinals = range(first, first + prospect.children)
        for ordinal in ordinals:
            if ordinal not in known:
                known[ordinal] = make_child(parent, ordinal, greedy=greedy)
        return [known[i] for i in ordinals if known[i].state is NodeState.OPEN]

    def give(self, path: Sequence[Node]) -> None:
        """Add given steps (`tree.make_given_path`), which selection opens without decoding them."""
        for node in path:
            self._children.setdefault((node.parent, node.greedy), {})[node.lineage[-1]] = node

    def complete(self) -> list[Node]:
        """Return the children whose step is decoded."""
        return [node for node in self if node.state is NodeState.CANDIDATE]

    def to_score(
        self,
        submitted: Container[Node],
        most: int,
        judges: Callable[[Node], bool] = lambda node: True,
    ) -> list[Node]:
        """Return up to `most` decoded children that can be scored, each only once.

        A child can be scored if its parent is in `submitted`, was returned here before, or is a
        step that no verifier judges.
        """
        chosen: list[Node] = []
        for node in self.complete():
            above = node.parent
            sure = above in submitted or above in self._submitted
            sure = sure or (above is not None and not above.speculative and not judges(above))
            if len(chosen) < most and node.answers and sure and node not in self._submitted:
                chosen += [node] if judges(node) else []
                self._submitted.add(node)
        return chosen

    def forget(self, node: Node) -> None:
        """Remove a child whose KV was dropped, and count its usage on its parent."""
        self._siblings(node).pop(node.lineage[-1], None)
        self.scores.pop(node, None)
        assert node.parent is not None
        node.parent.usage.update(node.usage)

    def pop_opened(self, parent: Node, num_children: int, *, greedy: bool) -> dict[int | str, Node]:
        """Remove the children that selection opens, and return those that exist, by ordinal."""
        known, first = self._children.get((parent, greedy), {}), len(parent.children)
        begun: dict[int | str, Node] = {
            i: known.pop(i) for i in range(first, first + num_children) if i in known
        }
        for node in begun.values():
            node.usage["speculated_kept"] = node.usage["speculated"]
        return begun

    def remove_unopenable(self, tree: SearchTree) -> list[Node]:
        """Remove and return the children that can no longer be opened, the latest first.

        A parent that is not decided yet may still get children, unless the search is over.
        """
        gone: dict[Node, None] = {}
        for node in self:
            assert node.parent is not None
            undecided = node.parent.state is NodeState.CANDIDATE and not tree.done
            if node.parent in gone or not undecided:
                gone[node] = None
        for node in reversed(gone):
            self.forget(node)
        self._children = {key: known for key, known in self._children.items() if known}
        return list(reversed(gone))

    def _siblings(self, node: Node) -> dict[int | str, Node]:
        return self._children.get((node.parent, node.greedy), {})


@dataclass
class Payoff:
    """Sums over rounds from which the engine decides whether speculation pays.

    Only rounds of trees that had the device to themselves are timed. A failed attempt, in which
    steps were scored early but no slot was free for speculation, counts as one wasted step.
    """

    speculated: int = 0  # tokens decoded before selection
    kept: int = 0  # tokens among them whose nodes selection opened
    rounds: int = 0  # rounds measured
    waited: float = 0.0  # tokens by which the longest steps exceeded the mean steps
    fills: float = 0.0  # times that idle slots would be filled: a verifier call and a join each
    decode_s: float = 0.0  # seconds of decoding
    tokens: int = 0  # tokens of the longest steps
    # Products of (1, calls, scored tokens, seconds of scoring), summed over rounds: the normal
    # equations of a least-squares fit.
    _sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    _last_try: tuple[int, int] = (0, 0)  # submits of the last round, and `speculated` after it

    def note_round(self, lengths: Sequence[int], spent: Counters, submitted: int) -> None:
        """Record a finished round with steps of these lengths.

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
        """Seconds that a verifier call takes regardless of its steps.

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
        """Share of speculative tokens that are kept; one half until something is known."""
        return (self.kept + _FEW_TOKENS / 2) / (self.speculated + _FEW_TOKENS)

    @property
    def pays(self) -> bool:
        """True if the expected gain exceeds the cost by a margin."""
        if self.rounds < _LEAST_ROUNDS:
            return False
        token_s = self.decode_s / max(1, self.tokens)
        gain_s = self.kept_share * self.waited * token_s
        return gain_s > _MARGIN * self.fills * (self._call_s + token_s)
