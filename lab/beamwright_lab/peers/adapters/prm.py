"""A process reward model that encodes whole paths in every call, as other engines do.

It reads the folder of Beamwright's verifier: `verifier.yaml`, the head's weights, the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoTokenizer

from beamwright.verify.family import load_spec
from beamwright.verify.spec import VerifierSpec
from beamwright_lab.peers.adapters.transformers_loops import load_model

_BATCH_TOKENS = 8192
_EVERY_TOKEN = ("token_mlp", "every_token", "sigmoid", "prod", "prod")


class ReencodingPrm:
    """A verifier that scores whole paths in padded batches.

    It supports only a `token_mlp` head read at every token, with products as combination and
    aggregate: a path's score is the product over its tokens.

    num_tokens: tokens encoded so far, without padding.
    """

    def __init__(self, folder: Path) -> None:
        spec = load_spec(folder)
        if not isinstance(spec, VerifierSpec):
            raise SystemExit(f"{folder}: judge models are not supported here")
        kind = (spec.head.kind, spec.read, spec.activation, spec.combine, spec.aggregate)
        if kind != _EVERY_TOKEN:
            raise SystemExit(f"{folder}: verifier kind {kind} is not supported here")
        self._spec = spec
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.num_tokens = 0
        self._model = load_model(folder)
        tensors = load_file(folder / str(self._spec.head.file))
        output = self._model.get_output_embeddings().weight
        words = self._model.get_input_embeddings().weight
        self._head = _TokenHead(tensors, self._spec.head.features, words, output)

    def score(self, problem: str, texts: Sequence[str]) -> list[float]:
        """Return one score for each path's text."""
        prefix = (self._spec.template.prefix or "").replace("{problem}", problem)
        coded = self._tokenizer(
            [prefix + text for text in texts], add_special_tokens=False, return_offsets_mapping=True
        )
        rows = list(zip(coded["input_ids"], coded["offset_mapping"], strict=True))
        firsts = [sum(end <= len(prefix) for _, end in spans) for _, spans in rows]
        return self._score_rows([ids for ids, _ in rows], firsts)

    @torch.inference_mode()
    def _score_rows(self, rows: list[list[int]], firsts: list[int]) -> list[float]:
        self.num_tokens += sum(map(len, rows))
        size = max(1, _BATCH_TOKENS // max(map(len, rows)))
        scores: list[float] = []
        for start in range(0, len(rows), size):
            end = start + size
            scores += self._score_batch(rows[start:end], firsts[start:end])
        return scores

    def _score_batch(self, ids: list[list[int]], firsts: list[int]) -> list[float]:
        longest = max(map(len, ids))
        # No mask: padding comes last, so under causal attention no real token sees it.
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        hidden = self._model.model(tokens, use_cache=False).last_hidden_state
        values = self._head(hidden[:, :-1], tokens[:, 1:])
        at = torch.arange(1, longest)
        lengths = torch.tensor([len(row) for row in ids]).unsqueeze(1)
        read = (at >= torch.tensor(firsts).unsqueeze(1)) & (at < lengths)
        return values.masked_fill(~read, 1.0).prod(dim=1).tolist()


class _TokenHead:
    """The bundled verifier's score head: P(token correct | prefix correct).

    tensors: `layers.0.weight`, `layers.0.bias`, ...
    words, output: token embedding and LM head, [vocabulary, hidden] each.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        features: Sequence[str],
        words: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self._features, self._words, self._output = tuple(features), words, output
        self._layers = [
            (tensors[f"layers.{i}.weight"].float(), tensors[f"layers.{i}.bias"].float())
            for i in range(len(tensors) // 2)
        ]

    def __call__(self, previous: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [...] of tokens `chosen` [...].

        previous: hidden states [..., hidden] of the token before each.
        """
        logprobs = F.linear(previous, self._output).log_softmax(-1)
        own = logprobs.gather(-1, chosen.unsqueeze(-1))
        parts = {
            "previous_hidden": lambda: previous,
            "token_embedding": lambda: F.embedding(chosen, self._words),
            "logprob": lambda: own,
            "entropy": lambda: -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
            "gap": lambda: logprobs.amax(-1, keepdim=True) - own,
        }
        x = torch.cat([parts[name]() for name in self._features], dim=-1)
        for number, (weight, bias) in enumerate(self._layers):
            x = F.linear(F.gelu(x) if number else x, weight, bias)
        return x.squeeze(-1).sigmoid()
