"""What weights in 8 and 4 bits save of a captured token by counting. Predicted, not measured.

    python -m beamwright_lab.gpu.codes

Seconds as in `costs`, whose two numbers were fitted to an H100 with 16-bit weights: bytes are those
that the kernel for codes reads, launches those of the code as it is. What unpacking takes beside
reading is not in them.
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
from beamwright_lab.gpu.costs import CARD_NAMES, Fit, fitted, measured_steps, work_of

SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b")
STORAGES = (Storage.PLAIN, Storage.INT8, Storage.INT4)
PATHS = (1, 16, 64)
_COUNTED = 16  # rows; as many launches as of any number to 64


def predicted(fit: Fit, name: str, storage: Storage) -> dict[str, Any]:
    """Gigabytes of weights that a token reads, and its milliseconds by card and paths."""
    shape = shape_from_text(name)
    saved = weight_bytes(shape, 2) - weight_bytes(shape, 2, storage)
    works = {paths: work_of(shape, paths, launches(name, storage)) for paths in PATHS}
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
def launches(name: str, storage: Storage) -> tuple[int, int]:
    """Of a layer, and beside the layers."""
    from beamwright_lab.gpu.launches import step_launches  # loads Triton

    one, two = (
        len(
            step_launches(replace(shape_from_text(name), layers=n), _COUNTED, storage=storage).names
        )
        for n in (1, 2)
    )
    return two - one, 2 * one - two


def main() -> None:
    fit = fitted(measured_steps())
    rows = [predicted(fit, name, storage) for name in SHAPES for storage in STORAGES]
    print(table(rows, list(rows[0])), end="\n\n")
    finish("gpu_codes", {"rows": rows})


if __name__ == "__main__":
    main()
