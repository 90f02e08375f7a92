"""Summarise a `torch.profiler` trace: kernels of one replayed decode step, and device idle time.

Reads the trace that the profiler exports for a browser. The kernels of a CUDA graph carry the
correlation id of its launch, which tells the kernels of one step.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Event = Mapping[str, Any]
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ROUND_US = 2000.0  # a longer gap between replays separates iterations or rounds
_INNER = re.compile(r"\w*Functor\w*|\w+_kernel(?:_cuda|_impl)?\b|\w+_kernel_cuda|launch_\w+")
_WRAPPERS = ("BinaryFunctor", "UnaryFunctor", "elementwise_kernel", "index_elementwise_kernel")


def steps(events: Iterable[Event]) -> dict[str, Any]:
    """Summarise kernel times and idle times of replays with the most common number of kernels.

    kernels: slowest first, with calls per step and microseconds per call and step; empty without
    graphs.
    """
    events = list(events)
    launched, on_device = _launches(events)
    replays = _keep_most_common([on_device[number] for number in launched if number in on_device])
    if not replays:
        return {"kernels": []}
    spans = [_end(each[-1]) - each[0]["ts"] for each in replays]
    waits = [(_end(former[-1]), later[0]["ts"]) for former, later in pairwise(replays)]
    short = [end - start for start, end in waits if end - start < _ROUND_US]
    longer = [wait for wait in waits if wait[1] - wait[0] >= _ROUND_US]
    busy = statistics.median(sum(event["dur"] for event in each) for each in replays)
    span = statistics.median(spans)
    return {
        "replays": len(replays),
        "kernels_a_step": len(replays[0]),
        "span_us": round(span, 1),
        "busy_us": round(busy, 1),
        "between_kernels_us": round((span - busy) / max(1, len(replays[0]) - 1), 2),
        "between_steps_us": round(statistics.median(short), 1) if short else None,
        "longer_waits_us": [round(end - start) for start, end in longer],
        "busy_in_longer_waits_us": [_busy_us(on_device, *wait) for wait in longer],
        "kernels": _kernels(replays),
    }


def _launches(events: Iterable[Event]) -> tuple[list[int], dict[int, list[Event]]]:
    """Return graph launches' correlation ids in order, and device events by correlation id."""
    launched: list[tuple[float, int]] = []
    on_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("cat") in _ON_DEVICE and number is not None:
            on_device[number].append(event)
        elif "GraphLaunch" in event.get("name", ""):
            launched.append((event["ts"], number))
    for each in on_device.values():
        each.sort(key=lambda event: event["ts"])
    return [number for _, number in sorted(launched)], on_device


def _keep_most_common(replays: Sequence[list[Event]]) -> list[list[Event]]:
    """Keep replays with the most common number of kernels."""
    usual = statistics.mode(map(len, replays)) if replays else 0
    return [each for each in replays if len(each) == usual]


def _kernels(replays: Sequence[Sequence[Event]]) -> list[dict[str, Any]]:
    calls: dict[str, list[float]] = defaultdict(list)
    for replay in replays:
        for event in replay:
            calls[short_name(event["name"])].append(event["dur"])
    rows = [
        {
            "kernel": name,
            "calls": round(len(took) / len(replays)),
            "us a call": round(statistics.median(took), 2),
            "us a step": round(sum(took) / len(replays), 1),
        }
        for name, took in calls.items()
    ]
    return sorted(rows, key=lambda row: -row["us a step"])


def _busy_us(on_device: Mapping[int, Sequence[Event]], start: float, end: float) -> int:
    """Microseconds of device work that runs wholly between two times."""
    every = (event for each in on_device.values() for event in each)
    return round(sum(e["dur"] for e in every if start <= e["ts"] and _end(e) <= end))


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def short_name(name: str) -> str:
    """Strip templates from a kernel's name; torch's elementwise kernels are named by operation."""
    plain = re.sub(r"^void |\(anonymous namespace\)::|at::native::|cublasLt::", "", name)
    outer = re.split(r"[<(]", plain)[0].strip()
    if "elementwise" not in outer:
        return outer
    inner = [each for each in _INNER.findall(plain[len(outer) :]) if each not in _WRAPPERS]
    return inner[0] if inner else outer
