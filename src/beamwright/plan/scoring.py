"""What a verifier costs beside the generator: seconds of its prefills, and its own KV.

After every step it encodes the step's new tokens behind its parents' KV (`verify.path_kv`), in
batches, when decoding is done. Its tokenizer is taken to make as many tokens of a step as the
generator's, and a mark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from beamwright.plan.costs import Bound, Layout, ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.workload import (
    BLOCK_TOKENS,
    SampledSearches,
    Spread,
    TreeStep,
    Workload,
    tree_steps,
)
from beamwright.protocols import Direction

MARK_TOKENS = 1
"""Of every step: what marks its end, or the token before it that a head looks back at."""

_CHUNK_TOKENS = 256  # of a row in one prefill, and the rows of a batch: as in `models.tree_model`
_BATCH_TOKENS = 4096
_PADDING = 8


def in_verifier_tokens(workload: Workload) -> Workload:
    """The same search as a verifier reads it: every step has a mark more."""
    return replace(
        workload,
        step_tokens=workload.step_tokens + MARK_TOKENS,
        generate_tokens=workload.generate_tokens + MARK_TOKENS * workload.num_steps,
    )


@dataclass(frozen=True)
class Scorer:
    """A verifier: its costs, and what it may hold on the device."""

    model: ModelCosts
    kv_budget_bytes: int


@dataclass(frozen=True)
class StepScoring:
    """One step. load_bytes, store_bytes: across the link."""

    verify_s: float
    stall_s: float = 0.0
    load_bytes: float = 0.0
    store_bytes: float = 0.0


@dataclass(frozen=True)
class _Forward:
    """So many equal forward passes, of so many new tokens each."""

    count: int
    tokens: int
    read: float
    seen: float


@dataclass(frozen=True)
class ScoringCost:
    """The scoring of one workload on one machine, in one layout of KV."""

    scorer: Scorer
    generated: Workload
    hardware: HardwareProfile
    layout: Layout
    searches: SampledSearches

    @cached_property
    def workload(self) -> Workload:
        """The search in the verifier's tokens."""
        return in_verifier_tokens(self.generated)

    @property
    def peak(self) -> Spread:
        """Bytes of KV that it holds at most, over the searches."""
        held = self.searches.held_tokens(self.workload, copies=self.layout is Layout.DENSE)
        return held.scaled(self._kv_bytes)

    @property
    def longest_path_bytes(self) -> int:
        """KV of one path: what it must hold at once."""
        *_, last = tree_steps(self.workload)
        return last.path_held_tokens * self._kv_bytes

    @property
    def prefix_s(self) -> float:
        """Seconds to encode the problem, once."""
        return self._roofline.prefill(self.workload.prompt_tokens)

    def steps(self) -> list[StepScoring]:
        """Every step, in order. Once the tree outgrows the device, its KV is stored on the host."""
        found, spilled = [], False
        for step in tree_steps(self.workload):
            found.append(self._step(step, spilled=spilled))
            spilled = spilled or found[-1].load_bytes > 0
        return found

    @property
    def _kv_bytes(self) -> int:
        return self.scorer.model.kv_bytes_per_token

    @property
    def _roofline(self) -> Roofline:
        return Roofline(self.scorer.model, self.hardware)

    def _step(self, step: TreeStep, *, spilled: bool) -> StepScoring:
        verify_s = self._forward_s(step)
        missing = self._held_bytes(step) - self.scorer.kv_budget_bytes
        if missing <= 0 and not spilled:
            return StepScoring(verify_s)
        # What is not resident is loaded before it is read; stores go on behind the next decoding.
        load_bytes = max(0.0, missing)
        num_pieces = load_bytes / (BLOCK_TOKENS * self._kv_bytes)
        stall_s = self._roofline.transfer(load_bytes, num_pieces, Direction.H2D)
        written = self.workload.num_beams * step.num_tokens
        backlog = 0.0 if spilled else step.union_tokens
        return StepScoring(verify_s, stall_s, load_bytes, (written + backlog) * self._kv_bytes)

    @property
    def bound(self) -> Bound:
        """What scoring mostly waits for, in the middle of the search."""
        steps = [*tree_steps(self.workload)]
        first = self._forwards(steps[len(steps) // 2])[0]
        return self._roofline.bound(first.tokens, first.read, first.seen, Layout.TREE)

    def _forward_s(self, step: TreeStep) -> float:
        # Whatever the layout, a prefill reads shared parts once.
        return sum(
            each.count * self._roofline.decode_step(each.tokens, each.read, each.seen)
            for each in self._forwards(step)
        )

    def _forwards(self, step: TreeStep) -> list[_Forward]:
        """Chunk by chunk of the rows, batch by batch of a chunk."""
        beams, found = self.workload.num_beams, []
        for offset in range(0, step.num_tokens, _CHUNK_TOKENS):
            chunk = min(_CHUNK_TOKENS, step.num_tokens - offset)
            rows_of_a_batch = max(1, _BATCH_TOKENS // (-(-chunk // _PADDING) * _PADDING))
            count = math.ceil(beams / rows_of_a_batch)
            rows = beams / count
            union = step.grouped_union_tokens(count) / count
            seen = rows * chunk * (step.path_tokens + offset + (chunk + 1) / 2)
            read = union + rows * (offset + chunk)
            found.append(_Forward(count, round(rows * chunk), read, seen))
        return found

    def _held_bytes(self, step: TreeStep) -> float:
        if self.layout is Layout.DENSE:
            return self.workload.num_beams * step.path_held_tokens * self._kv_bytes
        return step.group_held_tokens(1) * self._kv_bytes
