"""Driving strategies by hand: one round of candidates, and whole searches by chance."""

import random
from functools import partial

from beamwright.engine.engine import Engine
from beamwright.engine.timeline import PhaseTimer
from beamwright.engine.tree_run import TreeRun
from beamwright.protocols import Ask, EndSearch, Extend, FinishPath, Prune
from beamwright.schedule.declare import InGpuSchedule
from beamwright.search import round_rng
from beamwright.sections import SearchSettings
from beamwright.tree import NodeState, StopReason
from beamwright.verify.spec import aggregate
from fakes import add_step, grow, new_tree


def first_round(scores, ended=()):
    """A tree whose root has candidates with these scores; `ended` are those whose path is over."""
    tree = new_tree()
    tree.expand(tree.root, len(scores))
    return tree, write_round(tree, scores, ended)


def write_round(tree, scores, ended=()):
    """Write the open steps, in lineage order, with these scores; returns their nodes."""
    nodes = tree.open_nodes()
    for i, (node, score) in enumerate(zip(nodes, scores, strict=True)):
        stop = StopReason.EOS if i in ended else StopReason.DELIMITER
        add_step(tree, node, f"{i}.", stop=stop)
        node.score = score
    tree.rounds += 1
    return nodes


def obey(tree, actions):
    """Apply actions as the loop does; nothing is judged twice. Returns the reason of EndSearch."""
    judged, reason, prompts = set(), None, []
    for action in actions:
        if isinstance(action, EndSearch):
            tree.done, reason = True, action.reason
            continue
        if isinstance(action, Ask) and action.turn.alone:
            prompts.append((action.turn, tuple(action.turn.text.encode())))
            continue
        assert action.node not in judged
        judged.add(action.node)
        if isinstance(action, FinishPath):
            tree.finish(action.node)
        elif isinstance(action, Prune):
            tree.prune(action.node)
        elif isinstance(action, Extend):
            assert action.children > 0
            if action.node.state is NodeState.CANDIDATE:
                tree.keep(action.node)
            tree.expand(action.node, action.children, greedy=action.greedy)
        elif isinstance(action, Ask):
            tree.keep(action.node)
            tree.expand(tree.ask(action.node, action.turn, (5, 5)), 1)
    tree.ask_alone(prompts)
    return reason


def play(strategy, seed, ends=0.3, check=lambda tree: None):
    """A whole search with scores and ends by chance; `check` sees the tree after each selection."""
    rng, tree = random.Random(seed), new_tree()
    while not tree.done:
        reason = obey(tree, actions_of(strategy, tree))
        check(tree)
        for node in tree.open_nodes():
            stop = StopReason.EOS if rng.random() < ends else StopReason.DELIMITER
            add_step(tree, node, rng.choice("abc"), stop=stop)
            if node.answers:
                node.score = rng.choice([None, rng.random(), -rng.random()])
        tree.rounds += 1
        assert tree.rounds < 200
    return tree, reason


def random_rounds(words, seed, num_rounds, text, problem_id=0, ends=StopReason.DELIMITER):
    """Yield a tree and the candidates of every round; between rounds two survive.

    words: from a random stream to a step's text. ends: how the steps of the last round end.
    """
    rng, tree = random.Random(seed), new_tree(problem_id, text=text)
    survivors = [tree.root]
    for number in range(num_rounds):
        stop = ends if number == num_rounds - 1 else StopReason.DELIMITER
        candidates = []
        for node in survivors:
            texts = [words(rng) for _ in range(3)]
            if stop is StopReason.EOS:
                texts = [text.removesuffix("\n\n") for text in texts]
            candidates += grow(tree, node, texts, stop)
        yield tree, candidates
        survivors = rng.sample(candidates, 2)
        for node in candidates:
            (tree.keep if node in survivors else tree.prune)(node)


def actions_of(strategy, tree):
    """What a strategy decides, with the random stream of this round."""
    return strategy.select(tree, round_rng(strategy.search, tree))


def new_run(tree, **facts):
    """A tree in flight, whose strategy a `Loop` fills in."""
    return TreeRun(tree, None, None, None, **facts)


class Loop:
    """An engine with one strategy for all trees; raises what a tree could not be finished for."""

    def __init__(
        self, executor, strategy, schedule=None, how="last", phase_timer=None, clock=None, **each
    ):
        self._each = {
            "strategy": strategy,
            "aggregate": partial(aggregate, how=how),
            "rng": partial(round_rng, SearchSettings()),
            **each,
        }
        clocks = () if clock is None else (clock,)
        phase_timer = phase_timer or PhaseTimer(*clocks)
        self.engine = Engine(executor, schedule or InGpuSchedule(), phase_timer, *clocks)

    def prepare(self, runs, on_round=None):
        for run in runs:
            for name, value in {**self._each, "on_round": on_round}.items():
                setattr(run, name, value)

    def run(self, runs, on_round=None):
        self.prepare(runs, on_round)
        try:
            for run in runs:
                self.engine.admit(run)
            while self.engine.num_live:
                self.engine.step()
        finally:
            self.engine.abort()
        for run in runs:
            if run.error is not None:
                raise run.error
