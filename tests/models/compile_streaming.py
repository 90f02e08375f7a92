"""Compiles the streamed products for a card that need not be there; prints what came out, as JSON.

Run without TRITON_INTERPRET: python compile_streaming.py CAPABILITY...
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from beamwright.models import streaming

NUMBERS = ("rows", "outputs", "columns", "parts")
ALIGNED = ("x", "weight", "bias", "out", "partial", "outputs", "columns")


def build(kernel, sizes, capability, **options):
    wide = ("partial", *(["out"] if sizes.get("PARTIAL") else []))
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
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(assembler), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def both(capability):
    """Of few rows a part, and of many all parts in turn."""
    found = {}
    for name, tile in (("few", streaming._TILES[0]), ("whole", streaming._WHOLE)):
        sizes = {
            "ROWS": tile.rows, "OUTPUTS": tile.outputs, "COLUMNS": tile.columns,
            "STAGES": tile.stages, "UNIT": streaming.UNIT, "PARTIAL": name == "few",
            "ALONE": False, "WIDE": False, "EARLY": capability >= 90,
        }  # fmt: skip
        if name == "few":
            sizes["bias"] = None
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        found[name] = build(streaming.multiply_parts, sizes, capability, **options)
    return found


if __name__ == "__main__":
    print(json.dumps({each: both(int(each)) for each in sys.argv[1:]}))  # noqa: T201
