"""Stage `hybrid`: recurrent layers: their step kernels, searches of tiny hybrids, a decode step.

Kernels: one token through several layers whose states lie in shuffled blocks, in one replay with a
cold L2 cache. The floor is reading and writing each state once at the card's copy rate. Also
checked: the error against plain torch, and whether a row alone has equal bits. These need no
`transformers`; the rest needs the version that our adapter supports.

Searches: random float32 checkpoints of some families. The tree must be the same with ample KV, with
half of the peak, and without graphs; log-probabilities are compared with a forward pass of
`transformers`. Then decode steps of a random 1.6B hybrid with many rows.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright.attention.kernels import why_no_kernels
from beamwright.kv.states import (
    RowStates,
    StateCells,
    StateLayout,
    StatePlace,
    StateTables,
    StateTensor,
)
from beamwright.models import steps
from beamwright.models.hub import resolve_folder
from beamwright.models.named import shape_from_text
from beamwright.protocols import RoundReport
from beamwright.tree import Node
from beamwright_lab.gpu.attention_kernels import Clock, ceilings, graph_of
from beamwright_lab.gpu.context import Context, release

_COLD_BYTES = 4e8
_KERNELS = {"delta": "delta", "mamba-2": "scan", "convolution": "convolution"}
_TAPS = 4
_NEAR = 1e-3  # limit of log-probability errors in float32; TF32's are larger
_SEARCH: dict[str, Any] = {
    **{"n": 16, "width": 4, "step_tokens": 12, "max_rounds": 4, "temperature": 1},
    **{"ignore_eos": True, "dtype": "float32", "schedule": "locality", "verifier": "none"},
}
_TINY = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 16},
    **{"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "tie_word_embeddings": True,
}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    "linear_value_head_dim": 16,
}
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2},
    **{"mamba_expand": 2, "mamba_chunk_size": 16},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
}
# 1.6B parameters.
LARGE = {
    **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8, "head_dim": 256},
    **{"num_key_value_heads": 2, "intermediate_size": 6144, "vocab_size": 151936},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "max_position_embeddings": 4096},
}


@dataclass(frozen=True)
class Recurrence:
    """Shape of a recurrent layer's state: heads of keys x values.

    key_heads: number of query and key heads, each shared by several heads.
    """

    name: str
    kernel: str
    key_heads: int
    heads: int
    keys: int
    values: int
    block_bytes: int

    @property
    def size(self) -> tuple[int, int, int]:
        """Size of the recurrent state; Mamba-2's has values first."""
        inner = (self.keys, self.values) if self.kernel == "delta" else (self.values, self.keys)
        return self.heads, *inner

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.keys + self.heads * self.values


def recurrences(*, smoke: bool) -> list[Recurrence]:
    """List the states to measure, most important first; a block holds 16 tokens of bfloat16 KV."""
    if smoke:
        return [Recurrence("tiny", "delta", 1, 2, 16, 16, 2048)]
    found = []
    for name in ("qwen3.5-9b", "qwen3.5-27b"):
        shape = shape_from_text(name)
        heads, keys, values = next(p.size for p in shape.states if p.kind == "recurrent")
        mixed = next(p.size[0] for p in shape.states if p.kind == "conv")
        key_heads = (mixed - heads * values) // (2 * keys)
        block_bytes = 16 * shape.kv_bytes_per_token(2)
        found.append(Recurrence(name, "delta", key_heads, heads, keys, values, block_bytes))
    return [*found, Recurrence("granite-4-h-tiny", "mamba-2", 1, 48, 128, 64, 2**18)]


