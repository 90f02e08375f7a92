"""Views after views, with rows that come and go: what attention reads is what was written."""

import random

import pytest
import torch

from beamwright.errors import CapacityError
from beamwright.kv.segments import PathPart
from lab.layerwise.drives import Drive, pair, same


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
    one = Drive(plain.forest, plain.attention, rows)
    two = Drive(device.forest, device.attention, rows, budget_bytes=device.budget_bytes)
    one.run(num_tokens, keep=keep, flush=flush)
    try:
        two.run(num_tokens, keep=keep, flush=flush)
    except CapacityError:  # so many rows do not fit
        return
    assert same(one.contexts, two.contexts), (rows, keep, flush)
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
    plain, device = pair(make_forest, name, link, fit, dtype=torch.float32)
    plain.close()
    device.close()
    for _ in range(8):
        assert_same_view(rng, plain, device)
        rows = rng.sample(range(11), 3)
        lengths = [rng.randint(1, 20) for _ in rows]
        one = plain.forest.prefill(name, rows, lengths)
        assert same(one, device.forest.prefill(device.attention, rows, lengths))
        device.store.landing = {}
