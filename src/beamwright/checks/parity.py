"""Parity with `transformers`: the same checkpoint, random token ids, three ways to the logits."""

from __future__ import annotations

import torch

from beamwright.attention import make_attention
from beamwright.errors import InputError
from beamwright.kv.segments import Path, PathPart
from beamwright.models import LoadedModel, PrefillRequest, TreeModel, load_model
from beamwright.models.pretrained import read_reference
from beamwright.sections import ModelSettings

_TOKENS = 48
_CHUNK = 7
_SEED = 1


def check_parity(settings: ModelSettings) -> dict[str, float]:
    """Largest absolute logit difference to `transformers`: prefill, chunked, decode.

    "prefill" runs the ids in one go, "chunked" in chunks of 7, "decode" token by token through
    the paged tree store, with the ids split over a chain of nodes.
    """
    if settings.model.startswith("random:"):
        raise InputError("--parity needs a checkpoint folder, not random weights")
    loaded = load_model(settings.model, settings)
    vocab, context = loaded.decoder.shape.vocab, loaded.decoder.shape.context
    generator = torch.Generator().manual_seed(_SEED)
    token_ids = torch.randint(vocab, (min(_TOKENS, context),), generator=generator).tolist()
    expected = _transformers_logits(loaded, token_ids)
    found = {
        "prefill": _prefill(loaded, settings.attention, token_ids, len(token_ids)),
        "chunked": _prefill(loaded, settings.attention, token_ids, _CHUNK),
        "decode": _decode(loaded, settings.attention, token_ids),
    }
    return {way: float((logits - expected).abs().max()) for way, logits in found.items()}


def _transformers_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    decoder = loaded.decoder
    assert loaded.folder is not None
    model = read_reference(loaded.folder, decoder.dtype).to(decoder.device).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids], device=decoder.device)).logits[0]
    return logits


def _tree_model(loaded: LoadedModel, attention: str, chunk: int) -> TreeModel:
    shape = loaded.decoder.shape
    token_bytes = shape.kv_bytes_per_token(loaded.decoder.dtype.itemsize)
    budget = 2048 * token_bytes
    decoder = loaded.decoder
    backend = make_attention(attention, decoder.device, decoder.dtype)
    return TreeModel(decoder, backend, budget, chunk)


@torch.inference_mode()
def _prefill(loaded: LoadedModel, attention: str, token_ids: list[int], chunk: int) -> torch.Tensor:
    model = _tree_model(loaded, attention, chunk)
    hidden = model.prefill([PrefillRequest((), model.store.create(), token_ids, 0)])[0]
    return model.decoder.logits(hidden)


@torch.inference_mode()
def _decode(loaded: LoadedModel, attention: str, token_ids: list[int]) -> torch.Tensor:
    """Every token after the first is decoded; a new node starts every 5, 10, 15, ... tokens."""
    model = _tree_model(loaded, attention, len(token_ids))
    root = model.store.create()
    hidden = [model.prefill([PrefillRequest((), root, token_ids[:1], 0)])[0]]
    path: Path = (PathPart(root, 1),)
    position, step = 1, 5
    while position < len(token_ids):
        segment = model.store.create()
        session = model.open_session([path], [segment])
        tokens = token_ids[position : position + step]
        for offset, token in enumerate(tokens):
            rows = (session.num_rows,)
            states = session.forward(torch.full(rows, token), torch.full(rows, position + offset))
            hidden.append(states[:1])
        session.store({0: len(tokens)})
        session.close()
        path = (*path, PathPart(segment, len(tokens)))
        position, step = position + len(tokens), step + 5
    return model.decoder.logits(torch.cat(hidden))
