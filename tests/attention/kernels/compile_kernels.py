"""Compiles the kernels for a card that need not be there, and says what came out, as JSON.

Run without TRITON_INTERPRET: python compile_kernels.py CAPABILITY KIND...
"""

import json
import re
import sys
from dataclasses import asdict

import torch
import triton
from triton.backends.compiler import GPUTarget

from attention.conftest import make
from beamwright.attention import make_attention
from beamwright.attention.kernels import is_interpreted, why_no_kernels
from beamwright_lab.gpu.launches import DEVICE, on_card
from beamwright_lab.gpu.report_compiled import compile_launch, source_of

HEADS = {"kv_heads": 4, "group": 7, "head_dim": 128}
WIDE_HEADS = {"kv_heads": 1, "group": 8, "head_dim": 256}  # of Gemma 2B
KINDS = {
    "plain": HEADS,
    "all": {**HEADS, "softcap": 50.0, "window": 128, "block_tokens": 64},
    "int8": {**HEADS, "kept": "int8"},
    "fp8": {**HEADS, "kept": "fp8"},
    "wide": WIDE_HEADS,
    "wide-int8": {**WIDE_HEADS, "kept": "int8"},
}


def launches(kind, target):
    """What rows that decode and prefill launch; of "all", with sinks, too."""
    with on_card(divmod(target, 10)) as noted:
        backend = make_attention("triton-tree", DEVICE, torch.bfloat16)
        how = {"dtype": torch.bfloat16, "layers": 1, "rows": 3, "device": DEVICE}
        forest = make(2, **how, **KINDS[kind])
        forest.sinks = forest.draw(5, forest.num_heads) if kind == "all" else None
        forest.prefill(backend, range(3), [1, 40, 7])
        forest.decode(backend, range(3), 1)
    return {launch.name: launch for launch in noted.launches}


def early_reads(launch, target):
    """Of each branch that waits for the kernel ahead, what it reads or copies before it does."""
    _, source, options = source_of(launch, target)
    built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    parts = built.asm["ptx"].split("griddepcontrol.wait")[:-1]
    reads = r"(?:ld\.global|cp\.async)[\w.:]*"
    return [sorted(set(re.findall(reads, part.split("st.global")[-1]))) for part in parts]


def main(target, *kinds):
    found = {"on_cpu": why_no_kernels(torch.device("cpu"), torch.float32)}
    found["interpreted"] = is_interpreted()
    for kind in kinds:
        for name, launch in launches(kind, target).items():
            built = asdict(compile_launch(launch, target, ()))
            found[f"{name} {kind}"] = {**built, "early": early_reads(launch, target)}
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))  # noqa: T201
