"""Strategies: pure policies over a scored tree. One file and one table row each.

Knows no models, no KV, no schedules. LBS section 2.3; FlashTTS section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from beamwright.config import SearchSettings, Settings
from beamwright.errors import InputError
from beamwright.protocols import Strategy
from beamwright.search.beam import BeamSearch
from beamwright.search.best_of_n import BestOfN
from beamwright.search.choose import Choice
from beamwright.search.compat import SearchAndLearnBeam
from beamwright.search.deepconf import OnlineDeepConf
from beamwright.search.dvts import DiverseTrees
from beamwright.search.dynamic import DynamicBranching
from beamwright.search.lookahead import Lookahead
from beamwright.search.mcts import MonteCarloTreeSearch
from beamwright.search.particles import ParticleFilter
from beamwright.search.revise import SequentialRevision

KNOBS = (
    "branching", "score_temperature", "ess", "lookahead", "warmup", "keep",
    "revisions", "critique_prompt", "revision_prompt", "exploration", "nodes",
)  # fmt: skip
VARYING_LIMITS = (64, 64, 64, 2048)  # FlashTTS, Fig. 11


@dataclass(frozen=True)
class StrategyRow:
    """A strategy by name.

    meaning: one line for people. knobs: of `KNOBS`, those it reads. choose: how its answer is
    chosen where the settings do not say. step_limits: its steps' lengths, likewise.
    by_level: every step of a round is as deep as the round's number. reads_width: --width matters.
    competes: paths take places from one another; otherwise a path is pruned for its own sake alone.
    """

    make: Callable[[SearchSettings], Strategy]
    meaning: str
    knobs: tuple[str, ...] = ()
    choose: Choice = "best"
    step_limits: tuple[int, ...] | None = None
    by_level: bool = True
    reads_width: bool = False
    competes: bool = True


STRATEGIES: dict[str, StrategyRow] = {
    "best-of-n": StrategyRow(
        BestOfN, "n independent paths, the best-scored answer", competes=False,
    ),
    "majority": StrategyRow(
        BestOfN, "n independent paths, the most frequent answer (self-consistency)",
        choose="majority", competes=False,
    ),
    "weighted": StrategyRow(
        BestOfN, "n independent paths, the answer with the largest summed score",
        choose="weighted", competes=False,
    ),
    "beam": StrategyRow(
        BeamSearch, "keep the best n / width steps a round, width children each",
        reads_width=True,
    ),
    "dvts": StrategyRow(
        DiverseTrees, "n / width separate subtrees, the best of width children in each",
        reads_width=True,
    ),
    "dynamic": StrategyRow(
        DynamicBranching, "children in proportion to the score: softmax (REBASE) or linear",
        knobs=("branching", "score_temperature"),
    ),
    "varying": StrategyRow(
        BeamSearch, "beam search with short steps first: 64 tokens three times, then up to 2048",
        step_limits=VARYING_LIMITS, reads_width=True,
    ),
    "lookahead": StrategyRow(
        Lookahead, "beam search that scores a candidate by a greedy rollout of k steps",
        knobs=("lookahead",), by_level=False, reads_width=True,
    ),
    "particles": StrategyRow(
        ParticleFilter, "paths resampled in proportion to exp(score / temperature)",
        knobs=("score_temperature", "ess"),
    ),
    "deepconf": StrategyRow(
        OnlineDeepConf, "best-of-n whose paths are pruned below the confidence of the first ones",
        knobs=("warmup", "keep"), choose="weighted", by_level=False, competes=False,
    ),
    "revise": StrategyRow(
        SequentialRevision, "n paths, each a draft, its critique and a new answer, in turn",
        knobs=("revisions", "critique_prompt", "revision_prompt"), by_level=False, competes=False,
    ),
    "mcts": StrategyRow(
        MonteCarloTreeSearch, "tree search: score plus exploration bonus picks the leaves (PUCT)",
        knobs=("exploration", "nodes"), by_level=False, reads_width=True,
    ),
}  # fmt: skip


def make_strategy(settings: SearchSettings) -> Strategy:
    """The strategy that `--search` names, with its settings checked.

    Raises:
        InputError: for an unknown name, a knob of another strategy, or settings that the strategy
            cannot work with.
    """
    row = strategy_row(settings)
    for knob in KNOBS:
        if getattr(settings, knob) is not None and knob not in row.knobs:
            raise InputError(f"--{knob.replace('_', '-')} is no knob of --search {settings.search}")
    if settings.compat is not None:
        if settings.search != "beam":
            raise InputError(f"--compat {settings.compat} goes with --search beam")
        return SearchAndLearnBeam(settings)
    return row.make(settings)


def strategy_row(settings: SearchSettings) -> StrategyRow:
    """The row that `--search` names.

    Raises:
        InputError: for an unknown name.
    """
    if settings.search not in STRATEGIES:
        raise InputError(f"--search {settings.search!r}: choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[settings.search]


def with_defaults(settings: Settings) -> Settings:
    """Settings in which the strategy's own choice and step lengths stand where none were given."""
    row = strategy_row(settings.search)
    search, step = settings.search, settings.step
    if search.choose is None:
        search = search.model_copy(update={"choose": row.choose})
    if step.step_limits is None and step.step_tokens is None and row.step_limits is not None:
        cap = step.max_step_tokens if "max_step_tokens" in step.model_fields_set else math.inf
        limits = tuple(limit for limit in row.step_limits if limit < cap)
        if len(limits) < len(row.step_limits):
            limits = (*limits, step.max_step_tokens)
        step = step.model_copy(update={"step_limits": limits})
    return settings.model_copy(update={"search": search, "step": step})


__all__ = [
    "KNOBS",
    "STRATEGIES",
    "BeamSearch",
    "BestOfN",
    "DiverseTrees",
    "DynamicBranching",
    "Lookahead",
    "MonteCarloTreeSearch",
    "OnlineDeepConf",
    "ParticleFilter",
    "SearchAndLearnBeam",
    "SequentialRevision",
    "StrategyRow",
    "make_strategy",
    "strategy_row",
    "with_defaults",
]
