"""Search strategies (`--search`): choose after each round which paths are extended or pruned.

```python
@strategy("epsilon-beam", meaning="beam search that now and then keeps another step",
          reads_width=True, needs_scores=True)
class EpsilonBeam(SearchPolicy):
    epsilon: float = option(0.1, ge=0, le=1, help="Chance that a place goes to any candidate.")

    def select(self, tree, rng): ...
```

Each strategy has one file. It sees only the scored tree: no model, KV or schedule. This package
imports all its modules, so that their declarations are registered. Papers: LBS section 2.3,
FlashTTS section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, ClassVar

from beamwright.declare import declaration, declared_values, make_declared
from beamwright.protocols import Action, Prospect
from beamwright.registry import Table, TableEntry, import_modules
from beamwright.search.answers import ANSWERS
from beamwright.search.prospects import predict_by_scores
from beamwright.sections import AnswerChoice, SearchSettings, Section
from beamwright.tree import Node, SearchTree


class SearchPolicy(Section):
    """Base class of the strategies. The fields of a subclass are the options of its strategy.

    A strategy keeps no state between rounds and reads everything from the tree, so a search that is
    resumed from a checkpoint makes the same choices. A subclass checks in `model_post_init` that
    its options fit together.
    """

    # The fields that are not options, because every strategy has them.
    shared: ClassVar[frozenset[str]] = frozenset({"search"})
    foresees_by_score: ClassVar[bool] = True  # scores improve `prospects` (`protocols.Traits`)
    certain: ClassVar[bool] = False  # `select` extends every complete step (`protocols.Traits`)
    search: SearchSettings = SearchSettings()

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        """Return the actions for the candidates of a round whose scores are known.

        `rng` is the random stream of this round (`protocols.Strategy`).
        """
        raise NotImplementedError

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """Predict which steps `select` will extend after this round, for speculation.

        By default the prediction follows the scores so far (`search.prospects.predict_by_scores`).
        See `protocols.Foresees` for the parameters.
        """
        return predict_by_scores(beams, self.search.width, self.search.max_rounds)


@dataclass(frozen=True)
class StrategyEntry(TableEntry):
    """A declared strategy: its name, its class, and the facts that other packages need."""

    make: type[SearchPolicy]
    choose: AnswerChoice = "best"  # how the answer is chosen if the settings do not say
    # Limits in tokens of the first, second, ... step, if the settings give no limit themselves. The
    # last one holds for all later steps.
    step_limits: tuple[int, ...] | None = None
    by_level: bool = True  # all steps that round r opens are the r-th steps of their paths
    reads_width: bool = False  # the strategy uses --width
    needs_scores: bool = False  # without scores the strategy cannot guide the search
    # Name of the verifier to use if neither the user nor the model names one. It scores steps from
    # the generator's own log-probabilities or token statistics.
    scorer: str | None = None
    # Keeping one path means dropping another. If False, a path is pruned for its own score alone.
    competes: bool = True
    # Each `width` consecutive children of the root form a subtree, and subtrees do not compete.
    apart: bool = False
    # The search ends with exactly n final candidates, unless a stop rule or --max-rounds ends it.
    fills: bool = True
    # A step with children gets no further children, and a pruned path never returns. The text that
    # all leaves have in common is therefore final while the search still runs.
    commits: bool = False
    # The reason why an ended path may still lose or change its vote; None: it cannot.
    votes_change: str | None = None
    # Function that chooses the n final candidates among the finished paths, for a strategy that
    # finishes more or fewer than n.
    finals: Callable[[Sequence[Node], int], list[Node]] | None = None
    # Fields of this row that have other values if the option `guide` is set.
    guided: Mapping[str, Any] = field(default_factory=dict)

    def make_policy(self, settings: SearchSettings) -> SearchPolicy:
        """Build the strategy, with its options from `settings`.

        Raises:
            InputError: for an option of another strategy, or for a value that is not valid.
        """
        rows = [self, ANSWERS.find(settings.answers)]
        given, _ = declared_values(STRATEGIES, rows, settings, named=self.name)
        return make_declared(STRATEGIES, self.make, given, search=settings)  # type: ignore[no-any-return]


DEFAULT_SEARCH = "beam"
STRATEGIES: Table[StrategyEntry] = Table("search", "--search", "select", taken=("list",))
# Decorator that declares a strategy class: a name, `meaning` and fields of `StrategyEntry`. Several
# declarations may share one class.
strategy = partial(declaration, STRATEGIES, StrategyEntry)


def round_rng(settings: SearchSettings, tree: SearchTree) -> Random:
    """Return the random generator with which the strategy decides the current round.

    The seed consists of the strategy's name, the user's seed, the problem id and the round number,
    so a resumed search draws the same numbers.
    """
    key = f"{settings.search} {settings.seed} {tree.root.lineage[0]!r} {tree.rounds}"
    return Random(key)


def make_strategy(settings: SearchSettings) -> SearchPolicy:
    """Build the strategy that `--search` names, and check its settings.

    Raises:
        InputError: for an unknown name, an option of another strategy, or settings that the
            strategy cannot use.
    """
    return strategy_entry(settings).make_policy(settings)


def strategy_entry(settings: SearchSettings) -> StrategyEntry:
    """Return the declaration of the strategy that `--search` names; without a name, of beam search.

    Raises:
        InputError: for an unknown name.
    """
    entry = STRATEGIES.find(settings.search or DEFAULT_SEARCH)
    return replace(entry, **entry.guided) if getattr(settings, "guide", False) else entry


import_modules(__name__, __path__)
