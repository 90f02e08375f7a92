"""A resumed tree's KV: computed again, by prefill, for the nodes that the search still needs.

A checkpoint holds no KV. What prefill computes differs from what decoding computed in float32's
last bits, so the tree goes on exactly as before in float64 only (DESIGN, "Sameness", layer 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch

from beamwright.kv import Path, PathPart
from beamwright.models import PrefillRequest, TreeModel
from beamwright.protocols import Verifier
from beamwright.runtime.decode import OWNER, GeneratorState
from beamwright.tree import Node, NodeState


@runtime_checkable
class KeepsKV(Protocol):
    """A verifier that keeps KV on the nodes."""

    def restore(self, nodes: Sequence[Node]) -> None:
        """Give these nodes their handles again, parents first; their scores are known."""
        ...


def restore_kv(generator: TreeModel, verifier: Verifier, nodes: Iterable[Node]) -> None:
    """Give the nodes of a rebuilt tree their handles of both owners.

    nodes: those whose KV may be needed, all their ancestors included; decoded ones only.

    Raises:
        CapacityError: if a KV budget cannot hold them; what is in place stays on the nodes.
    """
    needed = sorted(nodes, key=lambda node: (node.depth, node.lineage[1:]))
    for _, level in groupby(needed, key=lambda node: node.depth):
        _restore_level(generator, list(level))
    if isinstance(verifier, KeepsKV):
        verifier.restore(needed)


@torch.inference_mode()
def _restore_level(model: TreeModel, nodes: Sequence[Node]) -> None:
    """Segments of nodes of one depth, and the last hidden state of those that were extended."""
    requests: list[PrefillRequest] = []
    owners: list[Node] = []
    for node in nodes:
        state = GeneratorState(model.store.create(".".join(map(str, node.lineage))))
        node.handles[OWNER] = state  # before anything can fail, so that it is released
        # The last token of a step is forwarded when the step is first extended.
        tokens = node.token_ids if _extended(node) else node.token_ids[:-1]
        if tokens:
            requests.append(PrefillRequest(_path(node), state.segment, tokens, node.start))
            owners.append(node)
    for node, hidden in zip(owners, model.prefill(requests), strict=True):
        if _extended(node):
            node.handles[OWNER].hidden = hidden[-1:].clone()
    model.store.counts.recomputed_tokens += sum(len(each.token_ids) for each in requests)


def _extended(node: Node) -> bool:
    return any(child.state is not NodeState.OPEN for child in node.children)


def _path(node: Node) -> Path:
    """The segments above a node."""
    return tuple(_parts(node.path()[:-1]))


def _parts(nodes: Iterable[Node]) -> Iterator[PathPart]:
    for node in nodes:
        segment = node.handles[OWNER].segment
        yield PathPart(segment, segment.length)
