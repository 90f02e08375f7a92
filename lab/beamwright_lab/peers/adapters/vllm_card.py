"""Worker process of vLLM on a GPU: n paths, and a beam search's requests, within a KV budget.

`_patch_vllm` runs before `LLM` starts its engine. The patch records the peak of used blocks, counts
preemptions and withholds blocks, so one engine can run with several pool sizes (as with
`num_gpu_blocks_override`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from beamwright_lab.peers.adapters.worker import serve

_TRIES, _PAUSE_S = 200, 0.01


# --- in the engine's process -----------------------------------------------------------------


def _pool(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def _limit(core: Any, blocks: int) -> bool:
    """Empty the prefix cache, and leave `blocks` blocks to the scheduler; 0: all.

    Returns False if blocks are still in use.
    """
    scheduler, pool = core.scheduler, _pool(core.scheduler)
    if held := scheduler.__dict__.pop("lab_held", []):
        pool.free_blocks(held)
    if not scheduler.reset_prefix_cache():
        return False
    spare = pool.get_num_free_blocks() - blocks
    scheduler.lab_held = pool.get_new_blocks(spare) if blocks and spare > 0 else []
    scheduler.lab_peak = scheduler.lab_preempted = 0
    return True


def _counts(core: Any) -> dict[str, int]:
    scheduler = core.scheduler
    return {"peak_blocks": scheduler.lab_peak, "preempted": scheduler.lab_preempted}


def _facts(core: Any) -> dict[str, Any]:
    config, pool = core.vllm_config, _pool(core.scheduler)
    compiled = config.compilation_config
    layers = list(compiled.static_forward_context.values())
    names = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    kinds = {getattr(getattr(x, "impl", None), "vllm_flash_attn_version", None) for x in layers}
    return {
        "blocks": int(pool.num_gpu_blocks),
        "block_tokens": int(config.cache_config.block_size),
        "attention": sorted(names),
        "flash_attention": sorted(kind for kind in kinds if kind),
        "mode": str(compiled.mode),
        "graphs": str(compiled.cudagraph_mode),
        "async": bool(config.scheduler_config.async_scheduling),
        "runner_v2": bool(getattr(config, "use_v2_model_runner", False)),
    }


def _patch_vllm() -> None:
    """Patch vLLM's scheduler to count, and add the engine methods that `_ask` calls by name."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    schedule, preempt = Scheduler.schedule, Scheduler._preempt_request

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        found = schedule(self, *args, **options)
        pool = _pool(self)
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        held -= len(self.__dict__.get("lab_held", ()))
        self.lab_peak = max(self.__dict__.get("lab_peak", 0), held)
        return found

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        self.lab_preempted = self.__dict__.get("lab_preempted", 0) + 1
        return preempt(self, *args, **options)

    Scheduler.schedule, Scheduler._preempt_request = watched, counted
    for name, method in (("limit", _limit), ("seen", _counts), ("facts", _facts)):
        setattr(EngineCore, f"lab_{name}", method)


# --- in the worker's -------------------------------------------------------------------------


def _ask(engine: Any, name: str, *args: Any) -> Any:
    client = engine.llm_engine.engine_core
    if hasattr(client, "call_utility"):
        return client.call_utility(f"lab_{name}", *args)
    return getattr(client.engine_core, f"lab_{name}")(*args)


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import vllm

    _patch_vllm()
    start = time.perf_counter()
    engine = vllm.LLM(**options)
    facts = {"version": f"vllm {vllm.__version__}", "start_s": time.perf_counter() - start}
    facts |= _ask(engine, "facts")
    return facts, {"paths": partial(_paths, engine), "search": partial(_search, engine)}


def _reset(engine: Any, blocks: int = 0) -> None:
    """Reset the engine; retry while a step in progress still uses blocks."""
    for _ in range(_TRIES):
        if _ask(engine, "limit", blocks):
            return
        time.sleep(_PAUSE_S)
    raise RuntimeError("blocks of the KV pool are still in use")


def _params(tokens: int, n: int = 1) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )


def _paths(engine: Any, prompt: list[int], n: int, tokens: int) -> dict[str, Any]:
    """Decode n paths of equal length from one prompt, as one request."""
    _reset(engine)
    start = time.perf_counter()
    (found,) = engine.generate([{"prompt_token_ids": prompt}], _params(tokens, n), use_tqdm=False)
    seconds = time.perf_counter() - start
    written = sum(len(out.token_ids) for out in found.outputs)
    return {"s": seconds, "tokens": written, **_ask(engine, "seen")}


def _search(
    engine: Any,
    prompt: list[int],
    n: int,
    width: int,
    tokens: int,
    rounds: int,
    seed: int,
    blocks: int,
) -> dict[str, Any]:
    """Send the requests of a beam search with random survivors; time the generation alone."""
    _reset(engine, blocks)
    drawn, paths, took_s, written = Random(seed), [prompt] * n, list[float](), 0
    for _ in range(rounds):
        prompts: list[Mapping[str, Any]] = [{"prompt_token_ids": path} for path in paths]
        start = time.perf_counter()
        found = engine.generate(prompts, _params(tokens), use_tqdm=False)
        took_s.append(time.perf_counter() - start)
        steps = [list(each.outputs[0].token_ids) for each in found]
        written += sum(map(len, steps))
        going = [path + step for path, step in zip(paths, steps, strict=True)]
        kept = sorted(drawn.sample(range(n), n // width))
        paths = [going[place] for place in kept for _ in range(width)]
    rounds_s = [round(s, 4) for s in took_s]
    return {"s": sum(took_s), "rounds_s": rounds_s, "tokens": written, **_ask(engine, "seen")}


if __name__ == "__main__":
    serve(_start)
