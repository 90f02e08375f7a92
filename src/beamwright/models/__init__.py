"""Hugging Face checkpoints to one decoder with flags; its KV on the tree; tokenizer and template.

Knows no search strategy and no verifier format.
"""

from beamwright.models.load import LoadedModel, inspect_model, load_model
from beamwright.models.prefill import PrefillRequest
from beamwright.models.session import DecodeSession, FixedBackend
from beamwright.models.shape import ModelShape
from beamwright.models.tokenizer import TextCodec
from beamwright.models.tree_model import HostOptions, TreeModel

__all__ = [
    "DecodeSession",
    "FixedBackend",
    "HostOptions",
    "LoadedModel",
    "ModelShape",
    "PrefillRequest",
    "TextCodec",
    "TreeModel",
    "inspect_model",
    "load_model",
]
