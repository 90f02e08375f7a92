"""PrmVerifier: a process reward model whose KV stays on the tree.

A node's encoding shares the longest common token prefix with its parent's; only the rest is
prefilled, and belongs to the node. search-and-learn re-encodes every path in every round (FACTS 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from beamwright.kv import Path, PathPart, Segment, truncate_path
from beamwright.models import LoadedModel, PrefillRequest, TreeModel
from beamwright.tree import Node
from beamwright.verify.aggregate import AGGREGATES
from beamwright.verify.encode import Encoded, PathEncoder, common_prefix
from beamwright.verify.heads import make_head
from beamwright.verify.spec import VerifierSpec

OWNER = "verifier"


@dataclass
class VerifierState:
    """What a node holds: its path's tokens, its own segment, and the path through the tree."""

    token_ids: list[int]
    segment: Segment
    path: Path


class PrmVerifier:
    """Scores steps by a declared format (`VerifierSpec`)."""

    def __init__(self, spec: VerifierSpec, model: LoadedModel, tree_model: TreeModel) -> None:
        if model.codec is None:
            raise ValueError("a verifier needs a tokenizer")
        self.spec = spec
        self.default_aggregate: str = spec.aggregate
        self.probabilities = spec.gives_probabilities
        self.tree_model = tree_model
        self._encoder = PathEncoder(spec, model.codec)
        self._head = make_head(spec, model)
        # A head that looks back needs the hidden state before the first new token.
        self._look_back = 1 if spec.head.looks_back else 0

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step; None for an empty step or one beyond the verifier's context.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the new tokens.
        """
        scores: dict[Node, float | None] = dict.fromkeys(nodes)
        by_root: dict[Node, list[Node]] = {}
        for node in nodes:
            by_root.setdefault(node.root, []).append(node)
        work: list[tuple[Node, Encoded, PrefillRequest]] = []
        self._prefill_prefixes(list(by_root))
        for root, mine in by_root.items():
            encodings = self._encoder.encode(root.problem_text, mine)
            for node, encoded in zip(mine, encodings, strict=True):
                request = self._request(node, encoded)
                if request is not None:
                    work.append((node, encoded, request))
        hidden = self.tree_model.prefill([request for _, _, request in work])
        values = self._read([(e, r) for _, e, r in work], hidden)
        scores.update(zip((node for node, _, _ in work), values, strict=True))
        return [scores[node] for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            state = node.handles.pop(OWNER, None)
            if state is not None:
                self.tree_model.store.free(state.segment)

    def _prefill_prefixes(self, roots: list[Node]) -> None:
        """Give every root the KV of its problem's prefix, once."""
        new = [root for root in roots if OWNER not in root.handles]
        requests = []
        for root in new:
            token_ids = self._encoder.encode_prefix(root.problem_text)
            if len(token_ids) > self.tree_model.decoder.shape.context:
                token_ids = []  # no path of this problem fits: none will be scored
            segment = self.tree_model.store.create()
            root.handles[OWNER] = VerifierState(token_ids, segment, ())
            if token_ids:
                requests.append(PrefillRequest((), segment, token_ids, 0))
        self.tree_model.prefill(requests)
        for root in new:
            state = root.handles[OWNER]
            root.usage["verifier_prefilled"] += state.segment.length
            state.path = (PathPart(state.segment, state.segment.length),)

    def _request(self, node: Node, encoded: Encoded) -> PrefillRequest | None:
        """What must be computed for this node; its handle is in place afterwards."""
        parent = node.parent.handles[OWNER] if node.parent is not None else None
        if parent is None:
            raise AssertionError(f"{node!r}: its parent was not scored")
        shared = common_prefix(parent.token_ids, encoded.token_ids)
        start = max(0, min(shared, len(encoded.token_ids) - 1) - self._look_back)
        path = truncate_path(parent.path, start)
        segment = self.tree_model.store.create()
        state = VerifierState(encoded.token_ids, segment, path)
        node.handles[OWNER] = state
        fits = len(encoded.token_ids) <= self.tree_model.decoder.shape.context
        if not encoded.read_at or not fits:
            # Nothing to read: the node stands where its parent does.
            state.token_ids, state.path = parent.token_ids, parent.path
            return None
        node.usage["verifier_prefilled"] += len(encoded.token_ids) - start
        node.usage["verifier_reused"] += start
        state.path = (*path, PathPart(segment, len(encoded.token_ids) - start))
        return PrefillRequest(path, segment, encoded.token_ids[start:], start)

    def _read(
        self, work: list[tuple[Encoded, PrefillRequest]], hidden: list[torch.Tensor]
    ) -> list[float]:
        """Values of all steps in one pass through the head, combined per step."""
        if not work:
            return []
        device = hidden[0].device
        at: list[int] = []
        first = 0
        for encoded, request in work:
            at.extend(first + index - request.start for index in encoded.read_at)
            first += len(request.token_ids)
        # Whole vector registers: else sigmoid's last elements take another path than the rest.
        at.extend(at[:1] * (-len(at) % 32))
        ids = torch.tensor([t for _, request in work for t in request.token_ids], device=device)
        values = self._head(torch.cat(hidden), ids, torch.tensor(at, device=device)).tolist()
        combine = AGGREGATES[self.spec.combine]
        found: list[float] = []
        first = 0
        for encoded, _ in work:
            count = len(encoded.read_at)
            found.append(combine(values[first : first + count]))
            first += count
        return found

    @torch.inference_mode()
    def restore(self, nodes: Sequence[Node]) -> None:
        """Give scored nodes of a rebuilt tree their KV again; no score is read.

        nodes: parents come first; all ancestors are among them. Tokens that this costs count as
        recomputed, not as the nodes' own.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold them.
        """
        for _, same in groupby(nodes, key=lambda node: node.depth):
            level = list(same)
            usages = [node.usage.copy() for node in level]
            self._restore_level(level)
            for node, usage in zip(level, usages, strict=True):
                spent = node.usage["verifier_prefilled"] - usage["verifier_prefilled"]
                self.tree_model.store.counts.recomputed_tokens += spent
                node.usage = usage

    def _restore_level(self, nodes: list[Node]) -> None:
        roots = [node for node in nodes if node.parent is None]
        steps = [node for node in nodes if node.parent is not None]
        self._prefill_prefixes(roots)
        requests: list[PrefillRequest | None] = []
        for root, mine in groupby(steps, key=lambda node: node.root):
            below = list(mine)
            encodings = self._encoder.encode(root.problem_text, below)
            requests += map(self._request, below, encodings)
        self.tree_model.prefill([request for request in requests if request is not None])
