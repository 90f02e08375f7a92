"""What `plan` says of two devices: an engine on each, or generator and verifier apart.

Problems per hour where enough of them are in flight: apart, one device decodes some trees while the
other scores others, so that the slower of the two is what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from beamwright.cli.sizes import Models
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.plan.compare import estimate
from beamwright.plan.scoring import Scorer
from beamwright.plan.workload import Workload
from beamwright.sections import MemorySettings

_HOUR_S = 3600.0


def devices_report(
    settings: Settings, workload: Workload, models: Models, limit_bytes: int
) -> dict[str, Any] | None:
    """None without a verifier. A figure is null where that cannot run. limit_bytes: of each."""
    verifier = models.verifier
    if verifier is None:
        return None
    memory = MemorySettings(memory=limit_bytes, kv_memory=settings.memory.kv_memory)
    together_s = _fastest_s(memory, workload, models, apart=False)
    decode_s = _fastest_s(memory, workload, models, apart=True, scored=False)
    whole_s = _fastest_s(memory, workload, models, apart=True)
    on_each = None if together_s is None else 2 * _HOUR_S / together_s
    apart = None
    if decode_s is not None and whole_s is not None:
        apart = _HOUR_S / max(decode_s, whole_s - decode_s)
    rates = {"on_each": on_each, "apart": apart}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    return {
        "on_each_problems_per_hour": on_each,
        "apart_problems_per_hour": apart,
        "apart_decode_s": decode_s,
        "apart_verify_s": None if apart is None else whole_s - decode_s,  # type: ignore[operator]
        "faster": max(known, key=lambda name: known[name]) if known else None,
    }


def _fastest_s(
    memory: MemorySettings, workload: Workload, models: Models, *, apart: bool, scored: bool = True
) -> float | None:
    """Seconds of one search with the fastest schedule; None where none can run.

    apart: each model has all of a device. scored: the verifier's time is in it.
    """
    from beamwright.solver.memory import plan_memory

    generator, verifier = models.generator, models.verifier
    assert verifier is not None
    n = workload.num_beams
    try:
        if apart:
            own = plan_memory(memory, generator.sizes, None, n).kv_bytes
            other = plan_memory(memory, verifier.sizes, None, n).kv_bytes
        else:
            plan = plan_memory(memory, generator.sizes, verifier.sizes, n)
            own, other = plan.generator_kv_bytes, plan.verifier_kv_bytes
    except InputError:  # the weights alone do not fit
        return None
    scorer = Scorer(verifier.costs, other) if scored else None
    found = estimate(workload, generator.costs, models.profile, own, scorer)
    times = [each.time_s for each in found.values() if each.time_s is not None]
    return min(times, default=None)


def devices_lines(report: Mapping[str, Any] | None) -> Iterator[str]:
    """The lines of the page."""
    if report is None or report["faster"] is None:
        return
    each, apart = (_rate(report[f"{name}_problems_per_hour"]) for name in ("on_each", "apart"))
    option = "--ray local" if report["faster"] == "on_each" else "--verifier-device"
    yield (
        f"two such devices: an engine on each {each}, generator and verifier apart {apart} "
        f"problems an hour: {option}"
    )


def _rate(found: float | None) -> str:
    return "does not fit," if found is None else f"{found:,.0f}"
