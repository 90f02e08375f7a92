"""The process reward model: a language model with a small head that reads every token.

For token y_i the head sees the hidden state (after the final norm) at i-1, the embedding of y_i,
its log-probability, the entropy of the prediction and the gap to the best token, and gives
P(y_i right | everything before it right). A step's score is the product over its tokens, a path's
score the product over its steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from make_tokenizer import BOS, prompt_text
from model import Decoder, load, save

HEAD_FILE = "verifier_head.safetensors"
SPEC = f"""name: beamwright-prm
template:
  prefix: "{BOS}{{problem}}\\n\\n"
  step_suffix: ""
read: every_token
head:
  kind: token_mlp
  file: {HEAD_FILE}
  features: [previous_hidden, token_embedding, logprob, entropy, gap]
activation: sigmoid
combine: prod
aggregate: prod
"""


class Head(nn.Module):
    """The MLP over a token's features; gives a logit."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        logit: Tensor = self.layers[-1](x).squeeze(-1)
        return logit


@dataclass
class Verifier:
    """A backbone with its head."""

    backbone: Decoder
    head: Head

    def features(self, ids: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Features and log-probabilities of the tokens where `read`; ids: (batch, time)."""
        chosen = read[:, 1:]
        previous = self.backbone(ids[:, :-1])[chosen]
        token = ids[:, 1:][chosen]
        log_p = self.backbone.logits(previous).log_softmax(-1)
        own = log_p.gather(1, token[:, None])
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        gap = log_p.amax(-1, keepdim=True) - own
        embedding = self.backbone.model.embed_tokens(token)
        return torch.cat([previous, embedding, own, entropy, gap], dim=-1), own[:, 0]


def new_verifier(folder: Path) -> Verifier:
    """A backbone from a folder, with a fresh head."""
    backbone = load(folder)
    width = 2 * backbone.shape.hidden_size + 3
    return Verifier(backbone, Head((width, 128, 64, 1)))


def save_verifier(verifier: Verifier, folder: Path, special: tuple[int, int, int]) -> None:
    """Write the backbone, the head and verifier.yaml."""
    save(verifier.backbone, folder, special)
    weights = {
        name: t.detach().half().contiguous() for name, t in verifier.head.state_dict().items()
    }
    save_file(weights, folder / HEAD_FILE)
    (folder / "verifier.yaml").write_text(SPEC, encoding="utf-8")


def load_verifier(folder: Path) -> Verifier:
    """Read what `save_verifier` wrote, into float32."""
    weights = {name: t.float() for name, t in load_file(folder / HEAD_FILE).items()}
    num = len(weights) // 2
    sizes = [weights["layers.0.weight"].shape[1]]
    sizes += [weights[f"layers.{i}.weight"].shape[0] for i in range(num)]
    head = Head(tuple(sizes))
    head.load_state_dict(weights)
    return Verifier(load(folder), head)


@dataclass(frozen=True)
class Encoded:
    """A path as the verifier reads it; `ends` are the solution tokens' end characters."""

    ids: list[int]
    num_prompt: int
    ends: list[int]


def encode_paths(
    tokenizer: PreTrainedTokenizerFast, problems: list[str], texts: list[str]
) -> list[Encoded]:
    """The canonical encoding of each problem with its solution text."""
    prompts = [prompt_text(p) for p in problems]
    both = [p + t for p, t in zip(prompts, texts, strict=True)]
    coded = tokenizer(both, return_offsets_mapping=True)
    paths = []
    for prompt, ids, offsets in zip(
        prompts, coded["input_ids"], coded["offset_mapping"], strict=True
    ):
        num = sum(1 for _, end in offsets if end <= len(prompt))
        ends = [end - len(prompt) for _, end in offsets[num:]]
        paths.append(Encoded(list(ids), num, ends))
    return paths


def pad_batch(paths: list[Encoded], pad: int) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and which of them belong to a solution."""
    width = max(len(p.ids) for p in paths)
    ids = torch.full((len(paths), width), pad)
    read = torch.zeros(len(paths), width, dtype=torch.bool)
    for row, path in enumerate(paths):
        ids[row, : len(path.ids)] = torch.tensor(path.ids)
        read[row, path.num_prompt : len(path.ids)] = True
    return ids, read


@torch.no_grad()
def score_tokens(
    verifier: Verifier, paths: list[Encoded], pad: int, batch_tokens: int = 16384
) -> list[tuple[list[float], list[float]]]:
    """Per path: log P(right) of each solution token, and its log-probability."""
    order = sorted(range(len(paths)), key=lambda i: len(paths[i].ids))
    results: list[tuple[list[float], list[float]]] = [([], []) for _ in paths]
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and (end + 1 - begin) * len(paths[order[end]].ids) <= batch_tokens:
            end += 1
        part = order[begin:end]
        ids, read = pad_batch([paths[i] for i in part], pad)
        features, own = verifier.features(ids, read)
        logits = verifier.head(features)
        counts = [len(paths[i].ids) - paths[i].num_prompt for i in part]
        right = torch.split(F.logsigmoid(logits), counts)
        for index, a, b in zip(part, right, torch.split(own, counts), strict=True):
            results[index] = (a.tolist(), b.tolist())
        begin = end
    return results
