"""One search under each schedule, step after step: time, traffic, and whether it fits.

Sizes come from `workload`, seconds from `costs`, a verifier's from `scoring`, which scores every
step when it is decoded. Selection and pruning take no time. Within a step, group by group, a token
costs what it costs in the middle of the step. Times are those of the expected tree; what fits is
judged over `searches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from beamwright.plan.costs import Layout, Roofline
from beamwright.plan.scoring import Scorer, ScoringCost
from beamwright.plan.workload import (
    BLOCK_TOKENS,
    SampledSearches,
    Spread,
    TreeStep,
    Workload,
    tree_steps,
)
from beamwright.protocols import Direction

ScheduleName = Literal["in-gpu", "layerwise", "locality"]
Fit = Literal["fits", "borderline", "no"]

_ORDER: tuple[Fit, ...] = ("no", "borderline", "fits")


def fit_of(need: Spread, budget_bytes: int) -> Fit:
    """Of a need that differs from search to search; borderline: some fit and some do not."""
    if need.worst <= budget_bytes:
        return "fits"
    return "borderline" if need.least <= budget_bytes else "no"


def lesser(*verdicts: Fit) -> Fit:
    """What holds if all of them have to."""
    return min(verdicts, key=_ORDER.index)


@dataclass(frozen=True)
class Estimate:
    """One schedule with one layout of KV. `None` where it cannot run in the budgets.

    fits: nearly every search fits; borderline: some do and some do not, and the figures are of
    those that do. time_s: prefill_s + decode_s + verify_s + stall_s. groups: groups decoded, over
    all steps. peak_kv_bytes: most of the generator's KV on the device at once, in the expected
    tree. limited_by: what takes most of the time, and what that waits for.
    """

    fits: bool
    borderline: bool = False
    time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    verify_s: float | None = None
    stall_s: float | None = None
    io_share: float | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    groups: int | None = None
    peak_kv_bytes: int | None = None
    limited_by: str | None = None


class Totals:
    """Sums over the steps of one run. Bytes are of all KV, peak_bytes of the generator's."""

    def __init__(self) -> None:
        self.decode_s = self.verify_s = self.stall_s = 0.0
        self.h2d_bytes = self.d2h_bytes = self.peak_bytes = 0.0
        self.groups = 0

    def estimate(self, prefill_s: float, verdict: Fit, limited_by: str) -> Estimate:
        time_s = prefill_s + self.decode_s + self.verify_s + self.stall_s
        return Estimate(
            fits=verdict == "fits",
            borderline=verdict == "borderline",
            time_s=time_s,
            prefill_s=prefill_s,
            decode_s=self.decode_s,
            verify_s=self.verify_s,
            stall_s=self.stall_s,
            io_share=self.stall_s / time_s,
            h2d_bytes=round(self.h2d_bytes),
            d2h_bytes=round(self.d2h_bytes),
            groups=self.groups,
            peak_kv_bytes=round(self.peak_bytes),
            limited_by=limited_by,
        )


NO_FIT = Estimate(fits=False)


_NUM_STREAM_BUFFERS = 2  # layer-wise: one layer computes while the next one arrives


