"""Pick the weak generator: the checkpoint with single-sample accuracy on dev nearest a target."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from model import load
from problems import problem_set
from train_lm import accuracy


def main() -> None:
    """Print the accuracy of every checkpoint, then the chosen one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True, nargs="+")
    parser.add_argument("--target", type=float, default=0.4)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    problems = problem_set("dev", args.problems, args.seed)
    found: dict[Path, float] = {}
    for folder in args.checkpoints:
        found[folder] = accuracy(load(folder), tokenizer, problems)
        print(f"{folder} {found[folder]:.3f}", flush=True)
    print(min(found, key=lambda folder: abs(found[folder] - args.target)))


if __name__ == "__main__":
    main()