def run(context: Context) -> dict[str, Any]:
    """Measure kernels, searches and steps; report rows that are wrong."""
    data: dict[str, Any] = {"kernels": [], "searches": [], "steps": [], "not_run": []}
    rows = (2,) if context.smoke else (64, 16)
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    if (why := why_no_kernels(torch.device(context.device), dtype)) is None:
        clock = Clock(10) if context.on_gpu else None
        bandwidth = ceilings(clock, dtype)[0] if clock is not None else None
        data["copy_gb_s"] = bandwidth and round(bandwidth / 1e9)
        work = [
            ({"state": each.name, "kernel": kernel, "rows": count}, partial(
                _measure_kernel, context, each, kernel, count, clock, bandwidth
            ))
            for each, count in product(recurrences(smoke=context.smoke), rows)
            for kernel in (each.kernel, "convolution")
        ]  # fmt: skip
        context.rows(data, "kernels", work, 2.0)
        del clock
        release(context.device)
    else:
        data["kernels"].append({"skipped": why})
    with tempfile.TemporaryDirectory() as folder:
        families = ["qwen3_5_text"] if context.smoke else list(FAMILIES)
        work = [
            ({"family": f}, partial(_compare_searches, context, f, Path(folder) / f))
            for f in families
        ]
        context.rows(data, "searches", work, 6.0)
        work = [({"model": "qwen3_5_text"}, partial(_time_steps, context, Path(folder) / "large"))]
        context.rows(data, "steps", work, 15.0)
    wrong = [
        row for name in ("kernels", "searches", "steps") for row in data[name] if _is_wrong(row)
    ]
    return {**data, "error": f"wrong: {len(wrong)} rows"} if wrong else data


def _is_wrong(row: Mapping[str, Any]) -> bool:
    checks = ("alone_equal", "idle_unchanged", "near", "equal_trees")
    return "error" in row or any(row.get(name) is False for name in checks)


# --- kernels ---------------------------------------------------------------------------------


