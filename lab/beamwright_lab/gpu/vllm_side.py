"""Stages `vllm` and `vllm-7b`: vLLM beside ours on paths from one prompt and on a beam search.

Paths as in `peers`. The search has four rounds of 64 tokens and no real verifier: ours draws random
scores; vLLM gets every surviving beam again as token ids, with random survivors, and reuses its
prefix cache. Then both run within half and a quarter of vLLM's peak KV; when that runs out, vLLM
preempts and recomputes. Weights are random. Seconds are the whole search for ours and the calls of
`generate` for vLLM: the better of two after a warm-up, whose seconds are kept.

`BEAMWRIGHT_VLLM_PYTHON` names an interpreter that has vllm, if this one has not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from beamwright import Solver
from beamwright.models.named import shape_from_text
from beamwright.tree import Node
from beamwright_lab.gpu.context import VLLM_PYTHON, Context, attempt, release
from beamwright_lab.gpu.parity import Work, sizes_of
from beamwright_lab.gpu.roofline import Steps, plain_paths
from beamwright_lab.peers.adapters.worker import Worker

_SMALL, _LARGE = "qwen2.5-1.5b", "qwen2.5-7b"
_TINY = "llama,layers=2,hidden=128,heads=4,kv_heads=2,intermediate=256,vocab=256,context=512"
_PATHS, _PROMPT, _TOKENS = (64, 16, 256), 128, 128
_SEARCH = {"n": 64, "width": 4, "tokens": 64, "rounds": 4}
_SMOKE = {"n": 8, "width": 4, "tokens": 32, "rounds": 3}
_SHARES = (0.5, 0.25)
_BLOCKS = 8192  # vLLM's pool: more than any case needs
_SIZES = [1, 2, 4, *range(8, 65, 8), 96, 128, 192, 256]  # batch sizes of vLLM's graphs
_CONTEXT, _SEED = 1024, 1
_LEAST_S, _START_S = 4.0, 45.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def run(context: Context) -> dict[str, Any]:
    """Run stage `vllm` with a 1.5B generator."""
    return _measured(context, _SMALL)


def run_large(context: Context) -> dict[str, Any]:
    """Run stage `vllm-7b`."""
    return _measured(context, _LARGE)


def _measured(context: Context, shape: str) -> dict[str, Any]:
    data: dict[str, Any] = {"prompt": _PROMPT, "tokens": _TOKENS, "search": _SEARCH}
    data |= {"rows": [], "engines": [], "not_run": []}
    _add_rows(context, data, _TINY if context.smoke else shape)
    failed = [f"{row['side']}: {row['error']}" for row in data["rows"] if "error" in row]
    return {**data, "error": failed[0]} if failed else data


def _add_rows(context: Context, data: dict[str, Any], shape: str) -> None:
    """Run ours, then vLLM, then ours with less KV: vLLM holds its memory until it exits."""
    name = shape.partition(",")[0]
    counts: Sequence[int] = (4,) if context.smoke else _PATHS
    paths = [{"model": name, "what": f"{n} paths", "side": "beamwright"} for n in counts]
    ours: Work = [
        (row, partial(_our_paths, context, shape, n)) for row, n in zip(paths, counts, strict=True)
    ]
    search = {"model": name, "what": "search", "side": "beamwright"}
    ours.append((search, partial(_our_search, context, shape, 0)))
    context.rows(data, "rows", ours, _LEAST_S)
    if context.left_s < _START_S and not context.smoke:
        data["not_run"].append({"model": name, "side": "vllm"})
        return
    limits: list[int] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        worker = _worker(context, stack, Path(folder), shape)
        if isinstance(worker, dict):
            data["rows"].append({"model": name, "side": "vllm", **worker})
            return
        data["engines"].append({"model": name, **worker.facts})
        prompt = _prompt(shape)
        theirs: Work = [
            ({**row, "side": "vllm"}, partial(_their_paths, worker, prompt, n))
            for row, n in zip(paths, counts, strict=True)
        ]

        def whole() -> dict[str, Any]:
            row = _their_search(context, worker, prompt, 0)
            least = -(-_path_tokens(context) // worker.facts["block_tokens"]) + 1
            limits.extend(max(least, int(share * row["peak_blocks"])) for share in _SHARES)
            return row

        theirs.append(({**search, "side": "vllm"}, whole))
        context.rows(data, "rows", theirs, _LEAST_S)
        block_bytes = worker.facts["block_tokens"] * _token_bytes(context, shape)
        within = [
            {**search, "kv_share": share, "kv_bytes": blocks * block_bytes}
            for share, blocks in zip(_SHARES, limits, strict=False)
        ]
        theirs = [
            ({**row, "side": "vllm"}, partial(_their_search, context, worker, prompt, blocks))
            for row, blocks in zip(within, limits, strict=True)
        ]
        context.rows(data, "rows", theirs, _LEAST_S)
    less: Work = [(row, partial(_our_search, context, shape, row["kv_bytes"])) for row in within]
    context.rows(data, "rows", less, _LEAST_S)


def _time_calls(once: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the faster of two calls' rows, after a warm-up. once: returns s, tokens, facts."""
    first, *others = (once() for _ in range(3))
    best = min(others, key=lambda row: float(row["s"]))
    rate = round(best["tokens"] / best["s"], 1)
    facts = {"tokens_per_s": rate, "first_s": round(first["s"], 2)}
    return {**best, "s": round(best["s"], 4), **facts}


