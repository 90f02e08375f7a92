"""How generator and verifier share KV memory (FlashTTS, arXiv 2509.00195, section 4.3).

The paper has two strategies: a split found by searching batch sizes (T_tot, Eq. 1), and offloading,
where each model gets all memory in turn and the idle model's KV goes to the host. `moving_split`
applies them, or the engine's own, during a simulated search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from beamwright.engine.split import KVBudgetSplit, expected_step_tokens, path_tokens
from beamwright.errors import InputError, format_bytes
from beamwright.kv.cache import CacheManager
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.protocols import Direction
from beamwright.tree import Node

# Memory moves only if a round gets faster by this share, and if it is this share of all memory.
_LEAST_GAIN = 0.02
_LEAST_MOVE = 0.05


@dataclass(frozen=True)
class Stage:
    """One model's part of a round, per request (a beam).

    new_tokens: tokens that it encodes (the verifier's S) or decodes (the generator's S_dec).
    context_tokens: tokens before these that have KV already; 0 in the paper.
    held_tokens: tokens of KV on the device at the end of the stage: context and new tokens, or
        fewer if requests share prefixes.
    """

    roofline: Roofline
    new_tokens: int
    context_tokens: float
    held_tokens: float

    @property
    def kv_bytes(self) -> float:
        """KVBytes(1, S): KV bytes of one request."""
        return self.held_tokens * self.roofline.model.kv_bytes_per_token

    def prefill_s(self, batch: int) -> float:
        """Return T_roof: the seconds to encode the new tokens of `batch` requests."""
        new = self.new_tokens
        seen = batch * new * (self.context_tokens + (new + 1) / 2)
        return self.roofline.decode_step_s(batch * new, batch * self.held_tokens, seen)

    def decode_token_s(self, batch: int) -> float:
        """Return T_roof of decoding one token of `batch` requests, half-way through the stage."""
        half = self.new_tokens / 2
        read, seen = self.held_tokens - half, self.context_tokens + half
        return self.roofline.decode_step_s(batch, batch * read, batch * seen)


@dataclass(frozen=True)
class SplitCase:
    """N requests that are decoded, then scored.

    keeps_kv: KV of earlier rounds is kept, and each round loads what did not fit the device. False
        in the paper, which computes requests from their first token.
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
    """Describe the next round of a tree search, in which both models keep their KV.

    path_tokens: mean length of the beams' paths.
    generator, verifier: each model with the number of distinct tokens in all paths.
    """

    def stage(model: ModelCosts, union_tokens: float) -> Stage:
        held = union_tokens / num_beams + step_tokens
        return Stage(Roofline(model, hardware), step_tokens, path_tokens, held)

    return SplitCase(num_beams, stage(*verifier), stage(*generator), keeps_kv=True)


@dataclass(frozen=True)
class Split:
    """Batch sizes and KV budgets of both models, and the resulting time of a round.

    overhead_s: part of `total_s` for moving KV between device and host.
    """

    prefill_batch: int
    decode_batch: int
    verifier_bytes: int
    generator_bytes: int
    total_s: float
    overhead_s: float = 0.0


