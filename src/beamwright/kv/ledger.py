"""BlockLedger: who owns which fixed-size block, with O(1) allocation. Knows no tensors.

The simulator runs on ledgers alone; `pool.BlockPool` is a ledger with storage behind it.
"""

from __future__ import annotations

from beamwright.kv.budget import ByteBudget


class BlockLedger:
    """Blocks of `block_tokens` tokens; ids come from a free stack.

    Every block is owned by at most one copy of a segment. `check` verifies free + owned = total.
    most_bytes: how far `resize` can go; by default the budget is what it is.
    """

    def __init__(
        self,
        bytes_per_token: int,
        block_tokens: int,
        budget: ByteBudget,
        most_bytes: int | None = None,
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self.block_tokens = block_tokens
        self.bytes_per_block = bytes_per_token * block_tokens
        self.budget = budget
        self.num_blocks = budget.total_bytes // self.bytes_per_block
        self._most_bytes = budget.total_bytes if most_bytes is None else most_bytes
        self._most_blocks = self._most_bytes // self.bytes_per_block  # ids that there are
        # Blocks are handed out from the low end first, so untouched memory stays uncommitted:
        # `_returned` is the stack of those used before; all from `_untouched` on are free.
        self._returned: list[int] = []
        self._untouched = 0
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return self.num_blocks - len(self._used)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one segment need."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks. All or nothing.

        Raises:
            CapacityError: if the budget cannot hold them.
        """
        if num_blocks <= 0:
            return []
        what = f"a segment of {num_blocks} blocks"
        if num_blocks > self.num_free:
            raise self.budget.exhausted(what, num_blocks * self.bytes_per_block)
        self.budget.charge(num_blocks * self.bytes_per_block, what)
        taken = self._returned[-num_blocks:][::-1]
        del self._returned[-num_blocks:]
        first, self._untouched = self._untouched, self._untouched + num_blocks - len(taken)
        taken.extend(range(first, self._untouched))
        self._used.update(taken)
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back; a block given back twice is an AssertionError."""
        for block in blocks:
            if block not in self._used:
                raise AssertionError(f"block {block} was freed twice")
            self._used.remove(block)
        self._returned.extend(reversed(blocks))
        self.budget.release(len(blocks) * self.bytes_per_block)

    def resize(self, total_bytes: int) -> int:
        """Make the budget this large; no smaller than what is used, no larger than `most_bytes`.

        Returns:
            The budget in bytes.
        """
        total_bytes = max(min(total_bytes, self._most_bytes), self.budget.used_bytes)
        self.budget.total_bytes = total_bytes
        self.num_blocks = total_bytes // self.bytes_per_block
        # What has been used before and is free now keeps memory: as much as goes to somebody else.
        self.give_back(self._returned[: max(0, self._untouched - self.num_blocks)])
        return total_bytes

    def give_back(self, blocks: list[int]) -> None:
        """Nobody will read these free blocks: their memory is the operating system's again."""

    def check(self, owned: list[int]) -> None:
        """Conservation: `owned` blocks are distinct, not free, and all others are free."""
        if len(set(owned)) != len(owned):
            raise AssertionError("a block has two owners")
        if any(block not in self._used for block in owned):
            raise AssertionError("an owned block is on the free list")
        if len(owned) + self.num_free != self.num_blocks:
            raise AssertionError(
                f"{self.num_blocks} blocks, but {len(owned)} owned + {self.num_free} free"
            )
