"""Prefill of missing KV: prompts and turns before a step is decoded, and trees that are resumed.

A checkpoint holds no KV. The KV of a resumed tree is computed again by prefill, for the nodes that
the search still needs. Prefill and decoding differ in the last bits of float32, so only in float64
does the tree continue exactly as before (docs/concepts/sameness.md, layer 2).
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
    create_generator_state,
    get_generator_state,
    has_all_kv,
    node_kv_path,
)
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Lease, Segment, for_all_groups
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel
from beamwright.plan.costs import CHUNK_TOKENS
from beamwright.protocols import Verifier
from beamwright.tree import Node, NodeState

_PIECE_TOKENS = 4 * CHUNK_TOKENS  # maximum number of a node's tokens that one prefill forwards

# Computes and stores the KV of each request. Returns the last hidden state [1, hidden] of each.
Prefill = Callable[[Sequence[PrefillRequest]], Sequence[Any]]


class PrefillUnfinished(Exception):
    """Signal that one piece of a long prompt was prefilled, and that more pieces are left.

    nodes: the open nodes whose step cannot begin before the prompt is complete.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.nodes = nodes


def prefill_paths(
    rows: Sequence[Row], cache: CacheManager, prefill: Prefill, lease: Lease, progress: Progress
) -> list[Segment]:
    """Prefill all tokens of the rows' paths that have no KV yet; return the segments that grew.

    Such tokens are prompts, turns, and tokens that a row copied from a sibling. The KV of a reply's
    last step was freed when the reply ended; before a turn that KV is computed again.

    lease: pins segments on the device; segments that were empty are added to it.

    Raises:
        CapacityError: if the KV budget is too small.
        PrefillUnfinished: after one piece of a long prompt, so that the caller can check deadlines.
    """

    def forward(requests: Sequence[PrefillRequest]) -> Sequence[Any]:
        lease.add(for_all_groups({r.segment: 1 for r in requests if not r.segment.length}))
        # Reserve all or none: a node with KV but no hidden state could not be restarted.
        cache.reserve({r.segment: r.segment.length + len(r.token_ids) for r in requests})
        return prefill(requests)

    parents = dict.fromkeys(row.node.parent for row in rows if row.node.parent is not None)
    grown: list[Segment] = []
    for level in _nodes_without_kv(parents):
        requests = [_request_missing(node, cache) for node in level]
        num_tokens = sum(len(request.token_ids) for request in requests)
        if num_tokens > len(requests):
            progress.doing(f"prefill of {num_tokens:,} tokens")
        for node, hidden in zip(level, forward(requests), strict=True):
            if node.handles[OWNER].segment.length == len(node.token_ids):
                node.handles[OWNER].hidden = hidden
        if not all(map(has_all_kv, level)):
            raise PrefillUnfinished([row.node for row in rows if not has_all_kv(row.node.parent)])
        grown += [request.segment for request in requests]
    for node in parents:
        state: GeneratorState = node.handles[OWNER]
        if not state.extended:  # count a node once, even if its children join in several batches
            node.usage["generator_reused"] += node.end
            state.extended = True
    given = [row for row in rows if row.segment.length < row.forwarded]
    if given:
        forward([_request_copied(row) for row in given])
    return grown


def _make_request(node: Node, tokens: Sequence[int]) -> PrefillRequest:
    """Return a request to prefill these tokens of a node, after those that have KV."""
    segment = node.handles[OWNER].segment
    return PrefillRequest(node_kv_path(node.above), segment, tokens, node.start + segment.length)


def _request_missing(node: Node, cache: CacheManager) -> PrefillRequest:
    """Return a request to prefill a node's tokens that lack KV, or the next piece of them.

    Create the node's segment if it has none.
    """
    segment = (get_generator_state(node) or create_generator_state(node, cache)).segment
    tokens = node.token_ids[segment.length :][:_PIECE_TOKENS]
    if len(tokens) > 1 or node.parent is None:
        node.usage["generator_prefilled"] += len(tokens)
    node.usage["generator_reused"] -= len(tokens)
    return _make_request(node, tokens)


