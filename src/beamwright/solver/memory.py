"""Memory plan: divide one number (`--memory`) into KV budgets of generator, verifier and host.

It also gives advice if a budget was too small.
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
    attention_partial_bytes,
    group_blocks,
    matmul_scratch_bytes,
    weight_bytes,
)
from beamwright.sections import KVDtype, MemorySettings

DEFAULT_KV_BYTES = 2 * 1024**3
_MOST_PINNED_BYTES = 16 * 1024**3
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARE_PARTS = 10**9
_PREFILL_TOKENS = 4096  # limit on a batch, see `models.prefill`
# A row's tail is its newest tokens, which are not yet in blocks. This is its largest size in
# tokens.
_TAIL_TOKENS = 256
_LEAST_TAIL_TOKENS = 16
# Tails get at most a quarter of the memory that is left for KV, its working copies and tails.
_TAILS_PART = 4
# The share of a card's free memory that may be used. The rest covers fragmentation and libraries.
_FREE_SHARE = 0.9
_LIBRARIES_PART = 50  # One part in 50 of the memory number is reserved for libraries on a card.
_TOKENS_OF_A_ROW = 128  # Assumed tokens of a tree per beam; shared tokens count once.


@dataclass(frozen=True)
class ModelBytes:
    """Memory needs of one model in a given dtype, in bytes.

    storage, kv_dtype: how projection weights and KV are stored.
    scores: True for a verifier on a GPU. Its activations then cover reading one step of every row
        in one call. On a CPU these are not part of the number.
    parts: the number of verifiers that run at a time over one copy of the weights (`--verifiers`).
        Each has its own part of the KV.
    """

    shape: ModelShape
    element_bytes: int
    storage: Storage = Storage.PLAIN
    kv_dtype: KVDtype = "auto"
    scores: bool = False
    parts: int = 1

    @property
    def costs(self) -> ModelCosts:
        """The costs of running the model, for the cost model."""
        return ModelCosts.of(self.shape, self.element_bytes, self.storage, self.kv_dtype)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.shape, self.element_bytes, self.storage)

    @property
    def kv_per_token(self) -> int:
        """Bytes of the KV of one token, as it is stored."""
        return self.shape.kv_bytes_per_token(self.element_bytes, self.kv_dtype)

    @property
    def state(self) -> int:
        """Bytes of a row's state in recurrent layers."""
        return self.shape.state_bytes(self.element_bytes)

    @property
    def held_per_token(self) -> int:
        """Bytes that one token of a tree occupies: its KV and its share of the states."""
        return self.kv_per_token + self.state // _TOKENS_OF_A_ROW

    @property
    def read_per_token(self) -> int:
        """Bytes of the KV of one token as attention reads it, after dequantising."""
        return self.shape.kv_bytes_per_token(self.element_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of KV, equal for all groups of layers."""
        return group_blocks(self._group_bytes)[0]

    @property
    def blocks(self) -> list[tuple[int, int | None]]:
        """For each group of layers: the tokens of a block, and the attention window or None."""
        windows = [group.window for group in self.shape.kv_groups]
        return list(zip(group_blocks(self._group_bytes)[1], windows, strict=True))

    @property
    def captured(self) -> int:
        """Estimated bytes that captured graphs of forward passes hold, also between passes."""
        return CAPTURED_TOKENS * self.shape.prefill_width * self.element_bytes

    @property
    def _group_bytes(self) -> list[int]:
        """For each group of layers: the KV bytes of one token."""
        groups = self.shape.kv_groups
        return [group.bytes_per_token(self.element_bytes, self.kv_dtype) for group in groups]

    def tails(self, num_rows: int, step_tokens: int = _TAIL_TOKENS) -> int:
        """Return the bytes of the tails of `num_rows` rows: KV of newest tokens, outside blocks.

        The tails exist twice while rows are rearranged.

        step_tokens: the largest number of tokens of a step.
        """
        tokens = max(_LEAST_TAIL_TOKENS, 1 << (step_tokens - 1).bit_length())
        return num_rows * 2 * min(tokens, _TAIL_TOKENS) * self.read_per_token

    def partials(self, num_rows: int) -> int:
        """Return the bytes of partial results that attention kernels keep for `num_rows` rows."""
        groups = self.shape.kv_groups
        return num_rows * sum(
            attention_partial_bytes(self.shape.heads, group.head_dim) for group in groups
        )

    def activations(self, num_rows: int) -> int:
        """Return the estimated working memory of `num_rows` rows.

        It is the larger of the memory of a decode step of these rows and of a prefill batch.
        """
        shape = self.shape
        decode = num_rows * shape.working_bytes_per_row(self.element_bytes)
        scratch = matmul_scratch_bytes(shape, self.storage)
        prefill = _PREFILL_TOKENS * shape.activation_width * self.element_bytes
        # the prefill of a round's steps, and their hidden states for the score head
        if self.scores:
            tokens = min(_PREFILL_TOKENS, num_rows * CHUNK_TOKENS)
            reading = tokens * shape.prefill_width * self.element_bytes
            prefill = max(prefill, reading, shape.head_bytes(self.element_bytes))
            scratch += 2 * tokens * shape.hidden * self.element_bytes
        return max(decode, prefill) + scratch


@dataclass(frozen=True)
class MemoryPlan:
    """KV budgets in bytes, divided from one number.

    tokens_part: the generator's share if both models hold equally many tokens.
    rows_bytes: bytes for the tails and activations of rows; None on a card, which reports its own
        free memory.
    """

    generator_kv_bytes: int
    verifier_kv_bytes: int
    tokens_part: float = 1.0
    rows_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of both budgets together."""
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
    """Divide the memory number into KV budgets.

    The KV of both models together gets the first of these that applies:
    - `--kv-memory`.
    - Half of what `--memory` leaves after weights and activations. The other half, or more for
      8-bit KV, is for attention's working copies of the current group.
    - Half of nine tenths of the card's free memory, after activations.
    - 2 GiB, which the operating system commits as it is touched.

    The generator gets the share that `--split` names. With `auto` it gets the share with which both
    models hold equally many tokens, and memory may move during a search (`engine.split`).

    in_place: True if attention kernels read and write KV in place. Instead of working copies there
        are only their partial results, and decode steps are captured.
    step_tokens: the longest step, on a CPU, where the number also covers the rows' tails; else
        None. Tails get a quarter of the remaining memory at most. If they need more, fewer rows run
        at a time.
    free_bytes: free memory of the card after the weights are loaded; None on a CPU.

    Raises:
        InputError: if weights and activations leave nothing for KV.
    """
    models = [generator] if verifier is None else [generator, verifier]
    num_rows = _rows_at_a_time(settings.memory, models, num_rows, free_bytes)
    weights, activations = weights_and_activations(models, num_rows, at_once=in_place)
    rows_bytes: int | None = None
    if settings.kv_memory is not None:
        kv_bytes = settings.kv_memory
        if settings.memory is not None and kv_bytes + weights > settings.memory:
            raise InputError(
                f"--memory too small: --kv-memory is {format_bytes(kv_bytes)} and weights take "
                f"{format_bytes(weights)}, --memory is {format_bytes(settings.memory)}. Raise "
                "--memory or lower --kv-memory."
            )
    elif settings.memory is None and free_bytes is None:
        kv_bytes = DEFAULT_KV_BYTES
    else:
        free = free_bytes or 0
        left, named = int(_FREE_SHARE * free), f"the card has {format_bytes(free)} free"
        if settings.memory is not None:
            left, named = settings.memory - weights, f"--memory is {format_bytes(settings.memory)}"
            left -= settings.memory // _LIBRARIES_PART if free_bytes is not None else 0
            named = f"weights take {format_bytes(weights)}, {named}"
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
                f"nothing is left for KV: activations take about {format_bytes(activations)}, "
                f"{named}. Give more memory, lower --n or use smaller models."
            )
    if verifier is None:
        return MemoryPlan(kv_bytes, 0, rows_bytes=rows_bytes)
    part, rest = _split_weights(settings.split, generator, verifier)
    generator_bytes = kv_bytes * part // (part + rest)
    tokens_part = generator.kv_per_token / (generator.kv_per_token + verifier.kv_per_token)
    return MemoryPlan(generator_bytes, kv_bytes - generator_bytes, tokens_part, rows_bytes)


