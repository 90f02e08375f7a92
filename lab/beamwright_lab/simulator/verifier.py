"""SimulatedVerifier: `verify.PrmVerifier` on a virtual clock: a score costs what its prefill costs.

Knows a script, a residency of its own and what things cost. As in `verify.prm`, every step is
encoded behind its parent's KV; prefills are leased and batched by the same
code (`models.prefill`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beamwright.kv.segments import Path, PathPart, Segment
from beamwright.models.prefill import PrefillRequest, remember
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
    """A verifier to be simulated beside the generator, on the same device and link.

    costs: of the device with this model. kv_budget_bytes: device KV for it alone, and each copy.
    copies: that score at a time, where scoring is beside decoding. own_cards: each copy runs on a
    card of its own, not on the generator's.
    """

    model: ModelCosts
    costs: RooflineCosts
    kv_budget_bytes: int
    copies: int = 1
    own_cards: bool = False


class SimulatedVerifier:
    """A `Verifier` whose scores are the script's. Owns the `verifier` handles.

    Its tokenizer is taken to make as many tokens of a step as the generator's, and one more: the
    mark that ends a step, or the token before it that a head looks back at.

    traits: as reward models, it may be asked about steps that were decoded ahead, which
    `ScheduleSettings.verify_ahead` says.
    num_calls, num_steps: of `score`, and the steps in them.
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
        """The script's scores, once their KV and time are counted.

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
                remember(request, request.token_ids)


def _path(node: Node | None, fresh: Mapping[Segment, int]) -> Path:
    """fresh: lengths that segments will have."""
    if node is None:
        return ()
    segments: list[Segment] = [each.handles[_OWNER] for each in node.path()]
    return tuple(PathPart(segment, fresh.get(segment, segment.length)) for segment in segments)