# --- ours ------------------------------------------------------------------------------------


def _our_paths(context: Context, shape: str, n: int) -> dict[str, Any]:
    case = Steps(prompt=_PROMPT, step_tokens=_TOKENS, rounds=1)
    with plain_paths(context, case, shape, n) as solver:
        return _time_calls(partial(_solve, solver))


class _RandomVerifier:
    """Verifier without cost: a random score per step, seeded by its place in the tree."""

    default_aggregate = "last"
    probabilities = True

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        return [Random(f"{_SEED} {node.lineage[1:]}").random() for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        pass


def _our_search(context: Context, shape: str, kv_bytes: int) -> dict[str, Any]:
    """Run our beam search. kv_bytes: its KV budget; 0 means ample."""
    case = _SMOKE if context.smoke else _SEARCH
    plenty = 2 * case["n"] * _path_tokens(context) * _token_bytes(context, shape)
    release(context.device)
    with Solver(
        model=f"random:{shape}",
        verifier=_RandomVerifier(),
        device=context.device,
        search="beam",
        n=case["n"],
        width=case["width"],
        step_tokens=case["tokens"],
        max_rounds=case["rounds"],
        max_tokens=case["rounds"] * case["tokens"],
        ignore_eos=True,
        kv_memory=str(kv_bytes or plenty),
    ) as solver:
        return _time_calls(partial(_solve, solver))


def _solve(solver: Solver) -> dict[str, Any]:
    found = solver.synthetic(_PROMPT)
    time, kv = found.time, found.kv
    return {
        "s": time.total_s,
        "decode_s": round(time.decode_s, 4),
        "stall_s": round(time.stall_s, 4),
        "tokens": found.tokens.generated,
        "peak_bytes": kv.device_peak_bytes,
        "h2d_bytes": kv.h2d_bytes,
        "groups": kv.groups,
        "tree_hash": found.tree_hash,
    }


# --- theirs ----------------------------------------------------------------------------------


def _worker(
    context: Context, stack: ExitStack, folder: Path, shape: str
) -> Worker | dict[str, Any]:
    """Start vLLM with its engine in a process of its own (its default), else in the worker's.

    Returns an error row if both fail.
    """
    config = _config(shape)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "seed": _SEED,
        "max_model_len": 512 if context.smoke else _CONTEXT,
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 512 if context.smoke else _BLOCKS,
    }
    if context.on_gpu:
        options["gpu_memory_utilization"] = 0.6
        options["compilation_config"] = {"cudagraph_capture_sizes": _SIZES}
    else:
        options |= {"enforce_eager": True, "dtype": "float32", "block_size": 32}
    log = context.out / f"vllm-{shape.partition(',')[0]}"

    def start(processes: str) -> dict[str, Any]:
        environment = {**_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": processes}
        python = Path(os.environ.get(VLLM_PYTHON, sys.executable))
        path = log.with_name(f"{log.name}-{processes}.log")
        made = Worker("vllm_card", options, path, python=python, env=environment)
        made.facts["own_process"] = processes == "1"
        return {"worker": stack.enter_context(made)}

    found: dict[str, Any] = {}
    for processes in "10" if context.on_gpu else "0":
        release(context.device)
        found = attempt(partial(start, processes))
        if "worker" in found:
            return cast(Worker, found["worker"])
    return found


def _config(name: str) -> dict[str, Any]:
    """Build the config.json of a checkpoint of this shape."""
    shape = shape_from_text(name)
    named = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
    return {
        "model_type": shape.architecture,
        "architectures": [named[shape.architecture]],
        **sizes_of(name),
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _path_tokens(context: Context) -> int:
    """Tokens of a whole path with its prompt; with less KV, vLLM preempts a request forever."""
    case = _SMOKE if context.smoke else _SEARCH
    return _PROMPT + case["rounds"] * case["tokens"]


def _prompt(shape: str) -> list[int]:
    drawn, vocab = Random(_SEED), shape_from_text(shape).vocab
    return [drawn.randrange(3, vocab) for _ in range(_PROMPT)]


def _token_bytes(context: Context, shape: str) -> int:
    return shape_from_text(shape).kv_bytes_per_token(2 if context.on_gpu else 4)


def _their_paths(worker: Worker, prompt: list[int], n: int) -> dict[str, Any]:
    return _time_calls(lambda: worker.ask(op="paths", prompt=prompt, n=n, tokens=_TOKENS))


def _their_search(
    context: Context, worker: Worker, prompt: list[int], blocks: int
) -> dict[str, Any]:
    case = _SMOKE if context.smoke else _SEARCH
    request = {"op": "search", "prompt": prompt, **case, "seed": _SEED, "blocks": blocks}
    return _time_calls(lambda: worker.ask(**request))
