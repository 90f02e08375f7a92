"""Time and traffic of a search under each schedule, estimated before anything is loaded.

Loops over steps (over tokens for layer-wise) with the sizes of `growth` and the seconds of
`roofline`. Generator only: verification and selection are not included. Within a step, group by
group, a token costs what it costs in the middle of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from beamwright.cost.growth import TreeStep, Workload, peak_union_tokens, tree_steps
from beamwright.cost.model import Hardware, ModelCosts
from beamwright.cost.roofline import Direction, Layout, Roofline

_BLOCK_TOKENS = 16  # one contiguous piece of a transfer
_NUM_STREAM_BUFFERS = 2  # layer-wise: one layer computes while the next one arrives

ScheduleName = Literal["in-gpu", "layerwise", "locality"]


@dataclass(frozen=True)
class Estimate:
    """One schedule. `None` where it cannot run in the budget (fits is False).

    time_s: prefill_s + decode_s + stall_s. groups: groups decoded, over all steps.
    peak_kv_bytes: most KV on the device at once.
    """

    fits: bool
    time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    stall_s: float | None = None
    io_share: float | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    groups: int | None = None
    peak_kv_bytes: int | None = None


class _Totals:
    """Sums over the steps of one run."""

    def __init__(self) -> None:
        self.decode_s = self.stall_s = 0.0
        self.h2d_bytes = self.d2h_bytes = self.peak_bytes = 0.0
        self.groups = 0

    def estimate(self, prefill_s: float) -> Estimate:
        time_s = prefill_s + self.decode_s + self.stall_s
        return Estimate(
            fits=True,
            time_s=time_s,
            prefill_s=prefill_s,
            decode_s=self.decode_s,
            stall_s=self.stall_s,
            io_share=self.stall_s / time_s,
            h2d_bytes=round(self.h2d_bytes),
            d2h_bytes=round(self.d2h_bytes),
            groups=self.groups,
            peak_kv_bytes=round(self.peak_bytes),
        )


@dataclass(frozen=True)
class _Run:
    """A workload on a machine with one layout of KV."""

    workload: Workload
    roofline: Roofline
    budget_bytes: int
    layout: Layout

    @property
    def kv_bytes(self) -> int:
        return self.roofline.model.kv_bytes_per_token

    def held_tokens(self, step: TreeStep, token: float) -> float:
        """Tokens in KV, and read, when each beam has written `token` tokens of its step."""
        beams = self.workload.num_beams
        if self.layout is Layout.DENSE:
            return beams * (step.path_tokens + token)
        return step.union_tokens + beams * token

    def in_gpu(self) -> Estimate:
        totals = _Totals()
        for step in tree_steps(self.workload):
            self._decode(totals, step, num_groups=1)
            if totals.peak_bytes > self.budget_bytes:
                return Estimate(fits=False)
        return totals.estimate(self._prefill_s())

    def locality(self) -> Estimate:
        """Group by group to the end of the step (LBS section 4), prefetching into what is free.

        From the first step that outgrows the device, all KV is at home on the host. The last
        group of a step is the first of the next, so one group of each step is not loaded.
        """
        totals = _Totals()
        spilled = False
        for step in tree_steps(self.workload):
            num_groups = self._num_groups(step)
            if num_groups is None:
                return Estimate(fits=False)
            compute_s = self._decode(totals, step, num_groups)
            if num_groups > 1:
                self._move(totals, step, num_groups, compute_s, backlog=not spilled)
                spilled = True
        return totals.estimate(self._prefill_s())

    def layerwise(self) -> Estimate:
        """Token by token; what does not fit is streamed by layers (LBS Eq. 1, less buffers)."""
        totals = _Totals()
        previous_streamed = 0
        num_layers = self.roofline.model.num_layers
        for step in tree_steps(self.workload):
            totals.groups += 1
            for token in range(step.num_tokens):
                layer_bytes = self.held_tokens(step, token + 1) * self.kv_bytes / num_layers
                num_streamed = self._num_streamed(layer_bytes)
                if num_streamed is None:
                    return Estimate(fits=False)
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
        return totals.estimate(self._prefill_s())

    def _prefill_s(self) -> float:
        return self.roofline.prefill(self.workload.prompt_tokens)

    def _decode(self, totals: _Totals, step: TreeStep, num_groups: int) -> float:
        """Count one step's computing; returns the seconds of one group."""
        beams = self.workload.num_beams
        middle = (step.num_tokens + 1) / 2
        seen = beams * (step.path_tokens + middle)
        read = seen
        if self.layout is Layout.TREE:
            read = step.grouped_union_tokens(num_groups) + beams * middle
        rows = -(-beams // num_groups)
        token_s = self.roofline.decode_step(rows, read / num_groups, seen / num_groups, self.layout)
        group_s = step.num_tokens * token_s
        totals.decode_s += num_groups * group_s
        totals.groups += num_groups
        totals.peak_bytes = max(totals.peak_bytes, self._group_bytes(step, num_groups))
        return group_s

    def _group_bytes(self, step: TreeStep, num_groups: int) -> float:
        """KV of the largest of `num_groups` even groups at the end of the step.

        Unions are of mean size: groups of a real tree differ.
        """
        rows = -(-self.workload.num_beams // num_groups)
        if self.layout is Layout.DENSE:
            return rows * (step.path_tokens + step.num_tokens) * self.kv_bytes
        held = step.grouped_union_tokens(num_groups) / num_groups
        return (held + rows * step.num_tokens) * self.kv_bytes

    def _num_groups(self, step: TreeStep) -> int | None:
        """The fewest groups whose KV fits to the end of the step; None if no beam fits alone."""
        for num_groups in range(1, self.workload.num_beams + 1):
            if self._group_bytes(step, num_groups) <= self.budget_bytes:
                return num_groups
        return None

    def _move(
        self, totals: _Totals, step: TreeStep, num_groups: int, compute_s: float, *, backlog: bool
    ) -> None:
        """Count one step's transfers. backlog: what is there has never been written back."""
        # Shared parts stay for the next group, but copies are made from what each group loads.
        loaded_tokens = step.union_tokens
        if self.layout is Layout.DENSE:
            loaded_tokens = step.grouped_union_tokens(num_groups)
        load_bytes = loaded_tokens / num_groups * self.kv_bytes
        room_bytes = max(0.0, self.budget_bytes - self._group_bytes(step, num_groups))
        ahead_s = self._transfer_s(min(load_bytes, room_bytes), Direction.TO_DEVICE)
        late_s = self._transfer_s(max(0.0, load_bytes - room_bytes), Direction.TO_DEVICE)
        stall_s = (num_groups - 1) * (late_s + max(0.0, ahead_s - compute_s))

        written_tokens = self.workload.num_beams * step.num_tokens
        store_bytes = (written_tokens + (step.union_tokens if backlog else 0)) * self.kv_bytes
        store_s = self._transfer_s(store_bytes, Direction.TO_HOST)
        totals.stall_s += max(stall_s, store_s - num_groups * compute_s)
        totals.h2d_bytes += (num_groups - 1) * load_bytes
        totals.d2h_bytes += store_bytes

    def _transfer_s(self, num_bytes: float, direction: Direction) -> float:
        num_pieces = num_bytes / (_BLOCK_TOKENS * self.kv_bytes)
        return self.roofline.transfer(num_bytes, num_pieces, direction)

    def _num_streamed(self, layer_bytes: float) -> int | None:
        """Layers that are loaded for each token; None if the stream buffers do not fit."""
        num_layers = self.roofline.model.num_layers
        fitting = int(self.budget_bytes // layer_bytes)
        if fitting >= num_layers:
            return 0
        if fitting < _NUM_STREAM_BUFFERS:
            return None
        return num_layers - (fitting - _NUM_STREAM_BUFFERS)

    def _stream(self, totals: _Totals, step: TreeStep, token: int, num_streamed: int) -> None:
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
        num_pieces = beams if self.layout is Layout.DENSE else before / _BLOCK_TOKENS
        load_s = self.roofline.transfer(load_bytes, num_pieces, Direction.TO_DEVICE)
        totals.stall_s += num_streamed * max(0.0, load_s - layer_s)
        totals.h2d_bytes += num_streamed * load_bytes


def estimate(
    workload: Workload, model: ModelCosts, hardware: Hardware, kv_budget_bytes: int
) -> Mapping[str, Estimate]:
    """Every schedule, by "SCHEDULE-LAYOUT"; "in-gpu" is with shared KV."""
    roofline = Roofline(model, hardware)
    dense = _Run(workload, roofline, kv_budget_bytes, Layout.DENSE)
    tree = _Run(workload, roofline, kv_budget_bytes, Layout.TREE)
    return {
        "in-gpu": tree.in_gpu(),
        "layerwise-dense": dense.layerwise(),
        "layerwise-tree": tree.layerwise(),
        "locality-dense": dense.locality(),
        "locality-tree": tree.locality(),
    }


def choose_schedule(
    workload: Workload,
    model: ModelCosts,
    hardware: Hardware,
    kv_budget_bytes: int,
    layout: Layout = Layout.TREE,
) -> ScheduleName:
    """In-GPU if it fits, else the faster of the other two.

    If neither can run, "locality": it needs the least, and reports what is missing when it runs.
    """
    run = _Run(workload, Roofline(model, hardware), kv_budget_bytes, layout)
    if run.in_gpu().fits:
        return "in-gpu"
    layerwise_s, locality_s = run.layerwise().time_s, run.locality().time_s
    if layerwise_s is None or (locality_s is not None and locality_s <= layerwise_s):
        return "locality"
    return "layerwise"


def max_beams_in_gpu(workload: Workload, model: ModelCosts, kv_budget_bytes: int) -> int:
    """Most beams, a multiple of width, whose shared KV fits to the end; 0 if not even one family.

    The workload's own number of beams is ignored.
    """

    def fits(num_families: int) -> bool:
        wider = replace(workload, num_beams=num_families * workload.width)
        return peak_union_tokens(wider) * model.kv_bytes_per_token <= kv_budget_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):  # each family adds at least the tokens of one step: this ends
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * workload.width
