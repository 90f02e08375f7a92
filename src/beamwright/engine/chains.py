"""KV of whole paths: the tokens that must be forwarded before a step, or a resumed tree, can begin.

A checkpoint holds no KV. The KV of a resumed tree is computed again by prefill, for the nodes that
the search still needs. Prefill and decoding differ in the last bits of float32, so only in float64
does the tree continue exactly as before (docs/concepts/sameness.md, layer 2). This module knows
which tokens of a path have KV, no sampling and no stops.
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

_PIECE_TOKENS = 4 * CHUNK_TOKENS  # most tokens of a node that one prefill forwards

# Function that computes and stores the KV of requests; returns each one's last hidden state.
Prefill = Callable[[Sequence[PrefillRequest]], Sequence[Any]]


class Unfinished(Exception):
    """Signal that a long prompt was forwarded only in part.

    nodes: the open nodes that still wait for it.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nodes = nodes


def complete_paths(
    rows: Sequence[Row], cache: CacheManager, prefill: Prefill, lease: Lease, progress: Progress
) -> list[Segment]:
    """Forward the tokens of the rows' paths that have no KV yet, and return the segments that grew.

    These are prompts, turns, and tokens that a row took over from a sibling. The KV of a reply's
    last step was freed when the reply ended; before a turn it is computed again. Segments that were
    empty join the lease.

    Raises:
        CapacityError: if the KV budget cannot hold them; Unfinished: if only the next piece of a
            long prompt was forwarded. Deadlines are checked between two pieces.
    """

    def forward(requests: Sequence[PrefillRequest]) -> Sequence[Any]:
        lease.add(whole({r.segment: 1 for r in requests if not r.segment.length}))
        # Reserve all or none: a node with KV but no hidden state could not be restarted.
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
        if not state.extended:  # count once, even if its children are decoded in several batches
            node.usage["generator_reused"] += node.end
            state.extended = True
    given = [row for row in rows if row.segment.length < row.forwarded]
    if given:
        forward([_given(row) for row in given])
    return grown


def _request(node: Node, tokens: Sequence[int]) -> PrefillRequest:
    """Return a request to forward tokens of a node after those in its segment."""
    segment = node.handles[OWNER].segment
    return PrefillRequest(path_to(node.parent), segment, tokens, node.start + segment.length)


def _owed(node: Node, cache: CacheManager) -> PrefillRequest:
    """Return a request for the tokens that a node lacks, or the next piece; create its segment."""
    segment = (state_of(node) or begin_state(node, cache)).segment
    tokens = node.token_ids[segment.length :][:_PIECE_TOKENS]
    if len(tokens) > 1 or node.parent is None:
        node.usage["generator_prefilled"] += len(tokens)
    node.usage["generator_reused"] -= len(tokens)
    return _request(node, tokens)


def _given(row: Row) -> PrefillRequest:
    """Return a request for a row's tokens that were taken over, not decoded."""
    tokens = row.tokens[row.segment.length : row.forwarded]
    row.node.usage["generator_prefilled"] += len(tokens)
    return _request(row.node, tokens)


def _owing(parents: Iterable[Node]) -> list[list[Node]]:
    """Return nodes above `parents` whose KV lacks tokens, in levels: ancestors come first."""
    levels: dict[int, dict[Node, None]] = {}
    for parent in parents:
        chain = list(takewhile(lambda node: not is_complete(node), reversed(parent.path())))
        for level, node in enumerate(reversed(chain)):
            levels.setdefault(level, {})[node] = None
    return [list(level) for level in levels.values()]


def is_broken(beam: Node) -> bool:
    """Return True if an ancestor has all its KV but no hidden state, because of an earlier error.

    Computing it again would change the last bits of float32.
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
    """Compute the KV of a resumed tree's nodes for generator and verifier.

    generator: None if it is remote, without KV here.
    judges: returns True if the verifier was given a step.
    nodes: decoded nodes with KV that may be needed, with all their ancestors.
    forget: frees KV that no later row reads, such as inner nodes' states once deeper nodes have
        theirs.

    Raises:
        CapacityError: if a KV budget cannot hold them; KV computed so far stays on the nodes.
    """
    needed = sorted(nodes, key=lambda node: (node.depth, node.lineage[1:]))
    if generator is not None:
        for _, level in groupby(needed, key=lambda node: node.depth):
            _restore_level(generator, list(level))
            forget()
    keeper: Any = verifier if hasattr(verifier, "restore") else None
    if keeper is not None:  # this verifier also keeps KV on the nodes
        device = keeper.tree_model.decoder.device
        # Kernels are launched on the current device, which is the generator's.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            read = [node for node in needed if node.parent is not None and judges(node)]
            begun = read or needed[0].usage["verifier_prefilled"]
            keeper.restore([*needed[:1], *read] if begun else ())


@torch.inference_mode()
def _restore_level(model: TreeModel, nodes: Sequence[Node]) -> None:
    """Compute the segments and last hidden states of nodes at one depth."""
    for node in nodes:  # before anything can fail, so that these segments are freed later
        begin_state(node, model.store).extended = _extended(node)
    owners = [node for node in nodes if _stored(node)]
    requests = [_request(node, _stored(node)) for node in owners]
    for node, hidden in zip(owners, model.prefill(requests), strict=True):
        node.handles[OWNER].hidden = hidden[-1:].clone()
    model.store.counts.recomputed_tokens += sum(len(r.token_ids) for r in requests)


def _stored(node: Node) -> tuple[int, ...]:
    """Return the node's tokens that have KV: all or none.

    A turn, and the last step of an ended reply, get KV only when the next reply begins.
    """
    waits = node.ended or node.turn is not None
    return () if waits and not _extended(node) else node.token_ids


def _extended(node: Node) -> bool:
    return any(
        child.state is not NodeState.OPEN if child.turn is None else _extended(child)
        for child in node.children
    )
