"""Stage: `transformers` beside ours, in one process, in turns: same shape, same tokens.

n paths from one prompt, random weights. Sides: `generate` with the offloaded cache (layer-wise
offloading as people have it), with a static cache that is compiled (the ceiling where everything
fits), ours with everything on the device and ours over the link. `generate` prefills n times;
its time counts from the call to the last token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from beamwright import Solver
from beamwright.models import ModelShape
from beamwright.models.named_shapes import shape_from_text
from gpu.context import Context, one_line, release, synchronize


@dataclass(frozen=True)
class Case:
    """kv_bytes: of the device, for our side over the link."""

    shape: str = "llama-2-7b"
    batches: tuple[int, ...] = (16, 64)
    prompt: int = 128
    tokens: int = 128
    kv_bytes: int = 7 * 2**30
    rounds: int = 3


_SMOKE_CASE = Case(
    "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=256",
    (2,),
    prompt=8,
    tokens=8,
    kv_bytes=2**22,
    rounds=1,
)


def run(context: Context) -> dict[str, Any]:
    """See the module."""
    case = _SMOKE_CASE if context.smoke else Case()
    data: dict[str, Any] = {"case": case.__dict__, "sides": [], "not_run": []}
    model = _transformers_model(shape_from_text(case.shape), context)
    for n in case.batches:
        if context.left_s < 5:
            data["not_run"].append(n)
            continue
        for name, seconds, error in _turns(context, case, model, n):
            row: dict[str, Any] = {"n": n, "side": name, "tokens": case.tokens, "error": error}
            if seconds:
                median_s = statistics.median(seconds)
                row["rounds_s"] = [round(each, 4) for each in seconds]
                row["tokens_per_s"] = round(n * case.tokens / median_s, 1)
            data["sides"].append(row)
        context.save(data)
    return data


def _turns(
    context: Context, case: Case, model: Any, n: int
) -> list[tuple[str, list[float], str | None]]:
    """Rounds of all sides in turns; the first of each only warms it up, unless time runs out."""
    sides = _sides(context, case, model, n)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    errors: dict[str, str] = {}
    for number in range(case.rounds + 1):
        for name, once in sides.items():
            if name in errors or (number and context.left_s < 5):
                continue
            try:
                took_s = _timed(context, once)
            except Exception as error:  # a side that cannot run here says why
                errors[name] = one_line(error)
                release(context.device)
                continue
            if number:
                seconds[name].append(took_s)
    return [(name, seconds[name], errors.get(name)) for name in sides]


def _timed(context: Context, once: Callable[[], None]) -> float:
    synchronize(context.device)
    start = time.perf_counter()
    once()
    synchronize(context.device)
    return time.perf_counter() - start


def _sides(context: Context, case: Case, model: Any, n: int) -> dict[str, Callable[[], None]]:
    sides: dict[str, Callable[[], None]] = {
        f"transformers, {cache} cache": lambda cache=cache: _generate(  # type: ignore[misc]
            context, case, model, n, cache
        )
        for cache in ("static", "offloaded")
    }
    for name, schedule, kv_bytes in (
        ("beamwright, in-gpu", "in-gpu", _whole_bytes(context, case, n)),
        ("beamwright, locality", "locality", case.kv_bytes),
    ):
        solver = _solver(context, case, n, schedule, kv_bytes)
        sides[name] = lambda solver=solver: _search(solver, case)  # type: ignore[misc]
    return sides


def _whole_bytes(context: Context, case: Case, n: int) -> int:
    token_bytes = shape_from_text(case.shape).kv_bytes_per_token(2 if context.on_gpu else 4)
    return (case.prompt + n * (case.tokens + 32) + 32) * token_bytes


# --- ours ------------------------------------------------------------------------------------


def _solver(context: Context, case: Case, n: int, schedule: str, kv_bytes: int) -> Solver:
    return Solver(
        model=f"random:{case.shape}",
        verifier="none",
        device=context.device,
        search="best-of-n",
        n=n,
        width=1,
        max_rounds=1,
        step_tokens=case.tokens,
        max_tokens=case.tokens,
        ignore_eos=True,
        schedule=schedule,
        kv_memory=kv_bytes,
        host_memory=None if schedule == "in-gpu" else _whole_bytes(context, case, n),
        link_bandwidth=context.link_bandwidth if schedule != "in-gpu" else None,
    )


def _search(solver: Solver, case: Case) -> None:
    solution = solver.synthetic(case.prompt)
    assert all(candidate.tokens == case.tokens for candidate in solution.candidates)


# --- transformers ----------------------------------------------------------------------------


def _transformers_model(shape: ModelShape, context: Context) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    with torch.device(context.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


@torch.inference_mode()
def _generate(context: Context, case: Case, model: Any, n: int, cache: str) -> None:
    ids = torch.randint(3, model.config.vocab_size, (1, case.prompt), device=context.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=0.8,
        top_k=0,
        num_return_sequences=n,
        max_new_tokens=case.tokens,
        min_new_tokens=case.tokens,
        cache_implementation=cache,
        disable_compile=not context.on_gpu,
        pad_token_id=0,
    )
    assert out.shape == (n, case.prompt + case.tokens)
