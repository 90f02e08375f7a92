"""Stage `narrow`: matrix products with few rows and outputs (qkv, out), library against our kernel.

On an H200, decoding few rows was faster with `--deterministic`, which splits these products into
parts, than without. This trial runs our kernel without splitting: it may give the library's bits,
and it starts while the preceding norm ends. Each variant is timed alone behind a norm, and its bits
are compared; then whole steps use the best tiles where bits are equal. Not part of the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beamwright.models.decoder import Linear
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.roofline import Steps, plain_paths, round_seconds

_PRODUCTS = {"1.5B qkv": (2048, 1536), "1.5B out": (1536, 1536), "0.5B qkv": (1152, 896)}
_LAYERS, _REPLAYS = 28, 20
_FEW, _MANY = 16, 64  # rows
_TILES = {  # outputs, columns, stages, warps
    _FEW: ((16, 128, 6, 2), (32, 128, 4, 4), (16, 256, 4, 4), (32, 256, 3, 4)),
    _MANY: ((16, 128, 3, 4), (32, 64, 4, 4), (32, 128, 3, 4), (32, 128, 4, 8), (16, 64, 5, 4)),
}
_STEPS = (("qwen2.5-1.5b", 16), ("qwen2.5-1.5b", 64), ("qwen2.5-1.5b", 1), ("qwen2.5-0.5b", 64))
_LEAST_S = 5.0
Tile = tuple[int, int, int, int]


def run(context: Context) -> dict[str, Any]:
    """Time each product alone, then whole steps with the best tiles."""
    if not context.on_gpu:
        return {"skipped": "needs a GPU"}
    data: dict[str, Any] = {"rows": [], "steps": [], "not_run": []}
    names = [(name, rows) for name in _PRODUCTS for rows in (_FEW, _MANY)]
    alone = [
        ({"product": n, "rows": rows}, partial(_time_product, context, n, rows))
        for n, rows in names
    ]
    context.rows(data, "rows", alone, _LEAST_S)
    best = {rows: _best_tile(data["rows"], rows) for rows in (_FEW, _MANY)}
    whole = [
        ({"model": model, "batch": batch}, partial(_time_steps, context, best, model, batch))
        for model, batch in _STEPS
    ]
    context.rows(data, "steps", whole, _LEAST_S)
    return data


def _best_tile(found: Sequence[dict[str, Any]], rows: int) -> Tile:
    """Return the tile that is fastest over all products with this number of rows."""
    ways = [row["us"] for row in found if row["rows"] == rows and "us" in row]
    return min(_TILES[rows], key=lambda tile: sum(way[str(tile)] for way in ways))


def multiply_uncut(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, rows: int) -> Tensor:
    """Compute x @ weight^T + bias for at most `rows` rows; one program computes each whole sum."""
    from beamwright.models import streaming
    from beamwright.models.codes import UNIT
    from beamwright.models.layer_kernels import launch

    outputs, columns = weight.shape
    out = x.new_empty(len(x), outputs)
    sized = streaming.ProductTile(rows, *tile)
    how = *streaming._sizes(weight, sized), UNIT, False, True
    grid = -(-outputs // sized.outputs), 1, 1
    tensors, numbers = (x.contiguous(), weight, None, out, bias), (len(x), outputs, columns, 1)
    launch(streaming.multiply_parts, grid, tensors, numbers, how, sized.warps, sized.stages)
    return out


def _time_product(context: Context, name: str, rows: int) -> dict[str, Any]:
    from beamwright.models.dense import Norm
    from beamwright.models.layer_kernels import add_norm
    from beamwright.models.streaming import product
    from beamwright.models.trials import draw_cancelling_input, is_invariant

    (outputs, columns), like = _PRODUCTS[name], {"device": context.device, "dtype": torch.bfloat16}
    weights = [0.02 * torch.randn(outputs, columns, **like) for _ in range(_LAYERS)]
    norm = Norm("rms", 1e-6, torch.ones(columns, **like))
    x = torch.randn(rows, columns, **like)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"library": F.linear}
    ways["in parts"] = lambda x, weight: product(x, weight, None)
    for tile in _TILES[rows]:
        ways[str(tile)] = partial(_multiply_uncut, tile, rows)
    drawn, weight = draw_cancelling_input(weights[0])
    whole, us, equal = F.linear(drawn, weight), {}, {}
    for way, multiply in ways.items():

        def layers(multiply: Callable[[Tensor, Tensor], Tensor] = multiply) -> None:
            for each in weights:
                multiply(add_norm(x, None, norm), each)

        us[way] = round(_replayed_us(layers) / _LAYERS, 2)
        by = partial(_of_weight, multiply, weight)
        equal[way] = is_invariant(by, drawn, whole, (8, rows))
    return {"us": us, "equal": equal}


def _multiply_uncut(tile: Tile, rows: int, x: Tensor, weight: Tensor) -> Tensor:
    return multiply_uncut(x, weight, None, tile, rows)


def _of_weight(multiply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> Tensor:
    return multiply(x, weight)


def _replayed_us(work: Callable[[], None]) -> float:
    """Microseconds of the fastest of several replays of `work` as a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    took_ms = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took_ms.append(start.elapsed_time(end))
    return 1e3 * min(took_ms)


@contextmanager
def _use_tiles(best: dict[int, Tile]) -> Iterator[list[tuple[int, ...]]]:
    """Make models loaded in this context use these tiles; yield the shapes of affected weights."""
    from beamwright.models import trials

    class NarrowLinear(Linear):
        is_exact_for_one_row = True

        def __call__(self, x: Tensor) -> Tensor:
            rows = _FEW if len(x) <= _FEW else _MANY
            if len(x) > rows:
                return F.linear(x, self.weight, self.bias)
            return multiply_uncut(x, self.weight, self.bias, best[rows], rows)

    shapes: list[tuple[int, ...]] = []
    usual = trials._choose

    def choose(weight: Tensor, bias: Tensor | None, *, always: bool) -> type[Linear]:
        found = usual(weight, bias, always=always)
        if found is Linear and not always:
            x, like = trials.draw_cancelling_input(weight)
            whole, counts = F.linear(x, like, bias), (8, _FEW, _FEW + 8, _MANY)
            if trials.is_invariant(NarrowLinear(like, bias), x, whole, counts):
                shapes.append(tuple(weight.shape))
                return NarrowLinear
        return found

    trials._choose = choose
    try:
        yield shapes
    finally:
        trials._choose = usual


def _time_steps(context: Context, best: dict[int, Tile], model: str, batch: int) -> dict[str, Any]:
    """Measure milliseconds per token in turns: default, narrow tiles, `--deterministic`."""
    case = Steps()
    usual = plain_paths(context, case, model, batch)
    with _use_tiles(best) as shapes:
        narrow = plain_paths(context, case, model, batch)
    solvers = {"usual": usual, "narrow": narrow}
    solvers["deterministic"] = plain_paths(context, case, model, batch, deterministic=True)
    took: dict[str, list[float]] = {name: [] for name in solvers}
    for counts in (False, True, True, True):
        for name, solver in solvers.items():
            rounds = round_seconds(solver, case.prompt)[1:]
            took[name] += [1e3 * each / case.step_tokens for each in rounds] if counts else []
    row: dict[str, Any] = {"shapes": shapes, "exact": narrow.exact}
    for name, solver in solvers.items():
        row[name] = round(min(took[name]), 3)
        row[f"{name}, median"] = round(statistics.median(took[name]), 3)
        solver.close()
    return row
