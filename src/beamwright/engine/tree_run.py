"""TreeRun: the state of one search in the engine: its tree, its current round, its deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from beamwright.counters import Counters
from beamwright.engine.decisions import (
    StopRule,
    collect_prospects,
    select_actions,
    store_answers,
    unfinished_paths,
)
from beamwright.engine.speculation import Payoff, SpeculativeChildren
from beamwright.errors import BeamwrightError, CapacityError
from beamwright.protocols import (
    Action,
    Answers,
    Ask,
    EndSearch,
    Extend,
    FinishPath,
    Prospect,
    Prune,
    RoundCallback,
    RoundReport,
    Strategy,
    Traits,
    traits_of,
)
from beamwright.search.answers import Mathematics
from beamwright.tree import Node, NodeState, SearchTree, Turn, make_given_path, nodes_on_paths

# Computes a path's score from the scores of its steps; None: the step or path has no score.
Aggregate = Callable[[Sequence[float | None]], float | None]
# Returns the token ids of a user turn after an ended reply; None if they do not fit the context.
RenderTurn = Callable[[Node, Turn], tuple[int, ...] | None]


@dataclass(eq=False)
class RoundState:
    """State of one round of a tree: the steps to decode and score before the next selection."""

    beams: tuple[Node, ...] = ()  # all steps of the round, in the order of their lineages
    open: dict[Node, None] = field(default_factory=dict)  # steps that are not decoded yet
    began: Counters = field(default_factory=Counters)  # the engine's counters at the round's start
    unscored: dict[Node, None] = field(default_factory=dict)  # submitted steps without a score
    submitted: set[Node] = field(default_factory=set)  # steps that were given to the verifier
    early: set[Node] = field(default_factory=set)  # steps submitted while others were decoded
    # True if scoring a step early ran out of memory. All missing scores then wait until every step
    # of the round is decoded.
    defers_scores: bool = False
    num_submits: int = 0  # number of times that steps were given to the verifier
    # Children that selection opened for the next round, one list per parent.
    opened: list[list[Node]] = field(default_factory=list)

    @property
    def is_unfinished(self) -> bool:
        """True while a step of the round is not decoded, or was submitted and has no score."""
        return bool(self.open or self.unscored)

    def postpone_score(self, node: Node, error: BeamwrightError) -> bool:
        """Postpone a step's score to the end of the round, if early scoring ran out of memory.

        Return False, and postpone nothing, for any other failure.
        """
        if not isinstance(error, CapacityError) or node not in self.early:
            return False
        self.early.discard(node)
        self.submitted.discard(node)
        self.unscored.pop(node, None)
        self.defers_scores = True
        return True


@dataclass(eq=False)
class TreeRun:
    """One search in flight: its tree, its policies, and measurements for its result."""

    tree: SearchTree
    strategy: Strategy
    aggregate: Aggregate
    rng: Callable[[SearchTree], Random]  # returns the strategy's random numbers for a round
    # Returns True if a step is given to the verifier. The result must depend on its path alone.
    judges: Callable[[Node], bool] = lambda node: True
    render_turn: RenderTurn = lambda node, turn: None  # for strategies that ask again (`Ask`)
    on_round: RoundCallback | None = None  # called after every selection
    round: RoundState = field(default_factory=RoundState)  # the current round
    clock: Callable[[], float] = time.perf_counter
    elapsed_s: float = 0.0  # seconds that earlier processes spent on a resumed tree
    started_s: float | None = None  # admission to the engine on `clock`; None before
    ended_s: float = 0.0  # seconds from admission to the end of the search
    # Seconds from admission to the end of scoring, per final candidate.
    finished_s: dict[Node, float] = field(default_factory=dict)
    # Per round, the number of distinct tokens above its beams, whose KV the round needs.
    round_tokens: list[int] = field(default_factory=list)
    rule: StopRule | None = None  # deadline, token budget and other reasons to stop early
    answers: Answers = field(default_factory=Mathematics)  # reads the answers of replies
    # Writes a checkpoint, given the seconds spent. Called when a round is scored, before selection.
    save: Callable[[TreeRun, float], None] | None = None
    # Computes the KV of a resumed tree's nodes again. Its second argument is a function that frees
    # KV which no later row reads.
    restore: Callable[[Sequence[Node], Callable[[], None]], None] | None = None
    cut: bool = False  # True if the deadline ended a round before all of it was decoded and scored
    # Key of the fair order: the tree with the smallest value is decoded first. It starts at the
    # largest value of any tree in flight, and grows by the tree's decoded tokens.
    served: int = 0
    priority: int = 0  # trees with a larger one are decoded and scored first
    waited_s: float = 0.0  # seconds before admission that count towards the deadline
    # Children that are decoded before selection decides whether to open them.
    speculative: SpeculativeChildren = field(default_factory=SpeculativeChildren)
    given: bool = False  # True if nothing is decoded: given texts are scored, see `add_given_paths`
    stopped: str | None = None  # reason why `rule` stopped the search early
    error: BeamwrightError | None = None  # reason why the tree could not be finished

    # --- time --------------------------------------------------------------------------------

    @property
    def _own_s(self) -> float:
        """Seconds that this process has spent on the tree."""
        return 0.0 if self.started_s is None else self.clock() - self.started_s

    def is_out_of_time(self, patience_s: float = 0.0) -> bool:
        """Return True if the deadline passed at least `patience_s` seconds ago."""
        spent_s = self._own_s + self.waited_s - patience_s
        return self.rule is not None and self.rule.is_out_of_time(spent_s)

    def is_overdue(self) -> bool:
        """Return True if the deadline passed while steps are open, and some path has a step.

        Without any step there is no result yet, so the tree goes on.
        """
        if self.cut or not self.round.open or not self.is_out_of_time():
            return False
        return bool(self.tree.candidates() or self.tree.finished() or unfinished_paths(self.tree))

    def goodput_tok_s(
        self, nodes: Sequence[Node], answer: Callable[[Node], Node] = lambda leaf: leaf
    ) -> float | None:
        """Return FlashTTS's precise goodput (section 6.1) of these candidates; None without any.

        The goodput is the candidates' mean number of path tokens, divided by the mean seconds from
        admission to the end of their scoring. None also if all steps were given.

        answer: maps a finished leaf to the node of its path that is the candidate.
        """
        ended_s = {answer(leaf): seconds for leaf, seconds in self.finished_s.items()}
        total_s = sum(ended_s.get(node, self.ended_s) for node in nodes)
        if self.given or total_s <= 0:
            return None
        return sum(node.num_path_tokens for node in nodes) / total_s

    # --- a round -----------------------------------------------------------------------------

    def add_given_paths(self, paths: Sequence[Sequence[str]]) -> None:
        """Make the search score these texts instead of decoding, one step of each path per round.

        paths: the step texts of each path. Their nodes are created now. Selection opens them like
            speculative children, which are decoded already.
        """
        self.given = True
        for number, texts in enumerate(paths):
            self.speculative.add_given(make_given_path(self.tree.root, number, texts))

    def begin_round(self, counts: Counters) -> None:
        """Begin a round with the nodes that selection opened.

        Some of them may be decoded already, by speculation.

        counts: the engine's counters now.
        """
        opened = [node for siblings in self.round.opened for node in siblings]
        decoded = [node for node in opened if node.state is NodeState.CANDIDATE]
        beams = sorted([*self.tree.open_nodes(), *decoded], key=lambda node: node.lineage[1:])
        still_open = {node: None for node in beams if node.state is NodeState.OPEN}
        self.round = RoundState(tuple(beams), still_open, counts)
        paths = nodes_on_paths([beam.parent for beam in beams if beam.parent is not None])
        self.round_tokens.append(sum([len(node.token_ids) for node in paths]))

    def take_to_score(self) -> list[Node]:
        """Return the round's decoded steps that the verifier does not have; mark them submitted."""
        now = self.round
        decoded = [n for n in now.beams if n.state is NodeState.CANDIDATE and n.answers]
        new = [node for node in decoded if node not in now.submitted and self.judges(node)]
        now.submitted.update(new)
        if now.open:
            now.early.update(new)
        return new

    def take_children_to_score(self, num_steps: int) -> list[Node]:
        """Return speculative children to score in the same call as `num_steps` steps of this round.

        The call gets no larger than a whole round. Once all steps are decoded, there are none.
        """
        slack = len(self.round.beams) - num_steps if self.round.open else 0
        return self.speculative.take_to_score(self.round.submitted, slack, self.judges)

    def record_payoff(self, payoff: Payoff, counts: Counters, *, alone: bool) -> None:
        """Record in `payoff` what speculation gained in the finished round.

        counts: the engine's counters now; they include speculative decoding and scoring.
        alone: True if no other tree is in flight. Only then is the cost of the round recorded too.
        """
        kept = sum([node.usage.get("speculated_kept", 0) for node in self.round.beams])
        # The tokens of dropped children are added in `Engine._drop_unopenable`.
        payoff.kept, payoff.speculated = payoff.kept + kept, payoff.speculated + kept
        lengths = [len(node.token_ids) for node in self.round.beams if node.token_ids]
        if lengths and alone:
            payoff.record_round(lengths, counts - self.round.began, self.round.num_submits)

    @cached_property
    def traits(self) -> Traits:
        """Properties that the strategy declares, such as whether paths compete."""
        return traits_of(self.strategy)

    @property
    def scores_early(self) -> bool:
        """True if decoded steps are scored at once, because the strategy foresees by scores.

        It holds only while other steps of the round are open.
        """
        return (
            bool(self.round.open) and self.traits.foresees_by_score and not self.round.defers_scores
        )

    def prospects(self) -> list[Prospect]:
        """Return the steps that selection will probably extend, for speculation.

        Steps that no verifier judges surely get one child; they come first. The strategy foresees
        the rest.
        """
        ahead = self.speculative.decoded_children()
        sure: dict[Node, Prospect] = {}
        for node in (*self.round.beams, *ahead):
            if self._continues_unjudged(node) and (not node.speculative or node.parent in sure):
                sure[node] = Prospect(node, 1, node.greedy, math.inf)
        beams = [beam for beam in self.round.beams if beam not in sure]
        likely = collect_prospects(self.strategy, self.tree, beams, ahead) if beams else []
        return [*sure.values(), *(prospect for prospect in likely if prospect.node not in sure)]

    def save_round(self) -> None:
        """Save the tree, unless a deadline cut the round.

        A cut round depends on when the deadline struck, so no search may resume from it.
        """
        if self.save is not None and not self.cut:
            self.save(self, self.elapsed_s + self._own_s)

    # --- selection ---------------------------------------------------------------------------

    def unjudged_candidates(self) -> list[Node]:
        """Return the candidates whose step the verifier does not judge; none after a deadline.

        Each is extended at once by one child, while the other candidates wait for selection.
        """
        return (
            [] if self.cut else [n for n in self.tree.candidates() if self._continues_unjudged(n)]
        )

    def _continues_unjudged(self, node: Node) -> bool:
        return node.state is NodeState.CANDIDATE and not node.ended and self._unjudged(node)

    def _unjudged(self, node: Node) -> bool:
        """Return True if the step belongs to an answer, but is not sent to the verifier."""
        return node not in self.round.submitted and node.answers and not self.judges(node)

    def decide(self) -> list[Action]:
        """Return the actions to apply now, usually those that the strategy selects.

        If steps are unjudged, each of them gets one child instead. If the rule stops the search,
        the actions end it.
        """
        tree, rule = self.tree, self.rule
        for node in tree.candidates():
            if self._unjudged(node):  # its score is the score of the judged steps of its path
                node.score = self.aggregate([step.step_score for step in node.reply()])
        store_answers(self.answers, [node for node in tree.ended() if node.answers])
        whole = not self.cut or (rule is not None and rule.paths_stand_alone)
        actions: list[Action] = [
            Extend(node, 1, node.greedy) for node in self.unjudged_candidates()
        ]
        if not actions and whole:
            actions = select_actions(self.strategy, tree, self.rng(tree))
        ends = not self.cut and any(isinstance(action, EndSearch) for action in actions)
        if rule is None or ends or not tree.root.children:
            return actions
        why = rule.find_reason(tree, self._own_s + self.waited_s, actions, cut=self.cut)
        if why is not None and self.given:
            raise BeamwrightError(
                f"{why} before all steps were scored{'; raise it' * (why == rule.deadline)}"
            )
        self.stopped = why
        return actions if why is None else rule.make_ending(tree, why, actions)

    def apply(self, actions: Sequence[Action]) -> None:
        """Apply actions to the tree. Prompts of their own come last, because they may share nodes.

        A prompt that does not fit the model's context is replaced by the problem's prompt.
        """
        prompts = list[tuple[Turn, tuple[int, ...]]]()
        for action in actions:
            if not isinstance(action, Ask) or not action.turn.alone:
                self._apply(action)
            elif (token_ids := self.render_turn(action.node, action.turn)) is not None:
                prompts.append((action.turn, token_ids))
            else:
                self.tree.expand(action.node, 1)
        self.tree.ask_alone(prompts)

    def _apply(self, action: Action) -> None:
        """Apply one action to the tree."""
        tree = self.tree
        match action:
            case Extend(node, children, greedy):
                if node.state is NodeState.CANDIDATE:
                    tree.keep(node)
                begun = self.speculative.pop_opened(node, children, greedy=greedy)
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
            case FinishPath(node):
                tree.finish(node)
            case EndSearch(reason):
                tree.done = True
                tree.reason_fewer = reason

    @property
    def ended_by_time(self) -> bool:
        """True if another run of the same search could end elsewhere.

        This is so after a deadline, and after a user's stop function, whose inputs are unknown.
        """
        if self.cut or self.stopped is None or self.rule is None:
            return self.cut
        return not self.rule.is_reproducible(self.stopped)

    def copies_from_siblings(self, mean: float) -> list[tuple[Node, Node, float]]:
        """Return (child, sibling, share) for each opened child that copies tokens of a sibling.

        This is FlashTTS's DuplicateThenTruncate (Alg. 1): the child begins with a share (0 to 1) of
        the tokens that were decoded for its sibling. Shares follow R ~ N(`mean`, 0.1), seeded by
        lineage.
        """
        pairs: list[tuple[Node, Node, float]] = []
        for siblings in self.round.opened:
            begun = next((node for node in siblings if node.usage["speculated"]), None)
            if begun is not None:
                for node in [node for node in siblings if not node.usage["speculated"]]:
                    share = Random(f"truncate {node.lineage}").gauss(mean, 0.1)
                    pairs.append((node, begun, min(1.0, max(0.0, share))))
        return pairs

    def report(self, candidates: tuple[Node, ...]) -> RoundReport:
        """Return the report of a selection among these candidates; record when paths finished."""
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
