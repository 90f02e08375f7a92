"""Measure AsyncSpade's premise (Figures 4 and 5): do queries of nearby tokens select the same keys?

For each token, the true query selects an eighth of the keys before it. The overlap (Eq. 1) of this
selection is measured with those of other queries: of earlier tokens, predicted by `asyncspade` in
each reading of its equations, and predicted from one window of 16 tokens, shifted by one token or
not (Figure 5). Random selections overlap by an eighth. Overlaps are means over heads and the tokens
of the solution. Queries include rotary positions and come from one pass over problem and correct
solution. No token is always selected. The two models are the ledger's and the bundled generator.

    python -m beamwright_lab.sparse.locality
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import beamwright
from beamwright.sparse.predict import weigh
from beamwright.sparse.rule import WINDOW
from beamwright_lab.baselines import weigh_as_printed, weigh_by_ridge
from beamwright_lab.common import fingerprint, finish, say, table
from beamwright_lab.sparse.ledger import MODEL, load_maker

BUNDLED = Path(beamwright.__file__).parent / "bundled"
SHARE = 1 / 8
DISTANCES = (1, 16)
READINGS = {"text": weigh, "printed": weigh_as_printed, "ridge": weigh_by_ridge}
# Prompt, and the solution whose tokens count.
Text = tuple[str, str]


class Probe:
    """An attention function for `transformers` that records each layer's queries and keys.

    layers: (queries, keys), each [heads, tokens, dim], keys repeated to the number of query heads.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        self.layers.append((query[0], key[0]))
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.transpose(1, 2), None


def ledger_texts(num: int, tokens: int) -> Iterator[Text]:
    maker = load_maker()
    for ledger in maker.ledgers(tokens, num, False, 0):
        prompt = "".join(text for text, _ in maker.prompt_pieces(ledger))
        yield prompt, "".join(text for text, _ in maker.solution_pieces(ledger))


def bundled_texts(num: int) -> Iterator[Text]:
    lines = (BUNDLED / "test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[:num]:
        found = json.loads(line)
        yield f"<|bos|>{found['problem']}\n\n", found["solution"]


def select_keys(query: torch.Tensor, keys: torch.Tensor, first: int) -> torch.Tensor:
    """Return masks [heads, tokens, keys] of the best-scored eighth of the keys before each token.

    query: [heads, tokens, dim], of the tokens from `first` on.
    keys: [heads, all tokens, dim].
    """
    tokens = range(first, first + query.shape[1])
    behind = torch.arange(keys.shape[1]) >= torch.tensor(tokens)[:, None]
    scores = (query @ keys.transpose(-1, -2)).masked_fill(behind, -torch.inf)
    counts = torch.tensor([max(1, round(SHARE * token)) for token in tokens])
    best = scores.topk(int(counts.max()), dim=-1).values
    last = (counts - 1)[None, :, None].expand(len(scores), -1, -1)
    return scores >= best.gather(-1, last)


def overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the overlap of two selections (Eq. 1), the mean over heads and tokens."""
    return float(((one & other).sum(-1) / other.sum(-1)).mean())


def guess_queries(query: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """Return replacements [heads, tokens, dim] of the queries from token `first` on, by column."""
    windows = query[:, first - WINDOW - 1 :].unfold(1, WINDOW + 1, 1).transpose(-1, -2)
    before, itself = windows[:, :-1], windows[:, 1:]
    count = query.shape[1] - first
    found = {f"{d} before": query[:, first - d :][:, :count] for d in DISTANCES}
    for reading, weigh_by in READINGS.items():
        weights = weigh_by(windows)  # for every token, from all windows before it
        newest_first = before[..., 1:, :].flip(-2)
        found[f"predicted, {reading}"] = (weights[:, :-1] @ newest_first).mean(-2)
        # Figure 5: one window of 16 tokens, with weights of the previous token, and of the token.
        found[f"shifted, {reading}"] = (weights[:, :-1] @ newest_first)[..., -1, :]
        own = weights[:, 1:] @ itself[..., :-1, :].flip(-2)
        found[f"not shifted, {reading}"] = own[..., -1, :]
    return found


def overlaps(query: torch.Tensor, key: torch.Tensor, first: int) -> dict[str, float]:
    """Return one layer's overlaps by column, means over the tokens from `first` on.

    query, key: [heads, tokens, dim].
    """
    begin = max(first, WINDOW + 2, max(DISTANCES) + 1)
    true = select_keys(query[:, begin:], key, begin)
    found = guess_queries(query, begin)
    return {name: overlap(select_keys(guess, key, begin), true) for name, guess in found.items()}


@torch.inference_mode()
def rows_of(name: str, folder: Path, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Run a model over texts; return a row per layer, means over the texts."""
    probe = Probe()
    AttentionInterface.register("probe", probe)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="probe", dtype=torch.float32
    )
    found: list[list[dict[str, float]]] = []
    for prompt, solution in texts:
        read, written = (tokenizer.encode(text) for text in (prompt, solution))
        probe.layers.clear()
        model(torch.tensor([read + written]))
        found.append([overlaps(*layer, first=len(read)) for layer in probe.layers])
    rows = []
    for number in range(len(found[0])):
        row: dict[str, Any] = {"model": name, "texts": len(texts), "layer": number}
        for column in found[0][number]:
            row[column] = round(sum(each[number][column] for each in found) / len(found), 3)
        rows.append(row)
        say("  ", *row.values())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ledgers", type=int, default=2, help="problems of the ledger model")
    parser.add_argument("--tokens", type=int, default=960, help="length of a ledger problem")
    parser.add_argument("--problems", type=int, default=32, help="of the bundled generator")
    args = parser.parse_args()
    rows = rows_of("ledger", MODEL, list(ledger_texts(args.ledgers, args.tokens)))
    generator = BUNDLED / "generator"
    rows += rows_of("bundled", generator, list(bundled_texts(args.problems)))
    say(table(rows, list(rows[0])))
    models = {"ledger": fingerprint(MODEL), "bundled": fingerprint(generator)}
    finish("sparse_locality", {"models": models, "share": SHARE, "rows": rows})


if __name__ == "__main__":
    main()
