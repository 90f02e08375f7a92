"""Layer-wise offloading: the same bits as the backend inside, and exactly the bytes of Eq. 1-2."""

import random

import pytest
import torch

from beamwright.attention import make_attention
from beamwright.errors import CapacityError, InputError, format_bytes
from beamwright.kv.segments import PathPart
from beamwright.protocols import Direction
from beamwright_lab.baselines.layerwise.backend import LayerwiseAttention
from lab.layerwise import drives

NAMES = pytest.mark.parametrize("name", ["dense", "tree"])
COMES_AND_GOES = {"keep": drives.KEEP, "flush": drives.FLUSH}
CASES = {
    **{f"{fit}": (fit, drives.TOKENS, COMES_AND_GOES, {}) for fit in (2.2, 4.4, 5.5, 20)},
    "grouped heads": (3.3, drives.TOKENS, COMES_AND_GOES, {"kv_heads": 1, "group": 4}),
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
    plain, streamed = drives.pair(make_forest, name, link, fit, **{"dtype": torch.float32, **shape})
    expected, found = plain.run(num_tokens, **moves), streamed.run(num_tokens, **moves)
    assert drives.same(expected.contexts, found.contexts)
    assert link.bytes_moved[Direction.H2D] == streamed.moved_bytes()
    if case != "rows that pad":  # of all rows
        assert streamed.resident[0] == (drives.LAYERS if fit > drives.LAYERS else int(fit) - 2)
    store, budget = streamed.store, streamed.store.device_budget
    assert budget.peak_bytes == max(streamed.charged) <= budget.total_bytes
    if not moves:
        assert 0 < streamed.store.discarded_bytes <= max(streamed.held), "one layer of a view"
    assert budget.used_bytes == store.scratch.used_bytes == 0
    # What the rows' segments hold at the end came back through the link, and is the same.
    stored = [(one, two) for one, two in zip(plain.own, streamed.own, strict=True) if one.length]
    assert len(stored) == ("flush" in moves) * len(plain.own)
    for mine, other in stored:
        held = plain.store.gather(mine, mine.length)
        assert torch.equal(held, streamed.store.gather(other, other.length))


@NAMES
def test_only_kv_that_is_not_on_the_host_is_written_back(make_forest, link, name):
    """Streamed layers write each token; a layer that stops being resident writes all, once."""
    _, streamed = drives.pair(make_forest, name, link, 5.01, dtype=torch.float32)
    streamed.run(drives.TOKENS)
    assert streamed.resident[0] == 3
    assert streamed.resident[-1] < 3
    longest = {}
    for part in (part for path in streamed.paths for part in path):
        longest[id(part.segment)] = max(part.visible, longest.get(id(part.segment), 0))
    tokens = sum(longest.values()) + drives.FIRST_ROWS * drives.TOKENS
    away = drives.LAYERS - streamed.resident[-1]
    assert link.bytes_moved[Direction.D2H] == tokens * away * streamed.token_bytes


@NAMES
def test_what_was_written_back_is_not_written_again(make_forest, link, name):
    forest = make_forest(3, layers=drives.LAYERS, dtype=torch.float32)
    forest = drives.layered(forest, link, 3.5 * drives.layer_bytes(forest, name))
    backend = LayerwiseAttention(make_attention(name))
    stored = []
    for _ in range(2):
        before = link.bytes_moved[Direction.D2H]
        drive = drives.Drive(forest, backend, range(drives.FIRST_ROWS)).run(2)
        stored.append(link.bytes_moved[Direction.D2H] - before)
    assert stored[1] == drives.FIRST_ROWS * 2 * (drives.LAYERS - 1) * drive.token_bytes < stored[0]


def test_less_than_two_buffers_is_a_capacity_error(make_forest, link):
    _, streamed = drives.pair(make_forest, "dense", link, 1.9)
    with pytest.raises(CapacityError, match="stream buffers") as caught:
        streamed.run(1)
    one = streamed.held[0] + drives.FIRST_ROWS * streamed.token_bytes
    assert caught.value.needed_bytes == 2 * one
    assert f"needs {format_bytes(2 * one)}, " in str(caught.value)
    assert streamed.store.device_budget.used_bytes == 0


def test_the_oracle_has_nothing_to_stream():
    with pytest.raises(InputError, match="needs dense or tree, not reference"):
        LayerwiseAttention(make_attention("reference"))


# --- views after views, with rows that come and go -----------------------------------------------


def drawn(rng, left, num_tokens):
    """When which rows are kept, and when the tail is sealed."""
    keep = {}
    for token in sorted(rng.sample(range(1, num_tokens + 1), min(num_tokens, rng.randint(0, 2)))):
        keep[token] = rng.sample(range(left), rng.randint(1, left))
        left = len(keep[token])
    flush = rng.sample(range(1, num_tokens + 1), min(num_tokens, rng.randint(0, 2)))
    return keep, tuple(flush)


def assert_same_view(rng, plain, device):
    """One view on some rows; some of their tokens become part of paths."""
    rows, num_tokens = rng.sample(range(11), rng.randint(1, 9)), rng.randint(1, 20)
    keep, flush = drawn(rng, len(rows), num_tokens)
    one = drives.Drive(plain.forest, plain.attention, rows)
    two = drives.Drive(device.forest, device.attention, rows, budget_bytes=device.budget_bytes)
    one.run(num_tokens, keep=keep, flush=flush)
    try:
        two.run(num_tokens, keep=keep, flush=flush)
    except CapacityError:  # so many rows do not fit
        return
    assert drives.same(one.contexts, two.contexts), (rows, keep, flush)
    for number, row in enumerate(one.rows):
        length = one.own[number].length
        if length and rng.random() < 0.5:
            for drive in (one, two):
                drive.forest.paths[row] = (
                    *drive.forest.paths[row],
                    PathPart(drive.own[number], length),
                )


# The seed draws the whole sequence. Every two of (seed, attention, link) meet, so each attention
# walks over each link in two sequences of its own.
WALKS = [
    (seed, name, ("copier", "streams")[(seed + place) % 2])
    for seed in range(4)
    for place, name in enumerate(("dense", "tree"))
]


@pytest.mark.parametrize(("seed", "name", "link"), WALKS, indirect=["link"])
def test_layers_are_found_wherever_earlier_views_left_them(make_forest, link, name, seed):
    rng = random.Random(seed)
    fit = rng.choice([3.2, 4.2, 5.5])
    plain, device = drives.pair(make_forest, name, link, fit, dtype=torch.float32)
    plain.close()
    device.close()
    for _ in range(8):
        assert_same_view(rng, plain, device)
        rows = rng.sample(range(11), 3)
        lengths = [rng.randint(1, 20) for _ in rows]
        one = plain.forest.prefill(name, rows, lengths)
        assert drives.same(one, device.forest.prefill(device.attention, rows, lengths))
        device.store.landing = {}
