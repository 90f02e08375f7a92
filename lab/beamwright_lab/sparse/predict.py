"""What predicts the next query: tokens selected, attention mass kept, and what the logits lose.

The bundled generator on `bundled:test`'s problems and its own greedy answers, joined to 480 tokens;
teacher-forced. Every predictor selects an eighth of the visible tokens for each KV head, 4 sinks
and the 12 newest inside, by scores that are softmaxed for each head and averaged over its group;
the rest is masked. `exact` scores with the true query (Eq. 8), `ahead` with the query that the
layer would have if the layers so far back changed nothing: the same token, another layer. The first
layers, which have none so far back, then attend to all, and so they do for `exact` beside it.
Overlap is AsyncSpade's Eq. 1, against `exact`. `pre` is before rotary positions: queries are turned
back, predicted, and turned to where they will be. `pages of P` has the true query and scores whole
pages of P keys by Quest's bound (one that is not yet full: its keys); "x 4": keys among four times
as many tokens, which bounds have chosen.

With `--model ledger` the ledger's model on ledgers and their right solutions, each variant by
itself: the prompt's tokens attend to all, those of the solution select, and are measured; "look-ups
right" are the digits looked up that still have the largest logit.

    python -m beamwright_lab.sparse.predict --windows 4 8 16 32
    python -m beamwright_lab.sparse.predict --model ledger --sequences 2
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from beamwright import Solver
from beamwright.evaluate import load_problems
from beamwright.models.decoder import Decoder
from beamwright.sparse import PREDICTORS, overlap
from beamwright.sparse.predict import asyncspade
from beamwright_lab.common import finish, say, table
from beamwright_lab.sparse.ledger import MODEL, load_maker

TOKENS, FIRST, SINKS, RECENT = 480, 96, 4, 12
COLUMNS = (
    "text", "predictor", "frame", "window", "overlap", "mass kept", "KL of logits",
    "same top token", "look-ups right",
)  # fmt: skip
Queries = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a layer, its queries [tokens, heads, dim] and residuals so far to what is scored with."""


@dataclass(frozen=True)
class Text:
    """Tokens [count] to force on a model.

    first: the first that is measured. whole: tokens in front that attend to all. look_ups: tokens
    that repeat a digit from far before.
    """

    tokens: torch.Tensor
    first: int = FIRST
    whole: int = 0
    look_ups: tuple[int, ...] = ()


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
        self, decoder: Decoder, queries: Queries | None, share: float, first_layer: int = 0,
        page: int = 1, candidates: int = 1,
    ) -> None:  # fmt: skip
        """page: keys that share a bound. candidates: times the share that bounds choose."""
        self.first_layer, self.page, self.candidates = first_layer, page, candidates
        self.decoder, self.queries, self.share = decoder, queries, share
        self.residuals: list[torch.Tensor] = []
        self.overlaps: list[float] = []
        self.masses: list[float] = []
        self._before = decoder._before

    def __call__(self, text: Text) -> torch.Tensor:
        """Logits [tokens, vocab]."""
        token_ids, self.text, self.residuals = text.tokens, text, []
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
            mask = self._selected(guess, keys)
            best = chosen(true, shape.kv_heads, self.share)
            first = self.text.first
            self.overlaps.append(float(overlap(mask, best)[:, first:].mean()))
            mask[:, : self.text.whole] = True  # but for the future, whose scores are -inf
            per_head = mask.repeat_interleave(group, 0)
            self.masses.append(float((true * per_head).sum(-1)[:, first:].mean()))
            true = scores.masked_fill(~per_head, -torch.inf).softmax(-1)
        return (true @ values).transpose(0, 1)

    def _selected(self, guess: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Masks [kv_heads, tokens, tokens]."""
        kv_heads = self.decoder.shape.kv_heads
        own = self._scores(guess, keys)
        if self.page == 1:
            return chosen(own.softmax(-1), kv_heads, self.share)
        bounds = self._bounds(guess, keys, own)
        mask = chosen(bounds.softmax(-1), kv_heads, self.share * self.candidates)
        if self.candidates == 1:
            return mask
        among = mask.repeat_interleave(len(own) // kv_heads, 0)
        return chosen(own.masked_fill(~among, -torch.inf).softmax(-1), kv_heads, self.share)

    def _bounds(self, guess: torch.Tensor, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Scores [heads, tokens, tokens]: of full pages their bounds, of the others their keys'."""
        query, count = guess.transpose(0, 1), keys.shape[1]
        full = count - count % self.page
        pages = keys[:, :full].unflatten(1, (-1, self.page))
        rising, falling = query.clamp_min(0), query.clamp_max(0)
        bounds = rising @ pages.amax(2).mT + falling @ pages.amin(2).mT
        bounds = bounds.repeat_interleave(self.page, -1) / math.sqrt(query.shape[-1])
        place = torch.arange(full)
        there = place - place % self.page + self.page - 1 <= torch.arange(count)[:, None]
        scores = own.clone()
        scores[..., :full] = torch.where(there, bounds, own[..., :full])
        return scores

    def _scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf)


