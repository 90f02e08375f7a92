"""ctypes bindings of the C library for matrix products and decoding on CPUs (`csrc/products.h`).

The library is missing if the package was installed without a C compiler. Without the library, torch
computes everything. The structures have the same fields as those in the header.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

# The library only takes matrix widths that are a multiple of this number.
LANES = 16
_SETS = ("no vectors", "AVX2", "AVX-512 VNNI")  # instruction sets of the library, the best last
_ALLOWED = {"DEFAULT": 0, "AVX2": 1}  # torch's CPU capability: index of the best set it allows
_NUMBER, _PLACE = ctypes.c_int64, ctypes.c_void_p


def _fields_of(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Return ctypes fields of one type, from their names separated by spaces."""
    return [(name, kind) for name in names.split()]


class NativePart(ctypes.Structure):
    """Consecutive outputs of a projection whose weights have one block type."""

    _fields_: ClassVar = [*_fields_of("kind outputs", _NUMBER), ("tiles", _PLACE)]


class Projection(ctypes.Structure):
    """A matrix of weights, made of consecutive parts, with an optional bias."""

    _fields_: ClassVar = [
        ("parts", ctypes.POINTER(NativePart)),
        *_fields_of("num_parts columns outputs", _NUMBER),
        ("bias", _PLACE),
    ]


class NativeSource(ctypes.Structure):
    """A tensor with the keys and values of many KV blocks and layers."""

    _fields_: ClassVar = [("keys", _PLACE), *_fields_of("layer values head", _NUMBER)]


class Attention(ctypes.Structure):
    """The keys and values that rows attend to, in layers with equal windows and shapes.

    kept: the tensors that the structure points into. Holding them here keeps their memory alive.
    """

    kept: Any

    _fields_: ClassVar = [
        ("sources", ctypes.POINTER(NativeSource)),
        ("places", _PLACE),
        ("most", _NUMBER),
        ("own", NativeSource),
        ("own_row", _NUMBER),
        *_fields_of("ends own_rows slots written", _PLACE),
        *_fields_of("num_written window", _NUMBER),
        ("softcap", ctypes.c_float),
        ("sinks", _PLACE),
        ("narrow", _NUMBER),
    ]


class NativeLayer(ctypes.Structure):
    """Weights of one layer, and where its keys and values are stored."""

    _fields_: ClassVar = [
        *_fields_of("qkv out gate_up down", Projection),
        *_fields_of("norm follow after_attention after_mlp query_norm key_norm cos sin", _PLACE),
        *_fields_of("group place", _NUMBER),
    ]


class Model(ctypes.Structure):
    """Argument of `bw_run`: a decoder, as its layers and their sizes."""

    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(NativeLayer)),
        ("first_norm", _PLACE),
        *_fields_of("hidden heads kv_heads head_dim inner activation", _NUMBER),
        ("eps", ctypes.c_float),
    ]


class Pass(ctypes.Structure):
    """Argument of `bw_run`: one forward pass of `rows` rows through stages `begin` to `end`."""

    _fields_: ClassVar = [
        *_fields_of("begin end rows", _NUMBER),
        *_fields_of("x normed turned context positions", _PLACE),
        ("attentions", ctypes.POINTER(ctypes.POINTER(Attention))),
        *_fields_of("threads set", _NUMBER),
    ]


@cache
def library() -> Any:
    """Load the C library and return it; None if it is not installed.

    The library shares torch's OpenMP threads.
    """
    file = Path(__file__).parent / "_products.so"
    if not file.is_file():
        return None
    import torch  # noqa: PLC0415 (slow import)

    loaded = ctypes.CDLL(str(file))
    loaded.bw_tile_bytes.argtypes, loaded.bw_tile_bytes.restype = [ctypes.c_int, _NUMBER], _NUMBER
    loaded.bw_pack.argtypes = [ctypes.c_int, _PLACE, _NUMBER, _NUMBER, _PLACE, _NUMBER]
    loaded.bw_multiply.argtypes = [
        *(ctypes.POINTER(Projection), _PLACE, _NUMBER, _NUMBER, _PLACE, _NUMBER, _NUMBER)
    ]
    loaded.bw_run.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Pass)]
    parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    loaded.bw_threads(ctypes.cast(parallel, _PLACE) if parallel else None)
    return loaded


def instruction_set() -> int:
    """Return the index in `_SETS` of the best instruction set that the library may use here.

    The environment variable ATEN_CPU_CAPABILITY limits torch, and so this library.
    """
    from torch.backends import cpu  # noqa: PLC0415 (slow import)

    allowed = _ALLOWED.get(cpu.get_cpu_capability(), len(_SETS) - 1)
    return min(int(library().bw_best()), allowed)


def instructions() -> str | None:
    """Return the name of the library's instruction set here; None without the library."""
    return None if library() is None else _SETS[instruction_set()]
