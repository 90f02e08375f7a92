"""What predicts the next query: tokens selected, attention mass kept, and what the logits lose.

The bundled generator on `bundled:test`'s problems and its own greedy answers, joined to 480 tokens;
teacher-forced. Every predictor selects an eighth of the visible tokens for each KV head, 4 sinks
and the 12 newest inside, by scores that are softmaxed for each head and averaged over its group;
the rest is masked. `exact` scores with the true query (Eq. 8), `ahead` with the query that the
layer would have if the layers so far back changed nothing: the same token, another layer. The first
layers, which have none so far back, then attend to all, and so they do for `exact` beside it.
Overlap is AsyncSpade's Eq. 1, against `exact`. `pre` is before rotary positions: queries are turned
back, predicted, and turned to where they will be.

    python -m benchmarks.sparse.predict --windows 4 8 16 32
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from beamwright import Solver
from beamwright.evaluate import load_problems
from beamwright.models.decoder import Decoder
from beamwright.sparse import PREDICTORS, overlap
from beamwright.sparse.predict import asyncspade
from benchmarks.common import finish, say, table

TOKENS, FIRST, SINKS, RECENT = 480, 96, 4, 12
COLUMNS = ("predictor", "frame", "window", "overlap", "mass kept", "KL of logits", "same top token")
Queries = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a layer, its queries [tokens, heads, dim] and residuals so far to what is scored with."""


def turned(decoder: Decoder, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions added to [tokens, heads, dim]; negative ones take them away."""
    sign = torch.where(positions < 0, -1.0, 1.0)[:, None, None]
    cos = decoder._cos[positions.abs()].unsqueeze(1)
    sin = decoder._sin[positions.abs()].unsqueeze(1) * sign
    return values * cos + values.roll(values.shape[-1] // 2, -1) * sin


def predicted(
    decoder: Decoder, predict: Callable[[torch.Tensor], torch.Tensor], window: int, frame: str
) -> Queries:
    """Each token's query from those of the tokens before it."""

    def queries(layer: int, query: torch.Tensor, residuals: torch.Tensor) -> torch.Tensor:
        del layer, residuals
        count = len(query)
        positions = torch.arange(count)
        values = turned(decoder, query, -positions) if frame == "pre" else query
        found = query.clone()  # the first tokens, which are not measured, know their own
        # [tokens, heads, window + 1, dim]: the newest is the token before.
        spans = values.transpose(0, 1).unfold(1, window + 1, 1).transpose(2, 3).transpose(0, 1)
        found[window + 1 :] = predict(spans[: count - window - 1])
        if frame == "pre":
            found[window + 1 :] = turned(decoder, found[window + 1 :], positions[window + 1 :])
        return found

    return queries


def ahead(decoder: Decoder, distance: int) -> Queries:
    """The layer's query from the residual of the layer so many before it."""

    def queries(layer: int, query: torch.Tensor, residuals: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(query))
        rotary = decoder._cos[positions].unsqueeze(1), decoder._sin[positions].unsqueeze(1)
        found = decoder._before(decoder.weights.layers[layer], residuals[layer - distance], *rotary)
        return found[0]

    return queries


def exact(layer: int, query: torch.Tensor, residuals: torch.Tensor) -> torch.Tensor:
    """The true query."""
    del layer, residuals
    return query


def chosen(scores: torch.Tensor, kv_heads: int, share: float) -> torch.Tensor:
    """Masks [kv_heads, tokens, tokens] of what each token selects, from probabilities of heads."""
    count = scores.shape[-1]
    pooled = scores.unflatten(0, (kv_heads, -1)).mean(1)
    token, visible = torch.arange(count)[:, None], torch.arange(count)[None]
    forced = (visible < SINKS) | (visible > token - RECENT)
    causal = visible <= token
    pooled = torch.where(forced & causal, 2.0, pooled).masked_fill(~causal, -1.0)
    budget = (share * torch.arange(1, count + 1)).ceil().clamp_min(SINKS + RECENT)
    rank = pooled.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (rank < budget[:, None]) & causal


class Forward:
    """One teacher-forced pass with a selection, and what was seen of it."""

    def __init__(
        self, decoder: Decoder, queries: Queries | None, share: float, first_layer: int = 0
    ) -> None:
        self.first_layer = first_layer
        self.decoder, self.queries, self.share = decoder, queries, share
        self.residuals: list[torch.Tensor] = []
        self.overlaps: list[float] = []
        self.masses: list[float] = []
        self._before = decoder._before

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab]."""
        self.residuals = []
        self.decoder._before = self._note  # type: ignore[method-assign]
        try:
            hidden = self.decoder.hidden(token_ids, torch.arange(len(token_ids)), self)
        finally:
            self.decoder._before = self._before  # type: ignore[method-assign]
        return self.decoder.logits(hidden)

    def _note(self, layer: Any, x: torch.Tensor, *rotary: torch.Tensor) -> Any:
        self.residuals.append(x)
        return self._before(layer, x, *rotary)

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Contexts [tokens, heads, dim] of one sequence; `View`."""
        shape = self.decoder.shape
        group = shape.heads // shape.kv_heads
        keys, values = (
            each.repeat_interleave(group, 1).transpose(0, 1) for each in key_value.unbind(1)
        )
        scores = self._scores(query, keys)
        true = scores.softmax(-1)
        if self.queries is not None and layer >= self.first_layer:
            self.decoder._before = self._before  # type: ignore[method-assign]
            guess = self.queries(layer, query, self.residuals)  # type: ignore[arg-type]
            self.decoder._before = self._note  # type: ignore[method-assign]
            mask = chosen(self._scores(guess, keys).softmax(-1), shape.kv_heads, self.share)
            best = chosen(true, shape.kv_heads, self.share)
            self.overlaps.append(float(overlap(mask, best)[:, FIRST:].mean()))
            per_head = mask.repeat_interleave(group, 0)
            self.masses.append(float((true * per_head).sum(-1)[:, FIRST:].mean()))
            true = scores.masked_fill(~per_head, -torch.inf).softmax(-1)
        return (true @ values).transpose(0, 1)

    def _scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf)


