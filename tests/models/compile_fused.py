"""Compiles the kernels of `models.fused` for cards that need not be there, and says what came out.

Run without TRITON_INTERPRET: python compile_fused.py FOLDER CAPABILITY...
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

from beamwright.models import fused

TYPES = {"eps": "fp32", "adds": "i32", "positions": "*i64"}
# hidden, heads of queries, turned heads, width of an MLP; of a 7B, and of no power of two
MODELS = {"*bf16": (3584, 28, 32, 18944), "*fp32": (2560, 30, 33, 6912)}


def cases(hidden, queries, turned, inner):
    """(Kernel, its constants, warps) of a model."""
    block, warps = fused._row_sizes(hidden)
    sizes = {"WIDTH": hidden, "BLOCK": block, "PARTS": 0}
    yield fused.add_norm_rows, {**sizes, "CENTRED": False, "bias": None}, warps
    yield fused.add_norm_rows, {**sizes, "PARTS": 6, "CENTRED": False, "bias": None}, warps
    yield fused.add_norm_rows, {**sizes, "CENTRED": True}, warps
    heads, dim, warps = fused._head_sizes(turned, 64)
    sizes = {"QUERIES": queries, "TURNED": turned, "HEADS": heads, "HALF": 64, "DIM": dim}
    sizes["STRIDE"] = 128 * (turned + 4)
    yield fused.rotate_rows, sizes, warps
    yield fused.rotate_rows, {**sizes, "query_weight": None, "key_weight": None}, warps
    for kind in fused.GATED:
        sizes = {"WIDTH": inner, "PIECE": fused._PIECE, "KIND": kind}
        yield fused.gate_rows, sizes, fused._PIECE_WARPS


def build(kernel, sizes, warps, numbers, capability):
    """Its PTX, as of aligned tensors."""
    names = kernel.arg_names
    sizes = sizes | {"EARLY": capability >= 90}
    types = {n: "constexpr" if n in sizes else TYPES.get(n, numbers) for n in names}
    if sizes.get("PARTS"):
        types["delta"] = "*fp32"
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name] in (numbers, "*fp32")
    }
    source = ASTSource(kernel, types, constexprs=sizes, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]


def spilled_bytes(ptx, capability, folder):
    """What the assembler says."""
    path = Path(folder) / "kernel.ptx"
    path.write_text(ptx)
    target = f"sm_{capability}" + "a" * (capability >= 90)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", path, "-o", f"{path}.o"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "registers" in said
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))


def early_reads(ptx, capability):
    """Loads before a kernel waits for the one ahead of it; as of capability 9 it has to."""
    if capability < 90:
        return 0
    before, _ = ptx.split("griddepcontrol.wait")
    return len(re.findall(r"ld\.global|cp\.async", before))


def main(folder, *capabilities):
    found = []
    for capability, (numbers, sizes) in product(map(int, capabilities), MODELS.items()):
        for kernel, constants, warps in cases(*sizes):
            ptx = build(kernel, constants, warps, numbers, capability)
            loads = re.findall(r"ld\.global\S*", ptx)
            built = {
                "kernel": f"{kernel.fn.__name__} {numbers} {capability}",
                "spilled": spilled_bytes(ptx, capability, folder),
                "early_reads": early_reads(ptx, capability),
                "narrow_loads": sum("v4.b32" not in load for load in loads),
            }
            found.append(built)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
