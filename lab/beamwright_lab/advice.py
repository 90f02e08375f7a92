"""Whether `eval --advise` is right: ten pairs of a generator and a verifier, sharp ones and blunt.

    python -m beamwright_lab.advice

Advice is taken on the first 50 problems of `bundled:dev`. What is best is seen on problems of
`bundled:test`, by the same two runs. Verifiers are the bundled one, the same with noise in its
head, one whose head says the opposite, and the generator's own probabilities. Advice is right where
no other way is measurably ahead of the one that it names (paired, 95 %) at equal tokens.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from beamwright import Settings
from beamwright.evaluate.advise import advice, trials
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.metrics import Record
from beamwright.evaluate.problems import ProblemSet, load_problems
from beamwright.models.config import BUNDLED
from beamwright_lab.common import finish, say, table
from beamwright_lab.evaluated import records_of

_HEAD = "verifier_head.safetensors"


class Pair(NamedTuple):
    """noise: of the head's weights, in their standard deviations; -1: it says the opposite."""

    model: str
    temperature: float
    verifier: str
    noise: float = 0.0

    @property
    def name(self) -> str:
        how = {0.0: "", -1.0: ", reversed"}.get(self.noise, f", noise {self.noise:g}")
        return f"{self.model}, {self.verifier}{how}, T = {self.temperature:g}"


PAIRS = (
    Pair("bundled", 0.8, "bundled"),
    Pair("bundled", 0.4, "bundled"),
    Pair("bundled", 1.2, "bundled"),
    Pair("bundled", 0.8, "bundled", 0.5),
    Pair("bundled", 0.8, "bundled", 2.0),
    Pair("bundled", 0.8, "bundled", -1.0),
    Pair("bundled", 0.8, "logprob"),
    Pair("bundled:strong", 0.8, "bundled"),
    Pair("bundled:strong", 0.8, "bundled", 2.0),
    Pair("bundled:strong", 0.8, "logprob"),
)


def verifier_of(pair: Pair, folder: Path) -> str:
    """What `--verifier` is given. folder: where a changed one is written."""
    if pair.noise == 0.0:
        return pair.verifier
    out = folder / f"noise{pair.noise:g}"
    if not out.exists():
        shutil.copytree(BUNDLED / "verifier", out)
        draws = torch.Generator().manual_seed(0)
        head = load_file(out / _HEAD)
        last = max(name for name in head if name.endswith("weight"))
        for name, tensor in head.items():
            if pair.noise > 0 and tensor.dim() > 1:
                drawn = torch.randn(tensor.shape, generator=draws) * tensor.float().std()
                head[name] = (tensor.float() + pair.noise * drawn).to(tensor.dtype)
            elif pair.noise < 0 and name.startswith(last.removesuffix("weight")):
                head[name] = -tensor
        save_file(head, out / _HEAD)
    return str(out)


def both_runs(
    settings: Settings, problems: ProblemSet, checker: AnswerChecker
) -> Mapping[str, Sequence[Record]]:
    """Records of the runs that advice is from, by name."""
    return {
        name: records_of(each, problems, checker, None, name)
        for name, each in trials(settings).items()
    }


def advised(found: Mapping[str, Sequence[Record]], checker: AnswerChecker) -> dict[str, Any]:
    def judge(record: Record) -> Mapping[str | None, bool | None]:
        return checker.judge(record.gold, [each["answer"] for each in record.candidates])

    return advice(found["samples"], found["search"], "beam", judge)


def named(said: str) -> str:
    """The way that a sentence of advice names."""
    return "vote" if said.startswith("Do not") else said.removeprefix("Use ").split(":")[0]


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, AnswerChecker() as checker:
        dev = load_problems("bundled:dev", args.advised)
        test = load_problems("bundled:test", args.limit)
        for pair in PAIRS[: args.pairs]:
            verifier = verifier_of(pair, Path(folder))
            options = {"model": pair.model, "temperature": pair.temperature, "n": args.n}
            settings = Settings.build(verifier=verifier, width=min(4, args.n), **options)
            said = advised(both_runs(settings, dev, checker), checker)
            truth = advised(both_runs(settings, test, checker), checker)
            ways = truth["tokens"]["ways"]
            way = named(said["say"]).split(",")[0]
            best = max(ways, key=lambda name: ways[name]["accuracy"]["value"])
            behind = ways[best]["accuracy"]["value"] - ways[way]["accuracy"]["value"]
            error = max(ways[best]["error"], ways[way]["error"])
            say(f"{pair.name}: {said['say']}")
            yield {
                "pair": pair.name,
                "advice": way,
                "ranked": round(said["noise"]["ranked"], 3) if said["noise"] else None,
                **{name: round(each["accuracy"]["value"], 3) for name, each in ways.items()},
                "best": best,
                "behind it": round(behind, 3),
                "right": behind <= 1.96 * error,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--advised", type=int, default=50, help="problems that advice is from")
    parser.add_argument("--limit", type=int, default=200, help="problems that show what is best")
    parser.add_argument("--pairs", type=int, default=len(PAIRS))
    args = parser.parse_args()
    found = list(rows(args))
    say(table(found, [*found[0]]))
    right = sum(row["right"] for row in found)
    say(f"right on {right} of {len(found)}")
    finish("advice", {"arguments": vars(args), "rows": found, "right": right})


if __name__ == "__main__":
    main()
