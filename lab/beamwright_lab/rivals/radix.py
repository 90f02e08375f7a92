"""SGLang's prefix cache: a tree of whole steps with locks, evicted from its least used leaves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from beamwright.tree import Lineage

# When a step is needed next; infinite if never.
NextUse = Callable[[Lineage], float]


@dataclass(eq=False)
class _Entry:
    """A step's KV. tokens: on the device, or when it left; stored: of them on the host."""

    tokens: int = 0
    stored: int = 0
    on_device: bool = False
    locks: int = 0
    children: int = 0  # on the device
    used: int = 0


class RadixCache:
    """Steps by lineage. A step is on the device only while its parent is.

    host: evicted steps are kept there, without limit. write_through: what is inserted is stored
    there at once (`take_unstored`), so that eviction stores nothing. next_use: where the
    future is known, what is needed last is evicted first (Belady), and what is needed never is not
    stored; else the least recently used goes first.
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
        """Tokens of a step on the device; 0 if it is not there."""
        entry = self._entries.get(node)
        return entry.tokens if entry is not None and entry.on_device else 0

    def on_host(self, node: Lineage) -> int:
        """Tokens of a step that is on the host alone; 0 if it is not."""
        entry = self._entries.get(node)
        return 0 if entry is None or entry.on_device else entry.stored

    def idle_tokens(self, node: Lineage) -> int:
        """Tokens of a step on the device that nobody has locked."""
        entry = self._entries.get(node)
        return 0 if entry is None or entry.locks or not entry.on_device else entry.tokens

    @property
    def evictable_tokens(self) -> int:
        """Tokens that no request has locked."""
        return self.tokens - self.locked_tokens

    def insert(self, node: Lineage, tokens: int) -> int:
        """So many tokens of a step are on the device; returns how many were not there."""
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
        self._use(node, entry)
        return added

    def take_unstored(self) -> int:
        """Tokens to be sent to the host that were inserted since this was asked last."""
        taken, self._unstored = self._unstored, 0
        return taken

    def lock(self, node: Lineage) -> None:
        """A request reads this step, which is on the device."""
        entry = self._entries[node]
        if not entry.locks:
            self.locked_tokens += entry.tokens
        entry.locks += 1

    def unlock(self, node: Lineage) -> None:
        """It does not any more."""
        entry = self._entries[node]
        entry.locks -= 1
        if not entry.locks:
            self.locked_tokens -= entry.tokens
            self._use(node, entry)

    def load(self, node: Lineage) -> int:
        """Bring a step back from the host; returns its tokens."""
        entry = self._entries[node]
        entry.on_device, entry.tokens = True, entry.stored
        self.tokens += entry.tokens
        self._count_child(node, 1)
        self._use(node, entry)
        return entry.tokens

    def evict(self, num_tokens: int) -> int:
        """Free at least so many tokens, leaves first, as far as they are not locked; returns the
        tokens that have to be stored on the host before."""
        freed = stored = 0
        while freed < num_tokens and self._leaves:
            _, used, node = heapq.heappop(self._leaves)
            entry = self._entries[node]
            if entry.used != used or not self._can_go(entry):
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
            self._list(node[:-1], parent)

    def _use(self, node: Lineage, entry: _Entry) -> None:
        entry.used = next(self._clock)
        self._list(node, entry)

    def _list(self, node: Lineage, entry: _Entry) -> None:
        """Note it among the leaves if it is one that can go."""
        if self._can_go(entry):
            rank = entry.used if self._next_use is None else -self._next_use(node)
            heapq.heappush(self._leaves, (rank, entry.used, node))

    def _can_go(self, entry: _Entry) -> bool:
        return entry.on_device and not entry.locks and not entry.children
