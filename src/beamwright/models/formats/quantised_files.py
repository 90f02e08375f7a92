"""Reads quantised checkpoint folders, in which several tensors make up one weight.

Each method is a `Form` in the table at the end: AWQ, GPTQ, compressed-tensors, 8-bit
floats, MXFP4 and bitsandbytes. Config entries that leave projections plain (`ignore`,
`modules_to_not_convert`, `dynamic`) are not read: a projection is plain if its tensors are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from beamwright.errors import InputError, message_of
from beamwright.models.formats.plain_files import DAMAGED, PlainFiles, RowReader
from beamwright.models.grouped import GroupedLinear

# A function that reads a tensor of one projection by the ending of its name, or returns None.
Part = Callable[[str], Tensor | None]
# Sizes of a projection's tensors, by the endings of their names.
PartSizes = Mapping[str, tuple[int, ...]]
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
_MXFP4_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Size = tuple[int, ...]
Blocks = Iterable[tuple[int, int]]
_STATES = [f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight as codes, uint8 [out, in], with scale and low per group, float32 [out, groups].

    bits: bits of a code. The weight is code * scale + low.
    """

    bits: int
    codes: Tensor
    scale: Tensor
    low: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError if the sizes do not fit each other, as in a damaged file."""
        (rows, columns), groups = self.codes.shape, self.scale.shape[-1]
        fits = self.scale.shape == self.low.shape == (rows, groups)
        if not fits or not groups or columns % (2 * groups):
            raise ValueError(f"scales {tuple(self.scale.shape)} of {rows} x {columns} codes")

    @classmethod
    def around(cls, zero: float | Tensor, bits: int, codes: Tensor, scale: Tensor) -> Self:
        """Make a weight from scales and `zero`, the zero point: a number or [out, groups]."""
        return cls(bits, codes, scale, -(zero * scale))

    def dequantise(self) -> Tensor:
        """Return the dequantised weight, float32 [out, in]."""
        grouped = self.codes.unflatten(1, (self.scale.shape[1], -1)).float()
        return torch.addcmul(self.low[..., None], grouped, self.scale[..., None]).flatten(1)

    def of_rows(self, rows: int) -> QuantisedWeight:
        """Concatenate consecutive rows of the weight, so that `rows` longer rows remain."""
        parts = (part.reshape(rows, -1) for part in (self.codes, self.scale, self.low))
        return QuantisedWeight(self.bits, *parts)

    def to_linear(self) -> GroupedLinear:
        """Return the weight as a `GroupedLinear`, with codes of 4 or 8 bits."""
        return GroupedLinear.of(4 if self.bits <= 4 else 8, self.codes, self.scale, self.low)


@dataclass(frozen=True)
class Form:
    """How a quantisation method stores a weight in several tensors, which differ in name endings.

    main: possible name endings of the tensor with the codes.
    beside: name endings of the tensors that belong to the codes, such as scales.
    read: returns the weight as `QuantisedWeight`, or dequantised, from its tensors and
        `quantization_config`.
    size: returns the size of the weight, from the sizes of its tensors, the tensors, and
        `quantization_config`.
    weight: the name ending of the same weight in an unquantised checkpoint.
    """

    main: tuple[str, ...]
    beside: tuple[str, ...]
    read: Callable[[Part, Mapping[str, Any]], QuantisedWeight | Tensor]
    size: Callable[[PartSizes, Part, Mapping[str, Any]], tuple[int, ...]]
    weight: str = ".weight"


class QuantisedFiles:
    """`StoredWeights` of a quantised folder: its tensors by the names of an unquantised one."""

    def __init__(self, files: PlainFiles, form: Form, config: Mapping[str, Any]) -> None:
        self._files, self._form, self._config = files, form, config
        self._stored = files.sizes

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes by name. The tensors that make up a quantised weight appear as one weight."""
        form = self._form
        stems = {n.removesuffix(end) for n in self._stored for end in form.main if n.endswith(end)}
        quantised = [stem for stem in sorted(stems) if self._main(stem + form.weight) is not None]
        parts = {stem + end for stem in quantised for end in (*form.main, *form.beside)}
        shapes = {name: size for name, size in self._stored.items() if name not in parts}
        for stem in quantised:
            ends = [end for end in (*form.main, *form.beside) if stem + end in self._stored]
            with self._reading(stem + form.weight):
                shapes[stem + form.weight] = form.size(
                    {end: self._stored[stem + end] for end in ends},
                    lambda end, stem=stem: self._files.tensor(stem + end),  # type: ignore[misc]
                    self._config,
                )
        return shapes

    def tensor(self, name: str) -> Tensor | None:
        """Return a copy of a tensor, in float32 if it is quantised; None if it does not exist."""
        weight = self._read(name)
        return weight.dequantise() if isinstance(weight, QuantisedWeight) else weight

    def quantised_linear(self, name: str) -> GroupedLinear | None:
        """Return a projection in its quantised format; None if it is plain.

        None also for formats without codes and a scale per group, such as 8-bit floats.
        """
        weight = self._read(f"{name}.weight") if self._main(f"{name}.weight") else None
        return weight.to_linear() if isinstance(weight, QuantisedWeight) else None

    def row_reader(self, name: str, dtype: torch.dtype) -> RowReader | None:
        """Return a reader of single rows; None if the tensor is quantised."""
        return None if self._main(name) else self._files.row_reader(name, dtype)

    def _main(self, name: str) -> str | None:
        """Return the name of a quantised weight without its ending; None for other names.

        A weight is quantised if the checkpoint has tensors with a main and a beside ending for it.
        """
        stem, both = name.removesuffix(self._form.weight), (self._form.main, self._form.beside)
        quantised = all(any(stem + ending in self._stored for ending in each) for each in both)
        return stem if quantised and name.endswith(self._form.weight) else None

    def _read(self, name: str) -> QuantisedWeight | Tensor | None:
        stem = self._main(name)
        if stem is None:
            return self._files.tensor(name)
        with self._reading(name):
            return self._form.read(lambda ending: self._files.tensor(stem + ending), self._config)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn errors of damaged tensors into an InputError that names the weight."""
        try:
            yield
        except DAMAGED as error:
            raise InputError(
                f"model {self._files.folder}: {name} cannot be read as quantization_config says "
                f"({message_of(error)}); use the original checkpoint with --weights int4"
            ) from error


def require_part(part: Part, ending: str) -> Tensor:
    """Read a projection's tensor by the ending of its name.

    Raises:
        ValueError: if it is missing.
    """
    tensor = part(ending)
    if tensor is None:
        raise ValueError(f"{ending.removeprefix('.')} is missing")
    return tensor


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., count] to codes, uint8 [..., count * 32 / bits], lowest bits first."""
    if not 2 <= bits <= 8:
        raise ValueError(f"{bits} bits")
    packed = words.to(torch.int32).contiguous().view(torch.uint8)
    if 8 % bits == 0:
        parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(-2)
    singles = (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    weights = torch.tensor([1 << bit for bit in range(bits)], dtype=torch.uint8)
    codes: Tensor = (singles.unflatten(-1, (-1, bits)) * weights).sum(-1, dtype=torch.uint8)
    return codes


# --- scales ----------------------------------------------------------------------------------


def scale_weight(weight: Tensor, scale: Tensor, blocks: Blocks) -> Tensor:
    """Multiply a weight by its scale, and return it in float32.

    scale: one number, [out], [out, 1], or one number per block [block rows, block columns].

    Raises:
        ValueError: if the scales do not cover the weight.
    """
    scale, size = scale.float(), tuple(weight.shape)
    rows, columns = scale_block_size(size, tuple(scale.shape), blocks)
    if scale.numel() == 1:
        return weight.float() * scale.flatten()
    wide = spread_scales(scale.reshape(-(-size[0] // rows), -1), rows, size[0], 0)
    return spread_scales(wide, columns, size[1], 1).mul_(weight.float())


def scale_block_size(size: Size, scales: Size, blocks: Blocks) -> tuple[int, int]:
    """Return the number of rows and columns that one scale covers.

    size: size of the weight. scales: size of the scales.
    blocks: the block sizes in the config, of which one must fit if the scales are per block.

    Raises:
        ValueError: if the scales do not cover the weight, or not exactly one block size fits.
    """
    rows, columns = size
    if prod(scales) == 1 or scales in ((rows,), (rows, 1)):
        return (rows, columns) if prod(scales) == 1 else (1, columns)
    fits = {
        (high, wide)
        for high, wide in blocks
        if high > 0 and wide > 0 and scales == (-(-rows // high), -(-columns // wide))
    }
    if len(fits) != 1:
        raise ValueError(f"scales {scales} of a weight {size} do not determine the size of a block")
    return fits.pop()


def spread_scales(scales: Tensor, block: int, count: int, dim: int = 0) -> Tensor:
    """Repeat each scale `block` times along `dim`, and cut the result to `count`.

    Raises:
        ValueError: if the number of scales does not fit `count`.
    """
    if block < 1 or scales.shape[dim] != -(-count // block):
        raise ValueError(
            f"{scales.shape[dim]} scales do not fit {count} values in blocks of {block}"
        )
    return scales.repeat_interleave(min(block, count), dim).narrow(dim, 0, count)


# --- packed integers --------------------------------------------------------------------------


def _awq(part: Part, config: Mapping[str, Any]) -> QuantisedWeight:
    """Read AWQ weights in the layout of its gemm kernels: 8 columns per word, in `_AWQ_ORDER`.

    qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out].
    """
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"AWQ version {config['version']!r:.20} is not supported; use gemm")
    scale = require_part(part, ".scales").float()
    codes, zeros = (_awq_columns(require_part(part, f".{name}")) for name in ("qweight", "qzeros"))
    return QuantisedWeight.around(zeros.t(), 4, codes.t().contiguous(), scale.t())


def _awq_columns(words: Tensor) -> Tensor:
    columns: Tensor = unpack_words(words, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER]
    return columns.flatten(1)


def _gptq(part: Part, config: Mapping[str, Any]) -> QuantisedWeight | Tensor:
    """Read GPTQ weights with 2 to 8 bits, version 1 or 2, with or without `desc_act`.

    qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out].
    """
    words, scale, groups = (
        require_part(part, ".qweight"),
        require_part(part, ".scales").float(),
        part(".g_idx"),
    )
    # `dynamic` in the config may give a projection other bits. With g_idx, shapes tell how many.
    bits = int(config["bits"]) if groups is None else 32 * len(words) // max(1, len(groups))
    codes = unpack_words(words.t(), bits)
    # Version 1 stores zero points minus one. Its kernels add the 1 without wrapping around.
    first = config.get("checkpoint_format", "gptq") != "gptq_v2"
    low = -(unpack_words(require_part(part, ".qzeros"), bits).float() + first) * scale
    each = codes.shape[1] // max(1, len(scale))
    if groups is None or torch.equal(groups.long(), torch.arange(codes.shape[1]) // max(1, each)):
        return QuantisedWeight(bits, codes, scale.t(), low.t())
    # With `desc_act` a group's columns are not adjacent, so the weight must be dequantised here.
    index = groups.long()
    return torch.addcmul(low.t()[:, index], codes.float(), scale.t()[:, index])


def _compressed(part: Part, config: Mapping[str, Any]) -> QuantisedWeight | Tensor:
    """Read weights of compressed-tensors, packed or one per byte.

    Codes are signed. In the packed form half of the range is added to them.
    """
    scale, packed = require_part(part, ".weight_scale"), part(".weight_packed")
    if packed is None:
        return _read_unpacked(
            require_part(part, ".weight"), scale, part(".weight_zero_point"), config
        )
    rows, columns = require_part(part, ".weight_shape").tolist()
    bits = _weights_of(config)["num_bits"]
    if part(".weight_g_idx") is not None:
        raise ValueError("reordered columns (weight_g_idx) are not supported")
    codes = unpack_words(packed, bits)[:, :columns]
    if tuple(codes.shape) != (rows, columns):
        raise ValueError(f"weight_packed {tuple(packed.shape)} is not {rows} x {columns}")
    zero, scale = torch.tensor(float(1 << bits - 1)), scale.float()
    if (zeros := part(".weight_zero_point")) is not None:
        zero = unpack_words(zeros.t(), bits).t()[:rows].float()
    return QuantisedWeight.around(zero, bits, codes.contiguous(), scale)


def _read_unpacked(
    weight: Tensor, scale: Tensor, zero: Tensor | None, config: Mapping[str, Any]
) -> QuantisedWeight | Tensor:
    """Read unpacked weights of compressed-tensors: int8 codes or 8-bit floats."""
    if weight.dtype != torch.int8:
        return scale_weight(weight, scale, _blocks(config))
    scale = scale.float().reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    scale = scale.expand(len(weight), -1)
    zeros = 0 if zero is None else zero.float().view_as(scale)
    return QuantisedWeight.around(zeros + 128, 8, weight.view(torch.uint8) ^ 128, scale)


def _weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how the first group of projections is quantised.

    Raises:
        ValueError: if another group has a different number of bits.
    """
    sections = [group["weights"] for group in config["config_groups"].values()]
    if any(each.get("num_bits") != sections[0].get("num_bits") for each in sections):
        raise ValueError("groups of projections with different bits are not supported")
    weights: Mapping[str, Any] = sections[0]
    return weights


def _blocks(config: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return the block sizes that the config names, over all groups of projections."""
    groups = [group["weights"] for group in config.get("config_groups", {}).values()]
    written = [config.get("weight_block_size"), *(each.get("block_structure") for each in groups)]
    return {(int(high), int(wide)) for high, wide in filter(None, written)}


# --- floats and levels ------------------------------------------------------------------------


def _fp8(part: Part, config: Mapping[str, Any]) -> Tensor:
    """Read 8-bit floats with a scale per tensor, row or block, as several methods store them."""
    scale = part(".weight_scale_inv")
    scale = require_part(part, ".weight_scale") if scale is None else scale
    return scale_weight(require_part(part, ".weight"), scale, _blocks(config))


def _mxfp4(part: Part, config: Mapping[str, Any]) -> Tensor:
    """Read experts in MXFP4: two 4-bit floats per byte, and a power of two for each 32 of them.

    Blocks [experts, out, groups, 16] become values [experts, in, out]. The low nibble comes first.
    """
    blocks, scales = require_part(part, "_blocks"), require_part(part, "_scales")
    if blocks.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        raise ValueError(f"scales {tuple(scales.shape)} do not fit blocks {tuple(blocks.shape)}")
    levels = torch.cat([_MXFP4_LEVELS, -_MXFP4_LEVELS])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(levels[codes.long()], scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(-1, -2).contiguous()


def _bitsandbytes(part: Part, config: Mapping[str, Any]) -> QuantisedWeight | Tensor:
    """Read 4-bit codes of a table of levels (nf4, fp4) in blocks, or int8 with a scale per row."""
    weight = require_part(part, ".weight")
    if weight.dtype == torch.int8:
        scale = require_part(part, ".SCB").float()[:, None] / 127
        return QuantisedWeight.around(128, 8, weight.view(torch.uint8) ^ 128, scale)
    weight = weight.contiguous().view(torch.uint8)  # bnb_4bit_quant_storage may be wider
    state = _bitsandbytes_state(part)
    most = require_part(part, ".weight.absmax")
    if (of_most := part(".weight.nested_absmax")) is not None:  # the scales are quantised too
        levels = require_part(part, ".weight.nested_quant_map")[most.long()]
        each = spread_scales(of_most, int(state["nested_blocksize"]), len(levels))
        most = levels * each + float(state["nested_offset"])
    codes = torch.stack([weight.flatten() >> 4, weight.flatten() & 15], dim=-1)
    values = require_part(part, ".weight.quant_map").float()[codes.long()].flatten()
    wide = spread_scales(most.float(), int(state["blocksize"]), len(values))
    return (values * wide).view(state["shape"])


# --- sizes -----------------------------------------------------------------------------------


def _compressed_size(size: PartSizes, part: Part, config: Mapping[str, Any]) -> Size:
    if packed := size.get(".weight_packed"):
        return packed[0], packed[1] * 32 // _weights_of(config)["num_bits"]
    if _weights_of(config).get("type") == "float":
        scale_block_size(size[".weight"], size[".weight_scale"], _blocks(config))
    return size[".weight"]


def _fp8_size(size: PartSizes, part: Part, config: Mapping[str, Any]) -> Size:
    ending = ".weight_scale_inv" if ".weight_scale_inv" in size else ".weight_scale"
    scale_block_size(size[".weight"], size[ending], _blocks(config))
    return size[".weight"]


def _bitsandbytes_size(size: PartSizes, part: Part, config: Mapping[str, Any]) -> Size:
    return size[".weight"] if ".SCB" in size else tuple(_bitsandbytes_state(part)["shape"])


def _bitsandbytes_state(part: Part) -> dict[str, Any]:
    written = next((tensor for name in _STATES if (tensor := part(name)) is not None), None)
    if written is None:
        raise ValueError("quant_state is missing")
    state: dict[str, Any] = json.loads(bytes(written.tolist()))
    return state


_COMPRESSED = tuple(f".weight_{name}" for name in ("scale", "zero_point", "shape", "g_idx"))
_LEVELS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
# The form of each quantisation method in `files.METHODS`.
FORMS: Mapping[str, Form] = MappingProxyType({
    "awq": Form(
        (".qweight",), (".qzeros", ".scales"), _awq,
        lambda size, *_: (size[".qweight"][1] * 8, size[".qweight"][0]),
    ),
    "gptq": Form(
        (".qweight",), (".qzeros", ".scales", ".g_idx"), _gptq,
        lambda size, _, config: (
            size[".qweight"][1],
            *(size.get(".g_idx") or (size[".qweight"][0] * 32 // int(config["bits"]),)),
        ),
    ),
    "compressed-tensors": Form(
        (".weight_packed", ".weight"), (*_COMPRESSED, ".input_scale", ".input_zero_point"),
        _compressed, _compressed_size,
    ),
    "fp8": Form(
        (".weight",), (".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale"),
        _fp8, _fp8_size,
    ),
    "mxfp4": Form(
        ("_blocks",), ("_scales",), _mxfp4,
        lambda size, *_: (size["_blocks"][0], prod(size["_blocks"][2:]) * 2, size["_blocks"][1]),
        weight="",
    ),
    "bitsandbytes": Form(
        (".weight",),
        (*(f".weight.{name}" for name in _LEVELS), *_STATES, ".SCB", ".weight_format"),
        _bitsandbytes, _bitsandbytes_size,
    ),
})  # fmt: skip
