"""Predict tokens per second if weights exceed `--memory`. Cost model only: nothing is measured.

    python -m beamwright_lab.offload.predicted [--n 1 16 64 256] [--host-bandwidth 60 GB/s]

A row is one search on one card: a generator, a verifier or none, n paths of equal length. Compared
are

- weights offloaded layer by layer (`--weights-home host`), with the layers that `solve` chooses;
- llama.cpp's partial offload of the same models by its own rules (`llama_cpp`), with the most
  favourable number of layers of each model on the card;
- a smaller generator whose weights fit, with KV that moves instead of weights. Its verifier has the
  same weights in int4.

Weights, KV of both models and activations are within the limit in every row. The floor is the time
of decoding if every pass held all rows, and took the longer of two times: to copy the offloaded
layers once, and to compute with all weights and KV on the card. A shape that `models/named.toml`
does not know is left out and reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from beamwright.errors import InputError
from beamwright.models.named import named_shape
from beamwright.plan.costs import Roofline, Storage, matrix_bytes, storage_of
from beamwright.plan.fits import VerifierCosts, with_mark_tokens
from beamwright.plan.machines import HardwareProfile, find_profile, with_cuda_graphs
from beamwright.plan.times import BATCH_TOKENS, add_verifier_costs, decode_costs
from beamwright.plan.workload import Workload, expected_nodes, peak_tokens, tree_steps
from beamwright.sections import MemorySettings
from beamwright.solver.memory import MemoryPlan, plan_memory, weights_and_activations
from beamwright.solver.model_bytes import ModelBytes
from beamwright.solver.offload import choose_offload
from beamwright.units import GIB
from beamwright_lab.common import finish, say, table
from beamwright_lab.offload.llama_cpp import Host, LlamaModel

# Generator, its weights, and the limits in GiB.
GENERATORS = (
    ("qwen2.5-14b", "int4", (8,)),
    ("qwen3-30b-a3b", "int4", (8, 12)),
    ("qwen2.5-7b", "bfloat16", (8,)),
)
VERIFIERS = (None, "skywork-prm-1.5b", "skywork-prm-7b")
CARDS = ("rtx-4060", "rtx-4090-x16")
SMALLER = ("qwen2.5-7b", "int4")
PROMPT_TOKENS, GENERATE_TOKENS, STEP_TOKENS, WIDTH = 128, 1024, 32, 4
_ELEMENT_BYTES = 2
_LIBRARIES_PART = 50  # as `plan_memory` reserves on a GPU
_CONTEXT_BYTES = GIB  # of a card's memory, for CUDA's context; as `beamwright plan` assumes

Pass = tuple[int, float, float]  # tokens, KV tokens read and seen, as `Roofline.decode_step_s`


@dataclass(frozen=True)
class Case:
    """A search on a card. verifier: None for none; its weights are stored as the generator's."""

    generator: str
    weights: str
    verifier: str | None
    card: str
    memory_gib: int
    n: int

    @property
    def limit_bytes(self) -> int:
        """The limit on device memory, as `beamwright plan` lowers it to what the card has."""
        return min(self.memory_gib * GIB, self.profile.device_memory_bytes - _CONTEXT_BYTES)

    @property
    def profile(self) -> HardwareProfile:
        return find_profile(self.card)

    @property
    def workload(self) -> Workload:
        width = WIDTH if self.n % WIDTH == 0 else 1
        return Workload(self.n, width, PROMPT_TOKENS, GENERATE_TOKENS, STEP_TOKENS)

    @property
    def models(self) -> list[ModelBytes]:
        """The sizes of generator and verifier, with all weights on the device."""
        named = [(self.generator, False)]
        named += [] if self.verifier is None else [(self.verifier, True)]
        return [_sizes(name, self.weights, scores=scores) for name, scores in named]


def _sizes(name: str, weights: str, *, scores: bool) -> ModelBytes:
    shape = named_shape(name)
    if shape is None:
        raise InputError(f"{name}: no such shape")
    storage = Storage.PLAIN if weights == "bfloat16" else storage_of(weights)
    shape = replace(shape, has_lm_head=not scores)  # the verifiers have a value head
    return ModelBytes(shape, _ELEMENT_BYTES, storage, scores=scores)


