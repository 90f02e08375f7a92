"""`transformers` as sides of stage `peers`, with a random model of the case's shape.

`generate` has a growing cache, a static one, or a compiled static one, its default on a card, which
compiles for about a minute. Continuous batching is in `paged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch

from beamwright_lab.gpu import paged
from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.parity import random_model, sizes_of
from beamwright_lab.gpu.sides import Case, Side, timed

_CACHES: tuple[tuple[str, Mapping[str, Any], float], ...] = (
    ("DynamicCache", {}, 15.0),
    (
        "a static cache, not compiled",
        {"cache_implementation": "static", "disable_compile": True},
        16.0,
    ),
    ("a static cache, compiled", {"cache_implementation": "static"}, 75.0),
)


def sides(context: Context, case: Case) -> list[Side]:
    """List `generate` with each cache, and each way of continuous batching."""
    held = _SharedModel(context, case)
    plain = [
        Side(f"transformers, {name}", partial(held.generate, how), cost_s)
        for name, how, cost_s in _CACHES
    ]
    batched = [Side(way.side, partial(held.batch, way), way.cost_s) for way in paged.WAYS]
    return [*plain, *batched]


class _SharedModel:
    """The model that all rows share, built for the first one."""

    def __init__(self, context: Context, case: Case) -> None:
        self._context = context
        self._case = case

    @cached_property
    def model(self) -> Any:
        dtype = "bfloat16" if self._context.on_gpu else "float32"
        with torch.device(self._context.device):
            return random_model("qwen2", dtype, sizes_of(self._case.model))

    def batch(self, way: paged.Way, n: int) -> dict[str, Any]:
        return paged.measure(self._context, self._case, self.model, way, n)

    def generate(self, how: Mapping[str, Any], n: int) -> dict[str, Any]:
        ids = torch.randint(3, self.model.config.vocab_size, (1, self._case.prompt))
        ids = ids.to(self._context.device).expand(n, -1).contiguous()
        tokens = self._case.tokens
        work = partial(
            self.model.generate,
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
        return timed(self._context, work, n * tokens)
