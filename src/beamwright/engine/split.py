"""KVBudgetSplit: divide one KV memory between generator and verifier, anew during the search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from beamwright.counters import Counters
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError
from beamwright.kv.cache import CacheManager
from beamwright.tree import Node

# Tokens: the estimate of a step's length before any step is known, and half a block.
_FIRST_STEP_TOKENS, _HALF_BLOCK = 32, 4


class KVBudgetSplit:
    """Division of one device memory between the KV budgets of two models.

    The model that runs next gets the bytes that it needs, as far as possible. The idle model's KV
    is evicted only to make room for the next one. This rule was never slower than the policies of
    FlashTTS, section 4.3, which the lab has (`simulator.split`). The budgets always have the same
    sum, and search results never depend on them.

    most_step_tokens: maximum number of tokens of a step.
    scores_early: True if steps are scored while others are decoded (speculation). Each model then
        keeps bytes for its longest path, even while the other one has its turn.
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
        self.restart()

    @property
    def generator_bytes(self) -> int:
        """The generator's KV budget now."""
        return self._generator.device.budget.total_bytes

    @property
    def verifier_bytes(self) -> int:
        """The verifier's KV budget now."""
        return self._verifier.device.budget.total_bytes

    def restart(self) -> None:
        """Restore the initial division of the memory, and reset the counters."""
        self._seen: tuple[int, ...] = ()
        self._set_budget(self._generator, self._first_bytes)
        self.counts = Counters()
        self.most_generator_bytes = self.generator_bytes

    def rebalance(self, runs: Collection[TreeRun]) -> None:
        """Move memory if the state of the search has changed and moving helps.

        Call it only while neither model runs.
        """
        scoring = [node for run in runs for node in run.round.unscored]
        beams = [node for run in runs for node in run.round.open]
        seen = len(runs), sum(len(run.round_tokens) for run in runs), bool(scoring)
        if seen == self._seen or not (scoring or beams):
            return
        self._seen = seen
        with suppress(CapacityError):  # the host tier is full: nothing is moved
            if scoring:
                needed = _need_bytes(self._verifier, [_tokens_of(n) + 1 for n in scoring])
                self._make_room(self._verifier, self._generator, needed, scoring, beams)
            else:
                step_tokens = expected_step_tokens(beams)
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
        """Give `store`, whose model runs next, the bytes that it needs.

        Needs are estimates. So once any bytes were moved, the model gets all that the idle model
        does not use.

        nodes: the nodes that the model works on next.
        beams: nodes that are decoded meanwhile, or next.
        """
        total = self.total_bytes
        part = self._budget_for_turn(store, idle, needed_bytes)
        if part is not None:
            if self._scores_early and beams:
                # The idle model keeps room for a path if possible. If not, a score that comes too
                # early is put off until the end of the round.
                kept = self._bytes_of_longest_path(idle, beams)
                part = min(part, total - kept if needed_bytes + kept <= total else total)
            self._set_budget(store, part)
        # A step may be longer than the steps from which the need was estimated.
        least = min(self._bytes_of_longest_path(store, nodes), total)
        if least > store.device.budget.total_bytes:
            self._set_budget(store, least)

    def _budget_for_turn(
        self, store: CacheManager, idle: CacheManager, needed_bytes: int
    ) -> int | None:
        """Return the budget in bytes of `store` for its model's turn; None if it has enough."""
        if needed_bytes <= store.device.budget.total_bytes and not self.counts.moves:
            return None
        useless_bytes = self.total_bytes - idle.device.budget.used_bytes  # unused by the idle model
        return min(self.total_bytes, max(needed_bytes, useless_bytes))

    def _bytes_of_longest_path(self, store: CacheManager, beams: Sequence[Node]) -> int:
        """Return the bytes of the longest path plus a step of the greatest length."""
        device, step = store.device, self._most_step_tokens + 1
        longest = max(beams, key=path_tokens)
        depth = len(longest.path())
        blocks = device.blocks_for(path_tokens(longest) + depth) + depth + device.blocks_for(step)
        return (blocks + 1) * device.bytes_per_block

    def _set_budget(self, store: CacheManager, num_bytes: int) -> None:
        """Set this store's budget to `num_bytes`, the other's to the rest, as far as pins allow."""
        before, total = self.generator_bytes, self.total_bytes
        other = self._verifier if store is self._generator else self._generator
        if num_bytes > store.device.budget.total_bytes:
            store, other, num_bytes = other, store, total - num_bytes
        kept = store.resize(num_bytes)  # shrink first: the sum must never exceed the total
        other.resize(total - kept)
        moved = abs(self.generator_bytes - before)
        if moved:
            self.counts.moves += 1
            self.counts.moved_bytes += moved
            self.most_generator_bytes = max(self.most_generator_bytes, self.generator_bytes)


def _need_bytes(store: CacheManager, lengths: Sequence[int]) -> int:
    """Return the bytes of all KV in `store`, plus those of steps with these lengths."""
    device = store.device
    return store.held_bytes + sum(map(device.blocks_for, lengths)) * device.bytes_per_block


def expected_step_tokens(beams: Sequence[Node]) -> int:
    """Return the expected step length: the mean of the previous round, plus half a block."""
    steps = [node.parent for node in beams if node.parent is not None]
    lengths = [len(step.token_ids) for step in steps if step.parent is not None]
    if not sum(lengths):
        return _FIRST_STEP_TOKENS
    return round(sum(lengths) / len(lengths)) + _HALF_BLOCK


def path_tokens(node: Node) -> int:
    """Return the number of tokens of a node's path, prompt included, without user turns."""
    steps = (step for step in node.path()[1:] if step.turn is None)
    return len(node.root.token_ids) + sum(map(_tokens_of, steps))


def _tokens_of(step: Node) -> int:
    """Return a step's number of tokens; of a given text without tokens, its characters."""
    return len(step.token_ids) or len(step.step_text)
