"""What `--sparse auto` stands for: whether reading some tokens takes less than all. No torch.

Priced is `exact` with all KV at home on the host (AsyncSpade's Eq. 8): the host scores every key by
the token's own query, so nothing hides behind anything, and what is selected crosses the link once
for all rows, as far as the device has not kept it from the token before (ShadowKV, FreeKV). On a
card that is plain torch, an operator at a time, where full attention has kernels and graphs: a
prediction, no card has run it. Bounds of pages would be cheaper there, but at 4,096 tokens they
lose the ledger's thread (docs/log/2026-11.md#sparse-auto), so nobody gets them unasked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from beamwright.plan.costs import Roofline
from beamwright.plan.fits import Scorer, in_verifier_tokens
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.times import decode
from beamwright.plan.workload import TreeStep, Workload, expected_ancestors, tree_steps
from beamwright.protocols import Direction

SINKS, RECENT = 4, 12
"""Tokens that are always selected, inside the budget: a path's first ones, and its newest."""

ANEW = 0.7
"""Of what rows bring that choose anew for every token: counted .6 (ledger), .7 (bundled), 1 (random
weights) of single paths (`python -m beamwright_lab.sparse.brought`)."""

PAYS = 1.25
"""Times faster by the cost model, which is no better than that."""

_OPERATORS = 2.5  # times a layer's, counted in torch's dispatcher
_SCORE_BYTES = 170  # memory traffic of a score: product, softmax, mean over heads, top-k
_SHARE_MULTIPLE = 16
_WHOLE_PIECE_S = 1e-12  # streamed layers are a copy each; the model has one of every block


def selected_tokens(select: float, visible: int) -> int:
    """That a row selects of so many, the current one included. select: so many, or a share of those
    that are visible, rounded up to 16."""
    if isinstance(select, float):
        select = -(-math.ceil(select * visible) // _SHARE_MULTIPLE) * _SHARE_MULTIPLE
    return max(select, SINKS + RECENT)


def selected_share(select: int, path_tokens: float) -> float:
    """Of a path's tokens, those that a row is free to select."""
    always = SINKS + RECENT
    return min(1.0, max(0.0, select - always) / max(1.0, path_tokens - always))


def brought(parts: Iterable[tuple[float, float]], share: float, anew: float = ANEW) -> float:
    """Tokens of a KV head that cross the link for one token of all rows: those that some row
    selects, and none did for the token before.

    parts: stored tokens, and the rows that see each of them and select such a share by themselves.
    """
    chosen = ((tokens, 1 - math.pow(1 - share, rows)) for tokens, rows in parts)
    return anew * math.fsum(tokens * some * (1 - some) for tokens, some in chosen)


def _token_s(
    step: TreeStep, roofline: Roofline, host: HardwareProfile, select: int, most_rows: int
) -> float:
    """Seconds of one token of all rows, in the middle of a step, batch after batch of most_rows.

    roofline: of the device, an operator at a time. host: what scores; all KV is there.
    """
    work, model, hardware = step.workload, roofline.model, roofline.hardware
    batches = -(-work.num_beams // most_rows)
    rows, own = work.num_beams / batches, (step.num_tokens + 1) / 2
    levels = expected_ancestors(work.num_beams, work.width, max(1, step.num_levels))
    nodes = [max(1.0, each / batches) for each in levels[: step.num_levels]]
    parts = [(float(work.prompt_tokens), rows)]
    parts += [(each * work.step_tokens, rows / each) for each in nodes]
    union, path = sum(tokens for tokens, _ in parts), step.path_tokens + own
    kv_bytes, held = model.kv_bytes_per_token, union + rows * own
    if path <= select:  # all of it crosses the link when a step begins
        link_s = roofline.move(union * kv_bytes, Direction.H2D) / step.num_tokens
        return batches * (roofline.decode_step(round(rows), held, rows * path) + link_s)
    operators = round(_OPERATORS * hardware.decode_ops_per_layer)
    plain = replace(roofline, hardware=replace(hardware, decode_ops_per_layer=operators))
    token_s = plain.decode_step(round(rows), rows * select, rows * select)
    scores = model.num_layers * model.num_heads * rows * path
    read_bytes = kv_bytes * held / 2 + _SCORE_BYTES * scores
    token_s += max(
        read_bytes / (host.device_bandwidth * host.bandwidth_share),
        2 * scores * model.head_dim / (host.flops * host.flops_share),
    )
    new_bytes = kv_bytes * brought(parts, selected_share(select, path))
    token_s += roofline.transfer(new_bytes, model.num_layers, Direction.H2D)
    token_s += roofline.transfer(rows * kv_bytes, model.num_layers, Direction.D2H)
    return batches * token_s


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for, "off" or "exact", and the reason in a line."""

    method: str
    why: str


def choose_sparse(
    workload: Workload,
    full: Roofline,
    plain: Roofline,
    host: HardwareProfile,
    budget_bytes: int,
    select: float,
    scorer: Scorer | None = None,
) -> Choice:
    """Selected tokens where decoding takes less with them by far, else all of them.

    full: the machine as it decodes with all, as `--schedule auto` does; plain: an
    operator at a time. host: what scores, on a CPU the same. select: see `selected_tokens`.
    scorer: a verifier, which has then its part of the device, and no more.
    """
    select = selected_tokens(select, workload.longest)
    if (longest := workload.longest) <= select:
        return Choice("off", f"paths of {longest:,} tokens have no more than --select reads")
    most_rows = budget_bytes // (select * full.model.kv_bytes_per_token)
    if most_rows < 1:
        return Choice("off", "device KV has no room for what one row selects")
    if scorer is not None:
        path_bytes = in_verifier_tokens(workload).longest * scorer.model.kv_bytes_per_token
        if PAYS * path_bytes > scorer.kv_budget_bytes:
            return Choice("off", "the verifier's part, which cannot grow then, may hold no path")
    here = plain, host, select, most_rows
    sparse_s = sum(step.num_tokens * _token_s(step, *here) for step in tree_steps(workload))
    said = f"the cost model: decoding takes {sparse_s:.3g} s with selected tokens"
    full = replace(full, hardware=replace(full.hardware, copy_launch_s=_WHOLE_PIECE_S))
    whole = decode(workload, full, budget_bytes)
    if whole is None:
        return Choice("exact", f"{said}; with all of them a path does not fit the device")
    seconds = whole.decode_s + whole.stall_s
    name = "in-gpu" if whole.groups == workload.num_steps else "locality"
    method = "exact" if PAYS * sparse_s <= seconds else "off"
    return Choice(method, f"{said}, {seconds:.3g} s with all ({name})")
