"""Predictions for a named card, capped at a memory number, for every point of the figures.

Whole searches on the simulator, no GPU: what the first real run is to be held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamwright.errors import InputError
from beamwright.models.shape import shape_from_text
from beamwright.plan.costs import Layout
from beamwright.plan.machines import find_profile
from beamwright.solver.memory import ModelBytes
from beamwright_lab.common import say
from beamwright_lab.gpu.points import (
    PAPER_SPEEDUP,
    SEVEN_B,
    WIDTH,
    Point,
    family_points,
    first_points,
    small_card_points,
)
from beamwright_lab.paper.cases import BASELINE, GIB, LBS, SimulatedCase, simulate
from beamwright_lab.simulator import SimulationResult

_HALF = 2
COLUMNS = (
    "model", "n", "step", "layout", "schedule", "KV GiB", "time s", "I/O share", "to device GiB",
    "to host GiB", "groups", "speedup", "speedup, shared", "paper",
)  # fmt: skip


def points(*, quick: bool) -> list[Point]:
    """Whole searches of the paper's lengths; each once."""
    if quick:
        return [p for p in first_points() if p.regime == "paper" and (p.n, p.step) == (64, 128)]
    found = [*first_points(), *(p for m in SEVEN_B[1:] for p in family_points(m))]
    whole = [point for point in found if point.regime == "paper"]
    return list(dict.fromkeys([*whole, *small_card_points()]))


def predictions(gpu: str, memory_bytes: int, chosen: Sequence[Point]) -> list[dict[str, Any]]:
    """One row per point; `None` where it does not fit.

    Raises:
        InputError: for a card of unknown name, or one with less memory than that.
    """
    profile = find_profile(gpu)
    if memory_bytes > profile.device_memory_bytes:
        raise InputError(f"--memory {memory_bytes:,}: {gpu} has {profile.device_memory_bytes:,}")
    baselines = {(p.search, p.layout): p for p in chosen if p.variant == BASELINE}
    rows = []
    for point in chosen:
        kv_bytes = _kv_bytes(point, memory_bytes)
        row = {
            "model": point.model,
            "n": point.n,
            "step": point.step,
            "layout": str(point.layout),
            "schedule": point.variant,
            "memory_bytes": point.memory_bytes or memory_bytes,
            "KV GiB": round(kv_bytes / GIB, 2),
            "paper": PAPER_SPEEDUP[point.model] if _is_the_papers(point) else None,
        }
        both = [baselines.get((point.search, layout)) for layout in (Layout.DENSE, Layout.TREE)]
        rows.append({**row, **_predicted(point, gpu, kv_bytes, both)})
        say(f"  {point.name}: {rows[-1]['time s']} s")
    return rows


def _is_the_papers(point: Point) -> bool:
    return (str(point.layout), point.variant) == ("dense", LBS)


def _kv_bytes(point: Point, memory_bytes: int) -> int:
    """What the point asks for, within what weights and activations leave of the memory."""
    sizes = ModelBytes(shape_from_text(point.model), _HALF)
    left = (point.memory_bytes or memory_bytes) - sizes.weights - sizes.activations(point.n)
    if left <= 0:
        raise InputError(f"--memory {memory_bytes:,}: the weights of {point.model} do not fit")
    if point.memory_bytes is not None:
        return left // 2  # as `--memory` does: the other half is for copies of the present group
    return min(point.kv_bytes or left, left)


def _predicted(
    point: Point, gpu: str, kv_bytes: int, baselines: Sequence[Point | None]
) -> dict[str, Any]:
    """baselines: layer-wise with a copy per beam, and with shared KV."""
    found = simulate(_case(point, gpu, kv_bytes), point.variant, point.layout)
    if found is None:
        return {"time s": "does not fit"}
    speedups = [_speedup(found, each, gpu, kv_bytes) for each in baselines]
    return {
        "time s": round(found.time_s, 1),
        "I/O share": round(found.io_share, 3),
        "to device GiB": round(found.h2d_bytes / GIB, 1),
        "to host GiB": round(found.d2h_bytes / GIB, 1),
        "groups": found.groups,
        "speedup": speedups[0],
        "speedup, shared": speedups[1],
    }


def _speedup(
    found: SimulationResult, baseline: Point | None, gpu: str, kv_bytes: int
) -> float | None:
    if baseline is None:
        return None
    before = simulate(_case(baseline, gpu, kv_bytes), baseline.variant, baseline.layout)
    return round(before.time_s / found.time_s, 2) if before else None


def _case(point: Point, gpu: str, kv_bytes: int) -> SimulatedCase:
    return SimulatedCase(
        model=point.model,
        gpu=gpu,
        num_beams=point.n,
        step_tokens=point.step,
        kv_bytes=None if point.variant == "in-gpu" else kv_bytes,
        width=WIDTH,
    )
