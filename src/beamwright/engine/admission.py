"""Who waits, and who goes first: trees for a place, steps for the batch.

`decoupled` fills the generator's batch from queued problems before anything else (eager; decoupled
tree exploration, Alg. 5), only where a tree's KV fits as well: how much that becomes is known when
the first one has ended. With a host tier what does not fit costs no more than waiting for the link,
so seconds of that are looked at. Where a number of problems is given, it is taken at its word: KV
that has to leave may cost less than rows that stay empty
(docs/log/2026-11.md#decoupled-simulated).

A larger priority goes first. Decoding, and of equal priority, whoever was served least; elsewhere,
whoever came first.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, takewhile

from beamwright.engine.capacity import Capacity
from beamwright.engine.row import Row, is_complete, path_read, state_of
from beamwright.engine.tree_run import TreeRun
from beamwright.kv.cache import CacheManager
from beamwright.kv.segments import Segment, copies_needed
from beamwright.plan.machines import PassCosts
from beamwright.protocols import Parking, Plan
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node, NodeState

USUAL_ROWS = 64
"""Candidates of all problems together that keep most devices busy."""

_MOST_STALLED = 0.05
"""Of the time: a link that is waited for longer gets no more to carry."""

REMOTE_ROWS = 256
"""The same of a remote generator, which has a batch, memory and a queue of its own."""


# --- trees ---------------------------------------------------------------------------------------


@dataclass
class TreeAdmission:
    """A place for one more tree, or none.

    in_flight: problems at a time at most; None for as many as there is work for. usual_rows:
    candidates of all problems together that keep the generator busy. clock: in which stalls are.
    """

    settings: ScheduleSettings
    in_flight: int | None
    stores: Sequence[CacheManager]
    usual_rows: int = USUAL_ROWS
    clock: Callable[[], float] = time.perf_counter
    _filling: bool = field(default=True, init=False)
    _largest_tokens: int = field(default=0, init=False)
    _before: frozenset[TreeRun] = field(default=frozenset(), init=False)
    _pressed: bool | None = field(default=None, init=False)  # not known until one has ended
    _evicted: int = field(default=0, init=False)
    _stalled_s: float = field(default=0.0, init=False)
    _since_s: float = field(default=0.0, init=False)

    def has_place(self, live: Mapping[TreeRun, int], num_open: int) -> bool:
        """live: trees under way, and how many candidates each may have; num_open: their steps that
        are decoded, or wait for it."""
        self._look(live)
        if not live:
            self._filling = True
        elif self._is_full(list(live.values()), num_open):
            self._filling = self.settings.explore != "lockstep"  # whose batch is complete
            return False
        return self._filling

    def _is_full(self, sizes: Sequence[int], num_open: int) -> bool:
        if self.in_flight is not None:
            return len(sizes) >= self.in_flight
        if sum(sizes) < self.usual_rows or self.settings.explore != "decoupled":
            return sum(sizes) >= self.usual_rows
        rows = self.settings.max_batch or self.usual_rows  # N_LLM
        return num_open >= rows or not self._fits(sizes)

    def _look(self, live: Mapping[TreeRun, int]) -> None:
        """See how large trees become; whenever one has ended, whether KV has had to leave since the
        one before it, and where a host keeps it whether that was waited for: then nobody comes in
        its place."""
        now = frozenset(live)
        if not self._before:
            self._since_s = self.clock()
        elif not self._before <= now:
            evicted = sum(store.counts.evicted_blocks for store in self.stores)
            stalled_s = sum(store.counts.transfer_wait_s for store in self.stores)
            seconds = self.clock() - self._since_s
            waited = stalled_s - self._stalled_s > _MOST_STALLED * seconds
            self._pressed = waited if self._hosted else evicted > self._evicted
            self._evicted, self._stalled_s = evicted, stalled_s
            self._since_s += seconds
        self._before = now
        for run in live:
            self._largest_tokens = max(self._largest_tokens, *run.round_tokens[-1:], 0)

    def _fits(self, sizes: Sequence[int]) -> bool:
        """True if one more has room, were all as large as the largest so far."""
        if self._pressed is not False:
            return False
        devices = [store.device for store in self.stores]
        devices = devices[: len(devices) + 1 - self.settings.verifiers]  # one verifier has the tree
        tree_bytes = self._largest_tokens * sum(each.bytes_per_token for each in devices)
        row_bytes = sum(g.fixed * each.bytes_per_block for each in devices for g in each.groups)
        wanted_bytes = tree_bytes * (len(sizes) + 1) + row_bytes * (sum(sizes) + max(sizes))
        budgets = [each.device.budget for each in self.stores]
        if self._hosted:
            budgets += [each.host.ledger.budget for each in self.stores if each.host is not None]
        return wanted_bytes <= sum(each.total_bytes for each in budgets)

    @property
    def _hosted(self) -> bool:
        """True if what leaves the device is kept on a host, and not computed again."""
        hosts = [store.host for store in self.stores]
        return all(host is not None and not host.recompute for host in hosts)


def cut_by_priority(plan: Plan, runs: Collection[TreeRun]) -> Plan:
    """A plan whose groups are cut so that a larger priority comes first, whatever it says."""
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
    """Open steps in the order of a plan: which may join the running rows, and the room they need.

    Where rows park, those in front may wait for KV that comes from the host while others run: they
    hold on the device what they read, there or on its way. A row that joins waits for what it
    lacks, and so does everybody else; where that takes longer than those that run lose by a few
    passes without it, they get these passes first. Their number is known beforehand, from bytes and
    the cost model: never when a copy has ended, so equal runs stay equal.

    barriers: a group begins when the one before it has ended; with `--batching auto`, where the
    tree outgrows the device, and all rows of a group end together (their lengths are exact), unless
    they park. many_groups: the plan has several. parking: of the plan, how its rows park; None:
    blocks are reserved for what a row is expected to write, not for one block's tokens at a time.
    prefetching: rows in front whose KV comes; passes: that the others run before these join.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        cache: CacheManager,
        capacity: Capacity,
        costs: PassCosts | None,
    ) -> None:
        self._settings, self._cache, self._capacity, self._costs = settings, cache, capacity, costs
        self._pairs: deque[tuple[Node, int]] = deque()  # each with the number of its group
        self._num_groups = 0
        self.barriers = self.many_groups = False
        self.parking: Parking | None = None
        self.prefetching, self.passes = list[Row](), 0

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def nodes(self) -> list[Node]:
        """The next one first."""
        return [node for node, _ in self._pairs]

    @property
    def group(self) -> int:
        """Number of the next one's group."""
        return self._pairs[0][1]

    # --- the order ---------------------------------------------------------------------------

    def replace(self, plan: Plan, running: Collection[Node]) -> None:
        """Wait for what a plan says, but for what runs."""
        self._pairs.clear()
        for group in plan.groups:
            self._num_groups += 1
            self._pairs += [(node, self._num_groups) for node in group if node not in running]
        self.many_groups, self.parking = len(plan.groups) > 1, plan.parking
        self.barriers = self._settings.batching == "grouped"
        if self._settings.batching == "auto" and plan.write_back and plan.parking is None:
            self.barriers = all(map(self._capacity.exact, self.nodes))

    def level_rows(self, num_running: int) -> None:
        """Those that have the fewest tokens first, of equals as they are, if with those that run
        few enough are left."""
        if self.parking and 0 < len(self) <= self.parking.level_from - num_running:
            self._pairs = deque(sorted(self._pairs, key=lambda pair: _num_tokens(pair[0])))

    def first_rows(self, most: int) -> list[Row]:
        """Of the first ones, with barriers those of one group; those alone whose KV comes, unless
        others wait before them, who then come in their place."""
        group = self.group
        rows = [
            self._capacity.open_row(node, group)
            for node, number in islice(self._pairs, max(0, most))
            if number == group or not self.barriers
        ]
        ready = list(takewhile(self.prefetching.__contains__, rows))
        if not ready:
            self.cancel_prefetch()
        return ready or rows

    def leave(self, count: int = 1) -> Node:
        """This many in front, one at least, do not wait any more; returns the first of them."""
        first, *_ = (self._pairs.popleft()[0] for _ in range(count))
        return first

    def put_back(self, row: Row) -> None:
        """In front of all."""
        self._pairs.appendleft((row.node, row.group))

    def remove(self, nodes: Collection[Node]) -> None:
        """Those of these that wait."""
        self._pairs = deque(pair for pair in self._pairs if pair[0] not in nodes)

    # --- room --------------------------------------------------------------------------------

    def read_by(self, nodes: Iterable[Node]) -> dict[Segment, int]:
        """Device copies that the steps of these nodes read."""
        return copies_needed(map(path_read, nodes), per_beam=self._cache.copies_per_beam)

    def written_by(self, rows: Iterable[Row]) -> dict[Segment, int]:
        """Tokens that blocks are reserved for when these rows are admitted.

        Rows whose lengths differ do not all end at once: on average they are half-way.
        """
        wanted = dict[Segment, int]()
        for row in rows:
            left = self._capacity.expected(row.node, row.limit) - row.forwarded
            new = max(1, left if self._capacity.exact(row.node) else -(-left // 2))
            new = min(new, self._cache.device.block_tokens) if self.parking else new
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

    def _incomplete(self, parent: Node | None) -> dict[Segment, int]:
        """The segment of a prompt or a turn that lacks KV, and how many tokens it will have."""
        if parent is None or is_complete(parent):
            return {}
        state = state_of(parent)
        segment = state.segment if state is not None else self._cache.blank()
        num_tokens = len(parent.token_ids)
        return {segment: num_tokens} if segment.length < num_tokens else {}

    # --- KV that comes -----------------------------------------------------------------------

    def prefetch_group(self, running: Sequence[Row]) -> None:
        """Say what waits, group by group, and start to fetch what comes next; without barriers, as
        many at a time as run."""
        if not self._cache.evicts:
            return
        groups: dict[int, list[Node]] = {}
        for place, (node, group) in enumerate(self._pairs):
            number = group if self.barriers else place // max(1, len(running))
            groups.setdefault(number, []).append(node)
        needs = [*map(self.read_by, groups.values())]
        self._cache.expect(needs)
        if not groups:
            return
        if self._settings.prefetch:
            self._cache.prefetch(needs[0])
        growth = map(self._capacity.expected, next(iter(groups.values())))
        self._cache.write_ahead(needs[0], growth, {row.segment for row in running})

    def prefetch_rows(self, rows: Sequence[Row], num_running: int) -> bool:
        """Load what these rows lack, if they park and others are to run meanwhile; True if so.

        Raises:
            CapacityError: if it does not fit; LinkError: if the link has failed.
        """
        costs = self._costs
        if self.prefetching or not num_running or self.parking is None or costs is None:
            return False
        device = self._cache.device
        needs = self.read_by([row.node for row in rows])
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
        self.prefetching = list(rows)
        return True

    def cancel_prefetch(self) -> bool:
        """Rows whose KV comes hold nothing any more; False if there were none."""
        rows, self.prefetching = self.prefetching, []
        for row in rows:
            row.let_go()
        return bool(rows)

    def forget(self, row: Row) -> None:
        """It has let go by itself."""
        self.prefetching = [each for each in self.prefetching if each is not row]


def _num_tokens(node: Node) -> int:
    """Of a step so far."""
    state = state_of(node)
    return len(state.row.tokens) if state is not None and state.row is not None else 0


class SpeculativeQueue:
    """Children of complete steps, for slots that no open step waits for (FlashTTS section 4.1.2,
    phase 2): those that wait, the likeliest first, and those that hold KV, in the order they got
    it. They never hold what an open step needs: its slots, or its room.

    held: those that hold KV. fresh: something may have come that can be begun. active: something is
    to be decoded ahead in this round.
    """

    def __init__(self) -> None:
        self._waiting: dict[Node, None] = {}
        self.held: dict[Node, None] = {}
        self.fresh = self.active = False

    def replace(self, nodes: Iterable[Node]) -> None:
        """What waits now."""
        self._waiting = dict.fromkeys(nodes)
        self.fresh = self.active = bool(self._waiting)

    def put_back(self, node: Node) -> None:
        """One that had to leave goes on before others begin."""
        self._waiting = {node: None, **self._waiting}

    def begin(
        self, capacity: Capacity, queue: AdmissionQueue, running: Sequence[Row], most: int
    ) -> list[Row]:
        """Rows of those in front, as many as there is free room for; they hold KV from now on.

        Who was opened since, runs, or is complete does not wait.
        """
        self.fresh = False
        rows: list[Row] = []
        under_way = {row.node for row in running}
        for node in self._waiting:
            if len(rows) >= most:
                break
            if not node.speculative or node in under_way or node.state is not NodeState.OPEN:
                continue
            row = capacity.open_row(node)
            if not queue.is_free([*rows, row]):
                break
            rows.append(row)
        for row in rows:
            del self._waiting[row.node]
            self.held[row.node] = None
        return rows

    def forget(self, node: Node) -> None:
        """It holds nothing any more, and does not wait."""
        self._waiting.pop(node, None)
        self.held.pop(node, None)

    def last(self) -> Node | None:
        """The one whose room is given up first; None if there is none."""
        for node in [node for node in self.held if not node.speculative]:
            del self.held[node]  # selection has opened it
        return next(reversed(self.held), None)
