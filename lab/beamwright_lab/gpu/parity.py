"""Stage `parity`: compare what the device computes with the CPU.

Logits: tiny random checkpoints of each family, every attention backend, against the float64 logits
of the `reference` backend on the CPU. Trees: one small search over backends and group sizes. One
backend on a CPU in float32 should grow equal trees; whether trees are equal is only reported.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from beamwright import Solver
from beamwright.attention import BACKENDS, KERNEL_BACKENDS, make_attention
from beamwright.kv.segments import PathPart
from beamwright.models.hub import resolve_folder
from beamwright.models.load import load_model
from beamwright.models.named import shape_from_text
from beamwright.models.prefill import PrefillRequest
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright_lab.gpu.context import Context

# Largest relative error, by norms; TF32 products would show about 3e-4.
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
_SEARCHED = (
    "random:llama,layers=3,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=256,context=512"
)
_LEAST_S = 4.0
Work = list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
_ROWS, _STEPS, _LATE = 12, 20, 7
_PROMPT, _NODE = 37, 21


def run(context: Context) -> dict[str, Any]:
    """Measure logit errors and tree hashes; an error if a logit is beyond its limit."""
    data: dict[str, Any] = {"limits": LIMITS, "logits": [], "trees": [], "not_run": []}
    with tempfile.TemporaryDirectory() as folder:
        for family in ("llama",) if context.smoke else ("qwen2", "opt", "llama"):
            path = write_checkpoint(family, Path(folder) / family)
            context.rows(data, "logits", logit_work(family, path, context), _LEAST_S)
    context.rows(data, "trees", tree_work(context), _LEAST_S)
    first = data["trees"][0].get("tree_hash") if data["trees"] else None
    data["trees"] = [{**row, "as_first": row.get("tree_hash") == first} for row in data["trees"]]
    wrong = sum(not row.get("within") for row in data["logits"])
    if wrong:
        data["error"] = f"{wrong} of {len(data['logits'])} logits beyond their limit"
    return data


# --- logits ----------------------------------------------------------------------------------


def write_checkpoint(
    family: str, folder: Path, device: str = "cpu", dtype: str = "float32", **sizes: int
) -> Path:
    """Write a random checkpoint with the bundled tokenizer.

    Weights are large enough that attention is not uniform. sizes: config fields, else tiny ones.
    """
    with torch.device(device):
        model = random_model(family, dtype, sizes)
    model.save_pretrained(folder)
    for file in resolve_folder("bundled", "generator").glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


def random_model(family: str, dtype: str, sizes: Mapping[str, int]) -> Any:
    """Build a random `transformers` model on torch's default device."""
    from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, Qwen2Config

    common = {**_SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gated = {**common, "intermediate_size": 128, "num_key_value_heads": 2, **sizes}
    configs = {
        "llama": lambda: LlamaConfig(**gated, tie_word_embeddings=False),
        "qwen2": lambda: Qwen2Config(**gated, tie_word_embeddings=True),
        "opt": lambda: OPTConfig(**common, ffn_dim=128, word_embed_proj_dim=64),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[family](), dtype=getattr(torch, dtype))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.1 if not sizes else 0.01))
    return model.eval()


def sizes_of(name: str) -> dict[str, int]:
    """Return the config fields of a named shape, with a context for short searches."""
    shape = shape_from_text(name)
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
    }


