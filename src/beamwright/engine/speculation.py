"""Steps decoded, and perhaps scored, before selection has opened them; and whether that pays.

Speculative children hang below their parents and are in no tree. What they write follows from their
lineage, so those that selection opens are taken as they are, and the others cost nothing but their
time (FlashTTS section 4.1).

A round lasts as long as its longest step; the other rows' slots are idle for the rest of it. Tokens
that are written there, and kept, are missing from the next round. What it costs is a call of the
verifier for every few steps that end, in the place of one for all of them, and as often rows join:
that takes about as long as a token of all rows (docs/log/2026-11.md#decoding-ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from beamwright.counters import Counters
from beamwright.protocols import Prospect
from beamwright.tree import Node, NodeState, SearchTree, make_child

_MARGIN = 1.25
_CALLS, _TOKENS_PER_CALL = 4, 16  # of a round: slots are filled when a quarter has ended
_LEAST_ROUNDS = 2
_FEW_TOKENS = 500
_HOPE = 0.005


class SpeculativeChildren:
    """The speculative children of one tree: by parent, ordinal, and whether they are greedy.

    scores: of those that were scored behind their parents.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[Node | None, bool], dict[int | str, Node]] = {}
        self.scores: dict[Node, float | None] = {}
        self._submitted: set[Node] = set()

    def __contains__(self, node: Node) -> bool:
        return self._siblings(node).get(node.lineage[-1]) is node

    def __iter__(self) -> Iterator[Node]:
        """Parents come first."""
        return (node for children in self._children.values() for node in children.values())

    def of(self, prospect: Prospect) -> list[Node]:
        """The children that are meant and not complete; those that are new are made."""
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
        """Those that have their step."""
        return [node for node in self if node.state is NodeState.CANDIDATE]

    def to_score(
        self,
        submitted: Container[Node],
        most: int,
        judges: Callable[[Node], bool] = lambda node: True,
    ) -> list[Node]:
        """Up to so many that have their step, whose parents are scored or about to be, or judged by
        nobody; once."""
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
        """A child has lost what it had; its parent bears what it cost."""
        self._siblings(node).pop(node.lineage[-1], None)
        self.scores.pop(node, None)
        assert node.parent is not None
        node.parent.usage.update(node.usage)

    def taken(self, parent: Node, num_children: int, *, greedy: bool) -> dict[int | str, Node]:
        """What has been begun of these children, which selection has opened."""
        known, first = self._children.get((parent, greedy), {}), len(parent.children)
        begun: dict[int | str, Node] = {
            i: known.pop(i) for i in range(first, first + num_children) if i in known
        }
        for node in begun.values():
            node.usage["speculated_kept"] = node.usage["speculated"]
        return begun

    def rest(self, tree: SearchTree) -> list[Node]:
        """Those that cannot be opened any more; they are forgotten, the last made first.

        A parent that nothing was decided about may still get children, unless the search is over.
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
    """Adds up rounds: what they cost, of trees that had the device to themselves.

    speculated, kept: tokens that were decoded ahead, and those that selection has opened.
    waited: tokens that the longest steps had more than the mean ones; tokens, decode_s: of the
    longest steps, and what their rounds took.
    A try in vain, whose steps were scored early while nothing had room, counts as a step in vain.
    """

    speculated: int = 0
    kept: int = 0
    rounds: int = 0
    waited: float = 0.0
    fills: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    _sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    _last_try: tuple[int, int] = (0, 0)

    def note_round(self, lengths: Sequence[int], spent: Counters, submitted: int) -> None:
        """A round of steps of these lengths is over.

        spent: on it, and on what was decoded and scored ahead meanwhile. submitted: how often steps
        were given to the verifier: more than once if some were scored early.
        """
        longest = max(lengths)
        self.rounds += 1
        tried, speculated = self._last_try  # what it was for is known when this round is over
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
        """Seconds that a call of the verifier takes whatever is in it.

        Least squares through rounds, of so much a call and so much a token; a hopeful guess until
        any round had two calls.
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
        """Of what is decoded ahead; a half until something is known."""
        return (self.kept + _FEW_TOKENS / 2) / (self.speculated + _FEW_TOKENS)

    @property
    def pays(self) -> bool:
        """True if what is won is more than what it costs, with a margin."""
        if self.rounds < _LEAST_ROUNDS:
            return False
        token_s = self.decode_s / max(1, self.tokens)
        gain_s = self.kept_share * self.waited * token_s
        return gain_s > _MARGIN * self.fills * (self._call_s + token_s)
