"""PrmVerifier: a process reward model whose KV stays on the tree.

What a node's encoding shares with its parent's is not computed again (`path_kv`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from beamwright.errors import InputError
from beamwright.models.load import LoadedModel
from beamwright.models.tree_model import PrefillRequest, TreeModel
from beamwright.tree import Node, by_root
from beamwright.verify.encode import Encoded, PathEncoder
from beamwright.verify.heads import make_head
from beamwright.verify.path_kv import OWNER, PathKV, digest
from beamwright.verify.spec import AGGREGATES, VerifierSpec


class PrmVerifier:
    """Scores steps by a declared format (`VerifierSpec`)."""

    beside_decoding = True

    def __init__(self, spec: VerifierSpec, model: LoadedModel, tree_model: TreeModel) -> None:
        if model.codec is None:
            raise ValueError("a verifier needs a tokenizer")
        self.spec, self.model = spec, model
        self.name = spec.name if model.folder is None else str(model.folder)
        self.default_aggregate: str = spec.aggregate
        self.probabilities = spec.gives_probabilities
        self.tree_model = tree_model
        self._encoder = PathEncoder(spec, model.codec)
        self._kv = PathKV(tree_model, self._encoder.encode_prefix)
        self._head = make_head(spec, model)
        # A head that looks back needs the hidden state before the first new token.
        self._look_back = 1 if spec.head.looks_back else 0

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step; None for an empty step or one beyond the verifier's context.

        Steps that repeat what another of this call says are computed once. Their KV is computed
        when a step below them is.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the new tokens.
        """
        keys: dict[Node, bytes] = {}
        work: dict[bytes, tuple[Node, Encoded, PrefillRequest]] = {}
        trees = by_root(nodes)
        self._kv.begin(trees)
        for root, below in trees.items():
            encodings = self._encoder.encode(root.problem_text, below)
            for node, encoded in zip(below, encodings, strict=True):
                request = self._request(node, encoded)
                if request is None:
                    continue
                key = keys[node] = digest(node.handles[OWNER].key, encoded.read_at)
                if key in work:
                    self._kv.put_off(node, request)
                else:
                    work[key] = (node, encoded, request)
        self._kv.catch_up(node for node, _, _ in work.values())
        hidden = self.tree_model.prefill([request for _, _, request in work.values()])
        values = self._read([(e, r) for _, e, r in work.values()], hidden)
        scores = dict(zip(work, values, strict=True))
        return [scores[keys[node]] if node in keys else None for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        self._kv.release(nodes)

    def restore(self, nodes: Sequence[Node]) -> None:
        self._kv.restore(nodes, self._requests)

    def _requests(self, root: Node, nodes: Sequence[Node]) -> Iterable[PrefillRequest | None]:
        return map(self._request, nodes, self._encoder.encode(root.problem_text, nodes))

    def _request(self, node: Node, encoded: Encoded) -> PrefillRequest | None:
        """What must be computed for this node; its handle is in place afterwards."""
        token_ids = encoded.token_ids
        if not encoded.read_at or len(token_ids) > self.tree_model.decoder.shape.context:
            self._kv.nothing_to_read(node)
            return None
        if max(token_ids) >= self.tree_model.decoder.shape.vocab:
            raise InputError(
                f"verifier {self.name}: its tokenizer has tokens that it does not know"
            )
        shared = min(self._kv.num_shared(node, token_ids), len(token_ids) - 1, *encoded.read_at)
        request = self._kv.extend(node, token_ids, max(0, shared - self._look_back))
        if request is not None and not self._look_back:
            request.read = sorted({index - request.start for index in encoded.read_at})
        return request

    def _read(
        self, work: list[tuple[Encoded, PrefillRequest]], hidden: list[torch.Tensor]
    ) -> list[float]:
        """Values of all steps in one pass through the head, combined per step."""
        if not work:
            return []
        device = hidden[0].device
        at: list[int] = []
        token_ids: list[int] = []  # of the hidden states
        for encoded, request in work:
            known = request.reads(0, len(request.token_ids))
            place = {token: len(token_ids) + i for i, token in enumerate(known)}
            at.extend(place[index - request.start] for index in encoded.read_at)
            token_ids.extend(request.token_ids[token] for token in known)
        # Whole vector registers: else sigmoid's last elements take another path than the rest.
        at.extend(at[:1] * (-len(at) % 32))
        ids = torch.tensor(token_ids, device=device)
        values = self._head(torch.cat(hidden), ids, torch.tensor(at, device=device)).tolist()
        combine = AGGREGATES[self.spec.combine]
        scores: list[float] = []
        first = 0
        for encoded, _ in work:
            of_step = values[first : first + len(encoded.read_at)]
            # A minimum would pass over NaN.
            scores.append(combine(of_step) if all(map(math.isfinite, of_step)) else math.nan)
            first += len(of_step)
        return scores
