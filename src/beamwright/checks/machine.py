"""This machine: versions, threads, whether a row's bits follow its batch here, and its speed."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from beamwright.attention import BACKENDS, KERNEL_BACKENDS, make_attention
from beamwright.attention.kernels import triton_version, why_no_kernels
from beamwright.engine.executor import SMALL_PARAMETERS, threads_for
from beamwright.engine.selftest import batches_are_exact
from beamwright.models.decoder import TILE_ROWS
from beamwright.models.dense import DenseDecoder
from beamwright.models.linear import prepack
from beamwright.models.shape import shape_from_text
from beamwright.models.weights import random_weights
from beamwright.plan.machines import write_profile
from beamwright.plan.probe import measure_profile

_SHAPE = "llama,layers=1,hidden=128,heads=4,kv_heads=2,intermediate=384,vocab=512,context=256"


def inspect_machine() -> dict[str, Any]:
    """Versions, threads and the exactness self-test of this machine."""
    small, large = threads_for(SMALL_PARAMETERS), threads_for(SMALL_PARAMETERS + 1)
    with small.in_use():
        checks = run_selftest()
    # What to do where the CPU's default attention depends on the batch (docs/concepts/sameness.md).
    hint = "--attention tree is not exact on this CPU; --attention dense is, and reads more KV"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "torch": torch.__version__,
        "triton": triton_version(),
        "attention": make_attention("auto", device).name,
        "transformers": version("transformers"),
        "threads": large.count,
        "threads_for_small_models": small.count,
        "threads_for_small_models_why": small.why,
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "exact": all(checks[name] for name in BACKENDS),  # on a GPU: line by line
        "selftest": checks,
        "hint": hint if checks["dense"] and not checks["tree"] else None,
    }


def run_selftest() -> dict[str, bool]:
    """The self-test of every backend on a small random shape (`beamwright doctor`).

    Where there is a GPU, also of what runs on it, in tiles of fixed size and without.
    """
    shape = shape_from_text(_SHAPE)
    decoder = DenseDecoder(shape, random_weights(shape, torch.float32, "cpu", 0, pack=prepack))
    exact = {name: batches_are_exact(decoder, make_attention(name)) for name in BACKENDS}
    if not torch.cuda.is_available():
        return exact
    device = torch.device("cuda")
    weights = random_weights(shape, torch.bfloat16, "cuda", 0)  # the dtype of a GPU by default
    names = [n for n in KERNEL_BACKENDS if why_no_kernels(device, torch.bfloat16) is None]
    for name in names or BACKENDS:
        backend = make_attention(name, device, torch.bfloat16)
        for label, tile_rows in (("", None), (", --deterministic", TILE_ROWS)):
            decoder = DenseDecoder(shape, weights, tile_rows)
            exact[f"{name} on cuda{label}"] = batches_are_exact(decoder, backend)
    return exact


def probe_machine() -> dict[str, Any]:
    """Measure this machine, keep the profile for `--gpu measured`, and return it."""
    profile = measure_profile()
    file = write_profile(profile)
    return {"profile": asdict(profile), "profile_file": str(file)}
