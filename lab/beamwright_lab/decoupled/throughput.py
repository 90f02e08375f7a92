"""Throughput of many problems on one simulated card, as in the thesis on decoupled exploration.

Llama-3.2-1B with an 8B PRM, beam search of width 4, depth 40 (thesis, chapter 4) and 16 candidates.
128 problems of five levels have paths of 320 tokens per level and lognormal steps of 40 tokens on
average. The thesis prints neither lengths nor scores, so both are assumed. KV gets nine tenths of a
card's memory minus both models' weights, in proportion to the models' KV bytes per token.

Ceilings come from the cost model: all tokens in passes of `ROWS` rows and in full verifier batches,
with the KV that they must read. Either one model runs after the other, or both overlap perfectly.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamwright.models.named import shape_from_text
from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.fits import MARK_TOKENS
from beamwright.plan.machines import find_profile
from beamwright.protocols import Foresees, Prospect
from beamwright.search.prospects import can_be_extended
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright.tree import Node
from beamwright_lab.baselines.bins import by_bins
from beamwright_lab.common import finish, say, table
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.many import ManyResult, simulate_many
from beamwright_lab.simulator.recorded import RecordedTree
from beamwright_lab.simulator.replay import Foresee, Foresight, Script
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from beamwright_lab.simulator.verifier import VerifierCase

GENERATOR, VERIFIER = "llama-3.2-1b", "rlhflow-prm-8b"
CARDS = ("rtx-4090", "a100-80gb")
WIDTH, DEPTH, BEAMS, PROBLEMS = 4, 40, 16, 128
PROMPT_TOKENS, LEVEL_TOKENS, LEVELS, STEP_TOKENS, SIGMA = 256, 320, 5, 40, 0.7
ROWS, BATCH_TOKENS = 512, 4096
WHAT = ("settings", "utilisation", "invocations")
MOST_TOKENS = LEVELS * LEVEL_TOKENS
COLUMNS = (
    "card", "setting", "in flight", "seconds", "problems/min", "tok/s", "times", "of ceiling",
    "rows", "generator busy", "steps per call", "verifier busy", "both busy", "kept",
    "a problem, s", "over the link, GB",
)  # fmt: skip


def foresee_by_bins(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
    """Foresee by score bins, FlashTTS's SelectSPEC."""
    del ahead
    return by_bins(beams, width)


def foresee_opened(script: Script) -> Foresee:
    """Return a function that foresees exactly the steps that the script opens."""

    def foresee(beams: Sequence[Node], ahead: Sequence[Node], width: int) -> list[Prospect]:
        del ahead, width
        counts = [(beam, script.num_steps_below(beam)) for beam in beams if can_be_extended(beam)]
        return [Prospect(beam, count) for beam, count in counts if count]

    return foresee


@dataclass(frozen=True)
class Setting:
    """How problems are explored.

    in_flight: problems at a time; None: decided by `engine.admission`.
    verifier: options of `VerifierCase`.
    """

    in_flight: int | None = None
    explore: str = "continuous"
    speculation: str = "off"
    overlap: bool = False
    verifier: Mapping[str, Any] | None = None


SETTINGS = {
    "one at a time": Setting(1),
    "one at a time, speculation": Setting(1, speculation="exact"),
    "lockstep": Setting(4, "lockstep"),
    "continuous": Setting(4),
    "lockstep, more": Setting(16, "lockstep"),
    "continuous, more": Setting(16),
    "decoupled, eager": Setting(explore="decoupled"),
    "decoupled": Setting(explore="decoupled", speculation="auto"),
    "decoupled, eager + overlap": Setting(explore="decoupled", overlap=True),
    "the same, two PRMs": Setting(explore="decoupled", overlap=True, verifier={"copies": 2}),
    "the same, a card for the PRM": Setting(
        explore="decoupled", overlap=True, verifier={"own_cards": True}
    ),
    "the same, two PRMs, a card for each": Setting(
        explore="decoupled", overlap=True, verifier={"copies": 2, "own_cards": True}
    ),
    "decoupled + overlap": Setting(explore="decoupled", speculation="auto", overlap=True),
}


