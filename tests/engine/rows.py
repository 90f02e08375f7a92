"""Rows of logits of many kinds, and filters of what may be drawn of them."""

import math

import torch

from beamwright.io import read_toml_beside

FILTERS = read_toml_beside(__file__)["filters"]
LOGITS = {
    "flat": lambda drawn: drawn,
    "of a trained model": lambda drawn: (3 * drawn).index_fill(1, torch.arange(9, 90, 9), 14.0),
    "with ties": lambda drawn: (2 * drawn).round(),
    "one certain": lambda drawn: drawn.index_fill(1, torch.tensor([77]), 300.0),
    "all the same": torch.zeros_like,
    "forbidden": lambda drawn: drawn.masked_fill(drawn < 1.7, -math.inf),
    "one left": lambda drawn: drawn.masked_fill(drawn < drawn.amax(1, True), -math.inf),
    "negative": lambda drawn: drawn - 25.0,
    "huge": lambda drawn: 1e3 * drawn,
}


def logits_of(kind, num_rows, vocab=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return LOGITS[kind](torch.randn(num_rows, vocab, generator=generator))
