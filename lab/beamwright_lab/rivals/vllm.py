"""vLLM's scheduler: first come, first served; preemption by recompute; an optional host tier.

The rules follow `v1/core/sched`:

- Running requests are served in order. If a block is missing, the request admitted last is
  preempted, keeps its tokens and goes to the head of the queue.
- An iteration that preempted admits no request. Admission needs blocks for the sequence so far,
  none for its growth, and ends at the first request that does not fit.
- Prefix hits are whole blocks, and leave at least one token to compute.
- The host tier is the offloading connector with `offload_prompt_only` off: blocks are stored when
  full. Blocks that directly follow the device's hits are loaded while other requests run.

Idealised: the host is unlimited, requests share blocks that are being loaded, and `max_num_seqs` is
unlimited unless `max_running` is set.
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
    """vLLM as `RequestEngine`.

    num_blocks: KV blocks of the device.
    offload: True for a host tier.
    max_running: most requests at a time (`max_num_seqs`); None: unlimited.
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
        self._block_tokens, self._offload = block_tokens, offload
        self._max_running, self._max_batched_tokens = max_running, max_batched_tokens
        self._blocks: dict[StepRequest, list[int]] = {}
        # Number of leading blocks in the prefix cache.
        self._num_cached: dict[StepRequest, int] = {}
        self._loading: dict[StepRequest, list[int]] = {}  # keys of blocks being loaded
        self._arriving: set[int] = set()
        self._on_host: set[int] = set()
        self._num_unstored = self._num_preempted = 0
        self._keys: dict[Lineage, tuple[int, ...]] = {}
        self._num_keys = 0

    @property
    def peak_tokens(self) -> int:
        return self.pool.peak_held * self._block_tokens

    @property
    def host_peak_tokens(self) -> int:
        return len(self._on_host) * self._block_tokens

    def submit(self, requests: Sequence[StepRequest]) -> None:
        self.waiting += requests

    def schedule(self) -> Iteration:
        stored, self._num_unstored = self._num_unstored, 0
        budget, preempted_before = self._max_batched_tokens, self._num_preempted
        rows: list[tuple[StepRequest, int]] = []
        for request in tuple(self.running):
            new = min(request.num_tokens - request.computed, budget)
            if new and self._grow(request, request.computed + new):
                rows.append((request, new))
                budget -= new
        rows = [row for row in rows if row[0] in self._blocks]
        loads: list[tuple[StepRequest, int]] = []
        if self._num_preempted == preempted_before:
            self._admit(rows, loads, budget)
        return Iteration(
            rows=rows,
            passes=self._passes(rows),
            distinct_tokens=self._distinct_tokens(rows),
            loads=loads,
            store_tokens=stored * self._block_tokens,
        )

    def loaded(self, request: StepRequest) -> None:
        self._arriving.difference_update(self._loading.pop(request))
        self.running.append(request)

    def commit(self, iteration: Iteration) -> list[StepRequest]:
        done = []
        for request, new in iteration.rows:
            request.forward(new, iteration.passes)
            self._cache_full_blocks(request)
            if request.complete:
                done.append(request)
        for request in done:
            self.running.remove(request)
            self.pool.release(self._blocks.pop(request))
        return done

    # --- blocks ------------------------------------------------------------------------------

    def _grow(self, request: StepRequest, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens of a running request, preempting if needed.

        Returns False if the request itself was preempted.
        """
        while (blocks := self._blocks.get(request)) is not None:
            missing = self._blocks_for(num_tokens) - len(blocks)
            if (found := self.pool.allocate(max(0, missing))) is not None:
                blocks += found
                return True
            self._num_preempted += 1
            victim = self._victim()
            self.running.remove(victim)
            self.pool.release(self._blocks.pop(victim))
            self._handle_preempted(victim)
        return False

    def _victim(self) -> StepRequest:
        return self.running[-1]

    def _handle_preempted(self, request: StepRequest) -> None:
        """Requeue a request whose blocks were freed, to be recomputed."""
        self.preemptions += 1
        request.computed = 0
        self.waiting.appendleft(request)

    def _admit(
        self, rows: list[tuple[StepRequest, int]], loads: list[tuple[StepRequest, int]], budget: int
    ) -> None:
        most = self._max_running
        while self.waiting and budget and (most is None or len(self._blocks) < most):
            request = self.waiting[0]
            keys = self.keys(request)[: (request.num_tokens - 1) // self._block_tokens]
            hits = self.pool.match(keys)
            num_blocks = self._blocks_for(request.num_tokens)
            if not self.pool.fits(hits, num_blocks):
                return
            self.waiting.popleft()
            self.pool.hold(hits)
            fresh = self.pool.allocate(num_blocks - len(hits))
            assert fresh is not None
            self._blocks[request] = [*hits, *fresh]
            num_loaded = self._num_on_host(keys, len(hits))
            known = len(hits) + num_loaded
            self._num_cached[request] = known
            request.computed = known * self._block_tokens
            late = not self._arriving.isdisjoint(keys[: len(hits)])
            new = 0 if num_loaded or late else min(request.num_tokens - request.computed, budget)
            # The next request already hits blocks loaded or computed in this iteration.
            full = (request.computed + new) // self._block_tokens
            for block, key in zip(fresh, keys[len(hits) : full], strict=False):
                self.pool.store(block, key)
            if not new:
                self._loading[request] = list(keys[len(hits) : known])
                self._arriving.update(self._loading[request])
                loads.append((request, num_loaded * self._block_tokens))
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

    def _cache_full_blocks(self, request: StepRequest) -> None:
        """Enter newly full blocks into the prefix cache, and store them on the host."""
        blocks, keys = self._blocks[request], self.keys(request)
        full = request.computed // self._block_tokens
        for place in range(self._num_cached[request], full):
            self.pool.store(blocks[place], keys[place])
            if self._offload and keys[place] not in self._on_host:
                self._on_host.add(keys[place])
                self._num_unstored += 1
        self._num_cached[request] = full

    # --- counting ----------------------------------------------------------------------------

    def keys(self, request: StepRequest) -> tuple[int, ...]:
        """Return the keys of the blocks that prompt and step will fill, in order."""
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
                new = end // self._block_tokens - len(keys)
                fresh = range(self._num_keys, self._num_keys + new)
                self._num_keys += new
                self._keys[node] = (*keys, *fresh)
            keys = self._keys[node]
        return keys

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _passes(self, rows: Sequence[tuple[StepRequest, int]]) -> int:
        """Return the equal passes until a block is full or a step complete."""
        if self._loading or not rows or any(new > 1 for _, new in rows):
            return 1
        if any(request.computed + 1 < request.num_tokens for request, _ in rows):
            return 1
        return min(
            min(
                self._block_tokens - request.computed % self._block_tokens,
                request.step_tokens - request.drawn,
            )
            for request, _ in rows
        )

    def _distinct_tokens(self, rows: Sequence[tuple[StepRequest, int]]) -> int:
        """Return the distinct tokens of the running requests, this pass's included."""
        empty = sum(
            len(self._blocks[request]) * self._block_tokens - request.computed - new
            for request, new in rows
        )
        arriving = sum(map(len, self._loading.values()))
        return (self.pool.num_held - arriving) * self._block_tokens - empty


class StepEngine(VllmEngine):
    """STEP on vLLM (arXiv 2601.09093): when memory runs out, it stops the lowest-scored path.

    No path is preempted, so no KV is recomputed. The search tree becomes smaller. The paper scores
    with a small head on hidden states; here the score is the verifier's, of the path before the
    step.
    """

    def _victim(self) -> StepRequest:
        """Return the request with the lowest score; among equals, the one admitted last."""
        return min(reversed(self.running), key=_score)

    def _handle_preempted(self, request: StepRequest) -> None:
        self.stopped.add(request.node)


def _score(request: StepRequest) -> float:
    return math.inf if request.score is None else request.score
