"""TreeRun: one tree in flight. Its rounds, what waits for whom, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from beamwright.counters import Counters
from beamwright.engine.limits import StopRule, cut_short
from beamwright.engine.obeyed import decided, foreseen
from beamwright.engine.payoff import Payoff
from beamwright.engine.speculation import SpeculativeChildren
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.protocols import (
    Action,
    Ask,
    Complete,
    Extend,
    Finish,
    Prospect,
    Prune,
    RoundCallback,
    RoundReport,
    Strategy,
)
from beamwright.tree import Node, NodeState, SearchTree, Turn

Aggregate = Callable[[Sequence[float | None]], float | None]
# Token ids of a turn behind an ended reply; None where it does not fit the context.
RenderTurn = Callable[[Node, Turn], tuple[int, ...] | None]


@dataclass(eq=False)
class TreeRun:
    """One tree in flight, and what is measured of it.

    strategy, aggregate, rng: how its rounds are decided; render_turn: for strategies that ask
    again. on_round: hears of every round.
    beams: the open steps that this round began with; open: those that are not decoded yet;
    submitted: those that were given to the verifier; unscored: and not scored so far.
    elapsed_s: seconds that earlier processes spent on a tree that is resumed.
    started_s: when this process started with it, on the engine's clock; None until then.
    finished_s: seconds from admission to the end of scoring, per final candidate; ended_s: of all.
    round_tokens: distinct path tokens that each round's beams extend (their KV is needed).
    rule: what may stop the search early.
    save: called when a round is scored and nothing is decided about it yet.
    restore: gives the nodes of a resumed tree their KV back, once it is known which are needed.
    cut: True if the deadline has ended a round before all of it was decoded and scored.
    served: tokens that were decoded for it, from where the others were when it came.
    priority: a larger one is decoded and scored first. waited_s: seconds before it was started
    that its deadline counts.
    speculative: children that selection may open when the round is over.
    began: what was spent when the round began. num_asked: how often the verifier was asked in it.
    error: why the tree could not be finished.
    """

    tree: SearchTree
    strategy: Strategy
    aggregate: Aggregate
    rng: Callable[[SearchTree], Random]
    render_turn: RenderTurn = lambda node, turn: None
    on_round: RoundCallback | None = None
    open: dict[Node, None] = field(default_factory=dict)
    unscored: dict[Node, None] = field(default_factory=dict)
    submitted: set[Node] = field(default_factory=set)
    beams: tuple[Node, ...] = ()
    elapsed_s: float = 0.0
    started_s: float | None = None
    ended_s: float = 0.0
    finished_s: dict[Node, float] = field(default_factory=dict)
    round_tokens: list[int] = field(default_factory=list)
    rule: StopRule | None = None
    save: Callable[[TreeRun, float], None] | None = None
    restore: Callable[[Sequence[Node]], None] | None = None
    cut: bool = False
    served: int = 0
    priority: int = 0
    waited_s: float = 0.0
    speculative: SpeculativeChildren = field(default_factory=SpeculativeChildren)
    began: Counters = field(default_factory=Counters)
    num_asked: int = 0
    error: BeamwrightError | None = None
    _early: set[Node] = field(default_factory=set)
    _put_off: bool = False
    _complete: list[Node] = field(default_factory=list)
    _opened: list[list[Node]] = field(default_factory=list)

    def own_s(self, now: float) -> float:
        """Seconds that this process has spent on the tree."""
        return 0.0 if self.started_s is None else now - self.started_s

    def total_s(self, now: float) -> float:
        """Seconds that all processes have spent on the tree."""
        return self.elapsed_s + self.own_s(now)

    # --- a round -----------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Its open nodes are this round's beams, and those that have their steps already."""
        complete, self._complete, self._opened = self._complete, [], []
        beams = [*self.tree.open_nodes(), *complete]
        self.beams = tuple(sorted(beams, key=lambda node: node.lineage[1:]))
        self.open = {n: None for n in self.beams if n.state is NodeState.OPEN}
        self.submitted, self._early, self._put_off = set(), set(), False
        self.num_asked = 0
        self.round_tokens.append(_distinct_tokens(self.beams))

    def decoded(self) -> tuple[Node, ...]:
        """This round's steps that can be scored, in the order of its beams."""
        return tuple(n for n in self.beams if n.state is NodeState.CANDIDATE and n.answers)

    def to_score(self) -> list[Node]:
        """Those that the verifier was not given yet; they count as given from now on."""
        new = [node for node in self.decoded() if node not in self.submitted]
        self.submitted.update(new)
        if self.open:
            self._early.update(new)
        return new

    def put_off(self, node: Node, error: BeamwrightError) -> bool:
        """True if there was no room for a score before the end of the round, and will be then."""
        if not isinstance(error, CapacityError) or node not in self._early:
            return False
        self._early.discard(node)
        self.submitted.discard(node)
        self.unscored.pop(node, None)
        self._put_off = True
        return True

    def steps_ahead(self, num_steps: int) -> list[Node]:
        """Speculative children that can be scored behind so many steps of this round.

        While others are decoded there is slack: no more are scored at a time than a whole round.
        """
        slack = len(self.beams) - num_steps if self.open else 0
        return self.speculative.to_score(self.submitted, slack)

    def note_costs(self, payoff: Payoff, spent: Counters, *, alone: bool) -> None:
        """Tell what the round that is over was like, and alone what it has cost.

        spent: so far, what was decoded and scored ahead included.
        """
        for node in self.beams:
            payoff.kept += node.usage["speculated_kept"]
            payoff.speculated += node.usage["speculated_kept"]
        lengths = [len(node.token_ids) for node in self.beams if node.token_ids]
        if not lengths:
            return
        if not alone:
            payoff.note_beside(lengths)
            return
        payoff.note_round(lengths, spent - self.began, self.num_asked)

    @property
    def scores_early(self) -> bool:
        """True if scores are worth having while other steps of the round are decoded."""
        foresees = getattr(self.strategy, "foresees_by_score", False)
        return bool(self.open) and foresees and not self._put_off

    def prospects(self) -> list[Prospect]:
        """What the strategy may extend when this round is over."""
        return foreseen(self.strategy, self.tree, self.beams, self.speculative.complete())

    def overdue(self, now: float) -> bool:
        """True if the deadline has passed in decoding and there is something to return.

        A tree without any step goes on.
        """
        tree = self.tree
        return (
            not self.cut
            and bool(self.open)
            and self.out_of_time(now)
            and bool(tree.candidates() or tree.finished() or cut_short(tree))
        )

    def out_of_time(self, now: float) -> bool:
        """True if the deadline has passed."""
        return self.rule is not None and self.rule.out_of_time(self._deadline_s(now))

    def _deadline_s(self, now: float) -> float:
        return self.own_s(now) + self.waited_s

    def save_round(self, now: float) -> None:
        """Half a round depends on when the deadline struck, and is no place to resume from."""
        if self.save is not None and not self.cut:
            self.save(self, self.total_s(now))

    def decide(self, now: float) -> list[Action]:
        """The strategy's actions, or the end of the search if something stops it."""
        tree, rule = self.tree, self.rule
        whole = not self.cut or (rule is not None and rule.paths_stand_alone)
        actions = decided(self.strategy, tree, self.rng(tree)) if whole else []
        ends = not self.cut and any(isinstance(action, Finish) for action in actions)
        if rule is None or ends or tree.rounds == 0:
            return actions
        why = rule.why(tree, self._deadline_s(now), actions, cut=self.cut)
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
                self._complete += [n for n in opened if n.state is NodeState.CANDIDATE]
                self._opened.append(opened)
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

    def duplicates(self) -> list[tuple[Node, Node, float]]:
        """FlashTTS's DuplicateThenTruncate (Alg. 1): children of which nothing is written, with a
        sibling that has tokens, and the share of these that they begin with."""
        found: list[tuple[Node, Node, float]] = []
        for siblings in self._opened:
            begun = next((node for node in siblings if node.usage["speculated"]), None)
            for node in siblings:
                if begun is not None and not node.usage["speculated"]:
                    found.append((node, begun, truncation(node)))
        return found

    def note_ends(self, candidates: Sequence[Node], now: float) -> float:
        """Count the seconds of what has been decided about these; returns those so far."""
        total_s = self.total_s(now)
        for node in candidates:
            if node.state is NodeState.FINISHED:
                self.finished_s[node] = total_s
        if self.tree.done:
            self.ended_s = total_s
        return total_s

    def goodput_tok_s(
        self, nodes: Sequence[Node], answer: Callable[[Node], Node] = lambda leaf: leaf
    ) -> float | None:
        """FlashTTS's precise goodput (6.1): mean path tokens over mean seconds from admission to
        the end of scoring, of these candidates; None without any.

        answer: which node of a finished leaf's path is its candidate.
        """
        ended_s = {answer(leaf): seconds for leaf, seconds in self.finished_s.items()}
        total_s = sum(ended_s.get(node, self.ended_s) for node in nodes)
        return sum(node.num_path_tokens for node in nodes) / total_s if total_s > 0 else None

    def report(self, candidates: tuple[Node, ...], elapsed_s: float) -> RoundReport:
        """What became of these candidates."""

        def in_state(state: NodeState) -> tuple[Node, ...]:
            return tuple(node for node in candidates if node.state is state)

        return RoundReport(
            tree=self.tree,
            round=self.tree.rounds,
            candidates=candidates,
            survivors=in_state(NodeState.KEPT),
            pruned=in_state(NodeState.PRUNED),
            finished=in_state(NodeState.FINISHED),
            elapsed_s=elapsed_s,
        )


def truncation(node: Node, mean: float = 0.85, spread: float = 0.1) -> float:
    """FlashTTS's R ~ N(0.85, 0.1), between 0 and 1: drawn by lineage, whatever else is drawn."""
    drawn = Random(f"truncate {node.lineage}").gauss(mean, spread)
    return min(1.0, max(0.0, drawn))


def _distinct_tokens(beams: Sequence[Node]) -> int:
    """Tokens in the union of the beams' paths, the open steps left out."""
    nodes = {ancestor for beam in beams if beam.parent for ancestor in beam.parent.path()}
    return sum(len(node.token_ids) for node in nodes)
