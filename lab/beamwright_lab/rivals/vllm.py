"""vLLM's scheduler: first come, first served; preemption by recompute; an optional host tier.

The rules of `v1/core/sched`: running requests are served in order; where a block is missing the
one admitted last is preempted, keeps its tokens and goes to the head of the queue; an iteration
that preempted admits nobody; admission needs room for the whole present sequence and none for its
future, and ends at the first request that does not fit. Prefix hits are whole blocks and leave at
least one token to compute. The host tier is the offloading connector with `offload_prompt_only`
off: full blocks are stored once they are computed, loads are what follows the hits on the device
without a gap, and arrive while others run.

Kinder than the real engine: the host holds everything, requests that need a block on its way share
it, and all rows of a search may run at once unless `max_running` says otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from beamwright.tree import Lineage
from beamwright_lab.rivals.blocks import PrefixBlocks
from beamwright_lab.rivals.requests import Iteration, StepRequest

_MAX_BATCHED_TOKENS = 8192


class VllmEngine:
    """vLLM as `RequestEngine`. num_blocks: of the device; offload: with a host tier.

    max_running: most requests at a time (`max_num_seqs`); None for as many as fit.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_tokens: int = 16,
        offload: bool = False,
        max_running: int | None = None,
        max_batched_tokens: int = _MAX_BATCHED_TOKENS,
    ) -> None:
        self.pool = PrefixBlocks(num_blocks)
        self.preemptions = 0
        self.stopped: set[Lineage] = set()
        self.running: list[StepRequest] = []
        self.waiting: deque[StepRequest] = deque()
        self._size, self._offload = block_tokens, offload
        self._max_running, self._max_batched_tokens = max_running, max_batched_tokens
        self._blocks: dict[StepRequest, list[int]] = {}
        self._kept: dict[StepRequest, int] = {}  # leading blocks that can be found
        self._loading: dict[StepRequest, list[int]] = {}  # keys of new blocks
        self._arriving: set[int] = set()
        self._on_host: set[int] = set()
        self._num_unsaved = self._num_ousted = 0
        self._keys: dict[Lineage, tuple[int, ...]] = {}
        self._num_keys = 0

    @property
    def peak_tokens(self) -> int:
        return self.pool.peak_held * self._size

    @property
    def host_peak_tokens(self) -> int:
        return len(self._on_host) * self._size

    def submit(self, requests: Sequence[StepRequest]) -> None:
        self.waiting += requests

    def schedule(self) -> Iteration:
        stored, self._num_unsaved = self._num_unsaved, 0
        budget, ousted = self._max_batched_tokens, self._num_ousted
        rows: list[tuple[StepRequest, int]] = []
        for request in tuple(self.running):
            new = min(request.num_tokens - request.computed, budget)
            if new and self._grow(request, request.computed + new):
                rows.append((request, new))
                budget -= new
        rows = [row for row in rows if row[0] in self._blocks]
        loads: list[tuple[StepRequest, int]] = []
        if self._num_ousted == ousted:
            self._admit(rows, loads, budget)
        return Iteration(
            rows=rows,
            passes=self._passes(rows),
            distinct_tokens=self._distinct(rows),
            loads=loads,
            store_tokens=stored * self._size,
        )

    def loaded(self, request: StepRequest) -> None:
        self._arriving.difference_update(self._loading.pop(request))
        self.running.append(request)

    def commit(self, iteration: Iteration) -> list[StepRequest]:
        done = []
        for request, new in iteration.rows:
            request.forward(new, iteration.passes)
            self._keep_full(request)
            if request.complete:
                done.append(request)
        for request in done:
            self.running.remove(request)
            self.pool.release(self._blocks.pop(request))
        return done

    # --- blocks ------------------------------------------------------------------------------

    def _grow(self, request: StepRequest, num_tokens: int) -> bool:
        """Blocks for so many tokens of a running request, others ousted for it; False if it has
        lost its own."""
        while (blocks := self._blocks.get(request)) is not None:
            missing = self._count(num_tokens) - len(blocks)
            if (found := self.pool.allocate(max(0, missing))) is not None:
                blocks += found
                return True
            self._num_ousted += 1
            victim = self._victim()
            self.running.remove(victim)
            self.pool.release(self._blocks.pop(victim))
            self._oust(victim)
        return False

    def _victim(self) -> StepRequest:
        return self.running[-1]

    def _oust(self, request: StepRequest) -> None:
        """What becomes of a request that has lost its blocks."""
        self.preemptions += 1
        request.computed = 0
        self.waiting.appendleft(request)

    def _admit(
        self, rows: list[tuple[StepRequest, int]], loads: list[tuple[StepRequest, int]], budget: int
    ) -> None:
        most = self._max_running
        while self.waiting and budget and (most is None or len(self._blocks) < most):
            request = self.waiting[0]
            keys = self.keys(request)[: (request.num_tokens - 1) // self._size]
            hits = self.pool.match(keys)
            num_blocks = self._count(request.num_tokens)
            if not self.pool.fits(hits, num_blocks):
                return
            self.waiting.popleft()
            self.pool.hold(hits)
            fresh = self.pool.allocate(num_blocks - len(hits))
            assert fresh is not None
            self._blocks[request] = [*hits, *fresh]
            num_loaded = self._num_on_host(keys, len(hits))
            known = len(hits) + num_loaded
            self._kept[request] = known
            request.computed = known * self._size
            late = not self._arriving.isdisjoint(keys[: len(hits)])
            new = 0 if num_loaded or late else min(request.num_tokens - request.computed, budget)
            # What is loaded or computed in this iteration is found by the next request already.
            full = (request.computed + new) // self._size
            for block, key in zip(fresh, keys[len(hits) : full], strict=False):
                self.pool.store(block, key)
            if not new:
                self._loading[request] = list(keys[len(hits) : known])
                self._arriving.update(self._loading[request])
                loads.append((request, num_loaded * self._size))
                continue
            self.running.append(request)
            rows.append((request, new))
            budget -= new

    def _num_on_host(self, keys: Sequence[int], first: int) -> int:
        if not self._offload:
            return 0
        num = 0
        while first + num < len(keys) and keys[first + num] in self._on_host:
            num += 1
        return num

    def _keep_full(self, request: StepRequest) -> None:
        """Blocks that are full by now can be found, and are stored on the host."""
        blocks, keys = self._blocks[request], self.keys(request)
        full = request.computed // self._size
        for place in range(self._kept[request], full):
            self.pool.store(blocks[place], keys[place])
            if self._offload and keys[place] not in self._on_host:
                self._on_host.add(keys[place])
                self._num_unsaved += 1
        self._kept[request] = full

    # --- counting ----------------------------------------------------------------------------

    def keys(self, request: StepRequest) -> tuple[int, ...]:
        """One key per block that prompt and step fill, prefix first."""
        known = self._keys.get(request.node)
        if known is not None:
            return known
        keys: tuple[int, ...] = ()
        end = 0
        for node, length in zip(
            (*request.path, request.node), (*request.lengths, request.step_tokens), strict=True
        ):
            end += length
            if node not in self._keys:
                new = end // self._size - len(keys)
                fresh = range(self._num_keys, self._num_keys + new)
                self._num_keys += new
                self._keys[node] = (*keys, *fresh)
            keys = self._keys[node]
        return keys

    def _count(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _passes(self, rows: Sequence[tuple[StepRequest, int]]) -> int:
        """Passes until a block is full or a step complete."""
        if self._loading or not rows or any(new > 1 for _, new in rows):
            return 1
        if any(request.computed + 1 < request.num_tokens for request, _ in rows):
            return 1
        return min(
            min(self._size - request.computed % self._size, request.step_tokens - request.drawn)
            for request, _ in rows
        )

    def _distinct(self, rows: Sequence[tuple[StepRequest, int]]) -> int:
        """Tokens in the blocks of the running requests, those of this pass included."""
        empty = sum(
            len(self._blocks[request]) * self._size - request.computed - new
            for request, new in rows
        )
        arriving = sum(map(len, self._loading.values()))
        return (self.pool.num_held - arriving) * self._size - empty


class StepEngine(VllmEngine):
    """STEP's rule on vLLM: where memory ends, the path with the lowest score ends with it.

    arXiv 2601.09093: nothing is preempted, so nothing is computed again and nobody waits for what
    he has lost. The paper scores with a small head on hidden states; here it is the verifier's
    score of the path so far. The tree that is left is another one, and a smaller.
    """

    def _victim(self) -> StepRequest:
        """The lowest score; of equal ones the request admitted last."""
        return min(reversed(self.running), key=_score)

    def _oust(self, request: StepRequest) -> None:
        self.stopped.add(request.node)


def _score(request: StepRequest) -> float:
    return math.inf if request.score is None else request.score
