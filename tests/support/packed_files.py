"""Checkpoints in quantised formats, of random codes: what a folder holds, and what it means.

Each packer gets [out, in] and a generator and returns the tensors of one projection, by what stands
behind its name, and its values [out, in] by the format's definition, in float32.
"""

from __future__ import annotations

import json
import re

import torch
from safetensors.torch import load_file, save_file

GROUP = 32


def _codes(draws, levels, *size):
    return torch.randint(levels, size, generator=draws)


def _scales(draws, *size, levels=16):
    return (torch.rand(size, generator=draws).add_(0.5) * 0.3 / levels).half()


def _wide(groups, columns):
    """[out, groups] to [out, columns]."""
    return groups.repeat_interleave(columns // groups.shape[1], dim=1)


def bit_stream(codes, bits):
    """Codes [..., count] one behind the other, the lowest bit first, in int32 words."""
    singles = codes[..., None] >> torch.arange(bits) & 1
    words = singles.flatten(-2).unflatten(-1, (-1, 32)) << torch.arange(32)
    return words.sum(-1).to(torch.int32)


def awq(draws, rows, columns):
    codes, scale = _codes(draws, 16, rows, columns), _scales(draws, rows, columns // GROUP)
    zeros = _codes(draws, 16, rows, columns // GROUP)

    def words(values):  # the word's nibble 0 is column 0, nibble 1 column 2, and so on
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        return bit_stream(values.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    tensors = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scale.t()}
    return tensors, (codes - _wide(zeros, columns)) * _wide(scale.float(), columns)


def gptq(bits, version=1, *, apart=False):
    def pack(draws, rows, columns):
        codes = _codes(draws, 1 << bits, rows, columns)
        scale = _scales(draws, rows, columns // GROUP, levels=1 << bits)
        stored = _codes(draws, 1 << bits, rows, columns // GROUP)
        zeros = stored + (version == 1)
        groups = torch.arange(columns) // GROUP
        groups = groups[torch.randperm(columns, generator=draws)] if apart else groups
        tensors = {
            "qweight": bit_stream(codes, bits).t(),
            "qzeros": bit_stream(stored.t(), bits),
            "scales": scale.t(),
            "g_idx": groups.int(),
        }
        return tensors, (codes - zeros[:, groups]) * scale.float()[:, groups]

    return pack


def compressed(bits, *, zero=False):
    def pack(draws, rows, columns):
        half = 1 << bits - 1
        codes = _codes(draws, 1 << bits, rows, columns) - half
        scale = _scales(draws, rows, columns // GROUP, levels=1 << bits).bfloat16()
        zeros = _codes(draws, 1 << bits, rows, columns // GROUP) - half if zero else 0 * scale
        tensors = {
            "weight_packed": bit_stream(codes + half, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zero:
            tensors["weight_zero_point"] = bit_stream((zeros + half).t(), bits).t()
        return tensors, (codes - _wide(zeros, columns)) * _wide(scale.float(), columns)

    return pack


def int_quantised(draws, rows, columns):
    codes, scale = _codes(draws, 256, rows, columns) - 128, _scales(draws, rows, 1, levels=256)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float()


def float_quantised(draws, rows, columns):
    weight = (torch.randn(rows, columns, generator=draws) * 100).to(torch.float8_e4m3fn)
    scale = _scales(draws, rows, 1, levels=2000)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale.float()


def fp8_blocks(draws, rows, columns):
    weight = (torch.randn(rows, columns, generator=draws) * 100).to(torch.float8_e4m3fn)
    scale = _scales(draws, -(-rows // 128), -(-columns // 128), levels=2000).float()
    each = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"weight": weight, "weight_scale_inv": scale}, weight.float() * each


def _nested(absmax, draws):
    """Scales as 8-bit levels, with a scale per 256 and an offset."""
    levels = torch.linspace(-1, 1, 256)
    codes = _codes(draws, 256, len(absmax)).to(torch.uint8)
    each, offset = torch.rand(-(-len(codes) // 256), generator=draws) * 0.1, 0.2
    values = levels[codes.long()] * each.repeat_interleave(256)[: len(codes)] + offset
    tensors = {"absmax": codes, "nested_quant_map": levels, "nested_absmax": each}
    return tensors, values, {"nested_blocksize": 256, "nested_offset": offset}


def nf4(*, nested=False):
    def pack(draws, rows, columns):
        table = torch.linspace(-1, 1, 16).pow(3)
        codes = _codes(draws, 16, rows * columns)
        absmax, more = torch.rand(rows * columns // 64, generator=draws).mul_(0.3), {}
        state = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [rows, columns],
        }
        parts = {"absmax": absmax}
        if nested:
            parts, absmax, more = _nested(absmax, draws)
        text = torch.tensor(list(json.dumps(state | more).encode()), dtype=torch.uint8)
        tensors = {
            "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": text,
            **{f"weight.{name}": part for name, part in parts.items()},
        }
        return tensors, (table[codes] * absmax.repeat_interleave(64)).view(rows, columns)

    return pack


def nf4_in_words(draws, rows, columns):
    """With bnb_4bit_quant_storage bfloat16."""
    tensors, values = nf4()(draws, rows, columns)
    return {**tensors, "weight": tensors["weight"].flatten().view(torch.bfloat16)[:, None]}, values


def llm_int8(draws, rows, columns):
    codes = _codes(draws, 255, rows, columns) - 127
    most = torch.rand(rows, generator=draws).mul_(0.3)
    weight = codes * (most / 127)[:, None]
    form = torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes.to(torch.int8), "SCB": most, "weight_format": form}, weight


def _ct(form, bits, kind="int", **more):
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": GROUP, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def _gptq(bits, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **more}


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
FORMATS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq-4": (gptq(4), _gptq(4)),
    "gptq-v2-4": (gptq(4, 2), _gptq(4, checkpoint_format="gptq_v2")),
    "gptq-desc-act": (gptq(4, apart=True), _gptq(4, desc_act=True)),
    "gptq-8": (gptq(8), _gptq(8)),
    "gptq-3": (gptq(3), _gptq(3)),
    "ct-int4": (compressed(4), _ct("pack-quantized", 4)),
    "ct-int4-zero": (compressed(4, zero=True), _ct("pack-quantized", 4)),
    "ct-int8": (compressed(8), _ct("pack-quantized", 8)),
    "ct-w8": (int_quantised, _ct("int-quantized", 8, strategy="channel", group_size=None)),
    "ct-fp8": (float_quantised, _ct("float-quantized", 8, "float", strategy="channel")),
    "fp8": (fp8_blocks, _BLOCKS),
    "nf4": (nf4(), _NF4),
    "nf4-nested": (nf4(nested=True), _NF4),
    "nf4-words": (nf4_in_words, _NF4),
    "bnb-int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}  # fmt: skip
"""By name: the packer of a projection, and what config.json says of it."""
KEPT = {
    "awq": 4, "gptq-4": 4, "gptq-v2-4": 4, "gptq-8": 8, "gptq-3": 4, "ct-int4": 4,
    "ct-int4-zero": 4, "ct-int8": 8, "ct-w8": 8, "bnb-int8": 8,
}  # fmt: skip
"""Bits that they have in memory, of those that stay in groups."""
_PROJECTION = re.compile(r"(.*layers\.\d+\..*_proj)\.weight")


def quantise(folder, name, model, skip=()):
    """Put random codes into a checkpoint folder in place of its projections, and into `model`.

    skip: names of projections that stay as they are.
    """
    pack, config = FORMATS[name]
    draws, stored, meant = torch.Generator().manual_seed(1), {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        match = _PROJECTION.fullmatch(key)
        if match is None or key in skip:
            stored[key] = tensor
            continue
        tensors, meant[key] = pack(draws, *tensor.shape)
        stored |= {f"{match[1]}.{part}": value.contiguous() for part, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(written))
    model.load_state_dict(meant, strict=False)
    return meant
