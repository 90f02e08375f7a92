"""Worker process of llama.cpp, on the low-level API of `llama-cpp-python`.

n sequences share the prompt's KV (`llama_memory_seq_cp` of a unified cache). Every decode step is
one batch of n rows. llama.cpp's sampler samples from the whole vocabulary.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from beamwright_lab.peers.adapters.worker import serve

_ROUND = 256  # the context length is rounded up to a multiple of this


class _Engine:
    """A model, and a KV cache for n paths of `length` tokens, the prompt's included."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options["file"].encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {options['file']}")
        context = llama_cpp.llama_context_default_params()
        n, length = options["n"], options["length"]
        context.n_ctx = -(-n * length // _ROUND) * _ROUND
        context.n_seq_max, context.n_batch = n, max(length, n)
        context.n_threads = context.n_threads_batch = options["threads"]
        context.kv_unified = True  # one cache shared by all sequences
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot create a context of {context.n_ctx} tokens")
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
        prefill_s = time.perf_counter() - start
        for row in range(1, n):
            api.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        for at in range(num_new - 1):
            self._decode([(ids[-1], len(prompt) + at, row, True) for row, ids in enumerate(rows)])
            for row, ids in enumerate(rows):
                ids.append(sample(row))
        seconds = time.perf_counter() - start
        tokens = sum(map(len, rows))
        return {"seconds": seconds, "prefill_s": prefill_s, "tokens": tokens, "first": rows[0]}

    def step(
        self, prompts: list[list[int]], temperature: float, delimiter: None, most: list[int]
    ) -> dict[str, Any]:
        """Continue every prompt by `most` tokens. Equal beginnings are computed once."""
        api, sample = self._api, self._sampler(temperature)
        self.reset()
        rows = list[list[int]]()
        for row, ids in enumerate(prompts):
            known, other = max(
                ((_num_equal(ids[:-1], before), at) for at, before in enumerate(prompts[:row])),
                default=(0, 0),
            )
            if known:
                api.llama_memory_seq_cp(self._memory, other, row, 0, known)
            self._decode(
                [(t, at, row, at == len(ids) - 1) for at, t in enumerate(ids) if at >= known]
            )
            rows.append([sample(len(ids) - 1 - known)])
        for added in range(max(most) - 1):
            self._decode(
                [(rows[row][-1], len(ids) + added, row, True) for row, ids in enumerate(prompts)]
            )
            for row, ids in enumerate(rows):
                ids.append(sample(row))
        return {"tokens": sum(map(len, rows))}

    def reset(self) -> dict[str, Any]:
        """Forget all sequences."""
        self._api.llama_memory_clear(self._memory, True)
        return {}

    def predicted(self, ids: list[int]) -> dict[str, Any]:
        """Return each next token's log-probability, and the most probable token in its place."""
        import numpy as np

        api = self._api
        api.llama_memory_clear(self._memory, True)
        self._decode([(token, at, 0, True) for at, token in enumerate(ids)])
        size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        found = []
        for at, following in enumerate(ids[1:]):
            place = api.llama_get_logits_ith(self._context, at)
            logits = np.ctypeslib.as_array(place, (size,)).astype(np.float64)
            total = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            found.append((float(logits[following] - total), int(logits.argmax())))
        return {"predicted": found}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run one pass over rows of (token, position, sequence, True to compute logits)."""
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
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
        seed = ctypes.c_uint32(time.perf_counter_ns() & 0xFFFFFFFF).value
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed))
        return lambda row: int(api.llama_sampler_sample(chain, self._context, row))


def _num_equal(ids: list[int], others: list[int]) -> int:
    """Return how many first tokens are equal."""
    pairs = enumerate(zip(ids, others, strict=False))
    least = min(len(ids), len(others))
    return next((at for at, (one, other) in pairs if one != other), least)


def _start(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    import llama_cpp

    facts = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "system": llama_cpp.llama_print_system_info().decode(),
    }
    engine = _Engine(options)
    handlers = {name: getattr(engine, name) for name in ("paths", "step", "reset", "predicted")}
    return facts, handlers


if __name__ == "__main__":
    serve(_start)
