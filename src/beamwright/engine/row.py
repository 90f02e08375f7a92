"""Rows of the running batch (vLLM: sequences): one step being decoded, its settings and its KV.

It also defines `RowRunner`, the interface between the batch and the model.
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
from beamwright.kv.segments import (
    Lease,
    Path,
    PathPart,
    Segment,
    Source,
    for_all_groups,
    segments_read,
)
from beamwright.models.thinking import ThoughtMarks
from beamwright.protocols import StepDecoded
from beamwright.sections import SamplingSettings, StepSettings
from beamwright.tree import Node, StopReason, TopTokens

# Key of `Node.handles` under which a node's `GeneratorState` is kept.
OWNER = "generator"
_LONGEST_DELIMITER = 256  # bytes

# --- how a tree's steps are sampled, and where they end -------------------------------------------


@dataclass(frozen=True)
class DecodingSettings:
    """Settings that, with the model, the prompt and the lineages, decide a tree's tokens."""

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    step: StepSettings = field(default_factory=StepSettings)
    seed: int = 0


class TreeDecodingSettings:
    """Map from each tree's root to its `DecodingSettings`.

    default: the settings of trees without settings of their own.
    marks: the token sequences that begin and end the model's thoughts; None if the model has no
        thoughts.
    """

    def __init__(self, default: DecodingSettings, marks: ThoughtMarks | None = None) -> None:
        self.default, self.marks = default, marks
        self._by_root: dict[Node, DecodingSettings] = {}

    def set(self, root: Node, decoding: DecodingSettings) -> None:
        """Set the settings of a tree before its first step.

        Raises:
            InputError: if the delimiter is new and has more than 256 bytes. Every sampled token is
                searched for it.
        """
        delimiter, known = decoding.step.delimiter, self.default.step.delimiter
        if delimiter != known and len(delimiter.encode()) > _LONGEST_DELIMITER:
            raise InputError(f"a request's delimiter must have at most {_LONGEST_DELIMITER} bytes")
        self._by_root[root] = decoding

    def of(self, node: Node) -> DecodingSettings:
        """Return the settings of a node's tree."""
        return self._by_root.get(node.root, self.default) if self._by_root else self.default

    def discard(self, node: Node) -> None:
        """Discard the settings of a tree, if `node` is its root."""
        self._by_root.pop(node, None)


class RowLimit(NamedTuple):
    """Maximum number of tokens of a row's step, and the stop reason of a step of that length."""

    tokens: int
    reason: StopReason


# --- KV of a path ---------------------------------------------------------------------------------


@dataclass
class GeneratorState:
    """What the generator keeps for one node: its KV, and hidden states that its children need."""

    segment: Segment
    # Final hidden state [1, hidden] of the node's last token, from which its children sample their
    # first tokens. None while that token is not forwarded: always for a path that has ended; for a
    # prompt or a turn, until the first row below it is admitted.
    hidden: Any = None
    # Final hidden states that the step's tokens were sampled from, in order. Only kept for a
    # verifier that reads them, until the step is scored.
    drawn_from: Sequence[Any] = ()
    row: Row | None = None  # the unfinished step of a node that is being decoded or was preempted
    extended: bool = False  # True once a row below the node was admitted
    path: Path | None = None  # cache of `node_kv_path`, once the node is complete

    @property
    def place(self) -> str | None:
        """Tiers that hold the segment: `device`, `host` or `both`; None if neither does."""
        return self.segment.place


def get_generator_state(node: Node) -> GeneratorState | None:
    """Return the generator's state of a node; None if the node has no segment."""
    state: GeneratorState | None = node.handles.get(OWNER)
    return state


def node_kv_path(node: Node | None) -> Path:
    """Return the KV segments of a path, from the root to `node` itself."""
    if node is None:
        return ()
    state = get_generator_state(node)
    if state is not None and state.path is not None:
        return state.path
    path = node_kv_path(node.above)
    if state is not None and state.segment.length:
        path = (*path, PathPart(state.segment, state.segment.length))
    if state is not None and state.hidden is not None:  # node and ancestors will not change
        state.path = path
    return path


