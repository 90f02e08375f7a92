"""Predict what 8-bit and 4-bit weights save per captured decode step. Counted, not measured.

    python -m beamwright_lab.gpu.codes

Seconds as in `costs`, which is fitted to an H100 with 16-bit weights. Bytes are those that the
kernel for quantised weights reads; launches are counted in the current code. The time to unpack
weights is left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from beamwright.models.named import shape_from_text
from beamwright.plan.costs import Storage, weight_bytes
from beamwright.plan.machines import CARDS
from beamwright.units import GIB
from beamwright_lab.common import finish, table
from beamwright_lab.gpu.costs import CARD_NAMES, Fit, fit_costs, measured_steps, work_of

SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b")
STORAGES = (Storage.PLAIN, Storage.INT8, Storage.INT4)
PATHS = (1, 16, 64)
_COUNTED = 16  # rows; any number up to 64 has as many launches


def predict(fit: Fit, name: str, storage: Storage) -> dict[str, Any]:
    """Return gigabytes of weights read per step, and milliseconds by card and number of paths."""
    shape = shape_from_text(name)
    saved = weight_bytes(shape, 2) - weight_bytes(shape, 2, storage)
    works = {paths: work_of(shape, paths, count_launches(name, storage)) for paths in PATHS}
    looked_up = 0 if shape.tied else 2 * shape.vocab * shape.hidden
    row: dict[str, Any] = {"model": name, "weights": str(storage)}
    row["GB a token"] = round((weight_bytes(shape, 2, storage) - looked_up) / 1e9, 2)
    for card in CARD_NAMES:
        fits = weight_bytes(shape, 2, storage) < 0.95 * CARDS[card].memory_gib * GIB
        for paths, work in works.items():
            less = replace(work, read_bytes=work.read_bytes - saved)
            found = round(1e3 * fit.seconds(less, CARDS[card]), 2)
            row[f"{card}, {paths}"] = found if fits else None
    return row


@cache
def count_launches(name: str, storage: Storage) -> tuple[int, int]:
    """Count a step's launches: per layer, and outside the layers."""
    from beamwright_lab.gpu.launches import step_launches  # loads Triton

    one, two = (
        len(
            step_launches(replace(shape_from_text(name), layers=n), _COUNTED, storage=storage).names
        )
        for n in (1, 2)
    )
    return two - one, 2 * one - two


def main() -> None:
    fit = fit_costs(measured_steps())
    rows = [predict(fit, name, storage) for name in SHAPES for storage in STORAGES]
    print(table(rows, list(rows[0])), end="\n\n")
    finish("gpu_codes", {"rows": rows})


if __name__ == "__main__":
    main()
