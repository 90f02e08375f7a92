"""What rows need: the length of steps, the KV demand of a round, and working memory.

This module also creates a node's row. It knows rows, segments and lengths, no queue and no tensors.
LBS section 4.2 reads the free memory before every step and sets #Beam from it. Here KV has its own
ledger (`Capacity`). The rest of a row's memory, its tail, activations and logits, is counted
separately (`WorkingMemory`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import takewhile

from beamwright.engine.endings import begins_thought, row_limit
from beamwright.engine.row import Decodings, Row, RowLimit, begin_state, is_complete, state_of
from beamwright.kv.cache import CacheManager
from beamwright.models.decoder import padded_rows
from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand
from beamwright.tree import Node, SearchTree

# Most tokens of a row per iteration; rows join and leave between iterations.
ITERATION_TOKENS = 16
_FIRST_GUESS = 32  # tokens of a step before any step is complete
_MARGIN = 1.25  # of the expected length over the mean length
_LEAST_BEGUN = 2  # fewest tokens that a child begins with
_COMPACT_BELOW = 0.75  # a batch this much smaller always pays
_MAKING_S = 0.005  # seconds of the host between two iterations, to rearrange the batch
_STOPPED_SHARE = 16  # 1/16 of the rows must stop to end an iteration of slow passes


class WorkingMemory:
    """Number of rows that can be decoded together.

    free_bytes: called before every plan; None if the machine does not report free memory (a CPU).
    row_bytes: returns a row's working bytes for the number of tokens of its step.
    costs: the costs of a pass.
    pad: returns the padded number of rows of a batch.
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
        """Return how many rows with steps of `step_tokens` tokens fit, at least 1; None if unknown.

        held_bytes: bytes that are not free but kept for later rows.
        """
        limits = [] if self._failed_at is None else [max(1, self._failed_at // 2)]
        if self._free_bytes is not None:
            free_bytes = self._free_bytes() + held_bytes
            limits.append(max(1, free_bytes // self._row_bytes(step_tokens)))
        return min(limits, default=None)

    def pays(self, num_active: int, num_rows: int) -> bool:
        """Return True if a smaller batch saves more time than rearranging it costs.

        num_active: rows that still run. num_rows: rows of the present batch, padding included.
        """
        fewer, costs = self._pad(num_active), self.costs or PassCosts()
        spared_s = ITERATION_TOKENS * (costs.seconds(num_rows) - costs.seconds(fewer))
        pays = fewer <= _COMPACT_BELOW * num_rows or spared_s > _MAKING_S
        return pays and 0 < num_active <= fewer < num_rows

    def enough(self, awaited: int, num_active: int, num_rows: int) -> int:
        """Return the number of awaited rows that must stop to end an iteration, if no step waits.

        Slow passes: a small share of the rows, because stopped rows are computed until the
        iteration ends. Fast passes: as many rows as make a smaller batch pay.

        awaited: rows of open nodes. num_active, num_rows: as in `pays`.
        """
        if self.costs is not None and self.costs.seconds(num_active) > _MAKING_S:
            return max(1, awaited // _STOPPED_SHARE)
        others = num_active - awaited
        few = range(1, awaited)  # if a batch of n pays, so does any smaller one: bisect
        return awaited - bisect(few, False, key=lambda n: not self.pays(n + others, num_rows))

    def note_failure(self, num_rows: int) -> None:
        """Note that memory ran out with `num_rows` rows, so that later batches are smaller.

        A single row that fails does not limit the others.
        """
        if num_rows > 1:
            self._failed_at = min(num_rows, self._failed_at or num_rows)


class Capacity:
    """KV capacity of one cache manager's device. Creates rows, and estimates step lengths.

    Lengths are exact where steps have a fixed length. Otherwise they follow from the lengths seen
    so far. Schedules reserve memory by them. Results do not depend on them.

    decodings: the settings of all trees. context: the most tokens of a path.
    """

    def __init__(self, cache: CacheManager, decodings: Decodings, context: int) -> None:
        self._cache, self.decodings, self._context = cache, decodings, context
        self._num_steps = self._num_tokens = 0
        self._previous_need_bytes: int | None = None

    # --- how long steps are ------------------------------------------------------------------

    def observe(self, num_tokens: int) -> None:
        """Record the length of a complete step."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    def has_fixed_length(self, node: Node) -> bool:
        """Return True if the node's step has a fixed length, unless its path ends before.

        It has none if the model marks thoughts, because the end of a thought ends a step.
        """
        marked = self.decodings.marks is not None
        return not marked and self.decodings.of(node).step.step_tokens is not None

    def _limit(self, node: Node, *, thought: bool = False) -> RowLimit:
        return row_limit(node, self.decodings.of(node).step, self._context, thought=thought)

    def expected_tokens(self, node: Node, limit: RowLimit | None = None) -> int:
        """Return the expected number of tokens of a node's step, given its `limit` if known."""
        max_tokens = (limit or self._limit(node)).tokens
        if self.has_fixed_length(node):
            return max_tokens
        mean = self._num_tokens / self._num_steps if self._num_steps else _FIRST_GUESS
        return min(max_tokens, int(_MARGIN * mean) + 1)

    # --- rows --------------------------------------------------------------------------------

    def open_row(self, node: Node, group: int = 0) -> Row:
        """Return a node's row: a new one with a new segment, or the row that was preempted."""
        state = state_of(node)
        if state is None:
            state, decoding = begin_state(node, self._cache), self.decodings.of(node)
            thought = begins_thought(node, self.decodings.marks)
            limit = self._limit(node, thought=thought is not False)
            otherwise = self._limit(node) if thought is None else None
            state.row = Row(node, state.segment, decoding, limit, group, thought, otherwise)
        assert state.row is not None
        return state.row

    def start_from_sibling(self, node: Node, begun: Node, share: float) -> None:
        """Let an open node begin with a share (0 to 1) of its sibling's tokens.

        This is FlashTTS's DuplicateThenTruncate. With fewer than two tokens nothing happens. The KV
        of these tokens is computed when the row joins (`chains`).
        """
        source: Node | Row = begun
        tokens, state, row = list(begun.token_ids), state_of(begun), self.open_row(node)
        if not tokens and state is not None and state.row is not None:
            source, tokens = state.row, state.row.tokens
        most = len(tokens) - (source.stop is not None)  # without the token that ends the step
        count = min(int(share * len(tokens)), row.limit.tokens - 1, most)
        if count < _LEAST_BEGUN or row.tokens:
            return
        row.tokens, row.logprobs = tokens[:count], list(source.logprobs[:count])
        row.top = list(source.top[:count])
        row.stats = {name: list(values[:count]) for name, values in source.stats.items()}

    # --- what nothing reads any more ---------------------------------------------------------

    def free_outside_window(self, tree: SearchTree) -> None:
        """Free window KV and recurrent states of this tree that no later row reads.

        The state of a prompt is kept, because the prompt may get children at any time.
        """
        groups = self._cache.device.groups
        for window, fixed in sorted({(g.window, g.fixed) for g in groups if g.window is not None}):
            for node in tree.outside_window(window, _begins):
                stays = fixed and node.parent is None
                if (state := state_of(node)) is not None and state.row is None and not stays:
                    self._cache.forget(state.segment, window)

    def let_parents_go(self, rows: Sequence[Row]) -> bool:
        """Unpin the recurrent states of parents, once rows have states of their own.

        Return True if this frees room.
        """
        if not self._cache.device.has_states:
            return False
        before = self._cache.room
        for row in rows:
            row.lease.keep(row.needs())
        return self._cache.room > before

    # --- what a schedule sees ----------------------------------------------------------------

    def demand(self, beams: Sequence[Node]) -> KVDemand | None:
        """Return the KV that open nodes need in a round; None if KV cannot leave the device.

        Segments are numbered in the order in which the paths first meet them.
        """
        if not self._cache.evicts:
            return None
        ledger, numbers = self._cache.device, dict[Node, int]()
        reads = dict[Node, set[int]]()  # per node, the layer groups whose KV some beam reads
        parent, leaf = list[int | None](), list[int | None]()
        sizes, resident, growth = list[int](), list[int](), list[int]()
        for beam in beams:
            above: int | None = None
            begun = state_of(beam)
            own = begun.segment.length if begun is not None else 0
            for node in beam.path():
                state = state_of(node)
                stored = state.segment.length if state is not None else 0
                # A parked beam has stored whole blocks of its step, and reads them like a segment.
                # A prompt or a turn has no KV until the first row after it is admitted.
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
            blocks = ledger.blocks_for(self.expected_tokens(beam)) - ledger.blocks_for(stored)
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
        """Return a node's bytes in layer groups that `reads` lacks, and add these groups.

        num_tokens: the node's tokens.
        behind: tokens between the node and the step that reads it.
        since: tokens of that step that are stored; the step then has its own recurrent state.
        """
        ledger, num_blocks = self._cache.device, 0
        for number, group in enumerate(ledger.groups):
            passed = behind + (since if group.fixed else 0)
            reached = group.window is None or passed + 1 < group.window
            if reached and number not in reads:
                reads.add(number)
                num_blocks += group.blocks_for(num_tokens)
        return num_blocks * ledger.bytes_per_block


def _begins(leaf: Node) -> int:
    """Return the first position on a leaf's path that must still be computed.

    Prompts, ends of replies, and turns are computed when the first row after them is admitted.
    """
    owing = list(takewhile(lambda node: not is_complete(node), reversed(leaf.path())))
    return owing[-1].start if owing else leaf.end
