"""Strategies: pure policies over a scored tree. One file and one table row each.

Knows no models, no KV, no schedules. LBS section 2.3; FlashTTS section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from beamwright.config import SearchSettings
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
DEFAULT_SEARCH = "beam"
VARYING_LIMITS = (64, 64, 64, 2048)  # FlashTTS, Fig. 11


@dataclass(frozen=True)
class StrategyRow:
    """A strategy by name.

    meaning: one line for people. knobs: of `KNOBS`, those it reads. choose: how its answer is
    chosen where the settings do not say. step_limits: its steps' lengths, likewise.
    by_level: every step of a round is as deep as the round's number. reads_width: --width matters.
    competes: paths take places from one another; otherwise a path is pruned for its own sake alone.
    needs_scores: without them its tree is no search. scorer: what scores steps, of the generator's
    own tokens, where no verifier is given.
    """

    make: Callable[[SearchSettings], Strategy]
    meaning: str
    knobs: tuple[str, ...] = ()
    choose: Choice = "best"
    step_limits: tuple[int, ...] | None = None
    by_level: bool = True
    reads_width: bool = False
    competes: bool = True
    needs_scores: bool = False
    scorer: str | None = None


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
        reads_width=True, needs_scores=True,
    ),
    "dvts": StrategyRow(
        DiverseTrees, "n / width separate subtrees, the best of width children in each",
        reads_width=True, needs_scores=True,
    ),
    "dynamic": StrategyRow(
        DynamicBranching, "children in proportion to the score: softmax (REBASE) or linear",
        knobs=("branching", "score_temperature"), needs_scores=True,
    ),
    "varying": StrategyRow(
        BeamSearch, "beam search with short steps first: 64 tokens three times, then up to 2048",
        step_limits=VARYING_LIMITS, reads_width=True, needs_scores=True,
    ),
    "lookahead": StrategyRow(
        Lookahead, "beam search that scores a candidate by a greedy rollout of k steps",
        knobs=("lookahead",), by_level=False, reads_width=True, needs_scores=True,
    ),
    "particles": StrategyRow(
        ParticleFilter, "paths resampled in proportion to exp(score / temperature)",
        knobs=("score_temperature", "ess"), needs_scores=True,
    ),
    "deepconf": StrategyRow(
        OnlineDeepConf, "best-of-n whose paths are pruned below the confidence of the first ones",
        knobs=("warmup", "keep"), choose="weighted", by_level=False, competes=False,
        needs_scores=True, scorer="deepconf",
    ),
    "revise": StrategyRow(
        SequentialRevision, "n paths, each a draft, its critique and a new answer, in turn",
        knobs=("revisions", "critique_prompt", "revision_prompt"), by_level=False, competes=False,
    ),
    "mcts": StrategyRow(
        MonteCarloTreeSearch, "tree search: score plus exploration bonus picks the leaves (PUCT)",
        knobs=("exploration", "nodes"), by_level=False, reads_width=True, needs_scores=True,
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
    """The row that `--search` names, or of beam search.

    Raises:
        InputError: for an unknown name.
    """
    name = settings.search or DEFAULT_SEARCH
    if name not in STRATEGIES:
        raise InputError(f"--search {name!r}: choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


__all__ = [
    "DEFAULT_SEARCH",
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
]
