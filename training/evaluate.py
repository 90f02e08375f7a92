"""Measure a generator and a verifier: samples, majority, best-of-n, beam, oracle, and ranking.

A plain offline search for choosing models, without any KV kept between rounds. It prints a
Markdown table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from make_tokenizer import prompt_text
from model import Decoder, load, sample
from problems import (
    Problem,
    extract_answer,
    final_answer,
    first_error,
    is_complete,
    problem_set,
    question_text,
)
from verifier import Verifier, encode_paths, load_verifier, score_tokens


@dataclass
class Path_:
    """A path of a search: its text, whether it has ended, and its two scores."""

    ids: list[int]
    text: str = ""
    done: bool = False
    right: float = 0.0
    likelihood: float = 0.0
    tokens: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Bench:
    """The models and problems of one evaluation."""

    def __init__(
        self,
        generator: Decoder,
        verifier: Verifier,
        tokenizer: PreTrainedTokenizerFast,
        problems: list[Problem],
        temperature: float,
        seed: int,
    ) -> None:
        self.generator, self.verifier, self.tokenizer = generator, verifier, tokenizer
        self.problems = problems
        self.questions = [question_text(p) for p in problems]
        self.answers = [final_answer(p) for p in problems]
        self.temperature = temperature
        self.rng = torch.Generator().manual_seed(seed)
        eos = tokenizer.eos_token_id
        self.ends = frozenset({eos})
        self.step_ends = self.ends | {
            i for i in range(len(tokenizer)) if "\n\n" in tokenizer.decode([i])
        }

    def prompts(self) -> list[list[int]]:
        """The encoded prompts."""
        return [self.tokenizer.encode(prompt_text(q)) for q in self.questions]

    def extend(self, model: Decoder, paths: list[Path_], stops: frozenset[int]) -> list[Path_]:
        """Each path continued to a stop; one that did not end in a step end is done."""
        outputs = sample(
            model,
            [p.ids for p in paths],
            stops=stops,
            temperature=self.temperature,
            generator=self.rng,
            pad=self.tokenizer.pad_token_id,
        )
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return [
            Path_(p.ids + new, p.text + text, new[-1] in self.ends or new[-1] not in stops)
            for p, new, text in zip(paths, outputs, texts, strict=True)
        ]

    def score(self, owners: list[int], paths: list[Path_]) -> None:
        """Fill in both scores: sum of log P(right), and the least token log-probability."""
        questions = [self.questions[i] for i in owners]
        coded = encode_paths(self.tokenizer, questions, [p.text for p in paths])
        scores = score_tokens(self.verifier, coded, self.tokenizer.pad_token_id)
        for path, code, (right, own) in zip(paths, coded, scores, strict=True):
            path.tokens, path.ends = right, code.ends
            path.right = sum(right)
            path.likelihood = min(own, default=-math.inf)

    def samples(self, model: Decoder, num: int) -> list[list[Path_]]:
        """`num` whole samples of each problem."""
        owners = [i for i in range(len(self.problems)) for _ in range(num)]
        prompts = self.prompts()
        flat = self.extend(model, [Path_(prompts[i]) for i in owners], self.ends)
        self.score(owners, flat)
        return [flat[i * num : (i + 1) * num] for i in range(len(self.problems))]

    def beam(self, n: int, width: int, by: str = "right", rounds: int = 20) -> list[list[Path_]]:
        """Step-wise beam search; finished candidates keep their place among the n."""
        prompts = self.prompts()
        active = [[Path_(prompt) for _ in range(n)] for prompt in prompts]
        finished: list[list[Path_]] = [[] for _ in prompts]
        for _ in range(rounds):
            owners = [i for i, paths in enumerate(active) for _ in paths]
            if not owners:
                break
            flat = [p for paths in active for p in paths]
            new = self.extend(self.generator, flat, self.step_ends)
            self.score(owners, new)
            grown: list[list[Path_]] = [[] for _ in prompts]
            for owner, path in zip(owners, new, strict=True):
                (finished if path.done else grown)[owner].append(path)
            for i, paths in enumerate(grown):
                paths.sort(key=lambda p: -getattr(p, by))
                keep, room = paths[: n // width], n - len(finished[i])
                active[i] = [keep[j % len(keep)] for j in range(room)] if keep else []
        return [f or a for f, a in zip(finished, active, strict=True)]

    def accuracy(self, chosen: list[str | None]) -> float:
        """Share of right answers."""
        return sum(c == a for c, a in zip(chosen, self.answers, strict=True)) / len(self.answers)

    def best(self, groups: list[list[Path_]], by: str = "right") -> float:
        """Accuracy of the best-scored candidate."""
        picked = [max(g, key=lambda p: getattr(p, by)) for g in groups]
        return self.accuracy([extract_answer(p.text) for p in picked])

    def majority(self, groups: list[list[Path_]]) -> float:
        """Accuracy of the most frequent answer."""
        votes = [Counter(extract_answer(p.text) for p in g).most_common(1)[0][0] for g in groups]
        return self.accuracy(votes)

    def oracle(self, groups: list[list[Path_]]) -> float:
        """Share of problems with a right answer among the candidates."""
        found = [
            any(extract_answer(p.text) == a for p in g)
            for g, a in zip(groups, self.answers, strict=True)
        ]
        return sum(found) / len(found)

    def one(self, groups: list[list[Path_]]) -> float:
        """Mean accuracy of a single sample."""
        hits = [
            extract_answer(p.text) == a
            for g, a in zip(groups, self.answers, strict=True)
            for p in g
        ]
        return sum(hits) / len(hits)


def auc(positive: list[float], negative: list[float]) -> float:
    """Probability that a positive outranks a negative (ties count half)."""
    if not positive or not negative:
        return math.nan
    values = torch.tensor(positive + negative, dtype=torch.float64)
    unique, inverse = torch.unique(values, return_inverse=True)
    counts = torch.bincount(inverse, minlength=len(unique)).double()
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
    num, other = len(positive), len(negative)
    return float((ranks[:num].sum() - num * (num + 1) / 2) / (num * other))


def ranking(bench: Bench, groups: list[list[Path_]]) -> dict[str, float]:
    """First-error AUC over steps, and how often a right path outranks a wrong one."""
    right_steps: list[float] = []
    wrong_steps: list[float] = []
    pairs: dict[str, list[float]] = {"right": [], "likelihood": []}
    process: list[float] = []
    process_only = total_right = 0
    for problem, answer, group in zip(bench.problems, bench.answers, groups, strict=True):
        labelled: list[tuple[Path_, bool]] = []
        for path in group:
            error = first_error(problem, path.text)
            hit = extract_answer(path.text) == answer
            labelled.append((path, hit))
            process_only += hit and error is not None
            total_right += hit
            begin = 0
            for piece in path.text.split("\n\n"):
                end = begin + len(piece) + 2
                score = sum(
                    s for s, e in zip(path.tokens, path.ends, strict=True) if begin < e <= end
                )
                wrong = error is not None and error < end
                (wrong_steps if wrong else right_steps).append(score)
                begin = end
                if wrong:
                    break
        whole = [p.right for p, _ in labelled if is_complete(problem, p.text)]
        flawed = [p.right for p, _ in labelled if not is_complete(problem, p.text)]
        process += [(a > b) + 0.5 * (a == b) for a in whole for b in flawed]
        for by, found in pairs.items():
            good = [getattr(p, by) for p, hit in labelled if hit]
            bad = [getattr(p, by) for p, hit in labelled if not hit]
            found += [(a > b) + 0.5 * (a == b) for a in good for b in bad]
    return {
        "first_error_auc": auc(right_steps, wrong_steps),
        "within_problem_ranking": sum(pairs["right"]) / max(1, len(pairs["right"])),
        "within_problem_ranking_process": sum(process) / max(1, len(process)),
        "within_problem_ranking_likelihood": sum(pairs["likelihood"])
        / max(1, len(pairs["likelihood"])),
        "right_answer_wrong_process": process_only / max(1, total_right),
    }


def measure(bench: Bench, sizes: list[int], width: int, beams: bool) -> dict[str, object]:
    """Every row of the table."""
    most = max(sizes)
    groups = bench.samples(bench.generator, most)
    backbone = bench.samples(bench.verifier.backbone, 4)
    rows: dict[str, dict[int, float]] = {
        "majority": {n: bench.majority([g[:n] for g in groups]) for n in sizes},
        "best-of-n, likelihood": {
            n: bench.best([g[:n] for g in groups], "likelihood") for n in sizes
        },
        "best-of-n": {n: bench.best([g[:n] for g in groups]) for n in sizes},
        "oracle": {n: bench.oracle([g[:n] for g in groups]) for n in sizes},
    }
    if beams:
        rows["beam"] = {n: bench.best(bench.beam(n, min(width, n))) for n in sizes}
    return {
        "one_sample": bench.one(groups),
        "backbone_alone": bench.one(backbone),
        "rows": rows,
        **ranking(bench, groups),
    }


def table(result: dict[str, object], sizes: list[int]) -> str:
    """The measurements as Markdown."""
    rows = result["rows"]
    assert isinstance(rows, dict)
    lines = ["| | " + " | ".join(f"n={n}" for n in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name, values in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{values[n]:.3f}" for n in sizes) + " |")
    others = (f"{k}: {v:.3f}" for k, v in result.items() if isinstance(v, float))
    return "\n".join([*lines, "", *others])


def main() -> None:
    """Run the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generator", type=Path, required=True)
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="default: the generator's folder")
    parser.add_argument("--split", choices=("test", "dev"), default="test")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--n", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--no-beam", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    problems = problem_set(args.split, {"test": 500, "dev": 100}[args.split], 0)
    bench = Bench(
        load(args.generator),
        load_verifier(args.verifier),
        AutoTokenizer.from_pretrained(args.tokenizer or args.generator),
        problems[: args.limit],
        args.temperature,
        args.seed,
    )
    result = measure(bench, args.n, args.width, not args.no_beam)
    print(table(result, args.n))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    seconds = round(time.monotonic() - begin)
    print(json.dumps({"problems": len(bench.problems), **result, "seconds": seconds, **settings}))


if __name__ == "__main__":
    main()
