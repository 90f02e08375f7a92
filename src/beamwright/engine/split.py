"""MovingSplit: one memory for the KV of generator and verifier, whose parts change while they run.

Knows both stores and what the trees will ask of them next; neither model, no row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from beamwright.counters import Counters
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError
from beamwright.kv.cache import CacheManager
from beamwright.tree import Node

_FIRST_STEP_TOKENS, _HALF_BLOCK = 32, 4


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
        self._give(self._generator, self._first_bytes)
        self.counts = Counters()
        self.most_generator_bytes = self.generator_bytes

    def look(self, runs: Collection[TreeRun]) -> None:
        """Move memory if the state of the search has changed and that is worth while.

        To be called where neither model runs.
        """
        scoring = [node for run in runs for node in run.round.unscored]
        beams = [node for run in runs for node in run.round.open]
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
        if needed_bytes <= store.device.budget.total_bytes and not self.counts.moves:
            return None
        useless_bytes = self.total_bytes - idle.device.budget.used_bytes  # to the idle one
        return min(self.total_bytes, max(needed_bytes, useless_bytes))

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
