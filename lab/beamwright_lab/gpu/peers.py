"""Stage: `transformers` beside ours, in one process, one after another: same shape, same tokens.

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
from beamwright.models.shape import ModelShape, shape_from_text
from beamwright_lab.gpu.context import Context, one_line, release, synchronize

# Loads a side and gives what runs it once.
Begin = Callable[[Context, "PeersCase", int], Callable[[], None]]
_LEAST_S = 5.0


@dataclass(frozen=True)
class PeersCase:
    """kv_bytes: of the device, for our side over the link."""

    shape: str = "llama-2-7b"
    batches: tuple[int, ...] = (16, 64)
    prompt: int = 128
    tokens: int = 128
    kv_bytes: int = 7 * 2**30
    rounds: int = 2


_SMOKE_CASE = PeersCase(
    "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=256",
    (2,),
    prompt=8,
    tokens=8,
    kv_bytes=2**22,
    rounds=1,
)


def run(context: Context) -> dict[str, Any]:
    """See the module."""
    case = _SMOKE_CASE if context.smoke else PeersCase()
    data: dict[str, Any] = {"case": case.__dict__, "sides": [], "not_run": []}
    wanted = [(n, name, begin) for n in case.batches for name, begin in _SIDES.items()]
    for place, (n, name, begin) in enumerate(wanted):
        if context.left_s < _LEAST_S and not context.smoke:
            data["not_run"].append(f"{name}, n={n}")
            continue
        row: dict[str, Any] = {"n": n, "side": name, "tokens": case.tokens, "rounds_s": []}
        data["sides"].append(row)
        share_s = context.left_s / (len(wanted) - place)
        try:
            _rounds(context, case, begin(context, case, n), share_s, row)
        except Exception as error:  # a side that cannot run here says why
            row["error"] = one_line(error)
        context.save(data)
        release(context.device)
    return data


def _rounds(
    context: Context, case: PeersCase, once: Callable[[], None], share_s: float, row: dict[str, Any]
) -> None:
    """One run that warms up, then some that count: at least one, more while there is time."""
    start = time.monotonic()
    row["warm_up_s"] = round(_timed(context, once), 3)
    for _ in range(case.rounds):
        row["rounds_s"].append(round(_timed(context, once), 4))
        if time.monotonic() - start > share_s:
            break
    row["tokens_per_s"] = round(row["n"] * case.tokens / statistics.median(row["rounds_s"]), 1)


def _timed(context: Context, once: Callable[[], None]) -> float:
    synchronize(context.device)
    start = time.perf_counter()
    once()
    synchronize(context.device)
    return time.perf_counter() - start


# --- ours ------------------------------------------------------------------------------------


def _whole_bytes(context: Context, case: PeersCase, n: int) -> int:
    token_bytes = shape_from_text(case.shape).kv_bytes_per_token(2 if context.on_gpu else 4)
    return (case.prompt + n * (case.tokens + 32) + 32) * token_bytes


def _ours(schedule: str) -> Begin:
    def begin(context: Context, case: PeersCase, n: int) -> Callable[[], None]:
        solver = _solver(context, case, n, schedule)
        return lambda: _search(solver, case)

    return begin


def _solver(context: Context, case: PeersCase, n: int, schedule: str) -> Solver:
    whole_bytes = _whole_bytes(context, case, n)
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
        kv_memory=whole_bytes if schedule == "in-gpu" else case.kv_bytes,
        host_memory=None if schedule == "in-gpu" else whole_bytes,
        link_bandwidth=context.link_bandwidth if schedule != "in-gpu" else None,
    )


def _search(solver: Solver, case: PeersCase) -> None:
    solution = solver.synthetic(case.prompt)
    assert all(candidate.tokens == case.tokens for candidate in solution.candidates)


# --- transformers ----------------------------------------------------------------------------


def _theirs(cache: str) -> Begin:
    def begin(context: Context, case: PeersCase, n: int) -> Callable[[], None]:
        model = _transformers_model(shape_from_text(case.shape), context)
        return lambda: _generate(context, case, model, n, cache)

    return begin


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
def _generate(context: Context, case: PeersCase, model: Any, n: int, cache: str) -> None:
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


# The compiled one comes last: compiling can take longer than everything before it.
_SIDES: dict[str, Begin] = {
    "beamwright, in-gpu": _ours("in-gpu"),
    "beamwright, locality": _ours("locality"),
    "transformers, offloaded cache": _theirs("offloaded"),
    "transformers, static cache": _theirs("static"),
}
