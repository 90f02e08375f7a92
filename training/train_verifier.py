"""Train the process reward model on samples of the weak generator with dense, exact labels.

Every sample is written out as text and encoded again, as the engine's verifier will do; the exact
checker finds its first wrong token, and the head learns on the tokens up to that one. First with
the backbone frozen, then with both, where language modelling on right solutions goes on so that
the backbone stays a generator.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from make_tokenizer import prompt_text
from model import load, sample
from optim import Optimisers
from problems import first_error, question_text
from train_lm import batches, draw_problem, loss_of, rate
from verifier import Encoded, Verifier, encode_paths, new_verifier, pad_batch, save_verifier

Labelled = tuple[Encoded, int]


def cut_at_error(path: Encoded, error: int | None) -> Labelled:
    """The path up to its first wrong token, and how many of its tokens are right."""
    if error is None:
        return path, len(path.ends)
    right = sum(1 for end in path.ends if end <= error)
    length = path.num_prompt + right + 1
    return Encoded(path.ids[:length], path.num_prompt, path.ends[: right + 1]), right


def draw_samples(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    temperature: float,
    num: int,
    per_problem: int = 2,
) -> list[Labelled]:
    """Samples of one generator at one temperature on fresh training problems, labelled."""
    problems = [draw_problem(rng) for _ in range(num // per_problem)]
    problems = [p for p in problems for _ in range(per_problem)]
    questions = [question_text(p) for p in problems]
    outputs = sample(
        load(folder),
        tokenizer([prompt_text(q) for q in questions])["input_ids"],
        stops=frozenset({tokenizer.eos_token_id}),
        temperature=temperature,
        generator=torch.Generator().manual_seed(rng.randrange(2**31)),
        pad=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    paths = encode_paths(tokenizer, questions, texts)
    errors = [first_error(p, t) for p, t in zip(problems, texts, strict=True)]
    return [cut_at_error(*pair) for pair in zip(paths, errors, strict=True)]


def features_of(verifier: Verifier, group: list[Labelled], pad: int) -> tuple[Tensor, Tensor]:
    """Features and labels (1: right) of the tokens up to each path's first wrong one."""
    features, _ = verifier.features(*pad_batch([path for path, _ in group], pad))
    labels = [float(i < right) for path, right in group for i in range(len(path.ends))]
    return features, torch.tensor(labels)


def groups_of(data: list[Labelled], rng: random.Random, tokens: int) -> list[list[Labelled]]:
    """Batches of paths of about the same length, in random order."""
    mixed = sorted(data, key=lambda item: len(item[0].ids) + rng.random() * 8)
    groups: list[list[Labelled]] = [[]]
    for item in mixed:
        if groups[-1] and (len(groups[-1]) + 1) * len(item[0].ids) > tokens:
            groups.append([])
        groups[-1].append(item)
    rng.shuffle(groups)
    return groups


def train_head(
    verifier: Verifier, data: list[Labelled], pad: int, rng: random.Random, steps: int
) -> None:
    """Train the head alone, on features computed once."""
    with torch.no_grad():
        parts = [features_of(verifier, group, pad) for group in groups_of(data, rng, 8192)]
    features, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    optimisers = Optimisers(verifier.head, 0.0, 2e-3)
    picker, mean = torch.Generator().manual_seed(rng.randrange(2**31)), 0.0
    for step in range(steps):
        rows = torch.randint(len(labels), (2048,), generator=picker)
        logits = verifier.head(features[rows])
        loss = F.binary_cross_entropy_with_logits(logits, labels[rows])
        torch.autograd.backward(loss)
        optimisers.step(rate(step, 0, steps, steps))
        mean += (loss.item() - mean) / min(200, step + 1)
    print(f"head: {len(labels)} tokens, loss {mean:.5f}", flush=True)


def train_all(
    verifier: Verifier,
    data: list[Labelled],
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    steps: int,
    tokens: int,
) -> None:
    """Train head and backbone; language modelling goes on beside it."""
    both = nn.ModuleList([verifier.head, verifier.backbone])
    optimisers = Optimisers(both, 0.001, 3e-4)
    step, mean = 0, 0.0
    while step < steps:
        language = list(batches(tokenizer, rng, tokens, 0.1, 8))
        for group in groups_of(data, rng, tokens):
            features, labels = features_of(verifier, group, tokenizer.pad_token_id)
            loss = F.binary_cross_entropy_with_logits(verifier.head(features), labels)
            mean += (loss.item() - mean) / min(50, step + 1)
            if step % 2 == 0:
                loss = loss + 0.1 * loss_of(verifier.backbone, *language[step // 2 % len(language)])
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
            optimisers.step(rate(step, 0, steps, steps))
            step += 1
            if step >= steps:
                break
    print(f"both: loss {mean:.5f}", flush=True)


def main() -> None:
    """Draw the samples, train both phases and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--backbone", type=Path, required=True)
    parser.add_argument("--generator", type=Path, required=True, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=Path, required=True, help="samples: read or written")
    parser.add_argument("--more-draws", type=Path, nargs="*", default=(), help="of other seeds")
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--samples", type=int, default=2500, help="per generator and temperature")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--head-steps", type=int, default=3000)
    parser.add_argument("--full-steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(f"draws-{args.seed}")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    begin = time.monotonic()
    data: list[Labelled] = []
    if args.draws.exists():
        data = torch.load(args.draws, weights_only=False)
    else:
        for folder in args.generator:
            for temperature in args.temperatures:
                data += draw_samples(folder, tokenizer, rng, temperature, args.samples)
        torch.save(data, args.draws)
    for file in args.more_draws:
        data += torch.load(file, weights_only=False)
    if args.draw_only:
        return
    rng = random.Random(f"verifier-{args.seed}")
    wrong = sum(right < len(path.ends) for path, right in data)
    print(f"{len(data)} samples, {wrong} wrong, {time.monotonic() - begin:.0f}s", flush=True)
    verifier = new_verifier(args.backbone)
    train_head(verifier, data, tokenizer.pad_token_id, rng, args.head_steps)
    save_verifier(verifier, args.out, special)
    print(f"{time.monotonic() - begin:.0f}s", flush=True)
    if args.full_steps:
        train_all(verifier, data, tokenizer, rng, args.full_steps, args.tokens)
        save_verifier(verifier, args.out, special)
    print(f"{time.monotonic() - begin:.0f}s", flush=True)


if __name__ == "__main__":
    main()
