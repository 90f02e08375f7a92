"""RunningBatch: which rows are decoded, which wait, and which of their KV is on the device.

A row is *admitted* when a slot is free and the KV that it reads fits. Rows *run* for up to 16
tokens, then new KV is stored, and rows with a complete step *retire*. If blocks run out, rows are
*preempted* and continue later; a plan may count on that (`protocols.Parking`). With `--batching
grouped`, a plan's next group is admitted when the batch is empty (LBS section 4). A row's tokens
depend on its own path alone.

This module knows the cache manager and no tensors. The lab's simulator runs the same code, so equal
searches move equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from beamwright.counters import Counters, Progress
from beamwright.engine.admission import AdmissionQueue, SpeculativeQueue
from beamwright.engine.capacity import ITERATION_TOKENS, Capacity, WorkingMemory
from beamwright.engine.chains import Prefill, Unfinished, complete_paths, is_broken
from beamwright.engine.row import OWNER, Decoding, GeneratorState, Row, Rows, awaited, path_read
from beamwright.errors import BeamwrightError, CapacityError, DeviceMemoryError
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Lease
from beamwright.models.load import is_out_of_memory
from beamwright.protocols import (
    Event,
    Plan,
    ScheduleView,
    StepAwaited,
    StepDropped,
    StepFailed,
    StepWriter,
)
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node, SearchTree

# Fewest tokens of an iteration; inverse shares of awaited rows that must stop (`_enough`).
_LEAST_TOKENS, _REFILL_SHARE, _FILL_SHARE = 2, 16, 4


class RunningBatch(StepWriter):
    """Rows that join and leave one batch between iterations. Owns the `generator` handles.

    capacity: the KV that rows need. memory: the number of rows that working memory allows.
    """

    def __init__(
        self,
        rows: Rows,
        cache: CacheManager,
        prefill: Prefill,
        capacity: Capacity,
        settings: ScheduleSettings,
        memory: WorkingMemory,
        progress: Progress | None,
    ) -> None:
        self._rows, self._cache, self._capacity = rows, cache, capacity
        self.settings, self._memory = settings, memory
        self.speculation = str(settings.speculation)
        self._progress, self._prefill = progress or Progress(), prefill
        self._events = list[Event]()
        self.running: list[Row] = []
        self.counts, self.last_rows = Counters(), (0, 0)
        self._queue = AdmissionQueue(settings, cache, capacity, memory.costs)
        self._ahead, self._most_open = SpeculativeQueue(), 0  # most open steps run together
        self._eager, self._full, self._tried = False, False, 0
        self._group: int | None = None
        self._most_rows: int | None = None
        self._most_together: int | None = None

    # --- what is to be decoded ---------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if a step that selection has opened runs or waits."""
        return bool(self._queue) or not all(r.node.speculative for r in self.running)

    @property
    def speculating(self) -> bool:
        """True if speculative children may be decoded."""
        return bool(self.running) or self._ahead.fresh

    @property
    def running_nodes(self) -> frozenset[Node]:
        """Nodes whose steps are being decoded."""
        return frozenset(row.node for row in self.running)

    @property
    def waiting(self) -> list[Node]:
        """Waiting nodes in the order of admission."""
        return self._queue.nodes

    def decode_as(self, root: Node, decoding: Decoding) -> None:
        """Use `decoding` for this root's tree until the root is released; see `Decodings.set`."""
        self._capacity.decodings.set(root, decoding)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """Return a schedule's view of these open nodes: KV demand, lengths, row limit, costs."""
        longest = max(map(self._capacity.expected_tokens, beams), default=1)
        most = self._most_rows = self._memory.max_rows(longest, self._rows.held_bytes)
        exact = all(map(self._capacity.has_fixed_length, {beam.root for beam in beams}))
        demand, costs = self._capacity.demand(beams), self._memory.costs
        return ScheduleView(beams, demand, most, longest, exact, costs)

    def submit(self, plan: Plan) -> None:
        """Replace the waiting steps with those of `plan`. Running rows go on."""
        self._queue.replace(plan, self.running_nodes)
        self._eager = plan.write_back and plan.eager
        self.counts.parking_plans += plan.parking is not None
        self._full, self._most_open = False, 0

    def speculate(self, nodes: Sequence[Node]) -> None:
        """Decode these speculative children in idle slots, the likeliest first."""
        self._ahead.replace(nodes)

    def start_from_sibling(self, node: Node, begun: Node, share: float) -> None:
        """Let an open node begin with a share (0 to 1) of the tokens of its sibling `begun`."""
        self._capacity.start_from_sibling(node, begun, share)

    def cancel(self, nodes: Iterable[Node]) -> None:
        """Stop these nodes' steps, whether they run or wait, and free what they hold."""
        gone = set(nodes)
        self._queue.remove(gone)
        self.release(gone)

    def release(self, nodes: Iterable[Node]) -> None:
        """Free the segments of these nodes; their running rows leave the batch."""
        for node in nodes:
            self._capacity.decodings.forget(node)
            self._ahead.forget(node)
            state: GeneratorState | None = node.handles.pop(OWNER, None)
            if state is None:
                continue
            if state.row is not None:
                state.row.unpin_segments()
                self._queue.forget(state.row)
                if state.row in self.running:
                    self.running.remove(state.row)
            self._cache.free(state.segment)
        if not self.running:
            self._rows.close()

    def free_outside_window(self, tree: SearchTree) -> None:
        """Free KV that no later row of this tree reaches with its attention windows."""
        self._capacity.free_outside_window(tree)

    def abort(self) -> None:
        """Stop all steps and free all memory, after whatever error."""
        self.cancel([*self.running_nodes, *self.waiting, *self._ahead.held])
        self._rows.release()

    # --- one iteration -----------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Admit rows that fit, decode up to 16 tokens of each row, and retire complete rows.

        A step that cannot be decoded even alone becomes a `StepFailed` event.

        Raises:
            LinkError: if the link has failed.
        """
        self._events = []  # kept in the object, so that events before an error are returned
        try:
            self._admit_rows()
            if self.running:
                self._run(self._reserve_blocks())
                self._retire_rows()
        except CapacityError as error:  # streamed layers did not fit: fewer rows need less
            self._begin_again(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._memory.note_failure(self._tried)
            self._begin_again(DeviceMemoryError("one beam's step cannot be decoded"))
        if not self.running:
            self._rows.close()
        return self._events

    def _admit_rows(self) -> None:
        """Admit waiting rows that fit, then speculative ones."""
        self._queue.level_rows(len(self.running))
        while joining := self._next_rows():
            try:
                self._make_way(joining)
                if self._queue.prefetch_rows(joining, len(self.running)):
                    break  # the rows join some passes later, when their KV has arrived
                self._join(joining)
            except (CapacityError, DeviceMemoryError) as error:
                if self._try_again(joining, error):
                    continue
                break
            except Unfinished as more:
                self._events += map(StepAwaited, more.nodes)
                break
            self._queue.remove_first(len(joining))
            if any(row.done for row in joining):
                self._retire_rows()
        self._most_together = None
        self._queue.prefetch_group(self.running)
        if not self._queue:
            self._fill()

    def _run(self, max_tokens: int) -> None:
        if not self.running:
            return
        if self._eager:  # queued after the write-backs that admission needed at once
            sure = (row.segment for row in self.running if not row.node.speculative)
            self._cache.write_back(sure, sealed=False)
        number, self._tried = self.running[0].node.round, len(self.running)
        self._progress.doing(f"round {number}: decoding {self._tried} beams")
        before = [len(row.tokens) for row in self.running]
        num_ahead = sum([row.node.speculative for row in self.running])
        self.last_rows = self._tried - num_ahead, num_ahead
        self._most_open = max(self._most_open, self.last_rows[0])
        goes_on = not (self._queue or self._queue.prefetching or self._fills)
        ran = self._rows.run(self.running, max_tokens, self._enough(), goes_on=goes_on)
        self.counts.iterations += 1
        self.counts.steps += ran.passes
        self.counts.slot_tokens += ran.rows
        self._count_drawn(self.running, before)

    def _count_drawn(self, rows: Sequence[Row], before: Sequence[int]) -> int:
        """Count and return the tokens that rows sampled since they had `before` tokens each."""
        num_drawn = 0
        for row, count in zip(rows, before, strict=True):
            num_drawn += (drawn := len(row.tokens) - count)
            if row.node.speculative:
                row.node.usage["speculated"] += drawn
        self.counts.row_tokens += num_drawn
        self._progress.wrote(num_drawn)
        return num_drawn

    def _retire_rows(self) -> None:
        """Store new KV, and retire rows whose step is complete."""
        size, cache = self._cache.device.block_tokens, self._cache
        done = [row for row in self.running if row.done]
        going = [row for row in self.running if not row.done]
        kept = [row for row in done if row.hidden is not None]
        stored = {row: row.forwarded // size * size for row in going}
        self._rows.store({**stored, **{row: row.forwarded for row in kept}})
        self.running = going  # nothing below fails, so complete rows are never restarted
        for row in kept:
            cache.trim(row.segment)
        if self._eager:
            cache.write_back(row.segment for row in kept if not row.node.speculative)
        for row in done:
            row.unpin_segments()
            if row.error is not None:
                self._fail(row.node, row.error)
                continue
            if row.hidden is None:  # the path ended: no row will read this step's KV
                cache.clear(row.segment)
            if cache.evicts:
                row.remember_source()
            row.node.handles[OWNER] = GeneratorState(row.segment, row.hidden, row.drawn_from)
            self._capacity.observe(len(row.tokens))
            self._events.append(row.decoded(self._rows.text(row)))
        has_room = self._capacity.let_parents_go(going) or bool(done)
        self._full = self._full and not has_room and bool(self.running)

    def _enough(self) -> int:
        """Return the number of awaited rows that must stop for the iteration to end early."""
        running = len(awaited(self.running))
        if self._queue and not self._queue.barriers:
            return 1 if self._full else max(1, running // _REFILL_SHARE)
        if self._fills:
            return max(1, running // _FILL_SHARE)
        return self._memory.enough(running, len(self.running), self._rows.num_rows)

    # --- who joins ---------------------------------------------------------------------------

    def _try_again(self, joining: Sequence[Row], error: BeamwrightError) -> bool:
        """Handle rows that did not fit; return False if they must wait until a row leaves."""
        if self._drop_last():
            return True
        broken = [node for node in self.waiting if is_broken(node)]
        if not broken:
            if self.running:
                return False
            if len(joining) > 1:
                self._most_together = len(joining) // 2
                return True
            broken = [joining[0].node]
        self._queue.remove(broken)
        for node in broken:
            self._fail(node, error)
        return True

    def _next_rows(self) -> list[Row]:
        """Return the rows in front that have slots and fit; at least one if none runs."""
        running = sum(not row.node.speculative for row in self.running)
        if not self._queue or (running and (self._queue.barriers or self._full)):
            return []
        free = min(self._limits, default=len(self._queue) + running) - running
        free = min(free, self._most_together or free)
        group = self._queue.group
        if not running and group != self._group:  # a new group begins with an empty batch
            self._group = group
            self.counts.groups += 1
            if not self.settings.reuse and self._queue.many_groups:
                self._cache.evict_all()
        rows = self._queue.first_rows(free)
        fitting = self._queue.first_that_fit(rows)
        while len(fitting) < len(rows) and self._drop_last():
            fitting = self._queue.first_that_fit(rows)
        return list(fitting or ([] if self.running else rows[:1]))

    @property
    def _limits(self) -> list[int]:
        """Known limits of the number of rows that run together."""
        parking = self._queue.parking
        limits = self.settings.max_batch, self._most_rows, parking.most_rows if parking else None
        return [n for n in limits if n is not None]

    def _join(self, rows: list[Row]) -> None:
        cache = self._cache
        nodes = [row.node for row in rows]
        held = Lease({}) if cache.stays else cache.acquire(self._queue.read_by(nodes))
        self._queue.cancel_prefetch()
        try:
            grown = complete_paths(rows, cache, self._prefill, held, self._progress)
            cache.count_needed(map(path_read, nodes))
            if self._eager and not rows[0].node.speculative:
                cache.write_back(grown)
                cache.write_back(cache.dirty())
            with suppress(CapacityError):  # then blocks are reserved per iteration; rows may leave
                cache.reserve(self._queue.written_by(rows))
            for row in () if cache.stays else rows:
                row.pin_segments()
            self._tried = len(self.running) + len(rows)
            before = [len(row.tokens) for row in rows]
            self._rows.admit(self.running, rows)
            self.counts.slot_tokens += self._count_drawn(rows, before)
        except BaseException:
            for row in rows:
                row.unpin_segments()
            raise
        finally:
            held.keep({})
        self.running += rows
        self.counts.admitted += len(rows)

    @property
    def _fills(self) -> bool:
        """True if speculative children are decoded in this round, or surely will be."""
        return self.speculation != "off" and (self._ahead.active or self.speculation != "auto")

    def _fill(self) -> None:
        """Fill slots that no open step needs with speculative children, if free memory allows."""
        limits = [*self._limits, self.settings.max_batch or self._most_open]
        free = max(0, min(limits) - len(self.running)) if self._fills else 0
        rows = self._ahead.begin(self._capacity, self._queue, self.running, free)
        self.counts.speculative_rows += len(rows)
        try:
            if rows:
                self._join(rows)
        except (CapacityError, DeviceMemoryError, Unfinished):
            for row in rows:
                self._fail(row.node)

    def _make_way(self, rows: Sequence[Row]) -> None:
        """Preempt or drop speculative rows until `rows` have slots and memory."""
        most = len(rows) if self._queue.barriers else min(self._limits, default=None)
        ahead = [row for row in self.running if row.node.speculative]
        while ahead and most is not None and len(self.running) + len(rows) > most:
            self.running.remove(ahead[-1])
            self._preempt(ahead.pop())
        while self._ahead.last() and not self._queue.is_free(rows):
            self._drop_last()

    def _drop_last(self) -> bool:
        """Drop the speculative child admitted last; return False if there is none."""
        if (node := self._ahead.last()) is not None:
            self._fail(node)
        return node is not None

    # --- who leaves --------------------------------------------------------------------------

    def _reserve_blocks(self) -> int:
        """Reserve blocks for one iteration, and return the number of tokens that fit.

        If blocks run out, reserve for fewer tokens, so that rows may end; then preempt the newest
        rows.
        """
        most = min(ITERATION_TOKENS, self._rows.max_tokens(self.running))
        if self._queue.prefetching:
            most = min(most, self._queue.passes)
        most = count = min(most, max(row.forwards_left for row in awaited(self.running)))
        while self.running:
            wanted = {row.segment: row.forwarded + row.forwards_of(count) for row in self.running}
            if self._ahead.last() and not self._cache.has_free_blocks({}, wanted):
                self._drop_last()
                continue
            try:
                self._cache.reserve(wanted)
                break
            except CapacityError as error:
                if count > min(_LEAST_TOKENS, len(self.running)):
                    count //= 2
                    continue
                count = most
                if not (self._drop_last() or self._queue.cancel_prefetch()):
                    self._preempt_newest(error)
        if self._memory.pays(len(self.running), self._rows.num_rows):
            self._rows.admit(self.running, ())
        return count

    def _preempt_newest(self, error: CapacityError) -> None:
        """Preempt the row admitted last; fail its step if it is alone or cannot continue later."""
        row = self.running.pop()
        if self.running and self._cache.evicts:
            self._preempt(row)
        else:
            self._fail(row.node, error)

    def _preempt(self, row: Row) -> None:
        """Take a row out in the middle of its step; it continues later with its tokens."""
        self._rows.store({row: row.forwarded})
        self._cache.trim(row.segment)
        row.remember_source()
        row.unpin_segments()
        if row.node.speculative:
            self._ahead.put_back(row.node)
        else:
            self._queue.put_back(row)
            self.counts.preempted, self._full = self.counts.preempted + 1, True

    def _begin_again(self, error: BeamwrightError) -> None:
        """Restart all running steps in half batches; a row that fails alone gets `error`."""
        rows, self.running = self.running, []
        self._rows.release()
        for row in reversed(rows):
            if row.node.speculative:
                self._fail(row.node)
                continue
            row.restart()
            row.unpin_segments()
            self._cache.clear(row.segment)
            self._queue.put_back(row)
        if self._tried > 1:
            self._most_rows = self._tried // 2
        elif self._queue:
            self._fail(self._queue.remove_first(), error)

    def _fail(self, node: Node, error: BeamwrightError | None = None) -> None:
        self.release([node])
        why = None if node.speculative else error
        self._events.append(StepFailed(node, why) if why is not None else StepDropped(node))
