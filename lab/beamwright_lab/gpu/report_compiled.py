"""Compile our kernels for cards that are not here; report kernels that spill registers.

    python -m beamwright_lab.gpu.report_compiled                    # named models, five targets
    python -m beamwright_lab.gpu.report_compiled --models qwen2.5-7b --targets 90 --json FILE

Covers every kernel of a decode step with 16, 64 and 256 rows, of a prefill pass (`launches`) and of
recurrent layers. Triton and ptxas compile each distinct one as on a card, with TRITON_INTERPRET
unset. Triton's cache keeps the results: a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from beamwright.kv.states import StateBlocks, StatePlace
from beamwright.models import step_kernels
from beamwright.models.named import shape_from_text
from beamwright.models.shape import ModelShape
from beamwright.sections import SamplingSettings
from beamwright_lab.gpu.launches import DEVICE, Launch, on_card, prefill_launches, step_launches

MODELS = (
    *("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "llama-3.1-8b", "qwen2.5-14b"),
    *("qwen3-8b", "qwen3.5-9b"),
)
TARGETS = (80, 86, 89, 90, 120)
_ROWS = (16, 64, 256)
_PROMPTS = (300, 40)
# Per multiprocessor: KiB of shared memory, threads, programs. All have 64 Ki registers.
_LIMITS = {
    80: (164, 2048, 32),
    86: (100, 1536, 16),
    89: (100, 1536, 24),
    90: (228, 2048, 32),
    120: (100, 1536, 24),
}
_READ = r"(?:ld\.global|cp\.async\.c[ag]\.shared\.global)\S*[^;]*"
_WIDE_READ = r"\.v4\.[bfu]32|\.v2\.[bfu]64|, (?:16|0x10)\b"
_REGISTERS, _RESERVED_BYTES, _LANES = 1 << 16, 1024, 32


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one card.

    programs: how many fit on a multiprocessor. ahead: per pipelined loop, the async copies still in
    flight after its wait. wide, narrow: reads and copies of 16 bytes, and of fewer. early: reads
    before the wait for the preceding kernel. unit: its matrix instruction. models: which of them
    launch it.
    """

    kernel: str
    target: int
    models: tuple[str, ...]
    sizes: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    programs: int
    ahead: tuple[int, ...]
    wide: int
    narrow: int
    early: int
    unit: str


def launches_of(shape: ModelShape, target: int) -> Iterator[Launch]:
    """Yield a model's launches on a card, with repetitions."""
    capability = divmod(target, 10)
    if shape.states:
        yield from _state_steps(shape, capability)
        return
    for rows in _ROWS:
        yield from step_launches(shape, rows, capability=capability).launches
    filters = SamplingSettings(top_k=20, top_p=0.95)
    yield from step_launches(shape, 16, filters, capability=capability).launches
    yield from prefill_launches(shape, _PROMPTS, capability).launches


