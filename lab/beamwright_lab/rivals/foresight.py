"""When a step is needed next, for a bound: the future of a search that is known in advance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from beamwright.tree import Lineage
from beamwright_lab.rivals.requests import StepRequest


class AdmissionForesight:
    """Next uses of steps, were each round's requests admitted in the order given."""

    def __init__(self, rounds: Sequence[Sequence[StepRequest]]) -> None:
        self._most = 1 + max(map(len, rounds))
        self._uses: dict[tuple[int, Lineage], tuple[int, int]] = {}
        self._place: dict[Lineage, tuple[int, int]] = {}
        for number, requests in enumerate(rounds):
            for place, request in enumerate(requests):
                self._place[request.node] = (number, place)
                for node in request.path:
                    first, _ = self._uses.get((number, node), (place, place))
                    self._uses[number, node] = (first, place)
        self._now = (0, 0)

    def admitted(self, request: StepRequest) -> None:
        """Time has come to this request."""
        self._now = max(self._now, self._place[request.node])

    def next_use(self, node: Lineage) -> float:
        """A moment that orders steps by their next use; infinite if there is none."""
        number, place = self._now
        _, last = self._uses.get((number, node), (0, -1))
        if last > place:
            return number * self._most + place
        following = self._uses.get((number + 1, node))
        return math.inf if following is None else (number + 1) * self._most + following[0]
