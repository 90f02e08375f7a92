"""Shapes of well-known models by name, and shapes written out as `random:FAMILY,layers=...`.

`named.toml` has the sizes. This module reads no model files and needs no torch.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from beamwright.errors import InputError
from beamwright.io import read_toml_beside
from beamwright.models.shape import FAMILIES, BuiltSizes, LayerGroup, ModelShape, StatePart

_TABLES = read_toml_beside(__file__)
_SIZES = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "context")
_SUFFIXES = ("-instruct", "-chat", "-hf")


def rotary_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """Return the inverse rotary frequencies [head_dim / 2] without scaling.

    theta: the base, `rope_theta` in a config.
    """
    return tuple(theta ** -(2 * i / head_dim) for i in range(head_dim // 2))


def _shape(
    family: str,
    sizes: dict[str, int],
    head_dim: int | None = None,
    theta: float = 1e4,
    **flags: Any,
) -> ModelShape:
    """Return the shape of a model of `family`, a key of `FAMILIES`.

    sizes: a value for each name in `_SIZES`. head_dim: None or 0 for hidden / heads.
    theta: base of the rotary frequencies. flags: further fields of `ModelShape`.
    """
    head_dim = head_dim or sizes["hidden"] // sizes["heads"]
    fields = {**FAMILIES[family].shape_fields(SimpleNamespace()), **sizes, **flags}
    if "learned_positions" not in fields:
        fields["inv_freq"] = rotary_frequencies(theta, head_dim)
    return ModelShape(family, head_dim=head_dim, full_context=sizes["context"], **fields)


def _hybrid(
    sizes: list[int],
    head_dim: int,
    attends_every: int,
    conv: list[int],
    recurrent: list[int],
    parameters: int,
    head: int,
    matrices: list[list[int]],
) -> ModelShape:
    """Return the shape of a Qwen3.5 model, which has recurrent layers and attention layers.

    sizes: the values of `_SIZES`, in that order.
    attends_every: the last of this many layers is attention; the others are gated delta nets.
    conv, recurrent: sizes of a recurrent layer's states.
    parameters, head, matrices: see `BuiltSizes`.
    """
    named: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    attended = tuple(range(attends_every - 1, named["layers"], attends_every))
    states = [
        part
        for at in range(named["layers"])
        if at not in attended
        for part in (
            StatePart(at, "conv", tuple(conv)),
            StatePart(at, "recurrent", tuple(recurrent), wide=True),
        )
    ]
    return ModelShape(
        "qwen3_5_text",
        **named,
        head_dim=head_dim,
        full_context=named["context"],
        groups=(LayerGroup(attended, named["kv_heads"], head_dim),),
        states=tuple(states),
        built=BuiltSizes(parameters, parameters, head, tuple((r, c, n) for r, c, n in matrices)),
    )


def _read() -> dict[str, ModelShape]:
    shapes = dict[str, ModelShape]()
    for name, row in _TABLES["shapes"].items():
        if isinstance(row, str):
            shapes[name] = shapes[row]
        elif not row:
            shapes[name] = _hybrid(**_TABLES["hybrids"][name])
        else:
            family, *sizes = row
            flags = sizes.pop() if isinstance(sizes[-1], dict) else {}
            shapes[name] = _shape(family, dict(zip(_SIZES, sizes, strict=True)), **flags)
    return shapes


NAMED_SHAPES = _read()


def named_shape(text: str) -> ModelShape | None:
    """Return the shape of a model by its short name or hub name; None if it is not in the table.

    For example, `hf:Qwen/Qwen2.5-1.5B-Instruct` has the shape `qwen2.5-1.5b`. No file is read.
    """
    key = text.removeprefix("hf:").partition("@")[0].rpartition("/")[2].lower()
    key = key.removeprefix("meta-")
    for suffix in _SUFFIXES:
        key = key.removesuffix(suffix)
    return NAMED_SHAPES.get(_TABLES["hub_names"].get(key, key))


def shape_from_text(text: str) -> ModelShape:
    """Parse the part of `random:SHAPE` after the colon.

    SHAPE is a name in `NAMED_SHAPES`, or
    `FAMILY,layers=,hidden=,heads=,kv_heads=,intermediate=,vocab=,context=`.

    Raises:
        InputError: for an unknown name or family, or keys that are unknown, missing or not
            positive whole numbers.
    """
    name, _, rest = text.partition(",")
    if not rest:
        if name.lower() not in NAMED_SHAPES:
            raise InputError(f"random:{name}: no such shape; known: {', '.join(NAMED_SHAPES)}")
        return NAMED_SHAPES[name.lower()]
    if name not in FAMILIES:
        raise InputError(f"random:{name},...: family must be one of {', '.join(FAMILIES)}")
    values: dict[str, int] = {}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        if key not in (*_SIZES, "head_dim"):
            raise InputError(f"random:{text}: unknown key {key!r}; known: {', '.join(_SIZES)}")
        if not value.isdigit() or int(value) < 1:
            raise InputError(f"random:{text}: {key} must be a positive whole number")
        values[key] = int(value)
    missing = [key for key in _SIZES if key not in values and key != "kv_heads"]
    if missing:
        raise InputError(f"random:{text}: missing {', '.join(missing)}")
    kv_heads = values.setdefault("kv_heads", values["heads"])
    if values["hidden"] % values["heads"] or values["heads"] % kv_heads:
        raise InputError(f"random:{text}: heads must divide hidden, kv_heads must divide heads")
    head_dim = values.pop("head_dim", 0)
    if name == "opt":  # OPT has no other KV heads or MLP widths
        values |= {"kv_heads": values["heads"], "intermediate": 4 * values["hidden"]}
        head_dim = 0
    return _shape(name, values, head_dim)


def limit_context(shape: ModelShape, max_context: int | None) -> ModelShape:
    """Return the shape with its context limited to `max_context` tokens; None: no limit."""
    if max_context is None:
        return shape
    return replace(shape, context=min(shape.context, max_context))
