"""Compare a checkpoint's logits with those of `transformers` (`beamwright doctor --parity`).

Both models are in memory at the same time.
"""

from __future__ import annotations

import torch

from beamwright.attention import make_attention
from beamwright.errors import InputError
from beamwright.kv.segments import Path, PathPart
from beamwright.models.load import load_model, load_reference_model
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings

_NUM_TOKENS, _CHUNK, _KV_TOKENS = 48, 7, 2048


def check_parity(settings: ModelSettings) -> dict[str, float]:
    """Return the largest absolute difference from the logits of `transformers`, in three ways.

    "prefill" runs random token ids in one pass, "chunked" in chunks of 7. "decode" runs them one by
    one with paged KV, spread over a chain of nodes.
    """
    if settings.model.startswith("random:"):
        raise InputError("--parity needs a checkpoint folder, not random weights")
    loaded = load_model(settings.model, settings)
    decoder = loaded.decoder
    generator = torch.Generator().manual_seed(1)
    num_tokens = min(_NUM_TOKENS, decoder.shape.context)
    token_ids = torch.randint(decoder.shape.vocab, (num_tokens,), generator=generator).tolist()
    assert loaded.folder is not None
    reference = load_reference_model(loaded.folder, decoder.dtype).to(decoder.device).eval()
    backend = make_attention(settings.attention, decoder.device, decoder.dtype)
    budget = _KV_TOKENS * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids], device=decoder.device)).logits[0]
        hidden = {
            "prefill": _prefill(TreeModel(decoder, backend, budget, num_tokens), token_ids),
            "chunked": _prefill(TreeModel(decoder, backend, budget, _CHUNK), token_ids),
            "decode": _decode(TreeModel(decoder, backend, budget), token_ids),
        }
        diffs = {way: decoder.logits(states) - expected for way, states in hidden.items()}
    return {way: float(diff.abs().max()) for way, diff in diffs.items()}


def _prefill(model: TreeModel, token_ids: list[int]) -> torch.Tensor:
    """Return the hidden states [tokens, hidden] of all tokens, computed by prefill."""
    return model.prefill([PrefillRequest((), model.store.create(), token_ids, 0)])[0]


def _decode(model: TreeModel, token_ids: list[int]) -> torch.Tensor:
    """Return the hidden states [tokens, hidden], decoding all tokens after the first one by one.

    A new node starts after 1, 6, 16, 31, ... tokens: each is 5 tokens longer than the one before.
    """
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
        session.copy_to_segments({0: len(tokens)})
        session.close()
        path = (*path, PathPart(segment, len(tokens)))
        position, step = position + len(tokens), step + 5
    return torch.cat(hidden)
