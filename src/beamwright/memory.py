"""The memory plan: from one number to the KV budgets of generator and verifier (solver room)."""

from __future__ import annotations

from dataclasses import dataclass

from beamwright.config import MemorySettings
from beamwright.cost import Storage, weight_bytes
from beamwright.cost.weights import product_scratch_bytes
from beamwright.errors import InputError
from beamwright.models import ModelShape

DEFAULT_KV_BYTES = 2 * 1024**3
_PREFILL_TOKENS = 4096
_COPIES = 2  # KV, and attention's working copies of the present group, which take as much at most


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

    def activations(self, num_rows: int) -> int:
        """Estimate of the working memory of a decode step of `num_rows`, or of a prefill chunk."""
        shape = self.shape
        decode = num_rows * shape.working_bytes_per_row(self.element_bytes)
        scratch = product_scratch_bytes(shape, self.element_bytes, self.storage)
        return max(decode, _PREFILL_TOKENS * shape.activation_width * self.element_bytes) + scratch


@dataclass(frozen=True)
class MemoryPlan:
    """Budgets in bytes. The two KV budgets share one number by KV bytes per token."""

    generator_kv_bytes: int
    verifier_kv_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Both budgets together."""
        return self.generator_kv_bytes + self.verifier_kv_bytes


def plan_memory(
    settings: MemorySettings, generator: ModelBytes, verifier: ModelBytes | None, num_rows: int
) -> MemoryPlan:
    """Split the memory number.

    `--kv-memory` is the device KV alone; else it is half of `--memory` less weights and
    activations (the other half is for attention's working copies of the present group);
    else a default of 2 GiB, which the operating system commits as it is touched.

    Raises:
        InputError: if weights and activations leave nothing for KV.
    """
    models = [generator] if verifier is None else [generator, verifier]
    if settings.kv_memory is not None:
        kv_bytes = settings.kv_memory
    elif settings.memory is not None:
        weights = sum(model.weights for model in models)
        activations = max(model.activations(num_rows) for model in models)
        kv_bytes = (settings.memory - weights - activations) // _COPIES
        if kv_bytes <= 0:
            raise InputError(
                f"--memory {settings.memory:,} bytes: weights take {weights:,} and activations "
                f"about {activations:,}; nothing is left for KV"
            )
    else:
        kv_bytes = DEFAULT_KV_BYTES
    if verifier is None:
        return MemoryPlan(kv_bytes, 0)
    total = generator.kv_per_token + verifier.kv_per_token
    generator_bytes = kv_bytes * generator.kv_per_token // total
    return MemoryPlan(generator_bytes, kv_bytes - generator_bytes)


def memory_needed(
    models: tuple[ModelBytes, ModelBytes | None],
    kv_bytes: tuple[int, int],
    num_rows: int,
    *,
    has_copies: bool = True,
) -> int:
    """The least memory number from which `plan_memory` gives each model so many bytes of KV.

    models, kv_bytes: generator and verifier. has_copies: False where KV has a number of its own.
    """
    present = [model for model in models if model is not None]
    per_token = sum(model.kv_per_token for model in present)
    # The two budgets share one number by KV bytes per token: the larger need for its share rules.
    pool = max(
        -(-need * per_token // model.kv_per_token)
        for model, need in zip(present, kv_bytes, strict=False)
    )
    pool += len(present) - 1  # the generator's share is rounded down
    weights = sum(model.weights for model in present)
    activations = max(model.activations(num_rows) for model in present)
    return weights + activations + pool * (_COPIES if has_copies else 1)
