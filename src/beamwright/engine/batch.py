"""RunningBatch: continuous batching of rows: admit, decode, preempt and retire rows.

A row is *admitted* when a slot is free and the KV that it reads fits. Its first token is sampled
from the last hidden state of its parent, without a pass. So one pass after the stop forwards the
step's last token, whose hidden state (`Row.hidden`) serves the children. All rows are decoded for
up to 16 tokens, then new KV is stored, and rows with a decoded step *retire*. If blocks run out,
rows are *preempted* and continue later. With `--batching grouped`, a plan's next group is admitted
when the batch is empty (LBS section 4). A row's tokens depend on its own path alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from beamwright.counters import Counters, Progress
from beamwright.engine.admission import AdmissionQueue, SpeculativeQueue
from beamwright.engine.capacity import ITERATION_TOKENS, BatchSizeLimit, RowManager
from beamwright.engine.chains import Prefill, PrefillUnfinished, has_broken_ancestor, prefill_paths
from beamwright.engine.row import (
    OWNER,
    DecodingSettings,
    GeneratorState,
    Row,
    RowRunner,
    filter_open_rows,
    row_kv_path,
)
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

# An iteration that lacks blocks is shortened to this many tokens, then rows are preempted. It ends
# early if 1/16 of the rows have stopped and steps wait, or 1/4 and speculative children may join.
_LEAST_TOKENS, _REFILL_SHARE, _FILL_SHARE = 2, 16, 4


class RunningBatch(StepWriter):
    """The generator's batch of rows, which join and leave between iterations."""

    def __init__(
        self,
        rows: RowRunner,
        cache: CacheManager,
        prefill: Prefill,
        row_manager: RowManager,
        settings: ScheduleSettings,
        memory: BatchSizeLimit,
        progress: Progress | None,
    ) -> None:
        self._rows, self._cache, self._row_manager = rows, cache, row_manager
        self.settings, self.speculation = settings, str(settings.speculation)
        self._memory, self._prefill, self._progress = memory, prefill, progress or Progress()
        self._events, self.running = list[Event](), list[Row]()
        self.counts, self.last_rows = Counters(), (0, 0)
        self._queue = AdmissionQueue(settings, cache, row_manager, memory.costs)
        self._spec_queue, self._max_open_rows = SpeculativeQueue(), 0  # most open rows since a plan
        # _no_room: True after a preemption, and no row is admitted, until blocks become free.
        self._writes_back_early, self._no_room, self._num_running = False, False, 0
        self._group: int | None = None  # the group of the newest rows
        self._memory_limit: int | None = None  # rows for which there is working memory
        self._join_limit: int | None = None  # rows to admit at once, halved if they do not fit

    # --- open steps --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if a step is being decoded or waits for it; speculative children do not count."""
        return bool(self._queue) or not all(r.node.speculative for r in self.running)

    @property
    def speculating(self) -> bool:
        """True if speculative children may be decoded."""
        return bool(self.running) or self._spec_queue.fresh

    @property
    def running_nodes(self) -> frozenset[Node]:
        """Nodes whose steps are being decoded."""
        return frozenset(row.node for row in self.running)

    @property
    def waiting(self) -> list[Node]:
        """Waiting nodes in the order of admission."""
        return self._queue.nodes

    def set_decoding(self, root: Node, decoding: DecodingSettings) -> None:
        """Set a tree's settings, until its root is released; see `TreeDecodingSettings`."""
        self._row_manager.decodings.set(root, decoding)

    def view(self, beams: tuple[Node, ...]) -> ScheduleView:
        """Return what a schedule plans these nodes with: KV demand, lengths, row limit, costs."""
        longest = max(map(self._row_manager.expected_tokens, beams), default=1)
        most = self._memory_limit = self._memory.max_rows(longest, self._rows.held_bytes)
        fixed = all(map(self._row_manager.has_fixed_length, {beam.root for beam in beams}))
        demand, costs = self._row_manager.demand(beams), self._memory.costs
        return ScheduleView(beams, demand, most, longest, fixed, costs)

    def submit(self, plan: Plan) -> None:
        """Replace the waiting steps with the steps of `plan`. Running rows continue."""
        self._queue.replace(plan, self.running_nodes)
        self._writes_back_early = plan.write_back and plan.eager
        self.counts.parking_plans += plan.parking is not None
        self._no_room, self._max_open_rows = False, 0

    def speculate(self, nodes: Sequence[Node]) -> None:
        """Decode these speculative children in idle slots, the likeliest first."""
        self._spec_queue.replace(nodes)

    def start_from_sibling(self, node: Node, begun: Node, share: float) -> None:
        """Let an open node begin with a share (0 to 1) of the tokens of its sibling `begun`."""
        self._row_manager.start_from_sibling(node, begun, share)

    def cancel(self, nodes: Iterable[Node]) -> None:
        """Stop decoding these nodes, running or waiting, and free their KV."""
        gone = set(nodes)
        self._queue.remove(gone)
        self.release(gone)

    def release(self, nodes: Iterable[Node]) -> None:
        """Free the KV of these nodes, and take their running rows out of the batch."""
        for node in nodes:
            self._row_manager.decodings.discard(node)
            self._spec_queue.discard(node)
            state: GeneratorState | None = node.handles.pop(OWNER, None)
            if state is None:
                continue
            if state.row is not None:
                state.row.unpin_segments()
                self._queue.discard(state.row)
                if state.row in self.running:
                    self.running.remove(state.row)
            self._cache.free(state.segment)
        if not self.running:
            self._rows.close()

    def free_outside_window(self, tree: SearchTree) -> None:
        """Free KV that lies outside the attention window of every later row of this tree."""
        self._row_manager.free_outside_window(tree)

    def abort(self) -> None:
        """Stop all steps and free all memory, after any error."""
        self.cancel([*self.running_nodes, *self.waiting, *self._spec_queue.held])
        self._rows.release()

    # --- one iteration -----------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Run one iteration: admit rows that fit, decode up to 16 tokens of each, and retire rows.

        Return an event for every step that ended or failed. A step fails if it does not fit alone.

        Raises:
            LinkError: if the link has failed.
        """
        self._events = []  # an attribute, so that events before an error are returned too
        try:
            self._admit_rows()
            if self.running:
                self._run_rows(self._reserve_blocks())
                self._retire_rows()
        except CapacityError as error:  # layers that are streamed in did not fit beside these rows
            self._restart_rows(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._memory.record_out_of_memory(self._num_running)
            self._restart_rows(DeviceMemoryError("one beam's step cannot be decoded"))
        if not self.running:
            self._rows.close()
        return self._events

    def _admit_rows(self) -> None:
        """Admit waiting rows that fit, then speculative ones."""
        self._queue.sort_last_rows(len(self.running))
        while joining := self._next_rows():
            try:
                self._make_room(joining)
                if self._queue.prefetch_rows(joining, len(self.running)):
                    break  # the rows join some passes later, when their KV has arrived
                self._add_rows(joining)
            except (CapacityError, DeviceMemoryError) as error:
                if self._handle_misfit(joining, error):
                    continue
                break
            except PrefillUnfinished as more:
                self._events += map(StepAwaited, more.nodes)
                break
            self._queue.remove_first(len(joining))
            if any(row.done for row in joining):
                self._retire_rows()
        self._join_limit = None
        self._queue.prefetch_group(self.running)
        if not self._queue:
            self._fill_idle_slots()

    def _run_rows(self, max_tokens: int) -> None:
        if not self.running:
            return
        if self._writes_back_early:  # copies queue behind those that admission waits for
            sure = (row.segment for row in self.running if not row.node.speculative)
            self._cache.write_back(sure, sealed=False)
        number, self._num_running = self.running[0].node.round, len(self.running)
        self._progress.doing(f"round {number}: decoding {self._num_running} beams")
        before = [len(row.tokens) for row in self.running]
        num_ahead = sum([row.node.speculative for row in self.running])
        self.last_rows = self._num_running - num_ahead, num_ahead
        self._max_open_rows = max(self._max_open_rows, self.last_rows[0])
        goes_on = not (self._queue or self._queue.prefetching or self._speculates)
        ran = self._rows.run(self.running, max_tokens, self._stops_to_end(), goes_on=goes_on)
        self.counts.iterations += 1
        self.counts.steps += ran.passes
        self.counts.slot_tokens += ran.rows
        self._count_sampled(self.running, before)

    def _count_sampled(self, rows: Sequence[Row], before: Sequence[int]) -> int:
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
        """Copy new KV into segments, and retire rows whose step is decoded."""
        size, cache = self._cache.device.block_tokens, self._cache
        done = [row for row in self.running if row.done]
        going = [row for row in self.running if not row.done]
        kept = [row for row in done if row.hidden is not None]
        stored = {row: row.forwarded // size * size for row in going}
        self._rows.store({**stored, **{row: row.forwarded for row in kept}})
        self.running = going  # nothing below can raise, so decoded rows are never restarted
        for row in kept:
            cache.trim(row.segment)
        if self._writes_back_early:
            cache.write_back(row.segment for row in kept if not row.node.speculative)
        for row in done:
            row.unpin_segments()
            if row.error is not None:
                self._fail_step(row.node, row.error)
                continue
            if row.hidden is None:  # the path has ended, so no row will read this step's KV
                cache.clear(row.segment)
            if cache.evicts:
                row.record_source()
            row.node.handles[OWNER] = GeneratorState(row.segment, row.hidden, row.drawn_from)
            self._row_manager.record_length(len(row.tokens))
            self._events.append(row.make_event(self._rows.reply_text(row)))
        has_room = self._row_manager.unpin_parent_states(going) or bool(done)
        self._no_room = self._no_room and not has_room and bool(self.running)

    def _stops_to_end(self) -> int:
        """Return after how many stopped rows the iteration ends (speculative ones not counted)."""
        running = len(filter_open_rows(self.running))
        if self._queue and not self._queue.barriers:
            return 1 if self._no_room else max(1, running // _REFILL_SHARE)
        if self._speculates:
            return max(1, running // _FILL_SHARE)
        return self._memory.stops_to_end(running, len(self.running), self._rows.num_rows)

    # --- rows that join ----------------------------------------------------------------------

    def _handle_misfit(self, joining: Sequence[Row], error: BeamwrightError) -> bool:
        """Make room for rows that did not fit, or fail steps; return False if rows must wait."""
        if self._drop_last_child():
            return True
        broken = [node for node in self.waiting if has_broken_ancestor(node)]
        if not broken:
            if self.running:
                return False
            if len(joining) > 1:
                self._join_limit = len(joining) // 2
                return True
            broken = [joining[0].node]
        self._queue.remove(broken)
        for node in broken:
            self._fail_step(node, error)
        return True

    def _next_rows(self) -> list[Row]:
        """Return the waiting rows to admit next; at least one if no row is running."""
        running = sum(not row.node.speculative for row in self.running)
        if not self._queue or (running and (self._queue.barriers or self._no_room)):
            return []
        free = min(self._row_limits, default=len(self._queue) + running) - running
        free = min(free, self._join_limit or free)
        group = self._queue.group
        if not running and group != self._group:  # a new group begins with an empty batch
            self._group = group
            self.counts.groups += 1
            if not self.settings.reuse and self._queue.many_groups:
                self._cache.evict_all()
        rows = self._queue.first_rows(free)
        fitting = self._queue.first_that_fit(rows)
        while len(fitting) < len(rows) and self._drop_last_child():
            fitting = self._queue.first_that_fit(rows)
        return list(fitting or ([] if self.running else rows[:1]))

    @property
    def _row_limits(self) -> list[int]:
        """Limits of the batch size: from `--max-batch`, from memory, and from the plan."""
        parking = self._queue.parking
        limits = self.settings.max_batch, self._memory_limit, parking.most_rows if parking else None
        return [n for n in limits if n is not None]

    def _add_rows(self, rows: list[Row]) -> None:
        cache, nodes = self._cache, [row.node for row in rows]
        lease = Lease({}) if cache.never_moves else cache.acquire(self._queue.copies_needed(nodes))
        self._queue.cancel_prefetch()
        try:
            grown = prefill_paths(rows, cache, self._prefill, lease, self._progress)
            cache.count_tokens_read(map(row_kv_path, nodes))
            if self._writes_back_early and not rows[0].node.speculative:
                cache.write_back(grown)
                cache.write_back(cache.dirty_segments())
            with suppress(CapacityError):  # if this fails, `_reserve_blocks` reserves fewer
                cache.reserve(self._queue.tokens_to_reserve(rows))
            for row in () if cache.never_moves else rows:
                row.pin_segments()
            self._num_running, before = len(self.running) + len(rows), [len(r.tokens) for r in rows]
            self._rows.admit(self.running, rows)
            self.counts.slot_tokens += self._count_sampled(rows, before)
        except BaseException:
            for row in rows:
                row.unpin_segments()
            raise
        finally:
            lease.keep_only({})
        self.running += rows
        self.counts.admitted += len(rows)

    @property
    def _speculates(self) -> bool:
        """True if speculative children are decoded in this round, or surely will be."""
        return self.speculation != "off" and (self._spec_queue.active or self.speculation != "auto")

    def _fill_idle_slots(self) -> None:
        """Admit speculative children into slots and free memory that no open step needs."""
        limits = [*self._row_limits, self.settings.max_batch or self._max_open_rows]
        free = max(0, min(limits) - len(self.running)) if self._speculates else 0
        rows = self._spec_queue.take_rows(self._row_manager, self._queue, self.running, free)
        self.counts.speculative_rows += len(rows)
        try:
            if rows:
                self._add_rows(rows)
        except (CapacityError, DeviceMemoryError, PrefillUnfinished):
            for row in rows:
                self._fail_step(row.node)

    def _make_room(self, rows: Sequence[Row]) -> None:
        """Preempt or drop speculative rows until `rows` fit; all of them if there are barriers."""
        most = len(rows) if self._queue.barriers else min(self._row_limits, default=None)
        ahead = [row for row in self.running if row.node.speculative]
        while ahead and most is not None and len(self.running) + len(rows) > most:
            self.running.remove(ahead[-1])
            self._preempt(ahead.pop())
        while self._spec_queue.last_admitted() and not self._queue.fits_free_memory(rows):
            self._drop_last_child()

    def _drop_last_child(self) -> bool:
        """Drop the speculative child admitted last; return False if there is none."""
        if (node := self._spec_queue.last_admitted()) is not None:
            self._fail_step(node)
        return node is not None

    # --- rows that leave ---------------------------------------------------------------------

    def _reserve_blocks(self) -> int:
        """Reserve KV blocks for one iteration, and return its tokens per row.

        If blocks run out, shorten the iteration (of a single row to one token), then preempt rows.
        """
        most = min(ITERATION_TOKENS, self._rows.max_tokens(self.running))
        if self._queue.prefetching:
            most = min(most, self._queue.passes_until_join)
        most = count = min(most, max(row.forwards_left for row in filter_open_rows(self.running)))
        while self.running:
            wanted = {row.segment: row.forwarded + row.usable_tokens(count) for row in self.running}
            if self._spec_queue.last_admitted() and not self._cache.fits_free_blocks({}, wanted):
                self._drop_last_child()
                continue
            try:
                self._cache.reserve(wanted)
                break
            except CapacityError as error:
                if count > min(_LEAST_TOKENS, len(self.running)):
                    count //= 2
                    continue
                count = most
                if not (self._drop_last_child() or self._queue.cancel_prefetch()):
                    self._preempt_newest(error)
        if self._memory.pays_to_compact(len(self.running), self._rows.num_rows):
            self._rows.admit(self.running, ())
        return count

    def _preempt_newest(self, error: CapacityError) -> None:
        """Preempt the row admitted last; fail its step if it is alone or KV cannot be evicted."""
        row = self.running.pop()
        if self.running and self._cache.evicts:
            self._preempt(row)
        else:
            self._fail_step(row.node, error)

    def _preempt(self, row: Row) -> None:
        """Take a row out in the middle of its step, and queue it to continue later."""
        self._rows.store({row: row.forwarded})
        self._cache.trim(row.segment)
        row.record_source()
        row.unpin_segments()
        if row.node.speculative:
            self._spec_queue.put_back(row.node)
        else:
            self._queue.put_back(row)
            self.counts.preempted, self._no_room = self.counts.preempted + 1, True

    def _restart_rows(self, error: BeamwrightError) -> None:
        """Restart all running steps in batches of half the size; fail a step that ran alone."""
        rows, self.running = self.running, []
        self._rows.release()
        for row in reversed(rows):
            if row.node.speculative:
                self._fail_step(row.node)
                continue
            row.restart()
            row.unpin_segments()
            self._cache.clear(row.segment)
            self._queue.put_back(row)
        if self._num_running > 1:
            self._memory_limit = self._num_running // 2
        elif self._queue:
            self._fail_step(self._queue.remove_first(), error)

    def _fail_step(self, node: Node, error: BeamwrightError | None = None) -> None:
        self.release([node])
        why = None if node.speculative else error
        self._events.append(StepFailed(node, why) if why is not None else StepDropped(node))
