"""Quantise weights as AWQ, GPTQ, compressed-tensors, FP8, MXFP4 and nf4 files store them.

Rounds to nearest. Returns a file's tensors, and the values that they mean by the format's
definition. Weights are float32 [out, in], experts float32 [experts, out, in].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

GROUP = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Packed:
    """A quantised weight. tensors: by suffix of its name. values: what they mean, float32."""

    tensors: Mapping[str, torch.Tensor]
    values: torch.Tensor


@dataclass(frozen=True)
class Packing:
    """A format. config: its `quantization_config`. experts: packs three-dimensional weights."""

    pack: Callable[[torch.Tensor], Packed]
    config: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack eight codes of the last dimension into an int32, the first lowest."""
    shifts = torch.arange(0, 32, 4)
    return (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1).to(torch.int32)


def _groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.unflatten(-1, (-1, size))


def _affine(weight: torch.Tensor, least_zero: int) -> tuple[torch.Tensor, ...]:
    """Return codes [out, in], zeros and float16 scales [out, groups], and values."""
    parts = _groups(weight, GROUP)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-7).half()
    zero = (-low / scale.float()).round().clamp(least_zero, 15)
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    values = (codes - zero[..., None]) * scale.float()[..., None]
    return codes.flatten(-2), zero, scale, values.flatten(-2)


def awq(weight: torch.Tensor) -> Packed:
    """Pack as AWQ: codes and zeros [in, out], eight columns per word, in its own order."""
    codes, zero, scale, values = _affine(weight, 0)

    def words(rows: torch.Tensor) -> torch.Tensor:
        return _nibbles(_groups(rows, 8)[..., list(_AWQ_ORDER)].flatten(-2))

    tensors = {
        "qweight": words(codes.T.contiguous()),
        "qzeros": words(zero.T.contiguous()),
        "scales": scale.T.contiguous(),
    }
    return Packed(tensors, values)


def gptq(weight: torch.Tensor, *, reorder: bool = False) -> Packed:
    """Pack as GPTQ: codes [in, out], eight rows per word. reorder: desc_act, version 2."""
    order = torch.randperm(weight.shape[1]) if reorder else torch.arange(weight.shape[1])
    codes, zero, scale, values = _affine(weight[:, order], 0 if reorder else 1)
    back = order.argsort()
    tensors = {
        "qweight": _nibbles(codes[:, back]).T.contiguous(),
        "qzeros": _nibbles((zero if reorder else zero - 1).T.contiguous()),
        "scales": scale.T.contiguous(),
        "g_idx": (back // GROUP).int(),
    }
    return Packed(tensors, values[:, back])


def compressed(weight: torch.Tensor) -> Packed:
    parts = _groups(weight, GROUP)
    scale = (parts.abs().amax(-1) / 7.5).clamp(min=1e-7).bfloat16()
    codes = (parts / scale.float()[..., None]).round().clamp(-8, 7)
    tensors = {
        "weight_packed": _nibbles(codes.flatten(-2) + 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return Packed(tensors, (codes * scale.float()[..., None]).flatten(-2))


def fp8_block(weight: torch.Tensor) -> Packed:
    rows, columns = weight.shape
    blocks = weight.unflatten(0, (-1, min(GROUP, rows))).unflatten(-1, (-1, min(GROUP, columns)))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).reshape(weight.shape)
    stored = {"weight": codes.reshape(weight.shape), "weight_scale_inv": scale[:, 0, :, 0]}
    return Packed(stored, values)


def mxfp4(weight: torch.Tensor) -> Packed:
    """Pack experts as MXFP4, two codes a byte: [experts, out, groups, 16], and exponents."""
    parts = _groups(weight, 32)
    exponent = (parts.abs().amax(-1).clamp(min=1e-30) / 6).log2().ceil()
    levels = torch.tensor(_E2M1)
    scaled = parts * (-exponent).exp2()[..., None]
    nearest = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2)
    codes = nearest | (scaled < 0).long() << 3
    tensors = {
        "blocks": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        "scales": (exponent + 127).to(torch.uint8),
    }
    values = levels[nearest] * scaled.sign() * exponent.exp2()[..., None]
    return Packed(tensors, values.flatten(-2))


def nf4(weight: torch.Tensor) -> Packed:
    """Pack as bitsandbytes does without double quantisation."""
    parts, levels = weight.reshape(-1, 64), torch.tensor(_NF4)
    most = parts.abs().amax(-1)
    codes = torch.bucketize(parts / most[:, None], (levels[1:] + levels[:-1]) / 2).flatten()
    state = {
        **{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"},
        "shape": list(weight.shape),
    }
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": most,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return Packed(tensors, (levels[codes].view_as(parts) * most[:, None]).view_as(weight))


def _gptq_config(**more: Any) -> Mapping[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, **more}


# Formats whose checkpoint is a folder, by name.
PACKINGS: Mapping[str, Packing] = {
    "AWQ": Packing(
        awq,
        {
            **{"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
            "version": "gemm",
        },
    ),
    "GPTQ": Packing(gptq, _gptq_config(desc_act=False)),
    "GPTQ v2, desc_act": Packing(
        lambda weight: gptq(weight, reorder=True),
        _gptq_config(desc_act=True, checkpoint_format="gptq_v2"),
    ),
    "compressed-tensors int4": Packing(
        compressed,
        {
            **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
            **{"quantization_status": "compressed", "ignore": ["lm_head"]},
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        **{"num_bits": 4, "type": "int", "symmetric": True},
                        **{"strategy": "group", "group_size": GROUP},
                    },
                }
            },
        },
    ),
    "FP8 block": Packing(
        fp8_block,
        {
            **{"quant_method": "fp8", "activation_scheme": "dynamic"},
            "weight_block_size": [GROUP, GROUP],
        },
    ),
    "MXFP4": Packing(mxfp4, {"quant_method": "mxfp4"}, experts=True),
    "nf4": Packing(
        nf4,
        {
            **{"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
            **{"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
            "bnb_4bit_use_double_quant": False,
        },
    ),
}
