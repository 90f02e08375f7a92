"""Strategies: pure policies over a scored tree, one file and one declaration each.

```python
@strategy("epsilon-beam", meaning="beam search that now and then keeps another step",
          reads_width=True, needs_scores=True)
class EpsilonBeam(SearchPolicy):
    epsilon: float = option(0.1, ge=0, le=1, help="Chance that a place goes to any candidate.")

    def select(self, tree, rng): ...
```

Knows no models, no KV, no schedules. Every module of this folder is imported, and with it what it
declares. LBS section 2.3; FlashTTS section 2.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from random import Random
from typing import ClassVar

from beamwright.declare import declaration, declared_values, made
from beamwright.protocols import Action, Prospect
from beamwright.registry import Table, TableRow
from beamwright.search.answers import ANSWERS
from beamwright.search.prospects import by_scores
from beamwright.sections import Choice, SearchSettings, Section
from beamwright.tree import Node, SearchTree


class SearchPolicy(Section):
    """A strategy: fields are its options, `search` is what every strategy is given.

    It keeps nothing between rounds: what it knows is in the tree, so that a search that is resumed
    goes on alike. Options that do not fit together are found in `model_post_init`.
    """

    shared: ClassVar[frozenset[str]] = frozenset({"search"})
    foresees_by_score: ClassVar[bool] = True
    certain: ClassVar[bool] = False
    search: SearchSettings = SearchSettings()

    def select(self, tree: SearchTree, rng: Random) -> list[Action]:
        """What becomes of every candidate; see `protocols.Strategy`."""
        raise NotImplementedError

    def prospects(
        self, tree: SearchTree, beams: Sequence[Node], ahead: Sequence[Node]
    ) -> list[Prospect]:
        """What may be extended when this round is over; see `protocols.Foresees`.

        Unless a strategy knows better: by the scores so far (`search.prospects`).
        """
        return by_scores(beams, self.search.width, self.search.max_rounds)


@dataclass(frozen=True)
class StrategyRow(TableRow):
    """A strategy by name.

    choose: how its answer is chosen where the settings do not say. step_limits: its steps'
    lengths, likewise. by_level: every step of a round is as deep as the round's number.
    reads_width: --width matters. needs_scores: without them its tree is no search.
    scorer: what scores steps, of the generator's own tokens, where no verifier is given.
    competes: paths take places from one another; otherwise a path is pruned for its own sake alone.
    apart: each `width` children of the root are a subtree that competes with none.
    fills: unless something stops it, it ends with exactly n finished paths.
    commits: a step that has children gets no more, and no path that was left comes back: what all
        leaves share is final while the search goes on.
    votes_change: why the vote of a path that has ended may still be lost, if it may.
    finals: which n of its finished paths are its candidates, where it finishes more or fewer.
    """

    make: type[SearchPolicy]
    choose: Choice = "best"
    step_limits: tuple[int, ...] | None = None
    by_level: bool = True
    reads_width: bool = False
    needs_scores: bool = False
    scorer: str | None = None
    competes: bool = True
    apart: bool = False
    fills: bool = True
    commits: bool = False
    votes_change: str | None = None
    finals: Callable[[Sequence[Node], int], list[Node]] | None = None

    def policy(self, settings: SearchSettings) -> SearchPolicy:
        """The strategy with the options that the settings give it.

        Raises:
            InputError: for an option of another strategy, or a value that this one cannot use.
        """
        rows = [self, ANSWERS.find(settings.answers)]
        given, _ = declared_values(STRATEGIES, rows, settings, named=self.name)
        return made(STRATEGIES, self.make, given, search=settings)  # type: ignore[no-any-return]


DEFAULT_SEARCH = "beam"
STRATEGIES: Table[StrategyRow] = Table("search", "--search", "select", taken=("list",))
strategy = partial(declaration, STRATEGIES, StrategyRow)
"""Declare a strategy. Beside its meaning: facts of `StrategyRow`. One class may have several."""


def round_rng(settings: SearchSettings, tree: SearchTree) -> Random:
    """The random stream of one round: of the strategy, the seed, the problem and the round."""
    key = f"{settings.search} {settings.seed} {tree.root.lineage[0]!r} {tree.rounds}"
    return Random(key)


def make_strategy(settings: SearchSettings) -> SearchPolicy:
    """The strategy that `--search` names, with its settings checked.

    Raises:
        InputError: for an unknown name, an option of another strategy, or settings that the
            strategy cannot work with.
    """
    return strategy_row(settings).policy(settings)


def strategy_row(settings: SearchSettings) -> StrategyRow:
    """The row that `--search` names, or of beam search.

    Raises:
        InputError: for an unknown name.
    """
    return STRATEGIES.find(settings.search or DEFAULT_SEARCH)


for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
