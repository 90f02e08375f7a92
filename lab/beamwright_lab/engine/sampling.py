"""Milliseconds of drawing a token of every row from a large vocabulary on a CPU, one thread.

By row, from the tokens that can win, against whole rows at once, for each filter; logits as peaked
as a trained model's, and flat. Both in turns, least of the rounds; the tokens and their
log-probabilities have to be the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from beamwright.engine.row_sampling import RowSampling
from beamwright.engine.sampling import Sampler, lineage_key, stack_keys
from beamwright.sections import SamplingSettings
from beamwright_lab.common import finish, interleave, table

CPU = torch.device("cpu")
FILTERS: dict[str, dict[str, float]] = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
}


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """[rows, vocab] in bfloat16."""
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    if kind == "peaked":
        drawn *= 3
        drawn[torch.arange(rows), torch.arange(rows) * 7] = 20.0
    return drawn.bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keys = stack_keys([lineage_key(0, (0, row)) for row in range(args.rows)], CPU)
    positions = torch.arange(args.rows)
    by_row = Sampler(args.vocab, CPU)
    whole = Sampler(args.vocab, CPU, captured=True)  # the host reads nothing: all rows at once
    lines = []
    for kind in ("peaked", "flat"):
        logits = logits_of(kind, args.rows, args.vocab)
        for label, filters in FILTERS.items():
            settings = SamplingSettings(temperature=args.temperature, **filters)
            how = RowSampling.of([settings] * args.rows, CPU)
            ways = {
                name: partial(sampler.sample, logits, keys, positions, how)
                for name, sampler in (("whole rows", whole), ("by row", by_row))
            }
            same = all(map(torch.equal, *(draw() for draw in ways.values())))
            runs = {name: partial(_run, draw) for name, draw in ways.items()}
            timings = interleave(runs, args.rounds)
            least = {f"{name}, ms": round(1e3 * each.min_s, 1) for name, each in timings.items()}
            lines.append({"logits": kind, "filter": label, **least, "same bits": same})
    print(table(lines, list(lines[0])))
    finish("sampling", {"settings": vars(args), "rows": lines})


def _run(draw: Callable[[], object]) -> None:
    draw()  # timed from outside


if __name__ == "__main__":
    main()
