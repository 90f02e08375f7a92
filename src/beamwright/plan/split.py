"""How generator and verifier share one KV memory (FlashTTS, arXiv 2509.00195, section 4.3).

T_tot, Eq. 1, the search over batch sizes on the memory boundary, and the other strategy, in which
each model has all of it in turn and the idle one's KV is on the host. Knows counts, not trees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from beamwright.errors import InputError, format_bytes
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.workload import BLOCK_TOKENS
from beamwright.protocols import Direction


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

    @classmethod
    def alone(cls, roofline: Roofline, new_tokens: int, context_tokens: int = 0) -> Stage:
        """Of a request that shares nothing with others: the paper's."""
        return cls(roofline, new_tokens, context_tokens, new_tokens + context_tokens)

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


@dataclass(frozen=True)
class TreeState:
    """A search as it is now, in tokens: beams alive, the mean length of their paths, distinct
    tokens of all paths in each model's tokens, and how long a step is."""

    num_beams: int
    path_tokens: float
    generator_tokens: float
    verifier_tokens: float
    step_tokens: int


def tree_case(
    state: TreeState, generator: ModelCosts, verifier: ModelCosts, hardware: HardwareProfile
) -> SplitCase:
    """The next round of a search whose beams share prefixes; both models keep their KV."""
    beams, step = max(1, state.num_beams), max(1, state.step_tokens)

    def stage(model: ModelCosts, union_tokens: float) -> Stage:
        held = union_tokens / beams + step
        return Stage(Roofline(model, hardware), step, state.path_tokens, held)

    return SplitCase(
        beams,
        stage(verifier, state.verifier_tokens),
        stage(generator, state.generator_tokens),
        keeps_kv=True,
    )


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


def even_batch(num_requests: int, most: int) -> int:
    """The smallest batch that takes no more rounds than batches of `most` do.

    T_roof grows with a batch, and T_tot counts the last one as full: of all sizes with the same
    number of rounds the smallest is the fastest, and needs the least memory.
    """
    return -(-num_requests // -(-num_requests // most))


def best_split(case: SplitCase, memory_bytes: int) -> Split | None:
    """The least T_tot over all pairs of batch sizes that fit; None if no pair does.

    Only sizes that `even_batch` gives can win, about twice the square root of N of them. Beside
    each of the verifier's, decoding has what Eq. 1 leaves; ties go to the larger such capacity.
    """
    decoding = _Decoding(case, memory_bytes)
    best: tuple[float, int, int, int] | None = None
    for prefill, prefill_s in _prefills(case, memory_bytes):
        capacity = decode_capacity(case, memory_bytes, prefill)
        if capacity < 1:
            continue
        decode_s, decode = decoding.best(capacity)
        found = prefill_s + decode_s, -capacity, prefill, decode
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
    prefill_s, prefill = _best_prefill(case, memory_bytes)
    decode_s, decode = _Decoding(case, memory_bytes).best(count)
    needs = [count * stage.kv_bytes for stage in stages]
    swapped = max(0.0, sum(min(need, memory_bytes) for need in needs) - memory_bytes)
    overhead_s = sum(_swap_s(stage, count, swapped) for stage in stages)
    overhead_s += sum(_load_s(case, stage, memory_bytes) for stage in stages)
    total_s = prefill_s + decode_s + overhead_s
    return Split(prefill, decode, memory_bytes, memory_bytes, total_s, overhead_s)


def fixed_split(case: SplitCase, generator_bytes: int, verifier_bytes: int) -> Split | None:
    """The same for budgets that are given; None if a request of either model does not fit."""
    if verifier_bytes < case.verifier.kv_bytes or generator_bytes < case.generator.kv_bytes:
        return None
    prefill_s, prefill = _best_prefill(case, verifier_bytes)
    decode_s, decode = _Decoding(case, generator_bytes).best(case.num_requests)
    split = Split(prefill, decode, verifier_bytes, generator_bytes, prefill_s + decode_s)
    return _with_loads(case, split)


class _Decoding:
    """The fastest way to decode all requests within a capacity.

    More room never makes it slower: an uneven last batch can make fewer rounds the slower ones, so
    smaller batches are kept in mind.
    """

    def __init__(self, case: SplitCase, memory_bytes: int) -> None:
        most = min(case.num_requests, int(memory_bytes // case.generator.kv_bytes))
        self._sizes: list[int] = []
        self._best: list[tuple[float, int]] = []
        for batch in reversed([*_even_batches(case.num_requests, most)]):
            token_s = -(-case.num_requests // batch) * case.generator.decode_token_s(batch)
            found = case.generator.new_tokens * token_s, batch
            slower = bool(self._best) and found[0] > self._best[-1][0]
            self._sizes.append(batch)
            self._best.append(self._best[-1] if slower else found)

    def best(self, capacity: int) -> tuple[float, int]:
        """Seconds and batch size, of those that fit."""
        return self._best[bisect_right(self._sizes, capacity) - 1]


def _prefills(case: SplitCase, memory_bytes: int) -> Iterator[tuple[int, float]]:
    """The verifier's batch sizes that fit and can win, with their seconds."""
    count = case.num_requests
    for batch in _even_batches(count, min(count, int(memory_bytes // case.verifier.kv_bytes))):
        yield batch, -(-count // batch) * case.verifier.prefill_s(batch)


def _best_prefill(case: SplitCase, memory_bytes: int) -> tuple[float, int]:
    return min((seconds, batch) for batch, seconds in _prefills(case, memory_bytes))


def _even_batches(num_requests: int, most: int) -> Iterator[int]:
    """Sizes up to `most`, the largest first."""
    while most > 0:
        batch = even_batch(num_requests, most)
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
    return _transfer_s(stage, missing, Direction.H2D)


def _swap_s(stage: Stage, num_requests: int, swapped_bytes: float) -> float:
    """For so many bytes to be loaded for a stage, of which what is new had to leave."""
    new_bytes = num_requests * stage.new_tokens * stage.roofline.model.kv_bytes_per_token
    stored = min(new_bytes, swapped_bytes)
    return _transfer_s(stage, swapped_bytes, Direction.H2D) + _transfer_s(
        stage, stored, Direction.D2H
    )


def _transfer_s(stage: Stage, num_bytes: float, direction: Direction) -> float:
    pieces = num_bytes / (BLOCK_TOKENS * stage.roofline.model.kv_bytes_per_token)
    return stage.roofline.transfer(num_bytes, pieces, direction)
