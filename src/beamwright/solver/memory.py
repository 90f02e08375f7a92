"""The memory plan: from one number to the KV budgets of generator and verifier, and the host's.

Knows sizes, no models and no torch; and what helps where a budget was too small.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.models.shape import ModelShape
from beamwright.plan.costs import (
    CAPTURED_TOKENS,
    CHUNK_TOKENS,
    ModelCosts,
    Storage,
    group_blocks,
    partial_bytes,
    product_scratch_bytes,
    weight_bytes,
)
from beamwright.sections import KVDtype, MemorySettings

DEFAULT_KV_BYTES = 2 * 1024**3
_MOST_PINNED_BYTES = 16 * 1024**3
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARE_PARTS = 10**9
_PREFILL_TOKENS = 4096  # of a batch: see `models.prefill`
_TAIL_TOKENS = 256  # the most of a row's newest ones that stand apart until they are stored
_LEAST_TAIL_TOKENS = 16
_TAILS_PART = 4  # of what is left for KV, its copies and tails: one in so many is for tails at most
_FREE_SHARE = 0.9  # of what a card has left: it is cut in pieces, and libraries have some
_LIBRARIES_PART = 50  # of a number for a card: one in so many is for those
_TOKENS_OF_A_ROW = 128  # that a tree has for each of its beams, shared ones counted once


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of one model in its dtype. storage, kv_dtype: how projections, and KV, are kept.

    scores: it is a card's verifier, which reads a step of every row at a time: a CPU has memory
    beside the number, and reads fewer tokens as a rule. parts: of its KV, for so many that run at
    a time with one copy of the weights (`--verifiers`).
    """

    shape: ModelShape
    element_bytes: int
    storage: Storage = Storage.PLAIN
    kv_dtype: KVDtype = "auto"
    scores: bool = False
    parts: int = 1

    @property
    def costs(self) -> ModelCosts:
        """What it costs to run, by the cost model."""
        return ModelCosts.of(self.shape, self.element_bytes, self.storage, self.kv_dtype)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.shape, self.element_bytes, self.storage)

    @property
    def kv_per_token(self) -> int:
        """KV bytes of one token."""
        return self.shape.kv_bytes_per_token(self.element_bytes, self.kv_dtype)

    @property
    def state(self) -> int:
        """Bytes of a row in recurrent layers."""
        return self.shape.state_bytes(self.element_bytes)

    @property
    def held_per_token(self) -> int:
        """Bytes of one token of a tree: its KV, and its part of the states."""
        return self.kv_per_token + self.state // _TOKENS_OF_A_ROW

    @property
    def read_per_token(self) -> int:
        """The same as attention reads it."""
        return self.shape.kv_bytes_per_token(self.element_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of KV, of any group of layers."""
        return group_blocks(self._group_bytes)[0]

    @property
    def blocks(self) -> list[tuple[int, int | None]]:
        """Of each group of layers, tokens of a block, and the window."""
        windows = [group.window for group in self.shape.kv_groups]
        return list(zip(group_blocks(self._group_bytes)[1], windows, strict=True))

    @property
    def captured(self) -> int:
        """Estimate of what its captured passes hold, between them, too."""
        return CAPTURED_TOKENS * self.shape.reading_width * self.element_bytes

    @property
    def _group_bytes(self) -> list[int]:
        groups = self.shape.kv_groups
        return [group.bytes_per_token(self.element_bytes, self.kv_dtype) for group in groups]

    def tails(self, num_rows: int, step_tokens: int = _TAIL_TOKENS) -> int:
        """KV of the newest tokens of so many rows, beside blocks; twice while rows are arranged.

        step_tokens: most that a step has.
        """
        tokens = max(_LEAST_TAIL_TOKENS, 1 << (step_tokens - 1).bit_length())
        return num_rows * 2 * min(tokens, _TAIL_TOKENS) * self.read_per_token

    def partials(self, num_rows: int) -> int:
        """What attention's kernels hold of so many rows, beside blocks."""
        groups = self.shape.kv_groups
        return num_rows * sum(partial_bytes(self.shape.heads, group.head_dim) for group in groups)

    def activations(self, num_rows: int) -> int:
        """Estimate of the working memory of a decode step of `num_rows`, or of a prefill batch."""
        shape = self.shape
        decode = num_rows * shape.working_bytes_per_row(self.element_bytes)
        scratch = product_scratch_bytes(shape, self.storage)
        prefill = _PREFILL_TOKENS * shape.activation_width * self.element_bytes
        if self.scores:  # what is read of a round, whose states a head gets
            tokens = min(_PREFILL_TOKENS, num_rows * CHUNK_TOKENS)
            reading = tokens * shape.reading_width * self.element_bytes
            prefill = max(prefill, reading, shape.head_bytes(self.element_bytes))
            scratch += 2 * tokens * shape.hidden * self.element_bytes
        return max(decode, prefill) + scratch


@dataclass(frozen=True)
class MemoryPlan:
    """Budgets in bytes, of one number.

    tokens_part: the generator's part where both models hold equally many tokens.
    rows_bytes: that rows have for tails and activations; None where a card says what it has.
    """

    generator_kv_bytes: int
    verifier_kv_bytes: int
    tokens_part: float = 1.0
    rows_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Both budgets together."""
        return self.generator_kv_bytes + self.verifier_kv_bytes


def plan_memory(
    settings: MemorySettings,
    generator: ModelBytes,
    verifier: ModelBytes | None,
    num_rows: int,
    *,
    in_place: bool = False,
    free_bytes: int | None = None,
    step_tokens: int | None = None,
) -> MemoryPlan:
    """Split the memory number.

    `--kv-memory` is the device KV alone; else it is half of `--memory` less weights and
    activations (the other half, in 8 bits more, is for attention's working copies of the present
    group);
    else of nine tenths of what a card has free; else a default of 2 GiB, which the operating
    system commits as it is touched. Of that the generator has the share that `--split` names, or
    what gives both models equally many tokens; from there memory may move while a search runs
    (`engine.split`).

    in_place: attention's kernels read and write KV where it is, so beside it are their partial
    results alone; and steps are captured.
    step_tokens: most that a step has, on a CPU, where the number holds rows' tails, too: for all
    rows if they take no more than a quarter of what is left; else for as many rows at a time.
    free_bytes: of the card, with the weights on it; None where that is not known (a CPU).

    Raises:
        InputError: if weights and activations leave nothing for KV.
    """
    models = [generator] if verifier is None else [generator, verifier]
    num_rows = _at_once(settings.memory, models, num_rows, free_bytes)
    weights, activations = beside_kv(models, num_rows, at_once=in_place)
    rows_bytes: int | None = None
    if settings.kv_memory is not None:
        kv_bytes = settings.kv_memory
        if settings.memory is not None and kv_bytes + weights > settings.memory:
            raise InputError(
                f"--memory {format_bytes(settings.memory)} is less than --kv-memory "
                f"{format_bytes(kv_bytes)} and the weights ({format_bytes(weights)}) together"
            )
    elif settings.memory is None and free_bytes is None:
        kv_bytes = DEFAULT_KV_BYTES
    else:
        free = free_bytes or 0
        left, named = int(_FREE_SHARE * free), f"the card has {format_bytes(free)} free"
        if settings.memory is not None:
            left, named = settings.memory - weights, f"--memory {format_bytes(settings.memory)}"
            left -= settings.memory // _LIBRARIES_PART if free_bytes is not None else 0
            named += f": weights take {format_bytes(weights)}"
        left -= activations
        if step_tokens is not None:
            tails = generator.tails(num_rows, step_tokens)
            tails = max(0, min(tails, left // _TAILS_PART))
            left, rows_bytes = left - tails, activations + tails
        copies = left - left * 1000 // _with_copies(models, 1000)
        if in_place:
            row = generator.partials(1)
            of_states = left * row // (row + generator.state)
            copies = min(copies, of_states, max(model.partials(num_rows) for model in models))
        kv_bytes = left - copies
        if kv_bytes <= 0:
            raise InputError(
                f"{named}, activations take about {format_bytes(activations)}; "
                "nothing is left for KV"
            )
    if verifier is None:
        return MemoryPlan(kv_bytes, 0, rows_bytes=rows_bytes)
    part, rest = _parts(settings.split, generator, verifier)
    generator_bytes = kv_bytes * part // (part + rest)
    tokens_part = generator.kv_per_token / (generator.kv_per_token + verifier.kv_per_token)
    return MemoryPlan(generator_bytes, kv_bytes - generator_bytes, tokens_part, rows_bytes)


def _at_once(
    memory: int | None, models: Sequence[ModelBytes], num_rows: int, free_bytes: int | None
) -> int:
    """Rows that run at a time: no more than there are states for, where layers keep one."""
    left = free_bytes
    if memory is not None:
        left = memory - sum(model.weights for model in models)
    if not models[0].state or left is None:
        return num_rows
    return max(1, min(num_rows, left // models[0].state))


def beside_kv(
    models: Sequence[ModelBytes], num_rows: int, *, at_once: bool = False
) -> tuple[int, int]:
    """Bytes of all weights, and of the larger model's activations; of both, and of their captured
    passes, where captured steps hold one's while the other computes; of all that run at a time."""
    needs = [model.parts * model.activations(num_rows) for model in models]
    captured = sum(model.parts * model.captured for model in models) if at_once else 0
    weights, several = sum(model.weights for model in models), any(m.parts > 1 for m in models)
    return weights, sum(needs) + captured if at_once or several else max(needs)


def _parts(split: str | float, generator: ModelBytes, verifier: ModelBytes) -> tuple[int, int]:
    """How generator and verifier share KV memory when a search begins, as two weights."""
    if isinstance(split, str):
        return generator.held_per_token, verifier.held_per_token
    own = round(split * _SHARE_PARTS)
    return own, _SHARE_PARTS - own


def memory_needed(
    models: tuple[ModelBytes, ModelBytes | None],
    kv_bytes: tuple[int, int],
    num_rows: int,
    *,
    has_copies: bool = True,
    in_place: bool = False,
    split: str | float = "auto",
    step_tokens: int | None = None,
) -> int:
    """The least memory number from which `plan_memory` gives each model so many bytes of KV.

    models, kv_bytes: generator and verifier. has_copies: False where KV has a number of its own.
    split: `--split`; what moves later is left out. in_place, step_tokens: see there.
    """
    present = [model for model in models if model is not None]
    pool = _pool_bytes(split, present, kv_bytes)
    beside = sum(beside_kv(present, num_rows, at_once=in_place))
    if not has_copies:
        return beside + pool
    left = _with_copies(present, pool)
    if in_place:
        left = min(left, pool + max(model.partials(num_rows) for model in present))
    if step_tokens is not None:
        tails = present[0].tails(num_rows, step_tokens)
        left += min(tails, -(-left // (_TAILS_PART - 1)))
    return beside + left


def _with_copies(models: Sequence[ModelBytes], kv_bytes: int) -> int:
    """KV, and attention's working copies of the present group: as much KV at most, as it is
    read."""
    wider = max(Fraction(model.read_per_token, model.kv_per_token) for model in models)
    return kv_bytes + ceil(kv_bytes * wider)


def _pool_bytes(split: str | float, models: Sequence[ModelBytes], needs: Sequence[int]) -> int:
    """The least KV memory of which each model's share is as much as all of its parts need."""
    needs = [model.parts * need for model, need in zip(models, needs, strict=False)]
    if len(models) == 1:
        return needs[0]
    parts = _parts(split, *models)
    # The two budgets share one number: the larger need rules; the generator's is rounded down.
    return 1 + max(-(-need * sum(parts) // part) for part, need in zip(parts, needs, strict=True))


def path_needs(
    settings: Settings, models: Sequence[ModelBytes], prompt_tokens: int
) -> tuple[int, ...]:
    """KV bytes of the longest path, of the generator and, where there is one, the verifier.

    The longest path that the limits allow, in as many steps, each of which may leave a block
    almost empty; a block more; and of recurrent layers its state and its parent's. The
    verifier reads it in tokens of its own, up to its context.
    """
    generator, step, search = models[0], settings.step, settings.search
    options = search.model_extra or {}  # of the strategy
    turns = 2 * (options.get("revisions") or 0)
    num_levels = search.max_rounds + (options.get("lookahead") or 0)
    num_steps = num_levels * search.verify_every + turns
    tokens = min(max(1, generator.shape.context - prompt_tokens), num_steps * step.longest)
    if step.max_tokens is not None and not turns:
        tokens = min(tokens, step.max_tokens)
    if step.step_tokens is not None:  # only the last step of a path, or of a turn, is shorter
        num_steps = min(num_steps, -(-tokens // step.step_tokens) + turns)

    def blocks(num_tokens: int, num_parts: int, size: int) -> int:
        parts = min(num_tokens, num_parts)
        return (num_tokens - parts) // size + parts

    needs, num_blocks = list[int](), 0
    for size, window in generator.blocks:
        # Of a window's first step and of the present one, all is held.
        reached = tokens if window is None else min(tokens, window + 2 * step.longest)
        path = min(blocks(reached, num_steps, size), num_steps * -(-step.longest // size) + turns)
        num_blocks += -(-prompt_tokens // size) + path + 1
    num_blocks += 2 * -(-generator.state // generator.block_bytes)
    needs.append(num_blocks * generator.block_bytes)
    for verifier in models[1:]:
        # What a step changes in its parent's last tokens is stored again with it.
        context = verifier.shape.context
        read = [blocks(context, num_steps + 2, size) + num_steps + 2 for size, _ in verifier.blocks]
        needs.append(sum(read) * verifier.block_bytes)
    return tuple(needs)


def least_kv_bytes(settings: Settings, models: Sequence[ModelBytes], prompt_tokens: int) -> int:
    """The least device KV in which locality, so `--schedule auto`, holds any path of a search.

    models: the generator and, where it has KV, the verifier. prompt_tokens: of the longest prompt.
    """
    needs = path_needs(settings, models, prompt_tokens)
    if settings.sparse.sparse_home == "host":  # where all of the generator's KV is
        needs = (0, *needs[1:])
    return _pool_bytes(settings.memory.split, models, needs)


def advice(
    schedule: str,
    settings: Settings,
    kv_bytes: int,
    models: Sequence[ModelBytes],
    prompt_tokens: int,
) -> str:
    """What helps where device KV of `kv_bytes` ran out; a number only where it surely does.

    models, prompt_tokens: as in `least_kv_bytes`.
    """
    if schedule != "locality" and settings.sparse.sparse_home != "host":
        return "use --schedule locality, raise --memory or --kv-memory, or lower --n"
    needed = least_kv_bytes(settings, models, prompt_tokens)
    if needed <= kv_bytes:
        return "raise --memory or --kv-memory"
    unit, name = (1024**2, "MiB") if needed >= 8 * 1024**2 else (1024, "KiB")
    return f"--kv-memory {-(-needed // unit)}{name} holds any path of this search"


def host_kv_bytes(settings: Settings) -> int:
    """`--host-memory`, or half of the memory of the machine, or of its container.

    Pages are committed as they are touched, and pinned for a GPU as they come into use. What is
    pinned is kept from everybody else, so the default is at most 16 GiB there.
    """
    if settings.memory.host_memory is not None:
        return settings.memory.host_memory
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError, ValueError):  # the file may be missing, or say "max"
        half = min(half, int(_CONTAINER_LIMIT.read_text(encoding="ascii")) // 2)
    return half if settings.model.device == "cpu" else min(half, _MOST_PINNED_BYTES)
