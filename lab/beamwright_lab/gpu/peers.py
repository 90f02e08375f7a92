"""Stage: n paths from one prompt by `transformers` beside ours: one random shape, the same lengths.

`generate` with a cache that grows, with a static one, and with that compiled, which is what it does
by itself on a card, and takes about a minute: last, where there is that time. Seconds of the whole
call, its prefill included; the first call of each is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from beamwright_lab.gpu.context import Context, release, synchronize
from beamwright_lab.gpu.parity import random_model, sizes_of
from beamwright_lab.gpu.roofline import Steps, plain_paths

_SHAPE = "qwen2.5-1.5b"
_TINY = "llama,layers=2,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=512"
_N, _PROMPT, _TOKENS = 16, 128, 128
_SMOKE = (4, 8, 6)
_LEAST_S, _COMPILE_S = 5.0, 75.0
_CACHES: dict[str, dict[str, Any]] = {
    "a cache that grows": {},
    "a static cache, not compiled": {"cache_implementation": "static", "disable_compile": True},
}
_COMPILED = {"a static cache, compiled": {"cache_implementation": "static"}}


def run(context: Context) -> dict[str, Any]:
    """See the module."""
    n, prompt, tokens = _SMOKE if context.smoke else (_N, _PROMPT, _TOKENS)
    shape = _TINY if context.smoke else _SHAPE
    facts = {"model": shape, "n": n, "prompt": prompt, "tokens": tokens}
    data: dict[str, Any] = {**facts, "rows": [], "not_run": []}
    ours = partial(_ours, context, shape, n, prompt, tokens)
    context.rows(data, "rows", [({"side": "beamwright"}, ours)], _LEAST_S)
    with torch.device(context.device):
        model = random_model("qwen2", "bfloat16" if context.on_gpu else "float32", sizes_of(shape))
    for ways, least_s in ((_CACHES, _LEAST_S), (_COMPILED, _COMPILE_S)):
        theirs = [
            (
                {"side": f"transformers, {name}"},
                partial(_theirs, context, model, (n, prompt, tokens), how),
            )
            for name, how in ways.items()
        ]
        context.rows(data, "rows", theirs, least_s)
    return data


def _ours(context: Context, shape: str, n: int, prompt: int, tokens: int) -> dict[str, Any]:
    case = Steps(prompt=prompt, step_tokens=tokens, rounds=1)
    with plain_paths(context, case, shape, n) as solver:
        return _timed(context, lambda: solver.synthetic(prompt), n * tokens)


def _theirs(
    context: Context, model: Any, lengths: tuple[int, int, int], how: dict[str, Any]
) -> dict[str, Any]:
    n, prompt, tokens = lengths
    ids = torch.randint(3, model.config.vocab_size, (1, prompt), device=context.device)
    ids = ids.expand(n, -1).contiguous()
    generate = partial(
        model.generate,
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        **how,
    )
    return _timed(context, generate, n * tokens)


def _timed(context: Context, work: Callable[[], object], num_tokens: int) -> dict[str, Any]:
    """The better of two calls, after one that warms up."""
    took_s = []
    for _ in range(3):
        synchronize(context.device)
        start_s = time.perf_counter()
        work()
        synchronize(context.device)
        took_s.append(time.perf_counter() - start_s)
    least_s = min(took_s[1:])
    release(context.device)
    return {
        "s": round(least_s, 4),
        "tokens_per_s": round(num_tokens / least_s, 1),
        "first_s": round(took_s[0], 2),
    }
