"""Who waits, and who goes first: trees for a place, steps for the batch, models for memory.

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
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

from beamwright.counters import Counters
from beamwright.engine.capacity import Capacity
from beamwright.engine.row import Row, state_of
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError
from beamwright.kv.cache import CacheManager
from beamwright.protocols import Parking, Plan
from beamwright.sections import ScheduleSettings
from beamwright.tree import Node, NodeState

USUAL_ROWS = 64
"""Candidates of all problems together that keep most devices busy."""

_MOST_STALLED = 0.05
"""Of the time: a link that is waited for longer gets no more to carry."""

REMOTE_ROWS = 256
"""The same of a remote generator, which has a batch, memory and a queue of its own."""

_FIRST_STEP_TOKENS, _HALF_BLOCK = 32, 4


# --- trees ---------------------------------------------------------------------------------------


@dataclass
class Admission:
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


class Queue:
    """Open steps, each with the number of its group.

    batching: `--batching`; by itself a batch has barriers where the tree outgrows the device, and
    all rows of a group end together (their lengths are exact), unless they park.

    barriers: a group begins when the one before it has ended. many_groups: the plan has several.
    parking: of the plan, how its rows park.
    """

    def __init__(self, batching: str, exact: Callable[[Node], bool]) -> None:
        self._batching, self._exact = batching, exact
        self._pairs: deque[tuple[Node, int]] = deque()
        self._num_groups = 0
        self.barriers = self.many_groups = False
        self.parking = Parking()

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

    def replace(self, plan: Plan, running: Collection[Node]) -> None:
        """Wait for what a plan says, but for what runs."""
        self._pairs.clear()
        for group in plan.groups:
            self._num_groups += 1
            self._pairs += [(node, self._num_groups) for node in group if node not in running]
        self.many_groups = len(plan.groups) > 1
        self.parking = plan.parking or Parking()
        self.barriers = self._batching == "grouped"
        if self._batching == "auto" and plan.write_back and plan.parking is None:
            self.barriers = all(map(self._exact, self.nodes))

    def front(self, most: int) -> list[Node]:
        """The first ones, with barriers those of one group."""
        first = islice(self._pairs, max(0, most))
        return [node for node, group in first if group == self.group or not self.barriers]

    def batches(self, size: int) -> Sequence[Sequence[Node]]:
        """What comes, group by group; without barriers, so many at a time."""
        batches: dict[int, list[Node]] = {}
        for place, (node, group) in enumerate(self._pairs):
            batches.setdefault(group if self.barriers else place // size, []).append(node)
        return list(batches.values())

    def leave(self, count: int = 1) -> Node:
        """So many in front, one at least, do not wait any more; returns the first of them."""
        first, *_ = (self._pairs.popleft()[0] for _ in range(count))
        return first

    def put_back(self, node: Node, group: int) -> None:
        """In front of all."""
        self._pairs.appendleft((node, group))

    def level(self, num_running: int) -> None:
        """Those that have the fewest tokens first, of equals as they are, if with those that run
        few enough are left."""
        if 0 < len(self) <= self.parking.level_from - num_running:
            self._pairs = deque(sorted(self._pairs, key=lambda pair: _num_tokens(pair[0])))

    def remove(self, nodes: Collection[Node]) -> None:
        """Those of these that wait."""
        self._pairs = deque(pair for pair in self._pairs if pair[0] not in nodes)


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

    def begin(self, capacity: Capacity, running: Sequence[Row], most: int) -> list[Row]:
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
            if not capacity.is_free([*rows, row]):
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


# --- the memory of two models --------------------------------------------------------------------


class MovingSplit:
    """Two stores over one memory: bytes go from one model's KV to the other's.

    The model that runs next gets room for what it needs, as far as there is any; the idle one's KV
    leaves only where it is in the way. That was never slower than the ways of FlashTTS, section
    4.3, which are the lab's (`simulator.split`). Budgets always add up to the same number; what a
    search computes never depends on them.

    most_step_tokens: how long a step may become. scores_early: steps are scored while others are
    decoded (speculation), so that neither model may be left without room for its longest path while
    the other has its turn.
    """

    def __init__(
        self,
        generator: CacheManager,
        verifier: CacheManager,
        most_step_tokens: int = 256,
        *,
        scores_early: bool = False,
    ) -> None:
        self._generator, self._verifier = generator, verifier
        self._most_step_tokens, self._scores_early = most_step_tokens, scores_early
        self._first_bytes = generator.device.budget.total_bytes
        self.total_bytes = self._first_bytes + verifier.device.budget.total_bytes
        self.most_generator_bytes = 0
        self.restart()

    @property
    def generator_bytes(self) -> int:
        """The generator's part now."""
        return self._generator.device.budget.total_bytes

    @property
    def verifier_bytes(self) -> int:
        """The verifier's part now."""
        return self._verifier.device.budget.total_bytes

    def restart(self) -> None:
        """Divide as in the beginning, and count from 0."""
        self._seen: tuple[int, ...] = ()
        self.counts = Counters()
        self._give(self._generator, self._first_bytes)
        self.counts = Counters()
        self.most_generator_bytes = self.generator_bytes

    def look(self, runs: Collection[TreeRun]) -> None:
        """Move memory if the state of the search has changed and that is worth while.

        To be called where neither model runs.
        """
        scoring = [node for run in runs for node in run.unscored]
        beams = [node for run in runs for node in run.open]
        seen = len(runs), sum(len(run.round_tokens) for run in runs), bool(scoring)
        if seen == self._seen or not (scoring or beams):
            return
        self._seen = seen
        with suppress(CapacityError):  # of the host tier: everything stays where it is
            if scoring:
                needed = _need_bytes(self._verifier, [_tokens_of(n) + 1 for n in scoring])
                self._make_room(self._verifier, self._generator, needed, scoring, beams)
            else:
                step_tokens = step_tokens_of(beams)
                needed = _need_bytes(self._generator, [step_tokens] * len(beams))
                self._make_room(self._generator, self._verifier, needed, beams, beams)

    # --- inside ------------------------------------------------------------------------------

    def _make_room(
        self,
        store: CacheManager,
        idle: CacheManager,
        needed_bytes: int,
        nodes: Sequence[Node],
        beams: Sequence[Node],
    ) -> None:
        """The model of this store runs next, on these nodes; beams are decoded meanwhile, or then.

        Needs are estimates, so once memory was short all that is free is taken.
        """
        total = self.total_bytes
        part = self._part(store, idle, needed_bytes)
        if part is not None:
            if self._scores_early and beams:
                # The idle one keeps a path, where there is room for that; where there is not, a
                # score that comes too early is put off until the round's end.
                kept = self._least(idle, beams)
                part = min(part, total - kept if needed_bytes + kept <= total else total)
            self._give(store, part)
        # A step may be longer than those that the need was estimated from.
        least = min(self._least(store, nodes), total)
        if least > store.device.budget.total_bytes:
            self._give(store, least)

    def _part(self, store: CacheManager, idle: CacheManager, needed_bytes: int) -> int | None:
        """What the model of this store gets for its turn; None if it has enough."""
        total = self.total_bytes
        if needed_bytes <= store.device.budget.total_bytes and not self.counts.moves:
            return None
        # Its need, and what the idle one has no use for.
        return min(total, max(needed_bytes, total - idle.device.budget.used_bytes))

    def _least(self, store: CacheManager, beams: Sequence[Node]) -> int:
        """What the longest path and the longest step take: every beam can be decoded and scored."""
        device, step = store.device, self._most_step_tokens + 1
        longest = max(beams, key=path_tokens)
        depth = len(longest.path())
        blocks = device.blocks_for(path_tokens(longest) + depth) + depth + device.blocks_for(step)
        return (blocks + 1) * device.bytes_per_block

    def _give(self, store: CacheManager, num_bytes: int) -> None:
        """Give this model so much, and the other one the rest, as far as what is held allows."""
        before, total = self.generator_bytes, self.total_bytes
        other = self._verifier if store is self._generator else self._generator
        if num_bytes > store.device.budget.total_bytes:
            store, other, num_bytes = other, store, total - num_bytes
        kept = store.resize(num_bytes)  # the one that shrinks first
        other.resize(total - kept)
        moved = abs(self.generator_bytes - before)
        if moved:
            self.counts.moves += 1
            self.counts.moved_bytes += moved
            self.most_generator_bytes = max(self.most_generator_bytes, self.generator_bytes)


def _need_bytes(store: CacheManager, lengths: Sequence[int]) -> int:
    """What the store holds, and steps of these lengths more."""
    device = store.device
    return store.held_bytes + sum(map(device.blocks_for, lengths)) * device.bytes_per_block


def step_tokens_of(beams: Sequence[Node]) -> int:
    """The mean step of the round before, and half a block's worth of tokens."""
    steps = [node.parent for node in beams if node.parent is not None]
    lengths = [len(step.token_ids) for step in steps if step.parent is not None]
    if not sum(lengths):
        return _FIRST_STEP_TOKENS
    return round(sum(lengths) / len(lengths)) + _HALF_BLOCK


def path_tokens(node: Node) -> int:
    """Of its whole path, turns left out."""
    steps = (step for step in node.path()[1:] if step.turn is None)
    return len(node.root.token_ids) + sum(map(_tokens_of, steps))


def _tokens_of(step: Node) -> int:
    """Of a step; a text that nobody drew has a token a character at most, as a rule."""
    return len(step.token_ids) or len(step.step_text)
