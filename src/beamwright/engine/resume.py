"""A resumed tree's KV: computed again, by prefill, for the nodes that the search still needs.

A checkpoint holds no KV. What prefill computes differs from what decoding computed in float32's
last bits, so the tree goes on exactly as before in float64 only
(docs/architecture.md, "Sameness", layer 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch

from beamwright.engine.row import OWNER, GeneratorState, path_to, segment_name
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.protocols import Verifier
from beamwright.tree import Node, NodeState


def restore_kv(generator: TreeModel | None, verifier: Verifier, nodes: Iterable[Node]) -> None:
    """Give the nodes of a rebuilt tree their handles of both owners.

    generator: None where its KV is not here. nodes: those whose KV may be needed, all their
    ancestors included; decoded ones only.

    Raises:
        CapacityError: if a KV budget cannot hold them; what is in place stays on the nodes.
    """
    needed = sorted(nodes, key=lambda node: (node.depth, node.lineage[1:]))
    if generator is not None:
        for _, level in groupby(needed, key=lambda node: node.depth):
            _restore_level(generator, list(level))
    keeper: Any = verifier if hasattr(verifier, "restore") else None
    if keeper is not None:  # it keeps KV on the nodes, too
        device = keeper.tree_model.decoder.device
        # Kernels are launched on the current device, which is the generator's.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            keeper.restore(needed)


@torch.inference_mode()
def _restore_level(model: TreeModel, nodes: Sequence[Node]) -> None:
    """Segments of nodes of one depth, and the last hidden states of those that have tokens."""
    requests: list[PrefillRequest] = []
    owners: list[Node] = []
    for node in nodes:
        segment = model.store.create(segment_name(node), node.start)
        state = GeneratorState(segment, extended=_extended(node))
        node.handles[OWNER] = state  # before anything can fail, so that it is released
        tokens = _stored(node)
        if tokens:
            requests.append(PrefillRequest(path_to(node.parent), state.segment, tokens, node.start))
            owners.append(node)
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
