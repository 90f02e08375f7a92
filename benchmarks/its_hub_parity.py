"""its_hub's beam search beside ours: the same selections where rules coincide, accuracy, seconds.

    pip install its_hub==1.2.0
    python benchmarks/its_hub_parity.py --problems 100 --n 16

Selections: scripted steps and scores; its_hub begins with n / beam_width paths, so ours is given
as many; from there on, until a path ends, both must keep the same paths (n / width at most width;
above that its_hub needs several levels to reach n paths, and they differ). Accuracy and seconds:
the bundled models on the first problems of bundled:test, both sides in turn on every problem.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import time
from typing import Any

from its_hub.api import AbstractLanguageModel, AbstractProcessRewardModel

from beamwright import Solver
from beamwright.config import SearchSettings
from beamwright.evaluate import AnswerChecker, load_problems
from beamwright.models.load import resolve_folder
from beamwright.protocols import Extend
from beamwright.search import make_strategy
from beamwright.search.answers import extract_answer
from beamwright.tree import SearchTree, StopReason
from common import finish, say
from peer_its_hub import END, StepModel, StepScorer, make_search
from peer_prm import ReencodingPrm
from peer_transformers import TransformersStepper


def scripted_score(text: str) -> float:
    """A score that depends on the whole text and on nothing else."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


class ScriptedModel(AbstractLanguageModel):
    """The i-th copy of a path goes on with step i; every path ends at its last level."""

    def __init__(self, levels: int) -> None:
        self._levels = levels

    async def agenerate(self, messages: Any, stop: str | None = None, **kwargs: Any) -> Any:
        seen: dict[str, int] = {}
        replies = []
        for chat in messages:
            text = "".join(message.content for message in chat[1:])
            ordinal = seen.get(text, 0)
            seen[text] = ordinal + 1
            last = text.count("\n\n") == self._levels - 1
            replies.append(
                {"role": "assistant", "content": f"{ordinal}" + (END if last else "\n\n")}
            )
        return replies


class ScriptedScorer(AbstractProcessRewardModel):
    """Scores by hash; remembers the texts of every level."""

    def __init__(self) -> None:
        self.levels: list[list[str]] = []

    def score(self, prompt_or_messages: Any, steps: list[str]) -> list[float]:
        self.levels.append(list(steps))
        return [scripted_score(text) for text in steps]

    async def ascore(self, prompt_or_messages: Any, steps: list[str]) -> list[float]:
        return self.score(prompt_or_messages, steps)


def their_levels(n: int, width: int, levels: int, problem: str) -> list[set[str]]:
    """Texts of the candidates of each level under its_hub."""
    scorer = ScriptedScorer()
    search = make_search(scorer, n // width, levels)
    asyncio.run(search.ainfer(ScriptedModel(levels), problem, n, return_response_only=False))
    return [set(texts) for texts in scorer.levels]


def our_levels(n: int, width: int, levels: int, salt: str) -> list[set[str]]:
    """The same under our strategy, begun with `width` paths."""
    strategy = make_strategy(SearchSettings(search="beam", n=n, width=width))
    tree = SearchTree(0, (1,), salt)
    tree.expand(tree.root, width)
    found = []
    for _ in range(levels):
        for node in tree.open_nodes():
            step = f"{node.lineage[-1]}\n\n"
            tree.commit(node, (1,), (0.0,), StopReason.DELIMITER, node.text + step)
            node.score = scripted_score(node.text)
        tree.rounds += 1
        found.append({node.text for node in tree.candidates()})
        for action in strategy.select(tree):
            if isinstance(action, Extend):
                tree.keep(action.node)
                tree.expand(action.node, action.children)
            else:
                tree.prune(action.node)
    return found


def compare_selections() -> dict[str, Any]:
    """Levels at which both sides wrote candidates of the same paths."""
    same = total = 0
    levels = 7
    for n, width in ((4, 2), (9, 3), (8, 4), (16, 4), (24, 8), (64, 8)):
        theirs = their_levels(n, width, levels, "p")
        ours = our_levels(n, width, levels, "p")
        for level in range(levels - 1):  # the last one is marked as ended, and reads differently
            total += 1
            same += theirs[level] == ours[level]
    return {"levels_equal": same, "levels": total}


def compare_runs(args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy and seconds on real problems, both sides in turn."""
    prm = ReencodingPrm(resolve_folder("bundled", "verifier"))
    stepper = TransformersStepper(resolve_folder("bundled", "generator"), 0.8, "\n\n", 256)
    model = StepModel(stepper)
    search = make_search(StepScorer(prm), args.n // args.width, 40)
    solver = Solver(search="beam", n=args.n, width=args.width)
    seconds: dict[str, list[float]] = {"beamwright": [], "its_hub": []}
    right = {"beamwright": 0, "its_hub": 0}
    generated = 0
    problems = load_problems("bundled:test", args.problems).problems
    with AnswerChecker() as checker:
        for number, problem in enumerate(problems, start=1):
            start = time.perf_counter()
            solution = solver.solve(problem.problem, problem_id=problem.unique_id)
            seconds["beamwright"].append(time.perf_counter() - start)
            generated += solution.tokens.generated
            start = time.perf_counter()
            reply = asyncio.run(search.ainfer(model, problem.problem, args.n))
            seconds["its_hub"].append(time.perf_counter() - start)
            answers = {"beamwright": solution.answer, "its_hub": extract_answer(reply["content"])}
            for side, answer in answers.items():
                right[side] += bool(checker.is_correct(problem.answer, answer))
            if number % 10 == 0:
                say(f"  {number}/{len(problems)}: right {right}")
    return {
        side: {
            "accuracy": right[side] / len(problems),
            "median_s": round(statistics.median(seconds[side]), 3),
            "total_s": round(sum(seconds[side]), 1),
            "generated_tokens": generated if side == "beamwright" else model.num_tokens,
        }
        for side in seconds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    args = parser.parse_args()
    selections = compare_selections()
    say(f"selections: {selections}")
    runs = compare_runs(args) if args.problems else None
    finish("its_hub_parity", {"settings": vars(args), "selections": selections, "runs": runs})


if __name__ == "__main__":
    main()
