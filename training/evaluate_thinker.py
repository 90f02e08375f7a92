"""Measure the thinking model: samples, votes, passes, direct answers and thoughts closed early.

It prints Markdown and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from make_tokenizer import prompt_text
from model import Decoder, load, sample
from problems import Problem, extract_answer, final_answer, problem_set, question_text
from thoughts import CHECKS, EMPTY, END, START

PLACES = (0.0, 0.25, 0.5, 0.75)  # of a thought, where it is closed
FOUND = re.compile(r"^(?:So .* has|That is|Again it is|This time it is) (\d+)\b", re.MULTILINE)
PROBE = "The final answer is \\boxed{"


@dataclass(frozen=True)
class Reply:
    """A sampled reply of problem number `owner`."""

    owner: int
    ids: list[int]
    text: str

    @property
    def thought(self) -> str:
        """What it holds before the end of its thought."""
        return self.text.partition(END)[0]

    @property
    def passes(self) -> int:
        """How often it works the problem out."""
        return 1 + sum(self.thought.count(words.strip()) for words in CHECKS)

    @property
    def found(self) -> list[str]:
        """What each of its passes comes to."""
        return FOUND.findall(self.thought)

    @property
    def answer(self) -> str | None:
        """What its answer part states."""
        return extract_answer(self.text.partition(END)[2])

    @property
    def well_formed(self) -> bool:
        """One thought, then one box and the end."""
        said = self.text.partition(END)[2]
        counts = self.text.count(START), self.text.count(END), said.count("\\boxed{")
        return counts == (1, 1, 1) and self.text.startswith(START) and said.endswith("<|eos|>")


class Bench:
    """A model, the problems and how it is sampled."""

    def __init__(self, folder: Path, problems: list[Problem], temperature: float) -> None:
        self.model: Decoder = load(folder)
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.prompts = [self.tokenizer.encode(prompt_text(question_text(p))) for p in problems]
        self.answers = [final_answer(p) for p in problems]
        self.temperature = temperature
        self.rng = torch.Generator().manual_seed(0)

    def draw(self, starts: list[tuple[int, list[int]]], temperature: float) -> list[Reply]:
        """Replies from where each start (a problem's number and tokens after its prompt) ends."""
        outputs = sample(
            self.model,
            [self.prompts[owner] + begun for owner, begun in starts],
            stops=frozenset({self.tokenizer.eos_token_id}),
            temperature=temperature,
            generator=self.rng,
            pad=self.tokenizer.pad_token_id,
            max_new=1600,
        )
        whole = [begun + new for (_, begun), new in zip(starts, outputs, strict=True)]
        texts = self.tokenizer.batch_decode(whole)
        return [
            Reply(owner, ids, text)
            for (owner, _), ids, text in zip(starts, whole, texts, strict=True)
        ]

    def right(self, replies: list[Reply]) -> float:
        """Share of right answers."""
        hits = [each.answer == self.answers[each.owner] for each in replies]
        return sum(hits) / max(1, len(hits))

    def majority(self, replies: list[Reply]) -> float:
        """Share of problems whose most frequent answer is right."""
        votes = [Counter[str | None]() for _ in self.answers]
        for each in replies:
            votes[each.owner][each.answer] += 1
        found = [vote.most_common(1)[0][0] for vote in votes]
        return sum(a == b for a, b in zip(found, self.answers, strict=True)) / len(found)

    def closed(self, replies: list[Reply], place: float, probe: str) -> float:
        """Accuracy where thoughts are closed there (at a token) and answered greedily."""
        end = self.tokenizer.convert_tokens_to_ids(END)
        close = self.tokenizer.encode(f"\n{END}\n\n{probe}")
        starts = [
            (each.owner, each.ids[: max(2, int(place * each.ids.index(end)))] + close)
            for each in replies
            if end in each.ids
        ]
        return self.right(self.draw(starts, 0.0))


def checks_after(bench: Bench, replies: list[Reply], first_is_right: bool) -> dict[str, float]:
    """Of replies with a check whose first pass is right, or wrong: how it and the answer fare."""
    group = [
        each
        for each in replies
        if len(each.found) > 1 and (each.found[0] == bench.answers[each.owner]) == first_is_right
    ]
    second = [each.found[1] == bench.answers[each.owner] for each in group]
    same = [each.found[1] == each.found[0] for each in group]
    return {
        "replies": len(group),
        "second_right": sum(second) / max(1, len(group)),
        "second_same": sum(same) / max(1, len(group)),
        "answer_right": bench.right(group),
    }


def measured(bench: Bench, num: int) -> dict[str, object]:
    """Everything that is measured; `num` samples of each problem, one of them closed early."""
    owners = range(len(bench.prompts))
    replies = bench.draw([(i, []) for i in owners for _ in range(num)], bench.temperature)
    first = replies[::num]
    groups = {k: [r for r in replies if r.passes == k] for k in range(1, 5)}
    direct = bench.tokenizer.encode(EMPTY)
    greedy = bench.draw([(i, []) for i in owners], 0.0)
    lengths = sorted(len(each.ids) for each in replies)
    passes = [each.passes for each in replies]
    return {
        "one_sample": bench.right(replies),
        "greedy": bench.right(greedy),
        f"majority_of_{num}": bench.majority(replies),
        "well_formed": sum(each.well_formed for each in replies) / len(replies),
        "mean_tokens": sum(lengths) / len(lengths),
        "longest": lengths[-1],
        "mean_passes": sum(passes) / len(passes),
        "by_passes": {
            k: {"share": len(g) / len(replies), "right": bench.right(g)} for k, g in groups.items()
        },
        "first_pass": sum(r.found[:1] == [bench.answers[r.owner]] for r in replies) / len(replies),
        "after_right_first": checks_after(bench, replies, True),
        "after_wrong_first": checks_after(bench, replies, False),
        "direct": bench.right(bench.draw([(i, direct) for i in owners], 0.0)),
        "closed_at": {place: bench.closed(first, place, "") for place in PLACES},
        "probed_at": {place: bench.closed(first, place, PROBE) for place in PLACES},
    }


def main() -> None:
    """Measure a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--split", choices=("test", "dev"), default="test")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    problems = problem_set(args.split, 500 if args.split == "test" else 100, 0)[: args.limit]
    found = measured(Bench(args.model, problems, args.temperature), args.n)
    for name, value in found.items():
        print(f"- {name}: {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
