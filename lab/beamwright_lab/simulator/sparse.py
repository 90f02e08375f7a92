"""A recorded search decoded sparsely with KV at home on the host: its rounds, in layer packs.

Decoding alone, on the clock of `packs`; what a token costs comes from `cost.sparse_search`. Rows of
a round are decoded in lineage order, as many at a time as have room for what they select.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from beamwright.plan.compare import SparseCase
from beamwright.plan.costs import Roofline
from beamwright.plan.sparse import RankSeconds, host_ranks
from beamwright.protocols import Direction
from beamwright.tree import RecordedNode, RecordedTree
from beamwright_lab.simulator.packs import in_packs, simulate_packs

_TOKENS = 8
"""That are simulated of a stretch of equal tokens: the pipeline is full in the second half."""


@dataclass(frozen=True)
class SparseSearch:
    """Seconds of decoding; of them the device waited `waited_s` for selections or whole paths.

    hidden_share: of the tokens of rows that selected, those of stretches in which no selection
    came late (AsyncSpade, section 4.3); None where no row selected. rows: decoded at a time.
    """

    decode_s: float
    waited_s: float
    h2d_bytes: float
    rows: int
    selecting_tokens: int
    hidden_share: float | None


@dataclass(frozen=True)
class _Stretch:
    """So many tokens for each of the same rows. visible: tokens that they see in the middle of it,
    in all; distinct: of them."""

    tokens: int
    rows: int
    visible: float
    distinct: float


def simulate_sparse(
    tree: RecordedTree, roofline: Roofline, case: SparseCase, kv_budget_bytes: int
) -> SparseSearch | None:
    """None where the device has no room for one row's selection, or for what still reads all."""
    kv_bytes = roofline.model.kv_bytes_per_token
    starts = tree.starts()
    most = case.most_rows(tree.longest, kv_bytes, kv_budget_bytes)
    if most < 1:
        return None
    decode_s = waited_s = h2d_bytes = 0.0
    selecting = hidden = 0
    for batch in _batches(tree, most):
        loaded_bytes = _distinct(tree, batch) * kv_bytes
        for number, stretch in enumerate(_stretches(tree, batch, starts)):
            visible = round(stretch.visible / stretch.rows)
            if not case.rule.is_sparse(visible):
                if stretch.distinct * kv_bytes > kv_budget_bytes:
                    return None
                token_s = roofline.decode_step(stretch.rows, stretch.distinct, stretch.visible)
                decode_s += stretch.tokens * token_s
                if number == 0:  # whole paths cross the link when rows join
                    load_s = roofline.transfer(loaded_bytes, 0, Direction.H2D)
                    decode_s, waited_s = decode_s + load_s, waited_s + load_s
                    h2d_bytes += loaded_bytes
                continue
            load = case.load(stretch.rows, visible, min(1.0, stretch.distinct / stretch.visible))
            ranks = host_ranks(roofline, case.shape, load, case.scored, case.host)
            token_s, late_s = _token(ranks, case, roofline.model.num_layers)
            decode_s += stretch.tokens * token_s
            waited_s += stretch.tokens * late_s
            h2d_bytes += stretch.tokens * load.chosen * case.host.missed * kv_bytes
            selecting += stretch.tokens * stretch.rows
            hidden += stretch.tokens * stretch.rows * (late_s < 1e-9 * token_s)
    share = hidden / selecting if selecting else None
    rows = min(most, max(map(len, _rounds(tree))))
    return SparseSearch(decode_s, waited_s, h2d_bytes, rows, selecting, share)


def _token(ranks: RankSeconds, case: SparseCase, num_layers: int) -> tuple[float, float]:
    """Seconds of a token of all rows, and of them those that the device waits, layer by layer."""
    packs = in_packs(ranks, num_layers, 1)
    if not case.foreseen:  # a layer's selection begins when the layer does
        return case.token_s(ranks), case.token_s(ranks) - ranks.inference_s
    ahead = 2 if case.by_layers else None
    run = simulate_packs(packs, _TOKENS, distance=ahead)
    return run.token_s, run.waited_s


# --- the tree --------------------------------------------------------------------------------


def _rounds(tree: RecordedTree) -> list[list[RecordedNode]]:
    rounds: list[list[RecordedNode]] = [[] for _ in range(max(n.round for n in tree.nodes))]
    for node in sorted(tree.nodes, key=lambda node: node.lineage):
        rounds[node.round - 1].append(node)
    return rounds


def _batches(tree: RecordedTree, most: int) -> Iterator[Sequence[RecordedNode]]:
    """Even ones, in lineage order."""
    for nodes in _rounds(tree):
        count = -(-len(nodes) // most)
        for number in range(count):
            yield nodes[number * len(nodes) // count : (number + 1) * len(nodes) // count]


def _distinct(tree: RecordedTree, batch: Sequence[RecordedNode]) -> int:
    """Tokens of the paths before these steps, shared ones once."""
    tokens = {node.lineage: node.tokens for node in tree.nodes}
    above = {node.lineage[:depth] for node in batch for depth in range(1, node.round)}
    return tree.prompt_tokens + sum(tokens[lineage] for lineage in above)


def _stretches(
    tree: RecordedTree, batch: Sequence[RecordedNode], starts: dict[tuple[int, ...], int]
) -> Iterator[_Stretch]:
    """Rows end one after the other: between two ends they are the same."""
    done = 0
    for end in sorted({node.tokens for node in batch}):
        rows = [node for node in batch if node.tokens >= end]
        own = len(rows) * (done + (end - done + 1) / 2)
        yield _Stretch(
            tokens=end - done,
            rows=len(rows),
            visible=sum(starts[node.lineage] for node in rows) + own,
            distinct=_distinct(tree, rows) + own,
        )
        done = end
