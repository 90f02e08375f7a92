"""`transformers`' continuous batching as a side of stage `peers`: one prompt, n forked requests.

The calls of a row share one manager, as its documentation advises for serving; its cache and batch
fit the case, and a block holds a whole path. Without the FlashAttention package two attentions that
need a mask remain, for which CUDA graphs and overlapped batches are off by default. So both are
measured with these on, and one with the defaults. The first call captures and compiles. The
manager's own warm-up is not used: it reads unwritten KV, and a NaN there makes the device unusable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from beamwright_lab.gpu.context import Context
from beamwright_lab.gpu.sides import Case, timed

_PATIENCE_S = 20.0
_SPARE = 8  # extra tokens per block: an overlapped batch runs past a path's end
_PADDINGS = 4  # at most as many KV lengths get a graph
_GRAPHS = {"use_cuda_graph": True, "use_async_batching": False}
_OVERLAPPED = {"use_cuda_graph": True, "use_async_batching": True}


@dataclass(frozen=True)
class Way:
    """A configuration to measure. settings: for `ContinuousBatchingConfig`, unused on a CPU."""

    attention: str
    name: str
    settings: Mapping[str, Any]
    cost_s: float

    @property
    def side(self) -> str:
        return f"transformers, continuous batching, {self.attention}: {self.name}"


WAYS = (
    Way("eager", "graphs, async", _OVERLAPPED, 8.0),
    Way("eager", "graphs", _GRAPHS, 9.0),
    Way("sdpa", "graphs, async", _OVERLAPPED, 10.0),
    Way("sdpa", "as by default", {}, 17.0),
    Way("eager", "graphs, async, compiled", {**_OVERLAPPED, "default_compile_level": 1}, 80.0),
)


def measure(context: Context, case: Case, model: Any, way: Way, n: int) -> dict[str, Any]:
    """Time n paths and return a row; the model's own attention is restored afterwards."""
    from transformers import GenerationConfig

    own = model.config._attn_implementation
    model.set_attn_implementation(f"paged|{way.attention}")
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=case.tokens,
        num_return_sequences=n,
        eos_token_id=-1,
        pad_token_id=0,
    )
    settings = settings_of(case, n, way.settings if context.on_gpu else {})
    manager = model.init_continuous_batching(sampling, settings)
    try:
        manager.start()
        patience_s = max(_PATIENCE_S, way.cost_s)
        prompt = list(range(3, 3 + case.prompt))
        work = partial(_paths, manager, prompt, n, case.tokens, patience_s)
        return {**timed(context, work, n * case.tokens), "said": _describe_settings(manager)}
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=_PATIENCE_S, hard_stop=True)
        manager.destroy()
        model.set_attn_implementation(own)


def _describe_settings(manager: Any) -> str:
    """Describe the settings that the manager chose."""
    used = manager.continuous_batching_config
    size = getattr(used, "page_size", None) or used.block_size
    return (
        f"forked; {used.num_blocks} blocks of {size}, batches of {used.max_batch_tokens}, "
        f"graphs {any(used.cuda_graph_booleans)}, async {used.use_async_batching}, "
        f"compiled {used.varlen_compile_config is not None}"
    )


def settings_of(case: Case, n: int, chosen: Mapping[str, Any]) -> Any:
    """Build a config sized for the case; newer versions say `page_size` for `block_size`."""
    from transformers import ContinuousBatchingConfig

    path = case.prompt + case.tokens
    size = {"page_size", "block_size"} & {each.name for each in fields(ContinuousBatchingConfig)}
    padded = {"q_padding_interval_size": n, "kv_padding_interval_size": n * path // _PADDINGS}
    return ContinuousBatchingConfig(
        **{max(size): path + _SPARE},
        **(padded if chosen else {}),  # these alone turn graphs on
        **chosen,
        num_blocks=n + 2,
        max_batch_tokens=max(case.prompt, n),
        max_requests_per_batch=n,
        safety_margin=0.0,
    )


def _paths(manager: Any, prompt: list[int], n: int, tokens: int, patience_s: float) -> None:
    """Generate n paths; raise RuntimeError if one is missing or short."""
    manager.add_request(prompt, max_new_tokens=tokens)
    for _ in range(n):
        found = manager.get_result(timeout=patience_s)
        if found is None:
            died = manager.background_thread_status.fatal_error
            raise RuntimeError(f"no answer within {patience_s:.0f} s" if died is None else died)
        if found.error or len(found.generated_tokens) != tokens:
            raise RuntimeError(found.error or f"{len(found.generated_tokens)} tokens")
