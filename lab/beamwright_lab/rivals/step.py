"""STEP's rule on vLLM: where memory ends, the path with the lowest score ends with it.

arXiv 2601.09093: nothing is preempted, so nothing is computed again and nobody waits for what he
has lost. The paper scores with a small head on hidden states; here it is the verifier's score of
the path so far. The tree that is left is another one, and a smaller.
"""

from __future__ import annotations

import math

from beamwright_lab.rivals.requests import StepRequest
from beamwright_lab.rivals.vllm import VllmEngine


class StepEngine(VllmEngine):
    """`VllmEngine` that stops requests for good instead of preempting them."""

    def _victim(self) -> StepRequest:
        """The lowest score; of equal ones the request admitted last."""
        return min(reversed(self.running), key=_score)

    def _oust(self, request: StepRequest) -> None:
        self.stopped.add(request.node)


def _score(request: StepRequest) -> float:
    return math.inf if request.score is None else request.score
