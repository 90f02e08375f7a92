"""Inspect this machine: versions, threads, speed, and whether results are batch-invariant."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from beamwright.attention import BACKENDS, KERNEL_BACKENDS, make_attention
from beamwright.attention.kernels import triton_version, why_no_kernels
from beamwright.cores import cpu_quota, num_cores, wait_policy
from beamwright.engine.selftest import batches_are_exact
from beamwright.engine.threads import SMALL_PARAMETERS, threads_for
from beamwright.library import instructions, library
from beamwright.models.decoder import FEW_ROWS, ROW_MULTIPLE, TILE_ROWS, Linear
from beamwright.models.dense import DenseDecoder
from beamwright.models.grouped import round_to_groups
from beamwright.models.linear import PackedLinear, make_packer, prepack_linear
from beamwright.models.named import shape_from_text
from beamwright.models.native import NativeLinear
from beamwright.models.weights import random_weights
from beamwright.plan.costs import Storage
from beamwright.plan.machines import HardwareProfile

_COPY_PIECE_BYTES = 2**19  # about a KV block of a large model
_DECODE_ROWS = 32
# Operator calls of one layer in one decode step (docs/log/2026-11.md#where-a-step-goes).
_DECODE_OPS_PER_LAYER = 35
_SHAPE = "llama,layers=1,hidden=128,heads=4,kv_heads=2,intermediate=384,vocab=512,context=256"
_FLOAT32 = ("avx512_f", "avx2")
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "avx_ne_convert", "arm_bf16", "bf16")


def inspect_machine() -> dict[str, Any]:
    """Return versions, threads and self-test results of this machine, for `beamwright doctor`."""
    small, large = threads_for(SMALL_PARAMETERS), threads_for(SMALL_PARAMETERS + 1)
    with small.in_use():
        checks = run_selftest()
    # Advice if the default attention on this CPU depends on the batch (docs/concepts/sameness.md).
    hint = "--attention tree is not exact on this CPU; --attention dense is exact but reads more KV"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "torch": torch.__version__,
        "triton": triton_version(),
        "attention": make_attention("auto", device).name,
        "transformers": version("transformers"),
        "cores": num_cores(),
        "cpu_quota": None if (quota := cpu_quota()) is None else f"{quota:g} cores",
        "threads": large.count,
        "threads_why": large.why,
        "threads_for_small_models": small.count,
        "threads_for_small_models_why": small.why,
        "thread_waits": wait_policy() or "PyTorch was imported before",
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        # results of the CPU only; those of a GPU are in `selftest`
        "exact": all(checks[name] for name in BACKENDS),
        "selftest": checks,
        "products": matmul_libraries(),
        "hint": hint if checks["dense"] and not checks["tree"] else None,
    }


_TURNED_BACK = "dequantised"


def matmul_libraries() -> dict[str, Any]:
    """Return the name of the library that multiplies matrices on this CPU, by weight format.

    The key "least_rows" is the number of rows to which a float32 pass of one path is padded. The
    self-test of a loaded model may find another number for that model.
    """
    products: dict[str, Any] = {}
    for dtype, best in ((torch.float32, _FLOAT32), (torch.bfloat16, _BFLOAT16)):
        packed = isinstance(prepack_linear(Linear(torch.ones(64, 64, dtype=dtype))), PackedLinear)
        named = str(dtype).removeprefix("torch.")
        products[named] = _named("oneDNN, packed" if packed else "torch's own", best)
    codes = instructions() or _TURNED_BACK + ": installed without a C compiler"
    products |= dict.fromkeys(("int8", "int4", "gguf"), codes)
    decoder = _small_decoder()
    decoder.least_rows = 1 if decoder.is_exact_for_one_row else FEW_ROWS
    exact = batches_are_exact(decoder, make_attention("tree"))
    return {**products, "least_rows": decoder.least_rows if exact else ROW_MULTIPLE}


def _named(product: str, instructions: Sequence[str]) -> str:
    """Return `product` with the best of `instructions` that the CPU has, such as "oneDNN (avx2)".

    The instructions are left out if torch does not report any.
    """
    known = getattr(torch.cpu, "get_capabilities", dict[str, object])()
    best = next((name for name in instructions if known.get(name)), "")
    return f"{product} ({best})" if best else product


def _small_decoder() -> DenseDecoder:
    shape = shape_from_text(_SHAPE)
    return DenseDecoder(shape, random_weights(shape, torch.float32, "cpu", 0, pack=prepack_linear))


def run_selftest() -> dict[str, bool]:
    """Test every attention backend for batch invariance, on a small random model.

    On a machine with a GPU, the GPU's backends are tested too, with `--deterministic` and without.

    Returns for each backend's name True if a row's result is bitwise equal alone and in a batch.
    """
    decoder = _small_decoder()
    exact = {name: batches_are_exact(decoder, make_attention(name)) for name in BACKENDS}
    if not torch.cuda.is_available():
        return exact
    device = torch.device("cuda")
    shape = decoder.shape
    names = [n for n in KERNEL_BACKENDS if why_no_kernels(device, torch.bfloat16) is None]
    for name in names or BACKENDS:
        backend = make_attention(name, device, torch.bfloat16)
        for label, tile_rows in (("", None), (", --deterministic", TILE_ROWS)):
            pack = make_packer(Storage.PLAIN, torch.bfloat16, "cuda", fixed=tile_rows is not None)
            weights = random_weights(shape, torch.bfloat16, "cuda", 0, pack=pack)
            decoder = DenseDecoder(shape, weights, tile_rows)
            exact[f"{name} on cuda{label}"] = batches_are_exact(decoder, backend)
    return exact


def measure_profile(*, part: int = 1, repeats: int = 7) -> HardwareProfile:
    """Measure this machine's CPU in float32, for `doctor --probe`; takes about two seconds.

    Device and host memory are the same RAM, and the link is a copy by another thread. The matrices
    are larger than the caches.

    part: divisor of all sizes, for tests.
    """
    size, read_bytes = 1024 // part, 2**28 // part
    left, right = torch.randn(size, size), torch.randn(size, size)
    peak_flops = 2 * size**3 / _shortest_s(lambda: left @ right, repeats)
    rows, linear = torch.randn(_DECODE_ROWS, size), torch.nn.functional.linear
    decode_s = _shortest_s(lambda: linear(rows, left), 4 * repeats)
    decode_flops = 2 * _DECODE_ROWS * size**2 / decode_s
    # A matrix-vector product reads its matrix once, like a decode step reads the weights.
    matrix, vector = torch.ones(read_bytes // 2**14, 2**12), torch.ones(2**12)
    bandwidth = matrix.numel() * 4 / _shortest_s(lambda: matrix @ vector, repeats)
    copy_bandwidth, copy_launch_s = _copy_costs(2**27 // part, repeats)
    coded_bandwidth, coded_flops = _coded_rates(read_bytes, repeats)
    return HardwareProfile(
        name="measured",
        device_memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        device_bandwidth=bandwidth,
        flops=max(peak_flops, decode_flops),
        h2d_bandwidth=copy_bandwidth,
        d2h_bandwidth=copy_bandwidth,
        launch_s=_small_op_s(400 // part, repeats),
        copy_launch_s=copy_launch_s,
        decode_ops_per_layer=_DECODE_OPS_PER_LAYER,
        flops_share=min(1.0, decode_flops / peak_flops),
        element_bytes=4,
        coded_bandwidth=coded_bandwidth,
        coded_flops=coded_flops,
    )


def _coded_rates(read_bytes: int, repeats: int) -> tuple[float, float] | tuple[None, None]:
    """Measure the C library with 4-bit weights: bytes/s of one row and FLOP/s of a batch.

    Both are None if the library is missing.
    """
    if library() is None:
        return None, None
    piece = round_to_groups(torch.randn(512, 2048))
    linear = NativeLinear([piece] * max(1, read_bytes // 4 // piece.weight.nbytes))
    num_bytes = sum(tiles.nbytes for _, _, tiles in linear.parts)
    one, rows = torch.randn(1, 2048), torch.randn(_DECODE_ROWS, 2048)
    one_s, rows_s = (_shortest_s(partial(linear, x), repeats) for x in (one, rows))
    return num_bytes / one_s, 2 * _DECODE_ROWS * 2048 * linear.projection.outputs / rows_s


def _copy_costs(copy_bytes: int, repeats: int) -> tuple[float, float]:
    """Measure a thread that copies KV blocks: return bytes/s and seconds per queued copy."""
    source = np.ones((copy_bytes // _COPY_PIECE_BYTES, _COPY_PIECE_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)

    def copy_all() -> None:
        for there, here in zip(target, source, strict=True):
            np.copyto(there, here)

    with ThreadPoolExecutor(max_workers=1) as thread:
        rate = source.nbytes / _shortest_s(lambda: thread.submit(copy_all).result(), repeats)

        def queue_tiny() -> None:
            tiny = [thread.submit(np.copyto, target[0, :64], source[0, :64]) for _ in range(100)]
            for copy in tiny:
                copy.result()

        return rate, _shortest_s(queue_tiny, repeats) / 100


def _small_op_s(rounds: int, repeats: int) -> float:
    """Measure the mean launch time of an operator, in seconds, with tiny tensors."""
    rows, weight = torch.ones(8, 32), torch.ones(32, 32)

    def run_operators() -> None:
        for _ in range(rounds):
            product = torch.nn.functional.linear(rows, weight)
            both = torch.stack([product[:, :16], rows[:, :16]], dim=1)
            scores = torch.softmax(both, dim=-1)
            torch.addcmul(product, rows, rows)
            scores.sum(dim=1)

    return _shortest_s(run_operators, repeats) / (5 * rounds)


def _shortest_s(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest seconds of several runs: other processes only make a run slower."""
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