def decode_capacity(case: SplitCase, memory_bytes: int, prefill_batch: int) -> int:
    """Return the requests that can be decoded together if the verifier holds `prefill_batch`.

    This is Eq. 1, limited to the number of requests.
    """
    left = memory_bytes - prefill_batch * case.verifier.kv_bytes
    return min(case.num_requests, int(max(0.0, left) // case.generator.kv_bytes))


def best_split(case: SplitCase, memory_bytes: int) -> Split | None:
    """Return the split with the least T_tot over all batch sizes; None if none fits.

    Only the sizes of `_even_batches`, about 2 * sqrt(N), can be best. Ties go to the larger
    decoding capacity.
    """
    decodes = _decode_times(case, memory_bytes)
    best: tuple[float, int, int, int] | None = None
    for prefill_s, prefill in _prefill_times(case, memory_bytes):
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


def alternating_split(case: SplitCase, memory_bytes: int) -> Split:
    """Return the cost of giving each model all memory in turn (offloading, section 4.3.2).

    The idle model's KV leaves the device as far as the other model needs the room, and is loaded
    again for its turn. Only new KV is written to the host.

    Raises:
        InputError: if one request of either model does not fit.
    """
    count, stages = case.num_requests, (case.verifier, case.generator)
    for stage, name in zip(stages, ("verifier", "generator"), strict=True):
        if stage.kv_bytes > memory_bytes:
            raise InputError(
                f"KV memory too small: one path of the {name} needs "
                f"{format_bytes(int(stage.kv_bytes))}, there are {format_bytes(memory_bytes)}"
            )
    needs = [count * stage.kv_bytes for stage in stages]
    swapped = max(0.0, sum(min(need, memory_bytes) for need in needs) - memory_bytes)
    overhead_s = 0.0
    for stage in stages:
        new_bytes = count * stage.new_tokens * stage.roofline.model.kv_bytes_per_token
        overhead_s += stage.roofline.move_kv_s(swapped, Direction.H2D)
        overhead_s += stage.roofline.move_kv_s(min(new_bytes, swapped), Direction.D2H)
        overhead_s += _load_s(case, stage, memory_bytes)
    prefill_s, prefill = min(_prefill_times(case, memory_bytes))
    decode_s, decode = min(_decode_times(case, memory_bytes))
    total_s = prefill_s + decode_s + overhead_s
    return Split(prefill, -decode, memory_bytes, memory_bytes, total_s, overhead_s)


def fixed_split(case: SplitCase, generator_bytes: int, verifier_bytes: int) -> Split | None:
    """Return the best batch sizes for given budgets; None if a request does not fit."""
    if verifier_bytes < case.verifier.kv_bytes or generator_bytes < case.generator.kv_bytes:
        return None
    prefill_s, prefill = min(_prefill_times(case, verifier_bytes))
    decode_s, decode = min(_decode_times(case, generator_bytes))
    split = Split(prefill, -decode, verifier_bytes, generator_bytes, prefill_s + decode_s)
    return _with_loads(case, split)


def _prefill_times(case: SplitCase, memory_bytes: int) -> list[tuple[float, int]]:
    """Return (seconds, batch size) of the verifier for every size that fits and can be best."""
    count, stage = case.num_requests, case.verifier
    sizes = _even_batches(count, int(memory_bytes // stage.kv_bytes))
    return [(-(-count // batch) * stage.prefill_s(batch), batch) for batch in sizes]


def _decode_times(case: SplitCase, memory_bytes: int) -> list[tuple[float, int]]:
    """Return (seconds, -batch size) of the generator; `min` then breaks ties by larger size."""
    count, stage = case.num_requests, case.generator
    sizes = _even_batches(count, int(memory_bytes // stage.kv_bytes))
    token_s = [(-(-count // batch) * stage.decode_token_s(batch), -batch) for batch in sizes]
    return [(stage.new_tokens * seconds, batch) for seconds, batch in token_s]


def _even_batches(num_requests: int, most: int) -> Iterator[int]:
    """Yield, for each possible number of batches, the smallest batch size, up to `most`.

    Larger sizes with the same number of batches are slower, because T_tot counts the last batch as
    full. They also need more memory.
    """
    most = min(num_requests, most)
    while most > 0:
        batch = -(-num_requests // -(-num_requests // most))
        yield batch
        most = batch - 1


def _verifier_bytes(case: SplitCase, memory_bytes: int, prefill: int, capacity: int) -> int:
    """Return the verifier's budget: its batch, and memory that decoding cannot use.

    If all requests of both models fit, the rest is divided in proportion to their KV.
    """
    verifier = prefill * case.verifier.kv_bytes
    spare = memory_bytes - verifier - capacity * case.generator.kv_bytes
    if capacity < case.num_requests:
        return min(memory_bytes, round(verifier))
    more = min(spare, case.num_requests * case.verifier.kv_bytes - verifier)
    share = case.verifier.kv_bytes / (case.verifier.kv_bytes + case.generator.kv_bytes)
    return min(memory_bytes, int(verifier + more + (spare - more) * share))


def _with_loads(case: SplitCase, split: Split) -> Split:
    """Add the seconds to load, each round, the kept KV that does not fit the device."""
    overhead_s = _load_s(case, case.verifier, split.verifier_bytes)
    overhead_s += _load_s(case, case.generator, split.generator_bytes)
    return replace(split, total_s=split.total_s + overhead_s, overhead_s=overhead_s)


def _load_s(case: SplitCase, stage: Stage, own_bytes: float) -> float:
    if not case.keeps_kv:
        return 0.0
    missing = max(0.0, case.num_requests * stage.kv_bytes - own_bytes)
    return stage.roofline.move_kv_s(missing, Direction.H2D)


# --- while a search runs ---------------------------------------------------------------------


class AlternatingSplit(KVBudgetSplit):
    """A `KVBudgetSplit` that gives all memory to the model that runs next."""

    def _budget_for_turn(
        self, store: CacheManager, idle: CacheManager, needed_bytes: int
    ) -> int | None:
        return self.total_bytes


class SearchedSplit(AlternatingSplit):
    """A `KVBudgetSplit` by the paper's search: before each round, the best budgets or turns.

    costs: of generator and verifier.
    """

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

    def _budget_for_turn(
        self, store: CacheManager, idle: CacheManager, needed_bytes: int
    ) -> int | None:
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
        """Choose the faster strategy for this round, and set the budgets."""
        total = self.total_bytes
        generator, verifier = (
            (costs, store.held_bytes / store.device.bytes_per_token)
            for costs, store in zip(self._costs, (self._generator, self._verifier), strict=True)
        )
        case = tree_case(
            len(beams),
            sum(map(path_tokens, beams)) / len(beams),
            expected_step_tokens(beams),
            generator,
            verifier,
            self._hardware,
        )
        best, turns = best_split(case, total), None
        with suppress(InputError):  # one path of mean length does not fit
            turns = alternating_split(case, total)
        self._takes_turns = turns is not None and (best is None or turns.total_s < best.total_s)
        if self._takes_turns or best is None:
            return
        least = self._bytes_of_longest_path(self._generator, beams)
        most = total - self._bytes_of_longest_path(self._verifier, beams)
        if least > most:  # both models' longest paths do not fit: restore the first budgets
            self._set_budget(self._generator, self._first_bytes)
            return
        wanted = min(most, max(best.generator_bytes, least))
        if least <= self.generator_bytes <= most:
            now = fixed_split(case, self.generator_bytes, self.verifier_bytes)
            if now is not None and best.total_s > (1 - _LEAST_GAIN) * now.total_s:
                return
            if abs(wanted - self.generator_bytes) < _LEAST_MOVE * total:
                return
        self._set_budget(self._generator, wanted)


def moving_split(
    split: str,
    costs: tuple[ModelCosts, ModelCosts],
    hardware: HardwareProfile,
    stores: tuple[CacheManager, CacheManager],
    most_step_tokens: int,
    *,
    scores_early: bool,
) -> KVBudgetSplit:
    """Create the strategy that moves memory between the models' KV budgets.

    split: "auto": the engine's strategy. "roofline", "offload": FlashTTS's.
    stores: of generator and verifier.
    """
    if split == "roofline":
        return SearchedSplit(costs, hardware, *stores, most_step_tokens, scores_early=scores_early)
    kind = AlternatingSplit if split == "offload" else KVBudgetSplit
    return kind(*stores, most_step_tokens, scores_early=scores_early)
