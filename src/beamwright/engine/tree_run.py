"""TreeRun: one tree under way. Its rounds, what waits for whom, and what is measured of it.

Knows one tree and its policies; no executor, no other tree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from beamwright.counters import Counters
from beamwright.engine.decisions import StopRule, cut_short, decided, foreseen, note_answers
from beamwright.engine.speculation import Payoff, SpeculativeChildren
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.protocols import (
    Action,
    Answers,
    Ask,
    Complete,
    Extend,
    Finish,
    Prospect,
    Prune,
    RoundCallback,
    RoundReport,
    Strategy,
    Traits,
    traits_of,
)
from beamwright.search.answers import Mathematics
from beamwright.tree import Node, NodeState, SearchTree, Turn, make_given_path, on_paths

Aggregate = Callable[[Sequence[float | None]], float | None]
# Token ids of a turn behind an ended reply; None where it does not fit the context.
RenderTurn = Callable[[Node, Turn], tuple[int, ...] | None]


@dataclass(eq=False)
class RoundState:
    """What is decoded and scored of one round, and what was opened when it was over.

    beams: the open steps that it began with; open: those that are not decoded yet. submitted: those
    that were given to the verifier, early ones while others were decoded; unscored: and not scored
    so far. scores_wait: there was no room for one, so all are computed when all are decoded.
    num_submits: to the verifier. began: what was spent when it began. opened: siblings, together.
    """

    beams: tuple[Node, ...] = ()
    open: dict[Node, None] = field(default_factory=dict)
    began: Counters = field(default_factory=Counters)
    unscored: dict[Node, None] = field(default_factory=dict)
    submitted: set[Node] = field(default_factory=set)
    early: set[Node] = field(default_factory=set)
    scores_wait: bool = False
    num_submits: int = 0
    opened: list[list[Node]] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """True while something of it is to be decoded or scored."""
        return bool(self.open or self.unscored)

    def put_off(self, node: Node, error: BeamwrightError) -> bool:
        """True if there was no room for a score before the end of the round, and will be then."""
        if not isinstance(error, CapacityError) or node not in self.early:
            return False
        self.early.discard(node)
        self.submitted.discard(node)
        self.unscored.pop(node, None)
        self.scores_wait = True
        return True


@dataclass(eq=False)
class TreeRun:
    """One tree under way, and what is measured of it.

    strategy, aggregate, rng: how its rounds are decided; render_turn: for strategies that ask
    again. judges: whether the verifier is given a step, a function of its path alone. on_round:
    hears of every round, and of what goes on within one.
    round: of the steps that are decoded and scored now.
    elapsed_s: seconds that earlier processes spent on a tree that is resumed.
    started_s: when this process started with it, on the engine's clock; None until then.
    finished_s: seconds from admission to the end of scoring, per final candidate; ended_s: of all.
    round_tokens: distinct path tokens that each round's beams extend (their KV is needed).
    rule: what may stop the search early. answers: how replies are read.
    save: called when a round is scored and nothing is decided about it yet.
    restore: gives the nodes of a resumed tree their KV back, once it is known which are needed;
    calls what it is given where some may be freed again.
    cut: True if the deadline has ended a round before all of it was decoded and scored.
    served: tokens that were decoded for it, from where the others were when it came.
    priority: a larger one is decoded and scored first. waited_s: seconds before it was started
    that its deadline counts.
    speculative: children that selection may open when the round is over. given: all of them were
    written by somebody, see `give`.
    stopped: what of the rule has stopped it early.
    error: why the tree could not be finished.
    """

    tree: SearchTree
    strategy: Strategy
    aggregate: Aggregate
    rng: Callable[[SearchTree], Random]
    judges: Callable[[Node], bool] = lambda node: True
    render_turn: RenderTurn = lambda node, turn: None
    on_round: RoundCallback | None = None
    round: RoundState = field(default_factory=RoundState)
    clock: Callable[[], float] = time.perf_counter
    elapsed_s: float = 0.0
    started_s: float | None = None
    ended_s: float = 0.0
    finished_s: dict[Node, float] = field(default_factory=dict)
    round_tokens: list[int] = field(default_factory=list)
    rule: StopRule | None = None
    answers: Answers = field(default_factory=Mathematics)
    save: Callable[[TreeRun, float], None] | None = None
    restore: Callable[[Sequence[Node], Callable[[], None]], None] | None = None
    cut: bool = False
    served: int = 0
    priority: int = 0
    waited_s: float = 0.0
    speculative: SpeculativeChildren = field(default_factory=SpeculativeChildren)
    given: bool = False
    stopped: str | None = None
    error: BeamwrightError | None = None

    # --- its time ----------------------------------------------------------------------------

    @property
    def _own_s(self) -> float:
        """Seconds that this process has spent on the tree."""
        return 0.0 if self.started_s is None else self.clock() - self.started_s

    def out_of_time(self, patience_s: float = 0.0) -> bool:
        """True if the deadline has passed, and so many seconds more."""
        spent_s = self._own_s + self.waited_s - patience_s
        return self.rule is not None and self.rule.out_of_time(spent_s)

    def overdue(self) -> bool:
        """True if the deadline has passed in decoding and there is something to return.

        A tree without any step goes on.
        """
        if self.cut or not self.round.open or not self.out_of_time():
            return False
        return bool(self.tree.candidates() or self.tree.finished() or cut_short(self.tree))

    def goodput_tok_s(
        self, nodes: Sequence[Node], answer: Callable[[Node], Node] = lambda leaf: leaf
    ) -> float | None:
        """FlashTTS's precise goodput (6.1): mean path tokens over mean seconds from admission to
        the end of scoring, of these candidates; None without any.

        answer: which node of a finished leaf's path is its candidate.
        """
        ended_s = {answer(leaf): seconds for leaf, seconds in self.finished_s.items()}
        total_s = sum(ended_s.get(node, self.ended_s) for node in nodes)
        if self.given or total_s <= 0:
            return None
        return sum(node.num_path_tokens for node in nodes) / total_s

    # --- a round -----------------------------------------------------------------------------

    def give(self, paths: Sequence[Sequence[str]]) -> None:
        """Have these paths scored, a step of each in a round: all of them are written already, and
        selection opens them as it would what was decoded ahead."""
        self.given = True
        for number, texts in enumerate(paths):
            self.speculative.give(make_given_path(self.tree.root, number, texts))

    def begin_round(self, spent: Counters) -> None:
        """Its open nodes are this round's beams, and those that have their steps already."""
        opened = [node for siblings in self.round.opened for node in siblings]
        complete = [node for node in opened if node.state is NodeState.CANDIDATE]
        beams = sorted([*self.tree.open_nodes(), *complete], key=lambda node: node.lineage[1:])
        still_open = {node: None for node in beams if node.state is NodeState.OPEN}
        self.round = RoundState(tuple(beams), still_open, spent)
        paths = on_paths([beam.parent for beam in beams if beam.parent is not None])
        self.round_tokens.append(sum([len(node.token_ids) for node in paths]))

    def to_score(self) -> list[Node]:
        """This round's steps, in the order of its beams, that can be scored and the verifier was
        not given yet; they count as given from now on."""
        now = self.round
        decoded = [n for n in now.beams if n.state is NodeState.CANDIDATE and n.answers]
        new = [node for node in decoded if node not in now.submitted and self.judges(node)]
        now.submitted.update(new)
        if now.open:
            now.early.update(new)
        return new

    def steps_ahead(self, num_steps: int) -> list[Node]:
        """Speculative children that can be scored behind so many steps of this round.

        While others are decoded there is slack: no more are scored at a time than a whole round.
        """
        slack = len(self.round.beams) - num_steps if self.round.open else 0
        return self.speculative.to_score(self.round.submitted, slack, self.judges)

    def note_costs(self, payoff: Payoff, spent: Counters, *, alone: bool) -> None:
        """Tell what the round that is over was like, and alone what it has cost.

        spent: so far, what was decoded and scored ahead included.
        """
        kept = sum([node.usage.get("speculated_kept", 0) for node in self.round.beams])
        payoff.kept, payoff.speculated = payoff.kept + kept, payoff.speculated + kept
        lengths = [len(node.token_ids) for node in self.round.beams if node.token_ids]
        if lengths and alone:
            payoff.note_round(lengths, spent - self.round.began, self.round.num_submits)

    @cached_property
    def traits(self) -> Traits:
        """The strategy's."""
        return traits_of(self.strategy)

    @property
    def scores_early(self) -> bool:
        """True if scores are worth having while other steps of the round are decoded."""
        return (
            bool(self.round.open) and self.traits.foresees_by_score and not self.round.scores_wait
        )

    def prospects(self) -> list[Prospect]:
        """What may be extended: surely, by a child, the steps that nobody judges; what else the
        strategy foresees."""
        ahead = self.speculative.complete()
        sure: dict[Node, Prospect] = {}
        for node in (*self.round.beams, *ahead):
            if self._carries(node) and (not node.speculative or node.parent in sure):
                sure[node] = Prospect(node, 1, node.greedy, math.inf)
        beams = [beam for beam in self.round.beams if beam not in sure]
        likely = foreseen(self.strategy, self.tree, beams, ahead) if beams else []
        return [*sure.values(), *(prospect for prospect in likely if prospect.node not in sure)]

    def save_round(self) -> None:
        """Half a round depends on when the deadline struck, and is no place to resume from."""
        if self.save is not None and not self.cut:
            self.save(self, self.elapsed_s + self._own_s)

    # --- its end -----------------------------------------------------------------------------

    def carried(self) -> list[Node]:
        """Candidates whose step nobody judges. They go on before the round is over, while the
        others wait; but not where a deadline has struck."""
        return [] if self.cut else [n for n in self.tree.candidates() if self._carries(n)]

    def _carries(self, node: Node) -> bool:
        return node.state is NodeState.CANDIDATE and not node.ended and self._unjudged(node)

    def _unjudged(self, node: Node) -> bool:
        """What was submitted is judged: it was asked before."""
        return node not in self.round.submitted and node.answers and not self.judges(node)

    def decide(self) -> list[Action]:
        """A child of each step that nobody judges; where there is none, the strategy's actions. Or
        the end of the search if something stops it."""
        tree, rule = self.tree, self.rule
        for node in tree.candidates():
            if self._unjudged(node):  # its path's, as far as that was judged
                node.score = self.aggregate([step.step_score for step in node.reply()])
        note_answers(self.answers, [node for node in tree.ended() if node.answers])
        whole = not self.cut or (rule is not None and rule.paths_stand_alone)
        actions: list[Action] = [Extend(node, 1, node.greedy) for node in self.carried()]
        if not actions and whole:
            actions = decided(self.strategy, tree, self.rng(tree))
        ends = not self.cut and any(isinstance(action, Finish) for action in actions)
        if rule is None or ends or not tree.root.children:
            return actions
        why = rule.why(tree, self._own_s + self.waited_s, actions, cut=self.cut)
        if why is not None and self.given:
            raise BeamwrightError(f"{why} before all steps were scored")
        self.stopped = why
        return actions if why is None else rule.ending(tree, why, actions)

    def obey(self, action: Action) -> None:
        """Do what the strategy says."""
        tree = self.tree
        match action:
            case Extend(node, children, greedy):
                if node.state is NodeState.CANDIDATE:
                    tree.keep(node)
                begun = self.speculative.taken(node, children, greedy=greedy)
                opened = tree.expand(node, children, greedy=greedy, begun=begun)
                self.round.opened.append(opened)
            case Ask(node, turn):
                token_ids = self.render_turn(node, turn)
                if token_ids is None:
                    tree.finish(node)
                else:
                    tree.keep(node)
                    tree.expand(tree.ask(node, turn, token_ids), 1)
            case Prune(node):
                tree.prune(node)
            case Complete(node):
                tree.finish(node)
            case Finish(reason):
                tree.done = True
                tree.reason_fewer = reason

    @property
    def ended_by_time(self) -> bool:
        """True if the same search may end elsewhere another time: of a deadline, or by a stop of
        the user's own, of which nothing is known."""
        if self.cut or self.stopped is None or self.rule is None:
            return self.cut
        return not self.rule.is_of_the_tree(self.stopped)

    def duplicates(self, mean: float) -> list[tuple[Node, Node, float]]:
        """FlashTTS's DuplicateThenTruncate (Alg. 1): children of which nothing is written, with a
        sibling that has tokens, and the share of these that they begin with, R ~ N(mean, 0.1),
        drawn by lineage, whatever else is drawn."""
        pairs: list[tuple[Node, Node, float]] = []
        for siblings in self.round.opened:
            begun = next((node for node in siblings if node.usage["speculated"]), None)
            if begun is not None:
                for node in [node for node in siblings if not node.usage["speculated"]]:
                    share = Random(f"truncate {node.lineage}").gauss(mean, 0.1)
                    pairs.append((node, begun, min(1.0, max(0.0, share))))
        return pairs

    def report(self, candidates: tuple[Node, ...]) -> RoundReport:
        """What became of these candidates; counts the seconds of those that are final."""
        total_s = self.elapsed_s + self._own_s
        survivors, pruned, finished = (
            tuple(node for node in candidates if node.state is state)
            for state in (NodeState.KEPT, NodeState.PRUNED, NodeState.FINISHED)
        )
        self.finished_s.update(dict.fromkeys(finished, total_s))
        if self.tree.done:
            self.ended_s = total_s
        number = max([self.tree.rounds, *(node.round for node in candidates)])
        return RoundReport(self.tree, number, candidates, survivors, pruned, finished, total_s)
