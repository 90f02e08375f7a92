"""Predict the later generations of `--search aggregate`, which answer prompts made of answers.

A generation has n prompts: the problem and `size` of the n answers before. Prompts that begin with
the same answers share KV. The KV of the answers as they were written is freed: in a new prompt
their tokens follow other ones, so it would be of no use.
"""

from __future__ import annotations

from dataclasses import dataclass

from beamwright.plan.costs import Roofline
from beamwright.plan.times import BATCH_TOKENS
from beamwright.plan.workload import Workload, round_up_to_blocks


@dataclass(frozen=True)
class Generation:
    """Prediction for one later generation; all its prompts are answered at once.

    prompt_tokens: tokens of one prompt.
    prefill_tokens: tokens to compute for all prompts. unshared_tokens: without shared beginnings.
    kv_bytes: peak KV. population_kv_bytes: KV of the answers before, if it were kept.
    fits: True if `kv_bytes` fits the KV budget. If not, KV moves or fewer paths run at a time.
    """

    prompt_tokens: int
    prefill_tokens: int
    unshared_tokens: int
    kv_bytes: int
    population_kv_bytes: int
    fits: bool
    prefill_s: float
    decode_s: float


def predict_generation(
    workload: Workload, size: int, num_read: float, roofline: Roofline, kv_budget_bytes: int
) -> Generation:
    """Predict a later generation.

    workload: the first generation; every answer has `generate_tokens` tokens.
    size: answers in a prompt. num_read: answers to prefill in all prompts, shared ones once.
    """
    n, answer = workload.num_beams, workload.generate_tokens
    kv_bytes = roofline.model.kv_bytes_per_token
    each = workload.prompt_tokens + size * answer
    shared = workload.prompt_tokens + round(num_read * answer)
    held = round_up_to_blocks(shared) + n * round_up_to_blocks(answer)
    passes = -(-shared // BATCH_TOKENS)
    prefill = roofline.decode_step_s(shared // passes, shared / 2, shared / passes * each / 2)
    token = roofline.decode_step_s(n, shared + n * answer / 2, n * (each + answer / 2))
    return Generation(
        each,
        shared,
        n * each,
        held * kv_bytes,
        n * round_up_to_blocks(answer) * kv_bytes,
        held * kv_bytes <= kv_budget_bytes,
        passes * prefill,
        answer * token,
    )
