"""Train the thinking model: a bundled checkpoint goes on with thoughts (`thoughts.py`).

Two tokens and their embedding rows are added, and the context grows. Stages follow one another
as in `train_lm.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from make_tokenizer import CHAT_TEMPLATE, prompt_text
from model import Decoder, load, sample, save
from optim import Optimisers
from problems import (
    Problem,
    extract_answer,
    final_answer,
    make_problem,
    problem_set,
    question_text,
    reworded,
)
from thoughts import EMPTY, END, START, reply
from train_lm import Example, cut, drill_examples, loss_of, rate
from words import TRAINED

CONTEXT = 2048
WORDED = 0.25
# As Qwen3's: thoughts of earlier turns go, and an empty thought stands where none is wanted.
TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}{{ eos_token }}",
    f"{{{{ message['content'].split('{END}')[-1].lstrip('\\n') }}}}{{{{ eos_token }}}}",
) + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    + EMPTY.replace("\n", "\\n").join(("{{ '", "' }}"))
    + "{% endif %}"
)


def thinking_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The bundled tokenizer with a start and an end of a thought, and the template for them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = [AddedToken(text, normalized=False, special=False) for text in (START, END)]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write it as `make_tokenizer.py` does."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    config = folder / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release reads
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def grown(model: Decoder, vocab_size: int, context: int) -> Decoder:
    """The same model with more embedding rows (the mean of the others) and a longer context."""
    shape = replace(model.shape, vocab_size=vocab_size, max_position_embeddings=context)
    larger = Decoder(shape)
    weights = model.state_dict()
    old = weights["model.embed_tokens.weight"]
    new = old.mean(0) + 0.02 * torch.randn(vocab_size - len(old), old.shape[1])
    larger.load_state_dict(weights | {"model.embed_tokens.weight": torch.cat([old, new])})
    return larger


def draw_problem(rng: random.Random) -> Problem:
    """A problem for training: one person, every eighth an easy one."""
    level = rng.choice((0, 1, 1)) if rng.random() < 0.125 else rng.randint(2, 8)
    problem = make_problem(rng, level, "train")
    return reworded(rng, problem, TRAINED) if rng.random() < WORDED else problem


def thought_examples(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, num: int
) -> list[Example]:
    """Problems with a reply each."""
    examples = []
    for _ in range(num):
        problem = draw_problem(rng)
        prompt = tokenizer.encode(prompt_text(question_text(problem)))
        ids, learn = reply(tokenizer, rng, problem)
        examples.append((prompt + ids, [False] * len(prompt) + learn))
    return [example for example in examples if len(example[0]) <= CONTEXT]


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, tokens: int, drills: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """A pool of examples, sorted by length and cut into batches of about `tokens` tokens."""
    pool = thought_examples(tokenizer, rng, round(400 * (1 - drills)))
    pool += drill_examples(tokenizer, rng, round(400 * drills))
    yield from cut(pool, tokenizer, rng, tokens)


def accuracy(
    model: Decoder, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> tuple[float, float]:
    """Share of problems that one sample answers right, and tokens of a reply."""
    outputs = sample(
        model,
        [tokenizer.encode(prompt_text(question_text(p))) for p in problems],
        stops=frozenset({tokenizer.eos_token_id}),
        temperature=0.8,
        generator=torch.Generator().manual_seed(0),
        pad=tokenizer.pad_token_id,
        max_new=1200,
    )
    texts = [text.split(END)[-1] for text in tokenizer.batch_decode(outputs)]
    right = [extract_answer(t) == final_answer(p) for t, p in zip(texts, problems, strict=True)]
    return sum(right) / len(right), sum(map(len, outputs)) / len(outputs)


def join() -> int:
    """The rank of this process, the others joined where there are any: RANK, WORLD_SIZE, ..."""
    if "RANK" not in os.environ:
        return 0
    dist.init_process_group("gloo")
    return dist.get_rank()


def average_gradients(model: Decoder) -> None:
    """Those of all processes: two with a thread each get on faster than one with two threads."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat)
    sizes = [each.numel() for each in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient) / dist.get_world_size())


def main() -> None:
    """Run a stage of the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="checkpoint to go on from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--cooldown", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per batch")
    parser.add_argument("--drills", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1.5e-3)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products so")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rank = join()
    torch.manual_seed(args.seed)
    rng = random.Random(f"thinker-{args.seed}-{args.start_step}-{rank}")
    tokenizer = thinking_tokenizer(args.start)
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = grown(load(args.start), len(tokenizer), CONTEXT).train()
    optimisers = Optimisers(model, args.muon_lr, args.adam_lr)
    dev = problem_set("dev", 50, 0)
    step, begin, mean = args.start_step, time.monotonic(), 0.0
    while step < args.steps:
        for ids, learn in batches(tokenizer, rng, args.tokens, args.drills):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
                loss = loss_of(model, ids, learn)
            torch.autograd.backward(loss)
            average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimisers.step(rate(step, args.start_step, args.steps, args.cooldown))
            step += 1
            mean += (loss.item() - mean) / min(50, step - args.start_step)
            if step % 20 == 0 and rank == 0:
                print(f"step {step} loss {mean:.4f} {time.monotonic() - begin:.0f}s", flush=True)
            if rank == 0 and (step % args.every == 0 or step == args.steps):
                folder = args.out / f"step-{step:05d}"
                save(model, folder, special)
                save_tokenizer(tokenizer, folder)
                right, length = accuracy(model, tokenizer, dev)
                print(f"step {step} dev {right:.2f} tokens {length:.0f}", flush=True)
            if step >= args.steps:
                break


if __name__ == "__main__":
    main()
