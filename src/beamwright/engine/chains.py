"""The generator's KV of whole paths: what is still owed before a step can begin.

Knows which tokens of a path have KV; no tensors, no random draws, no stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from beamwright.counters import Progress
from beamwright.engine.row import OWNER, GeneratorState, Row, path_to, segment_name, state_of
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Lease, Segment
from beamwright.models.tree_model import PREFILL_CHUNK_TOKENS, PrefillRequest
from beamwright.tree import Node

_PIECE_TOKENS = 4 * PREFILL_CHUNK_TOKENS

Prefill = Callable[[Sequence[PrefillRequest]], Sequence[Any]]
"""Computes and stores the KV of these tokens; returns what each one's last token leads to."""


class Unfinished(Exception):
    """More is owed than is forwarded at a time. nodes: open ones that it is owed for."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nodes = nodes


class Chains:
    """Completes the paths that lead to open nodes."""

    def __init__(self, residency: CacheManager, prefill: Prefill, progress: Progress) -> None:
        self._residency, self._prefill, self._progress = residency, prefill, progress

    def complete(self, rows: Sequence[Row], lease: Lease) -> list[Segment]:
        """Forward what the rows' paths still owe: prompts and turns, and tokens that were given.

        A reply's last step was cleared when it ended; behind a turn it is computed again.
        Returns the segments that have grown; those that were empty join the lease.

        Raises:
            CapacityError: if the KV budget cannot hold them; Unfinished: where a prompt is long and
                only its next piece was forwarded. Deadlines are heard between two.
        """
        parents = dict.fromkeys(row.node.parent for row in rows if row.node.parent is not None)
        grown: list[Segment] = []
        for level in _owing(parents):
            requests = [self._owed(node) for node in level]
            num_tokens = sum(len(request.token_ids) for request in requests)
            if num_tokens > len(requests):
                self._progress.doing(f"prefill of {num_tokens:,} tokens")
            for node, hidden in zip(level, self._forward(requests, lease), strict=True):
                if node.handles[OWNER].segment.length == len(node.token_ids):
                    node.handles[OWNER].hidden = hidden
            if not all(map(_is_complete, level)):
                raise Unfinished([row.node for row in rows if not _is_complete(row.node.parent)])
            grown += [request.segment for request in requests]
        for node in parents:
            state: GeneratorState = node.handles[OWNER]
            if not state.extended:  # once, in however many batches its children are decoded
                node.usage["generator_reused"] += node.end
                state.extended = True
        given = [row for row in rows if row.segment.length < row.forwarded]
        if given:
            self._forward([_given(row) for row in given], lease)
        return grown

    def _forward(self, requests: Sequence[PrefillRequest], lease: Lease) -> Sequence[Any]:
        lease.add({request.segment: 1 for request in requests if not request.segment.length})
        # All of them or none: whoever had its KV and no hidden state could not be begun again.
        self._residency.reserve(
            {
                request.segment: request.segment.length + len(request.token_ids)
                for request in requests
            }
        )
        return self._prefill(requests)

    def _owed(self, node: Node) -> PrefillRequest:
        """What a node lacks, or the next piece of it; it has a segment afterwards."""
        if OWNER not in node.handles:
            segment = self._residency.create(segment_name(node), node.start)
            node.handles[OWNER] = GeneratorState(segment)
        segment = node.handles[OWNER].segment
        tokens = node.token_ids[segment.length :][:_PIECE_TOKENS]
        if len(tokens) > 1 or node.parent is None:
            node.usage["generator_prefilled"] += len(tokens)
        node.usage["generator_reused"] -= len(tokens)
        start = node.start + segment.length
        return PrefillRequest(path_to(node.parent), segment, tokens, start)


def _given(row: Row) -> PrefillRequest:
    """Tokens of a row that nobody has decoded for it."""
    stored = row.segment.length
    tokens = tuple(row.tokens[stored : row.forwarded])
    row.node.usage["generator_prefilled"] += len(tokens)
    return PrefillRequest(path_to(row.node.parent), row.segment, tokens, row.node.start + stored)


def _owing(parents: Iterable[Node]) -> list[list[Node]]:
    """Nodes on the way to these that are not complete; those behind others in later lists."""
    levels: list[list[Node]] = []
    known: dict[Node, int] = {}
    for parent in parents:
        chain: list[Node] = []
        node: Node | None = parent
        while node is not None and node not in known and not _is_complete(node):
            chain.append(node)
            node = node.parent
        first = known[node] + 1 if node is not None and node in known else 0
        for level, owing in enumerate(reversed(chain), start=first):
            known[owing] = level
            if level == len(levels):
                levels.append([])
            levels[level].append(owing)
    return levels


def _is_complete(node: Node | None) -> bool:
    """True if a node's last token is forwarded, so that children can begin."""
    state = None if node is None else state_of(node)
    return state is not None and state.hidden is not None


def is_broken(beam: Node) -> bool:
    """True if a node above has all its KV and no hidden state: an error came in between.

    To compute it again would change the last bits of float32.
    """
    return any(
        state.hidden is None and state.segment.length == len(node.token_ids)
        for node in beam.path()[:-1]
        if (state := state_of(node)) is not None
    )


def last_hidden(node: Node | None) -> Any:
    """What a node's children begin with, see `GeneratorState`; the node is complete."""
    if node is None or not _is_complete(node):
        raise AssertionError(f"{node!r} is not complete")
    return node.handles[OWNER].hidden
