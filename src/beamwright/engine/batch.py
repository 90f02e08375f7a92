"""RunningBatch: which rows are decoded now, which wait, and what of their KV is on the device.

Rows are *admitted* when a slot is free and what they read fits; they *run* for at most 16 tokens;
they are stored, and *retired* where their step is complete. Where no block is left they are
*preempted*, and come back: a plan may count on that (`protocols.Parking`). With `--batching
grouped`, the groups of a plan are barriers: the next one is admitted when the batch is empty (LBS
section 4). What a row writes depends on its own path alone, never on which others are decoded.

Knows the cache manager and nothing of tensors: engine and simulator run this very code, so equal
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

_LEAST_TOKENS, _REFILL_SHARE, _FILL_SHARE = 2, 16, 4


class RunningBatch(StepWriter):
    """Rows that join and leave one batch between iterations. Owns the `generator` handles.

    capacity: room for their KV. memory: for how many of them there is working memory.
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
        self._ahead, self._most_open = SpeculativeQueue(), 0  # open steps that ran together
        self._eager, self._full, self._tried = False, False, 0
        self._group: int | None = None
        self._most_rows: int | None = None
        self._most_together: int | None = None

    # --- what is to be decoded ---------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if an open step runs or waits."""
        return bool(self._queue) or not all(r.node.speculative for r in self.running)

    @property
    def speculating(self) -> bool:
        """True if there is something to be decoded ahead of selection."""
        return bool(self.running) or self._ahead.fresh

    @property
    def running_nodes(self) -> frozenset[Node]:
        """Nodes whose steps are under way."""
        return frozenset(row.node for row in self.running)

    @property
    def waiting(self) -> list[Node]:
        """Nodes that wait, the next one first."""
        return self._queue.nodes

    def decode_as(self, root: Node, decoding: Decoding) -> None:
        """Settings of this root's tree alone, until the root is released; see `Decodings.set`."""
        self._capacity.decodings.set(root, decoding)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """What a schedule may know of these open nodes."""
        longest = max(map(self._capacity.expected, beams), default=1)
        most = self._most_rows = self._memory.max_rows(longest, self._rows.held_bytes)
        exact = all(map(self._capacity.exact, {beam.root for beam in beams}))
        demand, costs = self._capacity.demand(beams), self._memory.costs
        return ScheduleView(beams, demand, most, longest, exact, costs)

    def submit(self, plan: Plan) -> None:
        """Replace what waits; running rows go on."""
        self._queue.replace(plan, self.running_nodes)
        self._eager = plan.write_back and plan.eager
        self.counts.parking_plans += plan.parking is not None
        self._full, self._most_open = False, 0

    def speculate(self, nodes: Sequence[Node]) -> None:
        """Children to be decoded in slots that no open step waits for, the likeliest first."""
        self._ahead.replace(nodes)

    def begin_like(self, node: Node, begun: Node, share: float) -> None:
        """Let an open node begin with this share of its sibling's tokens."""
        self._capacity.begin_like(node, begun, share)

    def cancel(self, nodes: Iterable[Node]) -> None:
        """Give these nodes' steps up, whether they run or wait, and free what they hold."""
        gone = set(nodes)
        self._queue.remove(gone)
        self.release(gone)

    def release(self, nodes: Iterable[Node]) -> None:
        """Free the segments of these nodes; one that runs leaves."""
        for node in nodes:
            self._capacity.decodings.forget(node)
            self._ahead.forget(node)
            state: GeneratorState | None = node.handles.pop(OWNER, None)
            if state is None:
                continue
            if state.row is not None:
                state.row.let_go()
                self._queue.forget(state.row)
                if state.row in self.running:
                    self.running.remove(state.row)
            self._cache.free(state.segment)
        if not self.running:
            self._rows.close()

    def forget_unseen(self, tree: SearchTree) -> None:
        """Free what no window of a row to come reaches."""
        self._capacity.forget_unseen(tree)

    def abort(self) -> None:
        """Give up everything that runs or waits; whatever went wrong, nothing is held."""
        self.cancel([*self.running_nodes, *self.waiting, *self._ahead.held])
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
            self._admit_rows()
            if self.running:
                self._run(self._reserve_blocks())
                self._retire_rows()
        except CapacityError as error:  # of layers that are streamed: fewer rows have less of them
            self._begin_again(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._memory.failed(self._tried)
            self._begin_again(DeviceMemoryError("one beam's step cannot be decoded"))
        if not self.running:
            self._rows.close()
        return self._events

    def _admit_rows(self) -> None:
        """Take in what fits of those that wait, then of those ahead of them."""
        self._queue.level_rows(len(self.running))
        while joining := self._next_rows():
            try:
                self._make_way(joining)
                if self._queue.prefetch_rows(joining, len(self.running)):
                    break  # they join a few passes later
                self._join(joining)
            except (CapacityError, DeviceMemoryError) as error:
                if self._try_again(joining, error):
                    continue
                break
            except Unfinished as more:
                self._events += map(StepAwaited, more.nodes)
                break
            self._queue.leave(len(joining))
            if any(row.done for row in joining):
                self._retire_rows()
        self._most_together = None
        self._queue.prefetch_group(self.running)
        if not self._queue:
            self._fill()

    def _run(self, max_tokens: int) -> None:
        if not self.running:
            return
        if self._eager:  # behind what had to leave at once
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
        """The tokens that these rows have got since they had so many."""
        num_drawn = 0
        for row, count in zip(rows, before, strict=True):
            num_drawn += (drawn := len(row.tokens) - count)
            if row.node.speculative:
                row.node.usage["speculated"] += drawn
        self.counts.row_tokens += num_drawn
        self._progress.wrote(num_drawn)
        return num_drawn

    def _retire_rows(self) -> None:
        """Store what is new, and retire rows whose step is complete."""
        size, cache = self._cache.device.block_tokens, self._cache
        done = [row for row in self.running if row.done]
        going = [row for row in self.running if not row.done]
        kept = [row for row in done if row.hidden is not None]
        stored = {row: row.forwarded // size * size for row in going}
        self._rows.store({**stored, **{row: row.forwarded for row in kept}})
        self.running = going  # from here on nothing fails: who is done is not begun again
        for row in kept:
            cache.trim(row.segment)
        if self._eager:
            cache.write_back(row.segment for row in kept if not row.node.speculative)
        for row in done:
            row.let_go()
            if row.error is not None:
                self._fail(row.node, row.error)
                continue
            if row.hidden is None:  # never extended, so nobody will read its KV
                cache.clear(row.segment)
            if cache.evicts:
                row.remember_source()
            row.node.handles[OWNER] = GeneratorState(row.segment, row.hidden, row.drawn_from)
            self._capacity.observe(len(row.tokens))
            self._events.append(row.decoded(self._rows.text(row)))
        has_room = self._capacity.let_parents_go(going) or bool(done)
        self._full = self._full and not has_room and bool(self.running)

    def _enough(self) -> int:
        """Rows that have to stop for the iteration to end early."""
        running = len(awaited(self.running))
        if self._queue and not self._queue.barriers:
            return 1 if self._full else max(1, running // _REFILL_SHARE)
        if self._fills:
            return max(1, running // _FILL_SHARE)
        return self._memory.enough(running, len(self.running), self._rows.num_rows)

    # --- who joins ---------------------------------------------------------------------------

    def _try_again(self, joining: Sequence[Row], error: BeamwrightError) -> bool:
        """These rows did not fit. False if they have to wait until somebody leaves."""
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
        """Who joins now: rows in front that have slots and fit, one at least if none runs."""
        running = sum(not row.node.speculative for row in self.running)
        if not self._queue or (running and (self._queue.barriers or self._full)):
            return []
        free = min(self._limits, default=len(self._queue) + running) - running
        free = min(free, self._most_together or free)
        group = self._queue.group
        if not running and group != self._group:  # the batch is filled from empty
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
        """The most rows at a time, as far as anything says so."""
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
            cache.needed(map(path_read, nodes))
            if self._eager and not rows[0].node.speculative:
                cache.write_back(grown)
                cache.write_back(cache.dirty())
            with suppress(CapacityError):  # block by block then; the last ones may be preempted
                cache.reserve(self._queue.written_by(rows))
            for row in () if cache.stays else rows:
                row.hold()
            self._tried = len(self.running) + len(rows)
            before = [len(row.tokens) for row in rows]
            self._rows.admit(self.running, rows)
            self.counts.slot_tokens += self._count_drawn(rows, before)
        except BaseException:
            for row in rows:
                row.let_go()
            raise
        finally:
            held.keep({})
        self.running += rows
        self.counts.admitted += len(rows)

    @property
    def _fills(self) -> bool:
        """True if something is, or surely will be, decoded ahead in this round."""
        return self.speculation != "off" and (self._ahead.active or self.speculation != "auto")

    def _fill(self) -> None:
        """Give slots that nobody waits for to children of complete steps, where room is free."""
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
        """What selection has not opened leaves slots and room to these rows."""
        most = len(rows) if self._queue.barriers else min(self._limits, default=None)
        ahead = [row for row in self.running if row.node.speculative]
        while ahead and most is not None and len(self.running) + len(rows) > most:
            self.running.remove(ahead[-1])
            self._preempt(ahead.pop())
        while self._ahead.last() and not self._queue.is_free(rows):
            self._drop_last()

    def _drop_last(self) -> bool:
        """Drop what is least worth of what is speculative; False if nothing is."""
        if (node := self._ahead.last()) is not None:
            self._fail(node)
        return node is not None

    # --- who leaves --------------------------------------------------------------------------

    def _reserve_blocks(self) -> int:
        """Blocks for the tokens to come: for fewer where they run short, so that rows have time to
        end, then at the cost of the rows that came last. Returns for how many tokens."""
        most = min(ITERATION_TOKENS, self._rows.max_tokens(self.running))
        if self._queue.prefetching:
            most = min(most, self._queue.passes)
        most = count = min(most, max(row.forwards_left for row in awaited(self.running)))
        while self.running:
            wanted = {row.segment: row.forwarded + row.forwards_of(count) for row in self.running}
            if self._ahead.last() and not self._cache.is_free({}, wanted):
                self._drop_last()
                continue
            try:
                self._cache.reserve(wanted)
                break
            except CapacityError as error:
                if count > min(_LEAST_TOKENS, len(self.running)):
                    count //= 2  # 16 at first, or what is left of steps
                    continue
                count = most
                if not (self._drop_last() or self._queue.cancel_prefetch()):
                    self._preempt_newest(error)
        if self._memory.pays(len(self.running), self._rows.num_rows):
            self._rows.admit(self.running, ())
        return count

    def _preempt_newest(self, error: CapacityError) -> None:
        """Take out the row that came last; one that cannot come back, or is alone, fails."""
        row = self.running.pop()
        if self.running and self._cache.evicts:
            self._preempt(row)
        else:
            self._fail(row.node, error)

    def _preempt(self, row: Row) -> None:
        """Take a row out in the middle of its step; it goes on where it was."""
        self._rows.store({row: row.forwarded})
        self._cache.trim(row.segment)
        row.remember_source()
        row.let_go()
        if row.node.speculative:
            self._ahead.put_back(row.node)
        else:
            self._queue.put_back(row)
            self.counts.preempted, self._full = self.counts.preempted + 1, True

    def _begin_again(self, error: BeamwrightError) -> None:
        """Begin all running steps again, half as many at a time: same tree. error: of one alone."""
        rows, self.running = self.running, []
        self._rows.release()
        for row in reversed(rows):
            if row.node.speculative:
                self._fail(row.node)
                continue
            row.restart()
            row.let_go()
            self._cache.clear(row.segment)
            self._queue.put_back(row)
        if self._tried > 1:
            self._most_rows = self._tried // 2
        elif self._queue:
            self._fail(self._queue.leave(), error)

    def _fail(self, node: Node, error: BeamwrightError | None = None) -> None:
        self.release([node])
        why = None if node.speculative else error
        self._events.append(StepFailed(node, why) if why is not None else StepDropped(node))
