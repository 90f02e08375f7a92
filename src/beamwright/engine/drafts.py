"""What a row will probably write: the tree's own text says. No torch, no tensors, no batch.

Paths of a tree repeat each other and their prompt: what followed the longest suffix of a path, when
it was met before, is likely to follow it again (PLD, SuffixDecoding), and most of all in what its
siblings are writing at this moment. Measured on the bundled models: of the tokens drafted so about
a third to a half are drawn (docs/log/2026-11.md#drafts-from-the-tree). A draft is a guess about
time alone: it is kept where the row draws that very token, and the tree is the same without it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Literal
from weakref import WeakKeyDictionary

from beamwright.engine.row import Row
from beamwright.models.decoder import ROW_MULTIPLE, padded_rows
from beamwright.tree import Node
from beamwright.tree.node import Lineage

SUFFIXES = (8, 6, 4, 3, 2)
"""Lengths of the suffixes that are looked up, the longest first."""
MOST_TOKENS = 1 << 16
"""Of a tree that are remembered; about half a kilobyte each."""
AUTO_DRAFTS = 8
_LONGEST = SUFFIXES[0]
_KNEE = 32  # rows
_PRIOR = 64.0  # weight of the guess, as of a few passes of 8 rows more or less
_KEPT = 0.95  # of what was known, with each pass or iteration
_TRIALS, _TRIED_AGAIN = 2, 24  # iterations


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
        while node is not None and self._ends.get(node.lineage, (-1,))[0] != len(node.token_ids):
            unknown.append(node)
            node = node.parent
        end = () if node is None else self._ends[node.lineage][1]
        for each in reversed(unknown):
            end = self._learn(each.lineage, each.token_ids, end)
        return self._learn(row.node.lineage, row.tokens, end)

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


# --- what pays -----------------------------------------------------------------------------------


class PassSeconds:
    """Seconds of a pass: so much, and so much for every row. The latest passes count most.

    Until passes of different sizes have said more, a pass of no rows takes as long as 32 rows.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long; one that was disturbed counts as a slow one."""
        if self._weight > 1:
            seconds = min(seconds, 3 * self.of(rows))
        found = (1.0, rows, seconds, rows * rows, rows * seconds)
        sums = (self._weight, self._rows, self._seconds, self._squares, self._products)
        self._weight, self._rows, self._seconds, self._squares, self._products = (
            _KEPT * old + new for old, new in zip(sums, found, strict=True)
        )

    def of(self, rows: int) -> float:
        """What a pass of so many rows takes; of no known unit before one was noted."""
        if not self._weight:
            return _KNEE + rows
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        usual = mean_s / (_KNEE + mean_rows)
        spread = self._squares - self._weight * mean_rows**2
        slope = (self._products - mean_rows * self._seconds + _PRIOR * usual) / (spread + _PRIOR)
        return max(usual, mean_s + max(0.0, slope) * (rows - mean_rows))


class Worth:
    """Which drafts pay: how likely they are drawn, by the suffix that foretold them, against what
    their rows cost."""

    def __init__(self) -> None:
        self.seconds = PassSeconds()
        self._drawn, self._tried = Counter[int](), Counter[int]()

    def note(self, lengths: Sequence[int], accepted: int, *, stopped: bool) -> None:
        """So many tokens of a draft were drawn. lengths: of the suffixes that foretold them.

        stopped: the row has ended, which says nothing about the next one.
        """
        for length in lengths[:accepted]:
            self._drawn[length] += 1
        for length in lengths[: accepted + (not stopped)]:
            self._tried[length] += 1

    def chance(self, length: int) -> float:
        """That a token is drawn which a suffix of this length foretells; a half at first."""
        return (self._drawn[length] + 1) / (self._tried[length] + 2)

    def chosen(
        self,
        drafts: Sequence[Sequence[int]],
        least_rows: int = ROW_MULTIPLE,
    ) -> list[int]:
        """How many tokens of each row's draft make a pass write the most tokens a second.

        drafts: for each row the lengths of the suffixes that foretell them. Rows that would only
        pad the batch, see `padded_rows`, cost nothing.
        """
        chances = list[tuple[float, int]]()
        for row, lengths in enumerate(drafts):
            all_drawn = accumulate(map(self.chance, lengths), mul)
            chances += [(chance, row) for chance in all_drawn]
        chances.sort(key=lambda each: -each[0])  # each row's first ones come first
        num_rows = len(drafts)
        gained = [*accumulate((chance for chance, _ in chances), initial=len(drafts))]
        totals = range(num_rows, num_rows + len(chances) + 1)
        sizes = sorted({padded_rows(total, least_rows) for total in totals})
        takes = [min(len(chances), size - num_rows) for size in sizes]
        rates = [gained[n] / self.seconds.of(size) for n, size in zip(takes, sizes, strict=True)]
        taken = Counter(row for _, row in chances[: takes[rates.index(max(rates))]])
        return [taken[row] for row in range(num_rows)]


class Trials:
    """Whether an iteration writes more tokens a second with drafts or without, by its rows.

    Both are tried twice, and what is slower now and then again.
    """

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._spent: dict[tuple[int, bool], tuple[float, float]] = {}

    def drafts(self, num_rows: int) -> bool:
        """How the next iteration of so many rows is to go."""
        size = padded_rows(num_rows).bit_length()
        self._counts[size] += 1
        number = self._counts[size]
        if number <= 2 * _TRIALS:
            return number <= _TRIALS
        pays = self._rate(size, drafted=True) >= self._rate(size, drafted=False)
        return pays is (number % _TRIED_AGAIN != 0)

    def note(self, num_rows: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """An iteration has written so many tokens."""
        size = padded_rows(num_rows).bit_length()
        old = self._spent.get((size, drafted), (0.0, 0.0))
        self._spent[size, drafted] = _KEPT * old[0] + tokens, _KEPT * old[1] + seconds

    def _rate(self, size: int, *, drafted: bool) -> float:
        tokens, seconds = self._spent.get((size, drafted), (0.0, 1.0))
        return tokens / seconds


class Drafts:
    """Drafts tokens for rows of any trees, from each tree's own text.

    most: for a row; "auto": as many as pay, and none where plain iterations are faster.
    """

    def __init__(self, most: int | Literal["auto"]) -> None:
        self._decides = most == "auto"
        self.most = AUTO_DRAFTS if most == "auto" else most
        self.worth, self.trials = Worth(), Trials()
        self._trees: WeakKeyDictionary[Node, _TreeText] = WeakKeyDictionary()
        self._lengths: dict[Row, list[int]] = {}

    @contextmanager
    def tried(self, rows: Sequence[Row]) -> Iterator[Drafts | None]:
        """An iteration of these rows, with drafts or (None) without; takes in what they write."""
        drafted, began = not self._decides or self.trials.drafts(len(rows)), time.perf_counter()
        before = sum(len(row.tokens) for row in rows)
        yield self if drafted else None
        for row in rows:
            self._of(row).behind(row)
        num_tokens, spent_s = sum(len(row.tokens) for row in rows), time.perf_counter() - began
        self.trials.note(len(rows), num_tokens - before, spent_s, drafted=drafted)

    def draft(
        self,
        rooms: Mapping[Row, int],
        least_rows: int = ROW_MULTIPLE,
    ) -> dict[Row, list[int]]:
        """Tokens that these rows may draw next, no more than each has room for.

        least_rows: that a pass is padded to.
        """
        behind = {row: self._of(row).behind(row) for row in rooms}
        drafts, self._lengths = dict[Row, list[int]](), {}
        for row, room in rooms.items():
            drafts[row], self._lengths[row] = self._continued(row, behind[row], room)
        if self._decides:
            chosen = self.worth.chosen([*self._lengths.values()], least_rows)
            drafts = {
                row: draft[:n] for (row, draft), n in zip(drafts.items(), chosen, strict=True)
            }
        return drafts

    def note(
        self,
        drafts: Mapping[Row, Sequence[int]],
        used: Mapping[Row, int],
        rows: int,
        seconds: float,
    ) -> None:
        """What became of the drafts of a pass. used: tokens of each row, its own included.

        rows: of the pass, padding included.
        """
        self.worth.seconds.note(rows, seconds)
        for row, draft in drafts.items():
            lengths = self._lengths.get(row, ())[: len(draft)]
            self.worth.note(lengths, used[row] - 1, stopped=row.stop is not None)

    def _continued(
        self, row: Row, behind: tuple[int, ...], room: int
    ) -> tuple[list[int], list[int]]:
        index, drafted, lengths = self._of(row).index, list[int](), list[int]()
        while len(drafted) < min(room, self.most) and (found := index.after(behind)) is not None:
            drafted.append(found[0])
            lengths.append(found[1])
            behind = (*behind[1 - _LONGEST :], found[0])
        return drafted, lengths

    def _of(self, row: Row) -> _TreeText:
        root = row.node.root
        if root not in self._trees:
            self._trees[root] = _TreeText()
        return self._trees[root]
