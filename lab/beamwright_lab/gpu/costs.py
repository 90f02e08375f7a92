"""Predict a captured decode step from counted launches, bytes and FLOPs, beside measured steps.

    python -m beamwright_lab.gpu.costs
    python -m beamwright_lab.publish gpu_costs --write      # update the tables in the docs

    seconds = launches * LAUNCH_S + sqrt(memory_s^2 + compute_s^2) + rows * HOST_ROW_S

memory_s: weights, visible KV and activations at a share of the data sheet's bandwidth. compute_s:
matrix products at the share of its FLOP/s that `plan.machines` assumes for all cards. Launches are
counted by running the code (`launches`). LAUNCH_S and the bandwidth share are fitted to an H100's
decode steps; HOST_ROW_S is that card's step time minus its graph replay, per row. The same numbers
predict other cards; the H200's prediction was written before it was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from beamwright.models.named import shape_from_text
from beamwright.models.shape import ModelShape
from beamwright.plan.machines import CARDS, Card, card_profile
from beamwright.units import GIB
from beamwright_lab.common import finish, matmul_parameters, table
from beamwright_lab.simulator.costs import HOST_ROW_S

SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")
CARD_NAMES = ("rtx-3060", "rtx-4090", "h100", "h200")
PATHS = (1, 16, 64, 256)
MEASURED_CARD = "h100"
MEASURED_CARDS = (MEASURED_CARD, "h200")
_FIGURES = Path(__file__).resolve().parents[3] / "docs" / "figures"
_PROMPT, _OWN = 128, 96  # tokens that a path sees in `roofline`: shared, and its own on average
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Work:
    """Counted work of one decode step: a token for every path.

    read_bytes: weights and visible KV. activation_bytes: intermediate tensors, written and read.
    """

    launches: int
    rows: int
    read_bytes: int
    activation_bytes: int
    flops: float


@dataclass(frozen=True)
class Fit:
    """The fitted numbers: seconds per launch, and the share of the data sheet's bandwidth."""

    launch_s: float
    share: float

    def seconds(self, work: Work, card: Card) -> float:
        profile = card_profile(card)
        memory_s = (work.read_bytes + work.activation_bytes) / self.share / profile.device_bandwidth
        compute_s = work.flops / (profile.flops * profile.flops_share)
        busy_s = sqrt(memory_s**2 + compute_s**2)
        return work.launches * self.launch_s + busy_s + work.rows * HOST_ROW_S


