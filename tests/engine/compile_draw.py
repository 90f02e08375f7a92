"""Compiles the kernels that draw, for cards that need not be there, and says what came out.

Run without TRITON_INTERPRET: python compile_draw.py CAPABILITY...
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from beamwright.engine import draw_kernel

TYPES = {
    "logits": "*bf16",
    "keys": "*i32",
    "positions": "*i64",
    "greedy": "*i1",
    "temperature": "*fp32",
    "piece_tokens": "*i32",
    "pieces": "*fp32",
    "tokens": "*i64",
    "logprobs": "*fp32",
}
NONE = ("borders", "lasts")  # filters have their own, `beamwright_lab.gpu.report_compiled`'s
SIZES = {
    "TOKENS": draw_kernel.PIECE_TOKENS,
    "SHIFT": 9,
    "STEP": 2.0**-23,
    "PIECES": 128,
    "FAST": True,
}


def build(kernel, capability):
    types, sizes = {}, {}
    for name in kernel.arg_names:
        types[name] = "constexpr" if name in (*SIZES, *NONE) else TYPES.get(name, "i32")
        if types[name] == "constexpr":
            sizes[name] = SIZES.get(name)
    source = ASTSource(kernel, types, constexprs=sizes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return {
        "approximate_log": "lg2.approx" in built.asm["ptx"],
        "accurate_log": "1059760811" in built.asm["ptx"],  # what it takes a mantissa apart with
        "exact_quotient": "div.rn.f32" in built.asm["ptx"],
        "draws": kernel is draw_kernel.draw_pieces,
    }


if __name__ == "__main__":
    kernels = (draw_kernel.draw_pieces, draw_kernel.merge_pieces)
    found = {f"{k.fn.__name__} {c}": build(k, int(c)) for k in kernels for c in sys.argv[1:]}
    print(json.dumps(found))  # noqa: T201
