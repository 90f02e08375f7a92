"""A process reward model over `transformers` that re-encodes whole paths, as usual elsewhere.

Reads the same folder as Beamwright's verifier: `verifier.yaml`, the head's weights, the backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoTokenizer

from beamwright.verify import load_spec
from benchmarks.peers.adapters.transformers_loops import load_model

_BATCH_TOKENS = 8192
_EVERY_TOKEN = ("token_mlp", "every_token", "sigmoid", "prod", "prod")
_LAST_TOKEN = ("linear", "step_end", "sigmoid", "last", "last")


class ReencodingPrm:
    """Scores whole paths in padded batches; a path's score is its verifier's aggregate.

    Only for a `token_mlp` head read at every token with products all the way, where the
    aggregate over steps is the product over tokens, and for a `linear` head of which the value at
    the path's last token counts. num_tokens: encoded so far, padding not counted.
    """

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        spec = load_spec(folder)
        kind = (spec.head.kind, spec.read, spec.activation, spec.combine, spec.aggregate)
        if kind not in (_EVERY_TOKEN, _LAST_TOKEN):
            raise SystemExit(f"{folder}: this peer reads no {kind} verifier")
        self._spec, self._reads_last = spec, kind == _LAST_TOKEN
        self._model = load_model(folder, dtype)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        tensors = load_file(folder / str(spec.head.file))
        self._layers = [
            (tensors[f"layers.{i}.weight"].float(), tensors[f"layers.{i}.bias"].float())
            for i in range(len(tensors) // 2)
        ]
        self.num_tokens = 0

    @torch.inference_mode()
    def score(self, problem: str, texts: Sequence[str]) -> list[float]:
        """One score per path's text."""
        prefix = (self._spec.template.prefix or "").replace("{problem}", problem)
        coded = self._tokenizer(
            [prefix + text for text in texts], add_special_tokens=False, return_offsets_mapping=True
        )
        rows = list(zip(coded["input_ids"], coded["offset_mapping"], strict=True))
        firsts = [sum(end <= len(prefix) for _, end in spans) for _, spans in rows]
        self.num_tokens += sum(len(ids) for ids, _ in rows)
        longest = max(len(ids) for ids, _ in rows)
        size = max(1, _BATCH_TOKENS // longest)
        scores: list[float] = []
        for start in range(0, len(rows), size):
            ids = [ids for ids, _ in rows[start : start + size]]
            scores += self._score_batch(ids, firsts[start : start + size])
        return scores

    def _score_batch(self, ids: list[list[int]], firsts: list[int]) -> list[float]:
        longest = max(map(len, ids))
        # Padding comes last: under causal attention no real token sees it, so no mask.
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        hidden = self._model.model(tokens, use_cache=False).last_hidden_state
        if self._reads_last:
            ends = torch.tensor([len(row) - 1 for row in ids])
            last = hidden[torch.arange(len(ids)), ends].float()
            return F.linear(last, *self._layers[0]).squeeze(-1).sigmoid().tolist()
        values = self._values(hidden, tokens)
        at = torch.arange(1, longest)
        lengths = torch.tensor([len(row) for row in ids]).unsqueeze(1)
        read = (at >= torch.tensor(firsts).unsqueeze(1)) & (at < lengths)
        return values.masked_fill(~read, 1.0).prod(dim=1).tolist()

    def _values(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """P(token right | prefix right) of tokens 1.. as [rows, tokens - 1]."""
        previous, chosen = hidden[:, :-1], tokens[:, 1:]
        logprobs = self._model.lm_head(previous).log_softmax(-1)
        own = logprobs.gather(-1, chosen.unsqueeze(-1))
        parts = {
            "previous_hidden": lambda: previous,
            "token_embedding": lambda: self._model.model.embed_tokens(chosen),
            "logprob": lambda: own,
            "entropy": lambda: -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
            "gap": lambda: logprobs.amax(-1, keepdim=True) - own,
        }
        x = torch.cat([parts[name]() for name in self._spec.head.features], dim=-1)
        for number, (weight, bias) in enumerate(self._layers):
            x = F.linear(F.gelu(x) if number else x, weight, bias)
        return x.squeeze(-1).sigmoid()
