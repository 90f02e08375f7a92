"""A row: one beam's step while it is written, how it is drawn, the KV of its path.

Knows nodes, segments and settings; no text, no tensors, no batch, no other row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from beamwright.engine.noise import lineage_key
from beamwright.errors import InputError, NotFiniteError
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Lease, Path, PathPart, Segment, Source, segments_read, whole
from beamwright.models.thinking import ThoughtMarks
from beamwright.protocols import StepDecoded
from beamwright.sections import SamplingSettings, StepSettings
from beamwright.tree import Node, StopReason, TopTokens

OWNER = "generator"
"""What a node's handle of the generator is kept under: a `GeneratorState`."""
_LONGEST_DELIMITER = 256

# --- how a tree's steps are drawn, and where they end ---------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """What a tree's tokens depend on beside the model, the prompt and the lineage."""

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    step: StepSettings = field(default_factory=StepSettings)
    seed: int = 0


class Decodings:
    """Each tree's; `default` for those without one of their own. marks: of the model's thoughts."""

    def __init__(self, default: Decoding, marks: ThoughtMarks | None = None) -> None:
        self.default, self.marks = default, marks
        self._by_root: dict[Node, Decoding] = {}

    def set(self, root: Node, decoding: Decoding) -> None:
        """Decode the tree of this root so, from its first step on.

        Raises:
            InputError: for a delimiter that is too long to be looked for behind every token.
        """
        delimiter, known = decoding.step.delimiter, self.default.step.delimiter
        if delimiter != known and len(delimiter.encode()) > _LONGEST_DELIMITER:
            raise InputError(f"a request's delimiter has at most {_LONGEST_DELIMITER} bytes")
        self._by_root[root] = decoding

    def of(self, node: Node) -> Decoding:
        """How this node's tree is decoded."""
        return self._by_root.get(node.root, self.default) if self._by_root else self.default

    def forget(self, node: Node) -> None:
        """The tree of this node is over, if the node is its root."""
        self._by_root.pop(node, None)


class RowLimit(NamedTuple):
    """The most tokens a row's step may have, and what stops it there."""

    tokens: int
    reason: StopReason


# --- KV of a path ---------------------------------------------------------------------------------


@dataclass
class GeneratorState:
    """What a node holds: its segment, and the final hidden state [1, hidden] of its last token.

    hidden: None where that token is not forwarded: of a path that has ended, and of a prompt or a
    turn until the first row behind it is admitted.
    drawn_from: where a verifier reads them, the final hidden states [some, hidden] that the step's
    tokens were drawn from, one after another; until they are scored.
    row: the step so far, of a node that is being decoded or was preempted.
    extended: a row behind it has been admitted.
    path: to it and with it, once it is complete; see `path_to`.
    """

    segment: Segment
    hidden: Any = None
    drawn_from: Sequence[Any] = ()
    row: Row | None = None
    extended: bool = False
    path: Path | None = None

    @property
    def place(self) -> str | None:
        """Where the segment is: `device`, `host` or `both`."""
        return self.segment.place


def state_of(node: Node) -> GeneratorState | None:
    """What a node holds; None where nothing of it is stored or under way."""
    state: GeneratorState | None = node.handles.get(OWNER)
    return state


def path_to(node: Node | None) -> Path:
    """The segments from the root to a node, itself included, as far as they hold anything."""
    if node is None:
        return ()
    state = state_of(node)
    if state is not None and state.path is not None:
        return state.path
    path = path_to(node.parent)
    if state is not None and state.segment.length:
        path = (*path, PathPart(state.segment, state.segment.length))
    if state is not None and state.hidden is not None:  # complete, and so is all above it
        state.path = path
    return path


def path_read(node: Node) -> Path:
    """The segments that a node's step reads, its own as far as it is stored included."""
    path, state = path_to(node.parent), state_of(node)
    if state is None or state.row is None or not state.segment.length:
        return path
    return (*path, PathPart(state.segment, state.segment.length, own=True))


def is_complete(node: Node | None) -> bool:
    """True if a node's last token is forwarded, so that children can begin."""
    state = None if node is None else state_of(node)
    return state is not None and state.hidden is not None


def begin_state(node: Node, cache: CacheManager) -> GeneratorState:
    """Give a node a segment, which timelines call by its lineage."""
    segment = cache.create(".".join(map(str, node.lineage)), node.start)
    state = node.handles[OWNER] = GeneratorState(segment)
    return state