def _request_copied(row: Row) -> PrefillRequest:
    """Return a request to prefill a row's tokens that were copied from a sibling, not decoded."""
    tokens = row.tokens[row.segment.length : row.forwarded]
    row.node.usage["generator_prefilled"] += len(tokens)
    return _make_request(row.node, tokens)


def _nodes_without_kv(parents: Iterable[Node]) -> list[list[Node]]:
    """Return `parents` and ancestors that lack KV, as one list per level, ancestors first."""
    levels: dict[int, dict[Node, None]] = {}
    for parent in parents:
        chain = list(takewhile(lambda node: not has_all_kv(node), reversed(parent.context())))
        for level, node in enumerate(reversed(chain)):
            levels.setdefault(level, {})[node] = None
    return [list(level) for level in levels.values()]


def has_broken_ancestor(beam: Node) -> bool:
    """Return True if an ancestor has all its KV but lost its hidden state in an earlier error.

    Such a path cannot continue: prefill would restore the state, but with other last bits.
    """
    return any(
        state.hidden is None and state.segment.length == len(node.token_ids)
        for node in beam.context()[:-1]
        if (state := get_generator_state(node)) is not None
    )


# --- a resumed tree ------------------------------------------------------------------------------


def restore_kv(
    generator: TreeModel | None,
    verifier: Verifier,
    judges: Callable[[Node], bool],
    nodes: Iterable[Node],
    free_unread: Callable[[], None],
) -> None:
    """Prefill the KV of a resumed tree's nodes, for the generator and for the verifier.

    generator: the generator's model; None if the generator is remote and has no KV here.
    judges: returns True if a node was given to the verifier.
    nodes: decoded nodes whose KV may be needed, with all their ancestors.
    free_unread: frees KV that no later row reads; called after each level.

    Raises:
        CapacityError: if a KV budget cannot hold them; KV computed so far stays on the nodes.
    """
    needed = sorted(nodes, key=lambda node: (node.depth, node.lineage[1:]))
    if generator is not None:
        for _, level in groupby(needed, key=lambda node: node.depth):
            _restore_level(generator, list(level))
            free_unread()
    keeper: Any = verifier if hasattr(verifier, "restore") else None
    if keeper is not None:  # the verifier is a model with KV of its own
        device = keeper.tree_model.decoder.device
        # Kernels are launched on the current device, which is the generator's.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            read = [node for node in needed if node.parent is not None and judges(node)]
            begun = read or needed[0].usage["verifier_prefilled"]
            keeper.restore([*needed[:1], *read] if begun else ())


@torch.inference_mode()
def _restore_level(model: TreeModel, nodes: Sequence[Node]) -> None:
    """Prefill the generator's KV and last hidden states of all nodes at one depth."""
    for node in nodes:  # before anything can fail, so that these segments are freed later
        create_generator_state(node, model.store).extended = _has_decoded_child(node)
    owners = [node for node in nodes if _tokens_to_store(node)]
    requests = [_make_request(node, _tokens_to_store(node)) for node in owners]
    for node, hidden in zip(owners, model.prefill(requests), strict=True):
        node.handles[OWNER].hidden = hidden[-1:].clone()
    model.store.counts.recomputed_tokens += sum(len(r.token_ids) for r in requests)


def _tokens_to_store(node: Node) -> tuple[int, ...]:
    """Return the tokens of a node to prefill when its tree is resumed: all or none.

    A turn, and the last step of an ended reply, get KV only when the next reply begins.
    """
    waits = node.ended or node.turn is not None
    return () if waits and not _has_decoded_child(node) else node.token_ids


def _has_decoded_child(node: Node) -> bool:
    return any(
        child.state is not NodeState.OPEN if child.turn is None else _has_decoded_child(child)
        for child in node.children
    )