def _rows_at_a_time(
    memory: int | None, models: Sequence[ModelBytes], num_rows: int, free_bytes: int | None
) -> int:
    """Return the number of rows that run at a time; recurrent layers need a state for each."""
    left = free_bytes
    if memory is not None:
        left = memory - sum(model.weights for model in models)
    if not models[0].state or left is None:
        return num_rows
    return max(1, min(num_rows, left // models[0].state))


def weights_and_activations(
    models: Sequence[ModelBytes], num_rows: int, *, at_once: bool = False
) -> tuple[int, int]:
    """Return the bytes of all weights, and the bytes of activations.

    The larger model's activations count, since the models run in turns. With `at_once` or with
    several verifiers, the sum over both models counts. `at_once` is for captured steps, which hold
    memory while the other model computes; it also adds the captured graphs.
    """
    needs = [model.parts * model.activations(num_rows) for model in models]
    captured = sum(model.parts * model.captured for model in models) if at_once else 0
    weights, several = sum(model.weights for model in models), any(m.parts > 1 for m in models)
    return weights, sum(needs) + captured if at_once or several else max(needs)


def _split_weights(
    split: str | float, generator: ModelBytes, verifier: ModelBytes
) -> tuple[int, int]:
    """Return the initial shares of generator and verifier in the KV memory, as two weights."""
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
    """Return the least memory number with which `plan_memory` gives each model these bytes of KV.

    models, kv_bytes: for generator and verifier.
    has_copies: False if KV has its own number (`--kv-memory`), which excludes working copies.
    split: `--split`. Memory that moves during a search is not considered.
    in_place, step_tokens: see `plan_memory`.
    """
    present = [model for model in models if model is not None]
    pool = _pool_bytes(split, present, kv_bytes)
    beside = sum(weights_and_activations(present, num_rows, at_once=in_place))
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
    """Return `kv_bytes` plus attention's working copies of the current group.

    The copies are as large as the whole KV at most, in the precision in which attention reads it.
    """
    wider = max(Fraction(model.read_per_token, model.kv_per_token) for model in models)
    return kv_bytes + ceil(kv_bytes * wider)


def _pool_bytes(split: str | float, models: Sequence[ModelBytes], needs: Sequence[int]) -> int:
    """Return the least KV memory in which each model's share covers the needs of all its parts."""
    needs = [model.parts * need for model, need in zip(models, needs, strict=False)]
    if len(models) == 1:
        return needs[0]
    parts = _split_weights(split, *models)
    # Both shares come from one number, so the larger need decides. The generator's share is rounded
    # down, hence the extra byte.
    return 1 + max(-(-need * sum(parts) // part) for part, need in zip(parts, needs, strict=True))


def path_needs(
    settings: Settings, models: Sequence[ModelBytes], prompt_tokens: int
) -> tuple[int, ...]:
    """Return the KV bytes of the longest path, for the generator and a verifier if present.

    The longest path that the limits allow is assumed to have as many steps as possible, each with a
    last block that is almost empty. One block is added, and for recurrent layers a row's state and
    its parent's state. The verifier reads the path with its own tokenizer, up to its context.
    """
    generator, step, search = models[0], settings.step, settings.search
    options = search.model_extra or {}  # options of the strategy
    turns = 2 * (options.get("revisions") or 0)
    num_levels = search.max_rounds + (options.get("lookahead") or 0)
    num_steps = num_levels * search.verify_every + turns
    tokens = min(max(1, generator.shape.context - prompt_tokens), num_steps * step.longest)
    if step.max_tokens is not None and not turns:
        tokens = min(tokens, step.max_tokens)
    if step.step_tokens is not None:  # only the last step of a path or a turn is shorter
        num_steps = min(num_steps, -(-tokens // step.step_tokens) + turns)

    def blocks(num_tokens: int, num_parts: int, size: int) -> int:
        parts = min(num_tokens, num_parts)
        return (num_tokens - parts) // size + parts

    needs, num_blocks = list[int](), 0
    for size, window in generator.blocks:
        # The first step in a window and the current step are held as a whole.
        reached = tokens if window is None else min(tokens, window + 2 * step.longest)
        path = min(blocks(reached, num_steps, size), num_steps * -(-step.longest // size) + turns)
        num_blocks += -(-prompt_tokens // size) + path + 1
    num_blocks += 2 * -(-generator.state // generator.block_bytes)
    needs.append(num_blocks * generator.block_bytes)
    for verifier in models[1:]:
        # A step may change how the last tokens of its parent are tokenised. They are then stored
        # again with the step.
        context = verifier.shape.context
        read = [blocks(context, num_steps + 2, size) + num_steps + 2 for size, _ in verifier.blocks]
        needs.append(sum(read) * verifier.block_bytes)
    return tuple(needs)


def least_kv_bytes(settings: Settings, models: Sequence[ModelBytes], prompt_tokens: int) -> int:
    """Return the least device KV with which locality (`--schedule auto`) holds any path.

    models: the generator and, if it keeps KV, the verifier.
    prompt_tokens: tokens of the longest prompt.
    """
    needs = path_needs(settings, models, prompt_tokens)
    if settings.sparse.sparse_home == "host":  # all of the generator's KV is on the host
        needs = (0, *needs[1:])
    return _pool_bytes(settings.memory.split, models, needs)


def advice(
    schedule: str,
    settings: Settings,
    kv_bytes: int,
    models: Sequence[ModelBytes],
    prompt_tokens: int,
) -> str:
    """Return advice for a device KV budget of `kv_bytes` that was too small.

    It names a number only if that number is certain to be enough.

    models, prompt_tokens: the same as in `least_kv_bytes`.
    """
    if schedule != "locality" and settings.sparse.sparse_home != "host":
        return "use --schedule locality, raise --memory or --kv-memory, or lower --n"
    needed = least_kv_bytes(settings, models, prompt_tokens)
    if needed <= kv_bytes:
        return "raise --memory or --kv-memory"
    unit, name = (1024**2, "MiB") if needed >= 8 * 1024**2 else (1024, "KiB")
    return f"--kv-memory {-(-needed // unit)}{name} holds any path of this search"


def host_kv_bytes(settings: Settings) -> int:
    """Return `--host-memory`, or half of the memory of the machine or of its container.

    Pages are committed as they are touched. For a GPU they are pinned as they are first used. Other
    programs cannot use pinned memory, so the default for a GPU is at most 16 GiB.
    """
    if settings.memory.host_memory is not None:
        return settings.memory.host_memory
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError, ValueError):  # the file may be missing, or contain "max"
        half = min(half, int(_CONTAINER_LIMIT.read_text(encoding="ascii")) // 2)
    return half if settings.model.device == "cpu" else min(half, _MOST_PINNED_BYTES)
