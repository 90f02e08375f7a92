"""Equations 1-5 of the LBS paper: bytes of KV that each schedule loads from the host.

As in the paper, each beam has its own copy of its path. The equations as printed do not give the
numbers of the paper's Figure 7; `locality_bytes` is a reading of them that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LbsCase:
    """The sizes of one search, as in Table 1 of the paper.

    kv_bytes_per_token: of one beam in all layers. kv_budget_bytes: GPU memory for KV (Mem_GPU).
    """

    num_layers: int
    kv_bytes_per_token: int
    num_beams: int
    prompt_tokens: int
    generate_tokens: int
    step_tokens: int
    kv_budget_bytes: int

    def kv_bytes(self, path_tokens: int) -> int:
        """Return the bytes of all beams and layers when each path has this many tokens."""
        return self.num_beams * self.kv_bytes_per_token * path_tokens


def layerwise_bytes(case: LbsCase) -> int:
    """Return the bytes that layer-wise offloading loads (Eq. 1-3): all layers that do not fit."""
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
    """Return the bytes by Eq. 4-5 with lengths at each step's end; a step that fits loads none."""
    ends = (start + case.step_tokens for start in _step_starts(case))
    return sum(case.kv_bytes(end) for end in ends if not _fits(case, end))


def locality_printed_bytes(case: LbsCase) -> int:
    """Return the bytes by Eq. 4-5 as printed: lengths at each step's start, also if it fits."""
    return sum(case.kv_bytes(start) for start in _step_starts(case))


def locality_start_bytes(case: LbsCase) -> int:
    """Return the bytes that a real run loads: KV at the start of each step that does not fit."""
    return sum(
        case.kv_bytes(start)
        for start in _step_starts(case)
        if not _fits(case, start + case.step_tokens)
    )


def _step_starts(case: LbsCase) -> Iterator[int]:
    """Yield the path length at the start of each whole step."""
    for number in range(case.generate_tokens // case.step_tokens):
        yield case.prompt_tokens + number * case.step_tokens


def _fits(case: LbsCase, path_tokens: int) -> bool:
    return case.kv_bytes(path_tokens) <= case.kv_budget_bytes
