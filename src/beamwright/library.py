"""The library that `csrc/` is built into, and what its functions are given (`csrc/products.h`).

Absent where the package was installed without a C compiler: then torch does all of it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

LANES = 16
"""A width that the library sums up is a multiple of it."""
_SETS = ("no vectors", "AVX2", "AVX-512 VNNI")
_ALLOWED = {"DEFAULT": 0, "AVX2": 1}  # by what torch calls them
_NUMBER, _PLACE = ctypes.c_int64, ctypes.c_void_p


def _each(names: str, kind: Any) -> list[tuple[str, Any]]:
    """Fields of one type that follow one another."""
    return [(name, kind) for name in names.split()]


class NativePart(ctypes.Structure):
    """Outputs of a projection that have one type of blocks."""

    _fields_: ClassVar = [*_each("kind outputs", _NUMBER), ("tiles", _PLACE)]


class Projection(ctypes.Structure):
    """Parts that stand in a row, and a bias."""

    _fields_: ClassVar = [
        ("parts", ctypes.POINTER(NativePart)),
        *_each("num_parts columns outputs", _NUMBER),
        ("bias", _PLACE),
    ]


class NativeSource(ctypes.Structure):
    """Keys and values of many entries and layers."""

    _fields_: ClassVar = [("keys", _PLACE), *_each("layer values head", _NUMBER)]


class Attention(ctypes.Structure):
    """What rows attend to in layers that are alike. kept: tensors that it points into."""

    kept: Any

    _fields_: ClassVar = [
        ("sources", ctypes.POINTER(NativeSource)),
        ("places", _PLACE),
        ("most", _NUMBER),
        ("own", NativeSource),
        ("own_row", _NUMBER),
        *_each("ends own_rows slots written", _PLACE),
        *_each("num_written window", _NUMBER),
        ("softcap", ctypes.c_float),
        ("sinks", _PLACE),
        ("narrow", _NUMBER),
    ]


class NativeLayer(ctypes.Structure):
    """Weights of a layer, and where its keys and values are."""

    _fields_: ClassVar = [
        *_each("qkv out gate_up down", Projection),
        *_each("norm follow after_attention after_mlp query_norm key_norm cos sin", _PLACE),
        *_each("group place", _NUMBER),
    ]


class Model(ctypes.Structure):
    """Layers and their sizes."""

    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(NativeLayer)),
        ("first_norm", _PLACE),
        *_each("hidden heads kv_heads head_dim inner activation", _NUMBER),
        ("eps", ctypes.c_float),
    ]


class Pass(ctypes.Structure):
    """Stages of a model, and the rows that go through them."""

    _fields_: ClassVar = [
        *_each("begin end rows", _NUMBER),
        *_each("x normed turned context positions", _PLACE),
        ("attentions", ctypes.POINTER(ctypes.POINTER(Attention))),
        *_each("threads set", _NUMBER),
    ]


@cache
def library() -> Any:
    """The library, which shares torch's threads; None where the installation has none."""
    file = Path(__file__).parent / "_products.so"
    if not file.is_file():
        return None
    import torch  # noqa: PLC0415 (slow import)

    found = ctypes.CDLL(str(file))
    found.bw_tile_bytes.argtypes, found.bw_tile_bytes.restype = [ctypes.c_int, _NUMBER], _NUMBER
    found.bw_pack.argtypes = [ctypes.c_int, _PLACE, _NUMBER, _NUMBER, _PLACE, _NUMBER]
    found.bw_multiply.argtypes = [
        *(ctypes.POINTER(Projection), _PLACE, _NUMBER, _NUMBER, _PLACE, _NUMBER, _NUMBER)
    ]
    found.bw_run.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Pass)]
    parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    found.bw_threads(ctypes.cast(parallel, _PLACE) if parallel else None)
    return found


def instruction_set() -> int:
    """Number of the best set that this CPU has and torch may use (`ATEN_CPU_CAPABILITY`)."""
    from torch.backends import cpu  # noqa: PLC0415 (slow import)

    allowed = _ALLOWED.get(cpu.get_cpu_capability(), len(_SETS) - 1)
    return min(int(library().bw_best()), allowed)


def instructions() -> str | None:
    """What the library computes with here; None without it."""
    return None if library() is None else _SETS[instruction_set()]