def cases(ns: Sequence[int]) -> Iterator[Case]:
    """Yield the cases, without limits above a card's memory."""
    for (name, weights, limits), card in product(GENERATORS, CARDS):
        for gib, verifier, n in product(limits, VERIFIERS, ns):
            if gib * GIB <= find_profile(card).device_memory_bytes:
                yield Case(name, weights, verifier, card, gib, n)


# --- Beamwright -------------------------------------------------------------------------------


def predict(case: Case, *, home: str = "auto") -> dict[str, Any] | None:
    """Predict a search by Beamwright; None if it does not fit.

    home: "auto" to offload layers, "device" to keep all weights on the card.
    """
    free = case.profile.device_memory_bytes
    rules: dict[str, Any] = {"in_place": True, "free_bytes": free, "step_tokens": None}
    memory = MemorySettings.model_validate({"memory": case.limit_bytes, "weights_home": home})
    work = case.workload
    models = choose_offload(memory, case.models, work, case.profile, rules)
    generator, verifier = models[0], models[1] if len(models) > 1 else None
    try:
        plan = plan_memory(memory, generator, verifier, work.num_beams, **rules)
    except InputError:
        return None
    roofline = _roofline(generator, case.profile)
    totals = decode_costs(work, roofline, plan.generator_kv_bytes)
    if totals is None:
        return None
    decode_s = totals.decode_s + totals.stall_s
    if verifier is not None:
        scorer = VerifierCosts(verifier.costs, plan.verifier_kv_bytes)
        add_verifier_costs(totals, work, scorer, _roofline(verifier, case.profile).hardware)
    prefill_s = roofline.prefill_s(work.prompt_tokens)
    search_s = prefill_s + totals.decode_s + totals.verify_s + totals.stall_s
    passes = list(decode_passes(work))
    held = Roofline(replace(generator.costs, offloaded_bytes=0), roofline.hardware)
    return {
        "layers": [_layers(model) for model in models],
        "tokens_s": num_tokens(work) / decode_s,
        "floor_share": floor_s(passes, held, roofline.offload_s) / decode_s,
        "search_s": search_s,
        "bound": roofline.bottleneck(*passes[len(passes) // 2][1]),
        "groups": totals.groups / work.num_steps,
        "kv_needed_bytes": round(kv_tokens(work) * generator.kv_per_token),
        "bytes": held_bytes(case, models, plan),
    }


def _roofline(model: ModelBytes, card: HardwareProfile) -> Roofline:
    """Return the roofline of a model, whose passes are captured unless weights are offloaded."""
    return Roofline(model.costs, with_cuda_graphs(card) if model.offloaded is None else card)


def _layers(model: ModelBytes) -> list[int]:
    """Return the number of layers off the device, and of all layers."""
    moved = 0 if model.offloaded is None else model.offloaded.num_layers
    return [moved, model.shape.layers]


def held_bytes(case: Case, models: Sequence[ModelBytes], plan: MemoryPlan) -> dict[str, int]:
    """Return what the limit is divided into, in bytes. Weights include the buffers of copies."""
    _, activations = weights_and_activations(models, case.n, at_once=True)
    return {
        "limit": case.limit_bytes,
        "generator_weights": models[0].weights,
        "verifier_weights": sum(model.weights for model in models[1:]),
        "activations": activations,
        "libraries": case.limit_bytes // _LIBRARIES_PART,
        "generator_kv": plan.generator_kv_bytes,
        "verifier_kv": plan.verifier_kv_bytes,
    }


def num_tokens(work: Workload) -> int:
    return work.num_beams * work.generate_tokens


def kv_tokens(work: Workload) -> float:
    """Return the peak number of tokens of the expected tree."""
    return peak_tokens(work, expected_nodes(work)).mean


def decode_passes(work: Workload) -> Iterator[tuple[int, Pass]]:
    """Yield, for each step, its number of passes, and a pass of all rows in its middle."""
    beams = work.num_beams
    for step in tree_steps(work):
        middle = (step.num_tokens + 1) / 2
        read = step.union_tokens + beams * middle
        yield step.num_tokens, (beams, read, beams * (step.path_tokens + middle))


def floor_s(passes: Sequence[tuple[int, Pass]], held: Roofline, copy_s: float) -> float:
    """Return the floor of decoding in seconds.

    held: the roofline with all weights and KV on the card.
    copy_s: seconds to copy the offloaded layers once.
    """
    return sum(count * max(copy_s, held.decode_step_s(*each)) for count, each in passes)


# --- llama.cpp --------------------------------------------------------------------------------


def predict_llama(case: Case, host: Host) -> dict[str, Any] | None:
    """Predict a search by llama.cpp's rules: the fastest split of both models' layers.

    Each model has its own activations, and memory for the copy of one matrix. Verifying runs in
    batches as large as Beamwright's (`-ub 4096`). None if this memory exceeds the limit.
    """
    work, models, card = case.workload, case.models, with_cuda_graphs(case.profile)
    marked = with_mark_tokens(work)
    left = case.limit_bytes - case.limit_bytes // _LIBRARIES_PART
    left -= sum(model.activations(case.n) + _largest_bytes(model) for model in models)
    if left < 0:
        return None
    generator = _llama_model(models[0], work)
    verifier = _llama_model(models[1], marked) if len(models) > 1 else None
    choices: list[tuple[int | None, int, float]] = [(None, 0, 0.0)]
    if verifier is not None:
        scored, layers = list(verify_passes(marked)), verifier.costs.num_layers
        fit = [n for n in range(layers + 1) if verifier.card_bytes(n) <= left]
        choices = [
            (count, 0 if count is None else verifier.card_bytes(count),
             _sum_s(verifier, count, card, host, scored))
            for count in (None, *fit)
        ]  # fmt: skip
    passes, found = list(decode_passes(work)), []
    for verifier_layers, taken, verify_s in choices:
        count = generator.layers_that_fit(left - taken)
        decode_s = _sum_s(generator, count, card, host, passes)
        found.append((decode_s + verify_s, decode_s, count, verifier_layers))
    search_s, decode_s, count, verifier_layers = min(found, key=lambda each: each[0])
    prompt = work.prompt_tokens
    prefill = prompt, prompt, prompt * (prompt + 1) / 2
    return {
        "card_layers": [count or 0, *([] if verifier is None else [verifier_layers or 0])],
        "tokens_s": num_tokens(work) / decode_s,
        "search_s": search_s + generator.pass_s(count, card, host, *prefill),
    }


def _largest_bytes(model: ModelBytes) -> int:
    return max(
        matrix_bytes(rows, columns, model.element_bytes, model.storage)
        for rows, columns, _ in model.shape.matrices
    )


def _llama_model(model: ModelBytes, work: Workload) -> LlamaModel:
    shape = model.shape
    head = shape.vocab * shape.hidden * model.element_bytes if shape.has_lm_head else 0
    moved = model.with_offloaded(1).offloaded
    assert moved is not None
    kv_bytes = round(kv_tokens(work) * model.kv_per_token)
    return LlamaModel(model.costs, moved.home_bytes, head, kv_bytes)


def _sum_s(
    model: LlamaModel,
    card_layers: int | None,
    card: HardwareProfile,
    host: Host,
    passes: Sequence[tuple[int, Pass]],
) -> float:
    return sum(count * model.pass_s(card_layers, card, host, *each) for count, each in passes)


def verify_passes(work: Workload) -> Iterator[tuple[int, Pass]]:
    """Yield the verifier's passes: the prompt, then each step of all rows in equal batches."""
    prompt, beams = work.prompt_tokens, work.num_beams
    yield 1, (prompt, prompt, prompt * (prompt + 1) / 2)
    for step in tree_steps(work):
        count = -(-beams * step.num_tokens // BATCH_TOKENS)
        rows, middle = beams / count, (step.num_tokens + 1) / 2
        read = step.grouped_union_tokens(count) / count + rows * step.num_tokens
        seen = rows * step.num_tokens * (step.path_tokens + middle)
        yield count, (round(rows * step.num_tokens), read, seen)


# --- rows and tables --------------------------------------------------------------------------


def row_of(case: Case, host: Host) -> dict[str, Any]:
    """Return the predictions of one case."""
    smaller = replace(case, generator=SMALLER[0], weights=SMALLER[1])
    return {
        **asdict(case),
        "limit_gib": case.limit_bytes / GIB,
        "offloaded": predict(case),
        "llama_cpp": predict_llama(case, host),
        "smaller": predict(smaller, home="device"),
    }


def speed_table(found: Mapping[str, Any]) -> str:
    """Return a row per case: tokens per second while decoding, and seconds of the whole search."""
    rows = [_shown(row) for row in found["rows"]]
    host, search = found["host"], found["search"]
    said = (
        f"Predicted by the cost model, not measured: n paths of {search['generate']} tokens after "
        f"a prompt of {search['prompt']},\nin steps of {search['step']}. llama.cpp's host reads "
        f"{host['bandwidth'] / 1e9:.0f} GB/s and computes {host['flops'] / 1e12:.1f} TFLOP/s. "
        f"The smaller model is\n{' '.join(SMALLER)}, with other answers. In brackets: the KV that "
        "the search needs, and what bounds a pass.\nSearch, s: ours / llama.cpp / smaller, with "
        "prefill and scoring."
    )
    return f"{said}\n\n{table(rows, list(rows[0]))}"


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    ours, llama = row["offloaded"], row["llama_cpp"]

    sides = {"ours": ours, "llama.cpp": llama, "smaller": row["smaller"]}

    def each_side(name: str) -> dict[str, str]:
        return {side: _digits(None if of is None else of[name]) for side, of in sides.items()}

    shown = {
        "generator": f"{row['generator']} {row['weights']}",
        "verifier": "none" if row["verifier"] is None else row["verifier"].split("-")[-1],
        "card, limit": f"{row['card']}, {row['limit_gib']:g} GiB",
        "n": str(row["n"]),
    }
    if ours is None:
        fit = dict.fromkeys(("layers off the card", "KV, GiB (of)", "share of the floor"), "no fit")
    else:
        kv = ours["bytes"]["generator_kv"] / GIB
        fit = {
            "layers off the card": ", ".join(f"{moved}/{of}" for moved, of in ours["layers"]),
            "KV, GiB (of)": f"{kv:.2f} ({ours['kv_needed_bytes'] / GIB:.2f})",
            "share of the floor": f"{ours['floor_share']:.2f} ({ours['bound']})",
        }
    on_card = "no fit" if llama is None else ", ".join(map(str, llama["card_layers"]))
    search_s = " / ".join(each_side("search_s").values())
    return {
        **shown,
        **fit,
        "llama.cpp's layers on it": on_card,
        **{f"tokens/s, {side}": speed for side, speed in each_side("tokens_s").items()},
        "search, s": search_s,
    }


def _digits(value: float | None) -> str:
    """Return a number with one decimal below 10; "no fit" for None."""
    if value is None:
        return "no fit"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def bytes_table(found: Mapping[str, Any]) -> str:
    """Return a row per case that fits: what `--memory` is divided into, in GiB."""
    rows = []
    for row in found["rows"]:
        if row["offloaded"] is not None:
            parts = row["offloaded"]["bytes"]
            named = {key: row[key] for key in ("generator", "weights", "verifier", "card", "n")}
            rows.append({**named, **{key: f"{size / GIB:.2f}" for key, size in parts.items()}})
    return table(rows, list(rows[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--host-bandwidth", type=float, default=60, help="GB/s")
    parser.add_argument("--host-tflops", type=float, default=1.0)
    args = parser.parse_args()
    host = Host(args.host_bandwidth * 1e9, args.host_tflops * 1e12)
    missing = [name for name, *_ in GENERATORS if named_shape(name) is None]
    for name in missing:
        say(f"{name} is left out: models/named.toml has no such shape")
    rows = [row_of(case, host) for case in cases(args.n) if case.generator not in missing]
    search = {"prompt": PROMPT_TOKENS, "generate": GENERATE_TOKENS, "step": STEP_TOKENS}
    quoted = {"host": asdict(host), "search": search, "missing": missing, "rows": rows}
    for shown in (speed_table, bytes_table):
        print(shown(quoted), end="\n\n")
    finish("offload_predicted", {"predicted": True, "quoted": quoted})


if __name__ == "__main__":
    main()
