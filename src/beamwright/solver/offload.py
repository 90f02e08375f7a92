"""Decide which layers live outside the device, if `--memory` cannot hold all weights.

Every pass copies these layers to the device, for all rows at once. KV that does not fit moves once
for each step of many tokens, so weights stay on the device before KV does. But decoding in groups
repeats the copies of weights for each group. The cost model weighs both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from typing import Any

from beamwright.errors import InputError
from beamwright.plan.costs import WEIGHT_BUFFERS, Roofline
from beamwright.plan.fits import VerifierCosts
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.times import add_verifier_costs, decode_costs
from beamwright.plan.workload import Workload
from beamwright.sections import MemorySettings
from beamwright.solver.memory import MemoryPlan, plan_memory
from beamwright.solver.model_bytes import ModelBytes

_TRIED = 24  # maximum number of layer counts that are tried


def choose_offload(
    memory: MemorySettings,
    models: Sequence[ModelBytes],
    workload: Workload,
    profile: HardwareProfile,
    rules: Mapping[str, Any],
) -> list[ModelBytes]:
    """Return the models, with layers offloaded if the weights do not fit.

    Of all numbers of layers that leave room for KV, the one with the fastest search is chosen; if
    not even one beam of `workload` fits, the one with the most room. A verifier is offloaded as a
    whole or not at all: it reads all tokens of a round at once, so its copies cost least. If
    nothing fits, the models are returned unchanged.

    memory: with the limit on device memory.
    models: the generator and, if it keeps KV, the verifier, with all weights on the device.
    rules: further arguments of `plan_memory`. On a GPU with offloaded layers, kernels are assumed.
    """
    whole = _plan(memory, models, workload, rules)
    if memory.weights_home == "device" or memory.memory is None or whole is not None:
        return [*models]
    generator, *verifiers = models
    rules = {**rules, "in_place": rules["in_place"] or rules.get("step_tokens") is None}
    layers = generator.shape.layers
    # Fewer layers than buffers save no memory.
    counts = [[0, *sorted(range(layers, WEIGHT_BUFFERS, -max(1, layers // _TRIED)))]]
    counts += [[0, each.shape.layers] if each.parts == 1 else [0] for each in verifiers]
    found: list[tuple[float, int, list[ModelBytes]]] = []
    for choice in product(*counts):
        tried = [model.with_offloaded(n) for model, n in zip(models, choice, strict=True)]
        if (plan := _plan(memory, tried, workload, rules)) is not None:
            seconds = _seconds(tried, plan, workload, profile)
            found.append((seconds, -plan.kv_bytes if seconds == inf else 0, tried))
    return min(found, key=lambda each: each[:2])[2] if found else [*models]


def _plan(
    memory: MemorySettings,
    models: Sequence[ModelBytes],
    workload: Workload,
    rules: Mapping[str, Any],
) -> MemoryPlan | None:
    """Return the memory plan of these models, or None if they leave nothing for KV."""
    verifier = models[1] if len(models) > 1 else None
    try:
        return plan_memory(memory, models[0], verifier, workload.num_beams, **rules)
    except InputError:
        return None


def _seconds(
    models: Sequence[ModelBytes], plan: MemoryPlan, workload: Workload, profile: HardwareProfile
) -> float:
    """Return the predicted seconds of a search; infinity if not even one beam's KV fits."""
    roofline = Roofline(models[0].costs, profile)
    totals = decode_costs(workload, roofline, plan.generator_kv_bytes)
    if totals is None:
        return inf
    for verifier in models[1:]:
        scorer = VerifierCosts(verifier.costs, plan.verifier_kv_bytes // verifier.parts)
        add_verifier_costs(totals, workload, scorer, profile)
    return totals.decode_s + totals.verify_s + totals.stall_s
