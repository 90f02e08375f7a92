"""Drafts for speculative decoding, looked up in the text of the same tree (no draft model).

Paths of a tree repeat each other and their prompt. The tokens that once followed the longest suffix
of a path are likely to follow it again (prompt-lookup decoding, SuffixDecoding). Text that siblings
are generating at this moment predicts best. Measured on the bundled models, about a third to a half
of the drafted tokens are accepted (docs/log/2026-11.md#drafts-from-the-tree).
Drafts change time only: a drafted token is accepted only if the row samples the same token, so the
tree is the same without drafts.
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

# Lengths of the suffixes that are looked up, the longest first.
SUFFIXES = (8, 6, 4, 3, 2)
# Maximum number of indexed tokens of a tree; each takes about half a kilobyte.
MOST_TOKENS = 1 << 16
AUTO_DRAFTS = 8  # maximum number of drafted tokens of a row with `--drafts auto`
_LONGEST = SUFFIXES[0]
_KNEE = 32  # initial guess: the fixed time of a pass equals the time of this many rows
_PRIOR = 64.0  # weight of the guess: as much as a few passes whose sizes differ by 8 rows
_KEPT = 0.95  # factor on earlier measurements after each pass or iteration
# The first 2 iterations use drafts, the next 2 none. Later, every 24th takes the slower choice.
_TRIALS, _TRIED_AGAIN = 2, 24


@dataclass
class _Followers:
    """Counts of the tokens that have followed one suffix.

    best: the most frequent token; of equally frequent ones the latest.
    """

    counts: dict[int, int]
    best: int


class TextIndex:
    """Index from suffixes of texts to the tokens that have followed them.

    Suffixes are identified by hash. If two suffixes share a hash, a draft may be rejected. A
    suffix with a single follower, the usual case, is stored as one number: 2**32 times the count,
    plus the token.
    """

    def __init__(self) -> None:
        self._followers: dict[int, int | _Followers] = {}
        self.num_tokens = 0

    def add(self, before: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
        """Index `tokens`, which follow `before`; return the last eight tokens.

        Only the last eight tokens of `before` matter.
        """
        behind, followers = tuple(before[-_LONGEST:]), self._followers
        for token in tokens:
            self.num_tokens += 1
            for length in SUFFIXES if self.num_tokens <= MOST_TOKENS else ():
                if length <= len(behind):
                    key = hash(behind[-length:])
                    followers[key] = _count_follower(followers.get(key), token)
            behind = (*behind[1 - _LONGEST :], token)
        return behind

    def find_follower(self, behind: Sequence[int]) -> tuple[int, int] | None:
        """Return the most frequent follower of the longest known suffix, and the suffix's length.

        None if no suffix of `behind` is known.
        """
        for length in SUFFIXES:
            if length <= len(behind):
                known = self._followers.get(hash(tuple(behind[-length:])))
                if known is not None:
                    token = known & 0xFFFFFFFF if isinstance(known, int) else known.best
                    return token, length
        return None


def _count_follower(known: int | _Followers | None, token: int) -> int | _Followers:
    """Return a suffix's followers with `token` counted once more."""
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
    """The indexed text of one tree: all paths that rows have decoded or read."""

    def __init__(self) -> None:
        self.index = TextIndex()
        # Per node: the number of its indexed tokens, and the last eight tokens of the path to them.
        self._ends: dict[Lineage, tuple[int, tuple[int, ...]]] = {}

    def index_path(self, row: Row) -> tuple[int, ...]:
        """Index all tokens of a row's path that are missing, and return its last eight tokens."""
        unknown, node = list[Node](), row.node.parent
        while node is not None and self._ends.get(node.lineage, (-1,))[0] != len(node.token_ids):
            unknown.append(node)
            node = node.above
        end = () if node is None else self._ends[node.lineage][1]
        for each in reversed(unknown):
            end = self._index_node(each.lineage, each.token_ids, end)
        return self._index_node(row.node.lineage, row.tokens, end)

    def _index_node(
        self, lineage: Lineage, tokens: Sequence[int], above: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Index a node's new tokens, which follow `above`; return the path's last tokens."""
        count, end = self._ends.get(lineage, (0, above))
        if count > len(tokens):  # the step was restarted
            return (*above, *tokens)[-_LONGEST:]
        if count < len(tokens) or lineage not in self._ends:
            end = self.index.add(end, tokens[count:])
            self._ends[lineage] = len(tokens), end
        return end


# --- whether drafts pay --------------------------------------------------------------------------


class PassSeconds:
    """Linear model of a pass's seconds: a fixed time plus a time per row. Recent passes count most.

    Until passes of different sizes have been measured, the fixed time is taken to be that of 32
    rows.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def record_pass(self, rows: int, seconds: float) -> None:
        """Record the seconds of a pass with `rows` rows, capped at three times the estimate."""
        if self._weight > 1:
            seconds = min(seconds, 3 * self.estimate_s(rows))
        measured = (1.0, rows, seconds, rows * rows, rows * seconds)
        sums = (self._weight, self._rows, self._seconds, self._squares, self._products)
        self._weight, self._rows, self._seconds, self._squares, self._products = (
            _KEPT * old + new for old, new in zip(sums, measured, strict=True)
        )

    def estimate_s(self, rows: int) -> float:
        """Return the estimated seconds of a pass with `rows` rows.

        Before the first measurement the unit is arbitrary.
        """
        if not self._weight:
            return _KNEE + rows
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        usual = mean_s / (_KNEE + mean_rows)
        spread = self._squares - self._weight * mean_rows**2
        slope = (self._products - mean_rows * self._seconds + _PRIOR * usual) / (spread + _PRIOR)
        return max(usual, mean_s + max(0.0, slope) * (rows - mean_rows))


class DraftLengths:
    """Rule that chooses draft lengths, from the chance of acceptance and the time of more rows.

    The chance is measured per length of the suffix that predicted a token.
    """

    def __init__(self) -> None:
        self.seconds = PassSeconds()
        self._drawn, self._tried = Counter[int](), Counter[int]()

    def record_draft(self, lengths: Sequence[int], accepted: int, *, stopped: bool) -> None:
        """Record that the first `accepted` tokens of a draft were accepted.

        lengths: for each drafted token, the length of the suffix that predicted it.
        stopped: True if the row has stopped, so that the next drafted token was not tried.
        """
        for length in lengths[:accepted]:
            self._drawn[length] += 1
        for length in lengths[: accepted + (not stopped)]:
            self._tried[length] += 1

    def chance(self, length: int) -> float:
        """Return the chance that a token predicted by a suffix of `length` is accepted."""
        return (self._drawn[length] + 1) / (self._tried[length] + 2)

    def choose_lengths(
        self,
        drafts: Sequence[Sequence[int]],
        least_rows: int = ROW_MULTIPLE,
    ) -> list[int]:
        """Return for each row the draft length with which a pass yields the most tokens per second.

        drafts: for each row, the suffix length that predicted each drafted token.
        least_rows: the smallest size that passes are padded to. Drafts in place of padding rows
            (`padded_rows`) cost nothing.
        """
        chances = list[tuple[float, int]]()
        for row, lengths in enumerate(drafts):
            all_drawn = accumulate(map(self.chance, lengths), mul)
            chances += [(chance, row) for chance in all_drawn]
        chances.sort(key=lambda each: -each[0])  # chances fall along a row, so its order stays
        num_rows = len(drafts)
        gained = [*accumulate((chance for chance, _ in chances), initial=len(drafts))]
        totals = range(num_rows, num_rows + len(chances) + 1)
        sizes = sorted({padded_rows(total, least_rows) for total in totals})
        takes = [min(len(chances), size - num_rows) for size in sizes]
        rates = [
            gained[n] / self.seconds.estimate_s(size) for n, size in zip(takes, sizes, strict=True)
        ]
        taken = Counter(row for _, row in chances[: takes[rates.index(max(rates))]])
        return [taken[row] for row in range(num_rows)]


class DraftTrials:
    """Rule that decides whether an iteration uses drafts, by measurements for each batch size.

    Iterations with and without drafts are tried twice each. Later, the slower of the two is tried
    again from time to time.
    """

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._spent: dict[tuple[int, bool], tuple[float, float]] = {}

    def uses_drafts(self, num_rows: int) -> bool:
        """Return True if the next iteration of `num_rows` rows uses drafts."""
        size = padded_rows(num_rows).bit_length()
        self._counts[size] += 1
        number = self._counts[size]
        if number <= 2 * _TRIALS:
            return number <= _TRIALS
        pays = self._rate(size, drafted=True) >= self._rate(size, drafted=False)
        return pays is (number % _TRIED_AGAIN != 0)

    def record_iteration(
        self, num_rows: int, tokens: int, seconds: float, *, drafted: bool
    ) -> None:
        """Record the tokens and seconds of an iteration."""
        size = padded_rows(num_rows).bit_length()
        old = self._spent.get((size, drafted), (0.0, 0.0))
        self._spent[size, drafted] = _KEPT * old[0] + tokens, _KEPT * old[1] + seconds

    def _rate(self, size: int, *, drafted: bool) -> float:
        tokens, seconds = self._spent.get((size, drafted), (0.0, 1.0))
        return tokens / seconds


class DraftProposer:
    """Source of drafted tokens for rows of any trees, from each tree's own text.

    most: maximum number of drafted tokens of a row; "auto": as many as pay, and none where
        iterations without drafts are faster.
    """

    def __init__(self, most: int | Literal["auto"]) -> None:
        self._decides = most == "auto"
        self.most = AUTO_DRAFTS if most == "auto" else most
        self.length_rule, self.trials = DraftLengths(), DraftTrials()
        self._trees: WeakKeyDictionary[Node, _TreeText] = WeakKeyDictionary()
        self._lengths: dict[Row, list[int]] = {}

    @contextmanager
    def timed_iteration(self, rows: Sequence[Row]) -> Iterator[DraftProposer | None]:
        """Decide whether an iteration of these rows uses drafts; yield this object, or None if not.

        When the block ends, record the iteration's time, and index its tokens.
        """
        drafted, began = (
            not self._decides or self.trials.uses_drafts(len(rows)),
            time.perf_counter(),
        )
        before = sum(len(row.tokens) for row in rows)
        yield self if drafted else None
        for row in rows:
            self._text_of(row).index_path(row)
        num_tokens, spent_s = sum(len(row.tokens) for row in rows), time.perf_counter() - began
        self.trials.record_iteration(len(rows), num_tokens - before, spent_s, drafted=drafted)

    def propose_drafts(
        self,
        rooms: Mapping[Row, int],
        least_rows: int = ROW_MULTIPLE,
    ) -> dict[Row, list[int]]:
        """Return for each row its drafted tokens.

        rooms: for each row, the maximum number of tokens to draft.
        least_rows: the smallest size that passes are padded to.
        """
        behind = {row: self._text_of(row).index_path(row) for row in rooms}
        drafts, self._lengths = dict[Row, list[int]](), {}
        for row, room in rooms.items():
            drafts[row], self._lengths[row] = self._draft_row(row, behind[row], room)
        if self._decides:
            chosen = self.length_rule.choose_lengths([*self._lengths.values()], least_rows)
            drafts = {
                row: draft[:n] for (row, draft), n in zip(drafts.items(), chosen, strict=True)
            }
        return drafts

    def record_pass(
        self,
        drafts: Mapping[Row, Sequence[int]],
        used: Mapping[Row, int],
        rows: int,
        seconds: float,
    ) -> None:
        """Record how many drafted tokens a pass has accepted, and its seconds.

        used: for each row, the number of tokens it got, with the one that needs no draft.
        rows: rows of the pass, padding included.
        """
        self.length_rule.seconds.record_pass(rows, seconds)
        for row, draft in drafts.items():
            lengths = self._lengths.get(row, ())[: len(draft)]
            self.length_rule.record_draft(lengths, used[row] - 1, stopped=row.stop is not None)

    def _draft_row(
        self, row: Row, behind: tuple[int, ...], room: int
    ) -> tuple[list[int], list[int]]:
        index, drafted, lengths = self._text_of(row).index, list[int](), list[int]()
        while (
            len(drafted) < min(room, self.most)
            and (follower := index.find_follower(behind)) is not None
        ):
            drafted.append(follower[0])
            lengths.append(follower[1])
            behind = (*behind[1 - _LONGEST :], follower[0])
        return drafted, lengths

    def _text_of(self, row: Row) -> _TreeText:
        root = row.node.root
        if root not in self._trees:
            self._trees[root] = _TreeText()
        return self._trees[root]
