"""Simulate sparse decoding of a recorded search with KV kept on the host (as in AsyncSpade).

Layers are processed in packs on three resources: the inference rank, which decodes; the cache rank,
which selects KV; and the link between them, both directions at once. A late selection makes the
inference rank wait, but never changes which tokens are selected. Costs of a token come from
`studies.sparse`. Only decoding takes time. A round's rows are decoded in lineage order, in batches
whose selected KV fits the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from beamwright.models.shape import ModelShape
from beamwright.plan.costs import Roofline
from beamwright.protocols import Direction
from beamwright.sparse.rule import SparseRule
from beamwright_lab.simulator.recorded import RecordedNode, RecordedTree
from beamwright_lab.simulator.replay import path_ends
from beamwright_lab.studies.sparse import Host, RankSeconds, SparseLoad, host_ranks

# Tokens simulated for a batch in one state. The pipeline is full in the second half of them.
_SIMULATED_TOKENS = 8


@dataclass(frozen=True)
class SparseCase:
    """A selection rule, a model shape, and the host that scores keys or page bounds.

    Selections can be early if the rule's query is not the token's own, but the previous layer's or
    one predicted from earlier tokens.
    """

    rule: SparseRule
    shape: ModelShape
    host: Host = field(default_factory=Host)

    def ranks(self, roofline: Roofline, load: SparseLoad) -> RankSeconds:
        """Return the seconds of one token of all rows, per resource."""
        bounds = self.rule.how.scores != "keys"
        return host_ranks(roofline, self.shape, load, self.host, bounds=bounds)


@dataclass(frozen=True)
class SparseSearch:
    """Result of `simulate_sparse`.

    decode_s: seconds of decoding, waits included.
    waited_s: those in which the device waited for selections or whole paths.
    h2d_bytes: bytes from host to device.
    rows: most rows decoded at a time.
    selecting_tokens: tokens that attended to a selection.
    hidden_share: share of `selecting_tokens` whose selections were never late (AsyncSpade, section
        4.3); None without selections.
    """

    decode_s: float
    waited_s: float
    h2d_bytes: float
    rows: int
    selecting_tokens: int
    hidden_share: float | None


@dataclass(frozen=True)
class _Stretch:
    """`tokens` tokens decoded by the same rows, until the next row ends.

    visible: summed path lengths of the rows half-way; distinct: distinct tokens of these paths.
    """

    tokens: int
    rows: int
    visible: float
    distinct: float


def simulate_sparse(
    tree: RecordedTree, roofline: Roofline, case: SparseCase, kv_budget_bytes: int
) -> SparseSearch | None:
    """Simulate the decoding of a search under sparse attention.

    Returns None if the device cannot hold one row's selection, or the paths that are still too
    short for selection.
    """
    kv_bytes = roofline.model.kv_bytes_per_token
    ends = path_ends(tree)
    most = kv_budget_bytes // (case.rule.budget(max(ends.values())) * kv_bytes)
    if most < 1:
        return None
    decode_s = waited_s = h2d_bytes = 0.0
    selecting = hidden = 0
    for batch in _batches(tree, most):
        loaded_bytes = _distinct_tokens(tree, batch) * kv_bytes
        for number, stretch in enumerate(_stretches(tree, batch, ends)):
            visible = round(stretch.visible / stretch.rows)
            if not case.rule.is_sparse(visible):
                if stretch.distinct * kv_bytes > kv_budget_bytes:
                    return None
                token_s = roofline.decode_step_s(stretch.rows, stretch.distinct, stretch.visible)
                decode_s += stretch.tokens * token_s
                if number == 0:  # whole paths cross the link when rows join
                    load_s = roofline.transfer_s(loaded_bytes, 0, Direction.H2D)
                    decode_s, waited_s = decode_s + load_s, waited_s + load_s
                    h2d_bytes += loaded_bytes
                continue
            shared = min(1.0, stretch.distinct / stretch.visible)
            load = SparseLoad(stretch.rows, visible, case.rule.budget(visible), shared=shared)
            ranks = case.ranks(roofline, load)
            token_s, late_s = _token_seconds(ranks, case.rule.how.query, roofline.model.num_layers)
            decode_s += stretch.tokens * token_s
            waited_s += stretch.tokens * late_s
            h2d_bytes += stretch.tokens * load.loaded_tokens(case.host.anew) * kv_bytes
            selecting += stretch.tokens * stretch.rows
            hidden += stretch.tokens * stretch.rows * (late_s < 1e-9 * token_s)
    share = hidden / selecting if selecting else None
    rows = min(most, max(map(len, _rounds(tree))))
    return SparseSearch(decode_s, waited_s, h2d_bytes, rows, selecting, share)


def _token_seconds(ranks: RankSeconds, query: str, num_layers: int) -> tuple[float, float]:
    """Return the seconds of one token of all rows, and those of them spent waiting."""
    if query == "own":  # a layer's selection begins when the layer does
        late_s = ranks.cache_s + ranks.up_s + ranks.down_s
        return ranks.inference_s + late_s, late_s
    distance = 2 if query == "ahead" else None
    run = simulate_packs(make_packs(ranks, num_layers, 1), _SIMULATED_TOKENS, distance=distance)
    return run.token_s, run.waited_s


# --- the tree --------------------------------------------------------------------------------


def _rounds(tree: RecordedTree) -> list[list[RecordedNode]]:
    rounds: list[list[RecordedNode]] = [[] for _ in range(max(n.round for n in tree.nodes))]
    for node in sorted(tree.nodes, key=lambda node: node.lineage):
        rounds[node.round - 1].append(node)
    return rounds


def _batches(tree: RecordedTree, most: int) -> Iterator[Sequence[RecordedNode]]:
    """Split each round into batches of about equal size, at most `most`, in lineage order."""
    for nodes in _rounds(tree):
        count = -(-len(nodes) // most)
        for number in range(count):
            yield nodes[number * len(nodes) // count : (number + 1) * len(nodes) // count]


def _distinct_tokens(tree: RecordedTree, batch: Sequence[RecordedNode]) -> int:
    """Return the distinct tokens of the paths before these steps."""
    tokens = {node.lineage: node.tokens for node in tree.nodes}
    above = {node.lineage[:depth] for node in batch for depth in range(1, node.round)}
    return tree.prompt_tokens + sum(tokens[lineage] for lineage in above)


def _stretches(
    tree: RecordedTree, batch: Sequence[RecordedNode], ends: dict[tuple[int, ...], int]
) -> Iterator[_Stretch]:
    """Split the decoding of a batch at the ends of its rows."""
    done = 0
    for end in sorted({node.tokens for node in batch}):
        rows = [node for node in batch if node.tokens >= end]
        own = len(rows) * (done + (end - done + 1) / 2)
        yield _Stretch(
            tokens=end - done,
            rows=len(rows),
            visible=sum(ends[node.lineage[:-1]] for node in rows) + own,
            distinct=_distinct_tokens(tree, rows) + own,
        )
        done = end


# --- packs -----------------------------------------------------------------------------------


def make_packs(whole: RankSeconds, num_layers: int, pack_layers: int) -> list[RankSeconds]:
    """Divide a token's seconds among packs of `pack_layers` layers; the last may be smaller."""
    packs = []
    for first in range(0, num_layers, pack_layers):
        share = min(pack_layers, num_layers - first) / num_layers
        seconds = (whole.inference_s, whole.cache_s, whole.up_s, whole.down_s)
        packs.append(RankSeconds(*(share * each for each in seconds)))
    return packs


