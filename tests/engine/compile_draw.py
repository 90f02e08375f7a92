"""Compiles the kernels that draw, for cards that need not be there, and says what came out.

Run without TRITON_INTERPRET: python compile_draw.py CAPABILITY...
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from beamwright.engine import draw_kernel, filter_kernel

TYPES = {
    "logits": "*bf16",
    "keys": "*i32",
    "positions": "*i64",
    "greedy": "*i1",
    **dict.fromkeys(("temperature", "top_p", "min_p", "masses", "borders"), "*fp32"),
    "top_k": "*i64",
    "ids": "*i32",
    "lasts": "*i32",
    "piece_tokens": "*i32",
    "pieces": "*fp32",
    "tokens": "*i64",
    "logprobs": "*fp32",
}
SIZES = {
    "TOKENS": draw_kernel.PIECE_TOKENS,
    "SHIFT": 9,
    "STEP": 2.0**-23,
    "PIECES": 128,
    "FAST": True,
    "GROUP": filter_kernel.GROUP_TOKENS,
    "ROOM": filter_kernel.ROOM,
    "CHUNK": filter_kernel.CHUNK_TOKENS,
}
KERNELS = {
    "draw_pieces": (draw_kernel.draw_pieces, {"num_warps": 4}, {"borders": None, "lasts": None}),
    "draw_pieces of filtered": (draw_kernel.draw_pieces, {"num_warps": 4}, {}),
    "merge_pieces": (draw_kernel.merge_pieces, {"num_warps": 1}, {}),
    "find_maxima": (filter_kernel.find_maxima, {"num_warps": 4}, {}),
    "find_borders": (filter_kernel.find_borders, filter_kernel.HOW, {}),
}
UNUSED_BITS = {"bf16": 16, "fp32": 0}


def build(kernel, how, sizes, capability, dtype="bf16"):
    sizes = {
        name: size
        for name, size in (SIZES | {"UNUSED": UNUSED_BITS[dtype]} | sizes).items()
        if name in kernel.arg_names
    }
    types = {
        name: "constexpr" if name in sizes else TYPES.get(name, "i32") for name in kernel.arg_names
    }
    types |= {name: f"*{dtype}" for name in ("logits", "values", "maxima") if name in types}
    source = ASTSource(kernel, types, constexprs=sizes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)
    return {
        **used(built.asm["cubin"]),
        "shared_bytes": built.metadata.shared,
        "approximate_log": "lg2.approx" in built.asm["ptx"],
        "accurate_log": "1059760811" in built.asm["ptx"],  # what it takes a mantissa apart with
        "exact_quotient": "div.rn.f32" in built.asm["ptx"],
    }


def used(cubin):
    """Registers of a thread, and bytes that it has spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", said).group(1)) for key in ("REG", "STACK"))
    return {"registers": registers, "stack_bytes": stack}


if __name__ == "__main__":
    work = product(KERNELS, UNUSED_BITS, sys.argv[1:])
    found = {" ".join(each): build(*KERNELS[each[0]], int(each[2]), each[1]) for each in work}
    print(json.dumps(found))  # noqa: T201
