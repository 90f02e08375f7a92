"""PathKV: KV of whole paths on the tree, in the verifier's own tokens.

A node's encoding shares the longest common token prefix with its parent's; only the rest is
prefilled, and belongs to the node. Knows tokens and segments; what is read from them is the
verifier's business. search-and-learn re-encodes every path in every round.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import torch

from beamwright.kv.segments import Path, PathPart, Segment, truncate_path
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.tree import Node
from beamwright.verify.encode import common_prefix

OWNER = "verifier"

Requests = Callable[[Node, Sequence[Node]], Iterable[PrefillRequest | None]]
"""From a root and nodes below it to what must be computed for each; handles are put in place."""


def digest(above: bytes, numbers: Sequence[int]) -> bytes:
    """Of what a key stands for, and numbers that follow it."""
    return blake2b(above + array("q", numbers).tobytes(), digest_size=16).digest()


@dataclass
class VerifierState:
    """What a node holds: its path's tokens, its own segment, and the path through the tree.

    key: digest of the path's tokens, cut into its segments, since cuts decide last bits. owed: what
    would fill its segment, where that is put off until somebody reads it.
    """

    token_ids: list[int]
    segment: Segment
    path: Path
    key: bytes
    owed: PrefillRequest | None = None


class PathKV:
    """Owns the `verifier` handles of one model's nodes.

    encode_prefix: from a problem's text to the token ids before the first step.
    """

    def __init__(self, model: TreeModel, encode_prefix: Callable[[str], list[int]]) -> None:
        self.model = model
        self._encode_prefix = encode_prefix

    def begin(self, roots: Iterable[Node]) -> None:
        """Give every root the KV of its problem's prefix, once.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold it.
        """
        new = [root for root in roots if OWNER not in root.handles]
        requests = []
        for root in new:
            token_ids = self._encode_prefix(root.problem_text)
            if len(token_ids) > self.model.decoder.shape.context:
                token_ids = []  # no path of this problem fits: none will be scored
            segment = self.model.store.create()
            path = (PathPart(segment, len(token_ids)),)
            key = digest(b"", [0, *token_ids])
            root.handles[OWNER] = VerifierState(token_ids, segment, path, key)
            if token_ids:
                root.usage["verifier_prefilled"] += len(token_ids)
                requests.append(PrefillRequest((), segment, token_ids, 0, read=()))
        try:
            self.model.prefill(requests)
        except BaseException:
            self.release(new)
            raise

    def num_shared(self, node: Node, token_ids: Sequence[int]) -> int:
        """Tokens that this encoding of a node begins with and its parent's does, too."""
        return common_prefix(self._above(node).token_ids, token_ids)

    def extend(self, node: Node, token_ids: list[int], start: int) -> PrefillRequest | None:
        """Put a node's handle in place; returns what must be prefilled, None for nothing.

        start: tokens that are read from the parent's KV, at most `num_shared`.
        """
        parent = self._above(node)
        path = truncate_path(parent.path, start)
        segment = self.model.store.create(start=start)
        new = token_ids[start:]
        key = digest(parent.key, [start, *new])
        whole = (*path, PathPart(segment, len(new)))
        node.handles[OWNER] = VerifierState(token_ids, segment, whole, key)
        request = PrefillRequest(path, segment, new, start)
        _count(node, request)
        return request if new else None

    def nothing_to_read(self, node: Node) -> None:
        """There is nothing to read: the node is where its parent is."""
        parent = self._above(node)
        segment = self.model.store.create()
        node.handles[OWNER] = VerifierState(parent.token_ids, segment, parent.path, parent.key)

    def put_off(self, node: Node, request: PrefillRequest) -> None:
        """Do not compute what `extend` returned before a node below is."""
        node.handles[OWNER].owed = request
        _count(node, request, -1)

    def catch_up(self, nodes: Iterable[Node]) -> None:
        """Compute what was put off above these nodes, parents first.

        Each part is computed as it would have been, so its KV is the same bits.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold it.
        """
        owing: dict[Node, None] = {}
        for node in nodes:
            while node.parent is not None:
                node = _before(node)  # noqa: PLW2901
                if node.handles[OWNER].owed is not None:
                    owing[node] = None
        for _, same in groupby(sorted(owing, key=lambda node: node.depth), lambda n: n.depth):
            level = list(same)
            requests = [node.handles[OWNER].owed for node in level]
            try:
                self.model.prefill(requests)
            except BaseException:
                for request in requests:
                    self.model.store.clear(request.segment)
                raise
            for node, request in zip(level, requests, strict=True):
                node.handles[OWNER].owed = None
                _count(node, request)

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            state = node.handles.pop(OWNER, None)
            if state is not None:
                self.model.store.free(state.segment)

    @torch.inference_mode()
    def restore(self, nodes: Sequence[Node], extend: Requests) -> None:
        """Give scored nodes of a rebuilt tree their KV again; no score is read.

        nodes: parents come first; all ancestors are among them. Tokens that this costs count as
        recomputed, not as the nodes' own.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold them.
        """
        scored = (node for node in nodes if node.turn is None and node.answers)
        for _, same in groupby(scored, key=lambda node: node.depth):
            level = list(same)
            usages = [node.usage.copy() for node in level]
            self.begin(node for node in level if node.parent is None)
            steps = [node for node in level if node.parent is not None]
            requests: list[PrefillRequest | None] = []
            for root, below in groupby(steps, key=lambda node: node.root):
                requests += extend(root, list(below))
            self.catch_up(steps)
            self.model.prefill([request for request in requests if request is not None])
            for node, usage in zip(level, usages, strict=True):
                spent = node.usage["verifier_prefilled"] - usage["verifier_prefilled"]
                self.model.store.counts.recomputed_tokens += spent
                node.usage = usage

    def _above(self, node: Node) -> VerifierState:
        state: VerifierState | None = _before(node).handles.get(OWNER)
        if state is None:
            raise AssertionError(f"{node!r}: its parent was not scored")
        return state


def _before(node: Node) -> Node:
    """The node whose encoding this one's follows."""
    if node.parent is None:
        raise AssertionError("a root has no parent's encoding")
    # Every reply begins behind the problem: turns and earlier replies are not read.
    return node.parent if node.parent.turn is None else node.root


def _count(node: Node, request: PrefillRequest, sign: int = 1) -> None:
    node.usage["verifier_prefilled"] += sign * len(request.token_ids)
    node.usage["verifier_reused"] += sign * request.start
