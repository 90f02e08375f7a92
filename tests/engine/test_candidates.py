"""Rows of a large vocabulary, drawn from the tokens that can win, against whole rows."""

import math

import pytest
import torch

from beamwright.engine.noise import (
    LEAST_NOISE,
    MOST_NOISE,
    NOISE_BITS,
    lineage_key,
    stack_keys,
)
from beamwright.engine.sampling import RowSampling, Sampler
from beamwright.sections import SamplingSettings

CPU = torch.device("cpu")
VOCAB, ROWS = 20_000, 6
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5_000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 0.999},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 5_000, "top_p": 0.5},
    {"top_p": 0.99, "min_p": 1e-4},
]


LOGITS = {
    "flat": lambda drawn, ids: drawn,
    "of a trained model": lambda drawn, ids: (3 * drawn).scatter(1, ids, 20 + drawn[:, :30]),
    "with ties": lambda drawn, ids: (2 * drawn).scatter(1, ids, 9.0).bfloat16(),
    "one certain": lambda drawn, ids: drawn.scatter(1, ids[:, :1], 500.0),
    "all the same": lambda drawn, ids: torch.zeros_like(drawn),
    "some forbidden": lambda drawn, ids: drawn.masked_fill(drawn < 1.5, -math.inf),
    "huge": lambda drawn, ids: drawn * 1e4,
    "far below zero": lambda drawn, ids: drawn - 25.0,
}


def logits_of(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(ROWS, VOCAB + 50, generator=generator)
    return LOGITS[kind](drawn, torch.randint(0, VOCAB, (ROWS, 30), generator=generator))


def both(logits, settings, greedy=None, seed=0):
    """Tokens and log-probabilities by row and of whole rows."""
    keys = stack_keys([lineage_key(seed, (0, row)) for row in range(ROWS)], CPU)
    positions = torch.arange(ROWS) * 7 + seed
    how = RowSampling(ROWS, CPU)
    how.load(settings, greedy or [False] * ROWS)
    samplers = (Sampler(VOCAB, CPU, captured=captured) for captured in (False, True))
    return [each.sample(logits, keys, positions, how) for each in samplers]


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_token_is_the_one_of_the_whole_row(kind, filters):
    for seed, temperature in enumerate([0.1, 0.8, 1.0, 3.0]):
        settings = [SamplingSettings(temperature=temperature, **filters)] * ROWS
        fast, slow = both(logits_of(kind, seed), settings, seed=seed)
        assert torch.equal(fast[0], slow[0])
        assert torch.equal(fast[1], slow[1])


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_that_draw_otherwise_are_drawn_in_any_number_of_threads(kind, threads):
    hows = [{}, {"temperature": 0}, {"min_p": 0.1}, {"top_k": 9}, {}, {"temperature": 2.0}]
    settings = [SamplingSettings(**how) for how in hows]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for logits in (logits_of(kind, 1), logits_of(kind, 2).bfloat16()):
            fast, slow = both(logits, settings, [False] * (ROWS - 1) + [True])
            assert torch.equal(fast[0], slow[0])
            assert torch.equal(fast[1], slow[1])
    finally:
        torch.set_num_threads(before)


def test_logits_that_are_not_numbers_are_left_to_whole_rows():
    logits = logits_of("flat", 0)
    logits[0, 5] = math.nan
    fast, slow = both(logits, [SamplingSettings(temperature=0.8)] * ROWS)
    assert torch.equal(fast[0], slow[0])


def test_noise_is_within_its_bounds():
    uniform = (torch.tensor([0, 2**NOISE_BITS - 1]).float() + 0.5) * 2.0**-NOISE_BITS
    bounds = uniform.log().neg().log().neg().tolist()
    assert bounds == pytest.approx([LEAST_NOISE, MOST_NOISE], rel=1e-6)
