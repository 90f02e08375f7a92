"""Compiles the kernels of `models.step_kernels` for cards that need not be there; prints JSON.

Run without TRITON_INTERPRET: python compile_steps.py FOLDER CAPABILITY...
"""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from beamwright.models import step_kernels

WIDE = ("decay", "shift", "skip")
TABLES = ("sources", "targets", "ways")
# Key heads, heads, key and value dim, blocks of a record, bytes of a block: Qwen3.5's 9B and 27B.
SHAPES = {"9b": (16, 32, 128, 128, 100, 2**19), "27b": (16, 48, 128, 128, 148, 2**20)}


def cases(key_heads, heads, keys, values, blocks, block_bytes):
    """(Kernel, its constants, numbers of a state, warps)."""
    block, tile = step_kernels._tile(keys, values)
    warps = step_kernels._WARPS
    sizes = {
        "BLOCKS": blocks, "WHOLE": True, "HEADS": heads, "SHARED": heads // key_heads,
        "KEYS": keys, "VALUES": values, "KEY_BLOCK": block, "TILE": tile, "NORMED": True,
    }  # fmt: skip
    for kept, size in (("*fp32", 4), ("*bf16", 2)):
        numbers = {**sizes, "BLOCK_NUMBERS": block_bytes // size}
        yield step_kernels.delta_rows, numbers, kept, warps
        yield step_kernels.delta_rows, {**numbers, "WHOLE": False}, kept, warps
    sizes = {
        "BLOCKS": blocks, "BLOCK_NUMBERS": block_bytes // 4, "WHOLE": True, "HEADS": heads,
        "SHARED": heads, "VALUES": values, "KEYS": keys, "KEY_BLOCK": block, "TILE": tile,
    }  # fmt: skip
    yield step_kernels.scan_rows, sizes, "*fp32", warps
    sizes = {"BLOCKS": blocks, "BLOCK_NUMBERS": block_bytes // 2, "TAPS": 4, "SILU": True}
    sizes |= {"CHANNELS": 2 * key_heads * keys + heads * values, "TILE": step_kernels._CHANNELS}
    yield (
        step_kernels.convolve_rows, {**sizes, "bias": None}, "*bf16", warps
    )  # fmt: skip


def build(kernel, sizes, kept, warps, capability):
    """Its PTX, as of aligned tensors."""
    sizes = {**sizes, "EARLY": capability >= 90}
    types = {
        name: "constexpr" if name in sizes else "i32" if name == "offset" or "stride" in name
        else "*i32" if name in TABLES else "*fp32" if name in WIDE
        else kept if name == "states" else "*bf16"
        for name in kernel.arg_names
    }  # fmt: skip
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    source = ASTSource(kernel, types, constexprs=sizes, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]


def assembled(ptx, capability, folder):
    """Registers, and bytes that are spilled."""
    path = Path(folder) / "kernel.ptx"
    path.write_text(ptx)
    target = f"sm_{capability}" + "a" * (capability >= 90)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", path, "-o", f"{path}.o"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    return registers, sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))


def main(folder, *capabilities):
    found = []
    for capability, (name, shape) in product(map(int, capabilities), SHAPES.items()):
        for kernel, constants, kept, warps in cases(*shape):
            ptx = build(kernel, constants, kept, warps, capability)
            registers, spilled = assembled(ptx, capability, folder)
            built = {
                "kernel": f"{kernel.fn.__name__} {name} {kept} {capability}",
                "whole": constants.get("WHOLE"),
                "registers": registers,
                "spilled": spilled,
                "wide_loads": len(re.findall(r"ld\.global\S*v4\.b32", ptx)),
                "loads": len(re.findall(r"ld\.global", ptx)),
                "wide_stores": len(re.findall(r"st\.global\S*v[24]\.b32", ptx)),
                "stores": len(re.findall(r"st\.global", ptx)),
            }
            found.append(built)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
