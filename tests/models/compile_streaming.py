"""Compiles the streamed products for a card that need not be there; prints what came out, as JSON.

Run without TRITON_INTERPRET: python compile_streaming.py CAPABILITY...
"""

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from beamwright.models import streaming

NUMBERS = ("rows", "outputs", "columns", "parts")
ALIGNED = ("x", "weight", "bias", "out", "partial", "outputs", "columns")


def build(kernel, sizes, capability, **options):
    wide = ("partial", *(["out"] if sizes.get("PARTIAL") else []))
    sizes = sizes | {"ends": None, "BITS": 0, "GROUP": 0}
    types = {
        name: "constexpr" if name in sizes else "i32" if name in NUMBERS
        else "*fp32" if name in wide else "*bf16"
        for name in kernel.arg_names
    }  # fmt: skip
    places = [(at,) for at, name in enumerate(kernel.arg_names) if name in ALIGNED]
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(kernel, types, constexprs=sizes, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "shared_bytes": built.metadata.shared,
        "spills": spilled(ptx, capability),
        "pipelined": "cp.async" in ptx,
        "early": re.findall(r"ld\.global|cp\.async", ptx.split("griddepcontrol.wait")[0])
        if "griddepcontrol.wait" in ptx
        else None,
        "mma": "mma.sync" in ptx,
        "wgmma": "wgmma" in ptx,
    }


def spilled(ptx, capability):
    """Bytes that a thread keeps outside its registers."""
    assembler = get_ptxas(capability).path
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def both(capability):
    """Of few rows and of more a part, and of many all parts in turn."""
    found = {}
    tiles = {"few": streaming._TILES[0], "many": streaming._MANY, "whole": streaming._WHOLE}
    for name, tile in tiles.items():
        sizes = {
            "ROWS": tile.rows, "OUTPUTS": tile.outputs, "COLUMNS": tile.columns,
            "STAGES": tile.stages, "UNIT": streaming.UNIT, "PARTIAL": name != "whole",
            "ALONE": False, "WIDE": False, "LATE": tile.late, "EARLY": capability >= 90,
        }  # fmt: skip
        if name != "whole":
            sizes["bias"] = None
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        found[name] = build(streaming.multiply_parts, sizes, capability, **options)
    for tile in streaming._TILES:
        sizes = {
            "ROWS": tile.rows, "OUTPUTS": tile.outputs, "COLUMNS": tile.columns,
            "STAGES": tile.stages, "WIDE": False, "LATE": tile.late, "EARLY": capability >= 90,
        }  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        found[f"gated {tile.rows}"] = build(streaming.multiply_gated, sizes, capability, **options)
    return found


if __name__ == "__main__":
    print(json.dumps({each: both(int(each)) for each in sys.argv[1:]}))  # noqa: T201