class Bench:
    """Rows' states of several layers in blocks of a pool, and inputs of a step."""

    def __init__(self, of: Recurrence, rows: int, layers: int, device: str, dtype: Any) -> None:
        self.of, self.rows, self.device, self.dtype = of, rows, device, dtype
        tensors = [
            StateTensor(layer, kind, size, torch.float32 if kind == "recurrent" else dtype)
            for layer in range(layers)
            for kind, size in (("recurrent", of.size), ("conv", (of.channels, _TAPS)))
        ]
        self.layout = StateLayout(tensors)
        self.fixed = self.layout.num_blocks(of.block_bytes)
        self.order = torch.randperm(rows * self.fixed, generator=_seeded()).view(rows, self.fixed)
        storage = torch.zeros(rows * self.fixed, of.block_bytes, dtype=torch.uint8, device=device)
        self.cells = StateCells(storage, self.layout)
        width = of.channels + of.heads
        self.mixed = torch.randn(rows, width, generator=_seeded()).to(device, dtype)
        self.gates = torch.rand(rows, of.heads, generator=_seeded()).to(device)
        self.own = torch.randn(3, of.heads, generator=_seeded()).to(device)
        self.weight = torch.randn(of.channels, _TAPS, generator=_seeded()).to(device, dtype) / 2

    def placed(self, layer: int, kind: str, rows: slice = slice(None)) -> StatePlace:
        """Locate a layer's states of some rows, which are read and written in place."""
        blocks = self.order[rows].tolist()
        states = RowStates(self.cells, blocks, blocks, tables=StateTables(self.cells))
        found = states.part_places(layer)
        assert found is not None
        return found[kind]

    def inputs(self, kernel: str, rows: slice = slice(None)) -> tuple[Any, ...]:
        """Return a step kernel's inputs for these rows, other than states."""
        of, mixed = self.of, self.mixed[rows]
        cut = of.key_heads * of.keys
        first, second, rest, rate = mixed.split([cut, cut, of.heads * of.values, of.heads], dim=1)
        first, second = (x.unflatten(1, (of.key_heads, of.keys)) for x in (first, second))
        value = rest.unflatten(1, (of.heads, of.values))
        if kernel == "convolution":
            return mixed[:, : of.channels], self.weight
        if kernel == "delta":
            return first, second, value, -self.gates[rows], self.gates[rows].to(self.dtype)
        shift, decay, skip = self.own
        return value, rate, first, second, shift, -decay.exp(), skip

    def step(self, kernel: str, placed: StatePlace, rows: slice = slice(None)) -> torch.Tensor:
        """Run one token through our kernel."""
        from beamwright.models import step_kernels  # (loads Triton)

        step: Any = getattr(step_kernels, f"{_KERNELS[kernel]}_step")
        found: torch.Tensor = step(placed, *self.inputs(kernel, rows))
        return found


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _measure_kernel(
    context: Context,
    of: Recurrence,
    kernel: str,
    rows: int,
    clock: Clock | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    found = _check_kernel(Bench(of, rows, 1, context.device, dtype), kernel)
    if clock is None or bandwidth is None:
        return found
    heads, keys, values = of.size
    state_bytes = rows * heads * keys * values * 4
    layers = max(2, min(24, int(_COLD_BYTES / state_bytes)))
    bench = Bench(of, rows, layers, context.device, dtype)
    kind = "conv" if kernel == "convolution" else "recurrent"
    placed = [bench.placed(layer, kind) for layer in range(layers)]
    us = clock.us(graph_of(lambda: [bench.step(kernel, each) for each in placed])) / layers
    moved = 2 * (rows * of.channels * _TAPS * 2 if kind == "conv" else state_bytes)
    floor_us = 1e6 * moved / bandwidth
    times = {"us": us, "floor_us": floor_us, "share_of_floor": floor_us / us}
    return {**found, "layers": layers, **{name: round(t, 3) for name, t in times.items()}}


def _check_kernel(bench: Bench, kernel: str) -> dict[str, Any]:
    """Compare a kernel with plain torch, with one row alone, and with the last row idle."""
    kind = "conv" if kernel == "convolution" else "recurrent"
    index = bench.cells.cell_numbers((0, kind), bench.order.to(bench.device))
    part = bench.layout.parts[0, kind]
    start = torch.randn(bench.rows, *part.size, generator=_seeded()).to(bench.device, part.dtype)
    plain: Any = getattr(steps, f"{_KERNELS[kernel]}_step")
    after = start.clone()
    expected = plain(after, *bench.inputs(kernel))
    bench.cells.write_cells(index, bench.cells.to_cells((0, kind), start))
    found = bench.step(kernel, bench.placed(0, kind))
    written = bench.cells.read((0, kind), index)
    bench.cells.write_cells(index, bench.cells.to_cells((0, kind), start))
    alone = bench.step(kernel, bench.placed(0, kind, slice(1)), slice(1))
    equal = torch.equal(alone[0], found[0])
    equal &= torch.equal(bench.cells.read((0, kind), index)[0], written[0])
    bench.cells.write_cells(index, bench.cells.to_cells((0, kind), start))
    idle = bench.placed(0, kind)
    idle.blocks.actions[-1] = 0
    bench.step(kernel, idle)
    unchanged = torch.equal(bench.cells.read((0, kind), index)[-1], start[-1])
    return {
        "out_error": _relative(found, expected),
        "state_error": _relative(written, after),
        "alone_equal": equal,
        "idle_unchanged": unchanged,
    }


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- whole models ----------------------------------------------------------------------------


def write_hybrid(
    folder: Path, family: str, options: Mapping[str, Any], device: str, dtype: torch.dtype
) -> Any:
    """Write a random checkpoint with the bundled tokenizer; return its `transformers` model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = resolve_folder("bundled", "generator")
    vocab = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = AutoConfig.for_model(family, **{**_TINY, "vocab_size": vocab, **options})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, folder)
    return model.eval()


def _compare_searches(context: Context, family: str, folder: Path) -> dict[str, Any]:
    """Compare a family's trees with less KV and without graphs, and its log-probabilities."""
    reference = write_hybrid(folder, family, FAMILIES[family], context.device, torch.float32)
    given = {
        **{"model": str(folder), "device": context.device, **_SEARCH},
    }
    whole, peak, found = _grow_tree(reference, **given, kv_memory="256MiB", graphs="auto")
    half = str(int(peak / 2))
    ways = {"plain": {"kv_memory": "256MiB", "graphs": "off"}}
    ways |= {f"half, graphs {g}": {"kv_memory": half, "graphs": g} for g in ("auto", "off")}
    trees = {name: _grow_tree(None, **given, **way)[0] for name, way in ways.items()}
    return {
        **found,
        "kv_peak_bytes": peak,
        "tree_hash": whole,
        "equal_trees": all(tree == whole for tree in trees.values()),
        **{f"tree of {name}": tree for name, tree in trees.items() if tree != whole},
        "near": found["logprob_error"] < _NEAR,
    }


def _grow_tree(reference: Any, **options: Any) -> tuple[str, int, dict[str, Any]]:
    """Search once; return the tree hash, peak KV bytes and facts.

    reference: a model to compare log-probabilities with, or None.
    """
    trees: list[Any] = []
    with Solver(**options) as solver:
        solution = solver.synthetic(24, on_round=lambda report: trees.append(report.tree))
        assert solver.generator is not None
        decoder = solver.generator.decoder
        found: dict[str, Any] = {"exact": solver.exact, "in_place": decoder.updates_states_in_place}
        found["warnings"] = list(solution.warnings)
    if reference is not None:
        leaves = [node for node in trees[-1].nodes() if not node.children][:4]
        found["logprob_error"] = max(_logprob_error(reference, leaf) for leaf in leaves)
    return solution.tree_hash, solution.kv.device_peak_bytes or 0, found


@torch.inference_mode()
def _logprob_error(reference: Any, leaf: Node) -> float:
    """Largest log-probability error of the tokens sampled along a leaf's path."""
    path = list(leaf.path())
    ids = [token for node in path for token in node.token_ids]
    drawn = [number for node in path for number in node.logprobs]
    device = next(reference.parameters()).device
    logits = reference(torch.tensor([ids], device=device)).logits[0].float().log_softmax(-1)
    first = len(ids) - len(drawn)
    at = torch.arange(first, len(ids), device=device)
    expected = logits[at - 1, torch.tensor(ids[first:], device=device)].cpu()
    return float((expected - torch.tensor(drawn)).abs().max())


def _time_steps(context: Context, folder: Path) -> dict[str, Any]:
    """Measure milliseconds per token of independent paths, with graphs and without."""
    n, dtype = (4, torch.float32) if context.smoke else (64, torch.bfloat16)
    options = FAMILIES["qwen3_5_text"] if context.smoke else LARGE
    model = write_hybrid(folder, "qwen3_5_text", options, context.device, dtype)
    num_parameters = sum(each.numel() for each in model.parameters())
    del model
    release(context.device)
    tokens, rounds = (4, 3) if context.smoke else (32, 4)
    row: dict[str, Any] = {"n": n, "parameters": num_parameters}
    for graphs in ("auto", "off"):
        with Solver(
            model=str(folder),
            verifier="none",
            device=context.device,
            search="best-of-n",
            choose="majority",
            n=n,
            width=1,
            step_tokens=tokens,
            max_rounds=rounds,
            max_tokens=tokens * rounds,
            ignore_eos=True,
            schedule="in-gpu",
            graphs=graphs,
            kv_memory="64MiB" if context.smoke else "16GiB",
        ) as solver:
            assert solver.generator is not None
            decoder = solver.generator.decoder
            spent = _rounds_s(solver)[1:]
            row[f"ms_graphs_{graphs}"] = round(1e3 * statistics.median(spent) / tokens, 3)
            row["exact"], row["in_place"] = solver.exact, decoder.updates_states_in_place
            row["state_bytes"] = decoder.shape.state_bytes(decoder.dtype.itemsize)
        release(context.device)
    row["bytes"] = num_parameters * dtype.itemsize + 2 * n * row["state_bytes"]
    return row


def _rounds_s(solver: Solver) -> list[float]:
    ends = [0.0]

    def on_round(report: RoundReport) -> None:
        ends.append(report.elapsed_s)

    solver.synthetic(128, on_round=on_round)
    return [end - start for start, end in pairwise(ends)]
