"""Room for rows: how long steps will be, what fits beside what, and the KV demand of a round.

Makes a node's row. Knows rows, segments and lengths; no queue, no tensors. LBS section
4.2 asks for the free memory before every step and sets #Beam by it: KV has its own ledger
(`Capacity`), and what else a row needs, its tail, its activations and its logits, is counted apart
(`WorkingMemory`).
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from beamwright.engine.endings import begins_thought, row_limit
from beamwright.engine.row import (
    Decodings,
    Row,
    RowLimit,
    begin_state,
    is_complete,
    path_read,
    state_of,
)
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Segment, copies_needed
from beamwright.models.decoder import padded_rows
from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand
from beamwright.tree import Node, SearchTree

ITERATION_TOKENS = 16
"""Of a row, at most, between two looks at who joins and leaves."""
_FIRST_GUESS = 32
_MARGIN = 1.25
_LEAST_BEGUN = 2
_COMPACT_BELOW = 0.75
_MAKING_S = 0.005  # of the host, between two iterations
_STOPPED_SHARE = 16


class WorkingMemory:
    """Rows that can be decoded together.

    free_bytes: asked before every plan; None where the machine does not say (a CPU).
    row_bytes: working bytes of a row whose step has so many tokens. costs: of a pass with them.
    pad: rows of a batch of so many.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int] | None = None,
        row_bytes: Callable[[int], int] = lambda step_tokens: 0,
        costs: PassCosts | None = None,
        pad: Callable[[int], int] = padded_rows,
    ) -> None:
        self._free_bytes, self._row_bytes, self._pad = free_bytes, row_bytes, pad
        self.costs = costs
        self._failed_at: int | None = None

    def max_rows(self, step_tokens: int, held_bytes: int = 0) -> int | None:
        """Rows with steps of this length that there is room for, at least one; None if unknown.

        held_bytes: not free, but kept for the next rows.
        """
        limits = [] if self._failed_at is None else [max(1, self._failed_at // 2)]
        if self._free_bytes is not None:
            free_bytes = self._free_bytes() + held_bytes
            limits.append(max(1, free_bytes // self._row_bytes(step_tokens)))
        return min(limits, default=None)

    def pays(self, num_active: int, num_rows: int) -> bool:
        """True if so many of these rows have stopped that a smaller batch pays for its making."""
        fewer, costs = self._pad(num_active), self.costs or PassCosts()
        spared_s = ITERATION_TOKENS * (costs.seconds(num_rows) - costs.seconds(fewer))
        pays = fewer <= _COMPACT_BELOW * num_rows or spared_s > _MAKING_S
        return pays and 0 < num_active <= fewer < num_rows

    def enough(self, awaited: int, num_active: int, num_rows: int) -> int:
        """Of so many awaited rows, those that have to stop for an iteration to end, where nobody
        waits: who has stopped is read until then; or so many that a smaller batch pays."""
        if self.costs is not None and self.costs.seconds(num_active) > _MAKING_S:
            return max(1, awaited // _STOPPED_SHARE)
        others = num_active - awaited
        few = range(1, awaited)  # a smaller batch pays for the first of these, if for any
        return awaited - bisect(few, False, key=lambda n: not self.pays(n + others, num_rows))

    def failed(self, num_rows: int) -> None:
        """So many rows were too many; one that does not fit alone says nothing of others."""
        if num_rows > 1:
            self._failed_at = min(num_rows, self._failed_at or num_rows)


class Capacity:
    """The device of one cache manager, as rows see it. Makes rows, and knows how long they will be.

    Where steps have a fixed length that is exact, else it goes by those seen so far. A schedule
    reserves this much; results do not depend on it.
    decodings: of the trees. context: most tokens of a path.
    parks: rows are given blocks for one block's tokens at a time, and park where none is left; else
    for what they are expected to write.
    """

    def __init__(self, cache: CacheManager, decodings: Decodings, context: int) -> None:
        self._cache, self.decodings, self._context = cache, decodings, context
        self.parks = False
        self._num_steps = self._num_tokens = 0
        self._previous_need_bytes: int | None = None

    # --- how long steps are ------------------------------------------------------------------

    def observe(self, num_tokens: int) -> None:
        """A step of this length is complete."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    def exact(self, node: Node) -> bool:
        """True if its step has a fixed length, unless its path ends before, or a thought does."""
        marked = self.decodings.marks is not None
        return not marked and self.decodings.of(node).step.step_tokens is not None

    def _limit(self, node: Node, *, thought: bool = False) -> RowLimit:
        return row_limit(node, self.decodings.of(node).step, self._context, thought=thought)

    def expected(self, node: Node, limit: RowLimit | None = None) -> int:
        """Tokens that this node's step is expected to have. limit: where it is known."""
        max_tokens = (limit or self._limit(node)).tokens
        if self.exact(node):
            return max_tokens
        mean = self._num_tokens / self._num_steps if self._num_steps else _FIRST_GUESS
        return min(max_tokens, int(_MARGIN * mean) + 1)

    # --- rows --------------------------------------------------------------------------------

    def open_row(self, node: Node, group: int = 0) -> Row:
        """A node's step: at its start, for which it gets a segment, or where it was preempted."""
        state = state_of(node)
        if state is None:
            state, decoding = begin_state(node, self._cache), self.decodings.of(node)
            thought = begins_thought(node, self.decodings.marks)
            limit = self._limit(node, thought=thought is not False)
            otherwise = self._limit(node) if thought is None else None
            state.row = Row(node, state.segment, decoding, limit, group, thought, otherwise)
        assert state.row is not None
        return state.row

    def begin_like(self, node: Node, begun: Node, share: float) -> None:
        """Let an open node begin with this share of its sibling's tokens, if that is enough.

        FlashTTS's DuplicateThenTruncate; their KV is computed when the row joins (`chains`).
        """
        source: Node | Row = begun
        tokens, state, row = list(begun.token_ids), state_of(begun), self.open_row(node)
        if not tokens and state is not None and state.row is not None:
            source, tokens = state.row, state.row.tokens
        most = len(tokens) - (source.stop is not None)  # the last one ends a step
        count = min(int(share * len(tokens)), row.limit.tokens - 1, most)
        if count < _LEAST_BEGUN or row.tokens:
            return
        row.tokens, row.logprobs = tokens[:count], list(source.logprobs[:count])
        row.top = list(source.top[:count])
        row.stats = {name: list(values[:count]) for name, values in source.stats.items()}

    # --- room --------------------------------------------------------------------------------

    def read_by(self, nodes: Iterable[Node]) -> dict[Segment, int]:
        """Device copies that the steps of these nodes read."""
        return copies_needed(map(path_read, nodes), per_beam=self._cache.copies_per_beam)

    def written_by(self, rows: Iterable[Row]) -> dict[Segment, int]:
        """Tokens that blocks are kept for when these rows are admitted.

        Rows whose lengths differ do not all end at once: on average they are half-way.
        """
        wanted = dict[Segment, int]()
        for row in rows:
            left = self.expected(row.node, row.limit) - row.forwarded
            new = max(1, left if self.exact(row.node) else -(-left // 2))
            new = min(new, self._cache.device.block_tokens) if self.parks else new
            wanted[row.segment] = row.forwarded + new
        return wanted

    def first_that_fit(self, rows: Sequence[Row]) -> Sequence[Row]:
        """As many of these, from the first on, as there is room for: for what they read, and for
        what their steps will write."""
        cache = self._cache

        def too_many(count: int) -> bool:
            first = rows[:count]
            needs = {} if cache.stays else self.read_by([row.node for row in first])
            grown = self.written_by(first)
            for parent in dict.fromkeys(row.node.parent for row in first):
                grown |= self._incomplete(parent)
            return not cache.fits(cache.beside_others(needs), grown)

        if not rows or not too_many(len(rows)):
            return rows
        return rows[: bisect_left(range(1, len(rows)), True, key=too_many)]

    def is_free(self, rows: Sequence[Row]) -> bool:
        """Is it there at once, so that nothing has to come or to leave for these rows?"""
        needs = self.read_by([row.node for row in rows])
        resident = all(segment.resident for segment in needs)
        return resident and self._cache.is_free(needs, self.written_by(rows))

    def look_ahead(
        self, coming: Sequence[Sequence[Node]], growing: Iterable[Row], *, prefetch: bool
    ) -> None:
        """Say what waits, group by group, and start to fetch what comes next."""
        if not self._cache.evicts:
            return
        needs = [*map(self.read_by, coming)]
        self._cache.expect(needs)
        if not coming:
            return
        if prefetch:
            self._cache.prefetch(needs[0])
        growth = map(self.expected, coming[0])
        self._cache.write_ahead(needs[0], growth, {row.segment for row in growing})

    def forget_unseen(self, tree: SearchTree) -> None:
        """Free what no row to come of this tree reaches, in layers that see a window; and states
        that none begins from, but a prompt's, which may get children at any time."""
        groups = self._cache.device.groups
        for window, fixed in sorted({(g.window, g.fixed) for g in groups if g.window is not None}):
            for node in tree.beyond(window, _begins):
                stays = fixed and node.parent is None
                if (state := state_of(node)) is not None and state.row is None and not stays:
                    self._cache.forget(state.segment, window)

    def let_parents_go(self, rows: Sequence[Row]) -> bool:
        """Rows with a state of their own hold no longer that of the node before them; True if there
        is more room now."""
        if not self._cache.device.has_states:
            return False
        before = self._cache.room
        for row in rows:
            row.lease.keep(row.needs())
        return self._cache.room > before

    # --- what a schedule sees ----------------------------------------------------------------

    def demand(self, beams: Sequence[Node]) -> KVDemand | None:
        """The KV that a round's open nodes need, its segments numbered as paths first meet them;
        None where nothing can leave the device."""
        if not self._cache.evicts:
            return None
        ledger, numbers = self._cache.device, dict[Node, int]()
        reads = dict[Node, set[int]]()  # groups of layers that some beam reads of a node
        parent, leaf = list[int | None](), list[int | None]()
        sizes, resident, growth = list[int](), list[int](), list[int]()
        for beam in beams:
            above: int | None = None
            begun = state_of(beam)
            own = begun.segment.length if begun is not None else 0
            for node in beam.path():
                state = state_of(node)
                stored = state.segment.length if state is not None else 0
                # A parked beam has stored whole blocks of its step; it reads them like any segment.
                # A prompt or a turn has no KV until the first row behind it is admitted.
                num_tokens = stored if node is beam else len(node.token_ids)
                if not num_tokens:
                    continue
                if node not in numbers:
                    numbers[node] = len(parent)
                    parent.append(above)
                    sizes.append(0)
                    resident.append(len(state.segment.copies) if state and stored else 0)
                above = numbers[node]
                behind = 0 if node is beam else beam.start - node.end
                if len(known := reads.setdefault(node, set())) < len(ledger.groups):
                    since = 0 if node is beam else own
                    sizes[above] += self._fresh_bytes(num_tokens, behind, since, known)
            leaf.append(above)
            blocks = ledger.blocks_for(self.expected(beam)) - ledger.blocks_for(stored)
            growth.append(max(1, blocks) * ledger.bytes_per_block)
        previous, self._previous_need_bytes = self._previous_need_bytes, sum(sizes) + sum(growth)
        return KVDemand(
            parent=parent,
            segment_bytes=sizes,
            resident=resident,
            leaf=leaf,
            growth_bytes=growth,
            capacity_bytes=ledger.num_blocks * ledger.bytes_per_block,
            copy_per_beam=self._cache.copies_per_beam,
            previous_need_bytes=previous,
        )

    def _fresh_bytes(self, num_tokens: int, behind: int, since: int, reads: set[int]) -> int:
        """Bytes of a node in groups of layers that are not among those that it `reads` already.

        behind: tokens between the node and the step of whoever reads it; since: of that step, which
        has a state of its own then.
        """
        ledger, num_blocks = self._cache.device, 0
        for number, group in enumerate(ledger.groups):
            passed = behind + (since if group.fixed else 0)
            reached = group.window is None or passed + 1 < group.window
            if reached and number not in reads:
                reads.add(number)
                num_blocks += group.blocks_for(num_tokens)
        return num_blocks * ledger.bytes_per_block

    def _incomplete(self, parent: Node | None) -> dict[Segment, int]:
        """The segment of a prompt or a turn that lacks KV, and how many tokens it will have."""
        if parent is None or is_complete(parent):
            return {}
        state = state_of(parent)
        segment = state.segment if state is not None else self._cache.blank()
        num_tokens = len(parent.token_ids)
        return {segment: num_tokens} if segment.length < num_tokens else {}


def _begins(leaf: Node) -> int:
    """The first position that is still to be computed on a path: a prompt, the end of a reply and a
    turn are, when the first row behind them is admitted."""
    owing = list(takewhile(lambda node: not is_complete(node), reversed(leaf.path())))
    return owing[-1].start if owing else leaf.end


class Coming:
    """Rows whose KV comes from the host while others run: they wait in front, and hold on the
    device what they read, there or on its way.

    A row that joins waits for what it lacks, and so does everybody else. Where that takes longer
    than those that run lose by a few passes without it, they get these passes first. So many are
    known beforehand, from bytes and the cost model: never when a copy has ended, so equal runs stay
    equal.
    passes: that the others run before these join.
    """

    def __init__(self, cache: CacheManager, capacity: Capacity, costs: PassCosts | None) -> None:
        self._cache, self._capacity, self._costs = cache, capacity, costs
        self.rows, self.passes = list[Row](), 0

    def begin(self, rows: Sequence[Row], num_running: int) -> bool:
        """Load what these rows lack, if they park and others are to run meanwhile; True if so.

        Raises:
            CapacityError: if it does not fit; LinkError: if the link has failed.
        """
        if self.rows or not num_running or not self._capacity.parks or self._costs is None:
            return False
        device, costs = self._cache.device, self._costs
        needs = self._capacity.read_by([row.node for row in rows])
        kv_bytes = device.num_blocks * device.bytes_per_block  # rows park: about all is read
        pass_s = max(costs.seconds(num_running), costs.weights_s + kv_bytes * costs.byte_s)
        load = self._cache.lacking_bytes(needs) / costs.link_bandwidth / pass_s
        missing = len(rows) / (len(rows) + num_running)
        choices = 0, int(load), int(load) + 1
        self.passes = min(choices, key=lambda n: n * missing + max(0.0, load - n))
        if not self.passes:
            return False
        self._cache.load_ahead(needs)
        for row in rows:
            row.hold()
        self.rows = list(rows)
        return True

    def first(self, rows: list[Row]) -> list[Row]:
        """Of those in front, the ones that have come; all, and none comes any more, if others wait
        before them."""
        ready = list(takewhile(self.rows.__contains__, rows))
        if not ready:
            self.drop()
        return ready or rows

    def drop(self) -> bool:
        """They hold nothing any more; False if none came."""
        rows, self.rows = self.rows, []
        for row in rows:
            row.let_go()
        return bool(rows)

    def forget(self, row: Row) -> None:
        """It has let go by itself."""
        self.rows = [each for each in self.rows if each is not row]
