"""Admission: which problems (trees) enter the engine, and which steps enter the running batch.

With `--explore decoupled` (eager; Alg. 5 of decoupled tree exploration) queued problems enter until
the generator's batch is full, as long as their KV fits. How much KV a tree needs is known only when
the first tree has ended. With a host tier, KV that does not fit costs only time on the link, so the
measured waiting decides. With `--in-flight N` there are always N problems: evicting KV may cost
less than idle rows (docs/log/2026-11.md#decoupled-simulated).

A larger priority goes first. Among equal priorities, decoding prefers the tree that was served
least; everything else is first come, first served.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, takewhile

from beamwright.engine.capacity import RowManager
from beamwright.engine.row import Row, get_generator_state, has_all_kv, row_kv_path
from beamwright.engine.tree_run import TreeRun
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Segment, copies_needed
from beamwright.plan.machines import PassCosts
from beamwright.protocols import Parking, Plan
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node, NodeState

# Number of candidates, of all problems together, that keeps most devices busy.
USUAL_ROWS = 64

# No tree is admitted if models wait for the link for more than this share of the time.
_MOST_STALLED = 0.05

# Value of `usual_rows` for a remote generator, which has its own batch, memory and queue.
REMOTE_ROWS = 256


# --- trees ---------------------------------------------------------------------------------------


@dataclass
class TreeAdmission:
    """Rule that decides whether one more tree may enter the engine.

    in_flight: maximum number of problems at once; None: as many as keep the generator busy.
    stores: KV caches of the generator and the verifiers.
    usual_rows: number of candidates, of all problems together, that keeps the generator busy.
    """

    settings: ScheduleSettings
    in_flight: int | None
    stores: Sequence[CacheManager]
    usual_rows: int = USUAL_ROWS
    clock: Callable[[], float] = time.perf_counter
    _filling: bool = field(default=True, init=False)
    _largest_tokens: int = field(default=0, init=False)
    _before: frozenset[TreeRun] = field(default=frozenset(), init=False)
    _under_pressure: bool | None = field(default=None, init=False)  # None until a tree has ended
    _evicted: int = field(default=0, init=False)
    _stalled_s: float = field(default=0.0, init=False)
    _since_s: float = field(default=0.0, init=False)

    def has_room(self, live: Mapping[TreeRun, int], num_open: int) -> bool:
        """Return True if one more tree may enter.

        live: the trees in flight, each with the number of candidates that it may have.
        num_open: steps of these trees that are being decoded or wait for decoding.
        """
        self._measure(live)
        if not live:
            self._filling = True
        elif self._is_full(list(live.values()), num_open):
            # In lockstep, no tree enters this full batch of trees before all of them have ended.
            self._filling = self.settings.explore != "lockstep"
            return False
        return self._filling

    def _is_full(self, sizes: Sequence[int], num_open: int) -> bool:
        if self.in_flight is not None:
            return len(sizes) >= self.in_flight
        if sum(sizes) < self.usual_rows or self.settings.explore != "decoupled":
            return sum(sizes) >= self.usual_rows
        # N_LLM in decoupled tree exploration: the rows that keep the generator busy.
        rows = self.settings.max_batch or self.usual_rows
        return num_open >= rows or not self._fits(sizes)

    def _measure(self, live: Mapping[TreeRun, int]) -> None:
        """Measure the size of the largest tree, and whether KV memory is too small for more trees.

        Memory is judged whenever a tree ends. Without a host tier it is too small if KV was evicted
        since the previous tree ended; with a host tier, if models waited too long for transfers. If
        memory is too small, no tree replaces the ended one.
        """
        now = frozenset(live)
        if not self._before:
            self._since_s = self.clock()
        elif not self._before <= now:
            evicted = sum(store.counts.evicted_blocks for store in self.stores)
            stalled_s = sum(store.counts.transfer_wait_s for store in self.stores)
            seconds = self.clock() - self._since_s
            waited = stalled_s - self._stalled_s > _MOST_STALLED * seconds
            self._under_pressure = waited if self._keeps_evicted_kv else evicted > self._evicted
            self._evicted, self._stalled_s = evicted, stalled_s
            self._since_s += seconds
        self._before = now
        for run in live:
            self._largest_tokens = max(self._largest_tokens, *run.round_tokens[-1:], 0)

    def _fits(self, sizes: Sequence[int]) -> bool:
        """Return True if KV of one more tree fits, if all trees get as large as the largest yet."""
        if self._under_pressure is not False:
            return False
        devices = [store.device for store in self.stores]
        # A tree's KV is on the generator's device and on one verifier's.
        devices = devices[: len(devices) + 1 - self.settings.verifiers]
        tree_bytes = self._largest_tokens * sum(each.bytes_per_token for each in devices)
        row_bytes = sum(
            g.state_blocks * each.bytes_per_block for each in devices for g in each.groups
        )
        wanted_bytes = tree_bytes * (len(sizes) + 1) + row_bytes * (sum(sizes) + max(sizes))
        budgets = [each.device.budget for each in self.stores]
        if self._keeps_evicted_kv:
            budgets += [each.host.ledger.budget for each in self.stores if each.host is not None]
        return wanted_bytes <= sum(each.total_bytes for each in budgets)

    @property
    def _keeps_evicted_kv(self) -> bool:
        """True if evicted KV is kept in host memory, so that it need not be computed again."""
        hosts = [store.host for store in self.stores]
        return all(host is not None and not host.recompute for host in hosts)


def split_by_priority(plan: Plan, runs: Collection[TreeRun]) -> Plan:
    """Return `plan` reordered, with groups split, so that steps of a larger priority come first."""
    priorities = {run.tree.root: run.priority for run in runs}
    if len(set(priorities.values())) < 2:
        return plan
    parking = plan.parking and replace(plan.parking, level_from=0)

    def rank(node: Node) -> int:
        return -priorities[node.root]

    parts = [
        tuple(nodes) for group in plan.groups for _, nodes in groupby(sorted(group, key=rank), rank)
    ]
    groups = tuple(sorted(parts, key=lambda nodes: rank(nodes[0])))
    return replace(plan, groups=groups, parking=parking)


# --- steps ---------------------------------------------------------------------------------------


class AdmissionQueue:
    """Queue of open steps in the order of the schedule's plan. It chooses the rows that join.

    If the plan has `Parking`, KV of the first rows may be loaded from the host while other rows
    run, so that the device does not idle. The first rows join after as many passes of the others
    as the loads should take. The number of passes is computed beforehand, from bytes and the cost
    model. It never depends on when a copy ends, so equal runs stay equal.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        cache: CacheManager,
        row_manager: RowManager,
        costs: PassCosts | None,
    ) -> None:
        self._settings, self._cache, self._costs = settings, cache, costs
        self._row_manager = row_manager
        self._pairs: deque[tuple[Node, int]] = deque()  # each with the number of its group
        self._num_groups = 0
        # barriers: True if a group begins only when the previous group has ended. With `--batching
        # auto`, there are barriers if the tree outgrows the device, step lengths are fixed, and the
        # plan has no parking. many_groups: True if the plan has more than one group.
        self.barriers = self.many_groups = False
        # The plan's parking parameters: rows reserve KV one block at a time, and are preempted if
        # blocks run out. None: rows reserve KV for their expected length.
        self.parking: Parking | None = None
        # Rows whose KV is being loaded, and the number of passes to run before these rows join.
        self.prefetching, self.passes_until_join = list[Row](), 0

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def nodes(self) -> list[Node]:
        """Waiting nodes in order."""
        return [node for node, _ in self._pairs]

    @property
    def group(self) -> int:
        """Group number of the first waiting node."""
        return self._pairs[0][1]

    # --- the order ---------------------------------------------------------------------------

    def replace(self, plan: Plan, running: Collection[Node]) -> None:
        """Replace the waiting nodes with the nodes of `plan` that are not running."""
        self._pairs.clear()
        for group in plan.groups:
            self._num_groups += 1
            self._pairs += [(node, self._num_groups) for node in group if node not in running]
        self.many_groups, self.parking = len(plan.groups) > 1, plan.parking
        self.barriers = self._settings.batching == "grouped"
        if self._settings.batching == "auto" and plan.write_back and plan.parking is None:
            self.barriers = all(map(self._row_manager.has_fixed_length, self.nodes))

    def sort_last_rows(self, num_running: int) -> None:
        """Move the rows with the fewest tokens to the front, so that the last rows end together.

        Do so only if the plan has parking, and at most `Parking.level_from` rows wait or run. Rows
        with equally many tokens keep their order.
        """
        if self.parking and 0 < len(self) <= self.parking.level_from - num_running:
            self._pairs = deque(sorted(self._pairs, key=lambda pair: _num_tokens(pair[0])))

    def first_rows(self, most: int) -> list[Row]:
        """Return up to `most` rows from the front of the queue.

        If groups are barriers, return only rows of the first group. If the KV of the first rows is
        being prefetched, return only the rows with a prefetch. If the first row has no prefetch,
        cancel any that is under way: other rows have moved to the front since it began.
        """
        group = self.group
        rows = [
            self._row_manager.get_or_create_row(node, group)
            for node, number in islice(self._pairs, max(0, most))
            if number == group or not self.barriers
        ]
        ready = list(takewhile(self.prefetching.__contains__, rows))
        if not ready:
            self.cancel_prefetch()
        return ready or rows

    def remove_first(self, count: int = 1) -> Node:
        """Remove the first `count` nodes (at least one), and return the first of them."""
        first, *_ = (self._pairs.popleft()[0] for _ in range(count))
        return first

    def put_back(self, row: Row) -> None:
        """Put a preempted row at the front of the queue."""
        self._pairs.appendleft((row.node, row.group))

    def remove(self, nodes: Collection[Node]) -> None:
        """Remove these nodes from the queue."""
        self._pairs = deque(pair for pair in self._pairs if pair[0] not in nodes)

    # --- KV memory ---------------------------------------------------------------------------

    def copies_needed(self, nodes: Iterable[Node]) -> dict[Segment, int]:
        """Return the segments that decoding these nodes reads, with the number of copies needed."""
        return copies_needed(map(row_kv_path, nodes), per_beam=self._cache.copies_per_beam)

    def tokens_to_reserve(self, rows: Iterable[Row]) -> dict[Segment, int]:
        """Return for each row's segment the tokens to reserve KV blocks for at admission.

        Rows of different lengths do not all end at once. On average they are half-way, so blocks
        for half of the expected remaining tokens are reserved. With parking, at most one block per
        row is reserved.
        """
        wanted = dict[Segment, int]()
        for row in rows:
            left = self._row_manager.expected_tokens(row.node, row.limit) - row.forwarded
            new = max(1, left if self._row_manager.has_fixed_length(row.node) else -(-left // 2))
            new = min(new, self._cache.device.block_tokens) if self.parking else new
            wanted[row.segment] = row.forwarded + new
        return wanted

    def first_that_fit(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the longest prefix of `rows` that fits: the KV that they read, and new blocks."""
        cache = self._cache

        def too_many(count: int) -> bool:
            first = rows[:count]
            needs = {} if cache.never_moves else self.copies_needed([row.node for row in first])
            grown = self.tokens_to_reserve(first)
            for parent in dict.fromkeys(row.node.parent for row in first):
                grown |= self._missing_prompt_kv(parent)
            return not cache.fits(cache.total_copies(needs), grown)

        if not rows or not too_many(len(rows)):
            return rows
        return rows[: bisect_left(range(1, len(rows)), True, key=too_many)]

    def fits_free_memory(self, rows: Sequence[Row]) -> bool:
        """Return True if these rows can join without any KV transfer or eviction."""
        needs = self.copies_needed([row.node for row in rows])
        resident = all(segment.resident for segment in needs)
        return resident and self._cache.fits_free_blocks(needs, self.tokens_to_reserve(rows))

    def _missing_prompt_kv(self, parent: Node | None) -> dict[Segment, int]:
        """Return the segment and token count of a parent that must be prefilled; empty if none."""
        if parent is None or has_all_kv(parent):
            return {}
        state = get_generator_state(parent)
        segment = state.segment if state is not None else self._cache.create_unmanaged()
        num_tokens = len(parent.token_ids)
        return {segment: num_tokens} if segment.length < num_tokens else {}

    # --- prefetching -------------------------------------------------------------------------

    def prefetch_group(self, running: Sequence[Row]) -> None:
        """Tell the cache which KV the waiting groups need, and load the KV of the first group.

        Without barriers, waiting nodes are divided into groups as large as the running batch.
        """
        if not self._cache.evicts:
            return
        groups: dict[int, list[Node]] = {}
        for place, (node, group) in enumerate(self._pairs):
            number = group if self.barriers else place // max(1, len(running))
            groups.setdefault(number, []).append(node)
        needs = [*map(self.copies_needed, groups.values())]
        self._cache.announce_uses(needs)
        if not groups:
            return
        if self._settings.prefetch:
            self._cache.prefetch_group(needs[0])
        growth = map(self._row_manager.expected_tokens, next(iter(groups.values())))
        self._cache.store_for_group(needs[0], growth, {row.segment for row in running})

    def prefetch_rows(self, rows: Sequence[Row], num_running: int) -> bool:
        """Start loading the KV of `rows` from the host; return True if they should join later.

        The rows should join after `passes_until_join` passes of the running rows.

        Raises:
            CapacityError: if the KV does not fit; LinkError: if the link has failed.
        """
        costs = self._costs
        if self.prefetching or not num_running or self.parking is None or costs is None:
            return False
        device = self._cache.device
        needs = self.copies_needed([row.node for row in rows])
        kv_bytes = device.num_blocks * device.bytes_per_block  # with parking, a pass reads most KV
        pass_s = max(costs.seconds(num_running), costs.weights_s + kv_bytes * costs.byte_s)
        load = self._cache.missing_bytes(needs) / costs.link_bandwidth / pass_s
        missing = len(rows) / (len(rows) + num_running)
        choices = 0, int(load), int(load) + 1
        self.passes_until_join = min(choices, key=lambda n: n * missing + max(0.0, load - n))
        if not self.passes_until_join:
            return False
        self._cache.prefetch_rows(needs)
        for row in rows:
            row.pin_segments()
        self.prefetching = list(rows)
        return True

    def cancel_prefetch(self) -> bool:
        """Unpin the KV of rows being prefetched; return False if there are none."""
        rows, self.prefetching = self.prefetching, []
        for row in rows:
            row.unpin_segments()
        return bool(rows)

    def discard(self, row: Row) -> None:
        """Forget that KV of a row is being prefetched. The caller has unpinned the KV."""
        self.prefetching = [each for each in self.prefetching if each is not row]


def _num_tokens(node: Node) -> int:
    """Return how many tokens of a node's unfinished step are decoded."""
    state = get_generator_state(node)
    return len(state.row.tokens) if state is not None and state.row is not None else 0


class SpeculativeQueue:
    """Queue of speculative children, decoded in idle slots (FlashTTS 4.1.2, phase 2).

    The likeliest child comes first. Admitted children hold KV until selection opens them or they
    are dropped. They lose their slot and memory to any open step that needs them.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, None] = {}
        self.held: dict[Node, None] = {}  # children with KV, in the order of admission
        # fresh: True if children were added since the last `take_rows`. active: True if the last
        # `replace` added any.
        self.fresh = self.active = False

    def replace(self, nodes: Iterable[Node]) -> None:
        """Replace the waiting children."""
        self._waiting = dict.fromkeys(nodes)
        self.fresh = self.active = bool(self._waiting)

    def put_back(self, node: Node) -> None:
        """Put a preempted child at the front of the waiting children."""
        self._waiting = {node: None, **self._waiting}

    def take_rows(
        self, row_manager: RowManager, queue: AdmissionQueue, running: Sequence[Row], most: int
    ) -> list[Row]:
        """Return rows for up to `most` waiting children, as long as memory is free.

        Children that are running or decoded, or that selection has opened, are skipped.
        """
        self.fresh = False
        rows: list[Row] = []
        under_way = {row.node for row in running}
        for node in self._waiting:
            if len(rows) >= most:
                break
            if not node.speculative or node in under_way or node.state is not NodeState.OPEN:
                continue
            row = row_manager.get_or_create_row(node)
            if not queue.fits_free_memory([*rows, row]):
                break
            rows.append(row)
        for row in rows:
            del self._waiting[row.node]
            self.held[row.node] = None
        return rows

    def discard(self, node: Node) -> None:
        """Remove a child whose KV was freed."""
        self._waiting.pop(node, None)
        self.held.pop(node, None)

    def last_admitted(self) -> Node | None:
        """Return the child that was admitted last, and is dropped first; None if there is none."""
        for node in [node for node in self.held if not node.speculative]:
            del self.held[node]  # selection has opened it
        return next(reversed(self.held), None)
