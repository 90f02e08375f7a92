"""SimulatedLayerwise: layer-wise KV offloading, for every token of all beams together.

It simulates the pipeline of `baselines.layerwise` (LBS paper, section 4.1, Eq. 1-3). As many layers
stay resident as fit beside two stream buffers. The KV of every other layer is fetched two layers
ahead, across token boundaries. Meanwhile, the KV of new tokens is written back. The host stores all
KV, without limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from beamwright.counters import Counters, Progress
from beamwright.errors import CapacityError
from beamwright.kv.link import Transfer
from beamwright.kv.pool import ByteBudget
from beamwright.plan.costs import Layout, ModelCosts
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.protocols import Direction, Plan, ScheduleView, StepDecoded, StepFailed, StepWriter
from beamwright.tree import Node
from beamwright_lab.simulator.clock import VirtualClock
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.link import VirtualLink
from beamwright_lab.simulator.replay import Scripts

_NUM_BUFFERS = 2


class SimulatedLayerwise(StepWriter):
    """A step writer that streams layers. With a dense layout, each beam's copy crosses the link.

    budget: device memory for KV.
    stall_s: seconds in which computation waited for the link.
    """

    running_nodes: frozenset[Node] = frozenset()

    def __init__(
        self,
        model: ModelCosts,
        costs: RooflineCosts,
        budget: ByteBudget,
        link: VirtualLink,
        clock: VirtualClock,
        scripts: Scripts,
        tail_tokens: int,
        progress: Progress | None = None,
    ) -> None:
        self._progress = progress or Progress()
        self.budget, self.stall_s = budget, 0.0
        self._num_layers = model.num_layers
        self._layer_token_bytes = model.kv_bytes_per_token // model.num_layers
        self._costs, self._link, self._clock, self._scripts = costs, link, clock, scripts
        self._resident = model.num_layers
        self._on_host = [0] * model.num_layers
        self._tail_tokens = tail_tokens
        self._dense = costs.layout is Layout.DENSE
        self._prefetched: tuple[Transfer, int] | None = None
        self._forwarded: set[Node] = set()
        self._groups: deque[tuple[Node, ...]] = deque()
        self.counts = Counters()

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    def submit(self, plan: Plan) -> None:
        """Take over the plan's groups; `iterate` decodes one group at a time."""
        self._groups = deque(plan.groups)

    def cancel(self, nodes: Sequence[Node]) -> None:
        gone = set(nodes)
        self._groups = deque(tuple(n for n in group if n not in gone) for group in self._groups)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """Return a view without KV demand."""
        return ScheduleView(beams)

    def release(self, nodes: Sequence[Node]) -> None:
        """Forget these nodes, which hold no KV."""
        self._forwarded.difference_update(nodes)

    def iterate(self) -> list[StepDecoded | StepFailed]:
        """Decode the next group to the end of its steps."""
        beams = self._groups.popleft()
        self.counts.groups += 1
        try:
            return [*self._decode(beams)]
        except CapacityError as error:
            return [StepFailed(beams[0], error)]

    def _decode(self, beams: Sequence[Node]) -> list[StepDecoded]:
        """Decode all beams to the end of their steps.

        Raises:
            CapacityError: if not even two stream buffers fit.
        """
        steps = [self._scripts.step(node) for node in beams]
        self._progress.doing(f"round {beams[0].round}: decoding {len(beams)} beams")
        self._prefill_parents(beams)
        left, first = {}, 0
        for node, step in zip(beams, steps, strict=True):
            left[node] = step.tokens - step.ends_path  # a path's last token is not forwarded
            self._forwarded.add(node)
        while left := {node: tokens for node, tokens in left.items() if tokens > first}:
            until = min(left.values())
            self._decode_rows(list(left), first, until)
            first = until
        self._progress.wrote(sum(step.tokens for step in steps))
        return [
            StepDecoded(node, (0,) * step.tokens, (), step.stop, "")  # type: ignore[arg-type]
            for node, step in zip(beams, steps, strict=True)
        ]

    def _decode_rows(self, nodes: Sequence[Node], first: int, end: int) -> None:
        """Decode tokens `first` to `end - 1` of these beams' steps."""
        rows, tail = len(nodes), self._tail_tokens
        seen, union = sum(node.start for node in nodes), _union_tokens(nodes)
        held, num_pieces = (seen, rows) if self._dense else (union, union // BLOCK_TOKENS)
        for token in range(first, end):
            own, each = rows * token, rows * (token + 1)
            work = _Pass(
                seconds=self._costs.tokens(rows, held + each, seen + each, 0, 1).seconds,
                held=held + own,
                fresh=rows,
                union=union + own,
                num_pieces=num_pieces,
                # No prefetch across a full tail, because KV is then packed again.
                prefetch_tokens=held + rows * (token // tail * tail)
                if (token + 1) % tail
                else None,
            )
            self._run_pass(work, self._num_layers)
        self._discard_prefetched()

    def _prefill_parents(self, beams: Sequence[Node]) -> None:
        """Prefill the beams' parents that have no KV yet: prompts, or the last token of a step."""
        parents = dict.fromkeys(node.parent for node in beams if node.parent is not None)
        pending = [node for node in parents if node not in self._forwarded]
        if not pending:
            return
        self._forwarded.update(pending)
        lengths = [1 if node.parent else node.end for node in pending]
        before = [node.end - length for node, length in zip(pending, lengths, strict=True)]
        new = sum(lengths)
        union = _union_tokens(pending) + sum(len(node.token_ids) for node in pending) - new
        held = sum(before) if self._dense else union
        seen = sum(n * b + n * (n + 1) // 2 for n, b in zip(lengths, before, strict=True))
        work = _Pass(
            seconds=self._costs.prefill(new, held + new, seen).seconds,
            held=held,
            fresh=new,
            union=union,
            num_pieces=len(pending) if self._dense else held // BLOCK_TOKENS,
        )
        # These few rows must not raise the number of resident layers for later passes.
        self._run_pass(work, self._resident)

    # --- one pass through all layers ---------------------------------------------------------

    def _run_pass(self, work: _Pass, max_layers: int) -> None:
        """Run one forward pass with at most `max_layers` resident layers."""
        resident = min(max_layers, self._max_resident_layers(work.held + work.fresh))
        self._check_budget(work, resident)
        self._move_residents(work, resident)
        layer_s = work.seconds / self._num_layers
        fetching = self._fetch_first(work, resident)
        self._clock.advance(resident * layer_s)
        stores: list[Transfer] = []
        for layer in range(resident, self._num_layers):
            stores.append(self._submit(Direction.D2H, work.fresh, 1))
            self._wait(fetching.pop(layer))
            self._clock.advance(layer_s)
            following = layer + _NUM_BUFFERS
            if following < self._num_layers:
                fetching[following] = [self._fetch(work)]
            elif following == self._num_layers:
                self._prefetch(work, resident)
        self._wait(stores)

    def _fetch_first(self, work: _Pass, resident: int) -> dict[int, list[Transfer]]:
        if resident == self._num_layers:
            return {}
        if self._prefetched is None:
            first = [self._fetch(work)]
        else:
            ahead, tokens = self._prefetched
            first = [ahead, self._submit(Direction.H2D, work.held - tokens, 1)]
            self._prefetched = None
        second = {resident + 1: [self._fetch(work)]} if resident + 1 < self._num_layers else {}
        return {resident: first, **second}

    def _prefetch(self, work: _Pass, resident: int) -> None:
        """Prefetch the next token's first streamed layer if the resident layers stay the same.

        KV of tokens that the rows have in their tails follows when that pass begins.
        """
        if (
            work.prefetch_tokens is not None
            and self._max_resident_layers(work.held + 2 * work.fresh) == resident
        ):
            transfer = self._submit(Direction.H2D, work.prefetch_tokens, work.num_pieces)
            self._prefetched = (transfer, work.prefetch_tokens)

    def _discard_prefetched(self) -> None:
        if self._prefetched is not None:
            self._wait([self._prefetched[0]])
            self._prefetched = None

    def _fetch(self, work: _Pass) -> Transfer:
        return self._submit(Direction.H2D, work.held, work.num_pieces)

    def _max_resident_layers(self, layer_tokens: int) -> int:
        """Return the resident layers by Eq. 1, with both stream buffers inside the budget.

        The result is negative if the buffers do not fit.
        """
        layer_bytes = layer_tokens * self._layer_token_bytes
        fitting = self.budget.total_bytes // layer_bytes
        return self._num_layers if fitting >= self._num_layers else fitting - _NUM_BUFFERS

    def _check_budget(self, work: _Pass, resident: int) -> None:
        """Count the KV that the device holds during a pass.

        Raises:
            CapacityError: if it exceeds the budget.
        """
        layer_bytes = (work.held + work.fresh) * self._layer_token_bytes
        num_held = self._num_layers
        if resident < num_held:
            num_held = max(0, resident) + _NUM_BUFFERS
        self.budget.charge(num_held * layer_bytes, f"{num_held} layers")
        self.budget.release(num_held * layer_bytes)

    def _move_residents(self, work: _Pass, resident: int) -> None:
        """Change the number of resident layers.

        Layers that stop being resident are written back as far as the host lacks their KV. Layers
        that become resident are loaded.
        """
        moved: list[Transfer] = []
        for layer in range(resident, self._resident):
            missing = max(0, work.union - self._on_host[layer])
            if missing:
                moved.append(self._submit(Direction.D2H, missing, 1))
        for layer in range(self._resident, resident):
            self._on_host[layer] = work.union
            moved.append(self._submit(Direction.H2D, work.held, work.num_pieces))
        if resident != self._resident:
            self._discard_prefetched()
        self._resident = resident
        self._wait(moved)

    def _submit(self, direction: Direction, num_tokens: int, num_pieces: int) -> Transfer:
        num_bytes = num_tokens * self._layer_token_bytes
        return self._link.submit_bytes(direction, "stream", num_bytes, max(1, num_pieces))

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        self.stall_s += self._link.wait(transfers)


@dataclass(frozen=True)
class _Pass:
    """One forward pass. Token counts are of one layer's KV.

    held: tokens before the pass, copies counted; union: distinct tokens of these.
    fresh: tokens that the pass adds.
    num_pieces: copies in which a layer is transferred.
    prefetch_tokens: tokens that can be prefetched for the next pass; None: no prefetch.
    """

    seconds: float
    held: int
    fresh: int
    union: int
    num_pieces: int
    prefetch_tokens: int | None = None


def _union_tokens(nodes: Sequence[Node]) -> int:
    """Return the number of distinct tokens in these nodes' paths, without their own steps."""
    seen: set[Node] = set()
    total = 0
    for leaf in nodes:
        node = leaf.parent
        while node is not None and node not in seen:
            seen.add(node)
            total += len(node.token_ids)
            node = node.parent
    return total
