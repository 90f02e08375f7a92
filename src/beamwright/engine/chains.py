"""The generator's KV of whole paths: what a step, or a resumed tree, owes before it can begin.

A checkpoint holds no KV: a resumed tree's is computed again, by prefill, for the nodes that the
search still needs. What prefill computes differs from what decoding computed in float32's last
bits, so the tree goes on exactly as before in float64 only (docs/concepts/sameness.md, layer
2). Knows which tokens of a path have KV; no random draws, no stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch

from beamwright.counters import Progress
from beamwright.engine.row import (
    OWNER,
    GeneratorState,
    Row,
    is_complete,
    path_to,
    segment_name,
    state_of,
)
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Lease, Segment, whole
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel
from beamwright.plan.costs import CHUNK_TOKENS
from beamwright.protocols import Verifier
from beamwright.tree import Node, NodeState

_PIECE_TOKENS = 4 * CHUNK_TOKENS

Prefill = Callable[[Sequence[PrefillRequest]], Sequence[Any]]
"""Computes and stores the KV of these tokens; returns what each one's last token leads to."""


class Unfinished(Exception):
    """More is owed than is forwarded at a time. nodes: open ones that it is owed for."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nodes = nodes


class Chains:
    """Completes the paths that lead to open nodes."""

    def __init__(self, cache: CacheManager, prefill: Prefill, progress: Progress) -> None:
        self._cache, self._prefill, self._progress = cache, prefill, progress

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
            if not all(map(is_complete, level)):
                raise Unfinished([row.node for row in rows if not is_complete(row.node.parent)])
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
        lease.add(whole({r.segment: 1 for r in requests if not r.segment.length}))
        # All of them or none: whoever had its KV and no hidden state could not be begun again.
        self._cache.reserve(
            {
                request.segment: request.segment.length + len(request.token_ids)
                for request in requests
            }
        )
        return self._prefill(requests)

    def _owed(self, node: Node) -> PrefillRequest:
        """What a node lacks, or the next piece of it; it has a segment afterwards."""
        if OWNER not in node.handles:
            segment = self._cache.create(segment_name(node), node.start)
            node.handles[OWNER] = GeneratorState(segment)
        segment = node.handles[OWNER].segment
        tokens = node.token_ids[segment.length :][:_PIECE_TOKENS]
        if len(tokens) > 1 or node.parent is None:
            node.usage["generator_prefilled"] += len(tokens)
        node.usage["generator_reused"] -= len(tokens)
        return _request(node, segment, tokens)


def _request(node: Node, segment: Segment, tokens: Sequence[int]) -> PrefillRequest:
    """Tokens of a node behind those that its segment holds."""
    return PrefillRequest(path_to(node.parent), segment, tokens, node.start + segment.length)


def _given(row: Row) -> PrefillRequest:
    """Tokens of a row that nobody has decoded for it."""
    tokens = row.tokens[row.segment.length : row.forwarded]
    row.node.usage["generator_prefilled"] += len(tokens)
    return _request(row.node, row.segment, tokens)


def _owing(parents: Iterable[Node]) -> list[list[Node]]:
    """Nodes on the way to these that are not complete; those behind others in later lists."""
    levels: list[list[Node]] = []
    known: dict[Node, int] = {}
    for parent in parents:
        chain: list[Node] = []
        node: Node | None = parent
        while node is not None and node not in known and not is_complete(node):
            chain.append(node)
            node = node.parent
        first = known[node] + 1 if node is not None and node in known else 0
        for level, owing in enumerate(reversed(chain), start=first):
            known[owing] = level
            if level == len(levels):
                levels.append([])
            levels[level].append(owing)
    return levels


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
    if node is None or not is_complete(node):
        raise AssertionError(f"{node!r} is not complete")
    return node.handles[OWNER].hidden


# --- a resumed tree ------------------------------------------------------------------------------


def restore_kv(
    generator: TreeModel | None,
    verifier: Verifier,
    judges: Callable[[Node], bool],
    nodes: Iterable[Node],
    forget: Callable[[], None],
) -> None:
    """Give the nodes of a rebuilt tree their handles of both owners.

    generator: None where its KV is not here. judges: whether the verifier was given a step. nodes:
    those whose KV may be needed, all their ancestors included; decoded ones only. forget: frees
    what nothing to come reads, such as the states of inner nodes once those below have theirs.

    Raises:
        CapacityError: if a KV budget cannot hold them; what is in place stays on the nodes.
    """
    needed = sorted(nodes, key=lambda node: (node.depth, node.lineage[1:]))
    if generator is not None:
        for _, level in groupby(needed, key=lambda node: node.depth):
            _restore_level(generator, list(level))
            forget()
    keeper: Any = verifier if hasattr(verifier, "restore") else None
    if keeper is not None:  # it keeps KV on the nodes, too
        device = keeper.tree_model.decoder.device
        # Kernels are launched on the current device, which is the generator's.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            read = [node for node in needed if node.parent is not None and judges(node)]
            begun = read or needed[0].usage["verifier_prefilled"]
            keeper.restore([*needed[:1], *read] if begun else ())


@torch.inference_mode()
def _restore_level(model: TreeModel, nodes: Sequence[Node]) -> None:
    """Segments of nodes of one depth, and the last hidden states of those that have tokens."""
    for node in nodes:  # before anything can fail, so that it is released
        segment = model.store.create(segment_name(node), node.start)
        node.handles[OWNER] = GeneratorState(segment, extended=_extended(node))
    owners = [node for node in nodes if _stored(node)]
    requests = [_request(node, node.handles[OWNER].segment, _stored(node)) for node in owners]
    for node, hidden in zip(owners, model.prefill(requests), strict=True):
        node.handles[OWNER].hidden = hidden[-1:].clone()
    model.store.counts.recomputed_tokens += sum(len(r.token_ids) for r in requests)


def _stored(node: Node) -> tuple[int, ...]:
    """The tokens that have KV: all, but a turn, and what a reply ended with, get it when the next
    reply begins."""
    waits = node.ended or node.turn is not None
    return () if waits and not _extended(node) else node.token_ids


def _extended(node: Node) -> bool:
    return any(
        child.state is not NodeState.OPEN if child.turn is None else _extended(child)
        for child in node.children
    )
