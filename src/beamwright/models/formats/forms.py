"""How each quantisation method stores a projection: its tensors, and what they say as one weight.

A method is a `Form` in the table at the end: AWQ, GPTQ, compressed-tensors, 8-bit floats, MXFP4,
bitsandbytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from beamwright.models.formats.quantised import Form, Groups, Part, PartSizes, need, unpacked

_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
_MXFP4_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Size = tuple[int, ...]
Blocks = Iterable[tuple[int, int]]
_STATES = [f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]


def scaled(weight: Tensor, scale: Tensor, blocks: Blocks) -> Tensor:
    """Values in float32. scale: of one number, [out], [out, 1], or of blocks [rows, columns].

    Raises:
        ValueError: if the scales do not cover the weight.
    """
    scale, size = scale.float(), tuple(weight.shape)
    rows, columns = scaled_block(size, tuple(scale.shape), blocks)
    if scale.numel() == 1:
        return weight.float() * scale.flatten()
    wide = spread(scale.reshape(-(-size[0] // rows), -1), rows, size[0], 0)
    return spread(wide, columns, size[1], 1).mul_(weight.float())


def scaled_block(size: Size, scales: Size, blocks: Blocks) -> tuple[int, int]:
    """Rows and columns of the weights that one scale is for.

    size: of the weight. scales: of the scales. blocks: that are possible, where they are none.

    Raises:
        ValueError: if the scales do not cover the weight, or nothing says how.
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
        raise ValueError(
            f"scales {scales} of a weight {size}: which rows and columns each is for is not said"
        )
    return fits.pop()


def spread(scales: Tensor, block: int, count: int, dim: int = 0) -> Tensor:
    """Each scale for so many values, `count` of them in all.

    Raises:
        ValueError: if there are more scales, or fewer.
    """
    if block < 1 or scales.shape[dim] != -(-count // block):
        raise ValueError(f"{scales.shape[dim]} scales of {count} values in blocks of {block}")
    return scales.repeat_interleave(min(block, count), dim).narrow(dim, 0, count)


# --- packed integers --------------------------------------------------------------------------


def _awq(part: Part, config: Mapping[str, Any]) -> Groups:
    """As its gemm kernels want it: eight columns to a word, in an order of their own.

    qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out].
    """
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"AWQ version {config['version']!r:.20} is not read; gemm is")
    scale = need(part, ".scales").float()
    codes, zeros = (_awq_columns(need(part, f".{name}")) for name in ("qweight", "qzeros"))
    return Groups.around(zeros.t(), 4, codes.t().contiguous(), scale.t())


def _awq_columns(words: Tensor) -> Tensor:
    columns: Tensor = unpacked(words, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER]
    return columns.flatten(1)


