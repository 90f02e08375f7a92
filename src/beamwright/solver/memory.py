"""Memory plan: divide `--memory` into KV budgets of generator, verifier and host.

`advice` tells the user which option to change if a budget was too small.
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
from beamwright.sections import MemorySettings
from beamwright.solver.model_bytes import ModelBytes

DEFAULT_KV_BYTES = 2 * 1024**3
_MOST_PINNED_BYTES = 16 * 1024**3
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARE_PARTS = 10**9
# Of the memory that is left for KV, working copies and tails, at most one part in 4 is for tails.
_TAILS_PART = 4
# Share of a GPU's free memory that is used. The rest covers fragmentation and libraries.
FREE_SHARE = 0.9
_LIBRARIES_PART = 50  # On a GPU, one part in 50 of `--memory` is reserved for libraries.


@dataclass(frozen=True)
class MemoryPlan:
    """KV budgets of both models in bytes, as `plan_memory` divides `--memory`.

    tokens_part: the generator's share of KV bytes if both models hold equally many tokens.
    rows_bytes: bytes for the tails and activations of rows; None on a GPU, where free memory is
        measured instead.
    """

    generator_kv_bytes: int
    verifier_kv_bytes: int
    tokens_part: float = 1.0
    rows_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        """KV bytes of generator and verifier together."""
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
    """Divide `--memory` into KV budgets.

    The KV of both models together gets the first of these amounts that is known:
    - `--kv-memory`.
    - Half of what `--memory` leaves after weights and activations. The other half, or more for
      8-bit KV, is for attention's working copies of the current group's KV.
    - Half of nine tenths of the GPU's free memory, after activations.
    - 2 GiB, which the operating system commits as the memory is touched.

    The generator gets the share that `--split` names. With `auto` it gets the share with which both
    models hold equally many tokens, and memory may move during a search (`engine.split`).

    in_place: True if attention kernels read and write KV in place. The plan then has room for the
        kernels' partial results instead of working copies, and for captured decode steps.
    step_tokens: on a CPU, maximum number of tokens of a step, because `--memory` also covers the
        rows' tails; None on a GPU. Tails get at most a quarter of the remaining memory. If the
        tails of all rows need more, fewer rows run at once.
    free_bytes: free memory of the GPU after the weights are loaded; None on a CPU.

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
        left, named = int(FREE_SHARE * free), f"the card has {format_bytes(free)} free"
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
            of_states = left * row // (row + generator.state_bytes)
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
    """Return the number of rows that run at once, as recurrent states limit it."""
    left = free_bytes
    if memory is not None:
        left = memory - sum(model.weights for model in models)
    if not models[0].state_bytes or left is None:
        return num_rows
    return max(1, min(num_rows, left // models[0].state_bytes))


def weights_and_activations(
    models: Sequence[ModelBytes], num_rows: int, *, at_once: bool = False
) -> tuple[int, int]:
    """Return the bytes of all weights, and the bytes of activations.

    Models that run in turns share memory, so only the larger activations count. With several
    verifiers or `at_once`, all activations are added. Set `at_once` if steps are captured as CUDA
    graphs, which hold memory while another model computes; the graphs' own bytes are then added.
    """
    needs = [model.parts * model.activations(num_rows) for model in models]
    captured = sum(model.parts * model.cuda_graph_bytes for model in models) if at_once else 0
    weights, several = sum(model.weights for model in models), any(m.parts > 1 for m in models)
    return weights, sum(needs) + captured if at_once or several else max(needs)


def _split_weights(
    split: str | float, generator: ModelBytes, verifier: ModelBytes
) -> tuple[int, int]:
    """Return two integers in whose ratio generator and verifier share the KV memory at first."""
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
    """Return the minimum `--memory` with which `plan_memory` gives each model its `kv_bytes`.

    models, kv_bytes: the sizes and the KV needs of generator and verifier.
    has_copies: False if KV is limited by `--kv-memory`, which excludes working copies.
    split: `--split`, the shares at the beginning of a search.
    in_place, step_tokens: as in `plan_memory`.
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
    """Return `kv_bytes` plus the maximum size of attention's working copies.

    The copies hold at most the whole KV, in the precision in which attention reads KV.
    """
    wider = max(Fraction(model.read_per_token, model.kv_per_token) for model in models)
    return kv_bytes + ceil(kv_bytes * wider)


def _pool_bytes(split: str | float, models: Sequence[ModelBytes], needs: Sequence[int]) -> int:
    """Return the minimum KV memory in which each model's share covers its need.

    needs: KV bytes of each model. Every parallel verifier needs this much.
    """
    needs = [model.parts * need for model, need in zip(models, needs, strict=False)]
    if len(models) == 1:
        return needs[0]
    parts = _split_weights(split, *models)
    # The KV memory is divided in a fixed ratio, so the model with the larger need per share
    # decides. The extra byte makes up for rounding down the generator's share.
    return 1 + max(-(-need * sum(parts) // part) for part, need in zip(parts, needs, strict=True))


def longest_path_bytes(
    settings: Settings, models: Sequence[ModelBytes], prompt_tokens: int
) -> tuple[int, ...]:
    """Return the KV bytes of the longest path, for the generator and a verifier if present.

    The path is the longest one that the limits allow, with the maximum number of steps, each with a
    last block that is almost empty. One block is added, and for recurrent layers the states of a
    row and of its parent. The verifier encodes the path with its own tokenizer, so its need is that
    of its whole context.
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
        # A window may begin inside a step, whose KV is held as a whole, as is the current step's.
        reached = tokens if window is None else min(tokens, window + 2 * step.longest)
        path = min(blocks(reached, num_steps, size), num_steps * -(-step.longest // size) + turns)
        num_blocks += -(-prompt_tokens // size) + path + 1
    num_blocks += 2 * -(-generator.state_bytes // generator.block_bytes)
    needs.append(num_blocks * generator.block_bytes)
    for verifier in models[1:]:
        # A step may change how the end of its parent is tokenised. The changed tokens are then
        # stored again with the step.
        context = verifier.shape.context
        read = [blocks(context, num_steps + 2, size) + num_steps + 2 for size, _ in verifier.blocks]
        needs.append(sum(read) * verifier.block_bytes)
    return tuple(needs)


def least_kv_bytes(settings: Settings, models: Sequence[ModelBytes], prompt_tokens: int) -> int:
    """Return the minimum KV bytes on the device with which locality can decode any path.

    models: the generator and, if it keeps KV, the verifier.
    prompt_tokens: tokens of the longest prompt.
    """
    needs = longest_path_bytes(settings, models, prompt_tokens)
    if settings.sparse.sparse_home == "host":  # all of the generator's KV is on the host
        needs = (0, *needs[1:])
    return _pool_bytes(settings.memory.split, models, needs)


def memory_advice(
    schedule: str,
    settings: Settings,
    kv_bytes: int,
    models: Sequence[ModelBytes],
    prompt_tokens: int,
) -> str:
    """Return advice for the user, after a device KV budget of `kv_bytes` was too small.

    The advice names a number of bytes only if that number is certain to be enough.

    models, prompt_tokens: the same as of `least_kv_bytes`.
    """
    if schedule != "locality" and settings.sparse.sparse_home != "host":
        return "use --schedule locality, raise --memory or --kv-memory, or lower --n"
    needed = least_kv_bytes(settings, models, prompt_tokens)
    if needed <= kv_bytes:
        return "raise --memory or --kv-memory"
    unit, name = (1024**2, "MiB") if needed >= 8 * 1024**2 else (1024, "KiB")
    return f"raise --kv-memory to {-(-needed // unit)}{name}, which holds any path of this search"


def host_kv_bytes(settings: Settings) -> int:
    """Return `--host-memory`, or by default half of the memory of the machine or container.

    The operating system commits pages as they are touched. With a GPU, pages are pinned at their
    first use, and other programs cannot use pinned memory, so the default is at most 16 GiB.
    """
    if settings.memory.host_memory is not None:
        return settings.memory.host_memory
    half = host_memory_bytes() // 2
    return half if settings.model.device == "cpu" else min(half, _MOST_PINNED_BYTES)


def host_memory_bytes() -> int:
    """Return the memory of the machine, or of the container that this process runs in."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the limit file may be missing, or contain "max"
        whole = min(whole, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    return whole
