"""The generator's KV of whole paths: what a step, or a resumed tree, owes before it can begin.

A checkpoint holds no KV: a resumed tree's is computed again, by prefill, for the nodes that the
search still needs. What prefill computes differs from what decoding computed in float32's last
bits, so the tree goes on exactly as before in float64 only (docs/concepts/sameness.md, layer
2). Knows which tokens of a path have KV; no random draws, no stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby, takewhile
from typing import Any

import torch

from beamwright.counters import Progress
from beamwright.engine.row import (
    OWNER,
    GeneratorState,
    Row,
    begin_state,
    is_complete,
    path_to,
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


def complete_paths(
    rows: Sequence[Row], cache: CacheManager, prefill: Prefill, lease: Lease, progress: Progress
) -> list[Segment]:
    """Forward what the rows' paths still owe: prompts and turns, and tokens that were given.

    A reply's last step was cleared when it ended; behind a turn it is computed again.
    Returns the segments that have grown; those that were empty join the lease.

    Raises:
        CapacityError: if the KV budget cannot hold them; Unfinished: where a prompt is long and
            only its next piece was forwarded. Deadlines are heard between two.
    """

    def forward(requests: Sequence[PrefillRequest]) -> Sequence[Any]:
        lease.add(whole({r.segment: 1 for r in requests if not r.segment.length}))
        # All of them or none: whoever had its KV and no hidden state could not be begun again.
        cache.reserve({r.segment: r.segment.length + len(r.token_ids) for r in requests})
        return prefill(requests)

    parents = dict.fromkeys(row.node.parent for row in rows if row.node.parent is not None)
    grown: list[Segment] = []
    for level in _owing(parents):
        requests = [_owed(node, cache) for node in level]
        num_tokens = sum(len(request.token_ids) for request in requests)
        if num_tokens > len(requests):
            progress.doing(f"prefill of {num_tokens:,} tokens")
        for node, hidden in zip(level, forward(requests), strict=True):
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
        forward([_given(row) for row in given])
    return grown


def _request(node: Node, tokens: Sequence[int]) -> PrefillRequest:
    """Tokens of a node behind those that its segment holds."""
    segment = node.handles[OWNER].segment
    return PrefillRequest(path_to(node.parent), segment, tokens, node.start + segment.length)


def _owed(node: Node, cache: CacheManager) -> PrefillRequest:
    """What a node lacks, or the next piece of it; it has a segment afterwards."""
    segment = (state_of(node) or begin_state(node, cache)).segment
    tokens = node.token_ids[segment.length :][:_PIECE_TOKENS]
    if len(tokens) > 1 or node.parent is None:
        node.usage["generator_prefilled"] += len(tokens)
    node.usage["generator_reused"] -= len(tokens)
    return _request(node, tokens)


def _given(row: Row) -> PrefillRequest:
    """Tokens of a row that nobody has decoded for it."""
    tokens = row.tokens[row.segment.length : row.forwarded]
    row.node.usage["generator_prefilled"] += len(tokens)
    return _request(row.node, tokens)


def _owing(parents: Iterable[Node]) -> list[list[Node]]:
    """Nodes on the way to these that are not complete; those behind others in later lists."""
    levels: dict[int, dict[Node, None]] = {}
    for parent in parents:
        chain = list(takewhile(lambda node: not is_complete(node), reversed(parent.path())))
        for level, node in enumerate(reversed(chain)):
            levels.setdefault(level, {})[node] = None
    return [list(level) for level in levels.values()]


def is_broken(beam: Node) -> bool:
    """True if a node above has all its KV and no hidden state: an error came in between.

    To compute it again would change the last bits of float32.
    """
    return any(
        state.hidden is None and state.segment.length == len(node.token_ids)
        for node in beam.path()[:-1]
        if (state := state_of(node)) is not None
    )


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
        begin_state(node, model.store).extended = _extended(node)
    owners = [node for node in nodes if _stored(node)]
    requests = [_request(node, _stored(node)) for node in owners]
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