@dataclass(frozen=True)
class PacksRun:
    """Means over the second half of the tokens, when the pipeline is full.

    token_s: time per output token.
    waited_s: part of it in which the inference rank waited for a selection.
    margin_s: least time between the arrival of a selection and its use; negative if late.
    """

    token_s: float
    waited_s: float
    margin_s: float


def simulate_packs(
    packs: Sequence[RankSeconds],
    num_tokens: int = 64,
    *,
    distance: int | None = None,
    selection_s: float = 0.0,
) -> PacksRun:
    """Simulate decoding `num_tokens` (2 or more) tokens of all rows, pack by pack.

    distance: a pack's selection is computed from queries sent at the end of the pack `distance`
        packs earlier. None: the same pack of the previous token (AsyncSpade). 2: the input of the
        previous pack. The first `distance` selections are available at once.
    selection_s: seconds per token in which the inference rank itself selects (Quest).
    """
    distance = len(packs) if distance is None else distance
    ready = [0.0] * distance  # when the selection for pack i arrives, counted over all tokens
    ends: list[float] = []
    waits: list[float] = []
    margins: list[float] = []
    free_s = up_s = cache_s = down_s = 0.0  # when each resource is free
    for number in range(num_tokens * len(packs)):
        margins.append(ready[number] - free_s)
        waits.append(max(0.0, ready[number] - free_s))
        free_s += waits[-1] + packs[number % len(packs)].inference_s + selection_s / len(packs)
        ends.append(free_s)
        chosen = packs[(number + distance) % len(packs)]
        up_s = max(up_s, free_s) + chosen.up_s
        cache_s = max(cache_s, up_s) + chosen.cache_s
        down_s = max(down_s, cache_s) + chosen.down_s
        ready.append(down_s)
    half = num_tokens // 2
    from_pack = half * len(packs)
    return PacksRun(
        token_s=(ends[-1] - ends[from_pack - 1]) / (num_tokens - half),
        waited_s=sum(waits[from_pack:]) / (num_tokens - half),
        margin_s=-max(margins[from_pack:]),
    )
