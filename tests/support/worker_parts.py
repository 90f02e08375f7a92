"""What runs on both sides of a verifier's worker, by a script; whole searches."""

import random
import threading

from beamwright.counters import Counters
from beamwright.engine.executor import Executor, VerifierLane, VerifierWorker
from beamwright.engine.scoring import VerifierCaller
from beamwright.engine.timeline import PhaseTimer
from beamwright.protocols import ScheduleView, StepDecoded, StepWriter
from beamwright.search import make_strategy
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason
from fakes import new_tree
from played import Loop, new_run


class Writer(StepWriter):
    """Decodes up to `most` nodes per iteration, by a script: node -> (stop, score)."""

    running_nodes = frozenset()

    def __init__(self, script=None, most=2):
        self.script, self.most = script or (lambda node: (StopReason.EOS, 0.5)), most
        self.queue, self.released, self.counts = [], [], Counters()

    @property
    def busy(self):
        return bool(self.queue)

    def view(self, beams):
        return ScheduleView(beams)

    def submit(self, plan):
        self.queue = [node for group in plan.groups for node in group]
        self.counts.groups += 1

    def iterate(self):
        done, self.queue = self.queue[: self.most], self.queue[self.most :]
        return [
            StepDecoded(node, (node.depth, 9), (-0.1, -0.2), self.script(node)[0], f"{node.text}.")
            for node in done
        ]

    def cancel(self, nodes):
        self.queue = [node for node in self.queue if node not in nodes]

    def release(self, nodes):
        self.released.extend(nodes)


class Scorer:
    """Scores by a script, once a gate is open; remembers which thread did what."""

    default_aggregate, probabilities, beside_decoding = "last", False, True

    def __init__(self, script=None, opened=0):
        self.script = script or (lambda node: (StopReason.EOS, float(node.lineage[-1])))
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(opened)
        self.scored, self.released, self.threads = [], [], set()
        self.current, self.error = (), None

    def score(self, nodes):
        self.threads.add(threading.current_thread())
        self.current = tuple(nodes)
        self.entered.release()
        self.gate.acquire()
        self.scored.append(tuple(nodes))
        self.current = ()
        if self.error is not None:
            raise self.error
        return [self.script(node)[1] for node in nodes]

    def release(self, nodes):
        read = {n.root for n in self.current} & {n.root for n in nodes}
        assert not read, "freed while it is read"
        self.threads.add(threading.current_thread())
        self.released.extend(nodes)


OPEN = 10_000


def by_lineage(node):
    """Ends and scores that follow from a node's place alone."""
    rng = random.Random(repr(node.lineage))
    return (StopReason.EOS if rng.random() < 0.3 else StopReason.DELIMITER), rng.random()


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "verifier"]


def plain(writer, scorer, phase_timer=None, progress=None):
    lane = VerifierLane(VerifierCaller(scorer, phase_timer or PhaseTimer()), progress)
    return Executor(writer, [lane], progress=progress)


def overlapped(writer, scorer, phase_timer=None, progress=None, **options):
    """options: of the `VerifierWorker`."""
    worker = VerifierWorker(VerifierCaller(scorer, phase_timer or PhaseTimer()), **options)
    return Executor(writer, [worker], progress=progress)


def search(executor, cancels=(), num_trees=9):
    """Grow trees, three at most at a time; those that are cancelled go after so many steps."""
    runs = [new_run(new_tree(i)) for i in range(num_trees)]
    loop = Loop(executor, make_strategy(SearchSettings(n=6, width=3, max_rounds=8)))
    loop.prepare(runs)
    waiting, number = list(runs), 0
    try:
        while waiting or loop.engine.num_live:
            while waiting and loop.engine.num_live < 3:
                loop.engine.admit(waiting.pop(0))
            loop.engine.step()
            number += 1
            for run in runs:
                if (run.tree.root.problem_id, number) in cancels:
                    loop.engine.cancel(run)
    finally:
        loop.engine.abort()
    return runs
