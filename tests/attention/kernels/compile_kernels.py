"""Compiles the kernels for a card that need not be there, and says what came out, as JSON.

Run without TRITON_INTERPRET: python compile_kernels.py CAPABILITY KIND...
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from beamwright.attention.kernels import is_interpreted, programs, why_no_kernels
from beamwright.attention.kernels.worklist import HeadLayout, decode_tile, prefill_tile

HEADS = HeadLayout(kv_heads=4, group=7, head_dim=128)
WIDE_HEADS = HeadLayout(kv_heads=1, group=8, head_dim=256)  # of Gemma 2B
NUMBERS = ("scale", "num_rows", "first_own_slot")
CODES = ("keys", "values", "key_exponents", "value_exponents")
LISTS = (
    *("num_own", "own_blocks", "items", "entry_blocks", "entry_tokens", "entry_firsts"),
    *("slot_rows", "slot_reach", "tiles", "row_parts", "row_slots", "slots"),
)


def type_of(argument, codes):
    if argument == "scale":
        return "fp32"
    if argument in LISTS:
        return "*i32"
    if argument in ("context", "lse"):
        return "*fp32"
    if codes and argument in CODES:
        return "*i8"
    return "i32" if argument.endswith("stride") or argument in NUMBERS else "*bf16"


def build(kernel, sizes, capability, warps, stages):
    names, codes = kernel.arg_names, sizes.get("CODES")
    if not codes:  # then there are none
        sizes = sizes | {name: None for name in names if name.endswith("exponents")}
    types = {name: "constexpr" if name in sizes else type_of(name, codes) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(kernel, types, constexprs=sizes, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "stack_bytes": stack_bytes(built.asm["cubin"]),
        "early": early_reads(ptx),
        "shared_bytes": built.metadata.shared,
        "tensor_cores": "mma" in ptx,
        "pipelined": "cp.async" in ptx,
        "tf32": "tf32" in ptx,
    }


def early_reads(ptx):
    """Of each branch that waits for the kernel ahead, what it reads or copies before it does."""
    branches = [part.split("st.global")[-1] for part in ptx.split("griddepcontrol.wait")[:-1]]
    reads = r"(?:ld\.global|cp\.async)[\w.:]*"
    return [sorted(set(re.findall(reads, branch))) for branch in branches]


def stack_bytes(cubin):
    """What a thread has spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


# of a model without any of it, one with all, and pools of codes: softcap, window, sinks, codes
MODELS = {
    "": (0.0, 0, False, 0),
    "_all": (50.0, 128, True, 0),
    "_int8": (0.0, 0, False, 1),
    "_fp8": (0.0, 0, False, 2),
}


def attending(heads, model, capability):
    """Both kernels that attend, of these heads."""
    softcap, window, sinks, codes = MODELS[model]
    found = {}
    for kernel, tile in (
        (programs.attend_parts, decode_tile(heads, 2)),
        (programs.attend_chunks, prefill_tile(heads, 2, hopper=capability == 90)),
    ):
        sizes = {
            "KV_HEADS": heads.kv_heads,
            "GROUP": heads.group,
            "HEAD_DIM": heads.head_dim,
            "DIM": tile.dim,
            "ENTRY_TOKENS": 8,
            "PIECES": 4 if model == "_all" else 1,
            "PAIRS": tile.pairs,
            "TOKENS": tile.tokens,
            "SOFTCAP": softcap,
            "WINDOW": window,
            "WIDE": False,
            "CODES": codes,
            "EARLY": capability >= 90,
        }
        if kernel is programs.attend_chunks:
            sizes["SINKS"] = sinks
            del sizes["EARLY"]
        else:
            sizes["MOST"] = 256 // sizes["ENTRY_TOKENS"]
        name = kernel.fn.__name__
        found[name] = build(kernel, sizes, capability, tile.warps, tile.stages)
    return found


def merging(heads, model, capability):
    _, window, sinks, _ = MODELS[model]
    dim = decode_tile(heads, 2).dim
    sizes = {"HEADS": heads.heads, "HEAD_DIM": heads.head_dim, "DIM": dim, "PARTS": 16}
    sizes |= {"SINKS": sinks, "WINDOW": window, "EARLY": capability >= 90}
    return build(programs.merge_rows, sizes, capability, 2, 3)


KINDS = {
    **{model: (HEADS, model) for model in MODELS},
    **{"_wide": (WIDE_HEADS, ""), "_wide_int8": (WIDE_HEADS, "_int8")},
}


def main(capability, *kinds):
    found = {}
    for mark in kinds:
        for name, built in attending(*KINDS[mark], capability).items():
            found[name + mark] = built
        found[f"merge_rows{mark}"] = merging(*KINDS[mark], capability)
    found["interpreted"] = is_interpreted()
    found["on_cpu"] = why_no_kernels(torch.device("cpu"), torch.float32)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))  # noqa: T201
