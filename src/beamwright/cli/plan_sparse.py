"""How `plan` shows sparse decoding with KV at home on the host, and whether it would pay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from beamwright.cli.output import short_number
from beamwright.cli.sizes import Models
from beamwright.plan.compare import LEAST_GAIN, beside_full_attention
from beamwright.plan.scoring import Scorer
from beamwright.plan.workload import Workload
from beamwright.sections import SparseSettings
from beamwright.units import GIB

if TYPE_CHECKING:
    from beamwright.sparse import SparseRule


def planned_rule(asked: SparseSettings) -> SparseRule | None:
    """The rule that `--sparse` names, `auto` as where it is on; None for off.

    Raises:
        InputError: for options that do not go together.
    """
    if asked == SparseSettings():
        return None  # without torch
    from beamwright.solver.sparse import chosen_by_auto, sparse_rule

    return sparse_rule(chosen_by_auto(asked) if asked.sparse == "auto" else asked)


def sparse_report(
    asked: SparseSettings,
    workload: Workload,
    models: Models,
    kv_bytes: int,
    scorer: Scorer | None,
) -> dict[str, Any] | None:
    """An `Estimate`, and how it compares; None where all is read."""
    rule = planned_rule(asked)
    if rule is None:
        return None
    from beamwright.solver.sparse import sparse_case

    shape, costs = models.generator.shape, models.generator.costs
    case = sparse_case(rule, shape)
    found = beside_full_attention(workload, costs, models.profile, kv_bytes, case, scorer)
    longest = workload.prompt_tokens + workload.generate_tokens
    rows = case.most_rows(longest, costs.kv_bytes_per_token, kv_bytes)
    return {
        "method": rule.method,
        "select": rule.select,
        "first": rule.first,
        "rows": min(workload.num_beams, rows),
        **asdict(found.sparse),
        "gain": found.gain if math.isfinite(found.gain) else None,
        "worthwhile": found.gain >= LEAST_GAIN,
    }


def sparse_lines(report: Mapping[str, Any] | None) -> Iterator[str]:
    """What it takes, and whether `auto` would have it on a device of its own."""
    if report is None:
        return
    named = f"--sparse {report['method']} --sparse-home host"
    if report["time_s"] is None:
        yield f"{named}: no fit; select less, from fewer tokens on (--select, --sparse-from)"
        return
    gain = report["gain"]
    times = "nothing else runs" if gain is None else f"{gain:.2f}x the fastest schedule above"
    verdict = "worth trying" if report["worthwhile"] else f"not worth its error below {LEAST_GAIN}x"
    peak, loaded = (report[f"{name}_bytes"] / GIB for name in ("peak_kv", "h2d"))
    yield (
        f"{named}: {short_number(report['time_s'])} s, {times}: {verdict}; {report['rows']} rows "
        f"at a time, {peak:.2g} GiB of KV on the device, {short_number(loaded)} GiB loaded, "
        f"limited by {report['limited_by']}"
    )
