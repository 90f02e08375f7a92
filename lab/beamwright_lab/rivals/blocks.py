"""vLLM's pool of KV blocks: a prefix cache by content, and a queue of free blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixBlocks:
    """Blocks with reference counts. A key identifies the content of a full block and its prefix.

    A free block keeps its content until it is allocated again. Blocks are allocated from the front
    of the free queue; a freed block goes to the back if it has a key, else to the front.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.peak_held = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._keys: list[int | None] = [None] * num_blocks
        self._cached: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def match(self, keys: Iterable[int]) -> list[int]:
        """Return the cached blocks of these keys, up to the first key that is not cached."""
        found = []
        for key in keys:
            blocks = self._cached.get(key)
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def fits(self, hits: Sequence[int], num_blocks: int) -> bool:
        """Return True if a sequence of `num_blocks`, `hits` included, can be allocated."""
        idle = sum(not self._holders[block] for block in hits)
        return num_blocks - len(hits) + idle <= len(self._free)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1
        self.peak_held = max(self.peak_held, self.num_held)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Return blocks with one reference, without their old content; None if too few are free."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in taken:
            self._uncache(block)
            self._holders[block] = 1
        self.peak_held = max(self.peak_held, self.num_held)
        return taken

    def store(self, block: int, key: int) -> None:
        """Enter a full block into the prefix cache."""
        if self._keys[block] != key:
            self._uncache(block)
            self._keys[block] = key
            self._cached.setdefault(key, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block of a sequence, starting with its last block."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def _uncache(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            same = self._cached[key]
            same.remove(block)
            if not same:
                del self._cached[key]
