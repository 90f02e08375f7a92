"""Stages `figures-*`: searches of the LBS paper's figures, one model shape per stage.

Random weights, as only sizes matter. A point is one search; its deadline is a part of the stage's
time. A search that is cut off there is kept and marked; points without time run the next time. A
point that fails, for example because its KV does not fit, has its error as result.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from beamwright import Solver
from beamwright.engine.timeline import Timeline
from beamwright.models.named import shape_from_text
from beamwright.protocols import RoundReport
from beamwright.solver.solution import Solution
from beamwright_lab.gpu.context import Context, is_fatal, one_line, release, synchronize
from beamwright_lab.gpu.points import WIDTH, Point, shrunk, stage_points
from beamwright_lab.gpu.simulator import pack_tree
from beamwright_lab.lbs.cases import VARIANTS

# Fewest seconds to start a point, and seconds that are worth leaving later points out.
_LEAST_S, _GOOD_S = 4.0, 14.0
_SMOKE_LEAST_S, _SMOKE_GOOD_S = 0.1, 0.2
_FREE_SHARE = 0.7  # of the free device memory, for KV of in-GPU points


def run(context: Context, stage: str) -> dict[str, Any]:
    """Measure the stage's points that have no result yet; stop at a CUDA error."""
    points = stage_points(stage)
    points = shrunk(points) if context.smoke else points
    points, earlier = _split_points(points, context.earlier)
    data: dict[str, Any] = {"points": earlier, "not_run": []}
    enough = (_SMOKE_LEAST_S, _SMOKE_GOOD_S) if context.smoke else (_LEAST_S, _GOOD_S)
    warmed: set[tuple[str, int]] = set()
    for place, point in enumerate(points):
        deadline_s = _deadline_s(points[place:], context.left_s, *enough)
        if deadline_s is None:
            data["not_run"].append(point.name)
            continue
        if (point.layout, point.n) not in warmed:
            warmed.add((point.layout, point.n))
            data.setdefault("warm_up_s", {})[point.side] = _warm_up(context, point)
        context.save({**data, "underway": point.name})
        row = measure(context, point, deadline_s)
        data["points"].append(row)
        release(context.device)
        context.save(data)
        if is_fatal(row):
            raise RuntimeError(f"{point.name}: {row['error']}")
    return data


def _split_points(
    points: Sequence[Point], earlier: Mapping[str, Any]
) -> tuple[list[Point], list[dict[str, Any]]]:
    """Return the points to run, and the earlier rows to keep.

    The point during which the stage stopped comes last.
    """
    kept = [row for row in earlier.get("points", []) if "error" not in row or is_fatal(row)]
    measured, stopped = {row["name"] for row in kept}, earlier.get("underway")
    left = [point for point in points if point.name not in measured]
    return sorted(left, key=lambda point: point.name == stopped), kept


def _deadline_s(
    points: Sequence[Point], left_s: float, least_s: float, good_s: float
) -> float | None:
    """Return seconds for the first point; None with less than `least_s` left.

    The time left is divided among as many of the next points as leave it `good_s`.
    """
    if left_s < least_s:
        return None
    count = len(points)
    while count > 1 and _share_s(points[:count], left_s) < good_s:
        count -= 1
    return max(least_s, _share_s(points[:count], left_s))


def _share_s(points: Sequence[Point], left_s: float) -> float:
    return left_s * points[0].weight / sum(point.weight for point in points)


# --- one point -------------------------------------------------------------------------------


@dataclass
class _RoundWatch:
    """Round callback that records when each round ended, and the tree."""

    ends_s: list[float] = field(default_factory=lambda: [0.0])
    tree: Any = None

    def __call__(self, report: RoundReport) -> None:
        self.ends_s.append(report.elapsed_s)
        self.tree = report.tree


def measure(context: Context, point: Point, deadline_s: float) -> dict[str, Any]:
    """Run one search and return its row; an exception becomes the row's error."""
    row = {**point.row(), "deadline_s": round(deadline_s, 1)}
    watch, timeline = _RoundWatch(), Timeline()
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    begun = time.perf_counter()
    try:
        with Solver(timeline=timeline, **options(context, point), deadline=deadline_s) as solver:
            synchronize(context.device)
            row["load_s"] = round(time.perf_counter() - begun, 2)
            start_s = time.perf_counter()
            solution = solver.synthetic(point.prompt, on_round=watch)
            row["element_bytes"] = solver.generator.decoder.dtype.itemsize
    except Exception as error:  # out of memory, a schedule that is missing, a full pool
        return {**row, "error": one_line(error)}
    row.update(_row_of(point, solution, watch))
    row.update(_by_round(timeline, start_s, watch.ends_s))
    row["recorded"] = pack_tree(watch.tree)
    if context.on_gpu:
        row["device_peak_bytes_allocated"] = torch.cuda.max_memory_allocated(context.device)
    return row


