"""How `plan` shows FlashTTS's two ways to share KV memory (section 4.3), and which would win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from beamwright.cli.output import format_bytes
from beamwright.cli.sizes import Memory, Models
from beamwright.errors import InputError
from beamwright.plan.costs import Roofline
from beamwright.plan.scoring import in_verifier_tokens
from beamwright.plan.split import (
    Decision,
    SplitCase,
    Stage,
    TreeState,
    decide,
    fixed_split,
    tree_case,
)
from beamwright.plan.workload import Workload, tree_steps

_WORDS = {
    "paper": "as FlashTTS counts: whole paths, nothing shared or kept",
    "tree": "a round of the largest tree, with what is shared and kept",
}


def split_report(
    split: str | float, workload: Workload, models: Models, memory: Memory
) -> dict[str, Any] | None:
    """Both options for the paper's requests and for a round of this tree; None without verifier."""
    if models.verifier is None:
        return None
    return {
        "asked": split,
        "kv_bytes": memory.plan.kv_bytes,
        "paper": _compared(paper_case(workload, models), memory),
        "tree": _compared(largest_round(workload, models), memory),
    }


def paper_case(workload: Workload, models: Models) -> SplitCase:
    """Every path decoded to its end, then scored from its first token."""
    assert models.verifier is not None
    generator = Roofline(models.generator.costs, models.profile)
    seen = in_verifier_tokens(workload)
    whole = seen.prompt_tokens + seen.generate_tokens
    return SplitCase(
        workload.num_beams,
        Stage.alone(Roofline(models.verifier.costs, models.profile), whole),
        Stage.alone(generator, workload.generate_tokens, workload.prompt_tokens),
    )


def largest_round(workload: Workload, models: Models) -> SplitCase:
    """The step at whose end the tree is largest."""
    assert models.verifier is not None
    step = max(tree_steps(workload), key=lambda each: each.union_end_tokens)
    marks = step.num_nodes  # one more token of the verifier's per step
    state = TreeState(
        workload.num_beams,
        step.path_tokens,
        step.union_tokens,
        step.union_tokens + marks,
        step.num_tokens,
    )
    return tree_case(state, models.generator.costs, models.verifier.costs, models.profile)


def _compared(case: SplitCase, memory: Memory) -> dict[str, Any]:
    plan = memory.plan
    now = fixed_split(case, plan.generator_kv_bytes, plan.verifier_kv_bytes)
    try:
        found = decide(case, plan.kv_bytes)
    except InputError as error:
        return {"split": None, "offload": None, "chosen": None, "now": None, "why": str(error)}
    return {
        "split": None if found.split is None else asdict(found.split),
        "offload": asdict(found.offload),
        "chosen": found.chosen,
        "now": None if now is None else asdict(now),
        "why": _why(found),
    }


def _why(found: Decision) -> str:
    moving = found.offload.overhead_s
    if found.split is None:
        return "one path of each does not fit beside the other"
    if found.chosen == "offload":
        gain = found.split.total_s / found.offload.total_s
        return f"larger batches gain more than moving KV takes ({moving:.3g} s): {gain:.2f} times"
    if found.split.total_s == found.offload.total_s:
        return "in turn nothing would be faster"
    return f"moving KV would take {moving:.3g} s and gain less"


def split_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    split = report["split"]
    if split is None:
        return
    yield f"sharing {format_bytes(split['kv_bytes'])} of KV (now: --split {split['asked']})"
    for name, words in _WORDS.items():
        each = split[name]
        yield f"  {words}"
        if each["offload"] is None:
            yield f"    {each['why']}"
            continue
        yield f"    parts   {_parts(each['split'])}"
        yield f"    now     {_parts(each['now'])}"
        yield f"    in turn {_seconds(each['offload'])}"
        chosen = "parts" if each["chosen"] == "split" else "in turn"
        yield f"    {chosen}: {each['why']}"


def _parts(split: Mapping[str, Any] | None) -> str:
    if split is None:
        return "one path does not fit"
    share = split["generator_bytes"] / (split["generator_bytes"] + split["verifier_bytes"])
    return f"{share:.2f} of it the generator's; {_seconds(split)}"


def _seconds(split: Mapping[str, Any]) -> str:
    batches = f"{split['decode_batch']} decoded, {split['prefill_batch']} scored at a time"
    return f"{batches}: {split['total_s']:.3g} s"