def trees(
    count: int, beams: int = BEAMS, width: int = WIDTH, max_rounds: int = DEPTH
) -> list[RecordedTree]:
    """Generate search trees, cycling through the levels."""
    made = SyntheticSearch(
        beams, width, PROMPT_TOKENS, LEVEL_TOKENS, STEP_TOKENS, SIGMA, survival="score",
        max_rounds=max_rounds,
    )  # fmt: skip
    return [
        grow(replace(made, generate_tokens=LEVEL_TOKENS * (1 + i % LEVELS), seed=i), i)
        for i in range(count)
    ]


@dataclass(frozen=True)
class Machine:
    """Both models on one card."""

    card: str
    generator: Roofline
    verifier: Roofline

    @classmethod
    def of(cls, card: str, generator: str = GENERATOR, verifier: str = VERIFIER) -> Machine:
        profile = find_profile(card)
        models = (ModelCosts.of(shape_from_text(name), 2) for name in (generator, verifier))
        return cls(card, *(Roofline(model, profile) for model in models))

    def kv_bytes(self) -> tuple[int, int]:
        """Return the KV bytes of generator and verifier."""
        models = self.generator.model, self.verifier.model
        memory = find_profile(self.card).device_memory_bytes * 9 // 10
        free = memory - sum(model.weight_bytes for model in models)
        total = sum(model.kv_bytes_per_token for model in models)
        first, second = (free * model.kv_bytes_per_token // total for model in models)
        return first, second

    def cases(
        self,
        found: Sequence[RecordedTree],
        setting: Setting,
        foresees: Sequence[Foresees] | None = None,
        max_batch: int | None = None,
    ) -> list[Simulation]:
        generator_bytes, verifier_bytes = self.kv_bytes()
        generator, verifier = (
            RooflineCosts(each, Layout.TREE) for each in (self.generator, self.verifier)
        )
        settings = ScheduleSettings.model_validate(
            {"schedule": "locality", "explore": setting.explore, "max_batch": max_batch}
        )
        case = Simulation(
            found[0],
            self.generator.model,
            generator,
            generator_bytes,
            settings,
            StepSettings(max_step_tokens=MOST_TOKENS, max_tokens=MOST_TOKENS),
            verifier=VerifierCase(
                self.verifier.model, verifier, verifier_bytes, **(setting.verifier or {})
            ),
            speculation=setting.speculation,  # type: ignore[arg-type]
            overlap=setting.overlap,
        )
        say_of = foresees or [None] * len(found)
        return [
            replace(case, tree=tree, foresees=each)
            for tree, each in zip(found, say_of, strict=True)
        ]


# --- ceilings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """Least seconds of a model's work: memory traffic, arithmetic and launches."""

    memory_s: float
    compute_s: float
    launch_s: float

    @property
    def alone_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.launch_s


@dataclass
class Volume:
    """Work of one model in a search.

    tokens: tokens computed.
    reads: KV tokens read; sees: KV tokens attended to, summed over new tokens.
    """

    tokens: int = 0
    reads: float = 0.0
    sees: float = 0.0

    def floor(self, roofline: Roofline, tokens_of_a_pass: int) -> Floor:
        """Return the least seconds of this work in passes of `tokens_of_a_pass` tokens."""
        passes = self.tokens / tokens_of_a_pass
        weights_s, _, launch_s = roofline.pass_parts_s(1, 0, 0, Layout.TREE)
        memory_s, compute_s, _ = roofline.pass_parts_s(
            self.tokens, self.reads, self.sees, Layout.TREE
        )
        return Floor(memory_s + (passes - 1) * weights_s, compute_s, passes * launch_s)


def volumes(found: Sequence[RecordedTree]) -> tuple[Volume, Volume]:
    """Return the work of these trees for the generator and for the verifier.

    The rows of a round read shared prefixes once.
    """
    decoded, scored = Volume(), Volume()
    for tree in found:
        ends: dict[tuple[int, ...], int] = {(): tree.prompt_tokens}
        shared: dict[tuple[int, ...], int] = {(): tree.prompt_tokens}
        by_round: dict[int, list[tuple[int, tuple[int, ...], int]]] = {}
        scored.tokens += tree.prompt_tokens
        for node in tree.nodes:
            above = node.lineage[:-1]
            start, length = ends[above], node.tokens
            ends[node.lineage], shared[node.lineage] = start + length, length
            decoded.tokens += length
            decoded.sees += length * (start + (length + 1) / 2)
            decoded.reads += length * (length + 1) / 2
            marked = length + MARK_TOKENS
            scored.tokens += marked
            scored.sees += marked * (start + (marked + 1) / 2)
            by_round.setdefault(node.round, []).append((length, above, start))
        for steps in by_round.values():
            paths = {above[:end] for _, above, _ in steps for end in range(len(above) + 1)}
            union = sum(shared[each] for each in paths)
            longest = max(length for length, _, _ in steps)
            decoded.reads += union * sum(length for length, _, _ in steps) / len(steps)
            scored.reads += union + len(steps) * longest
    return decoded, scored


@dataclass(frozen=True)
class PassCeiling:
    """Least seconds of all problems: with models taking turns, and with perfect overlap."""

    turns_s: float
    both_s: float

    @classmethod
    def of(cls, machine: Machine, found: Sequence[RecordedTree], rows: int = ROWS) -> PassCeiling:
        decoded, scored = volumes(found)
        one = decoded.floor(machine.generator, rows)
        other = scored.floor(machine.verifier, BATCH_TOKENS)
        memory_s = one.memory_s + other.memory_s
        compute_s = one.compute_s + other.compute_s
        return cls(one.alone_s + other.alone_s, max(memory_s, compute_s))


# --- the table -------------------------------------------------------------------------------


def card_rows(
    card: str, found: Sequence[RecordedTree], names: Sequence[str], most: int | None
) -> list[dict[str, Any]]:
    """Simulate the named settings on one card.

    Column "times" is the speed-up over the first setting.

    most: in-flight limit of decoupled settings, from `--most`.
    """
    machine = Machine.of(card)
    ceiling = PassCeiling.of(machine, found)
    rows: list[dict[str, Any]] = []
    first_s = 0.0
    for name in names:
        setting = SETTINGS[name]
        if setting.explore == "decoupled":
            setting = replace(setting, in_flight=most)
        began_s = time.process_time()
        result = simulate_many(machine.cases(found, setting), setting.in_flight)
        took_s = time.process_time() - began_s
        first_s = first_s or result.time_s
        own = bool(setting.verifier and setting.verifier.get("own_cards"))
        least_s = ceiling.both_s if setting.overlap else ceiling.turns_s
        row = row_of(result, name, setting)
        row |= {
            "card": card,
            "times": round(first_s / result.time_s, 2),
            "of ceiling": None if own else round(least_s / result.time_s, 2),
            "loop_cpu_s": round(took_s, 1),
        }
        rows.append(row)
        say("  ", *(row[name] for name in COLUMNS))
    times = [round(first_s / least_s, 2) for least_s in (ceiling.turns_s, ceiling.both_s)]
    say(f"   {card}: ceiling in turns and overlapped {times}, KV {machine.kv_bytes()}")
    return rows


def row_of(result: ManyResult, name: str, setting: Setting) -> dict[str, Any]:
    """Return the table row of a run. Column "both busy" is the share of time with overlap."""
    return {
        "setting": name,
        "in flight": setting.in_flight or most_in_flight(result),
        "seconds": round(result.time_s, 1),
        "problems/min": round(result.problems_per_minute, 1),
        "tok/s": round(result.tok_s),
        "rows": round(result.mean_rows, 1),
        "generator busy": round(result.decode_share, 2),
        "steps per call": round(result.steps_per_call, 1),
        "verifier busy": round(result.verify_share, 2),
        "both busy": round(result.seconds.both_s / result.time_s, 2),
        "kept": None if result.kept_share is None else round(result.kept_share, 2),
        "a problem, s": round(result.mean_s, 1),
        "over the link, GB": round((result.h2d_bytes + result.d2h_bytes) / 1e9, 1),
        "passes": result.passes,
        "decode_s": result.seconds.decode_s + result.seconds.both_s,
        "verify_s": result.seconds.verify_s + result.seconds.both_s,
    }


def most_in_flight(result: ManyResult) -> int:
    began = [(run.started_s or 0.0, 1) for run in result.runs]
    ended = [((run.started_s or 0.0) + run.ended_s, -1) for run in result.runs]
    most = now = 0
    for _, change in sorted([*began, *ended]):
        now += change
        most = max(most, now)
    return most


# --- what the thesis estimates ---------------------------------------------------------------


def utilisation(card: str) -> list[dict[str, Any]]:
    """Return the generator's tokens per second at shares of a full batch (thesis, 8.1.1)."""
    machine, rows = Machine.of(card), list[dict[str, Any]]()
    mean = PROMPT_TOKENS + MOST_TOKENS // 2
    for share in (0.1, 0.2, 0.4, 0.8):
        count = round(share * ROWS)
        problems = count / BEAMS * 3  # a third of a problem's rows run at a time
        read = count * STEP_TOKENS / 2 + problems * mean * 1.5
        seconds = machine.generator.decode_step_s(count, read, count * mean)
        rows.append({"card": card, "share": share, "rows": count, "tok/s": round(count / seconds)})
    for row in rows:
        row["times"] = round(row["tok/s"] / rows[0]["tok/s"], 2)
    return rows


def invocations(card: str, found: Sequence[RecordedTree]) -> list[dict[str, Any]]:
    """Return the generator's passes with speculation, relative to none (thesis, 8.1.1).

    For one problem and 16 in flight, and for three kinds of foresight.
    """
    machine, rows = Machine.of(card), []
    for in_flight in (1, 16):
        plain = simulate_many(machine.cases(found, Setting()), in_flight)
        for name in ("SelectSPEC", "by scores", "oracle"):
            knows: list[Foresees] = [
                Foresight(
                    foresee_by_bins if name == "SelectSPEC" else foresee_opened(Script(tree)), WIDTH
                )
                for tree in found
            ]
            ahead = Setting(speculation="exact")
            foresees = None if name == "by scores" else knows
            result = simulate_many(machine.cases(found, ahead, foresees), in_flight)
            rows.append(
                {
                    "card": card,
                    "in flight": in_flight,
                    "foresight": name,
                    "kept": round(result.kept_share or 0.0, 2),
                    "passes": round(result.passes / plain.passes, 2),
                    "seconds": round(result.time_s / plain.time_s, 2),
                }
            )
            say("  ", *rows[-1].values())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cards", nargs="+", default=list(CARDS))
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--most", type=int, help="most problems in flight with decoupled settings")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--what", nargs="+", default=list(WHAT), choices=WHAT, help="tables")
    args = parser.parse_args()
    found = trees(args.problems)
    settings, used, calls = [], [], []
    for card in args.cards:
        if "settings" in args.what:
            settings += card_rows(card, found, args.settings, args.most)
        if "utilisation" in args.what:
            used += utilisation(card)
        if "invocations" in args.what:
            calls += invocations(card, found[: min(32, len(found))])
    say(table(settings, COLUMNS))
    say(table(used, ("card", "share", "rows", "tok/s", "times")))
    say(table(calls, ("card", "in flight", "foresight", "kept", "passes", "seconds")))
    finish(
        "decoupled_throughput", {"settings": settings, "utilisation": used, "invocations": calls}
    )


if __name__ == "__main__":
    main()