@torch.inference_mode()
def tree_logits(settings: ModelSettings) -> torch.Tensor:
    """Decode rows under a small tree together; return float64 logits [rows, steps, vocab].

    Half of the rows join in the middle of the others' steps.
    """
    decoder = load_model(settings.model, settings).decoder
    device, name = decoder.device, settings.attention
    known = (device, decoder.dtype) if name in KERNEL_BACKENDS else ()
    attention = make_attention(name, *known)
    drawn = torch.Generator().manual_seed(1)
    vocab = decoder.shape.vocab
    token_bytes = decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    model = TreeModel(decoder, attention, 4096 * token_bytes)
    prompt = torch.randint(vocab, (_PROMPT,), generator=drawn).tolist()
    root = model.store.create()
    model.prefill([PrefillRequest((), root, prompt, 0)])
    path = (PathPart(root, _PROMPT),)
    parents = [model.store.create() for _ in range(3)]
    lengths = [_NODE - number for number in range(len(parents))]
    steps = [torch.randint(vocab, (n,), generator=drawn).tolist() for n in lengths]
    model.prefill(
        [PrefillRequest(path, p, s, _PROMPT) for p, s in zip(parents, steps, strict=True)]
    )
    under = sorted(row % len(parents) for row in range(_ROWS))
    paths = [(*path, PathPart(parents[place], lengths[place])) for place in under]
    tokens = torch.randint(vocab, (_ROWS, _STEPS), generator=drawn)
    starts = _PROMPT + torch.tensor([lengths[place] for place in under])
    session, present = DecodeSession(model.decoder, model.store, model.backend), list[int]()
    found: list[list[torch.Tensor]] = [[] for _ in range(_ROWS)]
    for turn in range(_STEPS + _LATE):
        staying = [place for place, row in enumerate(present) if len(found[row]) < _STEPS]
        joining = {0: range(0, _ROWS, 2), _LATE: range(1, _ROWS, 2)}.get(turn, range(0))
        if joining or len(staying) < len(present):
            segments = [model.store.create() for _ in joining]
            session.arrange_rows(staying, [paths[row] for row in joining], segments)
            present = [*(present[place] for place in staying), *joining]
        index = torch.tensor([*present, *present[:1] * (session.num_rows - len(present))])
        steps = torch.tensor([len(found[row]) for row in index.tolist()])
        ids, positions = tokens[index, steps], starts[index] + steps
        logits = decoder.logits(session.forward(ids.to(device), positions.to(device)))
        for row, mine in zip(present, logits.double().cpu(), strict=False):
            found[row].append(mine)
    session.close()
    return torch.stack([torch.stack(mine) for mine in found])


def logit_work(family: str, folder: Path, context: Context) -> Work:
    """List the error measurements of one family: every backend and dtype."""
    common = {"model": str(folder), "verifier": "none"}
    oracle = ModelSettings(**common, dtype="float64", attention="reference")
    expected = tree_logits(oracle)
    work: Work = []
    for dtype, attention in product(
        LIMITS, (*(KERNEL_BACKENDS if context.on_gpu else ()), *BACKENDS)
    ):
        settings = ModelSettings(**common, device=context.device, dtype=dtype, attention=attention)
        names = {"family": family, "dtype": dtype, "attention": attention}
        work.append((names, partial(_error, settings, expected, LIMITS[dtype])))
    return work


def _error(settings: ModelSettings, expected: torch.Tensor, limit: float) -> dict[str, Any]:
    error = float((tree_logits(settings) - expected).norm() / expected.norm())
    return {"relative_error": error, "within": error < limit}


# --- trees -----------------------------------------------------------------------------------


def tree_work(context: Context) -> Work:
    """List the small searches: each backend by default, without graphs, and in groups."""
    whole: dict[str, Any] = {"max_batch": None, "graphs": "auto"}
    ways = [whole, {**whole, "graphs": "off"}, {**whole, "max_batch": 8}]
    if not context.smoke:
        ways.append({**whole, "max_batch": 3})
    rows = [{"attention": attention, **how} for attention in BACKENDS for how in ways]
    return [(row, partial(_small_search, context, **row)) for row in rows]


def _small_search(context: Context, **options: Any) -> dict[str, Any]:
    with Solver(
        model=_SEARCHED,
        verifier="logprob",
        device=context.device,
        dtype="float32",
        n=16,
        width=4,
        step_tokens=12,
        max_tokens=36,
        max_rounds=3,
        ignore_eos=True,
        kv_memory="64MiB",
        schedule="in-gpu",
        **options,
    ) as solver:
        return {"tree_hash": solver.synthetic(24).tree_hash}