def _gptq(part: Part, config: Mapping[str, Any]) -> Groups | Tensor:
    """Of 2 to 8 bits, versions 1 and 2, with columns in order or not (`desc_act`).

    qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out].
    """
    words, scale, groups = need(part, ".qweight"), need(part, ".scales").float(), part(".g_idx")
    # `dynamic` gives some projections other bits, which the shapes tell.
    bits = int(config["bits"]) if groups is None else 32 * len(words) // max(1, len(groups))
    codes = unpacked(words.t(), bits)
    # The first version stores zero points less one; what its kernels add is not cut to the bits.
    first = config.get("checkpoint_format", "gptq") != "gptq_v2"
    low = -(unpacked(need(part, ".qzeros"), bits).float() + first) * scale
    each = codes.shape[1] // max(1, len(scale))
    if groups is None or torch.equal(groups.long(), torch.arange(codes.shape[1]) // max(1, each)):
        return Groups(bits, codes, scale.t(), low.t())
    # Groups of columns that are apart: of these, each column gets its own scale.
    index = groups.long()
    return torch.addcmul(low.t()[:, index], codes.float(), scale.t()[:, index])


def _compressed(part: Part, config: Mapping[str, Any]) -> Groups | Tensor:
    """Of compressed-tensors, packed or not. Codes are signed; packed ones have half their range
    added."""
    scale, packed = need(part, ".weight_scale"), part(".weight_packed")
    if packed is None:
        return _whole(need(part, ".weight"), scale, part(".weight_zero_point"), config)
    rows, columns = need(part, ".weight_shape").tolist()
    bits = _weights_of(config)["num_bits"]
    if part(".weight_g_idx") is not None:
        raise ValueError("groups of columns that are apart (weight_g_idx) are not read")
    codes = unpacked(packed, bits)[:, :columns]
    if tuple(codes.shape) != (rows, columns):
        raise ValueError(f"weight_packed {tuple(packed.shape)} of {rows} x {columns}")
    zero, scale = torch.tensor(float(1 << bits - 1)), scale.float()
    if (zeros := part(".weight_zero_point")) is not None:
        zero = unpacked(zeros.t(), bits).t()[:rows].float()
    return Groups.around(zero, bits, codes.contiguous(), scale)


def _whole(
    weight: Tensor, scale: Tensor, zero: Tensor | None, config: Mapping[str, Any]
) -> Groups | Tensor:
    """A code of compressed-tensors in a byte each, or 8-bit floats."""
    if weight.dtype != torch.int8:
        return scaled(weight, scale, _blocks(config))
    scale = scale.float().reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    scale = scale.expand(len(weight), -1)
    zeros = 0 if zero is None else zero.float().view_as(scale)
    return Groups.around(zeros + 128, 8, weight.view(torch.uint8) ^ 128, scale)


def _weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the first group of projections is quantised; others may not differ.

    Raises:
        ValueError: if they do.
    """
    found = [group["weights"] for group in config["config_groups"].values()]
    if any(each.get("num_bits") != found[0].get("num_bits") for each in found):
        raise ValueError("groups of projections with different bits are not read")
    weights: Mapping[str, Any] = found[0]
    return weights


def _blocks(config: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Sizes of blocks that have a scale, of any group of projections."""
    groups = [group["weights"] for group in config.get("config_groups", {}).values()]
    written = [config.get("weight_block_size"), *(each.get("block_structure") for each in groups)]
    return {(int(high), int(wide)) for high, wide in filter(None, written)}


# --- floats and levels ------------------------------------------------------------------------


def _fp8(part: Part, config: Mapping[str, Any]) -> Tensor:
    """8-bit floats with a scale per tensor, row or block, as several methods store them."""
    scale = part(".weight_scale_inv")
    scale = need(part, ".weight_scale") if scale is None else scale
    return scaled(need(part, ".weight"), scale, _blocks(config))


def _mxfp4(part: Part, config: Mapping[str, Any]) -> Tensor:
    """Experts in pairs of 4-bit floats, 32 of them with a power of two.

    Values [experts, in, out] of blocks [experts, out, groups, 16], the low nibble first.
    """
    blocks, scales = need(part, "_blocks"), need(part, "_scales")
    if blocks.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        raise ValueError(f"scales {tuple(scales.shape)} of blocks {tuple(blocks.shape)}")
    levels = torch.cat([_MXFP4_LEVELS, -_MXFP4_LEVELS])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(levels[codes.long()], scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(-1, -2).contiguous()


def _bitsandbytes(part: Part, config: Mapping[str, Any]) -> Groups | Tensor:
    """Blocks of 4-bit levels from a table (nf4, fp4), or int8 with a scale per row."""
    weight = need(part, ".weight")
    if weight.dtype == torch.int8:
        scale = need(part, ".SCB").float()[:, None] / 127
        return Groups.around(128, 8, weight.view(torch.uint8) ^ 128, scale)
    weight = weight.contiguous().view(torch.uint8)  # stored in words of bnb_4bit_quant_storage
    state = _bitsandbytes_state(part)
    most = need(part, ".weight.absmax")
    if (of_most := part(".weight.nested_absmax")) is not None:  # scales that are quantised, too
        levels = need(part, ".weight.nested_quant_map")[most.long()]
        each = spread(of_most, int(state["nested_blocksize"]), len(levels))
        most = levels * each + float(state["nested_offset"])
    codes = torch.stack([weight.flatten() >> 4, weight.flatten() & 15], dim=-1)
    values = need(part, ".weight.quant_map").float()[codes.long()].flatten()
    wide = spread(most.float(), int(state["blocksize"]), len(values))
    return (values * wide).view(state["shape"])


# --- sizes -----------------------------------------------------------------------------------


def _compressed_size(size: PartSizes, part: Part, config: Mapping[str, Any]) -> Size:
    if packed := size.get(".weight_packed"):
        return packed[0], packed[1] * 32 // _weights_of(config)["num_bits"]
    if _weights_of(config).get("type") == "float":
        scaled_block(size[".weight"], size[".weight_scale"], _blocks(config))
    return size[".weight"]


def _fp8_size(size: PartSizes, part: Part, config: Mapping[str, Any]) -> Size:
    ending = ".weight_scale_inv" if ".weight_scale_inv" in size else ".weight_scale"
    scaled_block(size[".weight"], size[ending], _blocks(config))
    return size[".weight"]


def _bitsandbytes_size(size: PartSizes, part: Part, config: Mapping[str, Any]) -> Size:
    return size[".weight"] if ".SCB" in size else tuple(_bitsandbytes_state(part)["shape"])


def _bitsandbytes_state(part: Part) -> dict[str, Any]:
    written = next((found for name in _STATES if (found := part(name)) is not None), None)
    if written is None:
        raise ValueError("there is no quant_state")
    state: dict[str, Any] = json.loads(bytes(written.tolist()))
    return state


_COMPRESSED = tuple(f".weight_{name}" for name in ("scale", "zero_point", "shape", "g_idx"))
_LEVELS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
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
"""By `quant_method`, those of `described.METHODS`."""
