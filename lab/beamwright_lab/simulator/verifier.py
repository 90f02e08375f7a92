"""SimulatedVerifier: a process reward model on a virtual clock; scoring takes a prefill's time.

As in `verify.PrmVerifier`, every step is encoded behind its parent's KV, by the code of
`models.prefill`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.models.prefill import PrefillRequest, record_source
from beamwright.plan.costs import ModelCosts
from beamwright.plan.fits import MARK_TOKENS
from beamwright.protocols import Traits
from beamwright.tree import Node
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.replay import Scripts
from beamwright_lab.simulator.residency import SimulatedPrefill, SimulatedResidency

_OWNER = "verifier"


@dataclass(frozen=True)
class VerifierCase:
    """A verifier to simulate on the generator's device and link.

    costs: times of this model's operations.
    kv_budget_bytes: device memory for the KV of each copy.
    copies: number of concurrent verifiers, with `Simulation.overlap`.
    own_cards: each copy runs on its own device.
    """

    model: ModelCosts
    costs: RooflineCosts
    kv_budget_bytes: int
    copies: int = 1
    own_cards: bool = False


class SimulatedVerifier:
    """A `Verifier` that returns the script's scores.

    It encodes `MARK_TOKENS` more per step than the generator.

    num_calls, num_steps: calls of `score`, and steps scored.
    """

    traits = Traits(beside_decoding=True, takes_paths=True)
    default_aggregate = "last"
    probabilities = False

    def __init__(
        self,
        residency: SimulatedResidency,
        prefill: SimulatedPrefill,
        scripts: Scripts,
    ) -> None:
        self._residency, self._prefill, self._scripts = residency, prefill, scripts
        self.num_calls = self.num_steps = 0
        host = residency.host
        self._recomputes = host is not None and host.recompute

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """Return the script's scores, and count KV and time of their prefill.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the new tokens.
        """
        self.num_calls, self.num_steps = self.num_calls + 1, self.num_steps + len(nodes)
        roots = dict.fromkeys(node.root for node in nodes if _OWNER not in node.root.handles)
        self._encode([(root, len(root.token_ids)) for root in roots])
        self._encode([(node, len(node.token_ids) + MARK_TOKENS) for node in nodes])
        return [self._scripts.step(node).score for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes."""
        for node in nodes:
            segment: Segment | None = node.handles.pop(_OWNER, None)
            if segment is not None:
                self._residency.free(segment)

    def _encode(self, lengths: Sequence[tuple[Node, int]]) -> None:
        requests = []
        fresh: dict[Segment, int] = {}
        for node, num_tokens in lengths:
            path = _path(node.parent, fresh)
            start = sum(part.visible for part in path)
            segment = self._residency.create(start=start)
            node.handles[_OWNER] = segment
            fresh[segment] = num_tokens
            requests.append(PrefillRequest(path, segment, (0,) * num_tokens, start))
        self._prefill.run(requests)
        if self._recomputes:
            for request in requests:
                record_source(request, request.token_ids)


def _path(node: Node | None, fresh: Mapping[Segment, int]) -> Path:
    """Return the node's path.

    fresh: final lengths of segments that are still empty.
    """
    if node is None:
        return ()
    segments: list[Segment] = [each.handles[_OWNER] for each in node.path()]
    return tuple(PathPart(segment, fresh.get(segment, segment.length)) for segment in segments)