def work_of(shape: ModelShape, paths: int, launches: tuple[int, int]) -> Work:
    """Count the work of a step. launches: per layer, and outside the layers."""
    rows, of_layer, beside = -(-paths // 8) * 8, *launches
    kv_bytes = shape.kv_bytes_per_token(_ELEMENT_BYTES) * (_PROMPT + paths * _OWN)
    return Work(
        of_layer * shape.layers + beside,
        paths,
        matmul_parameters(shape) * _ELEMENT_BYTES + kv_bytes,
        rows * _activation_bytes(shape),
        2.0 * matmul_parameters(shape) * rows,
    )


def _activation_bytes(shape: ModelShape) -> int:
    """Bytes of activations that the kernels of one row read and write, all layers and sampling."""
    from beamwright.models.streaming import count_parts  # loads Triton

    hidden, inner = shape.hidden, shape.intermediate
    query = shape.heads * shape.head_dim
    heads = query + 2 * shape.kv_heads * shape.head_dim
    norms = 2 * 4 * hidden  # two norms, each reads two and writes two
    products = (hidden + heads) + (query + hidden) + (hidden + 2 * inner) + inner
    between = 2 * heads + 3 * query + 3 * inner  # rotation, attention, gate
    parts = 2 * 4 * count_parts(hidden, inner) * hidden  # float32, written and read
    layer = _ELEMENT_BYTES * (norms + products + between) + parts
    return shape.layers * layer + 2 * _ELEMENT_BYTES * shape.vocab


@cache
def count_launches(name: str, paths: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Count a step's launches in the current code: per layer, and outside the layers."""
    from beamwright_lab.gpu.launches import step_launches  # loads Triton

    shape = shape_from_text(name)
    one, two = (
        len(step_launches(replace(shape, layers=n), paths, capability=capability).names)
        for n in (1, 2)
    )
    return two - one, 2 * one - two


# --- the fit -----------------------------------------------------------------------------------


def measured_steps(card: str = MEASURED_CARD) -> list[Mapping[str, Any]]:
    """Return a card's measured decode steps with graphs (`gpu.check --only roofline`)."""
    steps = _stages(card)["roofline"]["steps"]
    return [row for row in steps if row["graphs"] == "auto" and not row["deterministic"]]


def _stages(card: str) -> Mapping[str, Any]:
    text = (_FIGURES / f"gpu-{card}.json").read_text(encoding="utf-8")
    stages: Mapping[str, Any] = json.loads(text)["stages"]
    return stages


def copied_share() -> float:
    """Share of the H100's data-sheet bandwidth that a copy on it reaches; the docs' 100 %."""
    ceiling = _stages(MEASURED_CARD)["roofline"]["ceiling"]
    return float(ceiling / card_profile(CARDS[MEASURED_CARD]).device_bandwidth)


def fit_costs(rows: Sequence[Mapping[str, Any]]) -> Fit:
    """Fit to measured steps by least squares of relative errors.

    Tries bandwidth shares from 0.700 to 1.000, each with its best launch time.
    """
    fits = (_fit_launch(share / 1000, rows) for share in range(700, 1001))
    return min(fits, key=lambda fit: sum(relative_error(fit, row) ** 2 for row in rows))


def _fit_launch(share: float, rows: Sequence[Mapping[str, Any]]) -> Fit:
    """Solve for the launch time at this share; errors are linear in it."""
    at_none = [relative_error(Fit(0.0, share), row) for row in rows]
    slopes = [
        relative_error(Fit(1.0, share), row) - none for row, none in zip(rows, at_none, strict=True)
    ]
    product = sum(none * slope for none, slope in zip(at_none, slopes, strict=True))
    return Fit(-product / sum(slope**2 for slope in slopes), share)


def relative_error(fit: Fit, row: Mapping[str, Any], card: str = MEASURED_CARD) -> float:
    """Relative error of a predicted step time: 0.1 means 10 % above the measured time."""
    name = row["model"]
    launches = count_launches(name, row["batch"], CARDS[card].capability)
    work = work_of(shape_from_text(name), row["batch"], launches)
    return 1e3 * fit.seconds(work, CARDS[card]) / float(row["step_ms"]) - 1


# --- the sheet ---------------------------------------------------------------------------------


def sheet() -> dict[str, Any]:
    """Return the fit, its errors, and a row for each shape, card and number of paths."""
    fit = fit_costs(measured_steps())
    measured = {
        (card, row["model"], row["batch"]): row
        for card in MEASURED_CARDS
        for row in measured_steps(card)
    }
    rows = [
        _row(fit, name, card, paths, measured.get((card, name, paths)))
        for name in SHAPES
        for card in CARD_NAMES
        for paths in PATHS
    ]
    return {
        "launch_us": round(1e6 * fit.launch_s, 2),
        "share": round(fit.share, 3),
        "host_row_us": 1e6 * HOST_ROW_S,
        "errors": {
            card: [round(relative_error(fit, row, card), 3) for row in measured_steps(card)]
            for card in MEASURED_CARDS
        },
        "rows": rows,
    }


def _row(
    fit: Fit, name: str, card_name: str, paths: int, found: Mapping[str, Any] | None
) -> dict[str, Any]:
    shape, card = shape_from_text(name), CARDS[card_name]
    launches = count_launches(name, paths, card.capability)
    work = work_of(shape, paths, launches)
    row: dict[str, Any] = {"model": name, "card": card_name, "paths": paths}
    row |= {"launches": work.launches, "of_layer": launches[0]}
    if work.read_bytes > 0.95 * card.memory_gib * GIB:
        return {**row, "fits": False}
    seconds = fit.seconds(work, card)
    copied = copied_share() * card_profile(card).device_bandwidth
    return {
        **row,
        "fits": True,
        "read_gb": round(work.read_bytes / 1e9, 3),
        "activation_gb": round(work.activation_bytes / 1e9, 3),
        "tflop": round(work.flops / 1e12, 3),
        "predicted_ms": round(1e3 * seconds, 2),
        "predicted_tokens_per_s": round(paths / seconds),
        "predicted_share": round(work.read_bytes / seconds / copied, 2),
        "measured_ms": None if found is None else found["step_ms"],
        "measured_share": None if found is None else found["share_of_ceiling"],
    }


def block(found: Mapping[str, Any]) -> str:
    """Render the docs' table: a line for each model and number of paths."""
    rows = found["rows"]
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(
            (row["model"], row["paths"]), {"model": row["model"], "paths": row["paths"]}
        )
        line["kernel launches"] = row["launches"]
        said = "no fit"
        if row["fits"]:
            said = f"{row['predicted_ms']:.2f} ({row['predicted_share']:.2f})"
        line[f"{row['card']} predicted"] = said
        if row.get("measured_ms"):
            of = f"{row['card']} measured"
            line[of] = f"{row['measured_ms']:.2f} ({row['measured_share']:.2f})"
    shown = [*lines.values()]
    missed = [
        f"{100 * fmean(map(abs, errors)):.1f} %, at most {100 * max(map(abs, errors)):.0f} %"
        for errors in found["errors"].values()
    ]
    said = (
        f"Milliseconds per token, and in brackets the share of the bandwidth. The model assumes "
        f"{found['launch_us']} us per kernel launch and {found['share']} of the data sheet's "
        f"bandwidth; both were fitted to the H100 (mean error {missed[0]}). The H200's times were "
        f"predicted before it was measured (mean error {missed[1]})."
    )
    return f"{fill(said, 118)}\n\n{table(shown, list(shown[0]))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.parse_args()
    found = sheet()
    print(block(found), end="\n\n")
    finish("gpu_costs", {**found, "quoted": found})


if __name__ == "__main__":
    main()