def options(context: Context, point: Point) -> dict[str, Any]:
    """Return the solver options of a point."""
    element_bytes = 2 if context.on_gpu else 4
    token_bytes = shape_from_text(point.model).kv_bytes_per_token(element_bytes)
    found: dict[str, Any] = {
        "model": f"random:{point.model}",
        "verifier": "logprob",
        "device": context.device,
        "ignore_eos": True,
        "search": "beam",
        "n": point.n,
        "width": WIDTH,
        "max_rounds": point.max_rounds,
        "step_tokens": point.step,
        "max_tokens": point.generate,
        "attention": str(point.layout),
        "link_bandwidth": context.link_bandwidth,
        **VARIANTS[point.variant].options,
    }
    if point.variant == "in-gpu":
        found["link_bandwidth"] = None
        copied = str(point.layout) == "dense"
        tokens = point.copied_tokens if copied else point.shared_tokens
        found["kv_memory"] = _at_most_free(context, tokens * token_bytes)
        return found
    found["host_memory"] = point.shared_tokens * token_bytes
    if point.memory_bytes is not None:
        found["memory"] = point.memory_bytes
    else:
        found["kv_memory"] = point.kv_bytes
    return found


def _at_most_free(context: Context, num_bytes: int) -> int:
    if not context.on_gpu:
        return num_bytes
    free, _ = torch.cuda.mem_get_info(context.device)
    return min(num_bytes, int(_FREE_SHARE * free))


def _warm_up(context: Context, point: Point) -> float | str:
    """Compile kernels for a layout and batch with a short search; return seconds, or the error."""
    start = time.perf_counter()
    short = replace(point, variant="in-gpu", step=4, generate=8)
    try:
        with Solver(**{**options(context, short), "link_bandwidth": None}) as solver:
            solver.synthetic(point.prompt)
    except Exception as error:  # the points will report it, too
        return one_line(error)
    release(context.device)
    return round(time.perf_counter() - start, 2)


def _row_of(point: Point, solution: Solution, watch: _RoundWatch) -> dict[str, Any]:
    kv, rounds = solution.kv, len(watch.ends_s) - 1
    tokens = max(candidate.tokens for candidate in solution.candidates)
    return {
        "rounds": rounds,
        "whole": tokens >= point.generate,
        "tokens": tokens,
        "stopped": solution.reason_fewer,
        "time_s": round(solution.time.total_s, 4),
        "decode_s": round(solution.time.decode_s, 4),
        "stall_s": round(solution.time.stall_s, 4),
        "schedule_s": round(solution.time.schedule_s, 4),
        "other_s": round(solution.time.other_s + solution.time.verify_s, 4),
        "io_share": round(solution.io_share, 4),
        "h2d_bytes": kv.h2d_bytes,
        "d2h_bytes": kv.d2h_bytes,
        "groups": kv.groups,
        "dm_lower_bound_bytes": kv.dm_lower_bound_bytes,
        "device_budget_bytes": kv.device_budget_bytes,
        "device_peak_bytes": kv.device_peak_bytes,
        "host_peak_bytes": kv.host_peak_bytes,
        "scratch_peak_bytes": kv.scratch_peak_bytes,
        "link_bandwidth_emulated": kv.link_bandwidth_emulated,
        "tree_hash": solution.tree_hash,
        "round_s": [round(end - start, 5) for start, end in pairwise(watch.ends_s)],
    }


def _by_round(timeline: Timeline, start_s: float, ends_s: Sequence[float]) -> dict[str, Any]:
    """Sum transferred bytes per direction by the round in which a transfer ended.

    Transfers that end after the last round count for it.
    """
    found = {track: [0] * (len(ends_s) - 1) for track in ("h2d", "d2h")}
    for span in timeline.spans:
        # At a deadline, transfers may end after the last listed round.
        number = bisect_left(ends_s[1:-1], span.end_s - start_s)
        if found.get(span.track):
            found[span.track][number] += int(span.args.get("bytes", 0))
    return {f"round_{track}_bytes": values for track, values in found.items()}
