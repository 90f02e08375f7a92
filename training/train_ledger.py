"""Train the ledger's model: look-ups are learned on short problems whose positions are spread out.

Between statements positions jump by random amounts, within one they never do, so that a problem of
256 tokens shows distances of thousands. The loss is on the solution, every token of which has one
right value. Problems become longer from stage to stage; every batch is of one length and variant.

    python train_ledger.py --out ../build/ledger --stages 256:2000 512:500
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ledger import (
    BOS,
    EOS,
    PAD,
    Ledger,
    ledgers,
    make_ledger,
    make_tokenizer,
    prompt_pieces,
    sizes,
    solution_pieces,
    vocabulary,
)
from model import Decoder, Shape, load, save
from optim import Optimisers

CONTEXT = 16384
SPAN = 9000
"""Positions of a problem reach up to here."""
Batch = tuple[Tensor, Tensor, list[list[str]]]


def jumps_of(rng: random.Random, roles: Sequence[str], announced: bool) -> list[float]:
    """Relative sizes of the jumps before the tokens.

    The prompt's lines stay together: the key before a line leads to it. So does, nearly always, a
    solution that announces its operands, where the statement before holds the next operand.
    """
    found = []
    for role in roles:
        begins, name = role.startswith("|"), role.removeprefix("|")
        chance = 0.0 if not begins or name == "line" else 0.1 if announced and name else 0.4
        found.append(rng.expovariate(1.0) if rng.random() < chance else 0.0)
    return found


def example(
    rng: random.Random, ids: dict[str, int], ledger: Ledger, spread: bool
) -> tuple[list[int], list[int], list[str]]:
    """Token ids, their positions, and the roles of those that are learned ("" for the others)."""
    prompt, solution = prompt_pieces(ledger), solution_pieces(ledger)
    pieces = [*prompt, *solution]
    jumps = jumps_of(rng, [role for _, role in pieces], ledger.announced)
    # Spans are even on a logarithmic scale, from no jumps at all.
    span = len(pieces) * max(1.0, SPAN / len(pieces)) ** rng.random() if spread else len(pieces)
    unit = (span - len(pieces)) / (sum(jumps) or 1.0)
    positions, at = [], -1
    for jump in jumps:
        at += 1 + int(unit * jump)
        positions.append(at)
    roles = [""] * len(prompt) + [role.removeprefix("|") for _, role in solution]
    return [ids[text] for text, _ in pieces], positions, roles


def problems_of(
    rng: random.Random, length: int, num: int, announced: bool, easy: bool
) -> list[Ledger]:
    """Problems of one size; an easy one has few live keys, few different digits, small numbers.

    Where all ten digits stand in sight, seeing digits is worth nothing before the right one is
    found; where only some do, it is, and zeros leave a digit as it was.
    """
    size, given = sizes(length, announced)
    if not easy:
        return [make_ledger(rng, size, given, announced) for _ in range(num)]
    given = min(given, 1 + int(rng.expovariate(0.3)))
    found = []
    for _ in range(num):
        digits = rng.sample(range(10), min(10, 1 + int(rng.expovariate(0.4))))
        adds = rng.choice([[0], [0, 0, 0, 1], [0, 0, 1, 1, 2, 3], range(10)])
        found.append(make_ledger(rng, size, given, announced, digits, adds))
    return found


def batch_of(
    rng: random.Random, found: Sequence[Ledger], ids: dict[str, int], spread: bool
) -> Batch:
    """Ids and positions [problems, tokens] of problems of one size, and the roles of the tokens."""
    examples = [example(rng, ids, each, spread) for each in found]
    return (
        torch.tensor([e[0] for e in examples]),
        torch.tensor([e[1] for e in examples]),
        [e[2] for e in examples],
    )


def predict(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor, list[str]]:
    """Logits [learned tokens, vocabulary] in float32, the right ids, their roles."""
    ids, positions, roles = batch
    learn = torch.tensor([[role != "" for role in row] for row in roles])[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(ids[:, :-1], positions[:, :-1])
        logits = model.logits(hidden[learn])
    return logits.float(), ids[:, 1:][learn], [r for row in roles for r in row[1:] if r]


@torch.no_grad()
def shares_right(model: Decoder, batch: Batch) -> dict[str, float]:
    """Teacher-forced: the share of the tokens of each role that the model would choose."""
    logits, right, roles = predict(model, batch)
    hits = defaultdict(list)
    for hit, role in zip((logits.argmax(-1) == right).tolist(), roles, strict=True):
        hits[role].append(hit)
    return {role: sum(each) / len(each) for role, each in hits.items()}


def fresh(shape: Shape) -> Decoder:
    """A model to begin with, whose keys are far apart: look-ups tell them by their embeddings."""
    model = Decoder(shape)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.1)
    return model


def rate(step: int, steps: int, cooldown: int) -> float:
    """Warm-up, constant, linear cool-down over the last `cooldown` steps."""
    return min(1.0, (step + 1) / 100, max(0.02, (steps - step) / max(1, cooldown)))


def write(model: Decoder, folder: Path) -> None:
    """Weights, tokenizer and configs, as `transformers` and Beamwright read them."""
    special = [vocabulary().index(token) for token in (BOS, EOS, PAD)]
    save(model, folder, (special[0], special[1], special[2]))
    make_tokenizer(CONTEXT).save_pretrained(folder, save_jinja_files=False)
    for name, changes in (
        ("generation_config.json", {"do_sample": False, "temperature": 1.0, "top_k": 50}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        content = json.loads((folder / name).read_text(encoding="utf-8")) | changes
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--stages", nargs="+", default=["256:2000"], help="TOKENS:STEPS")
    parser.add_argument("--cooldown", type=int, default=600)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument("--theta", type=float, default=1e8)
    parser.add_argument("--easy", type=float, default=0.0, help="share of easy batches")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(f"ledger-train-{args.seed}-{args.start}")
    ids = {token: index for index, token in enumerate(vocabulary())}
    shape = Shape(
        len(ids), intermediate_size=256, max_position_embeddings=CONTEXT, rope_theta=args.theta
    )
    model = load(args.start).train() if args.start else fresh(shape)
    optimisers = Optimisers(model, args.muon_lr, args.adam_lr)
    stages = [tuple(map(int, each.split(":"))) for each in args.stages]
    plan = [length for length, count in stages for _ in range(count)]
    begin, mean = time.monotonic(), 0.0
    for step, length in enumerate(plan, 1):
        announced = rng.random() < 0.5
        num = max(1, args.batch_tokens // length)
        found = problems_of(rng, length, num, announced, easy=rng.random() < args.easy)
        logits, right, _ = predict(model, batch_of(rng, found, ids, rng.random() < 0.9))
        loss = F.cross_entropy(logits, right)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step(rate(step - 1, len(plan), args.cooldown))
        mean += (loss.item() - mean) / min(50, step)
        if step % args.every and step != len(plan):
            continue
        print(f"step {step} tokens {length} loss {mean:.4f} {time.monotonic() - begin:.0f}s")
        if args.easy:
            easy = problems_of(random.Random(0), length, 8192 // length, announced, easy=True)
            shares = shares_right(model, batch_of(random.Random(0), easy, ids, spread=True))
            print("  easy", *(f"{role} {share:.3f}" for role, share in shares.items()))
        for announced in (False, True):
            dev = ledgers(length, max(2, 8192 // length), announced, -1)
            shares = shares_right(model, batch_of(random.Random(0), dev, ids, spread=True))
            print("   ", *(f"{role} {share:.3f}" for role, share in shares.items()), flush=True)
        write(model, args.out / f"step-{step:05d}")


if __name__ == "__main__":
    main()
