"""What rows need: how long steps will be, the KV demand of a round, and working memory.

Makes a node's row. Knows rows, segments and lengths; no queue, no tensors. LBS section
4.2 asks for the free memory before every step and sets #Beam by it: KV has its own ledger
(`Capacity`), and what else a row needs, its tail, its activations and its logits, is counted apart
(`WorkingMemory`).
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
    """

    def __init__(self, cache: CacheManager, decodings: Decodings, context: int) -> None:
        self._cache, self.decodings, self._context = cache, decodings, context
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

    # --- what nothing reads any more ---------------------------------------------------------

    def forget_unseen(self, tree: SearchTree) -> None:
        """Free what no row to come of this tree reaches, in layers that see a window; and states
        that none begins from, but a prompt's, which may get children at any time."""
        groups = self._cache.device.groups
        for window, fixed in sorted({(g.window, g.fixed) for g in groups if g.window is not None}):
            for node in tree.outside_window(window, _begins):
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


def _begins(leaf: Node) -> int:
    """The first position that is still to be computed on a path: a prompt, the end of a reply and a
    turn are, when the first row behind them is admitted."""
    owing = list(takewhile(lambda node: not is_complete(node), reversed(leaf.path())))
    return owing[-1].start if owing else leaf.end
