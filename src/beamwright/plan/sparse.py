"""The choice behind `--sparse auto`: is attending to selected tokens faster than to all? No torch.

The candidate is `exact` with all KV in host memory (AsyncSpade's Eq. 8). The host scores every key
with the token's own query, so no work overlaps with other work. Selected tokens cross the link once
for all rows, unless the device still holds them from the token before (ShadowKV, FreeKV).

On a GPU, sparse decoding is plain torch, one operator at a time, while full attention has kernels
and graphs. Its price there is a prediction, since no GPU has run it. Bounds of pages would be
cheaper to score. At 4,096 tokens, however, they lose the facts that a ledger problem needs
(docs/log/2026-11.md#sparse-auto), so `auto` never chooses them.
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

# Tokens that are always selected, inside the budget: a path's first ones and its newest ones.
SINKS, RECENT = 4, 12

# Measured link traffic divided by the traffic of rows that choose independently for every token.
#
# Counted on single paths (`python -m beamwright_lab.sparse.brought`): 0.6 with the ledger model,
# 0.7 with the bundled model, 1 with random weights.
ANEW = 0.7

# Least predicted speedup at which `auto` selects tokens. The cost model is no more accurate than
# this factor.
PAYS = 1.25

_OPERATORS = 2.5  # operators of a sparse layer per operator of a plain one, by torch's dispatcher
_SCORE_BYTES = 170  # memory traffic of one score: product, softmax, mean over heads, top-k
_SHARE_MULTIPLE = 16
# Launch cost of a copy while full attention is priced. `Roofline.move` counts a copy per block, but
# streamed KV needs one per layer only. Nearly 0, since profiles want a positive number.
_WHOLE_PIECE_S = 1e-12


def selected_tokens(select: float, visible: int) -> int:
    """Return the number of tokens that a row selects of `visible` ones, the current one included.

    select: a number of tokens, or a share of `visible`, which is rounded up to a multiple of 16.
    """
    if isinstance(select, float):
        select = -(-math.ceil(select * visible) // _SHARE_MULTIPLE) * _SHARE_MULTIPLE
    return max(select, SINKS + RECENT)


def selected_share(select: int, path_tokens: float) -> float:
    """Return the share of a path's tokens that a row selects.

    The tokens that are always selected (SINKS and RECENT) are left out of both counts.
    """
    always = SINKS + RECENT
    return min(1.0, max(0.0, select - always) / max(1.0, path_tokens - always))


def brought(parts: Iterable[tuple[float, float]], share: float, anew: float = ANEW) -> float:
    """Return how many tokens of one KV head cross the link for one token of all rows.

    These are the tokens that some row selects now and no row selected for the token before.
    parts: pairs of a number of stored tokens and the number of rows that see them. Each row selects
        `share` of them, independently.
    """
    chosen = ((tokens, 1 - math.pow(1 - share, rows)) for tokens, rows in parts)
    return anew * math.fsum(tokens * some * (1 - some) for tokens, some in chosen)


def _token_s(
    step: TreeStep, roofline: Roofline, host: HardwareProfile, select: int, most_rows: int
) -> float:
    """Return the seconds of one token of all rows in the middle of a step.

    Rows are decoded in consecutive batches of at most `most_rows`.
    roofline: the device, with one operator launched at a time.
    host: the machine that scores keys and holds all KV.
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
    """The method that `auto` stands for ("off" or "exact"), and the reason in one line."""

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
    """Choose selected tokens if decoding is faster with them by the factor `PAYS`, else all tokens.

    full: the machine as `--schedule auto` uses it to attend to all tokens.
    plain: the same machine with one operator launched at a time.
    host: the machine that scores keys; on a CPU the same machine.
    select: see `selected_tokens`.
    scorer: a verifier, whose part of the device memory is then fixed.
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
