"""SGLang's scheduler: `dfs-weight` order, reserved room for growth, retraction, HiCache.

The rules follow `managers/schedule_policy` and `mem_cache`:

- Prefill batches come before decoding. A request is admitted if the tokens that it will compute and
  sample fit the free and evictable memory, minus a share of the running requests' growth. The first
  request that does not fit ends admission.
- The share falls from 0.7 to 0.098 within 600 decoding steps.
- Retraction: if the next token of every row does not fit, the request with the fewest new tokens
  loses its KV and joins the end of the queue. The share is then computed again.
- `dfs-weight` puts the subtrees with the most waiting requests first.
- The KV of a step enters the prefix cache when the step is complete. Least recently used leaves are
  evicted.
- HiCache, `write_through` (default): KV that enters the cache is copied to the host during passes,
  so eviction is free. `write_back`: evicted KV is stored first, and the device waits.
- A prefix of ten or more tokens on the host is loaded at admission, overlapped with the prefill.

Idealised: the host is unlimited, pages are single tokens, and KV may be evicted while it is still
being copied to the host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from beamwright.tree import Lineage
from beamwright_lab.rivals.radix import RadixCache
from beamwright_lab.rivals.requests import Iteration, StepRequest

WritePolicy = Literal["write_through", "write_back"]

_RESERVED, _LEAST_RESERVED, _DECAY_STEPS = 0.7, 0.098, 600
_MOST_RESERVED_TOKENS = 4096
_LOAD_FROM_TOKENS = 10
_MAX_PREFILL_TOKENS = 16384
_IN_BATCH_TOKENS = 32
_RETRACT_STEPS = 20
_MOST_PASSES = 16


class SglangEngine:
    """SGLang as `RequestEngine`.

    num_tokens: KV capacity of the device.
    hicache: write policy of the host tier; None: no host tier.
    foresight: known next uses, for Belady's eviction; None: LRU.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        hicache: WritePolicy | None = None,
        foresight: AdmissionForesight | None = None,
    ) -> None:
        self.cache = RadixCache(
            host=hicache is not None,
            write_through=hicache == "write_through",
            next_use=None if foresight is None else foresight.next_use,
        )
        self._foresight = foresight
        self.preemptions = 0
        self.stopped: set[Lineage] = set()
        self.peak_tokens = 0
        self.running: list[StepRequest] = []
        self.waiting: list[StepRequest] = []
        self.reserved = _RESERVED
        self._num_tokens = num_tokens
        self._own: dict[StepRequest, int] = {}  # KV tokens outside the prefix cache
        self._own_tokens = 0
        self._admitted: list[StepRequest] = []
        self._locked: dict[StepRequest, tuple[Lineage, ...]] = {}
        self._sorted = True

    @property
    def host_peak_tokens(self) -> int:
        return self.cache.host_tokens

    def submit(self, requests: Sequence[StepRequest]) -> None:
        self.waiting += requests
        self._sorted = False

    def schedule(self) -> Iteration:
        return self._prefill() or self._decode()

    def loaded(self, request: StepRequest) -> None:
        """Raise: this engine's loads are part of an iteration."""
        raise AssertionError(request)

    def commit(self, iteration: Iteration) -> list[StepRequest]:
        for request, new in iteration.rows:
            request.forward(new, iteration.passes)
            if request in self._admitted:
                self._share_prompt(request)
            else:
                self._add_own_tokens(request, new * iteration.passes)
        self.running += self._admitted
        self._admitted = []
        done = [request for request, _ in iteration.rows if request.complete]
        for request in done:
            self.running.remove(request)
            self.cache.insert(request.node, self._own[request])
            self._free(request)
        self._sorted = self._sorted and not done
        return done

    def _share_prompt(self, request: StepRequest) -> None:
        """Move a prefilled prompt into the prefix cache, and drop duplicate KV."""
        for node, length in zip(request.path, request.lengths, strict=True):
            self.cache.insert(node, length)
        for node in request.path[len(self._locked[request]) :]:
            self.cache.lock(node)
        self._locked[request] = request.path
        self._add_own_tokens(request, request.computed - request.prompt_tokens - self._own[request])

    def _add_own_tokens(self, request: StepRequest, num_tokens: int) -> None:
        """Add tokens of KV that only this request uses."""
        self._own[request] = self._own.get(request, 0) + num_tokens
        self._own_tokens += num_tokens

    def _free(self, request: StepRequest) -> None:
        """Free the request's own KV, and unlock its path."""
        self._own_tokens -= self._own.pop(request)
        for node in self._locked.pop(request):
            self.cache.unlock(node)

    # --- admission ---------------------------------------------------------------------------

    def _prefill(self) -> Iteration | None:
        """Return a prefill of newly admitted requests; None if none can be admitted."""
        rows: list[tuple[StepRequest, int]] = []
        computing: set[Lineage] = set()
        left, loads, stored = _MAX_PREFILL_TOKENS, 0, 0
        self._sort()
        room = self._admissible_tokens()
        for request in list(self.waiting):
            found = _Match(self.cache, request)
            needed = found.host_tokens + found.missing_tokens + found.idle_tokens
            future = min(request.step_tokens - request.drawn, _MOST_RESERVED_TOKENS)
            if needed + future + 1 >= room or found.missing_tokens > left:
                break
            if found.missing_tokens > _IN_BATCH_TOKENS and not computing.isdisjoint(found.missing):
                continue  # this batch computes its prefix: admit it in the next one
            computing.update(found.missing)
            self.waiting.remove(request)
            if self._foresight is not None:
                self._foresight.advance_to(request)
            for node in found.on_device:
                self.cache.lock(node)
            stored += self._make_room(found.host_tokens + found.missing_tokens)
            for node in found.on_host:
                loads += self.cache.load(node)
                self.cache.lock(node)
            self._locked[request] = (*found.on_device, *found.on_host)
            self._add_own_tokens(request, found.missing_tokens)
            request.computed = request.num_tokens - found.missing_tokens
            self._admitted.append(request)
            rows.append((request, found.missing_tokens))
            left -= found.missing_tokens
            room -= needed + future
        if not rows:
            return None
        self._note_peak()
        return Iteration(
            rows=rows,
            distinct_tokens=self._distinct_tokens(request for request, _ in rows),
            load_tokens=loads,
            store_tokens=self.cache.take_unstored(),
            evicted_tokens=stored,
        )

    def _sort(self) -> None:
        """Sort by `dfs-weight`: heavier subtrees first, a node's own requests after them."""
        if self._sorted:
            return
        own: dict[Lineage, list[StepRequest]] = {}
        weight: Counter[Lineage] = Counter()
        children: dict[Lineage, dict[Lineage, None]] = {}
        for request in self.waiting:
            found = [node for node in request.path if self.cache.on_device(node)]
            own.setdefault(found[-1] if found else (), []).append(request)
            weight.update(found)
            for node in found[1:]:
                children.setdefault(node[:-1], {})[node] = None
        ordered: list[StepRequest] = []
        stack: list[tuple[Lineage, bool]] = [((), False)]
        while stack:
            node, seen = stack.pop()
            if seen:
                ordered += own.get(node, [])
                continue
            stack.append((node, True))
            heavy = sorted(children.get(node, ()), key=lambda child: -weight[child])
            stack += [(child, False) for child in reversed(heavy)]
        self.waiting, self._sorted = ordered, True

    def _admissible_tokens(self) -> float:
        """Return the free and evictable tokens that are not reserved for running requests."""
        growth = sum(
            min(request.step_tokens - request.drawn, _MOST_RESERVED_TOKENS)
            for request in self.running
        )
        return self._available_tokens() - growth * self.reserved

    def _available_tokens(self) -> int:
        return self._num_tokens - self.cache.locked_tokens - self._own_tokens

    def _make_room(self, num_tokens: int) -> int:
        """Evict until `num_tokens` are free; return the tokens to store on the host first."""
        free = self._num_tokens - self.cache.tokens - self._own_tokens
        return self.cache.evict(num_tokens - free) if num_tokens > free else 0

    # --- decoding ----------------------------------------------------------------------------

    def _decode(self) -> Iteration:
        self._retract()
        rows = self.running
        most = min(request.step_tokens - request.drawn for request in rows)
        if self.waiting:
            most = 1  # the reserve shrinks with every pass, so a request may be admitted
        passes = max(1, min(most, self._available_tokens() // len(rows), _MOST_PASSES))
        stored = self._make_room(len(rows) * passes)
        self._note_peak(len(rows) * passes)
        decay = (_RESERVED - _LEAST_RESERVED) / _DECAY_STEPS
        self.reserved = max(_LEAST_RESERVED, self.reserved - decay * passes)
        return Iteration(
            rows=[(request, 1) for request in rows],
            passes=passes,
            distinct_tokens=self.cache.locked_tokens + self._own_tokens + len(rows),
            store_tokens=self.cache.take_unstored(),
            evicted_tokens=stored,
        )

    def _retract(self) -> None:
        """Retract requests until the next token of every row fits."""
        before = self.preemptions
        while self._available_tokens() < len(self.running):
            victim = min(self.running, key=lambda each: (each.drawn, -each.prompt_tokens))
            self.running.remove(victim)
            self._free(victim)
            victim.computed = 0
            self.waiting.append(victim)
            self.preemptions += 1
        if self.preemptions > before:
            self._sorted = False
            drawn = sum(request.drawn for request in self.running)
            total = sum(request.step_tokens for request in self.running)
            self.reserved = min(1.0, (drawn + _RETRACT_STEPS * len(self.running)) / total)

    def _distinct_tokens(self, requests: Iterable[StepRequest]) -> int:
        """Return the distinct KV tokens that these requests read."""
        chosen = list(requests)
        nodes = {node for request in chosen for node in request.path}
        shared = sum(map(self.cache.on_device, nodes))
        return shared + sum(self._own[request] for request in chosen)

    def _note_peak(self, growth: int = 0) -> None:
        held = self.cache.tokens + self._own_tokens + growth
        self.peak_tokens = max(self.peak_tokens, held)


class _Match:
    """Where a request's prefix has KV: nodes on the device, nodes on the host, then missing ones.

    idle_tokens: unlocked tokens of the nodes on the device.
    missing_tokens: tokens that the prefill must compute.
    """

    def __init__(self, cache: RadixCache, request: StepRequest) -> None:
        self.on_device: list[Lineage] = []
        self.on_host: list[Lineage] = []
        self.host_tokens = self.idle_tokens = device_tokens = 0
        for node in request.path:
            tokens = cache.on_device(node)
            if not tokens:
                break
            self.on_device.append(node)
            self.idle_tokens += cache.idle_tokens(node)
            device_tokens += tokens
        for node in request.path[len(self.on_device) :]:
            tokens = cache.on_host(node)
            if not tokens:
                break
            self.on_host.append(node)
            self.host_tokens += tokens
        if self.host_tokens < _LOAD_FROM_TOKENS:
            self.on_host, self.host_tokens = [], 0
        found = device_tokens + self.host_tokens
        self.missing_tokens = max(1, request.num_tokens - found)
        self.missing = request.path[len(self.on_device) + len(self.on_host) :]


class AdmissionForesight:
    """Next uses of steps, if requests are admitted in the given order of each round."""

    def __init__(self, rounds: Sequence[Sequence[StepRequest]]) -> None:
        self._most = 1 + max(map(len, rounds))
        self._uses: dict[tuple[int, Lineage], tuple[int, int]] = {}
        self._place: dict[Lineage, tuple[int, int]] = {}
        for number, requests in enumerate(rounds):
            for place, request in enumerate(requests):
                self._place[request.node] = (number, place)
                for node in request.path:
                    first, _ = self._uses.get((number, node), (place, place))
                    self._uses[number, node] = (first, place)
        self._now = (0, 0)

    def advance_to(self, request: StepRequest) -> None:
        """Advance the current position to this request."""
        self._now = max(self._now, self._place[request.node])

    def next_use(self, node: Lineage) -> float:
        """Return a number that orders steps by their next use; infinite if there is none."""
        number, place = self._now
        _, last = self._uses.get((number, node), (0, -1))
        if last > place:
            return number * self._most + place
        following = self._uses.get((number + 1, node))
        return math.inf if following is None else (number + 1) * self._most + following[0]
