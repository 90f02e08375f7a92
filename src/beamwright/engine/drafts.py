"""What a row will probably write: the tree's own text says. No torch, no tensors, no batch.

Paths of a tree repeat each other and their prompt: what followed the longest suffix of a path, when
it was met before, is likely to follow it again (PLD, SuffixDecoding), and most of all in what its
siblings are writing at this moment. Measured on the bundled models: of the tokens drafted so about
a third to a half are drawn (docs/log/2026-11-25-drafts-from-the-tree.md). A draft is a guess about
time alone: it is kept where the row draws that very token, and the tree is the same without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from beamwright.engine.row import Row
from beamwright.tree import Node
from beamwright.tree.node import Lineage

SUFFIXES = (8, 6, 4, 3, 2)
"""Lengths of the suffixes that are looked up, the longest first."""
MOST_TOKENS = 1 << 16
"""Of a tree that are remembered; about half a kilobyte each."""
AUTO_DRAFTS = 4
_LONGEST = SUFFIXES[0]


@dataclass
class _Followers:
    """How often each token has followed a suffix. best: the most frequent, of equals the latest."""

    counts: dict[int, int]
    best: int


class TextIndex:
    """What has followed each suffix, in texts that grow.

    Suffixes are known by a hash: two that share one cost a draft that is not drawn. One follower,
    as nearly all have, is kept as a number: 2**32 times how often, and the token.
    """

    def __init__(self) -> None:
        self._found: dict[int, int | _Followers] = {}
        self.num_tokens = 0

    def add(self, before: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
        """Take in tokens behind others, of which the last eight count; returns the last eight."""
        behind, found = tuple(before[-_LONGEST:]), self._found
        for token in tokens:
            self.num_tokens += 1
            for length in SUFFIXES if self.num_tokens <= MOST_TOKENS else ():
                if length <= len(behind):
                    key = hash(behind[-length:])
                    found[key] = _with(found.get(key), token)
            behind = (*behind[1 - _LONGEST :], token)
        return behind

    def after(self, behind: Sequence[int]) -> tuple[int, int] | None:
        """The token that followed the longest known suffix most often, and the suffix's length."""
        for length in SUFFIXES:
            if length <= len(behind):
                known = self._found.get(hash(tuple(behind[-length:])))
                if known is not None:
                    token = known & 0xFFFFFFFF if isinstance(known, int) else known.best
                    return token, length
        return None


def _with(known: int | _Followers | None, token: int) -> int | _Followers:
    """A suffix's followers, and once more this one."""
    if known is None:
        return 1 << 32 | token
    if isinstance(known, int):
        if known & 0xFFFFFFFF == token:
            return known + (1 << 32)
        known = _Followers({known & 0xFFFFFFFF: known >> 32}, known & 0xFFFFFFFF)
    known.counts[token] = count = known.counts.get(token, 0) + 1
    if count >= known.counts[known.best]:
        known.best = token
    return known


class _TreeText:
    """The text of a tree's paths, as far as rows have gone through them.

    ends: by lineage how many of a node's tokens are known, and the last ones of the path there.
    """

    def __init__(self) -> None:
        self.index = TextIndex()
        self._ends: dict[Lineage, tuple[int, tuple[int, ...]]] = {}

    def behind(self, row: Row) -> tuple[int, ...]:
        """The last tokens of a row's path, whose text is known from here on."""
        unknown, node = list[Node](), row.node.parent
        while node is not None and not self._knows(node):
            unknown.append(node)
            node = node.parent
        end = () if node is None else self._ends[node.lineage][1]
        for each in reversed(unknown):
            end = self._learn(each.lineage, each.token_ids, end)
        return self._learn(row.node.lineage, row.tokens, end)

    def _knows(self, node: Node) -> bool:
        return self._ends.get(node.lineage, (-1, ()))[0] == len(node.token_ids)

    def _learn(
        self, lineage: Lineage, tokens: Sequence[int], above: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Take in what is new of a node's tokens, behind a path that ends so."""
        count, end = self._ends.get(lineage, (0, above))
        if count > len(tokens):  # it has begun again
            return (*above, *tokens)[-_LONGEST:]
        if count < len(tokens) or lineage not in self._ends:
            end = self.index.add(end, tokens[count:])
            self._ends[lineage] = len(tokens), end
        return end


class Drafts:
    """Drafts tokens for rows of any trees, from each tree's own text."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._trees: WeakKeyDictionary[Node, _TreeText] = WeakKeyDictionary()

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in what these rows have written."""
        for row in rows:
            self._of(row).behind(row)

    def draft(self, rooms: Mapping[Row, int]) -> dict[Row, list[int]]:
        """Tokens that these rows may draw next, no more than each has room for."""
        behind = {row: self._of(row).behind(row) for row in rooms}
        return {row: self._continued(row, behind[row], room) for row, room in rooms.items()}

    def _continued(self, row: Row, behind: tuple[int, ...], room: int) -> list[int]:
        index, drafted = self._of(row).index, list[int]()
        while len(drafted) < min(room, self.most) and (found := index.after(behind)) is not None:
            drafted.append(found[0])
            behind = (*behind[1 - _LONGEST :], found[0])
        return drafted

    def _of(self, row: Row) -> _TreeText:
        root = row.node.root
        if root not in self._trees:
            self._trees[root] = _TreeText()
        return self._trees[root]