def _state_steps(shape: ModelShape, capability: tuple[int, int]) -> list[Launch]:
    """Record the step kernels of a recurrent layer: convolution, delta rule, Mamba-2's scan.

    The delta rule runs with float32 and bfloat16 states, with whole and with split heads in a
    block.
    """
    conv, recurrent = (next(s for s in shape.states if s.kind == k) for k in ("conv", "recurrent"))
    (channels, taps), (heads, keys, values) = conv.size, recurrent.size
    rows, blocks, block_bytes = 8, 100, 1 << 19

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=DEVICE)

    with on_card(capability) as noted:
        storage, ways = empty(64, block_bytes, dtype=torch.uint8), empty(rows, dtype=torch.int32)
        sources, targets = (empty(rows, blocks, dtype=torch.int32) for _ in range(2))
        cells = StateBlocks(storage, sources, targets, ways)
        step_kernels.convolution_step(
            StatePlace(cells, 0, torch.bfloat16), empty(rows, channels), empty(channels, taps)
        )
        shared = (channels - heads * values) // (2 * keys)
        query, key = (empty(rows, shared, keys) for _ in range(2))
        decay, beta = (empty(rows, heads, dtype=torch.float32) for _ in range(2))
        value = empty(rows, heads, values)
        for kept, line in product((torch.float32, torch.bfloat16), (0, 1)):
            state = StatePlace(cells, line * values * kept.itemsize, kept)
            step_kernels.delta_step(state, query, key, value, decay, beta)
        scanned, of_heads = value[..., : values // 2], [decay[0] for _ in range(3)]
        step_kernels.scan_step(
            StatePlace(cells, 0, torch.float32), scanned.contiguous(), beta, query, key, *of_heads
        )
    return noted.launches


def compile_launch(launch: Launch, target: int, models: Iterable[str]) -> Compiled:
    """Compile a launch's kernel for a target and read its resource use."""
    kernel, source, options = source_of(launch, target)
    built = triton.compile(source, target=GPUTarget("cuda", target, _LANES), options=options)
    ptx, warps = built.asm["ptx"], built.metadata.num_warps
    registers, stack = _read_usage(built.asm["cubin"])
    shared = built.metadata.shared
    reads = re.findall(_READ, ptx)
    early = ptx.split("griddepcontrol.wait")[0] if "griddepcontrol.wait" in ptx else ""
    wide = [read for read in reads if re.search(_WIDE_READ, read)]
    return Compiled(
        kernel,
        target,
        tuple(models),
        _sizes(launch),
        warps,
        registers,
        stack,
        shared,
        programs_of(target, registers, shared, warps),
        tuple(map(int, re.findall(r"async_wait.*{num = (\d+)", built.asm["ttgir"]))),
        len(wide),
        len(reads) - len(wide),
        len(re.findall(_READ, early)),
        next((unit for unit in ("wgmma", "mma.sync") if unit in ptx), ""),
    )


def source_of(launch: Launch, target: int) -> tuple[str, ASTSource, dict[str, Any]]:
    """Return a launch's name, source and options as Triton compiles them."""
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: unset it to compile")
    backend = make_backend(GPUTarget("cuda", target, _LANES))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = dict(launch.options)
    bound, specialisation, rest = binder(*launch.arguments, **given)
    options, signature, constants, attributes = kernel._pack_args(
        backend, {**given, **rest}, bound, specialisation, rest
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return launch.name, source, options.__dict__


def programs_of(target: int, registers: int, shared_bytes: int, warps: int) -> int:
    """Number of programs that fit on one multiprocessor of the target."""
    kibibytes, threads, most = _LIMITS[target]
    of_registers = _REGISTERS // (-(-registers // 8) * 8 * _LANES * warps)
    of_shared = kibibytes * 1024 // (shared_bytes + _RESERVED_BYTES)
    return min(of_registers, of_shared, threads // (_LANES * warps), most)


def _sizes(launch: Launch) -> str:
    """Format a launch's integer constants, such as tile sizes."""
    kernel = launch.kernel
    names = kernel.arg_names
    given = dict(zip(names, launch.arguments, strict=False)) | dict(launch.options)
    shown = [
        f"{name.lower()}={given[name]}"
        for name in names
        if name.isupper() and name in given and not isinstance(given[name], bool | float)
    ]
    return " ".join(shown)


def _read_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread; spilled registers lie on the stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def compile_all(models: Iterable[str], targets: Iterable[int]) -> Iterator[Compiled]:
    """Compile each distinct kernel of these models for these targets."""
    models = list(models)
    for target in targets:
        found: dict[str, tuple[Launch, list[str]]] = {}
        for name in models:
            for launch in launches_of(shape_of(name), target):
                _, source, options = source_of(launch, target)
                key = f"{source.hash()} {sorted(options.items(), key=str)}"
                users = found.setdefault(key, (launch, []))[1]
                if name not in users:
                    users.append(name)
        for launch, users in found.values():
            yield compile_launch(launch, target, users)


def shape_of(name: str) -> ModelShape:
    """Return a named shape with one layer, as all layers launch the same kernels."""
    shape = shape_from_text(name)
    return shape if shape.states else replace(shape, layers=1)


def main() -> int:
    """Print what spills registers; return 1 if a kernel does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--targets", nargs="+", type=int, default=TARGETS, choices=TARGETS)
    parser.add_argument("--json", type=Path, help="write all facts of each variant to this file")
    arguments = parser.parse_args()
    rows = list(compile_all(arguments.models, arguments.targets))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    spilling = [row for row in rows if row.stack_bytes]
    for row in spilling:
        print(f"spills {row.stack_bytes} bytes: {row.kernel} sm_{row.target} {row.sizes}")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
