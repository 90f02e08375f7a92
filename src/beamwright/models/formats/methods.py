"""What a model's config.json says of how its weights are quantised. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beamwright.errors import UnsupportedModelError

GGUF = ".gguf"
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes")
"""What a `quant_method` may be, see `forms`."""
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a model's config.json says that its weights are quantised; None if they are not."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    return found if isinstance(found, dict) else {}


def check_method(quantised: Mapping[str, Any]) -> str:
    """Which of METHODS a `quantization_config` names.

    Raises:
        UnsupportedModelError: for another one, and a variant that is not read.
    """
    method, form = quantised.get("quant_method"), quantised.get("format", "")
    if method is None and "config_groups" in quantised:
        method = "compressed-tensors"
    if method not in METHODS or (method == "compressed-tensors" and form not in _COMPRESSED):
        named = method if method not in METHODS else f"{method} {form}"
        raise UnsupportedModelError(
            f"weights quantised by {named or 'an unknown method'!s:.60} are not read "
            f"({', '.join(METHODS)} are)"
        )
    return str(method)