def row_kv_path(node: Node) -> Path:
    """Return the KV segments that attention reads while `node` is decoded, its own included."""
    path, state = node_kv_path(node.parent), get_generator_state(node)
    if state is None or state.row is None or not state.segment.length:
        return path
    return (*path, PathPart(state.segment, state.segment.length, own=True))


def has_all_kv(node: Node | None) -> bool:
    """Return True if all tokens of a node have KV, so that its children can be decoded."""
    state = None if node is None else get_generator_state(node)
    return state is not None and state.hidden is not None


def create_generator_state(node: Node, cache: CacheManager) -> GeneratorState:
    """Create a node's empty segment and its state. The segment is named by the node's lineage."""
    segment = cache.create(".".join(map(str, node.lineage)), node.start)
    state = node.handles[OWNER] = GeneratorState(segment)
    return state


# --- a step ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Row:
    """A step while it is decoded: the counterpart of a sequence in other engines.

    A sampled token has no KV until the next pass forwards it. After the last token of a step that
    may be extended, the row stays for one more pass, which forwards that token. The token's hidden
    state is kept, and children sample their first tokens from it.
    """

    node: Node
    segment: Segment
    decoding: DecodingSettings
    first_limit: RowLimit  # the step's limit, unless `limit_outside_thought` replaces it
    group: int = 0  # number of the group in which the schedule's plan submitted the node
    thought: bool | None = False  # True if the step is in a thought; None until its tokens show it
    # The step's limit if `thought` is None at first, and the tokens show that there is no thought.
    limit_outside_thought: RowLimit | None = None
    tokens: list[int] = field(default_factory=list)
    # Values of each token, as in `Node`.
    logprobs: list[float] = field(default_factory=list)
    stats: dict[str, list[float]] = field(default_factory=dict)
    top: list[TopTokens] = field(default_factory=list)
    stop: StopReason | None = None
    hidden: Any = None  # final hidden state [1, hidden] of the last token, once it is forwarded
    drawn_from: list[Any] = field(default_factory=list)  # as in `GeneratorState`
    error: NotFiniteError | None = None  # reason why the row cannot continue
    # Pins what the row reads and writes on the device while the row is in the running batch.
    lease: Lease = field(default_factory=lambda: Lease({}))

    @cached_property
    def key(self) -> tuple[int, int]:
        """Key of the row's random stream."""
        return lineage_key(self.decoding.seed, self.node.lineage)

    @property
    def forwarded(self) -> int:
        """Number of the step's tokens that have gone through the model, so that their KV exists."""
        return len(self.tokens) - (self.hidden is None) if self.tokens else 0

    @property
    def done(self) -> bool:
        """True if the row needs no further pass and can leave the batch."""
        if self.error is not None or self.hidden is not None:
            return True
        return self.stop is not None and self.stop.ends_path

    @property
    def limit(self) -> RowLimit:
        """The step's length limit. A step that proves to be no thought may have another limit."""
        return (
            self.limit_outside_thought
            if self.limit_outside_thought and self.thought is False
            else self.first_limit
        )

    @property
    def forwards_left(self) -> int:
        """Maximum number of passes that the row still needs, a token each; at least 1."""
        if self.stop is not None or self.thought is None:
            return 1
        tokens_left = max(1, self.limit.tokens - len(self.tokens))
        return tokens_left + (not self.limit.reason.ends_path)

    def usable_tokens(self, count: int) -> int:
        """Return how many tokens of an iteration of `count` tokens may become part of the row.

        While `thought` is None, all of them may: the next token decides the row's limit, but the
        iteration does not end there.
        """
        return count if self.thought is None and not self.stop else min(count, self.forwards_left)

    def needed_segments(self) -> dict[Segment, int]:
        """Return the segments that the row needs on the device, with 1 copy of each.

        These are the segments of the row's path, and its own.
        """
        return {
            **dict.fromkeys(segments_read(row_kv_path(self.node)), 1),
            **for_all_groups({self.segment: 1}),
        }

    def pin_segments(self) -> None:
        """Pin the segments that the row reads and writes. They must all be on the device."""
        self.lease.add(self.needed_segments())

    def unpin_segments(self) -> None:
        """Unpin the row's segments, which may then be evicted."""
        self.lease.keep_only({})

    def restart(self) -> None:
        """Discard the step's tokens so far, and count them as wasted (`Node.usage`)."""
        self.node.usage["overrun"] += len(self.tokens)
        self.tokens, self.logprobs, self.stats, self.top = [], [], {}, []
        self.drawn_from = []
        self.stop = self.hidden = None
        if self.limit_outside_thought is not None:
            self.thought = None

    def append_tokens(self, tokens: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Append sampled tokens with their values (log-probabilities and statistics).

        Stop before the first token with a log-probability that is not finite, and set `error`
        there.
        """
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
        """Return all token ids of the reply so far."""
        assert self.node.parent is not None
        return self.node.parent.path_token_ids()[self.node.replies_to.end :] + self.tokens

    def make_event(self, text: str) -> StepDecoded:
        """Make the event of the decoded step. text: the whole reply, this step included."""
        assert self.stop is not None
        stats = {name: tuple(values) for name, values in self.stats.items()}
        tokens, logprobs, top = tuple(self.tokens), tuple(self.logprobs), tuple(self.top)
        thought = bool(self.thought)
        return StepDecoded(self.node, tokens, logprobs, self.stop, text, stats, top, thought)

    def record_source(self) -> None:
        """Record which tokens the segment's KV was computed from, in case it is evicted.

        A dropped segment is then computed again by prefill.
        """
        stored = tuple(self.tokens[: self.segment.length])
        self.segment.source = Source(node_kv_path(self.node.parent), stored, self.node.start)


def filter_open_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of nodes that selection has opened; all rows if every node is speculative.

    Only these rows decide when an iteration ends, because no round waits for speculative rows.
    """
    return [row for row in rows if not row.node.speculative] or list(rows)


class IterationWork(NamedTuple):
    """What one iteration computed: its number of passes, and their rows in total, with padding."""

    passes: int
    rows: int


class RowRunner(Protocol):
    """Interface of the part that computes the batch: a model, or the lab's simulator.

    The caller decides the order of the rows: `admit` receives all rows that stay, in order.
    """

    @property
    def num_rows(self) -> int:
        """Number of rows that a pass computes, including padding and rows that have left."""

    @property
    def held_bytes(self) -> int:
        """Bytes reserved for later rows, minus bytes that the device wrongly reports as free."""

    def admit(self, staying: Sequence[Row], joining: Sequence[Row]) -> None:
        """Rebuild the batch from the rows that stay and the rows that join.

        A joining row without tokens samples its first token, which may already stop it.
        """

    def max_tokens(self, running: Sequence[Row]) -> int:
        """Return how many tokens each row can decode before its tail is full.

        A tail holds a row's newest KV. The KV of a full tail moves to the row's segment.
        """

    def run(
        self, running: Sequence[Row], max_tokens: int, enough: int, *, goes_on: bool = False
    ) -> IterationWork:
        """Decode up to `max_tokens` tokens of every row.

        The iteration ends one token after `enough` open rows (`filter_open_rows`) have stopped, or
        when all open rows are done. The pass after a row's last token forwards that token and sets
        `Row.hidden`, unless the path has ended.

        goes_on: True if no row waits to join, so that the next iteration's first pass may be
            launched before this iteration's results are read.
        """

    def store(self, tokens: Mapping[Row, int]) -> None:
        """Copy KV from tails until each row's segment holds the first `tokens[row]` tokens."""

    def reply_text(self, row: Row) -> str:
        """Return the text of the whole reply so far, the row's step included."""

    def close(self) -> None:
        """Remove all rows from the batch. Memory may be kept for later rows."""

    def release(self) -> None:
        """Remove all rows and free all their memory, because memory has run out."""