@dataclass(frozen=True)
class ScheduleRun:
    """A workload on a machine with one layout of KV.

    searches: over which need is judged. scorer: None where scores are free.
    """

    workload: Workload
    roofline: Roofline
    budget_bytes: int
    layout: Layout
    searches: SampledSearches
    scorer: Scorer | None = None

    @property
    def kv_bytes(self) -> int:
        return self.roofline.model.kv_bytes_per_token

    def held_tokens(self, step: TreeStep, token: float) -> float:
        """Tokens in KV, and read, when each beam has written `token` tokens of its step."""
        beams = self.workload.num_beams
        if self.layout is Layout.DENSE:
            return beams * (step.path_tokens + token)
        return step.union_tokens + beams * token

    @cached_property
    def scoring(self) -> ScoringCost | None:
        """The verifier's part of this run."""
        if self.scorer is None:
            return None
        return ScoringCost(
            self.scorer, self.workload, self.roofline.hardware, self.layout, self.searches
        )

    @property
    def resident_need(self) -> Spread:
        """Bytes of the generator's KV where all of it is on the device."""
        copies = self.layout is Layout.DENSE
        return self.searches.held_tokens(self.workload, copies=copies).scaled(self.kv_bytes)

    def in_gpu(self) -> Estimate:
        """Everything resident, one group."""
        verdict = fit_of(self.resident_need, self.budget_bytes)
        if self.scoring is not None:
            scored = fit_of(self.scoring.peak, self.scoring.scorer.kv_budget_bytes)
            verdict = lesser(verdict, scored)
        if verdict == "no":
            return NO_FIT
        totals = Totals()
        for step in tree_steps(self.workload):
            self.decode(totals, step, num_groups=1)
        return self.finished(totals, verdict)

    def locality(self) -> Estimate:
        """Group by group to the end of the step (LBS section 4), prefetching into what is free.

        From the first step that outgrows the device, all KV is stored on the host. The last
        group of a step is the first of the next, so one group of each step is not loaded.
        """
        if not self._one_path_is_scored:
            return NO_FIT
        totals = Totals()
        spilled = False
        for step in tree_steps(self.workload):
            num_groups = self._num_groups(step)
            if num_groups is None:
                return NO_FIT
            compute_s = self.decode(totals, step, num_groups)
            if num_groups > 1:
                self._move(totals, step, num_groups, compute_s, backlog=not spilled)
                spilled = True
        return self.finished(totals, "fits")

    def layerwise(self) -> Estimate:
        """Token by token; what does not fit is streamed by layers (LBS Eq. 1, less buffers)."""
        verdict = fit_of(self._buffers_need, self.budget_bytes)
        if verdict == "no" or not self._one_path_is_scored:
            return NO_FIT
        totals = Totals()
        previous_streamed = 0
        num_layers = self.roofline.model.num_layers
        for step in tree_steps(self.workload):
            totals.groups += 1
            for token in range(step.num_tokens):
                layer_bytes = self.held_tokens(step, token + 1) * self.kv_bytes / num_layers
                num_streamed = self._num_streamed(layer_bytes)
                self._stream(totals, step, token, num_streamed)
                # Written back: a layer when it leaves the device, then the token of each beam.
                leaving = max(0, num_streamed - previous_streamed)
                new_bytes = self.workload.num_beams * self.kv_bytes / num_layers
                totals.d2h_bytes += leaving * layer_bytes + previous_streamed * new_bytes
                previous_streamed = max(previous_streamed, num_streamed)
                in_use = num_layers
                if num_streamed:
                    in_use += _NUM_STREAM_BUFFERS - num_streamed
                totals.peak_bytes = max(totals.peak_bytes, in_use * layer_bytes)
        return self.finished(totals, verdict)

    def finished(self, totals: Totals, verdict: Fit, limited_by: str | None = None) -> Estimate:
        """Decoding and the verifier's part of all steps."""
        if self.scoring is not None:
            totals.verify_s += self.scoring.prefix_s
            for each in self.scoring.steps():
                totals.verify_s += each.verify_s
                totals.stall_s += each.stall_s
                totals.h2d_bytes += each.load_bytes
                totals.d2h_bytes += each.store_bytes
        limited_by = limited_by or self._limited_by(totals)
        return totals.estimate(self._prefill_s(), verdict, limited_by)

    def _limited_by(self, totals: Totals) -> str:
        most = max(totals.decode_s, totals.verify_s, totals.stall_s)
        if most == totals.stall_s:
            return "link"
        if self.scoring is not None and most == totals.verify_s:
            return f"verifier: {self.scoring.bound}"
        steps = [*tree_steps(self.workload)]
        step, num_groups = steps[len(steps) // 2], max(1, round(totals.groups / len(steps)))
        rows, read, seen = self._rows_and_tokens(step, num_groups)
        return f"decoding: {self.roofline.bound(rows, read, seen, self.layout)}"

    @property
    def _one_path_is_scored(self) -> bool:
        """True if the verifier can hold a path: it loads the others as it needs them."""
        if self.scoring is None:
            return True
        return self.scoring.longest_path_bytes <= self.scoring.scorer.kv_budget_bytes

    @property
    def _buffers_need(self) -> Spread:
        """Bytes of the stream buffers at the longest: what layer-wise needs at least."""
        *_, last = tree_steps(self.workload)
        longest = Spread.exactly(last.copies_end_tokens)
        if self.layout is Layout.TREE:
            longest = self.searches.union_tokens(self.workload)
        layer_bytes = self.kv_bytes // self.roofline.model.num_layers
        return longest.scaled(_NUM_STREAM_BUFFERS * layer_bytes)

    def _prefill_s(self) -> float:
        return self.roofline.prefill(self.workload.prompt_tokens)

    def decode(self, totals: Totals, step: TreeStep, num_groups: int) -> float:
        """Count one step's computing; returns the seconds of one group."""
        rows, read, seen = self._rows_and_tokens(step, num_groups)
        token_s = self.roofline.decode_step(rows, read, seen, self.layout)
        group_s = step.num_tokens * token_s
        totals.decode_s += num_groups * group_s
        totals.groups += num_groups
        totals.peak_bytes = max(totals.peak_bytes, self._group_bytes(step, num_groups))
        return group_s

    def _rows_and_tokens(self, step: TreeStep, num_groups: int) -> tuple[int, float, float]:
        """Rows of a group, and the tokens that it reads and sees in the middle of the step."""
        beams = self.workload.num_beams
        middle = (step.num_tokens + 1) / 2
        seen = beams * (step.path_tokens + middle)
        read = seen
        if self.layout is Layout.TREE:
            read = step.grouped_union_tokens(num_groups) + beams * middle
        return -(-beams // num_groups), read / num_groups, seen / num_groups

    def _group_bytes(self, step: TreeStep, num_groups: int) -> float:
        """KV blocks of the largest of `num_groups` even groups at the end of the step."""
        if self.layout is Layout.DENSE:
            rows = -(-self.workload.num_beams // num_groups)
            return rows * step.path_held_tokens * self.kv_bytes
        return step.group_held_tokens(num_groups) * self.kv_bytes

    def _num_groups(self, step: TreeStep) -> int | None:
        """The fewest groups whose KV fits to the end of the step; None if no beam fits alone."""
        for num_groups in range(1, self.workload.num_beams + 1):
            if self._group_bytes(step, num_groups) <= self.budget_bytes:
                return num_groups
        return None

    def _move(
        self, totals: Totals, step: TreeStep, num_groups: int, compute_s: float, *, backlog: bool
    ) -> None:
        """Count one step's transfers. backlog: what is there has never been written back."""
        # Shared parts stay for the next group, but copies are made from what each group loads.
        loaded_tokens = step.union_tokens
        if self.layout is Layout.DENSE:
            loaded_tokens = step.grouped_union_tokens(num_groups)
        load_bytes = loaded_tokens / num_groups * self.kv_bytes
        room_bytes = max(0.0, self.budget_bytes - self._group_bytes(step, num_groups))
        ahead_s = self._transfer_s(min(load_bytes, room_bytes), Direction.H2D)
        late_s = self._transfer_s(max(0.0, load_bytes - room_bytes), Direction.H2D)
        stall_s = (num_groups - 1) * (late_s + max(0.0, ahead_s - compute_s))

        written_tokens = self.workload.num_beams * step.num_tokens
        store_bytes = (written_tokens + (step.union_tokens if backlog else 0)) * self.kv_bytes
        store_s = self._transfer_s(store_bytes, Direction.D2H)
        totals.stall_s += max(stall_s, store_s - num_groups * compute_s)
        totals.h2d_bytes += (num_groups - 1) * load_bytes
        totals.d2h_bytes += store_bytes

    def _transfer_s(self, num_bytes: float, direction: Direction) -> float:
        num_pieces = num_bytes / (BLOCK_TOKENS * self.kv_bytes)
        return self.roofline.transfer(num_bytes, num_pieces, direction)

    def _num_streamed(self, layer_bytes: float) -> int:
        """Layers that are loaded for each token; all of them where even that is not enough."""
        num_layers = self.roofline.model.num_layers
        fitting = int(self.budget_bytes // layer_bytes)
        if fitting >= num_layers:
            return 0
        return num_layers - max(0, fitting - _NUM_STREAM_BUFFERS)

    def _stream(self, totals: Totals, step: TreeStep, token: int, num_streamed: int) -> None:
        """Count one token: a streamed layer takes the longer of its transfer and computing."""
        num_layers = self.roofline.model.num_layers
        beams = self.workload.num_beams
        read, seen = self.held_tokens(step, token + 1), beams * (step.path_tokens + token + 1)
        layer_s = self.roofline.decode_layer(beams, read, seen, self.layout)
        totals.decode_s += num_layers * layer_s
        if not num_streamed:
            return
        # The token being decoded is written on the device; all before it is loaded.
        before = self.held_tokens(step, token)
        load_bytes = before * self.kv_bytes / num_layers
        num_pieces = beams if self.layout is Layout.DENSE else before / BLOCK_TOKENS
        load_s = self.roofline.transfer(load_bytes, num_pieces, Direction.H2D)
        totals.stall_s += num_streamed * max(0.0, load_s - layer_s)
        totals.h2d_bytes += num_streamed * load_bytes