def sequences(solver: Solver, count: int) -> list[torch.Tensor]:
    """Problems with greedy answers, joined to so many tokens each."""
    codec, texts = solver._loaded.codec, list[list[int]]()
    for each in load_problems("bundled:test", 16 * count).problems:
        solution = solver.solve(each.problem)
        texts.append(codec.encode(f"{each.problem}\n{solution.candidates[0].text}\n\n"))
    joined = [token for tokens in texts for token in tokens]
    assert len(joined) >= count * TOKENS, len(joined)
    return [torch.tensor(joined[i * TOKENS : (i + 1) * TOKENS]) for i in range(count)]


def row(
    name: str, frame: str, window: int | None, forward: Forward, found: Sequence[torch.Tensor],
    full: Sequence[torch.Tensor],
) -> dict[str, Any]:  # fmt: skip
    """What one predictor keeps over all sequences."""
    losses, same = [], []
    for tokens, reference in zip(found, full, strict=True):
        logits = forward(tokens)[FIRST:].log_softmax(-1)
        true = reference[FIRST:].log_softmax(-1)
        losses.append(float(F.kl_div(logits, true, log_target=True, reduction="batchmean")))
        same.append(float((logits.argmax(-1) == true.argmax(-1)).float().mean()))
    mean = [
        sum(each) / max(1, len(each)) for each in (forward.overlaps, forward.masses, losses, same)
    ]
    shown = {
        "predictor": name,
        "frame": frame,
        "window": window,
        "overlap": round(mean[0], 3),
        "mass kept": round(mean[1], 3),
        "KL of logits": round(mean[2], 4),
        "same top token": round(mean[3], 3),
    }
    say(*shown.values())
    return shown


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.125)
    args = parser.parse_args()
    options = {"search": "best-of-n", "n": 1, "temperature": 0.0}
    with Solver(model="bundled", verifier="bundled", **options) as solver:
        found = sequences(solver, args.sequences)
        decoder = solver.generator.decoder
        full = [Forward(decoder, None, 1.0)(tokens) for tokens in found]
        make = partial(Forward, decoder, share=args.share)
        rows = [row("exact", "-", None, make(queries=exact), found, full)]
        for distance in (1, 2, 3):
            for name, queries in (("exact", exact), ("ahead", ahead(decoder, distance))):
                forward = make(queries=queries, first_layer=distance)
                rows.append(row(f"{name}, {distance}", "-", None, forward, found, full))
        named = {**PREDICTORS, "ridge, sign -": partial(asyncspade, sign=-1.0)}
        named["ridge, no softmax"] = partial(asyncspade, softmax=False)
        for frame in ("post", "pre"):
            for name, predict in named.items():
                for window in args.windows if name != "last" else [1]:
                    guess = predicted(decoder, predict, window, frame)
                    rows.append(row(name, frame, window, make(queries=guess), found, full))
    say(table(rows, COLUMNS))
    finish("sparse_predict", {"rows": rows})


if __name__ == "__main__":
    main()
