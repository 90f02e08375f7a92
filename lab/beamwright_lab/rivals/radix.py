"""SGLang's radix cache: a tree of steps with locks, evicted from the least recently used leaves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from beamwright.tree import Lineage

# Returns when a step is needed next; infinite if never.
NextUse = Callable[[Lineage], float]


@dataclass(eq=False)
class _Entry:
    """The KV of a step.

    tokens: tokens on the device, or at the time of eviction.
    stored: tokens also on the host.
    children: number of child steps on the device.
    used: increasing number of the last use.
    """

    tokens: int = 0
    stored: int = 0
    on_device: bool = False
    locks: int = 0
    children: int = 0
    used: int = 0


class RadixCache:
    """KV of steps by lineage. A step is on the device only if its parent is.

    host: evicted steps are stored on the host, without limit.
    write_through: inserted tokens are stored on the host at once (`take_unstored`), so eviction
        stores nothing.
    next_use: for a known future. Steps needed last are evicted first (Belady), and steps that are
        never needed again are not stored. None: evict the least recently used.
    """

    def __init__(
        self, *, host: bool = False, write_through: bool = False, next_use: NextUse | None = None
    ) -> None:
        self.tokens = self.locked_tokens = self.host_tokens = self._unstored = 0
        self._entries: dict[Lineage, _Entry] = {}
        self._leaves: list[tuple[float, int, Lineage]] = []
        self._host, self._write_through, self._next_use = host, write_through, next_use
        self._clock = count(1)

    def on_device(self, node: Lineage) -> int:
        """Return the step's tokens on the device; 0 if it is not there."""
        entry = self._entries.get(node)
        return entry.tokens if entry is not None and entry.on_device else 0

    def on_host(self, node: Lineage) -> int:
        """Return the step's tokens on the host; 0 if it is on the device or unknown."""
        entry = self._entries.get(node)
        return 0 if entry is None or entry.on_device else entry.stored

    def idle_tokens(self, node: Lineage) -> int:
        """Return the step's tokens on the device if it is unlocked, else 0."""
        entry = self._entries.get(node)
        return 0 if entry is None or entry.locks or not entry.on_device else entry.tokens

    def insert(self, node: Lineage, tokens: int) -> int:
        """Add a step's first `tokens` tokens to the device; return how many were not there."""
        entry = self._entries.setdefault(node, _Entry())
        if not entry.on_device:
            entry.on_device, entry.tokens = True, 0
            self._count_child(node, 1)
        added = max(0, tokens - entry.tokens)
        entry.tokens += added
        self.tokens += added
        if entry.locks:
            self.locked_tokens += added
        if self._write_through:
            fresh = max(0, entry.tokens - entry.stored)
            self._unstored += fresh
            self.host_tokens += fresh
            entry.stored += fresh
        self._touch(node, entry)
        return added

    def take_unstored(self) -> int:
        """Return the tokens to write through to the host since the last call."""
        taken, self._unstored = self._unstored, 0
        return taken

    def lock(self, node: Lineage) -> None:
        """Protect a step on the device from eviction, for one request."""
        entry = self._entries[node]
        if not entry.locks:
            self.locked_tokens += entry.tokens
        entry.locks += 1

    def unlock(self, node: Lineage) -> None:
        entry = self._entries[node]
        entry.locks -= 1
        if not entry.locks:
            self.locked_tokens -= entry.tokens
            self._touch(node, entry)

    def load(self, node: Lineage) -> int:
        """Load a step from the host; return its tokens."""
        entry = self._entries[node]
        entry.on_device, entry.tokens = True, entry.stored
        self.tokens += entry.tokens
        self._count_child(node, 1)
        self._touch(node, entry)
        return entry.tokens

    def evict(self, num_tokens: int) -> int:
        """Evict unlocked leaves until `num_tokens` are free or no such leaf is left.

        Returns the tokens that must be stored on the host first.
        """
        freed = stored = 0
        while freed < num_tokens and self._leaves:
            _, used, node = heapq.heappop(self._leaves)
            entry = self._entries[node]
            if entry.used != used or not self._is_evictable(entry):
                continue
            entry.on_device = False
            freed += entry.tokens
            if self._host and (self._next_use is None or math.isfinite(self._next_use(node))):
                stored += entry.tokens - entry.stored
                entry.stored = entry.tokens
            self._count_child(node, -1)
        self.tokens -= freed
        self.host_tokens += stored
        return stored

    def _count_child(self, node: Lineage, change: int) -> None:
        if node:
            parent = self._entries[node[:-1]]
            parent.children += change
            self._queue_for_eviction(node[:-1], parent)

    def _touch(self, node: Lineage, entry: _Entry) -> None:
        entry.used = next(self._clock)
        self._queue_for_eviction(node, entry)

    def _queue_for_eviction(self, node: Lineage, entry: _Entry) -> None:
        """Queue the step for eviction if it is an unlocked leaf."""
        if self._is_evictable(entry):
            rank = entry.used if self._next_use is None else -self._next_use(node)
            heapq.heappush(self._leaves, (rank, entry.used, node))

    def _is_evictable(self, entry: _Entry) -> bool:
        return entry.on_device and not entry.locks and not entry.children
