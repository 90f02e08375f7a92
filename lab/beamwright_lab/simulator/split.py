"""How generator and verifier share one KV memory (FlashTTS, arXiv 2509.00195, section 4.3).

T_tot, Eq. 1, the search over batch sizes on the memory boundary, and the other strategy, in which
each model has all of it in turn and the idle one's KV is on the host. They know counts, not trees;
`moving_split` is what moves memory by them while a search is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from beamwright.engine.split import MovingSplit, path_tokens, step_tokens_of
from beamwright.errors import InputError, format_bytes
from beamwright.kv.cache import CacheManager
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.protocols import Direction
from beamwright.tree import Node

_LEAST_GAIN = 0.02  # of the seconds of a round, by the cost model
_LEAST_MOVE = 0.05  # of the memory


@dataclass(frozen=True)
class Stage:
    """One model's part of a round, per request (a beam).

    new_tokens: that it encodes (S of the verifier) or writes (S_dec of the generator).
    context_tokens: of the path before them, whose KV is there already; the paper has none.
    held_tokens: whose KV the device must hold for it when the stage ends: context and new tokens,
    or less where requests share them. KVBytes(1, S) is that times the bytes of a token.
    """

    roofline: Roofline
    new_tokens: int
    context_tokens: float
    held_tokens: float

    @property
    def kv_bytes(self) -> float:
        """KVBytes(1, S): what one request holds."""
        return self.held_tokens * self.roofline.model.kv_bytes_per_token

    def prefill_s(self, batch: int) -> float:
        """T_roof of a batch whose new tokens are encoded."""
        new = self.new_tokens
        seen = batch * new * (self.context_tokens + (new + 1) / 2)
        return self.roofline.decode_step(batch * new, batch * self.held_tokens, seen)

    def decode_token_s(self, batch: int) -> float:
        """T_roof of a token for each request of a batch, half-way through the stage."""
        half = self.new_tokens / 2
        read, seen = self.held_tokens - half, self.context_tokens + half
        return self.roofline.decode_step(batch, batch * read, batch * seen)


@dataclass(frozen=True)
class SplitCase:
    """N requests that are decoded, then scored.

    keeps_kv: of earlier rounds, so that what has no room comes back for every round. The paper has
    none of that: its requests are computed from their first token.
    """

    num_requests: int
    verifier: Stage
    generator: Stage
    keeps_kv: bool = False


def tree_case(
    num_beams: int,
    path_tokens: float,
    step_tokens: int,
    generator: tuple[ModelCosts, float],
    verifier: tuple[ModelCosts, float],
    hardware: HardwareProfile,
) -> SplitCase:
    """The next round of a search whose beams share prefixes; both models keep their KV.

    path_tokens: the mean length of the beams' paths. generator, verifier: each with the distinct
    tokens of all paths, in its own tokens.
    """

    def stage(model: ModelCosts, union_tokens: float) -> Stage:
        held = union_tokens / num_beams + step_tokens
        return Stage(Roofline(model, hardware), step_tokens, path_tokens, held)

    return SplitCase(num_beams, stage(*verifier), stage(*generator), keeps_kv=True)


@dataclass(frozen=True)
class Split:
    """Batch sizes, the bytes of KV that they give each model, and the round's seconds.

    overhead_s: of `total_s`, what moving KV between device and host takes.
    """

    prefill_batch: int
    decode_batch: int
    verifier_bytes: int
    generator_bytes: int
    total_s: float
    overhead_s: float = 0.0


def decode_capacity(case: SplitCase, memory_bytes: int, prefill_batch: int) -> int:
    """Eq. 1: the most requests that can be decoded together beside `prefill_batch` of the
    verifier's; no more than there are."""
    left = memory_bytes - prefill_batch * case.verifier.kv_bytes
    return min(case.num_requests, int(max(0.0, left) // case.generator.kv_bytes))


def best_split(case: SplitCase, memory_bytes: int) -> Split | None:
    """The least T_tot over all pairs of batch sizes that fit; None if no pair does.

    Only sizes of `_even_batches` can win, about twice the square root of N of them. Beside each of
    the verifier's, decoding has what Eq. 1 leaves; ties go to the larger such capacity.
    """
    decodes = _decodes(case, memory_bytes)
    best: tuple[float, int, int, int] | None = None
    for prefill_s, prefill in _prefills(case, memory_bytes):
        capacity = decode_capacity(case, memory_bytes, prefill)
        if capacity < 1:
            continue
        decode_s, decode = min(each for each in decodes if -each[1] <= capacity)
        found = prefill_s + decode_s, -capacity, prefill, -decode
        best = found if best is None else min(best, found)
    if best is None:
        return None
    total_s, capacity, prefill, decode = best
    verifier = _verifier_bytes(case, memory_bytes, prefill, -capacity)
    return _with_loads(case, Split(prefill, decode, verifier, memory_bytes - verifier, total_s))


def in_turn(case: SplitCase, memory_bytes: int) -> Split:
    """Each model may have all the memory while it runs (section 4.3.2).

    What the idle one holds leaves the device as far as the other needs the room, and comes back
    for its turn. KV that the host has already does not leave again, so that what is new does.

    Raises:
        InputError: if one request of either model does not fit.
    """
    count, stages = case.num_requests, (case.verifier, case.generator)
    for stage, name in zip(stages, ("verifier", "generator"), strict=True):
        if stage.kv_bytes > memory_bytes:
            raise InputError(
                f"one path of the {name} takes {format_bytes(int(stage.kv_bytes))} of KV; there "
                f"is room for {format_bytes(memory_bytes)}"
            )
    needs = [count * stage.kv_bytes for stage in stages]
    swapped = max(0.0, sum(min(need, memory_bytes) for need in needs) - memory_bytes)
    overhead_s = 0.0
    for stage in stages:  # what is new of a stage has to leave, too
        new_bytes = count * stage.new_tokens * stage.roofline.model.kv_bytes_per_token
        overhead_s += stage.roofline.move(swapped, Direction.H2D)
        overhead_s += stage.roofline.move(min(new_bytes, swapped), Direction.D2H)
        overhead_s += _load_s(case, stage, memory_bytes)
    prefill_s, prefill = min(_prefills(case, memory_bytes))
    decode_s, decode = min(_decodes(case, memory_bytes))
    total_s = prefill_s + decode_s + overhead_s
    return Split(prefill, -decode, memory_bytes, memory_bytes, total_s, overhead_s)


def fixed_split(case: SplitCase, generator_bytes: int, verifier_bytes: int) -> Split | None:
    """The same for budgets that are given; None if a request of either model does not fit."""
    if verifier_bytes < case.verifier.kv_bytes or generator_bytes < case.generator.kv_bytes:
        return None
    prefill_s, prefill = min(_prefills(case, verifier_bytes))
    decode_s, decode = min(_decodes(case, generator_bytes))
    split = Split(prefill, -decode, verifier_bytes, generator_bytes, prefill_s + decode_s)
    return _with_loads(case, split)


def _prefills(case: SplitCase, memory_bytes: int) -> list[tuple[float, int]]:
    """Seconds and the verifier's batch, of every size that fits and can win."""
    count, stage = case.num_requests, case.verifier
    sizes = _even_batches(count, int(memory_bytes // stage.kv_bytes))
    return [(-(-count // batch) * stage.prefill_s(batch), batch) for batch in sizes]


def _decodes(case: SplitCase, memory_bytes: int) -> list[tuple[float, int]]:
    """The same of the generator, batches negative: of equally fast ones the largest is least."""
    count, stage = case.num_requests, case.generator
    sizes = _even_batches(count, int(memory_bytes // stage.kv_bytes))
    token_s = [(-(-count // batch) * stage.decode_token_s(batch), -batch) for batch in sizes]
    return [(stage.new_tokens * seconds, batch) for seconds, batch in token_s]


def _even_batches(num_requests: int, most: int) -> Iterator[int]:
    """Sizes up to `most`, the largest first, that take no more rounds than any smaller one.

    T_roof grows with a batch, and T_tot counts the last one as full: of all sizes with the same
    number of rounds the smallest is the fastest, and needs the least memory.
    """
    most = min(num_requests, most)
    while most > 0:
        batch = -(-num_requests // -(-num_requests // most))
        yield batch
        most = batch - 1


def _verifier_bytes(case: SplitCase, memory_bytes: int, prefill: int, capacity: int) -> int:
    """The verifier's part: its batch, and of what decoding cannot use what it could still hold.

    What is left when both hold everything is divided like what they hold.
    """
    verifier = prefill * case.verifier.kv_bytes
    spare = memory_bytes - verifier - capacity * case.generator.kv_bytes
    if capacity < case.num_requests:
        return min(memory_bytes, round(verifier))
    more = min(spare, case.num_requests * case.verifier.kv_bytes - verifier)
    share = case.verifier.kv_bytes / (case.verifier.kv_bytes + case.generator.kv_bytes)
    return min(memory_bytes, int(verifier + more + (spare - more) * share))


def _with_loads(case: SplitCase, split: Split) -> Split:
    """With what has to come back each round of KV that is kept, and for which there is no room."""
    overhead_s = _load_s(case, case.verifier, split.verifier_bytes)
    overhead_s += _load_s(case, case.generator, split.generator_bytes)
    return replace(split, total_s=split.total_s + overhead_s, overhead_s=overhead_s)


def _load_s(case: SplitCase, stage: Stage, own_bytes: float) -> float:
    if not case.keeps_kv:
        return 0.0
    missing = max(0.0, case.num_requests * stage.kv_bytes - own_bytes)
    return stage.roofline.move(missing, Direction.H2D)


# --- while a search runs ---------------------------------------------------------------------


class Offload(MovingSplit):
    """Whoever runs next gets everything."""

    def _part(self, store: CacheManager, idle: CacheManager, needed_bytes: int) -> int | None:
        return self.total_bytes


class BySearch(Offload):
    """The search over batch sizes decides again before every round how large the parts are, or that
    both models take turns, if that is faster. costs: of generator and verifier."""

    def __init__(
        self,
        costs: tuple[ModelCosts, ModelCosts],
        hardware: HardwareProfile,
        generator: CacheManager,
        verifier: CacheManager,
        most_step_tokens: int,
        *,
        scores_early: bool,
    ) -> None:
        self._costs, self._hardware = costs, hardware
        super().__init__(generator, verifier, most_step_tokens, scores_early=scores_early)

    def restart(self) -> None:
        self._takes_turns = False
        super().restart()

    def _part(self, store: CacheManager, idle: CacheManager, needed_bytes: int) -> int | None:
        return self.total_bytes if self._takes_turns else None

    def _make_room(
        self,
        store: CacheManager,
        idle: CacheManager,
        needed_bytes: int,
        nodes: Sequence[Node],
        beams: Sequence[Node],
    ) -> None:
        if store is self._generator:
            self._choose(beams)
        super()._make_room(store, idle, needed_bytes, nodes, beams)

    def _choose(self, beams: Sequence[Node]) -> None:
        """The faster of two parts and of turns."""
        total = self.total_bytes
        generator, verifier = (
            (costs, store.held_bytes / store.device.bytes_per_token)
            for costs, store in zip(self._costs, (self._generator, self._verifier), strict=True)
        )
        case = tree_case(
            len(beams),
            sum(map(path_tokens, beams)) / len(beams),
            step_tokens_of(beams),
            generator,
            verifier,
            self._hardware,
        )
        best, turns = best_split(case, total), None
        with suppress(InputError):  # not one path fits on average
            turns = in_turn(case, total)
        self._takes_turns = turns is not None and (best is None or turns.total_s < best.total_s)
        if self._takes_turns or best is None:
            return
        least = self._least(self._generator, beams)
        most = total - self._least(self._verifier, beams)
        if least > most:  # nobody can be sure of a path: as in the beginning
            self._give(self._generator, self._first_bytes)
            return
        wanted = min(most, max(best.generator_bytes, least))
        if least <= self.generator_bytes <= most:
            now = fixed_split(case, self.generator_bytes, self.verifier_bytes)
            if now is not None and best.total_s > (1 - _LEAST_GAIN) * now.total_s:
                return
            if abs(wanted - self.generator_bytes) < _LEAST_MOVE * total:
                return
        self._give(self._generator, wanted)


def moving_split(
    split: str,
    costs: tuple[ModelCosts, ModelCosts],
    hardware: HardwareProfile,
    stores: tuple[CacheManager, CacheManager],
    most_step_tokens: int,
    *,
    scores_early: bool,
) -> MovingSplit:
    """split: `auto`, the engine's; `offload`, or `roofline` by these costs, FlashTTS's."""
    if split == "roofline":
        return BySearch(costs, hardware, *stores, most_step_tokens, scores_early=scores_early)
    kind = Offload if split == "offload" else MovingSplit
    return kind(*stores, most_step_tokens, scores_early=scores_early)
