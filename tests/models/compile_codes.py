"""Compiles products of weights in codes for cards that need not be there; prints what came out.

JSON, by capability. Run without TRITON_INTERPRET: python compile_codes.py 80,90 int4,int8 16,64
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from beamwright.models import codes, streaming

NUMBERS = ("rows", "outputs", "columns", "parts")
ALIGNED = ("x", "weight", "words", "ends", "bias", "out", "outputs", "columns")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FORMS = {
    "int4": (4, 64),
    "awq": (4, 128),
    "q4": (4, 32),
    "int8": (8, codes._ROW),
    "q8": (8, 32),
    "q6": (8, 16),
}


def build(kernel, sizes, capability, **options):
    def kind(name):
        if name in sizes or name in NUMBERS:
            return "constexpr" if name in sizes else "i32"
        if name in ("weight", "words", "ends"):
            return "*i32"
        return "*fp32" if name == "out" and sizes.get("PARTIAL") else "*bf16"

    types = {name: kind(name) for name in kernel.arg_names}
    places = [(at,) for at, name in enumerate(kernel.arg_names) if name in ALIGNED]
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(kernel, types, constexprs=sizes, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        used = said(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        sass = said(TOOLS / "nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", used).groups())
    loop = loop_of(sass)
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": built.metadata.shared,
        # Copies of tiles to come that a tile's wait leaves on their way.
        "ahead": [
            int(left) for left in re.findall(r"async_wait.*{num = (\d+)", built.asm["ttgir"])
        ],
        "loop": loop,
        "wide_copies": sum(n for name, n in loop.items() if re.match(r"LDGSTS.*\.128", name)),
        "stored": sum(n for name, n in loop.items() if name.startswith("STS")),
        "read": sum(n for name, n in loop.items() if name.startswith("LDG.")),
        "products": sum(n for name, n in loop.items() if re.match(r"HMMA|HGMMA", name)),
        "instructions": sum(loop.values()),
    }


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loop_of(sass):
    """Instructions of the longest loop, by name."""
    lines, first, longest = sass.splitlines(), {}, Counter()
    for at, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            first[label[1]] = at
        back = re.search(r"BRA\S*.*`\((\.L_x_\d+)\)", line)
        if back and back[1] in first:
            named = (
                re.search(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", each)
                for each in lines[first[back[1]] : at + 1]
            )
            found = Counter(each[1] for each in named if each)
            longest = max(longest, found, key=Counter.total)
    return longest


def products(capability, bits, group, rows):
    """In parts and gated, for each tile of so many rows."""
    found = {}
    for tile in (each for each in streaming._CODED if str(each.rows) in rows):
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        sizes = {
            "ROWS": tile.rows, "OUTPUTS": tile.outputs, "COLUMNS": tile.columns,
            "STAGES": tile.stages, "BITS": bits, "GROUP": group, "WIDE": False,
            "LATE": tile.late, "EARLY": capability >= 90,
        }  # fmt: skip
        both = sizes | {"UNIT": codes.UNIT, "PARTIAL": True, "ALONE": False, "bias": None}
        found[f"parts {tile.rows}"] = build(streaming.multiply_parts, both, capability, **options)
        gated = build(streaming.multiply_gated, sizes, capability, **options)
        found[f"gated {tile.rows}"] = gated
    return found


if __name__ == "__main__":
    capabilities, forms, rows = (each.split(",") for each in sys.argv[1:])
    found = {
        f"{capability} {form}": products(int(capability), *FORMS[form], rows)
        for capability in capabilities
        for form in forms
    }
    print(json.dumps(found))  # noqa: T201
