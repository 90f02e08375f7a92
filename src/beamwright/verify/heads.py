"""Heads: hidden states to one value per token. Each follows `spec.Head`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from beamwright.errors import InputError
from beamwright.models.decoder import Linear
from beamwright.models.linear import prepack
from beamwright.models.load import LoadedModel
from beamwright.models.tokenizer import TextCodec
from beamwright.models.weights import check_finite, read_tensors
from beamwright.verify.spec import Head, VerifierSpec

ValueHead = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Values of chosen tokens.

From hidden states [tokens, hidden] of one step's encoding, in order, their token ids [tokens],
and indices of the tokens to read. A head that looks back reads hidden[at - 1].
"""
_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda values: values.softmax(-1)[:, 1],  # of [tokens, 2], the second column
    "sigmoid": lambda values: values[:, 0].sigmoid(),
    "exp": lambda values: values[:, 0].exp(),
    "identity": lambda values: values[:, 0],
}


def make_head(spec: VerifierSpec, model: LoadedModel) -> ValueHead:
    """The head that the spec declares, with its weights read.

    Raises:
        InputError: if its tokens or its weights are not there.
    """
    decoder, activate = model.decoder, _ACTIVATE[spec.activation]
    if spec.head.kind == "logit_pair":
        vocab, where = decoder.shape.vocab, str(model.folder)
        pair = [token_id(t, model.codec, vocab, where) for t in (spec.head.bad, spec.head.good)]
        return lambda hidden, token_ids, at: activate(decoder.logits(hidden[at])[:, pair])
    if spec.head.kind == "token_logprob":
        return _TokenMlp(("logprob",), model, [], _ACTIVATE["exp"])
    layers = _read_layers(spec, model)
    if spec.head.kind == "token_mlp":
        return _TokenMlp(spec.head.features, model, layers, activate)
    product = _stack(layers, F.relu)
    return lambda hidden, token_ids, at: activate(decoder.by_rows(product, hidden[at]))


def _stack(
    layers: Sequence[Linear], between: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Linear layers one behind the other."""

    def product(x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(layers):
            x = layer(between(x) if number else x)
        return x

    return product


class _TokenMlp:
    """P(token right | prefix right) from the state before the token and the token itself."""

    def __init__(
        self,
        features: Sequence[str],
        model: LoadedModel,
        layers: Sequence[Linear],
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._decoder, self._features = model.decoder, features
        self._product, self._activate = _stack(layers, F.gelu), activate

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
        return self._activate(self._decoder.by_rows(self._product, x))


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


def _read_layers(spec: VerifierSpec, model: LoadedModel) -> list[Linear]:
    head = spec.head
    folder = model.folder or Path(".")
    where = f"verifier head {folder if head.file is None else folder / head.file}"
    if head.file is not None:
        stored = _read_file(folder / head.file)
    else:
        stored = read_tensors(folder, [f"{n}.{p}" for n in head.layers for p in ("weight", "bias")])
    dtype, device = model.decoder.dtype, model.decoder.device
    tensors = {name: tensor.to(device, dtype) for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, stored[name], f"{where}: {name}")
    numbered = (f"layers.{number}" for number in count())
    names = (
        head.layers or [*takewhile(lambda n: f"{n}.weight" in tensors, numbered)] or ["layers.0"]
    )
    for name in names:
        if f"{name}.weight" not in tensors:
            raise InputError(f"{where}: no tensor named {name}.weight")
    layers = [Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names]
    num_values = _check_layers(layers, names, _head_width(head, model), where)
    needed = 2 if spec.activation == "softmax" else 1
    if num_values != needed:
        raise InputError(
            f"{where}: {names[-1]}.weight gives {num_values} values, and "
            f"{spec.activation} needs {needed}"
        )
    return [prepack(layer) for layer in layers]


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    if not file.is_file():
        raise InputError(f"verifier head {file}: no such file")
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise InputError(f"verifier head {file}: cannot be read ({line})") from error
    return tensors


def _head_width(head: Head, model: LoadedModel) -> int:
    """Values that go into the first layer."""
    shape = model.decoder.shape
    width = shape.hidden
    if head.kind != "token_mlp":
        return width
    wide = ("previous_hidden", "token_embedding")
    return sum(width if feature in wide else 1 for feature in head.features)


def _check_layers(layers: Sequence[Linear], names: Sequence[str], width: int, where: str) -> int:
    """See that each layer takes what the one before gives; returns what the last one gives."""
    for name, layer in zip(names, layers, strict=True):
        weight, bias = layer.weight, layer.bias
        if weight.dim() != 2 or weight.shape[1] != width or not weight.shape[0]:
            raise InputError(
                f"{where}: {name}.weight is {list(weight.shape)}, [outputs, {width}] is expected"
            )
        width = weight.shape[0]
        if bias is not None and list(bias.shape) != [width]:
            raise InputError(f"{where}: {name}.bias is {list(bias.shape)}, [{width}] is expected")
    return width
