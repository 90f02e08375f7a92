"""Estimates for admission: how long steps get, the KV that rows need, and how many rows fit.

LBS section 4.2 reads the free memory before every step and sets #Beam from it. Here KV has a budget
of its own (`RowManager`). The rest of a row's memory, its tail, activations and logits, is counted
separately (`BatchSizeLimit`). This module also creates rows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import takewhile

from beamwright.engine.endings import begins_in_thought, row_limit
from beamwright.engine.row import (
    Row,
    RowLimit,
    TreeDecodingSettings,
    create_generator_state,
    get_generator_state,
    has_all_kv,
)
from beamwright.kv.cache import CacheManager
from beamwright.models.decoder import padded_rows
from beamwright.plan.machines import PassCosts
from beamwright.protocols import KVDemand
from beamwright.tree import Node, SearchTree

# Maximum number of tokens of a row per iteration; rows join and leave between iterations.
ITERATION_TOKENS = 16
_FIRST_GUESS = 32  # tokens of a step before any step is decoded
_MARGIN = 1.25  # expected length of a step, divided by the mean length so far
_LEAST_BEGUN = 2  # minimum number of tokens that a child copies from a sibling
_COMPACT_BELOW = 0.75  # shrinking a batch to this share of its rows always pays
_REARRANGE_S = 0.005  # seconds that rearranging the batch takes on the host
_STOPPED_SHARE = 16  # 1/16 of the rows must stop to end an iteration of slow passes


class BatchSizeLimit:
    """Rule that limits the batch size by memory besides KV, and decides when to shrink the batch.

    free_bytes: returns the device's free bytes; None if it does not report them (a CPU).
    row_bytes: returns the bytes that a row needs besides KV, given the tokens of its step.
    costs: time model of a forward pass.
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

        held_bytes: bytes that are already allocated, and reserved for rows.
        """
        limits = [] if self._failed_at is None else [max(1, self._failed_at // 2)]
        if self._free_bytes is not None:
            free_bytes = self._free_bytes() + held_bytes
            limits.append(max(1, free_bytes // self._row_bytes(step_tokens)))
        return min(limits, default=None)

    def pays_to_compact(self, num_active: int, num_rows: int) -> bool:
        """Return True if removing stopped rows from the batch saves more time than it costs.

        num_active: rows that have not stopped. num_rows: rows of the batch, padding included.
        """
        fewer, costs = self._pad(num_active), self.costs or PassCosts()
        spared_s = ITERATION_TOKENS * (costs.seconds(num_rows) - costs.seconds(fewer))
        pays = fewer <= _COMPACT_BELOW * num_rows or spared_s > _REARRANGE_S
        return pays and 0 < num_active <= fewer < num_rows

    def stops_to_end(self, awaited: int, num_active: int, num_rows: int) -> int:
        """Return how many open rows must stop to end an iteration early, if no step waits.

        If passes are slow, a small share of the rows is enough, because stopped rows are computed
        until the iteration ends. If passes are fast, enough rows must stop that shrinking the
        batch pays.

        awaited: number of open rows. num_active, num_rows: as in `pays_to_compact`.
        """
        if self.costs is not None and self.costs.seconds(num_active) > _REARRANGE_S:
            return max(1, awaited // _STOPPED_SHARE)
        others = num_active - awaited
        few = range(1, awaited)  # bisect: if shrinking to n rows pays, so does shrinking further
        return awaited - bisect(
            few, False, key=lambda n: not self.pays_to_compact(n + others, num_rows)
        )

    def record_out_of_memory(self, num_rows: int) -> None:
        """Record that memory ran out with `num_rows` rows, so that later batches are smaller.

        The failure of a single row sets no limit.
        """
        if num_rows > 1:
            self._failed_at = min(num_rows, self._failed_at or num_rows)


class RowManager:
    """Creator of rows, with estimates of step lengths and of the KV that a round needs.

    Lengths are exact if steps have a fixed length, else estimated from the steps seen so far.
    Schedules and admission reserve memory by them; results do not depend on them.

    decodings: the settings of all trees. context: maximum number of tokens of a path.
    """

    def __init__(self, cache: CacheManager, decodings: TreeDecodingSettings, context: int) -> None:
        self._cache, self.decodings, self._context = cache, decodings, context
        self._num_steps = self._num_tokens = 0
        self._previous_need_bytes: int | None = None

    # --- how long steps are ------------------------------------------------------------------

    def record_length(self, num_tokens: int) -> None:
        """Record the number of tokens of a decoded step, for `expected_tokens`."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    def has_fixed_length(self, node: Node) -> bool:
        """Return True if steps of this node's tree have a fixed length, unless the path ends first.

        If the model marks thoughts, lengths vary, because the end of a thought ends a step.
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

    def get_or_create_row(self, node: Node, group: int = 0) -> Row:
        """Return a node's row: a new one with an empty segment, or the one that was preempted."""
        state = get_generator_state(node)
        if state is None:
            state, decoding = create_generator_state(node, self._cache), self.decodings.of(node)
            thought = begins_in_thought(node, self.decodings.marks)
            limit = self._limit(node, thought=thought is not False)
            limit_outside_thought = self._limit(node) if thought is None else None
            state.row = Row(
                node, state.segment, decoding, limit, group, thought, limit_outside_thought
            )
        assert state.row is not None
        return state.row

    def start_from_sibling(self, node: Node, begun: Node, share: float) -> None:
        """Copy a share (0 to 1) of a sibling's tokens to an open node, which decodes on from there.

        This is FlashTTS's DuplicateThenTruncate. Fewer than two tokens are not copied. The KV of
        copied tokens is computed when the row joins (`chains.prefill_paths`).
        """
        source: Node | Row = begun
        tokens, state = list(begun.token_ids), get_generator_state(begun)
        row = self.get_or_create_row(node)
        if not tokens and state is not None and state.row is not None:
            source, tokens = state.row, state.row.tokens
        most = len(tokens) - (source.stop is not None)  # without the token that ends the step
        count = min(int(share * len(tokens)), row.limit.tokens - 1, most)
        if count < _LEAST_BEGUN or row.tokens:
            return
        row.tokens, row.logprobs = tokens[:count], list(source.logprobs[:count])
        row.top = list(source.top[:count])
        row.stats = {name: list(values[:count]) for name, values in source.stats.items()}

    # --- KV that no row reads any more -------------------------------------------------------

    def free_outside_window(self, tree: SearchTree) -> None:
        """Free KV of sliding-window layers, and recurrent states, that no later row reads.

        The state of a prompt is kept, because the prompt may get children at any time.
        """
        groups = self._cache.device.groups
        for window, fixed in sorted(
            {(g.window, g.state_blocks) for g in groups if g.window is not None}
        ):
            for node in tree.outside_window(window, _first_uncomputed):
                stays = fixed and node.parent is None
                if (
                    (state := get_generator_state(node)) is not None
                    and state.row is None
                    and not stays
                ):
                    self._cache.free_window(state.segment, window)

    def unpin_parent_states(self, rows: Sequence[Row]) -> bool:
        """Unpin recurrent states of parents that these rows no longer read.

        A row reads its parent's state only until it has a state of its own. Return True if more KV
        can be evicted than before.
        """
        if not self._cache.device.has_states:
            return False
        before = self._cache.available_blocks
        for row in rows:
            row.lease.keep_only(row.needed_segments())
        return self._cache.available_blocks > before

    # --- KV demand, for schedules ------------------------------------------------------------

    def demand(self, beams: Sequence[Node]) -> KVDemand | None:
        """Return the KV that a round of these open nodes needs; None if KV is never evicted.

        Segments are numbered in the order in which they first occur on the paths.
        """
        if not self._cache.evicts:
            return None
        ledger, numbers = self._cache.device, dict[Node, int]()
        reads = dict[Node, set[int]]()  # per node, the layer groups whose KV some beam reads
        parent, leaf = list[int | None](), list[int | None]()
        sizes, resident, growth = list[int](), list[int](), list[int]()
        for beam in beams:
            above: int | None = None
            begun = get_generator_state(beam)
            own = begun.segment.length if begun is not None else 0
            for node in beam.context():
                state = get_generator_state(node)
                stored = state.segment.length if state is not None else 0
                # A preempted beam has stored whole blocks of its step, and reads them like a
                # segment.
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
                    sizes[above] += self._added_bytes(num_tokens, behind, since, known)
            leaf.append(above)
            blocks = ledger.blocks_for(self.expected_tokens(beam)) - ledger.blocks_for(own)
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

    def _added_bytes(self, num_tokens: int, behind: int, since: int, reads: set[int]) -> int:
        """Return the bytes of a node's KV that this reader needs and no earlier reader did.

        A step reads sliding-window layers only within the window, and a recurrent state only of
        its parent or its own.

        num_tokens: the node's tokens.
        behind: tokens between the node and the step that reads it.
        since: tokens that the reading step has stored already. If there are any, that step reads
            its own recurrent state instead of its parent's.
        reads: numbers of the layer groups that earlier readers need; extended by this call.
        """
        ledger, num_blocks = self._cache.device, 0
        for number, group in enumerate(ledger.groups):
            passed = behind + (since if group.state_blocks else 0)
            reached = group.window is None or passed + 1 < group.window
            if reached and number not in reads:
                reads.add(number)
                num_blocks += group.blocks_for(num_tokens)
        return num_blocks * ledger.bytes_per_block


def _first_uncomputed(leaf: Node) -> int:
    """Return the position of the first token on a leaf's path that has no KV yet.

    Prompts, last steps of replies, and turns get KV when the first row below them is admitted.
    """
    owing = list(takewhile(lambda node: not has_all_kv(node), reversed(leaf.context())))
    return owing[-1].start if owing else leaf.end
