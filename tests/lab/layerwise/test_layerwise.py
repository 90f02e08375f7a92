"""Layer-wise offloading: the same bits as the backend inside, and exactly the bytes of Eq. 1-2."""

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.errors import CapacityError, InputError, format_bytes
from beamwright.kv.link import StreamLink
from beamwright.kv.streams import HostStreams
from beamwright.protocols import Direction
from beamwright_lab.baselines.layerwise.backend import LayerwiseAttention
from lab.layerwise.drives import (
    FIRST_ROWS,
    FLUSH,
    KEEP,
    LAYERS,
    TOKENS,
    Drive,
    layer_bytes,
    layered,
    pair,
    same,
)

NAMES = pytest.mark.parametrize("name", ["dense", "tree"])
COMES_AND_GOES = {"keep": KEEP, "flush": FLUSH}
CASES = {
    **{f"{fit}": (fit, TOKENS, COMES_AND_GOES, {}) for fit in (2.2, 4.4, 5.5, 20)},
    "grouped heads": (3.3, TOKENS, COMES_AND_GOES, {"kv_heads": 1, "group": 4}),
    "float64": (3.5, 3, {}, {"dtype": torch.float64}),
    "bfloat16": (3.5, 3, {}, {"dtype": torch.bfloat16}),
    "the tail grows": (3.9, 20, {}, {}),
    "rows that pad": (3.2, 4, {}, {"real": 6}),
}


@NAMES
@pytest.mark.parametrize("case", CASES)
def test_streaming_changes_no_bit_and_moves_eq_2(make_forest, link, name, case):
    """And the budget holds resident layers and two buffers."""
    fit, num_tokens, moves, shape = CASES[case]
    plain, streamed = pair(make_forest, name, link, fit, **{"dtype": torch.float32, **shape})
    expected, found = plain.run(num_tokens, **moves), streamed.run(num_tokens, **moves)
    assert same(expected.contexts, found.contexts)
    assert link.bytes_moved[Direction.H2D] == streamed.moved_bytes()
    if case != "rows that pad":  # of all rows
        assert streamed.resident[0] == (LAYERS if fit > LAYERS else int(fit) - 2)
    assert streamed.budget.peak_bytes == max(streamed.charged) <= streamed.budget.total_bytes
    if not moves:
        assert 0 < streamed.store.discarded_bytes <= max(streamed.held), "one layer of a view"
    assert streamed.idle
    # What the rows' segments hold at the end came back through the link, and is the same.
    stored = [(one, two) for one, two in zip(plain.own, streamed.own, strict=True) if one.length]
    assert len(stored) == ("flush" in moves) * len(plain.own)
    for mine, other in stored:
        held = plain.store.gather(mine, mine.length)
        assert torch.equal(held, streamed.store.gather(other, other.length))


@NAMES
def test_only_kv_that_is_not_on_the_host_is_written_back(make_forest, link, name):
    """Streamed layers write each token; a layer that stops being resident writes all, once."""
    _, streamed = pair(make_forest, name, link, 5.01, dtype=torch.float32)
    streamed.run(TOKENS)
    assert streamed.resident[0] == 3
    assert streamed.resident[-1] < 3
    longest = {}
    for part in (part for path in streamed.paths for part in path):
        longest[id(part.segment)] = max(part.visible, longest.get(id(part.segment), 0))
    tokens = sum(longest.values()) + FIRST_ROWS * TOKENS
    away = LAYERS - streamed.resident[-1]
    assert link.bytes_moved[Direction.D2H] == tokens * away * streamed.token_bytes


@NAMES
def test_what_was_written_back_is_not_written_again(make_forest, link, name):
    forest = make_forest(3, layers=LAYERS, dtype=torch.float32)
    forest = layered(forest, link, 3.5 * layer_bytes(forest, name))
    backend = LayerwiseAttention(make_attention(name))
    stored = []
    for _ in range(2):
        before = link.bytes_moved[Direction.D2H]
        drive = Drive(forest, backend, range(FIRST_ROWS)).run(2)
        stored.append(link.bytes_moved[Direction.D2H] - before)
    assert stored[1] == FIRST_ROWS * 2 * (LAYERS - 1) * drive.token_bytes < stored[0]


def test_less_than_two_buffers_is_a_capacity_error(make_forest, link):
    _, streamed = pair(make_forest, "dense", link, 1.9)
    with pytest.raises(CapacityError, match="stream buffers") as caught:
        streamed.run(1)
    one = streamed.held[0] + FIRST_ROWS * streamed.token_bytes
    assert caught.value.needed_bytes == 2 * one
    assert f"needs {format_bytes(2 * one)}, " in str(caught.value)
    assert streamed.budget.used_bytes == 0


@NAMES
@pytest.mark.parametrize("fit", [2.2, 3.5, 20])
def test_prefill_streams_each_layer_once(make_forest, link, name, fit):
    rows, lengths = list(range(7)), [1, 5, 16, 17, 33, 2, 8]
    forest = make_forest(4, layers=LAYERS, dtype=torch.float32, seed=2)
    token_bytes = forest.layout.bytes_per_token // LAYERS
    paths = [forest.paths[row] for row in rows]
    parts = [part for path in paths for part in path]
    distinct = {(id(p.segment), p.visible): p.visible for p in parts}
    held = sum(distinct.values())  # whatever decoding copies
    one = (held + sum(lengths)) * token_bytes
    over = layered(forest, link, fit * one)
    backend = LayerwiseAttention(make_attention(name))
    found = over.prefill(backend, rows, lengths, num_padding=6)
    assert same(found, forest.prefill(name, rows, lengths, num_padding=6))
    away = 0 if fit > LAYERS else LAYERS - (int(fit) - 2)
    assert link.bytes_moved[Direction.H2D] == away * held * token_bytes
    longest = {}
    for part in parts:
        longest[id(part.segment)] = max(part.visible, longest.get(id(part.segment), 0))
    host = (sum(longest.values()) + sum(lengths)) * token_bytes
    assert link.bytes_moved[Direction.D2H] == away * host
    assert over.store.device_budget.used_bytes == 0


def test_the_oracle_has_nothing_to_stream():
    with pytest.raises(InputError, match="needs dense or tree, not reference"):
        LayerwiseAttention(make_attention("reference"))


class LossyLink(StreamLink):
    """A link that loses what goes one way: whoever needs those bytes must notice."""

    def __init__(self, lost):
        super().__init__(HostStreams())
        self.lost = lost

    def submit(self, direction, kind, pieces):
        return super().submit(direction, kind, [] if direction is self.lost else pieces)


@NAMES
@pytest.mark.parametrize("lost", Direction)
def test_attention_reads_what_the_link_delivered_and_nothing_else(make_forest, name, lost):
    link = LossyLink(lost)
    plain, streamed = pair(make_forest, name, link, 3.5, dtype=torch.float32)
    expected, found = plain.run(2).contexts, streamed.run(2).contexts
    link.close()
    for token in range(2):
        resident, *others = [
            torch.equal(a, b) for a, b in zip(expected[token], found[token], strict=True)
        ]
        assert resident
        assert not any(others)
