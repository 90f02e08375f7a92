"""Train the language model: one run gives the weak generator and the strong backbone.

A curriculum over the number of equations, and drills from the first step on: rows of independent
equations with the loss on the result digits only. Checkpoints are kept every `--every` steps; the
weak generator is one of them, chosen on dev with `choose_generator.py`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from make_tokenizer import CONTEXT, prompt_text
from model import Decoder, Shape, load, sample, save
from optim import Optimisers
from problems import (
    Problem,
    drill,
    extract_answer,
    final_answer,
    make_problem,
    problem_set,
    question_text,
    reworded,
    write_solution,
)
from words import TRAINED

Example = tuple[list[int], list[bool]]
WORDED = 0.6


def draw_problem(rng: random.Random, highest: int = 8, most_holders: int = 1) -> Problem:
    """A problem for training: every eighth is an easy one, most are in words of their own."""
    level = rng.choice((0, 1, 1)) if rng.random() < 0.125 else rng.randint(2, highest)
    problem = make_problem(rng, level, "train", most_holders)
    return reworded(rng, problem, TRAINED) if rng.random() < WORDED else problem


def solution_examples(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    num: int,
    highest: int,
    most_holders: int,
) -> list[Example]:
    """Problems with a right solution each; the loss is on the solution and its end."""
    problems = [draw_problem(rng, highest, most_holders) for _ in range(num)]
    prompts = tokenizer([prompt_text(question_text(p)) for p in problems])["input_ids"]
    solutions = tokenizer([write_solution(rng, p) for p in problems])["input_ids"]
    examples = []
    for prompt, solution in zip(prompts, solutions, strict=True):
        learn = [False] * len(prompt) + [True] * (len(solution) + 1)
        examples.append(([*prompt, *solution, tokenizer.eos_token_id], learn))
    return [example for example in examples if len(example[0]) <= CONTEXT]


def drill_examples(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, num: int
) -> list[Example]:
    """Rows of independent equations; the loss is on the results and the full stop after them."""
    examples: list[Example] = []
    stop = tokenizer.encode(".\n\n")
    for _ in range(num):
        pairs = drill(rng, rng.randint(6, 20))
        flat = tokenizer([text for pair in pairs for text in pair])["input_ids"]
        ids, learn = [tokenizer.bos_token_id], [False]
        for question, result in zip(flat[::2], flat[1::2], strict=True):
            ids += question + result + stop
            learn += [False] * len(question) + [True] * (len(result) + 1)
        examples.append((ids, learn))
    return examples


def batches(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    tokens: int,
    drills: float,
    highest: int,
    most_holders: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """A pool of examples, sorted by length and cut into batches of about `tokens` tokens."""
    pool = solution_examples(tokenizer, rng, round(500 * (1 - drills)), highest, most_holders)
    pool += drill_examples(tokenizer, rng, round(500 * drills))
    yield from cut(pool, tokenizer, rng, tokens)


def cut(
    pool: list[Example], tokenizer: PreTrainedTokenizerFast, rng: random.Random, tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """A pool, sorted by length and cut into batches of about `tokens` tokens, in any order."""
    pool.sort(key=lambda example: len(example[0]))
    groups: list[list[Example]] = [[]]
    for example in pool:
        if groups[-1] and (len(groups[-1]) + 1) * len(example[0]) > tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        width = max(len(ids) for ids, _ in group)
        ids = torch.full((len(group), width), tokenizer.pad_token_id)
        learn = torch.zeros(len(group), width, dtype=torch.bool)
        for row, (tokens_, learn_) in enumerate(group):
            ids[row, : len(tokens_)] = torch.tensor(tokens_)
            learn[row, : len(tokens_)] = torch.tensor(learn_)
        yield ids, learn


def loss_of(model: Decoder, ids: Tensor, learn: Tensor) -> Tensor:
    """Mean cross-entropy over the learnt tokens."""
    hidden = model(ids[:, :-1])[learn[:, 1:]]
    return F.cross_entropy(model.logits(hidden), ids[:, 1:][learn[:, 1:]])


def accuracy(
    model: Decoder,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    temperature: float = 0.8,
    seed: int = 0,
) -> float:
    """Share of problems that one sample answers right."""
    prompts = tokenizer([prompt_text(question_text(p)) for p in problems])["input_ids"]
    outputs = sample(
        model,
        prompts,
        stops=frozenset({tokenizer.eos_token_id}),
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
        pad=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    right = [extract_answer(t) == final_answer(p) for t, p in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


def drill_accuracy(model: Decoder, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> float:
    """Share of drilled result tokens predicted right."""
    right = total = 0
    for ids, learn in (
        (torch.tensor([i]), torch.tensor([m])) for i, m in drill_examples(tokenizer, rng, 20)
    ):
        with torch.no_grad():
            guess = model.logits(model(ids[:, :-1])).argmax(-1)
        hit = (guess == ids[:, 1:])[learn[:, 1:]]
        right, total = right + int(hit.sum()), total + hit.numel()
    return right / total


def rate(step: int, start: int, steps: int, cooldown: int) -> float:
    """Warm-up, constant, linear cool-down over the last `cooldown` steps."""
    return min(1.0, (step - start + 1) / 50, max(0.02, (steps - step) / max(1, cooldown)))


def main() -> None:
    """Run the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--start-step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--stop", type=int, help="end here, on the way to --steps")
    parser.add_argument("--cooldown", type=int, default=2500)
    parser.add_argument("--curriculum", type=int, default=2500, help="steps until all levels")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per batch")
    parser.add_argument("--drills", type=float, default=0.3)
    parser.add_argument("--most-holders", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(f"lm-{args.seed}-{args.start_step}")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = load(args.start).train() if args.start else Decoder(Shape(len(tokenizer)))
    optimisers = Optimisers(model, args.muon_lr, args.adam_lr)
    dev = problem_set("dev", 100, args.seed)
    step, begin, mean = args.start_step, time.monotonic(), 0.0
    stop = args.stop or args.steps
    while step < stop:
        highest = min(8, 2 + 7 * step // max(1, args.curriculum))
        for ids, learn in batches(
            tokenizer, rng, args.tokens, args.drills, highest, args.most_holders
        ):
            loss = loss_of(model, ids, learn)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimisers.step(rate(step, args.start_step, args.steps, args.cooldown))
            step += 1
            mean += (loss.item() - mean) / min(50, step - args.start_step)
            if step % args.every == 0 or step == stop:
                save(model, args.out / f"step-{step:05d}", special)
                print(
                    f"step {step} level<={highest} loss {mean:.4f} "
                    f"drills {drill_accuracy(model, tokenizer, random.Random(1)):.3f} "
                    f"dev {accuracy(model, tokenizer, dev):.2f} "
                    f"{time.monotonic() - begin:.0f}s",
                    flush=True,
                )
            if step >= stop:
                break


if __name__ == "__main__":
    main()