# --- a step ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Row:
    """A beam's step so far. The last token of `tokens` has no KV yet, until it is forwarded.

    A step that is to be extended stays for one more token than it has, which forwards its last one:
    children begin at once, and what a row computes does not depend on who goes on with it.

    decoding: how its tokens are drawn. first_limit: the most tokens that the step may have,
    unless it is found to be of no thought. group: of the plan that it came with.
    thought: it is of a thought; None as long as that is open, and then `otherwise` is the limit
    that it has if it is none.
    logprobs, stats, top: one value per token, as in `Node`.
    hidden: final hidden state [1, hidden] of its last token, when that is forwarded.
    drawn_from: as in `GeneratorState`.
    error: why it cannot go on.
    lease: holds what the row reads and writes on the device while it is in the running batch.
    """

    node: Node
    segment: Segment
    decoding: Decoding
    first_limit: RowLimit
    group: int = 0
    thought: bool | None = False
    otherwise: RowLimit | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stats: dict[str, list[float]] = field(default_factory=dict)
    top: list[TopTokens] = field(default_factory=list)
    stop: StopReason | None = None
    hidden: Any = None
    drawn_from: list[Any] = field(default_factory=list)
    error: NotFiniteError | None = None
    lease: Lease = field(default_factory=lambda: Lease({}))

    @cached_property
    def key(self) -> tuple[int, int]:
        """Of its random stream."""
        return lineage_key(self.decoding.seed, self.node.lineage)

    @property
    def forwarded(self) -> int:
        """Tokens of the step that have KV."""
        return len(self.tokens) - (self.hidden is None) if self.tokens else 0

    @property
    def done(self) -> bool:
        """True if it has nothing left to do in the running batch."""
        if self.error is not None or self.hidden is not None:
            return True
        return self.stop is not None and self.stop.ends_path

    @property
    def limit(self) -> RowLimit:
        """The most tokens that the step may have, as far as is known what it is of."""
        return self.otherwise if self.otherwise and self.thought is False else self.first_limit

    @property
    def forwards_left(self) -> int:
        """Tokens that may still be forwarded, the last one included; at least one."""
        if self.stop is not None or self.thought is None:
            return 1
        tokens_left = max(1, self.limit.tokens - len(self.tokens))
        return tokens_left + (not self.limit.reason.ends_path)

    def forwards_of(self, count: int) -> int:
        """Of an iteration of `count` tokens, those that it may keep. How a row with an open thought
        ends is known behind its next token, but others' iterations go on."""
        return count if self.thought is None and not self.stop else min(count, self.forwards_left)

    def needs(self) -> dict[Segment, int]:
        """Device copies that it reads and writes: one of each segment."""
        return {**dict.fromkeys(segments_read(path_read(self.node)), 1), **whole({self.segment: 1})}

    def hold(self) -> None:
        """Pin what it reads and writes; all of it is on the device."""
        self.lease.add(self.needs())

    def let_go(self) -> None:
        """Unpin everything."""
        self.lease.keep({})

    def restart(self) -> None:
        """Forget the step so far; what was decoded is lost."""
        self.node.usage["overrun"] += len(self.tokens)
        self.tokens, self.logprobs, self.stats, self.top = [], [], {}, []
        self.drawn_from = []
        self.stop = self.hidden = None
        if self.otherwise is not None:
            self.thought = None

    def add(self, tokens: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Take in tokens, and what is known of each; not behind one without a distribution."""
        count = len(tokens)
        logprobs = values["logprobs"][:count]
        if not math.isfinite(sum(logprobs)):
            count = [*map(math.isfinite, logprobs)].index(False)
            at = f"step {self.node.depth}, token {len(self.tokens) + count + 1}"
            self.error = NotFiniteError(
                f"the generator's logits are NaN or infinite: problem {self.node.problem_id}, {at} "
                "(a damaged checkpoint, or an overflow: try another --dtype)"
            )
        self.tokens += tokens[:count]
        for name, numbers in values.items():
            kept = self.logprobs if name == "logprobs" else self.stats.setdefault(name, [])
            kept += numbers[:count]

    def reply_ids(self) -> list[int]:
        """Tokens of the reply so far, from its first one on."""
        assert self.node.parent is not None
        return self.node.parent.path_token_ids()[self.node.replies_to.end :] + self.tokens

    def decoded(self, text: str) -> StepDecoded:
        """The step, which is complete."""
        assert self.stop is not None
        stats = {name: tuple(values) for name, values in self.stats.items()}
        tokens, logprobs, top = tuple(self.tokens), tuple(self.logprobs), tuple(self.top)
        thought = bool(self.thought)
        return StepDecoded(self.node, tokens, logprobs, self.stop, text, stats, top, thought)

    def remember_source(self) -> None:
        """Note in the segment what its KV was computed from."""
        stored = tuple(self.tokens[: self.segment.length])
        self.segment.source = Source(path_to(self.node.parent), stored, self.node.start)


def awaited(rows: Sequence[Row]) -> list[Row]:
    """Those that somebody waits for; all of them where selection has opened none."""
    return [row for row in rows if not row.node.speculative] or list(rows)


class Ran(NamedTuple):
    """What an iteration has computed: forward passes, and rows of all of them, with padding."""

    passes: int
    rows: int


class Rows(Protocol):
    """How the rows of the running batch are computed: with tensors, or on a virtual clock.

    Batch order is the caller's: `admit` gets all rows that stay, in their order.
    """

    @property
    def num_rows(self) -> int:
        """Rows that are computed, those that have left and padding included."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are not free but kept for the next rows, less those that only seem free."""

    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        """Take rows in; those that have no token yet draw their first, and may stop with it.

        Where none joins, the batch is made smaller.
        """

    def max_tokens(self, running: Sequence[Row]) -> int:
        """Tokens until a row's newest ones have to be read as stored ones."""

    def run(
        self, running: Sequence[Row], max_tokens: int, enough: int, *, goes_on: bool = False
    ) -> Ran:
        """Compute up to `max_tokens` tokens of every row.

        goes_on: nobody waits to join these, so that one token more may be begun ahead.

        It ends one token after `enough` of the rows that count (`awaited`) have stopped, or when
        those are done. The token behind a row's stop forwards its last one, unless its path has
        ended (`Row.hidden`).
        """

    def store(self, tokens: Mapping[Row, int]) -> None:
        """Append to each row's segment what is missing of so many tokens' KV."""

    def text(self, row: Row) -> str:
        """The text of the path up to and with the row's step, from its reply's first token on."""

    def close(self) -> None:
        """The batch is empty."""

    def release(self) -> None:
        """Memory has run out: give back all that can be had again."""
