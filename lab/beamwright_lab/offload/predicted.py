"""Predict tokens per second if weights exceed `--memory`. Cost model only: nothing is measured.

    python -m beamwright_lab.offload.predicted

Beside it: llama.cpp's partial offload by the rules of its source of 2026, for the same model.

- As many layers as fit are on the card with their KV (`-ngl`), the others on the host.
- For fewer than 32 rows, the host computes its own layers. From 32 rows on, it copies their weights
  to the card for every batch (`GGML_OP_OFFLOAD_MIN_BATCH`, pull request 18535).
- These copies do not overlap with compute (pull request 21067 is a draft that would change this).

Where the source leaves a choice, the faster one is taken: page-locked copies, no cost of KV on the
host, prefixes read once, no memory for a verifier. The host's rates are assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from beamwright.errors import InputError
from beamwright.models.named import named_shape
from beamwright.models.shape import BuiltSizes, ModelShape
from beamwright.plan.costs import Roofline, Storage
from beamwright.plan.machines import HardwareProfile, find_profile, with_cuda_graphs
from beamwright.plan.times import decode_costs
from beamwright.plan.workload import Workload, expected_nodes, peak_tokens, tree_steps
from beamwright.sections import MemorySettings
from beamwright.solver.memory import plan_memory
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.offload import choose_offload
from beamwright.units import GIB
from beamwright_lab.common import finish, table

HOST_BANDWIDTH, HOST_FLOPS = 60e9, 1e12  # of the host's CPU, per second
MIN_BATCH = 32
CARDS = ("rtx-4060", "rtx-4090-x16")
WIDTHS = (1, 16, 64, 256)
_SIZES = ((4096, 2048, 48), (512, 2048, 96), (2048, 4096, 48), (1536, 2048, 6144),
          (2048, 768, 6144))  # fmt: skip
# Qwen3-30B-A3B, as `transformers` builds it from its config.
_A3B = ModelShape(
    *("qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, 40960, 40960),
    built=BuiltSizes(
        30_532_122_624, 3_353_032_704, 311_164_928, _SIZES, (), 6144 * 3 * 2048 * 768, 6144
    ),
)
# Generator, its weights, limits in GiB, verifiers.
CASES: tuple[tuple[str, Storage, tuple[int, ...], tuple[str | None, ...]], ...] = (
    ("qwen2.5-14b", Storage.INT4, (8,), (None, "skywork-prm-1.5b", "skywork-prm-7b")),
    ("qwen2.5-7b", Storage.PLAIN, (8,), (None, "skywork-prm-1.5b")),
    ("qwen3-30b-a3b", Storage.INT4, (8, 12), (None,)),
)


def sizes_of(name: str, storage: Storage, *, scores: bool = False) -> ModelBytes:
    """Return the sizes of a model in 16 bits or in `storage`. scores: it is a verifier."""
    shape = _A3B if name == "qwen3-30b-a3b" else named_shape(name)
    assert shape is not None
    return ModelBytes(replace(shape, has_lm_head=not scores), 2, storage, scores=scores)


def rows_of_cases() -> Iterator[dict[str, Any]]:
    """Yield a row per case that a card can have."""
    for (name, storage, limits, verifiers), card in product(CASES, CARDS):
        for gib, verifier, n in product(limits, verifiers, WIDTHS):
            profile = find_profile(card)
            limit = min(gib * GIB, profile.device_memory_bytes - GIB)  # CUDA's context takes one
            if gib * GIB > profile.device_memory_bytes:
                continue
            models = [sizes_of(name, storage)]
            models += [] if verifier is None else [sizes_of(verifier, storage, scores=True)]
            work = Workload(n, 4 if n > 1 else 1, 128, 1024, 32)
            yield {
                "generator": f"{name} {storage}", "verifier": verifier or "none", "card": card,
                "limit, GiB": limit / GIB, "n": n, **_ours(models, work, profile, limit),
                "llama.cpp, tokens/s": llama_rate(models[0], work, profile, limit),
            }  # fmt: skip


def _ours(
    models: list[ModelBytes], work: Workload, card: HardwareProfile, limit: int
) -> dict[str, Any]:
    """Return layers off the card, bytes on it, tokens/s, and what bounds a pass."""
    memory = MemorySettings.model_validate({"memory": limit})
    rules: dict[str, Any] = {"in_place": True, "free_bytes": limit, "step_tokens": None}
    chosen = choose_offload(memory, models, work, card, rules)
    try:
        plan = plan_memory(
            memory, chosen[0], chosen[1] if len(chosen) > 1 else None, work.num_beams, **rules
        )
    except InputError:
        return {"layers off the card": "no fit"}
    roofline = Roofline(chosen[0].costs, card)
    totals = decode_costs(work, roofline, plan.generator_kv_bytes)
    if totals is None:
        return {"layers off the card": "no fit"}
    seconds = totals.decode_s + totals.stall_s
    off = [0 if each.offloaded is None else len(each.offloaded.numbers) for each in chosen]
    return {
        "layers off the card": ", ".join(
            f"{count} of {each.shape.layers}" for count, each in zip(off, chosen, strict=True)
        ),
        "weights, GiB": sum(each.weights for each in chosen) / GIB,
        "KV, GiB": plan.kv_bytes / GIB,
        "groups": totals.groups / work.num_steps,
        "tokens/s": work.num_beams * work.generate_tokens / seconds,
        "of the link": totals.groups
        * work.step_tokens
        * roofline.offload_s(work.num_beams)
        / seconds,
    }


def llama_rate(
    model: ModelBytes, work: Workload, card: HardwareProfile, limit: int
) -> float | None:
    """Return llama.cpp's tokens per second while decoding, by its rules; None: it does not fit."""
    layers, costs = model.shape.layers, model.costs
    moved = model.with_offloaded(layers).offloaded
    assert moved is not None
    kv_bytes = peak_tokens(work, expected_nodes(work)).mean * model.kv_per_token
    outside = model.all_weights - moved.home_bytes + model.activations(work.num_beams)
    each = (moved.home_bytes + kv_bytes) / layers
    if (count := min(layers, int((limit - limit // 50 - outside) / each))) < 0:
        return None
    off = moved.home_bytes * (layers - count) / layers
    rows, roofline = work.num_beams, Roofline(costs, with_cuda_graphs(card))
    needed = off * costs.share_of_weights_read(rows)
    flops = 2 * (costs.active_parameters or costs.num_parameters) * rows * off / costs.weight_bytes
    host_s = max(needed / HOST_BANDWIDTH, flops / HOST_FLOPS)
    copy_s = needed / (card.h2d_bandwidth * card.link_share)
    seconds = 0.0
    for step in tree_steps(work):
        middle = (step.num_tokens + 1) / 2
        read, seen = step.union_tokens + rows * middle, rows * (step.path_tokens + middle)
        share, more_s = (1.0, copy_s) if rows >= MIN_BATCH else (count / layers, host_s)
        seconds += step.num_tokens * (share * roofline.decode_step_s(rows, read, seen) + more_s)
    return rows * work.generate_tokens / seconds


def shown(found: Mapping[str, Any]) -> str:
    """Return the rows as Markdown, with three digits."""
    rows = [
        {key: f"{x:.3g}" if isinstance(x, float) else x for key, x in row.items()}
        for row in found["rows"]
    ]
    return table(rows, [*dict.fromkeys(key for row in rows for key in row)])


def main() -> None:
    found = {"rows": list(rows_of_cases())}
    print(shown(found))
    finish("offload_predicted", {"predicted": True, **found})


if __name__ == "__main__":
    main()
