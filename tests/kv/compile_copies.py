"""Compiles the copying kernel for cards that need not be there; prints what came out, as JSON.

Run without TRITON_INTERPRET: python compile_copies.py CAPABILITY...
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

from beamwright.kv import copy_kernel

TYPES = {"there": "*i32", "here": "*i32", "numbers": "*i32", "count": "i32", "units": "i32"}


def build(capability):
    kernel = copy_kernel.move_blocks
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(3)}
    source = ASTSource(
        kernel,
        {**TYPES, "UNITS": "constexpr"},
        constexprs={"UNITS": copy_kernel._TILE_UNITS},
        attrs=aligned,
    )
    options = {"num_warps": copy_kernel._WARPS}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "loads": re.findall(r"ld\.global\S*", ptx),
        "stores": re.findall(r"st\.global\S*", ptx),
        "shared_bytes": built.metadata.shared,
        **spilled(ptx, capability),
    }


def spilled(ptx, capability):
    """Registers of a thread, and bytes that it keeps outside them."""
    blackwell = "-blackwell" if capability >= 100 else ""
    assembler = Path(triton.__file__).parent / f"backends/nvidia/bin/ptxas{blackwell}"
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(assembler), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    return {"spills": sum(map(int, re.findall(r"(\d+) bytes spill", said))), "registers": registers}


if __name__ == "__main__":
    print(json.dumps({each: build(int(each)) for each in sys.argv[1:]}))  # noqa: T201
