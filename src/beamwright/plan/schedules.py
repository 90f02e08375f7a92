"""One search under each schedule, step after step: time, traffic, and whether it fits.

Sizes come from `workload`, seconds from `costs`. A verifier encodes the new tokens of a step behind
their parents' KV, in batches, when decoding is done (`verify.prm`); its tokenizer is taken to
make as many tokens of a step as the generator's, and a mark. Selection and pruning take no time.
Within a step, group by group, a token costs what it costs in the middle of the step. Times are
those of the expected tree; what fits is judged over `searches`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from beamwright.plan.costs import CHUNK_TOKENS, Layout, ModelCosts, Roofline
from beamwright.plan.workload import (
    BLOCK_TOKENS,
    SampledSearches,
    Spread,
    TreeStep,
    Workload,
    tree_steps,
)
from beamwright.protocols import Direction

Fit = Literal["no", "borderline", "fits"]

MARK_TOKENS = 1
"""Of every step: what marks its end, or the token before it that a head looks back at."""

_NUM_STREAM_BUFFERS = 2  # layer-wise: one layer computes while the next one arrives
_BATCH_TOKENS = 4096  # of a prefill's rows: as in `models.prefill`
_PADDING = 8


def fit_of(need: Spread, budget_bytes: int) -> Fit:
    """Of a need that differs from search to search; borderline: some fit and some do not."""
    if need.worst <= budget_bytes:
        return "fits"
    return "borderline" if need.least <= budget_bytes else "no"


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


_NO_FIT = Estimate(fits=False)


@dataclass
class Totals:
    """Sums over the steps of one run, as in `Estimate`."""

    decode_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    peak_kv_bytes: float = 0.0
    groups: int = 0


@dataclass(frozen=True)
class Scorer:
    """A verifier: its costs, and what it may hold on the device."""

    model: ModelCosts
    kv_budget_bytes: int


def in_verifier_tokens(workload: Workload) -> Workload:
    """The same search as a verifier reads it: every step has a mark more."""
    return replace(
        workload,
        step_tokens=workload.step_tokens + MARK_TOKENS,
        generate_tokens=workload.generate_tokens + MARK_TOKENS * workload.num_steps,
    )


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

    def in_gpu(self) -> Estimate:
        """Everything resident, one group."""
        copies, work = self.layout is Layout.DENSE, self.workload
        held = self.searches.held_tokens(work, copies=copies)
        need = held.scaled(self._kv_bytes, self._states_bytes(work.num_beams))
        verdict = fit_of(need, self.budget_bytes)
        if self.scorer is not None:
            held = self.searches.held_tokens(self._scored, copies=copies)
            need = held.scaled(self.scorer.model.kv_bytes_per_token)
            verdict = min(verdict, fit_of(need, self.scorer.kv_budget_bytes), key=_ORDER.index)
        if verdict == "no":
            return _NO_FIT
        totals = Totals()
        for step in self._steps:
            self._decode(totals, step, num_groups=1)
        return self._finished(totals, verdict)

    def locality(self) -> Estimate:
        """Group by group to the end of the step (LBS section 4), prefetching into what is free.

        From the first step that outgrows the device, all KV is stored on the host. The last
        group of a step is the first of the next, so one group of each step is not loaded.
        """
        if not self._one_path_is_scored:
            return _NO_FIT
        totals, spilled = Totals(), False
        for step in self._steps:
            fitting = (
                number
                for number in range(1, self.workload.num_beams + 1)
                if self._group_bytes(step, number) <= self.budget_bytes
            )
            num_groups = next(fitting, None)
            if num_groups is None:  # no beam fits alone
                return _NO_FIT
            compute_s = self._decode(totals, step, num_groups)
            if num_groups > 1:
                self._move(totals, step, num_groups, compute_s, backlog=not spilled)
                spilled = True
        return self._finished(totals, "fits")

    def layerwise(self) -> Estimate:
        """Token by token; what does not fit is streamed by layers (LBS Eq. 1, less buffers)."""
        verdict = fit_of(self._buffers_need, self.budget_bytes)
        if self.roofline.model.state_bytes or verdict == "no" or not self._one_path_is_scored:
            return _NO_FIT
        totals, previous_streamed = Totals(), 0
        num_layers = self.roofline.model.num_layers
        for step in self._steps:
            totals.groups += 1
            for token in range(step.num_tokens):
                layer_bytes = self._held_tokens(step, token + 1) * self._kv_bytes / num_layers
                fitting = int(self.budget_bytes // layer_bytes)
                num_streamed = num_layers - max(0, fitting - _NUM_STREAM_BUFFERS)
                if fitting >= num_layers:
                    num_streamed = 0
                self._stream(totals, step, token, num_streamed)
                # Written back: a layer when it leaves the device, then the token of each beam.
                leaving = max(0, num_streamed - previous_streamed)
                new_bytes = self.workload.num_beams * self._kv_bytes / num_layers
                totals.d2h_bytes += leaving * layer_bytes + previous_streamed * new_bytes
                previous_streamed = max(previous_streamed, num_streamed)
                in_use = num_layers
                if num_streamed:
                    in_use += _NUM_STREAM_BUFFERS - num_streamed
                totals.peak_kv_bytes = max(totals.peak_kv_bytes, in_use * layer_bytes)
        return self._finished(totals, verdict)

    # --- the generator -----------------------------------------------------------------------

    @cached_property
    def _steps(self) -> list[TreeStep]:
        return [*tree_steps(self.workload)]

    @property
    def _kv_bytes(self) -> int:
        return self.roofline.model.kv_bytes_per_token

    def _states_bytes(self, num_rows: int) -> int:
        return self.workload.num_states(num_rows) * self.roofline.model.state_bytes

    def _held_tokens(self, step: TreeStep, token: float) -> float:
        """Tokens in KV, and read, when each beam has written `token` tokens of its step."""
        beams = self.workload.num_beams
        if self.layout is Layout.DENSE:
            return beams * (step.path_tokens + token)
        return step.union_tokens + beams * token

    @property
    def _buffers_need(self) -> Spread:
        """Bytes of the stream buffers at the longest: what layer-wise needs at least."""
        last, work = self._steps[-1], self.workload
        longest = Spread.exactly(work.num_beams * (last.path_tokens + last.num_tokens))
        if self.layout is Layout.TREE:
            longest = self.searches.held_tokens(work, block=1)
        layer_bytes = self._kv_bytes // self.roofline.model.num_layers
        return longest.scaled(_NUM_STREAM_BUFFERS * layer_bytes)

    def _decode(self, totals: Totals, step: TreeStep, num_groups: int) -> float:
        """Count one step's computing; returns the seconds of one group."""
        rows, read, seen = self._rows_and_tokens(step, num_groups)
        group_s = step.num_tokens * self.roofline.decode_step(rows, read, seen, self.layout)
        totals.decode_s += num_groups * group_s
        totals.groups += num_groups
        totals.peak_kv_bytes = max(totals.peak_kv_bytes, self._group_bytes(step, num_groups))
        return group_s

    def _rows_and_tokens(self, step: TreeStep, num_groups: int) -> tuple[int, float, float]:
        """Rows of a group, and the tokens that it reads and sees in the middle of the step."""
        beams = self.workload.num_beams
        middle = (step.num_tokens + 1) / 2
        read = seen = beams * (step.path_tokens + middle)
        if self.layout is Layout.TREE:
            read = step.grouped_union_tokens(num_groups) + beams * middle
        return -(-beams // num_groups), read / num_groups, seen / num_groups

    def _group_bytes(self, step: TreeStep, num_groups: int) -> float:
        """KV blocks of the largest of `num_groups` even groups at the end of the step, and
        states."""
        rows = -(-self.workload.num_beams // num_groups)
        states_bytes = self._states_bytes(rows)
        if self.layout is Layout.DENSE:
            return rows * step.path_held_tokens * self._kv_bytes + states_bytes
        return step.group_held_tokens(num_groups) * self._kv_bytes + states_bytes

    def _move(
        self, totals: Totals, step: TreeStep, num_groups: int, compute_s: float, *, backlog: bool
    ) -> None:
        """Count one step's transfers. backlog: what is there has never been written back."""
        # Shared parts stay for the next group, but copies are made from what each group loads.
        loaded_tokens = step.union_tokens
        if self.layout is Layout.DENSE:
            loaded_tokens = step.grouped_union_tokens(num_groups)
        beams, state_bytes = self.workload.num_beams, self.roofline.model.state_bytes
        begun_bytes = beams // self.workload.width * state_bytes  # the states that rows begin from
        load_bytes = (loaded_tokens * self._kv_bytes + begun_bytes) / num_groups
        room_bytes = max(0.0, self.budget_bytes - self._group_bytes(step, num_groups))
        ahead_s = self.roofline.move(min(load_bytes, room_bytes), Direction.H2D)
        late_s = self.roofline.move(max(0.0, load_bytes - room_bytes), Direction.H2D)
        stall_s = (num_groups - 1) * (late_s + max(0.0, ahead_s - compute_s))

        store_bytes: float = beams * (step.num_tokens * self._kv_bytes + state_bytes)
        store_bytes += step.union_tokens * self._kv_bytes + begun_bytes if backlog else 0.0
        store_s = self.roofline.move(store_bytes, Direction.D2H)
        totals.stall_s += max(stall_s, store_s - num_groups * compute_s)
        totals.h2d_bytes += (num_groups - 1) * load_bytes
        totals.d2h_bytes += store_bytes

    def _stream(self, totals: Totals, step: TreeStep, token: int, num_streamed: int) -> None:
        """Count one token: a streamed layer takes the longer of its transfer and computing."""
        num_layers, beams = self.roofline.model.num_layers, self.workload.num_beams
        read, seen = self._held_tokens(step, token + 1), beams * (step.path_tokens + token + 1)
        layer_s = self.roofline.decode_step(beams, read, seen, self.layout) / num_layers
        totals.decode_s += num_layers * layer_s
        if not num_streamed:
            return
        # The token being decoded is written on the device; all before it is loaded.
        before = self._held_tokens(step, token)
        load_bytes = before * self._kv_bytes / num_layers
        num_pieces = beams if self.layout is Layout.DENSE else before / BLOCK_TOKENS
        load_s = self.roofline.transfer(load_bytes, num_pieces, Direction.H2D)
        totals.stall_s += num_streamed * max(0.0, load_s - layer_s)
        totals.h2d_bytes += num_streamed * load_bytes

    # --- the verifier ------------------------------------------------------------------------

    @cached_property
    def _scored(self) -> Workload:
        return in_verifier_tokens(self.workload)

    @property
    def _one_path_is_scored(self) -> bool:
        """True if the verifier can hold a path: it loads the others as it needs them."""
        if self.scorer is None:
            return True
        *_, last = tree_steps(self._scored)
        path_bytes = last.path_held_tokens * self.scorer.model.kv_bytes_per_token
        return path_bytes <= self.scorer.kv_budget_bytes

    def score(self, totals: Totals, scorer: Scorer) -> None:
        """Count the problem, and each step. Once the tree outgrows the device, it is on the host.

        What is not resident is loaded before it is read; stores go on behind the next decoding.
        """
        work, kv_bytes, spilled = self._scored, scorer.model.kv_bytes_per_token, False
        roofline = Roofline(scorer.model, self.roofline.hardware)
        totals.verify_s += roofline.prefill(work.prompt_tokens)
        for step in tree_steps(work):
            # Whatever the layout, a prefill reads shared parts once.
            for count, tokens, read, seen in _forwards(step):
                totals.verify_s += count * roofline.decode_step(tokens, read, seen)
            held_tokens = step.group_held_tokens(1)
            if self.layout is Layout.DENSE:
                held_tokens = work.num_beams * step.path_held_tokens
            load_bytes = max(0.0, held_tokens * kv_bytes - scorer.kv_budget_bytes)
            if not load_bytes and not spilled:
                continue
            totals.stall_s += roofline.move(load_bytes, Direction.H2D)
            totals.h2d_bytes += load_bytes
            backlog = 0.0 if spilled else step.union_tokens
            totals.d2h_bytes += (work.num_beams * step.num_tokens + backlog) * kv_bytes
            spilled = True

    # --- both --------------------------------------------------------------------------------

    def _finished(self, totals: Totals, verdict: Fit) -> Estimate:
        if self.scorer is not None:
            self.score(totals, self.scorer)
        prefill_s = self.roofline.prefill(self.workload.prompt_tokens)
        time_s = prefill_s + totals.decode_s + totals.verify_s + totals.stall_s
        sums: dict[str, Any] = vars(totals)
        figures = {name: round(x) if name.endswith("_bytes") else x for name, x in sums.items()}
        return Estimate(
            fits=verdict == "fits",
            borderline=verdict == "borderline",
            time_s=time_s,
            prefill_s=prefill_s,
            io_share=totals.stall_s / time_s,
            limited_by=self._limited_by(totals),
            **figures,
        )

    def _limited_by(self, totals: Totals) -> str:
        most = max(totals.decode_s, totals.verify_s, totals.stall_s)
        if most == totals.stall_s:
            return "link"
        if self.scorer is not None and most == totals.verify_s:
            steps = [*tree_steps(self._scored)]
            _, tokens, read, seen = next(_forwards(steps[len(steps) // 2]))
            roofline = Roofline(self.scorer.model, self.roofline.hardware)
            return f"verifier: {roofline.bound(tokens, read, seen)}"
        step = self._steps[len(self._steps) // 2]
        num_groups = max(1, round(totals.groups / len(self._steps)))
        rows, read, seen = self._rows_and_tokens(step, num_groups)
        return f"decoding: {self.roofline.bound(rows, read, seen, self.layout)}"


_ORDER = get_args(Fit)


def _forwards(step: TreeStep) -> Iterator[tuple[int, int, float, float]]:
    """A step's prefills, chunk by chunk of the rows, batch by batch of a chunk: so many of so many
    new tokens, which read and see so many."""
    beams = step.workload.num_beams
    for offset in range(0, step.num_tokens, CHUNK_TOKENS):
        chunk = min(CHUNK_TOKENS, step.num_tokens - offset)
        rows_of_a_batch = max(1, _BATCH_TOKENS // (-(-chunk // _PADDING) * _PADDING))
        count = math.ceil(beams / rows_of_a_batch)
        rows = beams / count
        union = step.grouped_union_tokens(count) / count
        seen = rows * chunk * (step.path_tokens + offset + (chunk + 1) / 2)
        yield count, round(rows * chunk), union + rows * (offset + chunk), seen
