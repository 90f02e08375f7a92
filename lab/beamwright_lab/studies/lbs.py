"""LBS's analytic model of host-to-device KV traffic (section 4.1, Eq. 1-5). Bytes, no seconds.

Every beam has its own copy of its path, as in the paper. The equations as printed give other
figures than the paper's Figure 7; `locality_bytes` is the convention that reproduces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LbsCase:
    """One request in the paper's notation (Table 1).

    kv_bytes_per_token: of one beam, all layers. kv_budget_bytes: Mem_GPU.
    """

    num_layers: int
    kv_bytes_per_token: int
    num_beams: int
    prompt_tokens: int
    generate_tokens: int
    step_tokens: int
    kv_budget_bytes: int

    def kv_bytes(self, path_tokens: int) -> int:
        """KV of all beams, all layers, when each path has this many tokens."""
        return self.num_beams * self.kv_bytes_per_token * path_tokens


def layerwise_bytes(case: LbsCase) -> int:
    """Eq. 1-3: for every token, the layers that do not fit are loaded."""
    total = 0
    for path_tokens in range(case.prompt_tokens, case.prompt_tokens + case.generate_tokens):
        all_bytes = case.kv_bytes(path_tokens)
        # Multiplied out, so that KV bytes per layer need not be a whole number.
        resident = case.num_layers
        if all_bytes:
            resident = min(resident, case.kv_budget_bytes * case.num_layers // all_bytes)
        total += (case.num_layers - resident) * all_bytes // case.num_layers
    return total


def locality_bytes(case: LbsCase) -> int:
    """Eq. 4-5 with the length at the end of each step; a step whose KV fits moves nothing."""
    ends = (start + case.step_tokens for start in _step_starts(case))
    return sum(case.kv_bytes(end) for end in ends if not _fits(case, end))


def locality_printed_bytes(case: LbsCase) -> int:
    """Eq. 4-5 as printed: the length at the start of each step, whether it fits or not."""
    return sum(case.kv_bytes(start) for start in _step_starts(case))


def locality_start_bytes(case: LbsCase) -> int:
    """The KV at the start of each step that outgrows the budget: what a run has to load."""
    return sum(
        case.kv_bytes(start)
        for start in _step_starts(case)
        if not _fits(case, start + case.step_tokens)
    )


def _step_starts(case: LbsCase) -> Iterator[int]:
    """Path lengths at the start of each whole step."""
    for number in range(case.generate_tokens // case.step_tokens):
        yield case.prompt_tokens + number * case.step_tokens


def _fits(case: LbsCase, path_tokens: int) -> bool:
    return case.kv_bytes(path_tokens) <= case.kv_budget_bytes
