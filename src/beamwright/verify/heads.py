"""Heads: hidden states to one value per token. Each follows `spec.Head`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from beamwright.errors import InputError
from beamwright.models import LoadedModel, TextCodec
from beamwright.models.decoder import Decoder, Linear
from beamwright.models.onednn import prepack
from beamwright.models.weights import check_finite, read_tensors
from beamwright.verify.spec import Head, VerifierSpec


class ValueHead(Protocol):
    """Values of chosen tokens.

    hidden: [tokens, embed_dim] of one step's encoding, in order; token_ids [tokens] likewise;
    at: indices of the tokens to read. A head that looks back reads hidden[at - 1].
    """

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor: ...


def make_head(spec: VerifierSpec, model: LoadedModel) -> ValueHead:
    """The head that the spec declares, with its weights read.

    Raises:
        InputError: if its tokens or its weights are not there.
    """
    if spec.head.kind == "logit_pair":
        return _LogitPair(spec.head, model)
    if spec.head.kind == "token_logprob":
        return _TokenMlp(Head(kind="token_logprob", features=("logprob",)), model, [], "exp")
    layers = _read_layers(spec, model)
    if spec.head.kind == "token_mlp":
        return _TokenMlp(spec.head, model, layers, spec.activation)
    return _Stack(model.decoder, layers, spec.activation)


def _activate(values: torch.Tensor, activation: str) -> torch.Tensor:
    """[tokens, 1] or, for softmax, [tokens, 2] to [tokens]; softmax takes the second column."""
    if activation == "softmax":
        return values.softmax(-1)[:, 1]
    column = values[:, 0]
    if activation == "sigmoid":
        return column.sigmoid()
    return column.exp() if activation == "exp" else column


Layers = list[Linear]
Stored = list[tuple[torch.Tensor, torch.Tensor | None]]


class _Stack:
    """Linear layers on the hidden state, ReLU between them."""

    def __init__(self, decoder: Decoder, layers: Layers, activation: str) -> None:
        self._decoder, self._layers, self._activation = decoder, layers, activation

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        return _activate(self._decoder.by_rows(self._product, hidden[at]), self._activation)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self._layers):
            x = layer(F.relu(x) if number else x)
        return x


class _LogitPair:
    """Softmax over two rows of the LM head."""

    def __init__(self, head: Head, model: LoadedModel) -> None:
        self._decoder = model.decoder
        self._pair = [_token_of(token, model) for token in (head.bad, head.good)]

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        return _activate(self._decoder.logits(hidden[at])[:, self._pair], "softmax")


class _TokenMlp:
    """P(token right | prefix right) from the state before the token and the token itself."""

    def __init__(self, head: Head, model: LoadedModel, layers: Layers, activation: str) -> None:
        self._decoder, self._features = model.decoder, head.features
        self._layers, self._activation = layers, activation

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        previous = hidden[at - 1]
        chosen = token_ids[at]
        logprobs = self._decoder.logits(previous).float().log_softmax(-1)
        own = logprobs.gather(1, chosen.unsqueeze(1))
        parts = {
            "previous_hidden": lambda: previous,
            "token_embedding": lambda: self._decoder.weights.embedding[chosen],
            "logprob": lambda: own,
            "entropy": lambda: -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
            "gap": lambda: logprobs.amax(-1, keepdim=True) - own,
        }
        x = torch.cat([parts[name]().to(hidden.dtype) for name in self._features], dim=1)
        return _activate(self._decoder.by_rows(self._product, x), self._activation)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self._layers):
            x = layer(F.gelu(x) if number else x)
        return x


def token_id(token: str | int | None, codec: TextCodec | None, vocab: int, where: str) -> int:
    """The id of a token that is given by text or id. where: the checkpoint, for an error's words.

    Raises:
        InputError: if it is no token, or several.
    """
    if type(token) is int:
        if not 0 <= token < vocab:
            raise InputError(f"verifier {where}: there is no token {token}, of {vocab}")
        return token
    ids = codec.encode(str(token or "")) if codec else []
    if len(ids) != 1 or ids[0] >= vocab:
        raise InputError(f"verifier {where}: {token!r} is {len(ids)} tokens, not one")
    return ids[0]


def _token_of(token: str | int | None, model: LoadedModel) -> int:
    return token_id(token, model.codec, model.decoder.shape.vocab, str(model.folder))


def _read_layers(spec: VerifierSpec, model: LoadedModel) -> Layers:
    head = spec.head
    folder = model.folder or Path(".")
    where = folder if head.file is None else folder / head.file
    if head.file is not None and not where.is_file():
        raise InputError(f"verifier head {where}: no such file")
    stored = (
        _read_file(where) if head.file is not None else read_tensors(folder, _both(head.layers))
    )
    dtype, device = model.decoder.dtype, model.decoder.device
    tensors = {name: tensor.to(device, dtype) for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, stored[name], f"verifier head {where}: {name}")
    names = head.layers or _numbered(tensors)
    for name in names or ("layers.0",):
        if f"{name}.weight" not in tensors:
            raise InputError(f"verifier head {where}: no tensor named {name}.weight")
    layers = [(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names]
    _check_layers(layers, names, _head_width(head, model), str(where))
    needed, found = 2 if spec.activation == "softmax" else 1, layers[-1][0].shape[0]
    if found != needed:
        raise InputError(
            f"verifier head {where}: {names[-1]}.weight gives {found} values, and "
            f"{spec.activation} needs {needed}"
        )
    return [prepack(Linear(weight, bias)) for weight, bias in layers]


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        found: dict[str, torch.Tensor] = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise InputError(f"verifier head {file}: cannot be read ({line})") from error
    return found


def _head_width(head: Head, model: LoadedModel) -> int:
    """Values that go into the first layer."""
    shape = model.decoder.shape
    if head.kind != "token_mlp":
        return shape.embed_dim or shape.hidden
    widths = {"previous_hidden": shape.embed_dim or shape.hidden}
    widths["token_embedding"] = shape.embed_dim or shape.hidden
    return sum(widths.get(feature, 1) for feature in head.features)


def _check_layers(layers: Stored, names: Sequence[str], width: int, where: str) -> None:
    """See that each layer takes what the one before gives."""
    for name, (weight, bias) in zip(names, layers, strict=True):
        if weight.dim() != 2 or weight.shape[1] != width or not weight.shape[0]:
            shape = list(weight.shape)
            raise InputError(
                f"verifier head {where}: {name}.weight is {shape}, [outputs, {width}] is expected"
            )
        width = weight.shape[0]
        if bias is not None and list(bias.shape) != [width]:
            raise InputError(
                f"verifier head {where}: {name}.bias is {list(bias.shape)}, [{width}] is expected"
            )


def _both(layers: tuple[str, ...]) -> list[str]:
    return [f"{name}.{part}" for name in layers for part in ("weight", "bias")]


def _numbered(tensors: dict[str, torch.Tensor]) -> list[str]:
    """`layers.0`, `layers.1`, ... as far as they go."""
    count = 0
    while f"layers.{count}.weight" in tensors:
        count += 1
    return [f"layers.{number}" for number in range(count)]
