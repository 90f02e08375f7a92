"""RunningBatch: which rows are decoded now, which wait, and what of their KV is on the device.

Rows are *admitted* when a slot is free and what they read fits; they are *retired* when their step
is complete, and *preempted* when no block is left for them. All of it happens between iterations
of at most 16 tokens, so that a row joins, leaves and comes back whenever there is reason to. With
`grouped`, the groups of a plan are barriers: the next one is admitted when the batch is empty (LBS
section 4). What a row writes depends on its own path alone, never on who is decoded beside it.

Knows residency and nothing of tensors: engine and simulator run this very code, so equal searches
move equal bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from beamwright.decode.batching import BatchCounts, Batching
from beamwright.decode.chains import Chains, GeneratorState, Prefill, is_broken
from beamwright.decode.demand import DemandBuilder
from beamwright.decode.lengths import StepLengths
from beamwright.decode.paths import OWNER, path_to, segment_name
from beamwright.decode.request import Decoding
from beamwright.decode.row import Row, Rows, parts_read
from beamwright.decode.working_memory import WorkingMemory
from beamwright.errors import BeamwrightError, CapacityError, DeviceMemoryError
from beamwright.kv import Path, PathPart, Residency, Segment, copies_needed
from beamwright.models.decoder import padded_rows
from beamwright.models.device_memory import is_out_of_memory
from beamwright.progress import Progress
from beamwright.protocols import Event, Plan, ScheduleView, StepFailed
from beamwright.tree import Node

ITERATION_TOKENS = 16
_COMPACT_BELOW = 0.75
_LEAST_TOKENS = 2
_REFILL_SHARE = 16


class RunningBatch:
    """Rows that join and leave one batch between iterations. Owns the `generator` handles.

    lengths: how long steps may and will be. memory: for how many rows there is working memory.
    """

    def __init__(
        self,
        rows: Rows,
        residency: Residency,
        prefill: Prefill,
        lengths: StepLengths,
        batching: Batching,
        memory: WorkingMemory | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._rows, self._residency, self._lengths = rows, residency, lengths
        self.batching, self._memory = batching, memory or WorkingMemory.unknown()
        self._demand = DemandBuilder(residency, lengths.expected)
        self._progress = progress or Progress()
        self._chains = Chains(residency, prefill, self._progress)
        self.running: list[Row] = []
        self.counts = BatchCounts()
        self._waiting: deque[tuple[Node, int]] = deque()
        self._eager = self._full = self._barriers = False
        self._num_groups = 0
        self._group: int | None = None
        self._many_groups = False
        self._most_rows: int | None = None
        self._most_together: int | None = None
        self._tried = 0
        self._events: list[Event] = []

    # --- what is to be decoded ---------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if anything runs or waits."""
        return bool(self.running or self._waiting)

    @property
    def running_nodes(self) -> frozenset[Node]:
        """Nodes whose steps are under way."""
        return frozenset(row.node for row in self.running)

    @property
    def num_groups(self) -> int:
        """How often the batch was filled from empty, or with `grouped`, from the next group."""
        return self.counts.groups

    @property
    def waiting(self) -> list[Node]:
        """Nodes that wait, the next one first."""
        return [node for node, _ in self._waiting]

    def decode_as(self, root: Node, decoding: Decoding) -> None:
        """Give the tree of this root settings of its own, until its root is released.

        Raises:
            InputError: for a delimiter that is too long.
        """
        self._lengths.decodings.set(root, decoding)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """What a schedule may know of these open nodes."""
        demand = self._demand.build(beams) if self._residency.evicts else None
        longest = max(map(self._lengths.expected, beams), default=1)
        self._most_rows = self._memory.max_rows(longest, self._rows.held_bytes)
        return ScheduleView(beams, demand, self._most_rows)

    def submit(self, plan: Plan) -> None:
        """Replace what waits; running rows go on."""
        running = {row.node for row in self.running}
        self._waiting.clear()
        for group in plan.groups:
            self._num_groups += 1
            self._waiting += [(node, self._num_groups) for node in group if node not in running]
        self._many_groups = len(plan.groups) > 1
        self._eager, self._full = plan.write_back and plan.eager, False
        grouped = self.batching.grouped
        if grouped is None:
            grouped = plan.write_back and all(self._lengths.exact(n) for n, _ in self._waiting)
        self._barriers = grouped

    def cancel(self, nodes: Iterable[Node]) -> None:
        """Give these nodes' steps up, whether they run or wait, and free what they hold."""
        gone = set(nodes)
        self._waiting = deque(pair for pair in self._waiting if pair[0] not in gone)
        self.release(gone)

    def release(self, nodes: Iterable[Node]) -> None:
        """Free the segments of these nodes; one that runs leaves."""
        for node in nodes:
            self._lengths.decodings.forget(node)
            state: GeneratorState | None = node.handles.pop(OWNER, None)
            if state is None:
                continue
            if state.row is not None:
                state.row.let_go()
                if state.row in self.running:
                    self.running.remove(state.row)
            self._residency.free(state.segment)
        if not self.running:
            self._rows.close()

    def abort(self) -> None:
        """Give up everything that runs or waits; whatever went wrong, nothing is held."""
        self.cancel([*(row.node for row in self.running), *self.waiting])
        self._rows.release()

    # --- one iteration -----------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Admit what fits, write up to 16 tokens of every row, retire what is complete.

        A step that cannot be decoded whatever else leaves the device is a `StepFailed`.

        Raises:
            LinkError: if the link has failed.
        """
        self._events = []  # what has happened stays known if memory runs out behind it
        try:
            self._admit()
            if self.running:
                self._make_room_and_run()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._out_of_memory()
        if not self.running:
            self._rows.close()
        return self._events

    def _make_room_and_run(self) -> None:
        if worth_compacting(len(self.running), self._rows.num_rows):
            self._rows.admit(self.running, ())
        max_tokens = min(ITERATION_TOKENS, self._rows.max_tokens(self.running))
        max_tokens = min(max_tokens, max(row.forwards_left for row in self.running))
        max_tokens = self._reserve(max_tokens)
        if self.running:
            self._progress.doing(
                f"round {self.running[0].node.round}: decoding {len(self.running)} beams"
            )
            before = sum(len(row.tokens) for row in self.running)
            num_rows, self._tried = self._rows.num_rows, len(self.running)
            num_tokens = self._rows.run(self.running, max_tokens, self._enough())
            self.counts.iterations += 1
            self.counts.slot_tokens += num_tokens * num_rows
            drawn = sum(len(row.tokens) for row in self.running) - before
            self.counts.row_tokens += drawn
            self._progress.wrote(drawn)
        self._settle()

    def _enough(self) -> int:
        """Rows that have to stop for the iteration to end early."""
        running, num_rows = len(self.running), self._rows.num_rows
        if self._waiting and not self._full and not self._barriers:
            return max(1, running // _REFILL_SHARE)
        left = bisect_left(range(running), 1, key=lambda n: int(not worth_compacting(n, num_rows)))
        return running - max(0, left - 1)

    def _settle(self) -> None:
        """Store what is new, and retire rows whose step is complete."""
        size, residency = self._residency.device.block_tokens, self._residency
        done = [row for row in self.running if row.done]
        self.running = [row for row in self.running if not row.done]
        kept = [row for row in done if row.hidden is not None]
        stored = {row: row.forwarded // size * size for row in self.running}
        self._rows.store({**stored, **{row: row.forwarded for row in kept}})
        for row in kept:
            residency.trim(row.segment)
        if self._eager:
            residency.write_back((row.segment for row in self.running), sealed=False)
            residency.write_back(row.segment for row in kept)
        for row in done:
            row.let_go()
            if row.error is not None:
                self._fail(row.node, row.error)
                continue
            if row not in kept:  # never extended, so nobody will read its KV
                residency.clear(row.segment)
            row.remember_source()
            row.node.handles[OWNER] = GeneratorState(row.segment, row.hidden)
            self._lengths.observe(len(row.tokens))
            self._events.append(row.decoded(self._rows.text(row)))
        self._full = self._full and not done and bool(self.running)

    # --- who joins ---------------------------------------------------------------------------

    def _admit(self) -> None:
        while joining := self._next_rows():
            try:
                self._join(joining)
            except (CapacityError, DeviceMemoryError) as error:
                broken = [node for node in self.waiting if is_broken(node)]
                if broken:
                    self._waiting = deque(pair for pair in self._waiting if pair[0] not in broken)
                    for node in broken:
                        self._fail(node, error)
                    continue
                if self.running:  # somebody will leave
                    break
                if len(joining) > 1:
                    self._most_together = len(joining) // 2
                    continue
                self._waiting.popleft()
                self._fail(joining[0].node, self._at_least(error, joining[0]))
                continue
            for _ in joining:
                self._waiting.popleft()
            if any(row.done for row in joining):
                self._settle()
        self._most_together = None
        self._look_ahead()

    def _next_rows(self) -> list[Row]:
        """The rows that join now: those in front that have slots and fit, one at least if none
        runs."""
        if not self._waiting or (self.running and (self._barriers or self._full)):
            return []
        limits = [n for n in (self.batching.slots, self._most_rows) if n is not None]
        free = min(limits, default=len(self._waiting) + len(self.running)) - len(self.running)
        if self._most_together is not None:
            free = min(free, self._most_together)
        group = self._waiting[0][1]
        if not self.running:
            self._begin(group)
        front = islice(self._waiting, max(0, free))
        nodes = [node for node, each in front if each == group or not self._barriers]
        rows = [self._row(node, group) for node in nodes]
        if rows and not self._fits(rows):
            rows = rows[: bisect_left(range(1, len(rows) + 1), 1, key=self._too_many(rows))]
            if not rows and not self.running:
                rows = [self._row(nodes[0], group)]
        return rows

    def _too_many(self, rows: Sequence[Row]) -> Callable[[int], int]:
        return lambda count: int(not self._fits(rows[:count]))

    def _begin(self, group: int) -> None:
        """The batch is filled from empty."""
        if group == self._group:
            return
        self._group = group
        self.counts.groups += 1
        if not self.batching.reuse and self._many_groups:
            self._residency.evict_all()

    def _row(self, node: Node, group: int) -> Row:
        """A node's step: at its start, or where it was preempted."""
        state: GeneratorState | None = node.handles.get(OWNER)
        if state is None:
            segment = self._residency.create(segment_name(node))
            decoding = self._lengths.decodings.of(node)
            state = GeneratorState(
                segment, row=Row(node, segment, decoding, self._lengths.limit(node), group)
            )
            node.handles[OWNER] = state
        assert state.row is not None
        return state.row

    def _fits(self, rows: Sequence[Row]) -> bool:
        """Is there room for what these rows read, and for what their steps will write?"""
        parents = dict.fromkeys(row.node.parent for row in rows if row.node.parent is not None)
        grown = {row.segment: self._expected_tokens(row) for row in rows}
        for parent in parents:
            state: GeneratorState | None = parent.handles.get(OWNER)
            if state is None:
                grown[Segment()] = len(parent.token_ids)
            elif state.segment.length < len(parent.token_ids):
                grown[state.segment] = len(parent.token_ids)
        needs = self._copies(map(parts_read, rows))
        return self._residency.fits(self._residency.beside_others(needs), grown)

    def _copies(self, paths: Iterable[Path]) -> dict[Segment, int]:
        return copies_needed(paths, per_beam=self._residency.copies_per_beam)

    def _expected_tokens(self, row: Row) -> int:
        """Tokens that blocks are kept for when a row is admitted."""
        return self._lengths.reserved(row.node, row.forwarded)

    def _join(self, rows: list[Row]) -> None:
        residency = self._residency
        held = residency.acquire(self._copies(map(parts_read, rows)))
        try:
            grown = self._chains.complete([row.node for row in rows], held)
            if self._eager:
                residency.write_back(grown)
                residency.write_back(residency.dirty())
            with suppress(CapacityError):  # block by block then; the last ones may be preempted
                residency.reserve({row.segment: self._expected_tokens(row) for row in rows})
            for row in rows:
                row.hold()
            self._tried = len(self.running) + len(rows)
            before = sum(len(row.tokens) for row in rows)
            self._rows.admit(self.running, rows)
            drawn = sum(len(row.tokens) for row in rows) - before
            self.counts.row_tokens += drawn
            self.counts.slot_tokens += drawn
            self._progress.wrote(drawn)
        except BaseException:
            for row in rows:
                row.let_go()
            raise
        finally:
            held.keep({})
        self.running += rows

    def _look_ahead(self) -> None:
        """Say what waits, in its order, and start to fetch what comes next."""
        if not self._residency.evicts:
            return
        coming = self._coming()
        needs = [self._copies(map(_parts, nodes)) for nodes in coming]
        self._residency.expect(needs)
        if not coming:
            return
        if self.batching.prefetch:
            self._residency.prefetch(needs[0])
        growth = [self._lengths.expected(node) for node in coming[0]]
        self._residency.write_ahead(needs[0], growth, {row.segment for row in self.running})

    def _coming(self) -> list[list[Node]]:
        """Later groups; without barriers, as many rows at a time as run now."""
        groups: dict[int, list[Node]] = {}
        size = max(1, len(self.running))
        for place, (node, group) in enumerate(self._waiting):
            number = group if self._barriers else place // size
            groups.setdefault(number, []).append(node)
        return list(groups.values())

    # --- who leaves --------------------------------------------------------------------------

    def _reserve(self, max_tokens: int) -> int:
        """Blocks for the tokens to come: for fewer where they run short, so that rows have time to
        end, then at the cost of the rows that came last. Returns for how many tokens."""
        count = max_tokens
        while self.running:
            wanted = {
                row.segment: row.forwarded + min(count, row.forwards_left) for row in self.running
            }
            try:
                self._residency.reserve(wanted)
            except CapacityError as error:
                if count > _LEAST_TOKENS:
                    count = max(_LEAST_TOKENS, count // 2)
                    continue
                last, count = self.running.pop(), max_tokens
                if self.running and self._residency.evicts:
                    self._preempt(last)
                else:
                    self._fail(last.node, self._at_least(error, last))
            else:
                break
        return count

    def _preempt(self, row: Row) -> None:
        """Take a row out in the middle of its step; it goes on where it was."""
        self._rows.store({row: row.forwarded})
        self._residency.trim(row.segment)
        row.remember_source()
        row.let_go()
        self._waiting.appendleft((row.node, row.group))
        self._full = True
        self.counts.preempted += 1

    def _out_of_memory(self) -> None:
        """Begin all running steps again, half as many at a time: same streams, same tree."""
        rows, self.running = self.running, []
        self._rows.release()
        for row in reversed(rows):
            row.restart()
            row.let_go()
            self._residency.clear(row.segment)
            self._waiting.appendleft((row.node, row.group))
        if self._tried <= 1:
            node, _ = self._waiting.popleft()
            self._fail(node, DeviceMemoryError("one beam's step cannot be decoded"))
            return
        self._memory.failed(self._tried)
        self._most_rows = self._tried // 2

    def _fail(self, node: Node, error: BeamwrightError) -> None:
        self.release([node])
        self._events.append(StepFailed(node, error))

    def _at_least(self, error: BeamwrightError, row: Row) -> BeamwrightError:
        """The error, with the least budget that one row of this length needs, and a block more."""
        if not isinstance(error, CapacityError):
            return error
        ledger = self._residency.device
        steps = [len(above.token_ids) for above in row.node.path()[:-1]]
        blocks = sum(map(ledger.blocks_for, [*steps, row.limit.tokens])) + 1
        least = blocks * ledger.bytes_per_block
        return error.at_least(least) if least > ledger.budget.total_bytes else error


def _parts(node: Node) -> tuple[PathPart, ...]:
    """What a waiting node reads."""
    state: GeneratorState | None = node.handles.get(OWNER)
    return path_to(node.parent) if state is None or state.row is None else parts_read(state.row)


def worth_compacting(num_active: int, num_rows: int) -> bool:
    """True if so many rows have stopped that a smaller batch pays for its making."""
    return padded_rows(num_active) <= _COMPACT_BELOW * num_rows
