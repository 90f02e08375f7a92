"""Hugging Face checkpoints to one decoder with flags; its KV on the tree; tokenizer and template.

Knows no search strategy and no verifier format.
"""

from typing import TYPE_CHECKING

from beamwright.lazy import lazy_names

if TYPE_CHECKING:
    from beamwright.models.load import LoadedModel, inspect_model, load_model
    from beamwright.models.prefill import PrefillRequest
    from beamwright.models.session import DecodeSession, FixedBackend
    from beamwright.models.shape import ModelShape
    from beamwright.models.tokenizer import TextCodec, token_pieces
    from beamwright.models.tree_model import HostOptions, SharedBytes, TreeModel

__all__ = [
    "DecodeSession",
    "FixedBackend",
    "HostOptions",
    "LoadedModel",
    "ModelShape",
    "PrefillRequest",
    "SharedBytes",
    "TextCodec",
    "TreeModel",
    "inspect_model",
    "load_model",
    "token_pieces",
]

__getattr__ = lazy_names(
    __name__,
    {
        "DecodeSession": "session",
        "FixedBackend": "session",
        "HostOptions": "tree_model",
        "SharedBytes": "tree_model",
        "LoadedModel": "load",
        "ModelShape": "shape",
        "PrefillRequest": "prefill",
        "TextCodec": "tokenizer",
        "TreeModel": "tree_model",
        "inspect_model": "load",
        "load_model": "load",
        "token_pieces": "tokenizer",
    },
)
