"""The memory plan: from one number to the KV budgets of generator and verifier."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from beamwright.config import Settings
from beamwright.errors import DEVICE_TIER, CapacityError, InputError, format_bytes
from beamwright.models.shape import ModelShape
from beamwright.plan.costs import Storage, product_scratch_bytes, weight_bytes
from beamwright.sections import MemorySettings

if sys.platform != "win32":
    import resource
if TYPE_CHECKING:
    from beamwright.engine.tree_run import TreeRun
    from beamwright.models.tree_model import TreeModel

DEFAULT_KV_BYTES = 2 * 1024**3
_PREFILL_TOKENS = 4096
_COPIES = 2  # KV, and attention's working copies of the present group, which take as much at most
_TAIL_TOKENS = 2 * 256  # of a row that attention's kernels decode; twice while rows are arranged
_FREE_SHARE = 0.9  # of what a card has left: captured steps hold memory, and it is cut in pieces


@dataclass(frozen=True)
class ModelBytes:
    """Sizes of one model in its dtype. storage: how its projections are kept."""

    shape: ModelShape
    element_bytes: int
    storage: Storage = Storage.PLAIN

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.shape, self.element_bytes, self.storage)

    @property
    def kv_per_token(self) -> int:
        """KV bytes of one token."""
        return self.shape.kv_bytes_per_token(self.element_bytes)

    def tails(self, num_rows: int) -> int:
        """KV of the newest tokens of so many rows, beside the blocks, where kernels attend."""
        return num_rows * _TAIL_TOKENS * self.kv_per_token

    def activations(self, num_rows: int) -> int:
        """Estimate of the working memory of a decode step of `num_rows`, or of a prefill chunk."""
        shape = self.shape
        decode = num_rows * shape.working_bytes_per_row(self.element_bytes)
        scratch = product_scratch_bytes(shape, self.element_bytes, self.storage)
        return max(decode, _PREFILL_TOKENS * shape.activation_width * self.element_bytes) + scratch


@dataclass(frozen=True)
class MemoryPlan:
    """Budgets in bytes, of one number.

    tokens_part: the generator's part where both models hold equally many tokens.
    """

    generator_kv_bytes: int
    verifier_kv_bytes: int
    tokens_part: float = 1.0

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
) -> MemoryPlan:
    """Split the memory number.

    `--kv-memory` is the device KV alone; else it is half of `--memory` less weights and
    activations (the other half is for attention's working copies of the present group);
    else of nine tenths of what a card has free; else a default of 2 GiB, which the operating
    system commits as it is touched. Of that the generator has the share that `--split` names, or
    what gives both models equally many tokens; from there memory may move while a search runs
    (`engine.moving`).

    in_place: attention's kernels read KV where it is, so beside it are their rows' tails alone.
    free_bytes: of the card, with the weights on it; None where that is not known (a CPU).

    Raises:
        InputError: if weights and activations leave nothing for KV.
    """
    models = [generator] if verifier is None else [generator, verifier]
    activations = max(model.activations(num_rows) for model in models)
    if settings.kv_memory is not None:
        kv_bytes = settings.kv_memory
        weights = sum(model.weights for model in models)
        if settings.memory is not None and kv_bytes + weights > settings.memory:
            raise InputError(
                f"--memory {format_bytes(settings.memory)} is less than --kv-memory "
                f"{format_bytes(kv_bytes)} and the weights ({format_bytes(weights)}) together"
            )
    elif settings.memory is not None:
        weights = sum(model.weights for model in models)
        kv_bytes = _beside_others(
            settings.memory - weights - activations, models, num_rows, in_place
        )
        if kv_bytes <= 0:
            raise InputError(
                f"--memory {format_bytes(settings.memory)}: weights take {format_bytes(weights)} "
                f"and activations about {format_bytes(activations)}; nothing is left for KV"
            )
    elif free_bytes is not None:
        left = int(_FREE_SHARE * free_bytes) - activations
        kv_bytes = _beside_others(left, models, num_rows, in_place)
        if kv_bytes <= 0:
            raise InputError(
                f"the card has {format_bytes(free_bytes)} free beside the weights; activations "
                f"take about {format_bytes(activations)}, and nothing is left for KV"
            )
    else:
        most = address_space_left()
        kv_bytes = DEFAULT_KV_BYTES if most is None else min(DEFAULT_KV_BYTES, max(1, most // 4))
    if verifier is None:
        return MemoryPlan(kv_bytes, 0)
    own, others = _parts(settings.split, generator, verifier)
    generator_bytes = kv_bytes * own // (own + others)
    tokens_part = generator.kv_per_token / (generator.kv_per_token + verifier.kv_per_token)
    return MemoryPlan(generator_bytes, kv_bytes - generator_bytes, tokens_part)


def _beside_others(
    left: int,
    models: Sequence[ModelBytes],
    num_rows: int,
    in_place: bool,
) -> int:
    """KV bytes of what weights and activations leave."""
    copies = left - left // _COPIES
    if in_place:
        copies = min(copies, max(model.tails(num_rows) for model in models))
    return left - copies


_SHARE_PARTS = 10**9


def _parts(split: str | float, generator: ModelBytes, verifier: ModelBytes) -> tuple[int, int]:
    """How generator and verifier share KV memory when a search begins, as two weights."""
    if isinstance(split, str):
        return generator.kv_per_token, verifier.kv_per_token
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
) -> int:
    """The least memory number from which `plan_memory` gives each model so many bytes of KV.

    models, kv_bytes: generator and verifier. has_copies: False where KV has a number of its own.
    in_place: as `plan_memory`. split: `--split`; what moves later is left out.
    """
    generator, verifier = models
    present = [model for model in models if model is not None]
    parts = (1,) if verifier is None else _parts(split, generator, verifier)
    # The two budgets share one number: the larger need for its share rules.
    pool = max(-(-need * sum(parts) // part) for part, need in zip(parts, kv_bytes, strict=False))
    pool += len(present) - 1  # the generator's share is rounded down
    weights = sum(model.weights for model in present)
    activations = max(model.activations(num_rows) for model in present)
    copies = min(pool, max(model.tails(num_rows) for model in present)) if in_place else pool
    return weights + activations + pool + (copies if has_copies else 0)


def enough_kv_bytes(
    settings: Settings,
    generator: ModelBytes,
    verifier: ModelBytes | None,
    prompt_tokens: int,
    block_tokens: int = 8,
) -> int:
    """A `--kv-memory` with which no group of one beam can fail, however long its path becomes."""
    needs = path_needs(settings, generator, verifier, prompt_tokens, block_tokens)
    if verifier is None:
        return needs[0]
    parts = _parts(settings.memory.split, generator, verifier)
    return max(-(-need * sum(parts) // part) for need, part in zip(needs, parts, strict=True)) + 1


def path_needs(
    settings: Settings,
    generator: ModelBytes,
    verifier: ModelBytes | None,
    prompt_tokens: int,
    block_tokens: int = 8,
) -> tuple[int, int]:
    """KV bytes of the longest path, of generator and verifier.

    The longest path that the limits allow, in as many steps, each of which may leave a block
    almost empty; and a block more. The verifier reads it in tokens of its own, up to its context.
    """
    step, search = settings.step, settings.search
    own = search.model_extra or {}  # of the strategy
    turns = 2 * (own.get("revisions") or 0)
    num_steps = search.max_rounds + (own.get("lookahead") or 0) + turns
    most_step = step.step_tokens or max(step.step_limits or (step.max_step_tokens,))
    left = max(1, generator.shape.context - prompt_tokens)
    tokens = min(left, num_steps * most_step)
    if step.max_tokens is not None and not turns:
        tokens = min(tokens, step.max_tokens)

    def blocks(num_tokens: int, num_parts: int) -> int:
        parts = min(num_tokens, num_parts)
        return (num_tokens - parts) // block_tokens + parts

    path = min(blocks(tokens, num_steps), num_steps * -(-most_step // block_tokens) + turns)
    num_blocks = -(-prompt_tokens // block_tokens) + path + 1
    needed = num_blocks * block_tokens * generator.kv_per_token
    if verifier is None:
        return needed, 0
    # What a step changes in its parent's last tokens is stored again with it.
    read = (blocks(verifier.shape.context, num_steps + 2) + num_steps + 2) * block_tokens
    return needed, read * verifier.kv_per_token


def advise(
    error: BaseException,
    schedule: str,
    settings: Settings,
    plan: MemoryPlan,
    models: Sequence[TreeModel],
    runs: Sequence[TreeRun],
    *,
    in_turn: bool = False,
) -> None:
    """Say in a device CapacityError what helps; a number only where it surely does.

    models: the generator and, where it has KV, the verifier. runs: of the trees that were searched.
    in_turn: what one of both did not need, the other had.
    """
    if isinstance(error, CapacityError) and error.tier == DEVICE_TIER:
        prompt_tokens = max((len(run.tree.root.token_ids) for run in runs), default=0)
        error.hint = _advice(schedule, settings, plan, models, prompt_tokens, in_turn=in_turn)


def _advice(
    schedule: str,
    settings: Settings,
    plan: MemoryPlan,
    models: Sequence[TreeModel],
    prompt_tokens: int,
    *,
    in_turn: bool,
) -> str:
    if schedule != "locality":
        return "use --schedule locality, raise --memory or --kv-memory, or lower --n"
    sizes = [ModelBytes(m.decoder.shape, m.decoder.dtype.itemsize) for m in models]
    generator, verifier = sizes[0], sizes[1] if len(sizes) > 1 else None
    needed = enough_kv_bytes(settings, generator, verifier, prompt_tokens)
    shares = ""
    if in_turn:
        shares = f"generator and verifier have {format_bytes(plan.kv_bytes)} in turn; "
    elif verifier is not None:
        generator_bytes, verifier_bytes = plan.generator_kv_bytes, plan.verifier_kv_bytes
        shares = (
            f"of {format_bytes(plan.kv_bytes)} the generator has {format_bytes(generator_bytes)}, "
            f"the verifier {format_bytes(verifier_bytes)}; "
        )
    if needed <= plan.kv_bytes:
        return f"{shares}raise --memory or --kv-memory"
    if settings.memory.memory is not None and settings.memory.kv_memory is None:
        extra = settings.memory.memory - _COPIES * plan.kv_bytes  # weights and activations
        whole = _size_option(extra + _COPIES * needed)
        return f"{shares}--memory {whole} holds any path of this search"
    return f"{shares}--kv-memory {_size_option(needed)} holds any path of this search"


def _size_option(num_bytes: int) -> str:
    """A size as an option takes it, rounded up."""
    units = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
    name = max((unit for unit in units if num_bytes >= units[unit]), key=units.get, default="KiB")  # type: ignore[arg-type]
    tenths = -(-num_bytes * 10 // units[name])
    return f"{tenths / 10:g}{name}" if tenths % 10 else f"{tenths // 10}{name}"


def address_space_left() -> int | None:
    """Bytes that this process may still map (`ulimit -v`); None without a limit."""
    if sys.platform == "win32":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        pages = 0
    return max(0, limit - pages * resource.getpagesize())