def sequences(solver: Solver, count: int) -> list[Text]:
    """Problems with greedy answers, joined to so many tokens each."""
    codec, texts = solver._loaded.codec, list[list[int]]()
    for each in load_problems("bundled:test", 16 * count).problems:
        solution = solver.solve(each.problem)
        texts.append(codec.encode(f"{each.problem}\n{solution.candidates[0].text}\n\n"))
    joined = [token for tokens in texts for token in tokens]
    assert len(joined) >= count * TOKENS, len(joined)
    return [Text(torch.tensor(joined[i * TOKENS : (i + 1) * TOKENS])) for i in range(count)]


def ledgers(tokens: int, count: int, announced: bool) -> list[Text]:
    """Ledgers of so many tokens at most, with their right solutions."""
    maker, found = load_maker(), list[Text]()
    ids = {token: index for index, token in enumerate(maker.vocabulary())}
    for each in maker.ledgers(tokens, count, announced, 0):
        prompt, solution = maker.prompt_pieces(each), maker.solution_pieces(each)
        look_ups = tuple(
            len(prompt) + place
            for place, (_, role) in enumerate(solution)
            if role.lstrip("|") == "look-up"
        )
        pieces = torch.tensor([ids[piece] for piece, _ in (*prompt, *solution)])
        found.append(Text(pieces, len(prompt) - 1, len(prompt) - 1, look_ups))
    return found


def row(
    name: str, frame: str, window: int | None, forward: Forward, found: Sequence[Text],
    full: Sequence[torch.Tensor],
) -> dict[str, Any]:  # fmt: skip
    """What one predictor keeps over all sequences."""
    losses, same, looked_up = [], [], list[bool]()
    for text, reference in zip(found, full, strict=True):
        every = forward(text)
        top = every.argmax(-1)
        looked_up += [bool(top[place - 1] == text.tokens[place]) for place in text.look_ups]
        logits = every[text.first :].log_softmax(-1)
        true = reference[text.first :].log_softmax(-1)
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
        "look-ups right": round(sum(looked_up) / len(looked_up), 3) if looked_up else None,
    }
    say(*shown.values())
    return shown


def rows(
    decoder: Decoder, found: Sequence[Text], windows: Sequence[int], share: float
) -> list[dict[str, Any]]:
    """Every predictor on the same texts."""
    full = [Forward(decoder, None, 1.0)(text) for text in found]
    make = partial(Forward, decoder, share=share)
    result = [row("exact", "-", None, make(queries=exact), found, full)]
    for distance in (1, 2, 3):
        for name, queries in (("exact", exact), ("ahead", ahead(decoder, distance))):
            forward = make(queries=queries, first_layer=distance)
            result.append(row(f"{name}, {distance}", "-", None, forward, found, full))
    for page in (4, 8, 16):
        for candidates, name in ((1, f"pages of {page}"), (4, f"pages of {page}, x 4")):
            forward = make(queries=exact, page=page, candidates=candidates)
            result.append(row(name, "-", None, forward, found, full))
    named = {**PREDICTORS, "ridge, sign -": partial(asyncspade, sign=-1.0)}
    named["ridge, no softmax"] = partial(asyncspade, softmax=False)
    for frame in ("post", "pre"):
        for name, predict in named.items():
            for window in windows if name != "last" else [1]:
                guess = predicted(decoder, predict, window, frame)
                result.append(row(name, frame, window, make(queries=guess), found, full))
    return result


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=["bundled", "ledger"], default="bundled")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--sequences", type=int, default=6, help="of the ledger: each variant's")
    parser.add_argument("--tokens", type=int, default=960, help="of a ledger, at most")
    parser.add_argument("--share", type=float, default=0.125)
    args = parser.parse_args()
    options: dict[str, Any] = {"search": "best-of-n", "n": 1, "temperature": 0.0}
    is_ledger = args.model == "ledger"
    names = (MODEL, "none") if is_ledger else ("bundled", "bundled")
    with Solver(model=names[0], verifier=names[1], **options) as solver:
        decoder = solver.generator.decoder
        if is_ledger:
            texts = {
                name: ledgers(args.tokens, args.sequences, name == "announced")
                for name in ("plain", "announced")
            }
        else:
            texts = {"bundled:test": sequences(solver, args.sequences)}
        found = [
            {"text": name, **each}
            for name, some in texts.items()
            for each in rows(decoder, some, args.windows, args.share)
        ]
    say(table(found, COLUMNS))
    finish(f"sparse_predict{'_ledger' if is_ledger else ''}", {"rows": found})


if __name__ == "__main__":
    main()
