"""Decide `--sparse auto`: is sparse attention to selected tokens faster than full attention?

The sparse candidate is `--sparse exact` with all KV in host memory (AsyncSpade's Eq. 8). The host
scores every key with the token's own query, so the device waits meanwhile. A selected token is
copied to the device once for all rows, unless the previous token already needed it there (ShadowKV,
FreeKV).

On a GPU, sparse decoding runs in plain torch, one operator at a time, while full attention has
kernels and CUDA graphs. The time of sparse decoding on a GPU is a prediction: no GPU has run it.
Scoring pages of keys by their bounds (Quest) would be cheaper. At 4,096 tokens, however, page
scores miss facts that a ledger problem needs (docs/log/2026-11.md#sparse-auto), so `auto` never
chooses it. This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from beamwright.plan.costs import Roofline
from beamwright.plan.fits import VerifierCosts, with_mark_tokens
from beamwright.plan.machines import HardwareProfile
from beamwright.plan.times import decode_costs
from beamwright.plan.workload import TreeStep, Workload, expected_ancestors, tree_steps
from beamwright.protocols import Direction

# Tokens that are always selected: a path's first ones (attention sinks) and its newest ones.
SINKS, RECENT = 4, 12

# Measured link traffic, as a fraction of the traffic if every token made its own random selection.
#
# Measured on single paths (`python -m beamwright_lab.sparse.brought`): 0.6 with the ledger model,
# 0.7 with the bundled model, 1 with random weights.
RELOAD_FACTOR = 0.7

# Minimum predicted speedup at which `auto` chooses sparse attention. The cost model is no more
# accurate than this factor.
LEAST_SPEEDUP = 1.25

_OPERATORS = 2.5  # torch operators of a sparse layer per operator of a dense layer
_SCORE_BYTES = 170  # memory traffic of one score: product, softmax, mean over heads, top-k
_SHARE_MULTIPLE = 16
# Launch cost of a copy for the estimate of full attention. `Roofline.move_kv_s` counts a copy per
# block, but streamed KV needs only one per layer. Zero is not valid in a profile.
_WHOLE_PIECE_S = 1e-12


def selected_tokens(select: float, visible: int) -> int:
    """Return how many of `visible` tokens a row attends to, the current token included.

    select: the value of `--select`: a number of tokens, or a share of `visible`, which is rounded
        up to a multiple of 16.
    """
    if isinstance(select, float):
        select = -(-math.ceil(select * visible) // _SHARE_MULTIPLE) * _SHARE_MULTIPLE
    return max(select, SINKS + RECENT)


def selected_share(select: int, path_tokens: float) -> float:
    """Return the fraction of a path's tokens that a row selects, from 0 to 1.

    select: the number of selected tokens. SINKS and RECENT tokens are not counted in either number.
    """
    always = SINKS + RECENT
    return min(1.0, max(0.0, select - always) / max(1.0, path_tokens - always))


def loaded_tokens(
    parts: Iterable[tuple[float, float]], share: float, reload_factor: float = RELOAD_FACTOR
) -> float:
    """Return how many tokens of one KV head are copied to the device per decode iteration.

    These are the tokens that some row selects now and no row selected in the previous iteration.
    parts: (stored tokens, rows that attend to them) for each shared part of the paths. Each row
        selects `share` of them, independently.
    """
    chosen = ((tokens, 1 - math.pow(1 - share, rows)) for tokens, rows in parts)
    return reload_factor * math.fsum(tokens * some * (1 - some) for tokens, some in chosen)


def _token_s(
    step: TreeStep, roofline: Roofline, host: HardwareProfile, select: int, most_rows: int
) -> float:
    """Return the seconds of one sparse decode iteration of all rows, in the middle of a step.

    roofline: the device, with one operator launched at a time.
    host: the machine that scores keys and holds all KV.
    most_rows: rows that fit one batch; more rows are decoded in consecutive batches.
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
    if path <= select:  # rows attend to everything, so all KV crosses the link when a step begins
        link_s = roofline.move_kv_s(union * kv_bytes, Direction.H2D) / step.num_tokens
        return batches * (roofline.decode_step_s(round(rows), held, rows * path) + link_s)
    operators = round(_OPERATORS * hardware.decode_ops_per_layer)
    plain = replace(roofline, hardware=replace(hardware, decode_ops_per_layer=operators))
    token_s = plain.decode_step_s(round(rows), rows * select, rows * select)
    scores = model.num_layers * model.num_heads * rows * path
    read_bytes = kv_bytes * held / 2 + _SCORE_BYTES * scores
    token_s += max(
        read_bytes / (host.device_bandwidth * host.bandwidth_share),
        2 * scores * model.head_dim / (host.flops * host.flops_share),
    )
    new_bytes = kv_bytes * loaded_tokens(parts, selected_share(select, path))
    token_s += roofline.transfer_s(new_bytes, model.num_layers, Direction.H2D)
    token_s += roofline.transfer_s(rows * kv_bytes, model.num_layers, Direction.D2H)
    return batches * token_s


@dataclass(frozen=True)
class SparseChoice:
    """What `--sparse auto` chose ("off" or "exact"), and the reason in one line."""

    method: str
    why: str


def choose_sparse(
    workload: Workload,
    full: Roofline,
    plain: Roofline,
    host: HardwareProfile,
    budget_bytes: int,
    select: float,
    scorer: VerifierCosts | None = None,
) -> SparseChoice:
    """Choose sparse attention if its predicted speedup is at least `LEAST_SPEEDUP`, else full.

    full: model and machine with full attention, as `--schedule auto` runs it.
    plain: the same model and machine with one operator launched at a time.
    host: the machine that scores keys; on a CPU the same machine.
    budget_bytes: KV budget of the generator on the device.
    select: see `selected_tokens`.
    scorer: the verifier, whose part of the device memory cannot grow with sparse attention.
    """
    select = selected_tokens(select, workload.longest)
    if (longest := workload.longest) <= select:
        return SparseChoice("off", f"paths of {longest:,} tokens are not longer than --select")
    most_rows = budget_bytes // (select * full.model.kv_bytes_per_token)
    if most_rows < 1:
        return SparseChoice("off", "device KV cannot hold the selected tokens of one row")
    if scorer is not None:
        path_bytes = with_mark_tokens(workload).longest * scorer.model.kv_bytes_per_token
        if LEAST_SPEEDUP * path_bytes > scorer.kv_budget_bytes:
            return SparseChoice(
                "off", "the verifier's share of KV, which would be fixed, may not hold a path"
            )
    here = plain, host, select, most_rows
    sparse_s = sum(step.num_tokens * _token_s(step, *here) for step in tree_steps(workload))
    said = f"the cost model expects {sparse_s:.3g} s of decoding with selected tokens"
    full = replace(full, hardware=replace(full.hardware, copy_launch_s=_WHOLE_PIECE_S))
    whole = decode_costs(workload, full, budget_bytes)
    if whole is None:
        return SparseChoice("exact", f"{said}; with all tokens a path does not fit the device")
    seconds = whole.decode_s + whole.stall_s
    name = "in-gpu" if whole.groups == workload.num_steps else "locality"
    method = "exact" if LEAST_SPEEDUP * sparse_s <= seconds else "off"
    return SparseChoice(method, f"{said}, {seconds:.3g} s with all tokens ({name})")
