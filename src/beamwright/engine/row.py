"""A row: one beam's step while it is written. Knows no tensors and no batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from beamwright.engine.paths import path_to
from beamwright.engine.request import Decoding
from beamwright.engine.sampling import lineage_key
from beamwright.engine.stops import RowLimit
from beamwright.errors import NotFiniteError
from beamwright.kv.segments import Lease, PathPart, Segment, Source
from beamwright.protocols import StepDecoded
from beamwright.tree import Node, StopReason, TopTokens


@dataclass(eq=False)
class Row:
    """A beam's step so far. The last token of `tokens` has no KV yet, until it is forwarded.

    A step that is to be extended stays for one more token than it has, which forwards its last one:
    children begin at once, and what a row computes does not depend on who goes on with it.

    decoding: how its tokens are drawn. limit: the most tokens that the step may have.
    group: of the plan that it came with.
    logprobs, stats, top: one value per token, as in `Node`.
    hidden: final hidden state [1, embed_dim] of its last token, when that is forwarded.
    error: why it cannot go on.
    matched: bytes of the delimiter that the text ends with (`stops.StopState`).
    ending: last bytes of the reply, where a stop string may have begun; None if not known.
    lease: holds what the row reads and writes on the device while it is in the running batch.
    """

    node: Node
    segment: Segment
    decoding: Decoding
    limit: RowLimit
    group: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stats: dict[str, list[float]] = field(default_factory=dict)
    top: list[TopTokens] = field(default_factory=list)
    matched: int = 0
    ending: bytes | None = None
    stop: StopReason | None = None
    hidden: Any = None
    error: NotFiniteError | None = None
    lease: Lease = field(default_factory=lambda: Lease({}))

    @cached_property
    def key(self) -> tuple[int, int]:
        """Of its random stream."""
        return lineage_key(self.decoding.seed, self.node.lineage)

    @property
    def forwarded(self) -> int:
        """Tokens of the step that have KV."""
        return max(0, len(self.tokens) - (self.hidden is None))

    @property
    def done(self) -> bool:
        """True if it has nothing left to do in the running batch."""
        if self.error is not None or self.hidden is not None:
            return True
        return self.stop is not None and self.stop.ends_path

    @property
    def speculative(self) -> bool:
        """True as long as selection has not opened its node."""
        return self.node.speculative

    @property
    def tokens_left(self) -> int:
        """Tokens that the step may still get; at least one while it runs."""
        return max(1, self.limit.tokens - len(self.tokens))

    @property
    def forwards_left(self) -> int:
        """Tokens that may still be forwarded, the last one included; at least one."""
        if self.stop is not None:
            return 1
        return self.tokens_left + (not self.limit.reason.ends_path)

    def needs(self) -> dict[Segment, int]:
        """Device copies that it reads and writes: one of each segment."""
        return {**{part.segment: 1 for part in path_to(self.node.parent)}, self.segment: 1}

    def hold(self) -> None:
        """Pin what it reads and writes; all of it is on the device."""
        self.lease.add(self.needs())

    def let_go(self) -> None:
        """Unpin everything."""
        self.lease.keep({})

    def restart(self) -> None:
        """Forget the step so far; what was decoded is lost."""
        self.node.usage["overrun"] += len(self.tokens)
        self.tokens, self.logprobs, self.stats, self.top, self.matched = [], [], {}, [], 0
        self.ending = self.stop = self.hidden = None

    def reply_ids(self) -> list[int]:
        """Tokens of the reply so far, from its first one on."""
        assert self.node.parent is not None
        return self.node.parent.path_token_ids()[self.node.replies_to.end :] + self.tokens

    def decoded(self, text: str) -> StepDecoded:
        """The step, which is complete."""
        assert self.stop is not None
        stats = {name: tuple(values) for name, values in self.stats.items()}
        tokens, logprobs, top = tuple(self.tokens), tuple(self.logprobs), tuple(self.top)
        return StepDecoded(self.node, tokens, logprobs, self.stop, text, stats, top)

    def remember_source(self) -> None:
        """Note in the segment what its KV was computed from."""
        stored = tuple(self.tokens[: self.segment.length])
        self.segment.source = Source(path_to(self.node.parent), stored, self.node.start)


def parts_read(row: Row) -> tuple[PathPart, ...]:
    """The segments that a row reads, its own step as far as it is stored included."""
    own = (PathPart(row.segment, row.segment.length),) if row.segment.length else ()
    return (*path_to(row.node.parent), *own)


def awaited(rows: Sequence[Row]) -> list[Row]:
    """Those that somebody waits for; all of them where selection has opened none."""
    return [row for row in rows if not row.speculative] or list(rows)


class Rows(Protocol):
    """How the rows of the running batch are computed: with tensors, or on a virtual clock.

    Batch order is the caller's: `admit` gets all rows that stay, in their order.
    """

    @property
    def num_rows(self) -> int:
        """Rows that are computed, those that have left and padding included."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes that are not free but kept for the next rows, less those that only seem free."""
        ...

    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        """Take rows in; those that have no token yet draw their first, and may stop with it.

        Where none joins, the batch is made smaller.
        """
        ...

    def learn_begun(self, row: Row) -> None:
        """A row was given tokens that nobody drew for it: where its stop detection is."""
        ...

    def max_tokens(self, running: Sequence[Row]) -> int:
        """Tokens until a row's newest ones have to be read as stored ones."""
        ...

    def run(self, running: Sequence[Row], max_tokens: int, enough: int) -> int:
        """Compute up to `max_tokens` tokens of every row; returns how many.

        It ends one token after `enough` of the rows that count (`awaited`) have stopped, or when
        those are done. The token behind a row's stop forwards its last one, unless its path has
        ended (`Row.hidden`).
        """
        ...

    def store(self, tokens: Mapping[Row, int]) -> None:
        """Append to each row's segment what is missing of so many tokens' KV."""
        ...

    def text(self, row: Row) -> str:
        """The text of the path up to and with the row's step, from its reply's first token on."""
        ...

    def close(self) -> None:
        """The batch is empty."""
        ...

    def release(self) -> None:
        """Memory has run out: give back all that can be had again."""
        ...
