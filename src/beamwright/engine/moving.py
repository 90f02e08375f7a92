"""MovingSplit: device memory goes from one model's KV to the other's while a search runs.

FlashTTS, section 4.3 (`roofline`, `offload`), and what was measured to be faster (`auto`: each
model in turn, and no more than it needs). Budgets are counted in bytes and always add up to the
same number; what a search computes never depends on them. Knows residency and trees, and no
tensors: engine and simulator run this code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from beamwright.counters import Counters
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import CapacityError, InputError
from beamwright.kv.cache import CacheManager
from beamwright.plan.costs import ModelCosts
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.split import (
    TreeState,
    best_split,
    fixed_split,
    in_turn,
    tree_case,
)
from beamwright.tree import Node

_FIRST_STEP_TOKENS, _HALF_BLOCK = 32, 4
_LEAST_GAIN = 0.02  # of the seconds of a round, by the cost model
_LEAST_MOVE = 0.05  # of the memory


MOVING = ("auto", "roofline", "offload")
"""Splits that move; any other is a share that stays."""


class MovingSplit:
    """Two stores over one memory.

    auto: the model that runs next gets room for what it needs, as far as there is any; the idle
    one's KV leaves only where it is in the way. roofline: the search over batch sizes decides again
    before every round how large the parts are, or that both take turns, if that is faster.
    offload: whoever runs next gets everything.

    costs: of generator and verifier. most_step_tokens: how long a step may become. scores_early:
    steps are scored while others are decoded (speculation), so that neither model may be left
    without room for its longest path while the other has its turn.
    """

    def __init__(
        self,
        generator: CacheManager,
        verifier: CacheManager,
        costs: tuple[ModelCosts, ModelCosts],
        hardware: HardwareProfile,
        split: str = "auto",
        most_step_tokens: int = 256,
        *,
        scores_early: bool = False,
    ) -> None:
        self._generator, self._verifier = generator, verifier
        self._costs, self._hardware = costs, hardware
        self._split, self._most_step_tokens = split, most_step_tokens
        self._scores_early = scores_early
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
        self._takes_turns = self._split != "roofline"
        self.counts = Counters()
        self._move(self._first_bytes)
        self.counts = Counters()
        self.most_generator_bytes = self.generator_bytes

    def look(self, runs: Collection[TreeRun]) -> None:
        """Move memory if the state of the search has changed and that is worth while.

        To be called where neither model runs.
        """
        scoring = [node for run in runs for node in run.unscored]
        beams = [node for run in runs for node in run.open]
        seen = len(runs), sum(run.tree.rounds for run in runs), bool(scoring)
        if seen == self._seen or not (scoring or beams):
            return
        self._seen = seen
        with suppress(CapacityError):  # of the host tier: everything stays where it is
            if scoring:
                self._score(scoring, beams)
            else:
                self._decode(beams)

    def check(self) -> None:
        """Conservation: of blocks in both stores, of bytes between them."""
        self._generator.check()
        self._verifier.check()
        if self.generator_bytes + self.verifier_bytes != self.total_bytes:
            raise AssertionError("the two budgets do not add up to the memory")
        for store in (self._generator, self._verifier):
            if store.device.budget.used_bytes > store.device.budget.total_bytes:
                raise AssertionError("a store uses more than its budget")

    # --- inside ------------------------------------------------------------------------------

    def _decode(self, beams: Sequence[Node]) -> None:
        """Decoding is next."""
        step = _step_tokens(beams)
        needed = _need_bytes(self._generator, [step] * len(beams))
        if self._split == "roofline":
            self._choose(beams, step)
        if self._takes_turns and self._is_short(needed > self.generator_bytes):
            kept = self._kept(self._verifier, beams, needed)
            self._move(min(self._part(needed, self._verifier), self.total_bytes - kept))
        # A step may be longer than those that the need was estimated from.
        least = min(self._least(self._generator, beams), self.total_bytes)
        if least > self.generator_bytes:
            self._move(least)

    def _score(self, nodes: Sequence[Node], beams: Sequence[Node]) -> None:
        """Scoring is next; the beams are decoded meanwhile, or after it."""
        needed = _need_bytes(self._verifier, [len(node.token_ids) + 1 for node in nodes])
        if self._takes_turns and self._is_short(needed > self.verifier_bytes):
            kept = self._kept(self._generator, beams, needed)
            self._move(max(self.total_bytes - self._part(needed, self._generator), kept))
        # A step that was decoded ahead may be longer than any that the parts were chosen for.
        least = min(self._least(self._verifier, nodes), self.total_bytes)
        if least > self.verifier_bytes:
            self._move(self.total_bytes - least)

    def _kept(self, idle: CacheManager, beams: Sequence[Node], needed_bytes: int) -> int:
        """What the model whose turn it is not keeps: a path, where there is room for that.

        Where there is not, a score that comes too early is put off until the round's end.
        """
        if not (self._scores_early and beams):
            return 0
        least = self._least(idle, beams)
        return least if needed_bytes + least <= self.total_bytes else 0

    def _is_short(self, now: bool) -> bool:
        """Memory is short, or has been: needs are estimates, so all that is free is taken then."""
        return now or self.counts.moves > 0 or self._split != "auto"

    def _part(self, needed_bytes: int, idle: CacheManager) -> int:
        """What the model that runs next gets: its need, and what the idle one has no use for."""
        if self._split != "auto":
            return self.total_bytes
        spare = self.total_bytes - idle.device.budget.used_bytes
        return min(self.total_bytes, max(needed_bytes, spare))

    def _choose(self, beams: Sequence[Node], step_tokens: int) -> None:
        """The faster of two parts and of turns; see `cost.split`."""
        total = self.total_bytes
        case = tree_case(self._state(beams, step_tokens), *self._costs, self._hardware)
        best, turns = best_split(case, total), None
        with suppress(InputError):  # not one path fits on average
            turns = in_turn(case, total)
        self._takes_turns = turns is not None and (best is None or turns.total_s < best.total_s)
        if self._takes_turns or best is None:
            return
        least = self._least(self._generator, beams)
        most = total - self._least(self._verifier, beams)
        if least > most:  # nobody can be sure of a path: as in the beginning
            self._move(self._first_bytes)
            return
        wanted = min(most, max(best.generator_bytes, least))
        if least <= self.generator_bytes <= most:
            now = fixed_split(case, self.generator_bytes, self.verifier_bytes)
            if now is not None and best.total_s > (1 - _LEAST_GAIN) * now.total_s:
                return
            if abs(wanted - self.generator_bytes) < _LEAST_MOVE * total:
                return
        self._move(wanted)

    def _state(self, beams: Sequence[Node], step_tokens: int) -> TreeState:
        return TreeState(
            len(beams),
            sum(map(_path_tokens, beams)) / len(beams),
            self._generator.held_bytes / self._generator.device.bytes_per_token,
            self._verifier.held_bytes / self._verifier.device.bytes_per_token,
            step_tokens,
        )

    def _least(self, store: CacheManager, beams: Sequence[Node]) -> int:
        """What the longest path and the longest step take: every beam can be decoded and scored."""
        device, step = store.device, self._most_step_tokens + 1
        longest = max(beams, key=_path_tokens)
        depth = len(longest.path())
        blocks = device.blocks_for(_path_tokens(longest) + depth) + depth + device.blocks_for(step)
        return (blocks + 1) * device.bytes_per_block

    def _move(self, generator_bytes: int) -> None:
        """Give the generator so much, and the verifier the rest, as far as what is held allows."""
        before, total = self.generator_bytes, self.total_bytes
        if generator_bytes < before:
            kept = self._generator.resize(generator_bytes)
            self._verifier.resize(total - kept)
        else:
            kept = self._verifier.resize(total - generator_bytes)
            self._generator.resize(total - kept)
        moved = abs(self.generator_bytes - before)
        if moved:
            self.counts.moves += 1
            self.counts.moved_bytes += moved
            self.most_generator_bytes = max(self.most_generator_bytes, self.generator_bytes)


def _need_bytes(store: CacheManager, lengths: Sequence[int]) -> int:
    """What the store holds, and steps of these lengths more."""
    device = store.device
    return store.held_bytes + sum(map(device.blocks_for, lengths)) * device.bytes_per_block


def _step_tokens(beams: Sequence[Node]) -> int:
    """The mean step of the round before, and half a block's worth of tokens."""
    steps = [node.parent for node in beams if node.parent is not None]
    lengths = [len(step.token_ids) for step in steps if step.parent is not None]
    if not sum(lengths):
        return _FIRST_STEP_TOKENS
    return round(sum(lengths) / len(lengths)) + _HALF_BLOCK


def _path_tokens(node: Node) -> int:
    return len(node.root.token_ids) + node.num_path_tokens
